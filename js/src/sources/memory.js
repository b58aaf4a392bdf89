/** Checkpoints in memory: a Map from names to bytes, as `write` fills it. */

import { MissingFileError } from "../errors.js";

/** @param {ReadonlyMap<string, Uint8Array>} files @returns {import("./source.js").Source} */
export function memorySource(files) {
  return {
    place: "memory",
    async read(name, start, end) {
      const bytes = files.get(name);
      if (!bytes) throw new MissingFileError(name);
      return { bytes: bytes.subarray(start, end), size: bytes.length };
    },
    list: async () => Array.from(files.keys()),
  };
}
