/** Checks of JSON values that many fields share. Each raises `FormatFault`. */

import { check } from "./errors.js";
import { Float } from "./float.js";

/** @typedef {import("./json.js").Json} Json */

/** @param {unknown} json @param {string} place @param {number} [least] @param {number} [most] @returns {number} */
export function integer(json, place, least = 0, most = 2 ** 53) {
  check(typeof json === "number" && json >= least && json <= most, place, `an integer from ${least} to ${most}`, json);
  return /** @type {number} */ (json);
}

/** @param {unknown} json @param {string} place @returns {string} */
export function text(json, place) {
  check(typeof json === "string", place, "text", json);
  return json;
}

/** @param {unknown} json @param {string} place @param {number} [length] @returns {Json[]} */
export function list(json, place, length) {
  check(Array.isArray(json), place, "a list", json);
  check(length === undefined || json.length === length, place, `${length} elements`, json);
  return json;
}

/** @param {unknown} json @param {string} place @returns {Map<string, Json>} */
export function object(json, place) {
  check(json instanceof Map, place, "an object", json);
  return json;
}

/** @param {unknown} json @param {string} place @returns {string} */
export function checksum(json, place) {
  check(typeof json === "string" && /^[0-9a-f]{16}$/.test(json), place, "16 lowercase hexadecimal digits", json);
  return json;
}

/** Reads names of features. @param {unknown} json @param {string} place @returns {string[]} */
export function requirements(json, place) {
  return list(json, place).map((name) => text(name, place));
}

/**
 * Checks JSON of the user: at most 200 nested objects and lists. Integers have 64 bits, or any number of them in fields
 * that this reader does not know.
 *
 * @param {Json} json
 * @param {string} place
 * @param {boolean} anyInteger
 * @param {number} [depth] the number of objects and lists around it
 */
export function userJson(json, place, anyInteger, depth = 0) {
  if (Array.isArray(json) || json instanceof Map) {
    check(depth < 200, place, "at most 200 nested objects and lists", undefined);
    for (const child of json.values()) userJson(child, place, anyInteger, depth + 1);
  } else if (typeof json === "bigint" && !anyInteger) {
    check(json >= -(2n ** 63n) && json < 2n ** 64n, place, "integers from -2^63 to 2^64 - 1", json);
  }
}

/**
 * Checks the fields that this reader ignores.
 *
 * @param {Map<string, Json>} fields
 * @param {Iterable<string>} known
 * @param {string} place
 */
export function unknownFields(fields, known, place) {
  const names = new Set(known);
  for (const [name, json] of fields) if (!names.has(name)) userJson(json, `${place} ${name}`, true);
}

/**
 * Returns plain values: objects, lists, text, numbers, and bigints beyond 2^53.
 *
 * @param {Json} json
 * @returns {unknown}
 */
export function plain(json) {
  if (json instanceof Float) return json.value;
  if (Array.isArray(json)) return json.map(plain);
  if (json instanceof Map) return Object.fromEntries(Array.from(json, ([key, value]) => [key, plain(value)]));
  return json;
}
