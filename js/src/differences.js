/** Arrays that are stored as their difference to the same leaf of another checkpoint, the base: published weights. */

import { copyPart } from "./boxes.js";
import { xxh3 } from "./checksum.js";
import { openSource } from "./checkpoint.js";
import { parseDtype } from "./dtypes.js";
import { check, DamagedError, NotFoundError, SourceError, UnsupportedError } from "./errors.js";
import { checksum, integer, list, unknownFields } from "./fields.js";
import { decodeWhere } from "./layouts.js";
import { readBox } from "./read_box.js";
import { countOf, sameShape } from "./shapes.js";
import { decompress } from "./vendor/fzstd.js";

/** @typedef {import("./checkpoint.js").Checkpoint} Checkpoint */
/** @typedef {import("./leaf_rows.js").ArrayRow} ArrayRow */
/** @typedef {import("./leaf_rows.js").Difference} Difference */
/** @typedef {import("./leaf_rows.js").Part} Part */
/** @typedef {import("./leaf_rows.js").Described} Described */
/** @typedef {import("./leaf_rows.js").Known} Known */
/** @typedef {import("./leaf_rows.js").Stored} Stored */
/** @typedef {import("./dtypes.js").Dtype} Dtype */
/** @typedef {import("./json.js").Json} Json */
/** @typedef {import("./layouts.js").Piece} Piece */

/** Bases, one from another. */
const MAX_CHAIN = 10_000;
const ZSTD_MAGIC = 0xfd2fb528;

/** @type {WeakMap<Checkpoint, Promise<Checkpoint>>} */
const bases = new WeakMap();

const FIELDS = ["nbytes", "count", "gap", "base", "xxh3"];

/** The option of `open` with which a page reads differences. In Node they are always read. */
export const differences = {
  /**
   * For each feature, decodes where an array is stored. Raises `FormatFault`.
   *
   * @type {Map<string, (leaf: Described, where: Map<string, Json>, known: Known) => Stored>}
   */
  rows: new Map([
    ["differences", inOnePart],
    ["differences-in-parts", inParts],
  ]),

  /**
   * Returns all elements of an array that is stored as a difference.
   *
   * @param {Checkpoint} checkpoint @param {ArrayRow} row
   * @returns {Promise<Uint8Array>}
   */
  async read(checkpoint, row) {
    // From the newest to the one that has the array itself.
    const links = [];
    let [at, found] = [checkpoint, row];
    for (; found.parts; [at, found] = await inBase(at, found, checkpoint)) {
      if (links.length === MAX_CHAIN)
        throw damaged(checkpoint, row.path, `expected at most ${MAX_CHAIN} bases, one from another, found more`);
      links.push({ at, parts: found.parts, files: at.files });
    }
    const bytes = await fromBase(checkpoint, row.path, () => readBox(found, at.files, fullBox(found)));
    for (const { at: one, parts, files } of links.reverse()) {
      for (const part of parts()) {
        const read = () => readBox(part.stored, files, fullBox(part.stored));
        const data = one === checkpoint ? await read() : await fromBase(checkpoint, row.path, read);
        change(checkpoint, row, one, bytes, part, data);
      }
    }
    return bytes;
  },
};

/** @param {Described} leaf @param {Map<string, Json>} where @param {Known} known @returns {Stored} */
function inOnePart(leaf, where, known) {
  const place = `${leaf.path}: its difference`;
  unknownFields(where, ["requires", "where", ...FIELDS], place);
  check(known.hasBase, place, "a base of the checkpoint", undefined);
  const fields = FIELDS.map((name) => where.get(name));
  const difference = differenceOf(fields, place);
  const pieces = decodeWhere(where.get("where") ?? null, leaf.path, [difference.nbytes], known);
  return { pieces, parts: () => [{ box: fullBox(leaf), stored: storedRow(leaf, pieces, difference), difference }] };
}

/** @param {Described} leaf @param {Map<string, Json>} where @param {Known} known @returns {Stored} */
function inParts(leaf, where, known) {
  const place = `${leaf.path}: its parts`;
  unknownFields(where, ["requires", "where", "parts"], place);
  check(known.hasBase, place, "a base of the checkpoint", undefined);
  const layout = list(where.get("where"), place);
  const pieces = decodeWhere(layout, leaf.path, leaf.shape, known);
  const found = list(where.get("parts"), place).map((part) =>
    part === null ? undefined : differenceOf(list(part, place, FIELDS.length), place),
  );
  const { length } = known.layouts[Number(layout[0])].holders;
  check(found.length === length, place, `one for each of ${length} pieces`, found.length);
  const parts = () =>
    pieces().map((piece, n) => {
      const shape = found[n] ? [found[n].nbytes] : piece.shape;
      const own = { ...piece, ...fullBox({ shape }) };
      return { box: piece, stored: storedRow({ ...leaf, shape }, () => [own], found[n]), difference: found[n] };
    });
  return { pieces, parts };
}

/** @param {(Json | undefined)[]} fields @param {string} place @returns {Difference} */
function differenceOf(fields, place) {
  const [nbytes, count, gap] = fields.slice(0, 3).map((number) => integer(number, place));
  check([1, 2, 4, 8].includes(gap), place, "a gap of 1, 2, 4 or 8", gap);
  const [base, xxh3] = fields.slice(3).map((sum) => checksum(sum, place));
  return { nbytes, count, gap, base, xxh3 };
}

/**
 * Returns the row of the bytes of a difference, or of a part that is stored as it is.
 *
 * @param {Described} leaf @param {() => Piece[]} pieces @param {Difference | undefined} difference
 * @returns {ArrayRow}
 */
function storedRow(leaf, pieces, difference) {
  const row = { ...leaf, pieces, tied: undefined, requires: [], lengths: undefined };
  const dtype = /** @type {Dtype} */ (parseDtype("uint8"));
  return difference ? { ...row, type: "numpy", dtype, shape: [difference.nbytes], impl: "" } : row;
}

/**
 * Changes a part of an array.
 *
 * @param {Checkpoint} checkpoint @param {ArrayRow} row @param {Checkpoint} one the one with the difference
 * @param {Uint8Array} bytes of the array @param {Part} part @param {Uint8Array} data what is stored for the part
 */
function change(checkpoint, row, one, bytes, { box, difference }, data) {
  const { path, shape, dtype } = row;
  const full = fullBox(row);
  const isAll = sameShape(box.shape, shape);
  let made = data;
  if (difference) {
    made = isAll ? bytes : new Uint8Array(countOf(box.shape) * dtype.itemBytes);
    if (!isAll) copyPart(box, [full, bytes], [box, made], dtype.itemBytes);
    expectChecksum(checkpoint, path, "the base", difference.base, made);
    const fault = applied(made, data, difference, dtype.itemBytes);
    if (fault) throw damaged(one, path, fault);
    expectChecksum(one, path, "the array", difference.xxh3, made);
    dtype.normalize?.(made);
  }
  if (made !== bytes) copyPart(box, [box, made], [full, bytes], dtype.itemBytes);
}

/**
 * Returns the base of a checkpoint, and the row of an array there.
 *
 * @param {Checkpoint} checkpoint @param {ArrayRow} row @param {Checkpoint} top the one that is read
 * @returns {Promise<[Checkpoint, ArrayRow]>}
 */
async function inBase(checkpoint, row, top) {
  let base = bases.get(checkpoint);
  if (!base) {
    base = openBase(checkpoint);
    bases.set(checkpoint, base);
    // The next read tries again.
    base.catch(() => bases.delete(checkpoint));
  }
  const opened = await fromBase(top, row.path, () => /** @type {Promise<Checkpoint>} */ (base));
  // A leaf that is the same array has no difference of its own.
  const path = row.tied ?? row.path;
  const leaf = opened.leaves.get(path);
  const found = leaf?.kind === "array" ? leaf.row : undefined;
  if (!found || found.dtype.name !== row.dtype.name || !sameShape(found.shape, row.shape))
    throw damaged(top, row.path, `expected the same array in its base ${opened.source.place}, found none`);
  if (found.requires.length)
    throw new UnsupportedError(
      `${path}: expected no feature that this reader does not know, found ${found.requires}. Read it with a newer release`,
      { file: "treering.json" },
    );
  return [opened, found];
}

/** @param {Checkpoint} checkpoint @returns {Promise<Checkpoint>} */
async function openBase({ source, manifest }) {
  const { name, xxh3: expected } = /** @type {{name: string, xxh3: string}} */ (manifest.base);
  if (!source.sibling)
    throw new SourceError(
      `${source.place}: expected a source that has the base ${name} next to the checkpoint, found none. Open a folder or a URL`,
    );
  let opened;
  try {
    opened = await openSource(source.sibling(name, 1), differences);
  } catch (error) {
    if (!(error instanceof NotFoundError)) throw error;
    // A rewind may have archived this checkpoint and not its base.
    opened = await openSource(source.sibling(name, 2), differences);
  }
  if (opened.identity !== expected)
    throw new DamagedError(`${opened.source.place}: expected the checksum ${expected}, found ${opened.identity}`, {
      file: "treering.json",
    });
  return opened;
}

/**
 * Reads something of a base. If that is missing or damaged, so is the array.
 *
 * @template T
 * @param {Checkpoint} top @param {string} path @param {() => Promise<T>} read
 * @returns {Promise<T>}
 */
async function fromBase(top, path, read) {
  try {
    return await read();
  } catch (error) {
    if (!(error instanceof NotFoundError || error instanceof DamagedError)) throw error;
    throw damaged(top, path, `expected its base, found: ${error.message}`, error);
  }
}

/** @param {Checkpoint} checkpoint @param {string} path @param {string} message @param {unknown} [cause] */
function damaged({ source }, path, message, cause) {
  return new DamagedError(`${source.place}: ${path}: ${message}. Restore it from a copy, or take an earlier step`, {
    file: "treering.json",
    cause,
  });
}

/** @param {Checkpoint} checkpoint @param {string} path @param {string} what @param {string} expected @param {Uint8Array} bytes */
function expectChecksum(checkpoint, path, what, expected, bytes) {
  const found = xxh3(bytes);
  if (found !== expected) throw damaged(checkpoint, path, `${what}: expected the checksum ${expected}, found ${found}`);
}

/** @param {{shape: number[]}} array @returns {{start: number[], shape: number[]}} */
function fullBox({ shape }) {
  return { start: shape.map(() => 0), shape };
}

/**
 * Applies a difference to the bytes of an array. Returns what is wrong with it.
 *
 * @param {Uint8Array} bytes @param {Uint8Array} data @param {Difference} difference @param {number} itemBytes
 * @returns {string | undefined}
 */
function applied(bytes, data, { count, gap }, itemBytes) {
  if (!count) return data.length ? `expected no difference, found ${data.length} bytes` : undefined;
  const size = itemBytes % 8 === 0 ? 8 : itemBytes === 4 || itemBytes === 2 ? itemBytes : 1;
  const elements = bytes.length / size;
  if (count > elements) return `expected at most ${elements} elements that differ, found ${count}`;
  const length = count * (gap + size);
  const given = contentSize(data);
  if (given !== length) return `expected a zstd frame of ${length} bytes, found ${given ?? "none"}`;
  let planes;
  try {
    planes = decompress(data, new Uint8Array(length));
  } catch (error) {
    return `expected a zstd frame, found: ${/** @type {Error} */ (error).message}`;
  }
  if (planes.length !== length) return `expected a zstd frame of ${length} bytes, found one of ${planes.length}`;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const steps = planes.subarray(count * gap);
  let place = -1;
  for (let n = 0; n < count; n++) {
    place += 1 + joined(planes, count, n, gap);
    if (place >= elements) return "expected elements of the array, found one beyond it";
    if (size === 8) {
      const high = BigInt(joined(steps.subarray(4 * count), count, n, 4));
      const zigzag = (high << 32n) | BigInt(joined(steps, count, n, 4));
      const step = (zigzag >> 1n) ^ -(zigzag & 1n);
      view.setBigUint64(8 * place, BigInt.asUintN(64, view.getBigUint64(8 * place, true) + step), true);
      continue;
    }
    const zigzag = joined(steps, count, n, size);
    const step = zigzag % 2 ? -(zigzag + 1) / 2 : zigzag / 2;
    if (size === 4) view.setUint32(4 * place, view.getUint32(4 * place, true) + step, true);
    else if (size === 2) view.setUint16(2 * place, view.getUint16(2 * place, true) + step, true);
    else view.setUint8(place, view.getUint8(place) + step);
  }
}

/** Returns a number whose bytes are in planes of `count`. @param {Uint8Array} planes @param {number} count @param {number} n @param {number} size */
function joined(planes, count, n, size) {
  let number = 0;
  for (let byte = size - 1; byte >= 0; byte--) number = number * 256 + planes[byte * count + n];
  return number;
}

/**
 * Returns the size of the content that a zstd frame gives (RFC 8878), or undefined if the bytes are not one frame: the
 * decoder ignores what follows, and a last block that says that another one follows.
 *
 * @param {Uint8Array} data @returns {number | undefined}
 */
function contentSize(data) {
  if (data.length < 6) return undefined;
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const descriptor = data[4];
  const isSingle = (descriptor & 32) !== 0;
  const at = 5 + (isSingle ? 0 : 1) + [0, 1, 2, 4][descriptor & 3];
  const bytes = [isSingle ? 1 : 0, 2, 4, 8][descriptor >> 6];
  if (view.getUint32(0, true) !== ZSTD_MAGIC || descriptor & 8 || !bytes) return undefined;
  let end = at + bytes;
  for (let isLast = false; !isLast;) {
    if (end + 3 > data.length) return undefined;
    const header = data[end] | (data[end + 1] << 8) | (data[end + 2] << 16);
    isLast = (header & 1) !== 0;
    // A block of one repeated byte stores that byte.
    end += 3 + ((header & 6) === 2 ? 1 : header >> 3);
  }
  // A checksum may follow.
  if (end + (descriptor & 4) !== data.length) return undefined;
  if (bytes === 8) return Number(view.getBigUint64(at, true));
  if (bytes === 4) return view.getUint32(at, true);
  return bytes === 2 ? view.getUint16(at, true) + 256 : data[at];
}
