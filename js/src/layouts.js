/** How arrays are cut into pieces, and the files that hold these. */

import { check } from "./errors.js";
import { integer, list, object, text, unknownFields } from "./fields.js";

/** @typedef {import("./json.js").Json} Json */

/**
 * @typedef {object} Layout
 * @property {number[][]} cuts for each axis the positions of its cuts, from 0 to its length
 * @property {number[][]} holders for each piece the files that may hold it
 */

/**
 * @typedef {object} Piece a rectangular part of an array
 * @property {string} tensor the name of its tensor
 * @property {number} file the position of its file in the manifest
 * @property {number[]} start its first position along each axis
 * @property {number[]} shape
 */

/** Decodes `layouts`. Raises `FormatFault`. @param {Json} json @param {number[][][]} holders @returns {Layout[]} */
export function decodeLayouts(json, holders) {
  return list(json, "layouts").map((row) => {
    const fields = object(row, "a layout");
    const cuts = list(fields.get("cuts"), "cuts").map(decodeCuts);
    check(cuts.length <= 64, "cuts", "at most 64 axes", cuts.length);
    const held = holders[integer(fields.get("holders"), "the holders of a layout")];
    check(held, "the holders of a layout", `one of ${holders.length}`, fields.get("holders"));
    const pieces = cuts.reduce((count, axis) => count * BigInt(axis.length - 1), 1n);
    check(BigInt(held.length) === pieces, "holders", `one list for each of ${pieces} pieces`, held.length);
    const sharding = fields.get("sharding");
    if (sharding !== undefined) {
      decodeSharding(object(sharding, "a sharding"));
      unknownFields(object(sharding, "a sharding"), ["mesh", "spec"], "a sharding");
    }
    unknownFields(fields, ["cuts", "holders", "sharding"], "a layout");
    return { cuts, holders: held };
  });
}

/** @param {Json} json @returns {number[]} */
function decodeCuts(json) {
  const cuts = list(json, "the cuts of an axis").map((cut) => integer(cut, "a cut"));
  const rises = cuts.every((cut, at) => at === 0 || cut > cuts[at - 1]);
  const isEmpty = cuts.length === 2 && cuts[1] === 0;
  check(
    cuts.length >= 2 && cuts[0] === 0 && (rises || isEmpty),
    "the cuts of an axis",
    "[0, …, n], strictly increasing",
    json,
  );
  return cuts;
}

/** @param {Json} json @param {number} files the number of files @returns {number[][][]} */
export function decodeHolders(json, files) {
  return list(json, "holders").map((pieces) =>
    list(pieces, "holders").map((piece) => {
      const holders = list(piece, "holders of a piece").map((file) => integer(file, "a file of a piece", 0, files - 1));
      check(holders.length, "holders of a piece", "at least one file", piece);
      return holders;
    }),
  );
}

/**
 * Decodes a mesh and a spec. They are information, so the spec may name axes that the mesh lacks.
 *
 * @param {Map<string, Json>} fields
 * @returns {Map<string, number>} the mesh
 */
export function decodeSharding(fields) {
  const mesh = new Map();
  for (const [axis, length] of object(fields.get("mesh"), "a mesh"))
    mesh.set(axis, integer(length, "an axis of a mesh", 1));
  for (const entry of list(fields.get("spec"), "a spec")) {
    if (Array.isArray(entry)) entry.forEach((name) => text(name, "a spec"));
    else if (entry !== null) text(entry, "a spec");
  }
  return mesh;
}

/**
 * Returns a function that lists the pieces of an array. Raises `FormatFault` unless `where` is a file or a layout.
 *
 * @param {Json} where
 * @param {string} path
 * @param {number[]} shape
 * @param {{files: number, layouts: Layout[]}} known
 * @returns {() => Piece[]}
 */
export function decodeWhere(where, path, shape, { files, layouts }) {
  if (!Array.isArray(where)) {
    const file = integer(where, `${path}: its file`, 0, files - 1);
    return () => [{ tensor: fullName(path), file, start: shape.map(() => 0), shape }];
  }
  list(where, `${path}: its place`, 2);
  const number = integer(where[0], `${path}: its layout`);
  const turn = integer(where[1], `${path}: its turn`);
  const layout = layouts[number];
  check(layout, `${path}: its layout`, `one of ${layouts.length}`, number);
  const fits = layout.cuts.length === shape.length && layout.cuts.every((cuts, axis) => cuts.at(-1) === shape[axis]);
  check(fits, `${path}: its layout`, `cuts of the shape [${shape}]`, layout.cuts);
  return () => piecesOf(path, layout, turn);
}

/** @param {string} path @returns {string} */
export function fullName(path) {
  // safetensors forbids this name.
  return path === "__metadata__" ? "__metadata__~@" : path;
}

/** @param {string} path @param {Layout} layout @param {number} turn @returns {Piece[]} */
function piecesOf(path, { cuts, holders }, turn) {
  return holders.map((files, index) => {
    const start = [];
    const shape = [];
    // C order: the last axis runs fastest.
    for (let axis = cuts.length - 1, rest = index; axis >= 0; axis--) {
      const cells = cuts[axis].length - 1;
      const cell = rest % cells;
      rest = (rest - cell) / cells;
      start.unshift(cuts[axis][cell]);
      shape.unshift(cuts[axis][cell + 1] - cuts[axis][cell]);
    }
    const tensor = holders.length === 1 ? fullName(path) : `${path}~@${start.join(",")}`;
    return { tensor, file: files[turn % files.length], start, shape };
  });
}
