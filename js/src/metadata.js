/** The user's metadata: JSON that may hold NaNs and infinities. */

import { check, FormatFault } from "./errors.js";
import { list, text, userJson } from "./fields.js";
import { decodeFloat, encodeFloat, Float } from "./float.js";

/** @typedef {import("./json.js").Json} Json */

/**
 * Decodes `metadata`: puts floats where `pointers` say. Raises `FormatFault`.
 *
 * @param {Json} json
 * @param {Json} pointers `metadata_floats`
 * @returns {Json}
 */
export function decodeMetadata(json, pointers) {
  userJson(json, "metadata", false);
  const paths = list(pointers, "metadata_floats").map((pointer) => text(pointer, "metadata_floats"));
  check(new Set(paths).size === paths.length, "metadata_floats", "each pointer once", pointers);
  const top = [json];
  for (const pointer of paths) {
    check(pointer === "" || pointer.startsWith("/"), "metadata_floats", "JSON Pointers", pointer);
    check(!/~(?![01])/.test(pointer), "metadata_floats", "JSON Pointers", pointer);
    const names = [
      "0",
      ...pointer
        .split("/")
        .slice(1)
        .map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~")),
    ];
    let parent = /** @type {Json} */ (top);
    for (const name of names.slice(0, -1)) parent = childOf(parent, name, pointer);
    const last = /** @type {string} */ (names.at(-1));
    const found = childOf(parent, last, pointer);
    check(typeof found === "string", `metadata_floats ${pointer}`, "the text of a float", found);
    const float = decodeFloat(found, `metadata ${pointer}`);
    if (Array.isArray(parent)) parent[Number(last)] = float;
    else /** @type {Map<string, Json>} */ (parent).set(last, float);
  }
  return top[0];
}

/** @param {Json} parent @param {string} name @param {string} pointer @returns {Json} */
function childOf(parent, name, pointer) {
  let child;
  if (parent instanceof Map) child = parent.get(name);
  else if (Array.isArray(parent) && /^(0|[1-9][0-9]*)$/.test(name)) child = parent[Number(name)];
  if (child === undefined) throw new FormatFault(`metadata_floats: expected places in metadata, found ${pointer}`);
  return child;
}

/**
 * Encodes metadata. NaNs and infinities become text, and `pointers` gets their places.
 *
 * @param {Json} json
 * @param {string[]} pointers
 * @param {string} [pointer]
 * @returns {Json}
 */
export function encodeMetadata(json, pointers, pointer = "") {
  if (json instanceof Float) {
    if (!Number.isFinite(json.value)) pointers.push(pointer);
    return encodeFloat(json);
  }
  if (Array.isArray(json)) return json.map((child, at) => encodeMetadata(child, pointers, `${pointer}/${at}`));
  if (!(json instanceof Map)) return json;
  const escaped = (/** @type {string} */ name) => name.replaceAll("~", "~0").replaceAll("/", "~1");
  return new Map(
    Array.from(json, ([key, child]) => [key, encodeMetadata(child, pointers, `${pointer}/${escaped(key)}`)]),
  );
}
