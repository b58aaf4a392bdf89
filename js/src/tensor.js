/** Arrays in memory. */

import { dtypeOf, parseDtype } from "./dtypes.js";
import { InputError, show } from "./errors.js";
import { countOf } from "./shapes.js";

/** @typedef {"jax" | "jax-weak" | "numpy" | "numpy-scalar" | "key"} ArrayType */

/** An array with its dtype, in C order. */
export class Tensor {
  /**
   * @param {string} dtype
   * @param {readonly number[]} shape
   * @param {Uint8Array} bytes the elements as the format stores them
   * @param {ArrayType} [type]
   * @param {string} [impl] the implementation of PRNG keys; empty for other types
   */
  constructor(dtype, shape, bytes, type = "numpy", impl = "") {
    const known = parseDtype(dtype);
    if (!known) throw new InputError(`dtype: expected one of the format page, found ${show(dtype)}`);
    const expected = countOf(shape) * known.itemBytes;
    if (bytes.length !== expected) {
      throw new InputError(`shape ${show(shape)} of ${dtype}: expected ${expected} bytes, found ${bytes.length}`);
    }
    this.dtype = dtype;
    this.shape = shape;
    this.bytes = bytes;
    this.type = type;
    this.impl = impl;
    /** @type {import("./dtypes.js").Numbers | string[] | Uint8Array[] | undefined} */
    this.decoded = undefined;
  }

  /** The elements in JavaScript: a typed array of the README's table, or a list of strings or bytes. */
  get data() {
    this.decoded ??= /** @type {import("./dtypes.js").Dtype} */ (parseDtype(this.dtype)).decode(this.bytes);
    return this.decoded;
  }
}

/**
 * Makes an array. Raises `InputError` if `data` does not fit the dtype or the shape.
 *
 * @param {any} data a typed array as `Tensor.data` has it; floats of 16 bits and fewer also from a list of numbers
 * @param {{dtype?: string, shape?: readonly number[], type?: ArrayType, impl?: string}} [options] by default the dtype
 *   of the typed array, and one axis
 * @returns {Tensor}
 */
export function tensor(data, { dtype = dtypeOf(data), shape, type, impl } = {}) {
  const known = parseDtype(dtype);
  if (!known) throw new InputError(`dtype: expected one of the format page, found ${show(dtype)}. Pass \`dtype\``);
  const bytes = known.encode(data);
  if (known.normalize) {
    const clean = bytes.slice();
    known.normalize(clean);
    const odd = clean.findIndex((byte, at) => byte !== bytes[at]);
    if (odd >= 0) throw new InputError(`dtype ${dtype}: expected numbers that it has, found ${data[odd]} at ${odd}`);
  }
  return new Tensor(known.name, shape ?? [data.length / known.perElement], bytes, type, impl);
}
