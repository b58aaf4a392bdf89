/** The places that a user opens: dropped or picked files, and a URL. */

import { DamagedError, InputError, MissingFileError } from "../../src/errors.js";
import { httpSource } from "../../src/sources/http.js";

/** @typedef {import("../../src/sources/source.js").Source} Source Its names may have slashes. */

const CHUNK_BYTES = 8 << 20;
const MAX_FILES = 200_000;

/**
 * Returns the files of a drop, with those in folders. Chromium has handles; its entries fail on a page that is a file.
 * Other browsers have entries.
 *
 * @param {DataTransfer} transfer
 */
export async function droppedFiles(transfer) {
  const items = Array.from(transfer.items).filter((item) => item.kind === "file");
  // Items are only there until the event ends, so all are asked before the first answer.
  const tops = await Promise.all(items.map((item) => item.getAsFileSystemHandle?.() ?? item.webkitGetAsEntry()));
  const found = [];
  const visit = async (top, path) => {
    if (found.length > MAX_FILES) throw new InputError(`${path}: expected at most ${MAX_FILES} files, found more`);
    if (top.kind === "file") found.push([path, await top.getFile()]);
    else if (top.isFile) found.push([path, await new Promise((resolve, reject) => top.file(resolve, reject))]);
    else for await (const child of top.kind ? top.values() : childrenOf(top)) await visit(child, `${path}/${child.name}`);
  };
  for (const top of tops) await visit(top, top.name);
  return found;
}

async function* childrenOf(entry) {
  const reader = entry.createReader();
  for (;;) {
    // One call returns at most 100 entries.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    yield* some;
  }
}

/** @param {[string, File][]} files @returns {Source} */
export function fileSource(files) {
  const byPath = new Map(files);
  return {
    place: "",
    chunkBytes: CHUNK_BYTES,
    list: async () => Array.from(byPath.keys()),
    async read(name, start, end) {
      const file = byPath.get(name);
      if (!file) throw new MissingFileError(name);
      try {
        return { bytes: new Uint8Array(await file.slice(start, end).arrayBuffer()), size: file.size };
      } catch (error) {
        const found = `${error.name}; it may have changed since it was opened`;
        throw new DamagedError(`${name}: expected a file that can be read, found ${found}`, {
          file: name,
          cause: error,
        });
      }
    },
  };
}

/** A folder or file on a server. A server lists no files. @param {string} text @returns {{source: Source, file: string}} */
export function urlSource(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    url = null;
  }
  if (!/^https?:$/.test(url?.protocol ?? "")) throw new InputError(`${text}: expected a URL of http or https`);
  const file = /\/([^/]+\.safetensors|treering\.json)$/.exec(url.pathname)?.[1] ?? "";
  url.pathname = url.pathname.slice(0, url.pathname.length - file.length);
  url.hash = "";
  return { source: httpSource(url), file: file === "treering.json" ? "" : decodeURIComponent(file) };
}

/** Returns the part of a source that is below a folder. @param {Source} source @param {string} folder @returns {Source} */
export function within(source, folder) {
  const begin = `${folder}/`;
  return {
    ...source,
    place: source.place ? `${source.place.replace(/\/$/, "")}/${folder}` : folder,
    read: (name, start, end) => source.read(begin + name, start, end),
    // Nothing is known of what is above the folder that was opened.
    sibling: (name, levels) => (levels > 1 && source.sibling ? source.sibling(name, levels - 1) : within(source, name)),
    list: async () =>
      (await source.list()).filter((name) => name.startsWith(begin)).map((name) => name.slice(begin.length)),
  };
}
