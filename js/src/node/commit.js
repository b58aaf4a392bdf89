/** Commits a checkpoint to a folder. */

import { mkdir, open, readdir, rename, rm, stat } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { InputError } from "../errors.js";
import { encodeCheckpoint, randomToken } from "../write/checkpoint.js";

const LOCK = "writer.lock";

/**
 * Writes a new checkpoint. A crash leaves the complete checkpoint or none.
 *
 * Node cannot lock files, so a program that cleans up might take array files for leftovers while they are written. The
 * folder is therefore filled under a name that no step has, and put in place by one rename.
 *
 * @param {string} folder
 * @param {unknown} tree
 * @param {import("../write/checkpoint.js").WriteOptions} [options]
 */
export async function writeFolder(folder, tree, options) {
  const files = encodeCheckpoint(tree, options);
  const target = resolve(folder);
  const parent = dirname(target);
  if (!(await isFree(target))) throw inUse(target);
  if (await stat(join(parent, LOCK)).catch(ignoreMissing)) {
    const found = `found ${LOCK} next to it, which Node cannot lock`;
    throw new InputError(`${target}: expected a folder outside of a run, ${found}. Write elsewhere`);
  }
  const made = await mkdir(parent, { recursive: true });
  const hidden = join(parent, `.${basename(target)}.${randomToken()}.tmp`);
  await mkdir(hidden);
  try {
    for (const { name, parts } of files) await writeSynced(join(hidden, name), parts);
    await syncFolder(hidden);
    await rename(hidden, target);
  } catch (error) {
    await rm(hidden, { recursive: true, force: true });
    const { code } = /** @type {NodeJS.ErrnoException} */ (error);
    // Another program has made the folder since.
    throw code === "ENOTEMPTY" || code === "EEXIST" ? inUse(target) : error;
  }
  const top = made ? dirname(made) : parent;
  for (let at = parent; at !== top; at = dirname(at)) await syncFolder(at);
  await syncFolder(top);
}

/** @param {NodeJS.ErrnoException} error */
function ignoreMissing(error) {
  if (error.code !== "ENOENT") throw error;
}

/** @param {string} path @returns {Promise<boolean>} */
async function isFree(path) {
  const found = await stat(path).catch(ignoreMissing);
  return !found || (found.isDirectory() && !(await readdir(path)).length);
}

/** @param {string} target */
function inUse(target) {
  return new InputError(`${target}: expected a missing or empty folder, found another. Choose another name`);
}

/** @param {string} path @param {Uint8Array[]} parts */
async function writeSynced(path, parts) {
  const file = await open(path, "wx");
  try {
    for (const part of parts) await file.writeFile(part);
    await file.sync();
  } finally {
    await file.close();
  }
}

/** @param {string} path */
async function syncFolder(path) {
  const folder = await open(path, "r");
  try {
    await folder.sync();
  } finally {
    await folder.close();
  }
}
