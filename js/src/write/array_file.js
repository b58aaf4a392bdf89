/** Writes array files: safetensors files with checksums. */

import { blockChecksums, BLOCK_BYTES, xxh3 } from "../checksum.js";
import { parseDtype } from "../dtypes.js";
import { FormatFault, InputError } from "../errors.js";
import { decodeHeader } from "../header.js";

/** @typedef {import("../tensor.js").Tensor} Tensor */
/** @typedef {{name: string, parts: Uint8Array[]}} OutFile */
/** @typedef {{name: string, tensor: Tensor}} Named */

const BUFFER_ALIGNMENT = 4096;
const MAX_ALIGNMENT = 64;
const MAX_HEADER_BYTES = 90_000_000;
/** What an entry takes beyond its name, escaped twice, and its shape. */
const ENTRY_BYTES = 200;

/** Splits tensors among files whose headers are short enough. @param {Named[]} tensors @returns {Named[][]} */
export function splitByHeader(tensors, maxHeaderBytes = MAX_HEADER_BYTES) {
  /** @type {Named[][]} */
  const files = [];
  let filled = Infinity;
  for (const one of tensors) {
    const bytes =
      ENTRY_BYTES + 12 * one.name.length + 20 * one.tensor.shape.length + one.tensor.bytes.length / (BLOCK_BYTES / 16);
    if (filled + bytes > maxHeaderBytes) {
      files.push([]);
      filled = 0;
    }
    filled += bytes;
    /** @type {Named[]} */ (files.at(-1)).push(one);
  }
  return files;
}

/**
 * Encodes one array file. Returns its parts, which share memory with the tensors, and its entry in the manifest.
 *
 * @param {string} name
 * @param {Named[]} tensors
 * @returns {{file: OutFile, entry: import("../json.js").Json}}
 */
export function encodeArrayFile(name, tensors) {
  // Aligned tensors come first, so that no holes are needed.
  const sorted = tensors.slice().sort((a, b) => alignmentOf(b.tensor) - alignmentOf(a.tensor));
  const parts = sorted.map((one) => one.tensor.bytes);
  /** @type {[string, string][]} */
  const metadata = [
    ["xxh3", blockChecksums(parts)],
    ["block", String(BLOCK_BYTES)],
    ["format", "treering"],
    ["version", "1"],
  ];
  /** @type {string[]} */
  const entries = [];
  let end = 0;
  for (const { name: path, tensor } of sorted) {
    const dtype = /** @type {import("../dtypes.js").Dtype} */ (parseDtype(tensor.dtype));
    const shape = dtype.isPadded ? [...tensor.shape, dtype.itemBytes] : tensor.shape;
    const data_offsets = [end, (end += tensor.bytes.length)];
    entries.push(`${JSON.stringify(path)}:${JSON.stringify({ dtype: dtype.code, shape, data_offsets })}`);
    if (dtype.code === "U8" && dtype.name !== "uint8") metadata.push([`dtype:${path}`, dtype.name]);
  }
  const described = metadata.map(([key, value]) => `${JSON.stringify(key)}:${JSON.stringify(value)}`).join(",");
  const json = new TextEncoder().encode(`{${[`"__metadata__":{${described}}`, ...entries].join(",")}}`);
  const header = new Uint8Array(Math.ceil((8 + json.length) / BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT).fill(0x20);
  new DataView(header.buffer).setBigUint64(0, BigInt(header.length - 8), true);
  header.set(json, 8);
  try {
    decodeHeader(header, end);
  } catch (error) {
    if (error instanceof FormatFault) throw new InputError(`the tree: ${error.message}`);
    throw error;
  }
  const entry = new Map(Object.entries({ name, size: header.length + end, header: header.length, xxh3: xxh3(header) }));
  return { file: { name, parts: [header, ...parts] }, entry };
}

/** Returns the power of two that divides the size, at most 64. @param {Tensor} tensor @returns {number} */
function alignmentOf({ bytes: { length } }) {
  let power = MAX_ALIGNMENT;
  while (length % power) power /= 2;
  return power;
}
