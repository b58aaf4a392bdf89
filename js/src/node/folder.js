/** Checkpoints in a folder. */

import { constants } from "node:fs";
import { open, readdir } from "node:fs/promises";
import { basename, join } from "node:path";
import { DamagedError, MissingFileError, TreeringError } from "../errors.js";

/** @typedef {import("../sources/source.js").Passing} Passing */

const PART_BYTES = 2 * 2 ** 20;

/** @param {string} folder @returns {import("../sources/source.js").Source} */
export function folderSource(folder) {
  return {
    place: folder,
    async read(name, start, end, passing) {
      try {
        return await readRange(join(folder, name), start, end, passing);
      } catch (error) {
        if (error instanceof TreeringError) throw error;
        const { code } = /** @type {NodeJS.ErrnoException} */ (error);
        if (code === "ENOENT" || code === "ENOTDIR") throw new MissingFileError(name);
        throw new DamagedError(`${join(folder, name)}: expected a file that can be read, found ${error}`, {
          file: name,
          cause: error,
        });
      }
    },
    list: () => readdir(folder),
    sibling: (name, levels) => folderSource(join(folder, ...Array(levels).fill(".."), name)),
    chunkBytes: Infinity,
  };
}

/** @param {string} path @param {number} start @param {number | undefined} end @param {Passing} [passing] */
async function readRange(path, start, end, passing) {
  // Without blocking: a FIFO would wait for a writer.
  const file = await open(path, constants.O_RDONLY | (constants.O_NONBLOCK ?? 0));
  try {
    const stat = await file.stat();
    if (!stat.isFile()) throw new MissingFileError(basename(path), "another kind of file");
    const length = Math.max(0, Math.min(stat.size, end ?? stat.size) - start);
    const bytes = new Uint8Array(passing ? Math.min(length, 2 * PART_BYTES) : length);
    if (passing) await passParts(file, start, length, bytes, (part) => passing(part, stat.size));
    else await fill(file, bytes, start);
    return { bytes: passing ? bytes.subarray(0, 0) : bytes, size: stat.size };
  } finally {
    await file.close();
  }
}

/**
 * Passes on a range. The system fills one half of `buffer` while the other is used.
 *
 * @param {import("node:fs/promises").FileHandle} file @param {number} start @param {number} length
 * @param {Uint8Array} buffer @param {(part: Uint8Array) => void} pass
 */
async function passParts(file, start, length, buffer, pass) {
  const read = async (/** @type {number} */ at) => {
    const half = buffer.subarray(at % (2 * PART_BYTES));
    const part = half.subarray(0, Math.min(PART_BYTES, length - at));
    await fill(file, part, start + at);
    return part;
  };
  let next = read(0);
  for (let at = 0; at < length; at += PART_BYTES) {
    const part = await next;
    next = read(Math.min(length, at + PART_BYTES));
    try {
      pass(part);
    } catch (error) {
      // The file stays open until no read uses it.
      await next.catch(() => {});
      throw error;
    }
  }
  await next;
}

/** @param {import("node:fs/promises").FileHandle} file @param {Uint8Array} bytes @param {number} start */
async function fill(file, bytes, start) {
  for (let at = 0; at < bytes.length;) {
    const { bytesRead } = await file.read(bytes, at, Math.min(bytes.length - at, 2 ** 30), start + at);
    if (!bytesRead) throw new Error("a file that became shorter");
    at += bytesRead;
  }
}
