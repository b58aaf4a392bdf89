/** Floats of 16 bits and fewer, which JavaScript has no typed arrays for. They are exact in a `Float32Array`. */

import { InputError } from "./errors.js";

/**
 * The bits of a float: `exponent` and `mantissa` bits after the sign, the exponent's `bias`, and the codes that are not
 * finite. `ieee` reserves the greatest exponent for infinities and NaNs; `fn` has one NaN of either sign, all bits set;
 * `fnuz` has one NaN at the place of -0; `finite` has neither infinities nor NaNs; `unsigned` has one NaN and no zero.
 *
 * @typedef {{exponent: number, mantissa: number, bias: number, kind: "ieee" | "fn" | "fnuz" | "finite" | "unsigned"}} Bits
 */

/** @param {number} exponent @param {number} mantissa @param {number} bias @param {Bits["kind"]} kind @returns {Bits} */
const bits = (exponent, mantissa, bias, kind) => ({ exponent, mantissa, bias, kind });

/** @type {Record<string, Bits>} */
export const MINIFLOATS = {
  float16: bits(5, 10, 15, "ieee"),
  bfloat16: bits(8, 7, 127, "ieee"),
  float8_e3m4: bits(3, 4, 3, "ieee"),
  float8_e4m3: bits(4, 3, 7, "ieee"),
  float8_e5m2: bits(5, 2, 15, "ieee"),
  float8_e4m3fn: bits(4, 3, 7, "fn"),
  float8_e4m3fnuz: bits(4, 3, 8, "fnuz"),
  float8_e4m3b11fnuz: bits(4, 3, 11, "fnuz"),
  float8_e5m2fnuz: bits(5, 2, 16, "fnuz"),
  float8_e8m0fnu: bits(8, 0, 127, "unsigned"),
  float6_e2m3fn: bits(2, 3, 1, "finite"),
  float6_e3m2fn: bits(3, 2, 3, "finite"),
  float4_e2m1fn: bits(2, 1, 1, "finite"),
};

/** @type {Map<string, Float32Array>} */
const tables = new Map();

/** Returns the value of each code. @param {string} name @returns {Float32Array} */
export function tableOf(name) {
  const known = tables.get(name);
  if (known) return known;
  const format = MINIFLOATS[name];
  const signs = format.kind === "unsigned" ? 0 : 1;
  const table = Float32Array.from({ length: 2 ** (signs + format.exponent + format.mantissa) }, (_, code) =>
    valueOf(code, format),
  );
  tables.set(name, table);
  return table;
}

/** @param {number} code @param {Bits} format @returns {number} */
function valueOf(code, { exponent, mantissa, bias, kind }) {
  const magnitudes = 2 ** (exponent + mantissa);
  if (kind === "unsigned") return code === magnitudes - 1 ? NaN : 2 ** (code - bias);
  if (kind === "fnuz" && code === magnitudes) return NaN;
  const sign = code >= magnitudes ? -1 : 1;
  const magnitude = code % magnitudes;
  const power = Math.floor(magnitude / 2 ** mantissa);
  const fraction = (magnitude % 2 ** mantissa) / 2 ** mantissa;
  if (kind === "fn" && magnitude === magnitudes - 1) return NaN;
  if (kind === "ieee" && power === 2 ** exponent - 1) return fraction ? NaN : sign * Infinity;
  return sign * (power ? (1 + fraction) * 2 ** (power - bias) : fraction * 2 ** (1 - bias));
}

/**
 * Returns the codes of numbers, rounded to nearest, ties to even. Numbers beyond the range become infinities. Raises
 * `InputError` if the dtype has no code for a number.
 *
 * @param {string} name
 * @param {ArrayLike<number>} numbers
 * @returns {Uint8Array | Uint16Array}
 */
export function encodeMinifloats(name, numbers) {
  const table = tableOf(name);
  const kind = MINIFLOATS[name].kind;
  const half = kind === "unsigned" ? table.length : table.length / 2;
  const nan = table.findIndex(Number.isNaN);
  let last = half - 1;
  while (!Number.isFinite(table[last])) last -= 1;
  const codes = table.length > 256 ? new Uint16Array(numbers.length) : new Uint8Array(numbers.length);
  for (let at = 0; at < numbers.length; at++) {
    const number = numbers[at];
    const magnitude = Math.abs(number);
    const negative = number < 0 || Object.is(number, -0);
    const code = Number.isNaN(number) ? nan : nearest(table, last, magnitude, kind);
    const unsuited = code < 0 || (kind === "unsigned" && (negative || magnitude === 0));
    if (unsuited)
      throw new InputError(
        `dtype ${name}: expected numbers up to ${table[last]} that it has, found ${number}. Choose another dtype`,
      );
    // The place of -0 is that of NaN where there is no -0.
    codes[at] = negative && !(kind === "fnuz" && code === 0) ? code + half : code;
  }
  return codes;
}

/**
 * Returns the code of the nearest number, or -1. A tie goes to the even mantissa; one without bits is always odd, because
 * its leading 1 is not stored.
 *
 * @param {Float32Array} table
 * @param {number} last
 * @param {number} magnitude
 * @param {Bits["kind"]} kind
 * @returns {number}
 */
function nearest(table, last, magnitude, kind) {
  if (magnitude > table[last]) {
    const beyond = 2 * magnitude - 2 * table[last] >= table[last] - table[last - 1];
    return !beyond ? last : kind === "ieee" ? last + 1 : -1;
  }
  let low = 0;
  let high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (table[middle] <= magnitude) low = middle;
    else high = middle;
  }
  const below = magnitude - table[low];
  const above = table[high] - magnitude;
  const isDown = below < above || (below === above && kind !== "unsigned" && low % 2 === 0);
  return isDown ? low : high;
}
