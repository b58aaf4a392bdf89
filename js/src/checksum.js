/** XXH3-64 with seed 0, the only checksum of the format. */

import { createXXHash3 } from "hash-wasm";

/** One instance serves everything: no call awaits between `init` and `digest`. @type {import("hash-wasm").IHasher} */
let hasher;
/** @type {Promise<void> | undefined} */
let pending;

/**
 * Compiles the WebAssembly. Every call of the package that hashes awaits it first: an await of the module itself would
 * keep service workers and CommonJS from loading the package, and lose the first messages of a web worker.
 *
 * @returns {Promise<void>}
 */
export function ready() {
  if (pending === undefined) {
    pending = createXXHash3(0, 0).then((made) => void (hasher = made));
    // The next call tries again.
    pending.catch(() => (pending = undefined));
  }
  return pending;
}

/** The bytes that one checksum of a buffer covers. */
export const BLOCK_BYTES = 1048576;

/** Returns the checksum as 16 lowercase hexadecimal digits. @param {Uint8Array} bytes @returns {string} */
export function xxh3(bytes) {
  return hasher.init().update(bytes).digest("hex");
}

/**
 * Returns the checksums of the blocks of a buffer that consists of `parts`, one after the other.
 *
 * @param {Iterable<Uint8Array>} parts
 * @returns {string}
 */
export function blockChecksums(parts) {
  let digits = "";
  let filled = 0;
  hasher.init();
  for (const part of parts) {
    for (let at = 0; at < part.length;) {
      const end = Math.min(part.length, at + BLOCK_BYTES - filled);
      hasher.update(part.subarray(at, end));
      filled += end - at;
      at = end;
      if (filled === BLOCK_BYTES) {
        digits += hasher.digest("hex");
        hasher.init();
        filled = 0;
      }
    }
  }
  return filled ? digits + hasher.digest("hex") : digits;
}
