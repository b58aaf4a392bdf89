/** States of data iterators: nested values with types, inline or in an array file. */

import { decodeBase64, encodeBase64 } from "./base64.js";
import { parseDtype } from "./dtypes.js";
import { check, FormatFault } from "./errors.js";
import { integer, list } from "./fields.js";
import { identity } from "./identity.js";
import { parseJson } from "./json.js";
import { checkShape, countOf } from "./shapes.js";
import { decodeSimple } from "./simple_values.js";

/** @typedef {import("./json.js").Json} Json */

const MAX_CONTAINERS = 100;
const CONTAINERS = ["dict", "list", "tuple"];

/**
 * Checks a state `[type, value]`. Raises `FormatFault`.
 *
 * @param {Json} json
 * @param {string} place
 * @param {number} [depth] the containers around it
 */
export function checkState(json, place, depth = 0) {
  const [type, value] = list(json, place, 2);
  check(depth <= MAX_CONTAINERS, place, `at most ${MAX_CONTAINERS} containers around a state`, depth);
  if (type === "list" || type === "tuple") {
    for (const child of list(value, place)) checkState(child, place, depth + 1);
  } else if (type === "dict") checkDict(list(value, place), place, depth + 1);
  else if (type === "array") checkArray(value, place);
  else decodeSimple(type, value, place);
}

/** @param {Json[]} pairs @param {string} place @param {number} depth */
function checkDict(pairs, place, depth) {
  const keys = new Set();
  for (const pair of pairs) {
    const [key, value] = list(pair, place, 2);
    checkState(key, place, depth);
    const same = keyIdentity(key, place);
    check(!keys.has(same), place, "no two equal keys", same);
    keys.add(same);
    checkState(value, place, depth);
  }
}

/** @param {Json} key @param {string} place @returns {unknown} */
function keyIdentity(key, place) {
  const [type, value] = list(key, place, 2);
  check(type !== "array" && type !== "list" && type !== "dict", place, "keys without dicts, lists and arrays", type);
  if (type !== "tuple") return identity(decodeSimple(type, value, place));
  return identity(
    list(value, place).map((child) => keyIdentity(child, place)),
    true,
  );
}

/** @param {Json} json @param {string} place */
function checkArray(json, place) {
  const [isArray, name, shape, elements] = list(json, place, 4);
  check(typeof isArray === "boolean", place, "true or false", isArray);
  const dtype = parseDtype(name);
  check(dtype, place, "a dtype of version 1", name);
  const lengths = checkShape(shape, dtype, place);
  check(isArray || !lengths.length, place, "a scalar without axes", shape);
  const expected = countOf(lengths) * dtype.itemBytes;
  const found = decodeBase64(elements, place).length;
  check(found === expected, place, `${expected} bytes of elements`, found);
}

/**
 * Reads one state from an array file, and returns it as a manifest has it. Raises `FormatFault`.
 *
 * @param {Uint8Array} bytes the length of the JSON, the JSON, and the bytes that belong to it
 * @param {string} place
 * @returns {Json}
 */
export function readState(bytes, place) {
  check(bytes.length >= 8, place, "8 bytes with the length of the JSON", bytes.length);
  const length = new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true);
  check(length <= BigInt(bytes.length - 8), place, `JSON of at most ${bytes.length - 8} bytes`, length);
  let at = 8 + Number(length);
  const state = parseJson(bytes.subarray(8, at));
  const inline = withBytes(state, (json) => {
    const count = integer(json, place);
    check(at + count <= bytes.length, place, "bytes that end within the state", count);
    at += count;
    return encodeBase64(bytes.subarray(at - count, at));
  });
  check(at === bytes.length, place, `a state of ${at} bytes`, bytes.length);
  checkState(inline, place);
  return inline;
}

/**
 * Returns a state whose numbers of bytes are replaced in the order of the JSON. What is no state stays as it is:
 * `checkState` finds it.
 *
 * @param {Json} json
 * @param {(json: Json) => Json} replace
 * @param {number} [depth]
 * @returns {Json}
 */
function withBytes(json, replace, depth = 0) {
  if (depth > MAX_CONTAINERS + 1) throw new FormatFault(`a state: expected at most ${MAX_CONTAINERS} containers`);
  if (!Array.isArray(json) || json.length !== 2) return json;
  const [type, value] = json;
  if (type === "bytes") return [type, replace(value)];
  if (!Array.isArray(value)) return json;
  if (type === "array" && value.length === 4) return [type, [...value.slice(0, 3), replace(value[3])]];
  if (typeof type !== "string" || !CONTAINERS.includes(type)) return json;
  const inner = (/** @type {Json} */ child) => withBytes(child, replace, depth + 1);
  if (type !== "dict") return [type, value.map(inner)];
  return [type, value.map((pair) => (Array.isArray(pair) ? pair.map(inner) : pair))];
}
