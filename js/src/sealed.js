/** Sealed files: JSON objects that end in the checksum of what precedes it. */

import { xxh3 } from "./checksum.js";
import { check, DamagedError, supported } from "./errors.js";
import { object } from "./fields.js";
import { parseJson } from "./json.js";

/** @typedef {import("./json.js").Json} Json */

const TAIL_BYTES = 28;
const ascii = new TextDecoder("latin1");
const utf8 = new TextEncoder();

/**
 * Checks the seal and what no version changes, and returns the fields without `xxh3`. Raises `DamagedError` if the seal
 * does not fit, and `UnsupportedError` if another version wrote the file.
 *
 * @param {string} file
 * @param {Uint8Array} bytes
 * @param {{format: string, optional?: boolean}} envelope `optional` if `format` and `version` may be left out
 * @returns {Map<string, Json>}
 */
export function openSealed(file, bytes, { format, optional = false }) {
  const body = bytes.subarray(0, Math.max(0, bytes.length - TAIL_BYTES));
  const tail = ascii.decode(bytes.subarray(body.length));
  const sealed = tail === sealOf(body);
  if (!sealed) {
    const found = bytes.length ? JSON.stringify(tail) : "an empty file";
    const advice = "Restore the file from a copy, or take an earlier step";
    throw new DamagedError(`${file}: expected the checksum of the file at its end, found ${found}. ${advice}`, {
      file,
    });
  }
  return supported(file, () => {
    const fields = object(parseJson(bytes.subarray(0, bytes.length - 1)), "the file");
    // Before anything else is looked at: the rest of a later version may be anything.
    checkEnvelope(fields, "format", format, optional);
    checkEnvelope(fields, "version", 1, optional);
    const requires = fields.get("requires");
    const none = requires === undefined || (Array.isArray(requires) && !requires.length);
    check(none, "requires", "no feature that this reader does not know", requires);
    fields.delete("xxh3");
    return fields;
  });
}

/** @param {Map<string, Json>} fields @param {string} name @param {Json} value @param {boolean} optional */
function checkEnvelope(fields, name, value, optional) {
  const found = fields.get(name);
  check(found === value || (optional && found === undefined), name, JSON.stringify(value), found);
}

/** @param {Uint8Array} body @returns {string} */
function sealOf(body) {
  return `,"xxh3":"${xxh3(body)}"}\n`;
}

/** Returns the bytes of a sealed file. @param {string} json a JSON object with at least one field @returns {Uint8Array} */
export function seal(json) {
  const body = utf8.encode(json.slice(0, -1));
  const tail = utf8.encode(sealOf(body));
  const bytes = new Uint8Array(body.length + tail.length);
  bytes.set(body);
  bytes.set(tail, body.length);
  return bytes;
}
