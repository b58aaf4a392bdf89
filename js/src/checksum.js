/**
 * XXH3-64 with seed 0, the only checksum of the format: WebAssembly goes through long inputs, and this module has what
 * its specification says of short ones and of the end.
 */

import { WASM } from "./xxh3_wasm.js";

/** The bytes that one checksum of a buffer covers. */
export const BLOCK_BYTES = 1048576;

/** Places in the memory of the WebAssembly. */
const SUMS = 192;
const INPUT = 1024;
const INPUT_BYTES = 16384;
/** The bytes between two scrambles. */
const PART_BYTES = 1024;
const STRIPE_BYTES = 64;
const P32 = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n];
const MASK = (1n << 64n) - 1n;

/** @type {{exports: any, bytes: Uint8Array, view: DataView} | undefined} */
let compiled;

/** Compiles the WebAssembly with the first checksum: an import of the package does nothing. */
function memory() {
  if (compiled) return compiled;
  const code = Uint8Array.from(atob(WASM), (character) => character.charCodeAt(0));
  const exports = /** @type {any} */ (new WebAssembly.Instance(new WebAssembly.Module(code)).exports);
  compiled = { exports, bytes: new Uint8Array(exports.memory.buffer), view: new DataView(exports.memory.buffer) };
  return compiled;
}

/** Returns the checksum as 16 lowercase hexadecimal digits. @param {Uint8Array} bytes @returns {string} */
export function xxh3(bytes) {
  const { exports, bytes: all, view } = memory();
  const { length } = bytes;
  if (length <= 240) {
    all.set(bytes, INPUT);
    return hex(short(view, length));
  }
  [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]].forEach((sum, n) =>
    view.setBigUint64(SUMS + 8 * n, sum, true),
  );
  // At least one byte follows what is scrambled.
  const end = length - 1 - ((length - 1) % PART_BYTES);
  for (let at = 0; at < end; at += INPUT_BYTES) {
    const some = bytes.subarray(at, Math.min(end, at + INPUT_BYTES));
    all.set(some, INPUT);
    exports.blocks(INPUT, some.length / PART_BYTES);
  }
  // The last stripe may begin before the rest does.
  const before = Math.min(end, STRIPE_BYTES);
  all.set(bytes.subarray(end - before), INPUT);
  exports.stripes(INPUT + before, Math.floor((length - end - 1) / STRIPE_BYTES), 0);
  exports.stripes(INPUT + before + length - end - STRIPE_BYTES, 1, 121);
  let hash = BigInt(length) * P64[0];
  for (let n = 0; n < 64; n += 16) hash += mix(view, SUMS + n, 11 + n);
  return hex(avalanche(hash));
}

/**
 * Returns the checksums of the blocks of a buffer that consists of `parts`, one after the other.
 *
 * @param {Iterable<Uint8Array>} parts
 * @returns {string}
 */
export function blockChecksums(parts) {
  const block = new Uint8Array(BLOCK_BYTES);
  let digits = "";
  let filled = 0;
  for (const part of parts) {
    for (let at = 0; at < part.length;) {
      const some = part.subarray(at, at + BLOCK_BYTES - filled);
      at += some.length;
      if (some.length < BLOCK_BYTES) {
        block.set(some, filled);
        filled = (filled + some.length) % BLOCK_BYTES;
      }
      if (!filled) digits += xxh3(some.length < BLOCK_BYTES ? block : some);
    }
  }
  return filled ? digits + xxh3(block.subarray(0, filled)) : digits;
}

/** @param {bigint} hash */
function hex(hash) {
  return hash.toString(16).padStart(16, "0");
}

/** @param {DataView} view @param {number} length at most 240 @returns {bigint} */
function short(view, length) {
  const u32 = (/** @type {number} */ at) => BigInt(view.getUint32(at, true));
  const u64 = (/** @type {number} */ at) => view.getBigUint64(at, true);
  const size = BigInt(length);
  const end = INPUT + length;
  if (length > 128) {
    let hash = size * P64[0];
    for (let n = 0; n < 128; n += 16) hash += mix(view, INPUT + n, n);
    hash = avalanche(hash);
    for (let n = 128; n + 16 <= length; n += 16) hash += mix(view, INPUT + n, n - 125);
    return avalanche(hash + mix(view, end - 16, 119));
  }
  if (length > 16) {
    let hash = size * P64[0];
    for (let n = 0; n <= (length - 1) >> 5; n++)
      hash += mix(view, INPUT + 16 * n, 32 * n) + mix(view, end - 16 - 16 * n, 32 * n + 16);
    return avalanche(hash);
  }
  if (length > 8) {
    const low = u64(INPUT) ^ u64(24) ^ u64(32);
    const high = u64(end - 8) ^ u64(40) ^ u64(48);
    let swapped = 0n;
    for (let n = 0n; n < 64n; n += 8n) swapped = (swapped << 8n) | ((low >> n) & 255n);
    return avalanche(size + swapped + high + fold(low, high));
  }
  if (length > 3) {
    let hash = (u32(end - 4) + (u32(INPUT) << 32n)) ^ u64(8) ^ u64(16);
    hash ^= rotated(hash, 49n) ^ rotated(hash, 24n);
    hash = (hash * 0x9fb21c651e98df25n) & MASK;
    hash ^= (hash >> 35n) + size;
    hash = (hash * 0x9fb21c651e98df25n) & MASK;
    return hash ^ (hash >> 28n);
  }
  const byte = (/** @type {number} */ at) => BigInt(view.getUint8(at));
  let hash = u64(56) ^ u64(64);
  if (length)
    hash =
      ((byte(INPUT) << 16n) | (byte(INPUT + (length >> 1)) << 24n) | byte(end - 1) | (size << 8n)) ^ u32(0) ^ u32(4);
  hash = ((hash ^ (hash >> 33n)) * P64[1]) & MASK;
  hash = ((hash ^ (hash >> 29n)) * P64[2]) & MASK;
  return hash ^ (hash >> 32n);
}

/** Mixes 16 bytes with 16 of the secret. @param {DataView} view @param {number} at @param {number} secret @returns {bigint} */
function mix(view, at, secret) {
  const word = (/** @type {number} */ n) => view.getBigUint64(at + n, true) ^ view.getBigUint64(secret + n, true);
  return fold(word(0), word(8));
}

/** Returns the two halves of a product, one xor the other. @param {bigint} a @param {bigint} b */
function fold(a, b) {
  const product = a * b;
  return (product & MASK) ^ (product >> 64n);
}

/** @param {bigint} hash @param {bigint} bits */
function rotated(hash, bits) {
  return ((hash << bits) | (hash >> (64n - bits))) & MASK;
}

/** @param {bigint} hash any number @returns {bigint} */
function avalanche(hash) {
  hash &= MASK;
  hash = ((hash ^ (hash >> 37n)) * 0x165667919e3779f9n) & MASK;
  return hash ^ (hash >> 32n);
}
