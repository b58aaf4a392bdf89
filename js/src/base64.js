/** Base64 with padding and without unused bits, as the format has it. */

import { check } from "./errors.js";

/** @param {unknown} json @param {string} place @returns {Uint8Array} */
export function decodeBase64(json, place) {
  const canonical = typeof json === "string" && json.length % 4 === 0 && /^[A-Za-z0-9+/]*={0,2}$/.test(json);
  check(canonical, place, "base64 with padding", json);
  const binary = atob(json);
  const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  check(
    json.length < 4 || json.slice(-4) === encodeBase64(lastGroup(bytes)),
    place,
    "base64 whose unused bits are 0",
    json,
  );
  return bytes;
}

/** @param {Uint8Array} bytes @returns {Uint8Array} */
function lastGroup(bytes) {
  return bytes.subarray(Math.max(0, bytes.length - (bytes.length % 3 || 3)));
}

/** @param {Uint8Array} bytes @returns {string} */
export function encodeBase64(bytes) {
  let binary = "";
  // `apply` takes a bounded number of arguments.
  for (let at = 0; at < bytes.length; at += 8192) {
    binary += String.fromCharCode.apply(null, /** @type {any} */ (bytes.subarray(at, at + 8192)));
  }
  return btoa(binary);
}
