/** Reads arrays in parts of a few MiB, so that the page stays responsive and needs little memory. */

import { parseDtype } from "../../src/dtypes.js";
import { countOf } from "../../src/shapes.js";

const CHUNK_BYTES = 4 << 20;

/** Lists boxes that cover an array in C order, each with consecutive elements. @param {readonly number[]} shape @param {number} itemBytes */
export function* chunks(shape, itemBytes, chunkBytes = CHUNK_BYTES) {
  if (!countOf(shape)) return;
  if (!shape.length) return yield { start: [], stop: [] };
  // Axes before `axis` are walked one index at a time, and this axis in ranges.
  let axis = 0;
  const below = (from) => shape.slice(from).reduce((product, length) => product * length, itemBytes);
  while (axis < shape.length - 1 && below(axis + 1) > chunkBytes) axis++;
  const step = Math.max(1, Math.floor(chunkBytes / below(axis + 1)));
  const index = new Array(axis).fill(0);
  const rest = shape.slice(axis + 1);
  for (;;) {
    for (let at = 0; at < shape[axis]; at += step) {
      const stop = Math.min(shape[axis], at + step);
      yield { start: [...index, at, ...rest.map(() => 0)], stop: [...index.map((one) => one + 1), stop, ...rest] };
    }
    let turn = axis - 1;
    while (turn >= 0 && ++index[turn] === shape[turn]) index[turn--] = 0;
    if (turn < 0) return;
  }
}

/**
 * Yields the numbers of a leaf in C order: `first` is the number of elements before them. A complex number is its
 * magnitude.
 *
 * @param {import("./contents.js").Leaf} leaf
 */
export async function* numbersOf(leaf) {
  let first = 0;
  for await (const tensor of tensorsOf(leaf)) {
    const numbers = toNumbers(tensor);
    yield { first, numbers };
    first += numbers.length;
  }
}

const BUSY_MS = 20;
let rested = 0;

/** Yields the parts of a leaf in C order. @param {import("./contents.js").Leaf} leaf */
export async function* tensorsOf(leaf) {
  const itemBytes = parseDtype(leaf.dtype)?.itemBytes ?? 1;
  for (const box of chunks(leaf.shape, itemBytes)) {
    yield await leaf.read(box);
    if (performance.now() - rested < BUSY_MS) continue;
    // Input and drawing come first.
    await new Promise((resolve) => setTimeout(resolve));
    rested = performance.now();
  }
}

/** Returns true if the elements are numbers: not texts and not times. @param {string} dtype */
export function isNumeric(dtype) {
  return /^(bool|u?int|b?float|b?complex)/.test(dtype);
}

/** @param {import("../../src/tensor.js").Tensor} tensor @returns {ArrayLike<number>} */
export function toNumbers({ dtype, data }) {
  const isComplex = dtype.includes("complex");
  if (!isComplex && dtype !== "int64" && dtype !== "uint64") return data;
  const numbers = new Float64Array(isComplex ? data.length / 2 : data.length);
  for (let n = 0; n < numbers.length; n++)
    numbers[n] = isComplex ? Math.hypot(data[2 * n], data[2 * n + 1]) : Number(data[n]);
  return numbers;
}
