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
  const full = sameShape(box.shape, leaf.shape);
  // A piece without elements has a tensor, too, which a complete read checks.
  const wanted = leaf.pieces().filter((piece) => full || !isEmpty(intersection(piece, box)));
  // Headers come first: a shape that no tensor has must not decide how much memory is taken.
  const located = await locate(leaf, files, wanted);
  const bytes = allocate(countOf(box.shape) * leaf.dtype.itemBytes, leaf.path);
  await Promise.all(located.map(({ file, found }) => readPieces(found, file, box, leaf.dtype.itemBytes, bytes)));
  leaf.dtype.normalize?.(bytes);
  return bytes;
}

/**
 * Returns the errors that a read of the leaf would meet, given those of its files: for each the errors of blocks, or one
 * error of the header.
 *
 * @param {ArrayRow} leaf
 * @param {readonly ArrayFile[]} files
 * @param {ReadonlyMap<ArrayFile, ReadonlyMap<number, Error> | Error>} damage
 * @returns {Promise<Error[]>}
 */
export async function damageOf(leaf, files, damage) {
  const pieces = leaf.pieces();
  for (const { file } of pieces) {
    const found = damage.get(files[file]);
    if (found instanceof Error) return [found];
  }
  const errors = [];
  for (const { file, found } of await locate(leaf, files, pieces)) {
    const blocks = /** @type {ReadonlyMap<number, Error>} */ (damage.get(file));
    if (!blocks.size) continue;
    for (const { stored } of found) {
      for (let block = Math.floor(stored.begin / BLOCK_BYTES); block * BLOCK_BYTES < stored.end; block++) {
        const error = blocks.get(block);
        if (error) errors.push(error);
      }
    }
  }
  return errors;
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

/**
 * Finds the tensors of pieces, for each file in its order.
 *
 * @param {ArrayRow} leaf @param {readonly ArrayFile[]} files @param {Piece[]} pieces
 */
function locate(leaf, files, pieces) {
  /** @type {Map<ArrayFile, Piece[]>} */
  const byFile = new Map(pieces.map(({ file }) => [files[file], []]));
  for (const piece of pieces) byFile.get(files[piece.file])?.push(piece);
  return Promise.all(
    Array.from(byFile, async ([file, some]) => {
      const { tensors } = await file.header();
      const found = supported(file.entry.name, () =>
        some.map((piece) => ({ piece, stored: storedTensor(leaf, piece, tensors) })),
      );
      return { file, found: found.sort((a, b) => a.stored.begin - b.stored.begin) };
    }),
  );
}

/**
 * @param {Found[]} found in the order of the file
 * @param {ArrayFile} file
 * @param {Box} box
 * @param {number} itemBytes
 * @param {Uint8Array} bytes
 */
function readPieces(found, file, box, itemBytes, bytes) {
  return file.read(spansOf(found, box, itemBytes), (begin, block) => {
    const end = begin + block.length;
    for (let n = firstAfter(found, begin); n < found.length && found[n].stored.begin < end; n++) {
      const { piece, stored } = found[n];
      for (const run of byteRuns(intersection(piece, box), piece, box, itemBytes, begin - stored.begin)) {
        const at = stored.begin + run.from;
        if (at >= end) break;
        const from = Math.max(at, begin);
        const to = Math.min(at + run.length, end);
        if (from < to) bytes.set(block.subarray(from - begin, to - begin), run.to + from - at);
      }
    }
  });
}

/** Returns the position of the first tensor that ends after `begin`. @param {Found[]} found @param {number} begin */
function firstAfter(found, begin) {
  let low = 0;
  for (let high = found.length; low < high;) {
    const middle = (low + high) >> 1;
    if (found[middle].stored.end > begin) high = middle;
    else low = middle + 1;
  }
  return low;
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
