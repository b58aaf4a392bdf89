/** Leaves that are no arrays: their types, and their JSON. */

import { decodeBase64 } from "./base64.js";
import { check, FormatFault } from "./errors.js";
import { list, text } from "./fields.js";
import { decodeFloat, Float } from "./float.js";
import { MAX_INTEGER } from "./json.js";
import { checkState } from "./states.js";

/** @typedef {import("./json.js").Json} Json */
/** @typedef {"bool" | "int" | "float" | "complex" | "str" | "bytes" | "none" | "function" | "iterator"} ValueType */

/** A value with its type. */
export class Value {
  /** @param {ValueType} type @param {Json} json the value as the format writes it */
  constructor(type, json) {
    this.type = type;
    this.json = json;
    /** @type {unknown} */
    this.exact = decodeValue(type, json, type);
    Object.freeze(this);
  }

  /**
   * The value in JavaScript: `null`, a boolean, text, a number, a bigint beyond 2^53, `[real, imaginary]`, a
   * `Uint8Array`, or for iterators `{scope, states}` with states as on the format page.
   */
  get value() {
    if (this.exact instanceof Float) return this.exact.value;
    if (this.type === "complex") return /** @type {Float[]} */ (this.exact).map((part) => part.value);
    return this.exact;
  }
}

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

/** @param {Json} type @param {Json} json @param {string} place @returns {unknown} */
function decodeValue(type, json, place) {
  if (type === "function") return text(json, place);
  if (type !== "iterator") return decodeSimple(type, json, place);
  const [scope, states] = list(json, place, 2);
  check(scope === "each" || scope === "all", place, '"each" or "all"', scope);
  const count = list(states, place).length;
  check(count === 1 || (count > 1 && scope === "each"), place, 'states: one for "all", at least one for "each"', count);
  for (const state of list(states, place)) checkState(state, place);
  return { scope, states };
}
