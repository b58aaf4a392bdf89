/** Leaves that are no arrays: their types, and their JSON. */

import { check } from "./errors.js";
import { list, text } from "./fields.js";
import { Float } from "./float.js";
import { decodeSimple } from "./simple_values.js";
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
