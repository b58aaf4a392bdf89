/** Keys of containers, and the names that they have in paths. */

import { decodeBase64, encodeBase64 } from "./base64.js";
import { check } from "./errors.js";
import { list } from "./fields.js";
import { decodeFloat, encodeFloat, Float, floatName } from "./float.js";
import { identity } from "./identity.js";
import { decodeInt, encodeInt } from "./simple_values.js";

/** @typedef {import("./json.js").Json} Json */
/** @typedef {import("./types.js").Key} Key */

const MAX_DIGITS = 3000;

/** Decodes a key. Raises `FormatFault`. @param {Json} json @param {boolean} [inTuple] @returns {Key} */
export function decodeKey(json, inTuple = false) {
  if (typeof json === "string" || typeof json === "boolean" || typeof json === "number") return json;
  const [type, value] = list(json, "a key", 2);
  if (type === "float") return decodeFloat(value, "a key");
  if (type === "int" && typeof value === "string") {
    check(value.replace("-", "").length - 2 <= MAX_DIGITS, "a key", `at most ${MAX_DIGITS} hexadecimal digits`, value);
    return decodeInt(value, "a key");
  }
  check(!inTuple && (type === "bytes" || type === "tuple"), "a key", "a type of keys of version 1", json);
  if (type === "bytes") return decodeBase64(value, "a key");
  return list(value, "a key").map((element) => decodeKey(element, true));
}

/** @param {Key} key @returns {Json} */
export function encodeKey(key) {
  if (typeof key === "string" || typeof key === "boolean") return key;
  if (key instanceof Float) return ["float", encodeFloat(key)];
  if (key instanceof Uint8Array) return ["bytes", encodeBase64(key)];
  if (typeof key === "object") return ["tuple", key.map(encodeKey)];
  const json = encodeInt(key);
  return typeof json === "string" ? ["int", json] : json;
}

/** Returns a value that two keys share if and only if they are equal. @param {Key} key @returns {unknown} */
export function keyIdentity(key) {
  return Array.isArray(key) ? identity(key.map(keyIdentity), true) : identity(key);
}

/** Returns the name of a child in paths. @param {Key} key @returns {string} */
export function keyName(key) {
  return rawName(key).replaceAll("~", "~0").replaceAll("/", "~1");
}

/** @param {Key} key @returns {string} */
function rawName(key) {
  if (typeof key === "string") return key;
  if (typeof key === "boolean") return key ? "True" : "False";
  if (key instanceof Float) return floatName(key.value);
  if (key instanceof Uint8Array) return bytesName(key);
  if (typeof key !== "object") return String(key);
  const parts = key.map((part) =>
    typeof part === "string" ? `'${part.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'` : rawName(part),
  );
  return parts.length === 1 ? `(${parts[0]},)` : `(${parts.join(", ")})`;
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** @param {Uint8Array} bytes @returns {string} */
function bytesName(bytes) {
  let name = "";
  for (let at = 0; at < bytes.length;) {
    const length = bytes[at] < 0x80 ? 1 : bytes[at] < 0xe0 ? 2 : bytes[at] < 0xf0 ? 3 : 4;
    try {
      name += utf8.decode(bytes.subarray(at, at + length));
      at += length;
    } catch {
      name += `\\x${bytes[at].toString(16).padStart(2, "0")}`;
      at += 1;
    }
  }
  return name;
}
