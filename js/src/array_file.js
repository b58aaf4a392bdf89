/** An array file of an open checkpoint: reads its header once, and blocks of its buffer when they are used. */

import { BLOCK_BYTES, xxh3 } from "./checksum.js";
import { DamagedError, MissingFileError, SourceError, supported, UnsupportedError } from "./errors.js";
import { decodeHeader } from "./header.js";

/** @typedef {import("./header.js").Header} Header */
/** @typedef {import("./manifest.js").FileEntry} FileEntry */
/** @typedef {import("./sources/source.js").Source} Source */

/** A part of the buffer: consecutive blocks, verified. @typedef {{begin: number, bytes: Uint8Array}} Run */

/** At most 8 MiB for each file. */
const MAX_RECENT_BLOCKS = 8;
const ADVICE = "Restore the file from a copy, or take an earlier step";

export class ArrayFile {
  /**
   * @param {Source} source
   * @param {FileEntry} entry
   * @param {(error: MissingFileError) => Promise<never>} onMissing raises the error that says why the file is missing
   */
  constructor(source, entry, onMissing) {
    this.source = source;
    this.entry = entry;
    this.onMissing = onMissing;
    /** @type {Promise<Header> | undefined} */
    this.pending = undefined;
    /** Verified blocks, the latest last. @type {Map<number, Uint8Array>} */
    this.recent = new Map();
    /** The blocks that were checked, right or wrong. @type {Set<number>} */
    this.checked = new Set();
  }

  /** The number of bytes that follow the header. */
  get bufferBytes() {
    return this.entry.size - this.entry.header;
  }

  /** @returns {Promise<Header>} */
  header() {
    if (this.pending === undefined) {
      const pending = this.readHeader();
      this.pending = pending;
      // The next call reads again: the network may have failed.
      pending.catch(() => (this.pending = undefined));
    }
    return this.pending;
  }

  async readHeader() {
    const { name, header, requires, xxh3: expected } = this.entry;
    if (requires.length) {
      const message = `${name}: expected no feature that this reader does not know, found ${requires}. Read it with a newer release`;
      throw new UnsupportedError(message, { file: name });
    }
    const bytes = await this.bytes(0, header);
    const found = xxh3(bytes);
    if (found !== expected) {
      throw new DamagedError(`${name}: header: expected the checksum ${expected}, found ${found}. ${ADVICE}`, {
        file: name,
      });
    }
    return supported(name, () => decodeHeader(bytes, this.bufferBytes));
  }

  /**
   * Reads and verifies blocks, in order. One read serves blocks that follow one another, within `source.chunkBytes`.
   *
   * @param {[number, number][]} spans first and last blocks, in order, that do not touch
   * @returns {AsyncGenerator<Run>}
   */
  async *blocks(spans) {
    await this.header();
    for (const [first, last] of spans) {
      let next = first;
      for (let bytes = this.recent.get(next); bytes && next <= last; bytes = this.recent.get(++next)) {
        yield { begin: next * BLOCK_BYTES, bytes };
      }
      const chunk = Math.max(1, Math.floor((this.source.chunkBytes ?? Infinity) / BLOCK_BYTES));
      for (; next <= last; next += chunk) yield this.readRun(next, Math.min(last, next + chunk - 1));
    }
  }

  /** @param {number} first @param {number} last @returns {Promise<Run>} */
  async readRun(first, last) {
    const { checksums } = await this.header();
    const { name, header } = this.entry;
    const begin = first * BLOCK_BYTES;
    const bytes = await this.bytes(header + begin, header + Math.min(this.bufferBytes, (last + 1) * BLOCK_BYTES));
    for (let block = first; block <= last; block++) {
      this.checked.add(block);
      const at = (block - first) * BLOCK_BYTES;
      const found = xxh3(bytes.subarray(at, at + BLOCK_BYTES));
      const expected = checksums.slice(16 * block, 16 * block + 16);
      if (found !== expected) {
        const message = `${name}: block ${block}: expected the checksum ${expected}, found ${found}. ${ADVICE}`;
        throw new DamagedError(message, { file: name, block });
      }
    }
    this.keep(last, first === last ? bytes : bytes.slice((last - first) * BLOCK_BYTES));
    return { begin, bytes };
  }

  /** Reads the blocks that were not checked yet: those of tensors that no leaf names. */
  async readRest() {
    await this.header();
    for (let block = 0; block * BLOCK_BYTES < this.bufferBytes; block++) {
      if (!this.checked.has(block)) await this.readRun(block, block);
    }
  }

  /** Keeps a block, because the next small leaf often is in the same one. @param {number} block @param {Uint8Array} bytes */
  keep(block, bytes) {
    this.recent.delete(block);
    this.recent.set(block, bytes);
    const [oldest] = this.recent.keys();
    if (this.recent.size > MAX_RECENT_BLOCKS) this.recent.delete(oldest);
  }

  /** @param {number} start @param {number} end @returns {Promise<Uint8Array>} */
  async bytes(start, end) {
    const { name, size } = this.entry;
    let read;
    try {
      read = await this.source.read(name, start, end);
    } catch (error) {
      if (error instanceof MissingFileError) return this.onMissing(error);
      throw error;
    }
    if (read.size !== undefined && read.size !== size) {
      throw new DamagedError(`${name}: expected ${size} bytes, found ${read.size}. ${ADVICE}`, { file: name });
    }
    const { length } = read.bytes;
    if (length !== end - start) {
      throw new SourceError(`${name}: expected ${end - start} bytes from the source, found ${length}. Read again`);
    }
    return read.bytes;
  }
}
