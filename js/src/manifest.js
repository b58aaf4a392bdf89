/** The manifest: what a checkpoint holds. */

import { check, supported } from "./errors.js";
import { checksum, integer, list, object, requirements, text, unknownFields } from "./fields.js";
import { decodeFloat } from "./float.js";
import { decodeLeaves } from "./leaf_rows.js";
import { decodeHolders, decodeLayouts } from "./layouts.js";
import { decodeMetadata } from "./metadata.js";
import { checkStatic, decodePlacement } from "./placement.js";
import { openSealed } from "./sealed.js";
import { decodeTree } from "./tree.js";

/** @typedef {import("./json.js").Json} Json */
/** @typedef {import("./float.js").Float} Float */
/** @typedef {import("./leaf_rows.js").LeafRow} LeafRow */

export const MANIFEST = "treering.json";
const MAX_HEADER_BYTES = 100_000_008;
const FIELDS = [
  "format",
  "version",
  "requires",
  "created",
  "software",
  "base",
  "step",
  "metrics",
  "metadata",
  "metadata_floats",
  "files",
  "layouts",
  "holders",
  "placement",
  "static",
  "tree",
  "leaves",
];

/**
 * @typedef {object} FileEntry
 * @property {string} name
 * @property {number} size
 * @property {number} header the bytes before the tensors
 * @property {string} xxh3 the checksum of these bytes
 * @property {string[]} requires names of features; not empty if the file cannot be read
 */

/**
 * Decodes a manifest. Raises `DamagedError` or `UnsupportedError`.
 *
 * @param {Uint8Array} bytes @param {import("./leaf.js").Differences} [differences]
 */
export function decodeManifest(bytes, differences) {
  const fields = openSealed(MANIFEST, bytes, { format: "treering" });
  return supported(MANIFEST, () => decodeFields(fields, differences));
}

/** @param {Map<string, Json>} fields @param {import("./leaf.js").Differences} [differences] */
function decodeFields(fields, differences) {
  /** @type {<T>(name: string, read: (json: Json) => T) => T | undefined} */
  const optional = (name, read) => (fields.has(name) ? read(/** @type {Json} */ (fields.get(name))) : undefined);
  unknownFields(fields, FIELDS, "the field");
  const created = decodeTime(fields.get("created"));
  /** @type {Map<string, string>} */
  const software = new Map();
  for (const [name, version] of object(fields.get("software"), "software"))
    software.set(name, text(version, "software"));
  const base = optional("base", decodeBase);
  const step = optional("step", (json) => integer(json, "step"));
  const metrics = optional("metrics", decodeMetrics);
  const hasMetadata = fields.has("metadata");
  const pointers = fields.get("metadata_floats");
  const metadata = decodeMetadata(fields.get("metadata") ?? null, pointers === undefined ? [] : pointers);
  const files = decodeFiles(fields.get("files"));
  const holders = optional("holders", (json) => decodeHolders(json, files.length)) ?? [];
  const layouts = optional("layouts", (json) => decodeLayouts(json, holders)) ?? [];
  const rows = list(fields.get("leaves"), "leaves");
  const tree = fields.get("tree") ?? null;
  const { paths } = decodeTree(tree, rows.length);
  const leaves = decodeLeaves(rows, paths, { files: files.length, layouts, hasBase: base !== undefined, differences });
  const places = optional("placement", (json) => decodePlacement(json, rows.length)) ?? [];
  optional("static", checkStatic);
  return { created, software, base, step, metrics, metadata, hasMetadata, files, tree, leaves, places };
}

const TIME = /^(\d{4})-(\d\d)-(\d\d)T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$/;

/** @param {Json | undefined} json @returns {string} */
function decodeTime(json) {
  const found = typeof json === "string" ? TIME.exec(json) : null;
  check(found, "created", "YYYY-MM-DDThh:mm:ss, a fraction, and Z or an offset", json);
  const [year, month, day] = found.slice(1, 4).map(Number);
  const date = new Date(Date.UTC(year, month - 1, day));
  const isReal = date.getUTCMonth() === month - 1 && date.getUTCDate() === day;
  check(isReal && year >= 1970 && year <= 9998, "created", "a day from 1970 to 9998", json);
  return found[0];
}

/** Decodes metrics. Raises `FormatFault`. @param {Json | undefined} json @returns {Map<string, Float>} */
export function decodeMetrics(json) {
  const metrics = new Map();
  for (const [name, value] of object(json, "metrics")) metrics.set(name, decodeFloat(value, `the metric ${name}`));
  return metrics;
}

/** Decodes the base, to whose arrays this checkpoint stores differences. @param {Json} json */
function decodeBase(json) {
  const fields = object(json, "base");
  return {
    name: decodeName(fields.get("name"), "the name of the base"),
    xxh3: checksum(fields.get("xxh3"), "the checksum of the base"),
  };
}

/** @param {Json | undefined} json @param {string} place */
function decodeName(json, place) {
  const name = text(json, place);
  const bytes = new TextEncoder().encode(name).length;
  const isName = bytes >= 1 && bytes <= 255 && !/[/\\\0]/.test(name) && ![".", "..", MANIFEST].includes(name);
  check(isName, place, "1 to 255 bytes without /, \\ and NUL", name);
  return name;
}

/** @param {Json | undefined} json @returns {FileEntry[]} */
function decodeFiles(json) {
  const names = new Set();
  return list(json, "files").map((row) => {
    const fields = object(row, "an entry of files");
    const name = decodeName(fields.get("name"), "the name of a file");
    check(!names.has(name), "the name of a file", "each name once", name);
    names.add(name);
    const size = integer(fields.get("size"), `the size of ${name}`);
    const requires = fields.has("requires") ? requirements(fields.get("requires"), `requires of ${name}`) : [];
    unknownFields(fields, ["name", "size", "header", "xxh3", "requires"], `a field of ${name}`);
    if (requires.length) {
      checkLater(fields, name);
      return { name, size, header: 0, xxh3: "", requires };
    }
    const header = integer(fields.get("header"), `the header of ${name}`, 8, Math.min(size, MAX_HEADER_BYTES));
    return { name, size, header, xxh3: checksum(fields.get("xxh3"), `the checksum of ${name}`), requires };
  });
}

/** Checks the types that the fields of an entry keep, though their meaning may be another. @param {Map<string, Json>} fields @param {string} name */
function checkLater(fields, name) {
  const header = fields.get("header");
  const sum = fields.get("xxh3");
  if (header !== undefined) integer(header, `the header of ${name}`, -(2 ** 53));
  if (sum !== undefined) text(sum, `the checksum of ${name}`);
}
