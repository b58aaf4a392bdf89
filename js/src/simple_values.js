/** The JSON of simple values: those that leaves, keys and states of iterators have. */

import { decodeBase64 } from "./base64.js";
import { check, FormatFault } from "./errors.js";
import { list, text } from "./fields.js";
import { decodeFloat } from "./float.js";
import { MAX_INTEGER } from "./json.js";

/** @typedef {import("./json.js").Json} Json */

/** Decodes an integer. @param {Json} json @param {string} place @returns {number | bigint} */
export function decodeInt(json, place) {
  if (typeof json === "number") return json;
  const digits = typeof json === "string" && /^(-?)(0x[1-9a-f][0-9a-f]*)$/.exec(json);
  check(digits, place, "an integer from -2^53 to 2^53, or hexadecimal digits beyond", json);
  const size = BigInt(digits[2]);
  check(size > BigInt(MAX_INTEGER), place, "hexadecimal digits only beyond 2^53", json);
  return digits[1] ? -size : size;
}

/** @param {number | bigint} number @returns {Json} */
export function encodeInt(number) {
  const exact = BigInt(number);
  const size = exact < 0n ? -exact : exact;
  if (size <= BigInt(MAX_INTEGER)) return Number(exact);
  return `${exact < 0n ? "-" : ""}0x${size.toString(16)}`;
}

/** @type {Record<string, (json: Json, place: string) => unknown>} */
const SIMPLE = {
  bool(json, place) {
    check(typeof json === "boolean", place, "true or false", json);
    return json;
  },
  int: decodeInt,
  float: decodeFloat,
  complex: (json, place) => list(json, place, 2).map((part) => decodeFloat(part, place)),
  str: text,
  bytes: decodeBase64,
  none(json, place) {
    check(json === null, place, "null", json);
    return null;
  },
};

/**
 * Decodes the value of a type that iterator states have, too. Raises `FormatFault`.
 *
 * @param {Json} type
 * @param {Json} json
 * @param {string} place
 */
export function decodeSimple(type, json, place) {
  if (typeof type !== "string" || !Object.hasOwn(SIMPLE, type)) {
    throw new FormatFault(`${place}: expected a type of values of version 1, found ${JSON.stringify(String(type))}`);
  }
  return SIMPLE[type](json, place);
}
