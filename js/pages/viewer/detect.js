/** Tells what a source holds: a checkpoint, safetensors files, or a run of checkpoints. */

import { openSource } from "../../src/checkpoint.js";
import { InputError, NotFoundError } from "../../src/errors.js";
import { MANIFEST } from "../../src/manifest.js";
import { names as order } from "../parts/numbers.js";
import { checkpointContents } from "./contents.js";
import { safetensorsContents } from "./safetensors.js";
import { within } from "./sources.js";

/** @typedef {import("../../src/sources/source.js").Source} Source */
/** @typedef {{name: string, open: () => Promise<any>}} Step */

/**
 * Returns contents, or the steps of a run, oldest first. Raises `InputError` for anything else.
 *
 * @param {Source} source
 * @param {string} [file] a safetensors file, if the source is a server
 */
export async function detect(source, file = "") {
  if (file) return { contents: await safetensorsContents(source, [file]) };
  if (!source.list) return { contents: await onServer(source) };
  const names = await source.list();
  if (names.includes(MANIFEST)) return { contents: await openCheckpoint(source) };
  const files = names.filter((name) => !name.includes("/"));
  const tensors = files.filter((name) => name.endsWith(".safetensors")).sort(order.compare);
  if (tensors.length) return { contents: await safetensorsContents(source, tensors) };
  const folders = new Set(names.filter((name) => name.includes("/")).map((name) => name.slice(0, name.indexOf("/"))));
  const steps = Array.from(folders).filter((folder) => names.includes(`${folder}/${MANIFEST}`));
  // A dropped folder is the only one of its source. A run may have one step, so a manifest is no reason to go deeper.
  if (!steps.length && folders.size === 1 && !files.length) return detect(within(source, [...folders][0]));
  if (steps.length === 1 && !source.place) return detect(within(source, steps[0]));
  if (steps.length) return { steps: steps.sort(order.compare).map((name) => stepOf(source, name)), place: source.place };
  const found = names.length ? names.slice(0, 5).join(", ") : "no such file";
  throw new InputError(
    `${source.place || "files"}: expected ${MANIFEST}, safetensors files, or folders with ${MANIFEST}; found ${found}. ` +
      "Other formats: `treering convert` makes a checkpoint of them",
  );
}

/** @param {Source} source @param {string} name @returns {Step} */
function stepOf(source, name) {
  return { name, open: () => openCheckpoint(within(source, name)) };
}

/** @param {Source} source */
async function openCheckpoint(source) {
  return checkpointContents(await openSource(source));
}

/** @param {Source} source */
async function onServer(source) {
  try {
    return await openCheckpoint(source);
  } catch (error) {
    if (!(error instanceof NotFoundError)) throw error;
    throw new NotFoundError(`${error.message}. A server lists no files: give the URL of one step or file`);
  }
}
