/** The difference of two checkpoints. */

import { tensorsOf, toNumbers } from "./chunks.js";

/** @typedef {import("./contents.js").Leaf} Leaf */
/** @typedef {{path: string, a: Leaf | undefined, b: Leaf | undefined, state: "added" | "removed" | "retyped" | "same"}} Pair */

/** Pairs the leaves of two checkpoints by path. `same` means dtype and shape; values are read later. @param {Leaf[]} a @param {Leaf[]} b @returns {Pair[]} */
export function pairs(a, b) {
  const first = new Map(a.map((leaf) => [leaf.path, leaf]));
  const second = new Map(b.map((leaf) => [leaf.path, leaf]));
  return Array.from(new Set([...first.keys(), ...second.keys()]), (path) => {
    const [x, y] = [first.get(path), second.get(path)];
    return { path, a: x, b: y, state: !x ? "added" : !y ? "removed" : isAlike(x, y) ? "same" : "retyped" };
  });
}

function isAlike(x, y) {
  return x.dtype === y.dtype && String(x.shape) === String(y.shape) && !x.read === !y.read;
}

/**
 * Compares the values of two leaves of one dtype and shape: how many elements differ in a bit, and the largest
 * difference of finite numbers, null if there is none.
 *
 * @param {Leaf} a
 * @param {Leaf} b
 * @param {(bytes: number) => void} moved is called after each part; it raises an error to stop
 */
export async function difference(a, b, moved) {
  if (!a.read) {
    const isOther = a.what !== b.what;
    const differing = Number(isOther || JSON.stringify(await a.value(), plain) !== JSON.stringify(await b.value(), plain));
    return { differing, size: 1, largest: null };
  }
  const found = { differing: 0, size: 0, largest: null };
  const others = tensorsOf(b);
  const own = tensorsOf(a);
  for (;;) {
    const [{ value: x, done }, { value: y }] = await Promise.all([own.next(), others.next()]);
    if (done) break;
    const count = x.shape.reduce((product, length) => product * length, 1);
    const itemBytes = x.bytes.length / Math.max(count, 1);
    const [p, q] = Array.isArray(x.data) ? [[], []] : [toNumbers(x), toNumbers(y)];
    for (let n = 0; n < count; n++) {
      if (isEqual(x.bytes, y.bytes, n * itemBytes, itemBytes)) continue;
      found.differing++;
      const by = Math.abs(Number(p[n]) - Number(q[n]));
      if (by - by === 0 && by > (found.largest ?? -1)) found.largest = by;
    }
    found.size += count;
    moved(x.bytes.length);
  }
  return found;
}

function isEqual(x, y, at, length) {
  for (let n = at; n < at + length; n++) if (x[n] !== y[n]) return false;
  return true;
}

const plain = (_, one) =>
  typeof one === "bigint" ? `${one}n` : Number.isNaN(one) || one === Infinity || one === -Infinity ? `${one}` : one;
