/** An array file of an open checkpoint: reads its header once, and brings each block to all reads that want it. */

import { BLOCK_BYTES, xxh3 } from "./checksum.js";
import { DamagedError, MissingFileError, SourceError, supported, TreeringError, UnsupportedError } from "./errors.js";
import { decodeHeader } from "./header.js";

/** @typedef {import("./header.js").Header} Header */
/** @typedef {import("./manifest.js").FileEntry} FileEntry */
/** @typedef {import("./sources/source.js").Source} Source */

/** Receives a verified block that begins there in the buffer. The bytes change afterwards. @typedef {(begin: number, bytes: Uint8Array) => void} Take */
/** A read: how many blocks it waits for, and which of them failed. @typedef {{take: Take, left: number, errors: Map<number, Error>, end: () => void}} Reader */
/** A block that a request brings: the reads that caused it, and those that came later. @typedef {{owners: Reader[], joined: Reader[]}} Wanted */

/** At most 8 MiB for each file. */
const MAX_RECENT_BLOCKS = 8;
/** The longest read of a source that says nothing else. */
const CHUNK_BYTES = 64 * BLOCK_BYTES;
/** Reads that begin together come to their blocks within so many microtasks of one another. */
const TURN_MICROTASKS = 20;
const ADVICE = "Restore the file from a copy, or take an earlier step";

export class ArrayFile {
  /**
   * @param {Source} source
   * @param {FileEntry} entry
   * @param {<T>(work: () => Promise<T>) => Promise<T>} limited bounds the reads of the source at a time
   * @param {(error: MissingFileError) => Promise<never>} onMissing raises the error that says why the file is missing
   */
  constructor(source, entry, limited, onMissing) {
    this.source = source;
    this.entry = entry;
    this.limited = limited;
    this.onMissing = onMissing;
    /** @type {Promise<Header> | undefined} */
    this.pending = undefined;
    /** Verified blocks, the latest last. @type {Map<number, Uint8Array>} */
    this.recent = new Map();
    /** Blocks that no request brings yet. @type {Map<number, Wanted>} */
    this.asked = new Map();
    /** Blocks that a request brings. @type {Map<number, Wanted>} */
    this.coming = new Map();
  }

  /** The number of bytes that follow the header. */
  get bufferBytes() {
    return this.entry.size - this.entry.header;
  }

  /** @returns {Promise<Header>} */
  async header() {
    try {
      if (this.pending) return await this.pending;
    } catch (error) {
      // Another read caused the request, and its caller may have aborted that one alone.
      if (error instanceof TreeringError) throw error;
    }
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
    const bytes = new Uint8Array(header);
    let filled = 0;
    await this.bytes(0, header, (part) => {
      bytes.set(part, filled);
      filled += part.length;
    });
    const found = xxh3(bytes);
    if (found !== expected) {
      throw new DamagedError(`${name}: header: expected the checksum ${expected}, found ${found}. ${ADVICE}`, {
        file: name,
      });
    }
    return supported(name, () => decodeHeader(bytes, this.bufferBytes));
  }

  /**
   * Reads and verifies blocks, and passes each to `take`, in any order. Raises the error of the first that failed.
   *
   * @param {[number, number][]} spans first and last blocks, that do not touch
   * @param {Take} take
   */
  async read(spans, take) {
    const errors = await this.examine(spans, take);
    let first = Infinity;
    for (const block of errors.keys()) first = Math.min(first, block);
    if (errors.size) throw errors.get(first);
  }

  /** Reads and verifies blocks. Returns the errors of those that failed. @param {[number, number][]} spans @param {Take} take */
  async examine(spans, take) {
    await this.header();
    return new Promise((/** @type {(errors: Map<number, Error>) => void} */ resolve) => {
      const errors = new Map();
      const reader = { take, left: 1, errors, end: () => resolve(errors) };
      for (const [first, last] of spans) for (let block = first; block <= last; block++) this.want(block, reader);
      leave(reader);
    });
  }

  /** Reads and verifies everything. Returns the errors of blocks, or raises that of the header. */
  async verify() {
    const blocks = Math.ceil(this.bufferBytes / BLOCK_BYTES);
    return this.examine(blocks ? [[0, blocks - 1]] : [], () => {});
  }

  /** @param {number} block @param {Reader} reader */
  want(block, reader) {
    const bytes = this.recent.get(block);
    if (bytes) return reader.take(block * BLOCK_BYTES, bytes);
    reader.left++;
    const coming = this.coming.get(block);
    if (coming) coming.joined.push(reader);
    else this.ask(block, reader);
  }

  /** @param {number} block @param {Reader} reader */
  ask(block, reader) {
    const asked = this.asked.get(block);
    if (asked) return asked.owners.push(reader);
    if (!this.asked.size) this.requestSoon();
    this.asked.set(block, { owners: [reader], joined: [] });
  }

  /** Makes one request for each run of blocks that the reads of one turn of the event loop want together. */
  async requestSoon() {
    for (let task = 0; task < TURN_MICROTASKS; task++) await null;
    const blocks = Array.from(this.asked.keys()).sort((a, b) => a - b);
    for (const [block, wanted] of this.asked) this.coming.set(block, wanted);
    this.asked.clear();
    for (let from = 0, to = 0; from < blocks.length; from = to) {
      while (to < blocks.length && blocks[to] === blocks[from] + to - from) to++;
      this.request(blocks[from], blocks[to - 1]);
    }
  }

  /** Reads consecutive blocks. Never raises: the reads get the error. @param {number} first @param {number} last */
  async request(first, last) {
    const { checksums } = await this.header();
    const end = Math.min(this.bufferBytes, (last + 1) * BLOCK_BYTES);
    const buffer = new Uint8Array(Math.min(BLOCK_BYTES, end - first * BLOCK_BYTES));
    let block = first;
    let filled = 0;
    /** @param {Uint8Array} bytes a complete block */
    const arrived = (bytes) => {
      const found = xxh3(bytes);
      const expected = checksums.slice(16 * block, 16 * block + 16);
      if (found === expected) {
        if (block === last) this.keep(block, bytes.slice());
        this.deliver(block, bytes);
      } else {
        const { name } = this.entry;
        const message = `${name}: block ${block}: expected the checksum ${expected}, found ${found}. ${ADVICE}`;
        this.fail(block, new DamagedError(message, { file: name, block }));
      }
      block++;
    };
    try {
      await this.bytes(this.entry.header + first * BLOCK_BYTES, this.entry.header + end, (bytes) => {
        for (let at = 0; at < bytes.length;) {
          const length = Math.min(BLOCK_BYTES, this.bufferBytes - block * BLOCK_BYTES);
          const part = bytes.subarray(at, at + length - filled);
          at += part.length;
          if (part.length === length) arrived(part);
          else {
            buffer.set(part, filled);
            filled += part.length;
            if (filled < length) continue;
            filled = 0;
            arrived(buffer.subarray(0, length));
          }
        }
      });
    } catch (error) {
      for (; block <= last; block++) this.fail(block, /** @type {Error} */ (error));
    }
  }

  /** @param {number} block @param {Uint8Array} bytes */
  deliver(block, bytes) {
    const { owners, joined } = this.arrival(block);
    for (const reader of owners.concat(joined)) {
      reader.take(block * BLOCK_BYTES, bytes);
      leave(reader);
    }
  }

  /** @param {number} block @param {Error} error */
  fail(block, error) {
    const { owners, joined } = this.arrival(block);
    // An error that is not of this package is an abort, or the caller's own: reads that came later ask again.
    const isShared = error instanceof TreeringError;
    for (const reader of isShared ? owners.concat(joined) : owners) {
      reader.errors.set(block, error);
      leave(reader);
    }
    if (!isShared) for (const reader of joined) this.ask(block, reader);
  }

  /** @param {number} block @returns {Wanted} */
  arrival(block) {
    const wanted = /** @type {Wanted} */ (this.coming.get(block));
    this.coming.delete(block);
    return wanted;
  }

  /** Keeps a block, because the next small leaf often is in the same one. @param {number} block @param {Uint8Array} bytes */
  keep(block, bytes) {
    this.recent.set(block, bytes);
    const [oldest] = this.recent.keys();
    if (this.recent.size > MAX_RECENT_BLOCKS) this.recent.delete(oldest);
  }

  /**
   * Reads a range and passes its bytes to `take`, part by part, in order.
   *
   * @param {number} start @param {number} end @param {(bytes: Uint8Array) => void} take
   */
  async bytes(start, end, take) {
    const { name, size } = this.entry;
    let at = start;
    /** @param {Uint8Array} part @param {number | undefined} found */
    const checked = (part, found) => {
      if (found !== undefined && found !== size)
        throw new DamagedError(`${name}: expected ${size} bytes, found ${found}. ${ADVICE}`, { file: name });
      if (at + part.length > end) throw this.lengthError(end - start, at + part.length - start);
      at += part.length;
      take(part);
    };
    const chunk = this.source.chunkBytes ?? CHUNK_BYTES;
    // Parts of several reads would mix.
    const passing = chunk >= end - start ? checked : undefined;
    const part = (/** @type {number} */ from) => this.part(from, Math.min(end, from + chunk), passing);
    await this.limited(async () => {
      let next = part(start);
      for (let from = start; from < end; from += chunk) {
        const read = await next;
        if (from + chunk < end) next = part(from + chunk);
        // The loop may end before it waits for this read.
        next.catch(() => {});
        checked(read.bytes, read.size);
        if (at !== Math.min(end, from + chunk)) throw this.lengthError(end - start, at - start);
      }
    });
  }

  /** @param {number} start @param {number} end @param {import("./sources/source.js").Passing} [passing] */
  async part(start, end, passing) {
    try {
      return await this.source.read(this.entry.name, start, end, passing);
    } catch (error) {
      if (error instanceof MissingFileError) return this.onMissing(error);
      throw error;
    }
  }

  /** @param {number} expected @param {number} found */
  lengthError(expected, found) {
    return new SourceError(
      `${this.entry.name}: expected ${expected} bytes from the source, found ${found}. Read again`,
    );
  }
}

/** @param {Reader} reader */
function leave(reader) {
  if (--reader.left === 0) reader.end();
}
