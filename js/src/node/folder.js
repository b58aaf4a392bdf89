/** Checkpoints in a folder. */

import { constants } from "node:fs";
import { open, readdir } from "node:fs/promises";
import { basename, join } from "node:path";
import { DamagedError, MissingFileError } from "../errors.js";

/** @param {string} folder @returns {import("../sources/source.js").Source} */
export function folderSource(folder) {
  return {
    place: folder,
    async read(name, start, end) {
      try {
        return await readPart(join(folder, name), start, end);
      } catch (error) {
        if (error instanceof MissingFileError) throw error;
        const { code } = /** @type {NodeJS.ErrnoException} */ (error);
        if (code === "ENOENT" || code === "ENOTDIR") throw new MissingFileError(name);
        throw new DamagedError(`${join(folder, name)}: expected a file that can be read, found ${error}`, {
          file: name,
          cause: error,
        });
      }
    },
    list: () => readdir(folder),
    chunkBytes: 4 * 2 ** 20,
  };
}

/** @param {string} path @param {number} start @param {number | undefined} end */
async function readPart(path, start, end) {
  // Without blocking: a FIFO would wait for a writer.
  const file = await open(path, constants.O_RDONLY | (constants.O_NONBLOCK ?? 0));
  try {
    const stat = await file.stat();
    if (!stat.isFile()) throw new MissingFileError(basename(path), "another kind of file");
    const bytes = new Uint8Array(Math.max(0, Math.min(stat.size, end ?? stat.size) - start));
    for (let at = 0; at < bytes.length;) {
      const { bytesRead } = await file.read(bytes, at, Math.min(bytes.length - at, 2 ** 30), start + at);
      if (!bytesRead) throw new Error("a file that became shorter");
      at += bytesRead;
    }
    return { bytes, size: stat.size };
  } finally {
    await file.close();
  }
}
