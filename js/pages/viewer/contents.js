/** What the page shows of a checkpoint, whichever format it has. */

import { parseDtype } from "../../src/dtypes.js";
import { countOf } from "../../src/shapes.js";
import { Value } from "../../src/values.js";
import { printable } from "../parts/elements.js";
import { bytes } from "../parts/numbers.js";

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
 * @property {number | null} created in seconds
 * @property {number} nbytes on the disk
 * @property {Record<string, number | string>} metrics
 * @property {unknown} metadata
 * @property {[string, string][]} facts
 * @property {Leaf[]} leaves
 * @property {string[]} notes what is wrong
 */

/**
 * @param {import("../../src/checkpoint.js").Checkpoint} ckpt
 * @param {number} manifestBytes
 * @returns {Promise<Contents>}
 */
export async function checkpointContents(ckpt, manifestBytes) {
  const late = ckpt.source.list ? await ckpt.lateMetrics() : { metrics: ckpt.metrics, files: [] };
  const software = Object.entries(ckpt.software).map(([name, version]) => `${name} ${version}`);
  return {
    place: ckpt.source.place,
    format: "treering",
    step: ckpt.step,
    created: Date.parse(ckpt.created) / 1000,
    nbytes: ckpt.files.reduce((sum, { entry }) => sum + entry.size, manifestBytes),
    metrics: late.metrics,
    metadata: ckpt.metadata,
    facts: [
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
    const shown = arrayLeaf(leaf.path, leaf.dtype, leaf.shape, facts, (slice) => leaf.read(slice));
    return leaf.type === "key" ? { ...shown, what: `key<${leaf.impl}>[${leaf.shape.slice(0, -1)}]` } : shown;
  }
  const isValue = leaf.kind === "value";
  const nbytes = isValue ? 0 : leaf.lengths.reduce((sum, length) => sum + length, 0);
  const what = isValue ? valueWords(leaf) : `iterator ${bytes(nbytes)}`;
  const value = async () => (await leaf.read()).value;
  return { path: leaf.path, what: printable(what), dtype: "", shape: [], nbytes, facts: [], read: null, value };
}

const MAX_VALUE = 60;

/** Describes a value in the words of the command line: `int 5`, `str 'a'`, `none`. @param {any} leaf */
function valueWords({ type, content }) {
  if (type === "none" || type === "function") return type;
  const text = type === "iterator" ? `[${content.json[1].map((state) => python(...state)).join(", ")}]` : python(type, content.json);
  return `${type} ${text.length > MAX_VALUE ? `${text.slice(0, MAX_VALUE - 1)}…` : text}`;
}

/** Writes a value as Python does. @param {string} type @param {any} json as the format writes it @returns {string} */
function python(type, json) {
  if (Object.hasOwn(WRITERS, type)) return WRITERS[type](json);
  const value = /** @type {any} */ (new Value(/** @type {any} */ (type), json).value);
  if (type === "bool") return value ? "True" : "False";
  if (type === "none") return "None";
  if (type === "float") return pythonFloat(value);
  if (type === "complex") return pythonComplex(value);
  if (type === "bytes") return `b'${Array.from(value.subarray(0, MAX_VALUE), byteText).join("")}'`;
  return type === "str" ? quoted(value) : String(value);
}

const byteText = (one) => (one > 31 && one < 127 ? String.fromCharCode(one) : codeText(one));

/** @type {Record<string, (json: any) => string>} */
const WRITERS = {
  list: (items) => `[${items.map((one) => python(...one)).join(", ")}]`,
  tuple: (items) => `(${items.map((one) => python(...one)).join(", ")}${items.length === 1 ? "," : ""})`,
  dict: (items) => `{${items.map(([key, one]) => `${python(...key)}: ${python(...one)}`).join(", ")}}`,
  array: ([, dtype, shape]) => `array(${dtype}[${shape}])`,
};

const ESCAPES = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function quoted(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = text.replace(/[\\\p{C}\u2028\u2029]/gu, (one) => ESCAPES[one] ?? codeText(one.codePointAt(0))).replaceAll(quote, `\\${quote}`);
  return `${quote}${escaped}${quote}`;
}

function codeText(code) {
  const digits = code.toString(16);
  return code < 256 ? `\\x${digits.padStart(2, "0")}` : code < 65536 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

function pythonComplex([real, imaginary]) {
  const text = (part) => pythonFloat(part).replace(/\.0$/, "");
  if (Object.is(real, 0)) return `${text(imaginary)}j`;
  return `(${text(real)}${/^-/.test(pythonFloat(imaginary)) ? "" : "+"}${text(imaginary)}j)`;
}

function pythonFloat(value) {
  if (!Number.isFinite(value)) return String(value).toLowerCase().replace("infinity", "inf");
  if (Object.is(value, -0)) return "-0.0";
  const isPlain = value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e16);
  if (isPlain) return Number.isInteger(value) ? `${value}.0` : String(value);
  return value.toExponential().replace(/e([+-])(\d)$/, "e$10$2");
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
