/** Writes the JSON of the format. */

import { InputError, show } from "../errors.js";
import { Float, floatJson } from "../float.js";
import { MAX_INTEGER } from "../json.js";

/** @typedef {import("../json.js").Json} Json */

/** Returns the text of a JSON value. @param {Json} json @returns {string} */
export function encodeJson(json) {
  if (json instanceof Float) return floatJson(json.value);
  if (Array.isArray(json)) return `[${json.map(encodeJson).join(",")}]`;
  if (json instanceof Map)
    return `{${Array.from(json, ([key, value]) => `${JSON.stringify(key)}:${encodeJson(value)}`).join(",")}}`;
  return typeof json === "bigint" ? String(json) : JSON.stringify(json);
}

/**
 * Returns the JSON value of plain values. A number without a fraction is an integer. Raises `InputError`.
 *
 * @param {unknown} value
 * @param {string} place
 * @returns {Json}
 */
export function jsonOf(value, place) {
  if (value === null || typeof value === "boolean" || typeof value === "string" || typeof value === "bigint")
    return value;
  if (value instanceof Float) return value;
  if (typeof value === "number") return numberJson(value);
  if (Array.isArray(value)) return Array.from(value, (child, at) => jsonOf(child, `${place}/${at}`));
  if (value instanceof Map || isPlainObject(value)) {
    const entries = Array.from(value instanceof Map ? value : Object.entries(/** @type {object} */ (value)));
    return new Map(entries.map(([key, child]) => [key, jsonOf(child, `${place}/${key}`)]));
  }
  throw new InputError(`${place}: expected JSON, found ${typeof value} ${show(value)}`);
}

/** @param {number} value @returns {number | Float} */
export function numberJson(value) {
  const isInteger = Number.isInteger(value) && Math.abs(value) < MAX_INTEGER && !Object.is(value, -0);
  return isInteger ? value : new Float(value);
}

/** @param {unknown} value @returns {boolean} */
export function isPlainObject(value) {
  if (typeof value !== "object" || value === null) return false;
  const prototype = Object.getPrototypeOf(value);
  return (prototype === Object.prototype || prototype === null) && !Object.getOwnPropertySymbols(value).length;
}
