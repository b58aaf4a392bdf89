/** What the page shows of a checkpoint, whichever format it has. */

import { parseDtype } from "../../src/dtypes.js";
import { countOf } from "../../src/shapes.js";

/**
 * @typedef {object} Leaf
 * @property {string} path
 * @property {string} what such as `float32[64,64]`, or `int 4000`
 * @property {string} dtype empty if the leaf is no array
 * @property {readonly number[]} shape
 * @property {number} nbytes
 * @property {[string, string][]} facts
 * @property {((slice: any) => Promise<import("../../src/tensor.js").Tensor>) | null} read null if the leaf is no array
 * @property {(() => Promise<unknown>) | null} value null if the leaf is an array
 */
/**
 * @typedef {object} Contents
 * @property {string} place
 * @property {string} format
 * @property {number | undefined} step
 * @property {string} created
 * @property {Record<string, number>} metrics
 * @property {unknown} metadata
 * @property {[string, string][]} facts
 * @property {Leaf[]} leaves
 * @property {string[]} notes what is wrong
 */

/** Returns a text in which every control character and change of direction shows as its number. @param {string} text */
export function printable(text) {
  return text.replace(/[\p{C}\u2028\u2029]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}

/** @param {import("../../src/checkpoint.js").Checkpoint} ckpt @returns {Promise<Contents>} */
export async function checkpointContents(ckpt) {
  const late = ckpt.source.list ? await ckpt.lateMetrics() : { metrics: ckpt.metrics, files: [] };
  const software = Object.entries(ckpt.software).map(([name, version]) => `${name} ${version}`);
  return {
    place: ckpt.source.place,
    format: "treering",
    step: ckpt.step,
    created: ckpt.created,
    metrics: late.metrics,
    metadata: ckpt.metadata,
    facts: [
      ["saved", printable(ckpt.created)],
      ["software", printable(software.join(", "))],
      ["files", String(ckpt.files.length)],
    ],
    leaves: Array.from(ckpt.leaves.values(), leafOf),
    notes: late.files.flatMap(({ error }) => (error ? [error.message] : [])),
  };
}

/** @param {any} leaf @returns {Leaf} */
function leafOf(leaf) {
  if (leaf.kind === "array") {
    const facts = [
      ["type", leaf.type + (leaf.impl ? ` (${leaf.impl})` : "")],
      ["sharding", shardingText(leaf.placement)],
      ["same array as", leaf.tied ?? ""],
      ["stored in", piecesText(leaf)],
    ].filter(([, text]) => text);
    return arrayLeaf(leaf.path, leaf.dtype, leaf.shape, facts, (slice) => leaf.read(slice));
  }
  const isValue = leaf.kind === "value";
  const what = isValue ? `${leaf.type} ${valueText(leaf.value, 60)}`.trim() : "iterator";
  const nbytes = isValue ? 0 : leaf.lengths.reduce((sum, length) => sum + length, 0);
  const value = async () => (await leaf.read()).value;
  return { path: leaf.path, what: printable(what), dtype: "", shape: [], nbytes, facts: [], read: null, value };
}

/** @returns {Leaf} */
export function arrayLeaf(path, dtype, shape, facts, read) {
  const nbytes = countOf(shape) * parseDtype(dtype).itemBytes;
  const shown = facts.map(([name, text]) => [name, printable(text)]);
  return { path, what: `${dtype}[${shape.join(",")}]`, dtype, shape, nbytes, facts: shown, read, value: null };
}

/** Describes a place as the command line does: `P('data', None) on data=8, model=4`. @param {any} place */
function shardingText(place) {
  if (!place) return "";
  const axis = (one) => (one === null ? "None" : Array.isArray(one) ? `(${one.map(axis).join(", ")})` : `'${one}'`);
  const parts = [];
  if (place.mesh) {
    const mesh = Object.entries(place.mesh).map(([name, length]) => `${name}=${length}`);
    parts.push(`P(${place.spec.map(axis).join(", ")}) on ${mesh.join(", ")}`);
  }
  if (place.device !== undefined) parts.push(`device ${place.device}`);
  if (place.memory_kind) parts.push(`in ${place.memory_kind}`);
  if (place.unrecorded) parts.push(`not recorded: ${place.unrecorded}`);
  return parts.join(", ");
}

function piecesText(leaf) {
  const pieces = leaf.row.pieces();
  const files = new Set(pieces.map((piece) => leaf.files[piece.file].entry.name));
  return `${pieces.length === 1 ? "1 piece" : `${pieces.length} pieces`} in ${[...files].slice(0, 4).join(", ")}${files.size > 4 ? ", …" : ""}`;
}

/** Returns a value as text, cut at `most` characters. @param {unknown} value @param {number} most */
export function valueText(value, most) {
  if (value === null || value === undefined) return "";
  const plain = (_, one) =>
    typeof one === "bigint" ? String(one) : one instanceof Uint8Array ? Array.from(one.subarray(0, most)) : one;
  const text = ["string", "number", "bigint", "boolean"].includes(typeof value)
    ? String(value)
    : JSON.stringify(value, plain, most > 200 ? 2 : 0);
  return text.length > most ? `${text.slice(0, most)}…` : text;
}
