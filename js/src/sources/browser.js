/** Checkpoints that a user of a browser has picked: a directory handle, or a list of files. */

import { DamagedError, InputError, MissingFileError } from "../errors.js";
import { MANIFEST } from "../manifest.js";

/** @typedef {import("./source.js").Source} Source */

/** @param {FileSystemDirectoryHandle} handle @returns {Source} */
export function handleSource(handle) {
  return {
    place: handle.name,
    async read(name, start, end) {
      let file;
      try {
        file = await (await handle.getFileHandle(name)).getFile();
      } catch (error) {
        const kind = /** @type {Error} */ (error).name;
        if (kind === "NotFoundError") throw new MissingFileError(name);
        throw new DamagedError(`${name}: expected a file that can be read, found ${kind}`, {
          file: name,
          cause: error,
        });
      }
      return slice(file, start, end);
    },
    async list() {
      const names = [];
      for await (const name of /** @type {any} */ (handle).keys()) names.push(name);
      return names;
    },
  };
}

/** Makes a source of the files next to the only manifest. Raises `InputError`. @param {Iterable<File>} list @returns {Source} */
export function filesSource(list) {
  const paths = new Map(Array.from(list, (file) => [file.webkitRelativePath || file.name, file]));
  const manifests = Array.from(paths.keys()).filter((path) => path.split("/").at(-1) === MANIFEST);
  if (manifests.length !== 1) {
    throw new InputError(
      `files: expected one ${MANIFEST}, found ${manifests.length ? manifests.join(", ") : "none"}. Pick one checkpoint`,
    );
  }
  const folder = manifests[0].slice(0, -MANIFEST.length);
  return {
    place: folder || "files",
    async read(name, start, end) {
      const file = paths.get(folder + name);
      if (!file) throw new MissingFileError(name);
      return slice(file, start, end);
    },
    list: async () =>
      Array.from(paths.keys(), (path) => (path.startsWith(folder) ? path.slice(folder.length) : "/")).filter(
        (name) => !name.includes("/"),
      ),
  };
}

/** @param {File} file @param {number} start @param {number | undefined} end */
async function slice(file, start, end) {
  return { bytes: new Uint8Array(await file.slice(start, end).arrayBuffer()), size: file.size };
}
