/** Turns a tree of JavaScript into the nodes and leaves of a manifest. */

import { encodeBase64 } from "../base64.js";
import { dtypeOf } from "../dtypes.js";
import { InputError, show } from "../errors.js";
import { encodeFloat, Float } from "../float.js";
import { keyName } from "../keys.js";
import { encodeInt } from "../simple_values.js";
import { Tensor, tensor } from "../tensor.js";
import { Container, encodeContainer } from "../tree.js";
import { Value } from "../values.js";
import { isPlainObject, numberJson } from "./encode_json.js";

/** @typedef {import("../json.js").Json} Json */
/** @typedef {{path: string, content: Tensor | Value, tied: string | undefined}} FlatLeaf */

/**
 * Flattens a tree. The same tensor or typed array at two places is a tied leaf. Raises `InputError`.
 *
 * @param {unknown} tree
 * @returns {{nodes: Json[], leaves: FlatLeaf[]}}
 */
export function flatten(tree) {
  /** @type {Json[]} */
  const nodes = [];
  /** @type {FlatLeaf[]} */
  const leaves = [];
  /** @type {Map<unknown, string>} */
  const seen = new Map();
  // An explicit stack: trees nest deeper than calls may. The next node is at its end.
  const stack = [{ value: tree, path: "", isTop: true, around: /** @type {unknown[]} */ ([]) }];
  for (let next = stack.pop(); next; next = stack.pop()) {
    const { value, path, isTop, around } = next;
    const node = containerOf(value, path);
    if (!node) {
      const content = leafOf(value, path);
      const tied = content instanceof Tensor ? seen.get(value) : undefined;
      if (content instanceof Tensor && tied === undefined) seen.set(value, path);
      nodes.push(0);
      leaves.push({ path, content, tied });
      continue;
    }
    if (around.includes(value)) throw new InputError(`${path}: expected a tree, found a container inside itself`);
    nodes.push(encodeContainer(node));
    const names = node.keys ? node.keys.map(keyName) : node.children.map((_, at) => String(at));
    const inside = [...around, value];
    for (let at = node.children.length - 1; at >= 0; at--) {
      stack.push({
        value: node.children[at],
        path: isTop ? names[at] : `${path}/${names[at]}`,
        isTop: false,
        around: inside,
      });
    }
  }
  return { nodes, leaves };
}

/** @param {unknown} value @param {string} path @returns {Container | undefined} */
function containerOf(value, path) {
  if (value instanceof Container) {
    const count = value.keys?.length ?? value.children.length;
    if (count !== value.children.length)
      throw new InputError(`${path}: expected ${count} children, found ${value.children.length}`);
    return value;
  }
  if (Array.isArray(value)) return new Container("list", "", null, Array.from(value));
  if (value instanceof Map)
    return new Container(
      "dict",
      "",
      Array.from(value.keys(), (key) => keyOf(key, path)),
      Array.from(value.values()),
    );
  if (!isPlainObject(value)) return undefined;
  // JAX sorts the keys of dicts by code points.
  const keys = Object.keys(/** @type {object} */ (value)).sort(byCodePoints);
  return new Container(
    "dict",
    "",
    keys,
    keys.map((key) => /** @type {any} */ (value)[key]),
  );
}

/** @param {unknown} key @param {string} path @returns {import("../keys.js").Key} */
function keyOf(key, path) {
  if (typeof key === "string" || typeof key === "boolean" || typeof key === "bigint") return key;
  if (key instanceof Float || key instanceof Uint8Array) return key;
  if (typeof key === "number") return numberJson(key);
  if (Array.isArray(key)) return key.map((part) => keyOf(part, path));
  throw new InputError(`${path}: expected a key of text, numbers, bytes or a tuple of them, found ${show(key)}`);
}

/** @param {string} a @param {string} b @returns {number} */
function byCodePoints(a, b) {
  const [left, right] = [Array.from(a), Array.from(b)];
  const at = left.findIndex((point, index) => point !== right[index]);
  if (at < 0) return left.length - right.length;
  return right[at] === undefined
    ? 1
    : /** @type {number} */ (left[at].codePointAt(0)) - /** @type {number} */ (right[at].codePointAt(0));
}

/** @param {unknown} value @param {string} path @returns {Tensor | Value} */
function leafOf(value, path) {
  if (value instanceof Tensor || value instanceof Value) return value;
  if (value === null) return new Value("none", null);
  if (typeof value === "boolean") return new Value("bool", value);
  if (typeof value === "string") return new Value("str", value);
  if (typeof value === "bigint") return new Value("int", encodeInt(value));
  if (value instanceof Float) return new Value("float", encodeFloat(value));
  if (typeof value === "number") {
    const json = numberJson(value);
    return json instanceof Float ? new Value("float", encodeFloat(json)) : new Value("int", json);
  }
  if (dtypeOf(value)) return tensor(value);
  throw new InputError(
    `${path || "the tree"}: expected containers, arrays and values, found ${typeof value} ${show(value)}`,
  );
}

/** Makes a leaf of bytes; a `Uint8Array` alone is an array. @param {Uint8Array} bytes @returns {Value} */
export function bytes(bytes) {
  return new Value("bytes", encodeBase64(bytes));
}
