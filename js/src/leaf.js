/** Leaves of an open checkpoint. */

import { copyPart } from "./boxes.js";
import { InputError, show, supported, UnsupportedError } from "./errors.js";
import { MANIFEST } from "./manifest.js";
import { damageOf, readBox } from "./read_box.js";
import { countOf } from "./shapes.js";
import { readState } from "./states.js";
import { Tensor } from "./tensor.js";
import { Value } from "./values.js";

/** @typedef {import("./array_file.js").ArrayFile} ArrayFile */
/** @typedef {import("./checkpoint.js").Checkpoint} Owner */
/** @typedef {typeof import("./differences.js").differences} Differences */
/** @typedef {ReadonlyMap<ArrayFile, ReadonlyMap<number, Error> | Error>} Damage for each file the errors of blocks, or that of the header */
/** @typedef {{start?: readonly number[], stop?: readonly number[]}} Slice positions for each axis, as in `Array.slice` without negative ones */

/** An array that is read when it is used. */
export class ArrayLeaf {
  /**
   * @param {import("./leaf_rows.js").ArrayRow} row
   * @param {Owner} checkpoint
   * @param {Record<string, unknown>} [placement]
   */
  constructor(row, checkpoint, placement) {
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
    this.checkpoint = checkpoint;
    this.files = checkpoint.files;
    /** @type {WeakRef<Uint8Array> | undefined} */
    this.made = undefined;
  }

  /**
   * Reads the array, or a box of it. Raises `InputError`, `DamagedError` or `UnsupportedError`.
   *
   * @param {Slice} [slice]
   * @returns {Promise<Tensor>}
   */
  async read(slice) {
    const box = boxOf(this, slice);
    checkReadable(this);
    const bytes = await (this.row.parts ? this.difference(box) : readBox(this.row, this.files, box));
    return new Tensor(this.dtype, box.shape, bytes, this.type, this.impl);
  }

  /** Returns the errors that `read` would meet, or raises one. @param {Damage} damage of the files @returns {Promise<Error[]>} */
  async damage(damage) {
    checkReadable(this);
    if (!this.row.parts) return damageOf(this.row, this.files, damage);
    const found = await Promise.all(this.row.parts().map(({ stored }) => damageOf(stored, this.files, damage)));
    const errors = Array.from(new Set(found.flat()));
    if (!errors.length) await this.make();
    return errors;
  }

  /** Returns all elements of an array that is stored as a difference. */
  make() {
    const { differences } = this.checkpoint;
    return /** @type {Differences} */ (differences).read(this.checkpoint, this.row);
  }

  /** Reads a box of an array that is stored as a difference. @param {import("./boxes.js").Box} box */
  async difference(box) {
    // The viewer reads an array box by box. Otherwise each box would make all of it again.
    const all = this.made?.deref() ?? (await this.make());
    this.made = new WeakRef(all);
    const { shape, dtype } = this.row;
    const bytes = new Uint8Array(countOf(box.shape) * dtype.itemBytes);
    const full = { start: shape.map(() => 0), shape };
    copyPart(box, [full, all], [box, bytes], dtype.itemBytes);
    return bytes;
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

/** @param {ArrayLeaf} leaf */
function checkReadable({ path, row: { requires }, checkpoint }) {
  if (!requires.length) return;
  const message =
    requires[0].startsWith("differences") && !checkpoint.differences
      ? `${path}: expected an array without a base, found differences. Read it in Node, or with the option \`differences\` of \`open\``
      : `${path}: expected no feature that this reader does not know, found ${requires}. Read it with a newer release`;
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
 * @param {Owner} checkpoint
 * @param {Record<string, unknown>} [placement]
 */
export function leafOf(row, checkpoint, placement) {
  if (row.kind === "value") return new ValueLeaf(row);
  return row.lengths ? new IteratorLeaf(row, checkpoint.files) : new ArrayLeaf(row, checkpoint, placement);
}
