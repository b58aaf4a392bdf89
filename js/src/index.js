/** The public names, for browsers. `node/index.js` adds folders. */

import { openSource } from "./checkpoint.js";
import { InputError, show } from "./errors.js";
import { filesSource, handleSource } from "./sources/browser.js";
import { httpSource } from "./sources/http.js";
import { memorySource } from "./sources/memory.js";
import { encodeCheckpoint } from "./write/checkpoint.js";

export { Checkpoint } from "./checkpoint.js";
export {
  DamagedError,
  InputError,
  MissingFileError,
  NotFoundError,
  ReplacedError,
  SourceError,
  TreeringError,
  UnsupportedError,
} from "./errors.js";
export { Float } from "./float.js";
export { ArrayLeaf, IteratorLeaf, ValueLeaf } from "./leaf.js";
export { Tensor, tensor } from "./tensor.js";
export { Container } from "./tree.js";
export { Value } from "./values.js";
export { bytes } from "./write/flatten.js";

/**
 * Opens a checkpoint. Raises `NotFoundError`, `DamagedError`, `UnsupportedError`, `SourceError` or `InputError`.
 *
 * @param {any} target a URL of a directory, a `FileSystemDirectoryHandle`, a list of `File`s, a Map from names to bytes,
 *   or a source `{place, read, list}`
 * @param {{fetch?: typeof fetch, differences?: import("./leaf.js").Differences}} [options] `fetch` makes the requests to a
 *   server, and `differences` reads published weights
 */
export async function open(target, { fetch: request, differences, ...rest } = {}) {
  if (Object.keys(rest).length)
    throw new InputError(`open: expected the options fetch and differences, found ${Object.keys(rest)}`);
  const url = urlOf(target);
  if (url) return openSource(httpSource(url, request), differences);
  if (request) throw new InputError("open: expected no option fetch, because the target is no URL");
  return openSource(sourceOf(target), differences);
}

/** Returns the URL of a target that is one; text is relative to the page. @param {any} target @returns {URL | undefined} */
function urlOf(target) {
  if (typeof target !== "string" && !(target instanceof URL)) return undefined;
  const base = /** @type {any} */ (globalThis).document?.baseURI ?? globalThis.location?.href;
  let url;
  try {
    url = new URL(target, base);
  } catch (error) {
    throw new InputError(`open: expected a URL, found ${show(target)}`, { cause: error });
  }
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw new InputError(`open: expected an http(s) URL, found ${show(url.href)}. Only Node opens folders`);
  return url;
}

/** @param {any} target @returns {import("./sources/source.js").Source} */
function sourceOf(target) {
  if (target instanceof Map) return memorySource(target);
  if (typeof target?.read === "function") return target;
  if (target?.kind === "directory") return handleSource(target);
  if (target && typeof target === "object" && Symbol.iterator in target) return filesSource(target);
  throw new InputError(`open: expected a URL, a directory handle, files or a Map, found ${show(target)}`);
}

/**
 * Writes a checkpoint into an empty Map from names to bytes. Raises `InputError`.
 *
 * @param {Map<string, Uint8Array>} target
 * @param {unknown} tree
 * @param {import("./write/checkpoint.js").WriteOptions} [options]
 */
export async function write(target, tree, options) {
  if (!(target instanceof Map) || target.size) throw new InputError("write: expected an empty Map");
  for (const { name, parts } of encodeCheckpoint(tree, options)) {
    target.set(name, new Uint8Array(await new Blob(/** @type {any} */ (parts)).arrayBuffer()));
  }
}
