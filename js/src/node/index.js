/** The public names, for Node: those for browsers, and folders. */

import { fileURLToPath } from "node:url";
import { openSource } from "../checkpoint.js";
import { differences } from "../differences.js";
import { InputError } from "../errors.js";
import { open as openAnywhere, write as writeMemory } from "../index.js";
import { writeFolder } from "./commit.js";
import { folderSource } from "./folder.js";

export * from "../index.js";

/**
 * Opens a checkpoint in a folder, or whatever `open` takes in browsers.
 *
 * @param {any} target a path, a `file:` URL, or a target for browsers
 * @param {{fetch?: typeof fetch, differences?: typeof differences}} [options]
 */
export async function open(target, options) {
  const folder = folderOf(target);
  if (folder === undefined) return openAnywhere(target, { differences, ...options });
  const odd = Object.keys(options ?? {}).filter((name) => name !== "differences");
  if (odd.length) throw new InputError(`${folder}: expected no options, found ${odd}`);
  return openSource(folderSource(folder), differences);
}

/**
 * Writes a new checkpoint into a folder, or into an empty Map. Raises `InputError` or an error of the system.
 *
 * @param {string | URL | Map<string, Uint8Array>} target a folder that is missing or empty
 * @param {unknown} tree
 * @param {import("../write/checkpoint.js").WriteOptions} [options]
 */
export async function write(target, tree, options) {
  const folder = folderOf(target);
  if (folder === undefined) return writeMemory(/** @type {any} */ (target), tree, options);
  return writeFolder(folder, tree, options);
}

/** @param {unknown} target @returns {string | undefined} */
function folderOf(target) {
  if (target instanceof URL ? target.protocol === "file:" : typeof target === "string" && /^file:/i.test(target)) {
    try {
      return fileURLToPath(/** @type {string | URL} */ (target));
    } catch (error) {
      throw new InputError(`expected a file: URL of this machine, found ${target}`, { cause: error });
    }
  }
  return typeof target === "string" && !/^https?:\/\//i.test(target) ? target : undefined;
}
