/** The header of an array file: a safetensors header with checksums. */

import { BLOCK_BYTES } from "./checksum.js";
import { check, FormatFault } from "./errors.js";
import { integer, list, object, text, unknownFields } from "./fields.js";
import { parseJson } from "./json.js";

/** @typedef {import("./json.js").Json} Json */

/**
 * @typedef {object} StoredTensor
 * @property {string} code its dtype in safetensors
 * @property {number[]} shape
 * @property {number} begin its first byte in the buffer
 * @property {number} end
 * @property {string | undefined} dtype the dtype of its leaf, if that is recorded
 */
/** @typedef {{tensors: Map<string, StoredTensor>, checksums: string}} Header */

/**
 * Decodes everything that precedes the buffer. Raises `FormatFault`.
 *
 * @param {Uint8Array} bytes
 * @param {number} bufferBytes
 * @returns {Header}
 */
export function decodeHeader(bytes, bufferBytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true);
  check(length === BigInt(bytes.length - 8), "the length of the header", String(bytes.length - 8), length);
  // safetensors allows no blank before the object, and only spaces after it.
  check(bytes[8] === 0x7b, "the header", "`{` at once", bytes[8]);
  const last = bytes.findLastIndex((byte) => byte !== 0x20);
  check(bytes[last] === 0x7d, "the header", "only spaces after `}`", bytes[last]);
  const fields = object(parseJson(bytes.subarray(8, last + 1)), "the header");
  const metadata = object(fields.get("__metadata__"), "__metadata__");
  for (const [key, value] of metadata) text(value, `${key} of __metadata__`);
  expectText(metadata, "format", "treering");
  expectText(metadata, "version", "1");
  check(!metadata.has("requires"), "requires of __metadata__", "no such key", metadata.get("requires"));
  expectText(metadata, "block", String(BLOCK_BYTES));
  const checksums = text(metadata.get("xxh3"), "xxh3 of __metadata__");
  const digits = 16 * Math.ceil(bufferBytes / BLOCK_BYTES);
  check(
    checksums.length === digits && /^[0-9a-f]*$/.test(checksums),
    "xxh3 of __metadata__",
    `${digits} digits`,
    checksums,
  );
  /** @type {Map<string, StoredTensor>} */
  const tensors = new Map();
  for (const [name, row] of fields) {
    if (name !== "__metadata__") tensors.set(name, decodeTensor(name, object(row, name), metadata));
  }
  checkTiling(tensors, bufferBytes);
  return { tensors, checksums };
}

/** @param {Map<string, Json>} metadata @param {string} key @param {string} value */
function expectText(metadata, key, value) {
  check(metadata.get(key) === value, `${key} of __metadata__`, JSON.stringify(value), metadata.get(key));
}

/** @param {string} name @param {Map<string, Json>} fields @param {Map<string, Json>} metadata @returns {StoredTensor} */
function decodeTensor(name, fields, metadata) {
  const code = text(fields.get("dtype"), `${name}: dtype`);
  check(code !== "", `${name}: dtype`, "text that is not empty", code);
  const shape = list(fields.get("shape"), `${name}: shape`).map((axis) => integer(axis, `${name}: shape`));
  const [begin, end] = list(fields.get("data_offsets"), `${name}: data_offsets`, 2).map((at) =>
    integer(at, `${name}: data_offsets`),
  );
  check(begin <= end, `${name}: data_offsets`, "begin and end", [begin, end]);
  unknownFields(fields, ["dtype", "shape", "data_offsets"], name);
  return { code, shape, begin, end, dtype: /** @type {string | undefined} */ (metadata.get(`dtype:${name}`)) };
}

/** Checks that the tensors fill the buffer. @param {Map<string, StoredTensor>} tensors @param {number} bufferBytes */
function checkTiling(tensors, bufferBytes) {
  let at = 0;
  const sorted = Array.from(tensors).sort(([, a], [, b]) => a.begin - b.begin || a.end - b.end);
  for (const [name, { begin, end }] of sorted) {
    if (begin !== at) throw new FormatFault(`${name}: expected a tensor that begins at ${at}, found ${begin}`);
    at = end;
  }
  check(at === bufferBytes, "the tensors", `${bufferBytes} bytes`, at);
}
