/** The rows of `leaves`: what each leaf is, and where its bytes are. */

import { parseDtype } from "./dtypes.js";
import { check, FormatFault, show } from "./errors.js";
import { integer, list, requirements, text, unknownFields } from "./fields.js";
import { decodeWhere } from "./layouts.js";
import { checkShape, sameShape } from "./shapes.js";
import { Value } from "./values.js";

/** @typedef {import("./json.js").Json} Json */
/** @typedef {import("./dtypes.js").Dtype} Dtype */
/** @typedef {import("./layouts.js").Piece} Piece */

/**
 * @typedef {object} ArrayRow
 * @property {"array"} kind
 * @property {string} path
 * @property {import("./tensor.js").ArrayType} type
 * @property {Dtype} dtype
 * @property {number[]} shape
 * @property {string} impl
 * @property {() => Piece[]} pieces
 * @property {string | undefined} tied the path of the leaf that is the same array
 * @property {string[]} requires features that this reader lacks
 * @property {number[] | undefined} lengths the bytes of each state of an iterator
 * @property {() => Part[]} [parts] how the array differs from that of the base
 */
/**
 * @typedef {object} Part a rectangular part of an array
 * @property {import("./boxes.js").Box} box
 * @property {ArrayRow} stored the array of bytes in its files: those of the difference, or of the part as it is
 * @property {Difference | undefined} difference
 */
/**
 * @typedef {object} Difference
 * @property {number} nbytes the bytes that are stored
 * @property {number} count the number of elements that differ
 * @property {number} gap the bytes of each position
 * @property {string} base the checksum of the part in the base
 * @property {string} xxh3 the checksum of the part
 */
/** @typedef {{kind: "value", path: string, value: Value}} ValueRow */
/** @typedef {ArrayRow | ValueRow} LeafRow */
/** @typedef {{files: number, layouts: import("./layouts.js").Layout[], hasBase: boolean, differences?: import("./leaf.js").Differences}} Known */

const TYPES = ["jax", "jax-weak", "numpy", "numpy-scalar", "key"];
const STATES = "iterator-states";

/** Decodes `leaves`. Raises `FormatFault`. @param {Json[]} rows @param {string[]} paths @param {Known} known @returns {LeafRow[]} */
export function decodeLeaves(rows, paths, known) {
  /** @type {Map<string, LeafRow>} */
  const earlier = new Map();
  rows.forEach((row, index) => {
    const path = paths[index];
    const [kind, found] = list(row, "a leaf");
    check(found === path, "the path of a leaf", JSON.stringify(path), found);
    if (kind === "value") earlier.set(path, valueRow(list(row, `${path}: its row`, 4), path));
    else if (kind === "array") earlier.set(path, arrayRow(list(row, `${path}: its row`, 7), path, known, earlier));
    else throw new FormatFault(`${path}: expected "array" or "value", found ${show(kind)}`);
  });
  return Array.from(earlier.values());
}

/** @param {Json[]} row @param {string} path @returns {ValueRow} */
function valueRow(row, path) {
  try {
    return { kind: "value", path, value: new Value(/** @type {any} */ (row[2]), row[3]) };
  } catch (error) {
    if (error instanceof FormatFault) throw new FormatFault(`${path}: ${error.message}`);
    throw error;
  }
}

/** @param {Json[]} row @param {string} path @param {Known} known @param {Map<string, LeafRow>} earlier @returns {ArrayRow} */
function arrayRow(row, path, known, earlier) {
  const type = /** @type {ArrayRow["type"]} */ (text(row[2], `${path}: its type`));
  check(TYPES.includes(type), `${path}: its type`, TYPES.join(", "), type);
  const dtype = parseDtype(row[3]);
  check(dtype, `${path}: its dtype`, "one of version 1", row[3]);
  const shape = checkShape(row[4], dtype, `${path}: its shape`);
  const impl = text(row[5], `${path}: its PRNG`);
  check((impl !== "") === (type === "key"), `${path}: its PRNG`, 'a name for keys, else ""', impl);
  check(type !== "numpy-scalar" || !shape.length, `${path}: its shape`, "no axes of a NumPy scalar", shape);
  const isKeyData = dtype.name === "uint32" && shape.length >= 1;
  check(type !== "key" || isKeyData, `${path}: its dtype and shape`, "uint32 with an axis of words", [row[3], shape]);
  const leaf = { kind: /** @type {const} */ ("array"), path, type, dtype, shape, impl };
  const where = row[6];
  if (typeof where === "string") return tiedRow(leaf, where, earlier);
  if (where instanceof Map) return laterRow(leaf, where, known);
  return { ...leaf, pieces: decodeWhere(where, path, shape, known), tied: undefined, requires: [], lengths: undefined };
}

/** @typedef {Omit<ArrayRow, "pieces" | "tied" | "requires" | "lengths">} Described */
/** @typedef {Required<Pick<ArrayRow, "pieces" | "parts">>} Stored */

/** @param {Described} leaf @param {string} where @param {Map<string, LeafRow>} earlier @returns {ArrayRow} */
function tiedRow(leaf, where, earlier) {
  const same = earlier.get(where);
  const fits =
    same?.kind === "array" &&
    same.tied === undefined &&
    same.lengths === undefined &&
    same.type === leaf.type &&
    same.dtype.name === leaf.dtype.name &&
    same.impl === leaf.impl &&
    sameShape(same.shape, leaf.shape);
  check(fits, `${leaf.path}: its place`, "an earlier array that is the same", where);
  const { pieces, requires, parts } = /** @type {ArrayRow} */ (same);
  return { ...leaf, pieces, tied: where, requires, lengths: undefined, parts };
}

/** @param {Described} leaf @param {Map<string, Json>} where @param {Known} known @returns {ArrayRow} */
function laterRow(leaf, where, known) {
  const place = `${leaf.path}: its place`;
  const requires = requirements(where.get("requires"), place);
  check(requires.length, place, "at least one feature", requires);
  const row = requires.length === 1 && known.differences?.rows.get(requires[0]);
  if (row) return { ...leaf, ...row(leaf, where, known), tied: undefined, requires: [], lengths: undefined };
  if (requires.length > 1 || requires[0] !== STATES) {
    unknownFields(where, ["requires"], place);
    return { ...leaf, pieces: () => [], tied: undefined, requires, lengths: undefined };
  }
  unknownFields(where, ["requires", "lengths", "where"], place);
  const lengths = list(where.get("lengths"), place).map((length) => integer(length, place));
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const fits = leaf.type === "numpy" && leaf.dtype.name === "uint8" && leaf.shape.length === 1;
  check(fits, leaf.path, "states of an iterator in bytes of one axis", leaf.shape);
  check(lengths.length && total === leaf.shape[0], place, `lengths with the sum ${leaf.shape[0]}`, lengths);
  const pieces = decodeWhere(where.get("where") ?? null, leaf.path, leaf.shape, known);
  return { ...leaf, pieces, tied: undefined, requires: [], lengths };
}
