/** Fixed-width text of NumPy: `<Un` and `|Sn`. */

import { InputError } from "./errors.js";

/**
 * Returns the elements without the NULs at their ends: strings for `<Un`, bytes for `|Sn`.
 *
 * @param {Uint8Array} bytes
 * @param {number} itemBytes
 * @param {boolean} isUnicode
 * @returns {string[] | Uint8Array[]}
 */
export function decodeText(bytes, itemBytes, isUnicode) {
  /** @type {any[]} */
  const items = [];
  for (let at = 0; at < bytes.length; at += itemBytes) {
    const item = bytes.subarray(at, at + itemBytes);
    items.push(isUnicode ? decodeCodePoints(item) : item.slice(0, item.findLastIndex(Boolean) + 1));
  }
  return items;
}

/** @param {Uint8Array} item @returns {string} */
function decodeCodePoints(item) {
  const view = new DataView(item.buffer, item.byteOffset, item.byteLength);
  const points = Array.from({ length: item.length / 4 }, (_, at) => view.getUint32(4 * at, true));
  const odd = points.find((point) => point > 0x10ffff);
  if (odd !== undefined)
    throw new InputError(`text: expected code points up to 0x10ffff, found ${odd}. Read \`bytes\` instead of \`data\``);
  // One at a time: `fromCodePoint` takes a bounded number of arguments.
  return points
    .slice(0, points.findLastIndex(Boolean) + 1)
    .map((point) => String.fromCodePoint(point))
    .join("");
}

/**
 * @param {readonly (string | Uint8Array)[]} items
 * @param {number} itemBytes
 * @param {boolean} isUnicode
 * @returns {Uint8Array}
 */
export function encodeText(items, itemBytes, isUnicode) {
  const bytes = new Uint8Array(items.length * itemBytes);
  items.forEach((item, index) => {
    const isText = typeof item === "string";
    if (isText !== isUnicode || (!isText && !(item instanceof Uint8Array))) {
      throw new InputError(`text: expected ${isUnicode ? "strings" : "Uint8Arrays"}, found ${typeof item} at ${index}`);
    }
    const encoded = isText
      ? new Uint8Array(Uint32Array.from(item, (one) => /** @type {number} */ (one.codePointAt(0))).buffer)
      : item;
    if (encoded.length > itemBytes) {
      throw new InputError(
        `text: expected at most ${itemBytes} bytes an element, found ${encoded.length} at ${index}. Choose a longer dtype`,
      );
    }
    bytes.set(encoded, index * itemBytes);
  });
  return bytes;
}
