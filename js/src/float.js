/** A double as the format writes it. */

import { check } from "./errors.js";

const NAN_BITS = 0x7ff8000000000000n;

/**
 * A float that stays one, though its value is an integer, and keeps the bits of a NaN, which JavaScript may change.
 */
export class Float {
  /** @param {number} value @param {bigint} [bits] the 64 bits of a NaN that is not the usual one */
  constructor(value, bits) {
    this.value = value;
    this.bits = bits;
    Object.freeze(this);
  }

  valueOf() {
    return this.value;
  }

  toJSON() {
    return this.value;
  }
}

/** Decodes a JSON value of the type `float`. @param {unknown} json @param {string} place @returns {Float} */
export function decodeFloat(json, place) {
  if (json instanceof Float) return json;
  if (typeof json === "number" || typeof json === "bigint") {
    check(Number.isFinite(Number(json)), place, "a number that is finite as a double", json);
    return new Float(Number(json));
  }
  if (json === "nan") return new Float(NaN);
  if (json === "inf") return new Float(Infinity);
  if (json === "-inf") return new Float(-Infinity);
  const bits = typeof json === "string" && /^nan:([0-9a-f]{16})$/.exec(json);
  check(bits, place, 'a number, "inf", "-inf", "nan" or "nan:…"', json);
  const number = BigInt(`0x${bits[1]}`);
  const isNan = (number & 0x7ff0000000000000n) === 0x7ff0000000000000n && (number & 0xfffffffffffffn) !== 0n;
  check(isNan && number !== NAN_BITS, place, "the bits of another NaN", json);
  return new Float(NaN, number);
}

/** Encodes a float as a JSON value. @param {Float} float @returns {Float | string} */
export function encodeFloat(float) {
  if (Number.isFinite(float.value)) return float;
  if (!Number.isNaN(float.value)) return float.value > 0 ? "inf" : "-inf";
  return float.bits === undefined ? "nan" : `nan:${float.bits.toString(16).padStart(16, "0")}`;
}

/** Returns the JSON of a finite float: it reads back as a float, not as an integer. @param {number} value @returns {string} */
export function floatJson(value) {
  if (Object.is(value, -0)) return "-0.0";
  const text = String(value);
  return /^-?[0-9]+$/.test(text) ? `${text}.0` : text;
}

/** Returns the name that a float has in paths: that of Python's `repr`. @param {number} value @returns {string} */
export function floatName(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const sign = value < 0 || Object.is(value, -0) ? "-" : "";
  const [digits, power] = Math.abs(value).toExponential().split("e");
  const exponent = Number(power);
  if (exponent >= -4 && exponent <= 15) {
    const figures = digits.replace(".", "");
    if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${figures}`;
    const padded = figures.padEnd(exponent + 1, "0");
    return `${sign}${padded.slice(0, exponent + 1)}.${padded.slice(exponent + 1) || "0"}`;
  }
  return `${sign}${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}
