/** Reads a box of an array: only the blocks that hold it, and each of them once. */

import { byteRuns, intersection, isEmpty } from "./boxes.js";
import { BLOCK_BYTES } from "./checksum.js";
import { FormatFault, InputError, supported } from "./errors.js";
import { countOf, sameShape } from "./shapes.js";

/** @typedef {import("./array_file.js").ArrayFile} ArrayFile */
/** @typedef {import("./boxes.js").Box} Box */
/** @typedef {import("./header.js").StoredTensor} StoredTensor */
/** @typedef {import("./layouts.js").Piece} Piece */
/** @typedef {import("./leaf_rows.js").ArrayRow} ArrayRow */
/** @typedef {{piece: Piece, stored: StoredTensor}} Found */

/**
 * Returns the elements of a box in C order. Raises `DamagedError` or `UnsupportedError`.
 *
 * @param {ArrayRow} leaf
 * @param {readonly ArrayFile[]} files
 * @param {Box} box
 * @returns {Promise<Uint8Array>}
 */
export async function readBox(leaf, files, box) {
  /** @type {Map<number, Piece[]>} */
  const byFile = new Map();
  const full = sameShape(box.shape, leaf.shape);
  for (const piece of leaf.pieces()) {
    // A piece without elements has a tensor, too, which a complete read checks.
    if (!full && isEmpty(intersection(piece, box))) continue;
    const others = byFile.get(piece.file);
    if (others) others.push(piece);
    else byFile.set(piece.file, [piece]);
  }
  // Headers come first: a shape that no tensor has must not decide how much memory is taken.
  const located = await Promise.all(Array.from(byFile, ([file, pieces]) => locate(leaf, files[file], pieces)));
  const bytes = allocate(countOf(box.shape) * leaf.dtype.itemBytes, leaf.path);
  await Promise.all(located.map(({ file, found }) => readPieces(found, file, box, leaf.dtype.itemBytes, bytes)));
  leaf.dtype.normalize?.(bytes);
  return bytes;
}

/** @param {number} length @param {string} path @returns {Uint8Array} */
function allocate(length, path) {
  try {
    return new Uint8Array(length);
  } catch (error) {
    throw new InputError(`${path}: expected an array that fits in memory, found ${length} bytes. Read a part of it`, {
      cause: error,
    });
  }
}

/** Finds the tensors of pieces. @param {ArrayRow} leaf @param {ArrayFile} file @param {Piece[]} pieces */
async function locate(leaf, file, pieces) {
  const { tensors } = await file.header();
  const found = supported(file.entry.name, () =>
    pieces.map((piece) => ({ piece, stored: storedTensor(leaf, piece, tensors) })),
  );
  return { file, found: found.sort((a, b) => a.stored.begin - b.stored.begin) };
}

/**
 * @param {Found[]} found in the order of the file
 * @param {ArrayFile} file
 * @param {Box} box
 * @param {number} itemBytes
 * @param {Uint8Array} bytes
 */
async function readPieces(found, file, box, itemBytes, bytes) {
  const copies = copiesOf(found, box, itemBytes);
  let copy = copies.next();
  // Both are in the order of the file, so that no run is needed again.
  for await (const run of file.blocks(spansOf(found, box, itemBytes))) {
    const end = run.begin + run.bytes.length;
    while (!copy.done && copy.value.from < end) {
      const { from, to, length } = copy.value;
      const part = run.bytes.subarray(from - run.begin, from - run.begin + length);
      bytes.set(part, to);
      if (part.length === length) copy = copies.next();
      else copy.value = { from: from + part.length, to: to + part.length, length: length - part.length };
    }
  }
}

/** Lists what to copy, from positions in the buffer. @param {Found[]} found @param {Box} box @param {number} itemBytes */
function* copiesOf(found, box, itemBytes) {
  for (const { piece, stored } of found) {
    for (const { from, to, length } of byteRuns(intersection(piece, box), piece, box, itemBytes)) {
      yield { from: stored.begin + from, to, length };
    }
  }
}

/** @param {ArrayRow} leaf @param {Piece} piece @param {Map<string, StoredTensor>} tensors @returns {StoredTensor} */
function storedTensor({ dtype }, piece, tensors) {
  const stored = tensors.get(piece.tensor);
  if (!stored) throw new FormatFault(`${piece.tensor}: expected its tensor, found none`);
  const shape = dtype.isPadded ? [...piece.shape, dtype.itemBytes] : piece.shape;
  const recorded = dtype.code === "U8" && dtype.name !== "uint8" ? dtype.name : undefined;
  const size = countOf(piece.shape) * dtype.itemBytes;
  const fits = stored.code === dtype.code && stored.dtype === recorded && sameShape(stored.shape, shape);
  if (!fits || stored.end - stored.begin !== size) {
    const { code, dtype: name, begin, end } = stored;
    const what = `${name ?? code} [${stored.shape}] of ${end - begin} bytes`;
    throw new FormatFault(
      `${piece.tensor}: expected ${recorded ?? dtype.code} [${shape}] of ${size} bytes, found ${what}`,
    );
  }
  return stored;
}

/** Returns the blocks that hold a box: first and last ones, merged. @param {Found[]} found @param {Box} box @param {number} itemBytes */
function spansOf(found, box, itemBytes) {
  /** @type {[number, number][]} */
  const spans = [];
  for (const { from, length } of copiesOf(found, box, itemBytes)) {
    const first = Math.floor(from / BLOCK_BYTES);
    const last = Math.floor((from + length - 1) / BLOCK_BYTES);
    const before = spans.at(-1);
    if (before && first <= before[1] + 1) before[1] = Math.max(before[1], last);
    else spans.push([first, last]);
  }
  return spans;
}
