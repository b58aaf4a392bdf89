/** Writes checkpoints: their files in the order in which they must reach the disk. */

import { InputError, show, TreeringError, FormatFault } from "../errors.js";
import { encodeFloat, Float } from "../float.js";
import { fullName } from "../layouts.js";
import { decodeManifest, MANIFEST } from "../manifest.js";
import { encodeMetadata } from "../metadata.js";
import { seal } from "../sealed.js";
import { Tensor } from "../tensor.js";
import { VERSION } from "../version.js";
import { encodeArrayFile, splitByHeader } from "./array_file.js";
import { encodeJson, isPlainObject, jsonOf } from "./encode_json.js";
import { flatten } from "./flatten.js";

/** @typedef {import("../json.js").Json} Json */
/** @typedef {import("./array_file.js").OutFile} OutFile */
/**
 * @typedef {object} WriteOptions
 * @property {number} [step] an integer from 0
 * @property {Record<string, number | Float> | ReadonlyMap<string, number | Float>} [metrics]
 * @property {unknown} [metadata] JSON, with NaNs and infinities; a number without a fraction is an integer
 */

/**
 * Encodes a checkpoint. Returns its array files, and last its manifest. Raises `InputError` before anything is written.
 *
 * @param {unknown} tree
 * @param {WriteOptions} [options]
 * @returns {OutFile[]}
 */
export function encodeCheckpoint(tree, { step, metrics, metadata, ...rest } = {}) {
  if (Object.keys(rest).length)
    throw new InputError(`write: expected step, metrics and metadata, found ${Object.keys(rest)}`);
  try {
    return encodeFiles(tree, step, metrics, metadata);
  } catch (error) {
    // A `Value`, a key or a text that the format cannot hold.
    if (error instanceof FormatFault) throw new InputError(`write: ${error.message}`, { cause: error });
    throw error;
  }
}

/** @param {unknown} tree @param {unknown} step @param {unknown} metrics @param {unknown} metadata @returns {OutFile[]} */
function encodeFiles(tree, step, metrics, metadata) {
  const { nodes, leaves } = flatten(tree);
  const stored = leaves.flatMap(({ path, content, tied }) =>
    content instanceof Tensor && tied === undefined ? [{ name: fullName(path), tensor: content }] : [],
  );
  const groups = splitByHeader(stored);
  const token = randomToken();
  const files = groups.map((group, at) =>
    encodeArrayFile(`arrays-${token}-${fiveDigits(at)}-of-${fiveDigits(groups.length)}.safetensors`, group),
  );
  const places = new Map(groups.flatMap((group, at) => group.map(({ name }) => [name, at])));
  /** @type {Map<string, Json>} */
  const fields = new Map();
  fields.set("format", "treering").set("version", 1).set("created", new Date().toISOString());
  fields.set("software", new Map([["treering-js", VERSION]]));
  if (step !== undefined) fields.set("step", /** @type {Json} */ (step));
  if (metrics !== undefined) fields.set("metrics", encodeMetrics(metrics));
  if (metadata !== undefined) {
    /** @type {string[]} */
    const pointers = [];
    fields.set("metadata", encodeMetadata(jsonOf(metadata, "metadata"), pointers));
    if (pointers.length) fields.set("metadata_floats", pointers);
  }
  fields.set(
    "files",
    files.map(({ entry }) => entry),
  );
  fields.set("tree", nodes);
  fields.set(
    "leaves",
    leaves.map((leaf) => encodeLeaf(leaf, places)),
  );
  return [...files.map(({ file }) => file), { name: MANIFEST, parts: [sealManifest(encodeJson(fields))] }];
}

/** @param {import("./flatten.js").FlatLeaf} leaf @param {ReadonlyMap<string, number>} places @returns {Json} */
function encodeLeaf({ path, content, tied }, places) {
  if (!(content instanceof Tensor)) return ["value", path, content.type, content.json];
  const { type, dtype, shape, impl } = content;
  return ["array", path, type, dtype, shape.slice(), impl, tied ?? /** @type {number} */ (places.get(fullName(path)))];
}

/** @param {unknown} metrics @returns {Json} */
function encodeMetrics(metrics) {
  const isMap = metrics instanceof Map;
  if (!isMap && !isPlainObject(metrics)) throw new InputError(`metrics: expected an object, found ${show(metrics)}`);
  return new Map(
    Array.from(isMap ? metrics : Object.entries(/** @type {object} */ (metrics)), ([name, value]) => {
      if (typeof value !== "number" && !(value instanceof Float))
        throw new InputError(`metrics ${name}: expected a number, found ${show(value)}`);
      return [name, encodeFloat(typeof value === "number" ? new Float(value) : value)];
    }),
  );
}

/** Seals a manifest, and reads it: what a reader would refuse is not written. @param {string} json @returns {Uint8Array} */
function sealManifest(json) {
  const bytes = seal(json);
  try {
    decodeManifest(bytes);
  } catch (error) {
    if (!(error instanceof TreeringError)) throw error;
    throw new InputError(`write: expected what the format can hold. The reader says: ${error.message}`, {
      cause: error,
    });
  }
  return bytes;
}

/** @param {number} number @returns {string} */
const fiveDigits = (number) => String(number).padStart(5, "0");

/** Returns 6 random hexadecimal digits: no name of an array file is used twice. @returns {string} */
export function randomToken() {
  return Array.from(crypto.getRandomValues(new Uint8Array(3)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
