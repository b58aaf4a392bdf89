/** Leaves of an open checkpoint. */

import { InputError, show, supported, UnsupportedError } from "./errors.js";
import { MANIFEST } from "./manifest.js";
import { damageOf, readBox } from "./read_box.js";
import { readState } from "./states.js";
import { Tensor } from "./tensor.js";
import { Value } from "./values.js";

/** @typedef {import("./array_file.js").ArrayFile} ArrayFile */
/** @typedef {ReadonlyMap<ArrayFile, ReadonlyMap<number, Error> | Error>} Damage for each file the errors of blocks, or that of the header */
/** @typedef {{start?: readonly number[], stop?: readonly number[]}} Slice positions for each axis, as in `Array.slice` without negative ones */

/** An array that is read when it is used. */
export class ArrayLeaf {
  /**
   * @param {import("./leaf_rows.js").ArrayRow} row
   * @param {readonly ArrayFile[]} files
   * @param {Record<string, unknown>} [placement]
   */
  constructor(row, files, placement) {
    this.kind = /** @type {const} */ ("array");
    this.path = row.path;
    this.type = row.type;
    this.dtype = row.dtype.name;
    this.shape = Object.freeze(row.shape.slice());
    this.impl = row.impl;
    /** The path of an earlier leaf that is the same array. */
    this.tied = row.tied;
    /** Where the array was in the job that saved it, in the fields of the format; undefined if that is not recorded. */
    this.placement = placement;
    this.row = row;
    this.files = files;
  }

  /**
   * Reads the array, or a box of it. Raises `InputError`, `DamagedError` or `UnsupportedError`.
   *
   * @param {Slice} [slice]
   * @returns {Promise<Tensor>}
   */
  async read(slice) {
    const box = boxOf(this, slice);
    checkReadable(this.row);
    return new Tensor(this.dtype, box.shape, await readBox(this.row, this.files, box), this.type, this.impl);
  }

  /** Returns the errors that `read` would meet, or raises one. @param {Damage} damage of the files @returns {Promise<Error[]>} */
  async damage(damage) {
    checkReadable(this.row);
    return damageOf(this.row, this.files, damage);
  }
}

/** The states of a data iterator in an array file. */
export class IteratorLeaf {
  /** @param {import("./leaf_rows.js").ArrayRow} row @param {readonly ArrayFile[]} files */
  constructor(row, files) {
    this.kind = /** @type {const} */ ("iterator");
    this.path = row.path;
    /** The bytes of the state of each process. */
    this.lengths = Object.freeze((row.lengths ?? []).slice());
    this.row = row;
    this.files = files;
  }

  /** Reads the states. Raises `DamagedError` or `UnsupportedError`. @returns {Promise<Value>} */
  async read() {
    const bytes = await readBox(this.row, this.files, { start: [0], shape: this.row.shape });
    let end = 0;
    const name = this.files[this.row.pieces()[0].file].entry.name;
    return supported(name, () => {
      const states = this.lengths.map((length) => readState(bytes.subarray(end, (end += length)), this.path));
      return new Value("iterator", ["each", states]);
    });
  }

  /** Returns the errors that `read` would meet, or raises one. @param {Damage} damage of the files @returns {Promise<Error[]>} */
  async damage(damage) {
    const errors = await damageOf(this.row, this.files, damage);
    // The states may break rules of the format.
    if (!errors.length) await this.read();
    return errors;
  }
}

/** A leaf that is no array; the manifest has it. */
export class ValueLeaf {
  /** @param {import("./leaf_rows.js").ValueRow} row */
  constructor(row) {
    this.kind = /** @type {const} */ ("value");
    this.path = row.path;
    this.type = row.value.type;
    this.content = row.value;
  }

  /** The value in JavaScript. */
  get value() {
    return this.content.value;
  }

  async read() {
    return this.content;
  }

  /** @returns {Promise<Error[]>} */
  async damage() {
    return [];
  }
}

/** @param {import("./leaf_rows.js").ArrayRow} row */
function checkReadable(row) {
  if (!row.requires.length) return;
  const message = `${row.path}: expected no feature that this reader does not know, found ${row.requires}. Read it with a newer release`;
  throw new UnsupportedError(message, { file: MANIFEST });
}

/** @param {ArrayLeaf} leaf @param {Slice} [slice] @returns {import("./boxes.js").Box} */
function boxOf({ path, shape }, slice) {
  const { start = shape.map(() => 0), stop = shape, ...rest } = slice ?? {};
  const odd = Object.keys(rest);
  if (odd.length) throw new InputError(`${path}: expected {start, stop}, found ${odd}`);
  const fits =
    start.length === shape.length &&
    stop.length === shape.length &&
    start.every(
      (at, axis) =>
        Number.isInteger(at) &&
        Number.isInteger(stop[axis]) &&
        at >= 0 &&
        at <= stop[axis] &&
        stop[axis] <= shape[axis],
    );
  if (!fits)
    throw new InputError(
      `${path}: expected start and stop inside the shape [${shape}], found ${show(start)} and ${show(stop)}`,
    );
  return { start: start.slice(), shape: stop.map((end, axis) => end - start[axis]) };
}

/**
 * @param {import("./leaf_rows.js").LeafRow} row
 * @param {readonly ArrayFile[]} files
 * @param {Record<string, unknown>} [placement]
 */
export function leafOf(row, files, placement) {
  if (row.kind === "value") return new ValueLeaf(row);
  return row.lengths ? new IteratorLeaf(row, files) : new ArrayLeaf(row, files, placement);
}
