/** Shapes of arrays. */

import { check } from "./errors.js";
import { integer, list } from "./fields.js";

/** @typedef {import("./dtypes.js").Dtype} Dtype */

const MAX_AXES = 64;

/** Decodes a shape. Raises `FormatFault`. @param {unknown} json @param {Dtype} dtype @param {string} place @returns {number[]} */
export function checkShape(json, dtype, place) {
  const shape = list(json, place).map((length) => integer(length, `${place}: a length`));
  check(shape.length <= MAX_AXES, place, `at most ${MAX_AXES} axes`, shape.length);
  const bytes = shape.reduce((product, length) => product * BigInt(length || 1), BigInt(dtype.itemBytes));
  check(bytes < 2n ** 63n, place, "less than 2^63 bytes, each length 0 counted as 1", shape);
  return shape;
}

/** Returns the number of elements. @param {readonly number[]} shape @returns {number} */
export function countOf(shape) {
  return shape.includes(0) ? 0 : shape.reduce((product, length) => product * length, 1);
}

/** @param {readonly number[]} a @param {readonly number[]} b @returns {boolean} */
export function sameShape(a, b) {
  return a.length === b.length && a.every((length, axis) => length === b[axis]);
}
