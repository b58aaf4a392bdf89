/** Equality of keys, which is Python's: numbers are equal when their values are, whatever their types. */

import { Float } from "./float.js";

/**
 * Returns a value that two keys share if and only if they are equal.
 *
 * @param {unknown} key a decoded key or value, or the identities of a tuple's elements
 * @param {boolean} [isTuple]
 * @returns {unknown}
 */
export function identity(key, isTuple = false) {
  if (isTuple) {
    const parts = /** @type {unknown[]} */ (key);
    // A NaN equals nothing, and neither does a tuple with one.
    const nan = parts.find((part) => typeof part === "symbol");
    return nan ?? `tuple:${JSON.stringify(parts)}`;
  }
  if (Array.isArray(key)) return complexIdentity(key[0].value, key[1].value);
  if (key instanceof Float) return numberIdentity(key.value);
  if (typeof key === "number" || typeof key === "bigint") return `number:${BigInt(key)}`;
  if (typeof key === "boolean") return `number:${Number(key)}`;
  if (key instanceof Uint8Array) return `bytes:${key}`;
  return key === null ? "none" : `text:${key}`;
}

/** @param {number} value @returns {unknown} */
function numberIdentity(value) {
  if (Number.isNaN(value)) return Symbol("nan");
  return Number.isInteger(value) ? `number:${BigInt(value)}` : `number:${value}`;
}

/** @param {number} real @param {number} imaginary @returns {unknown} */
function complexIdentity(real, imaginary) {
  if (Number.isNaN(real) || Number.isNaN(imaginary)) return Symbol("nan");
  if (imaginary === 0) return numberIdentity(real);
  return `complex:${real === 0 ? 0 : real},${imaginary}`;
}
