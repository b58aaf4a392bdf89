/** Tells what a source holds: a checkpoint, safetensors files, or a run of checkpoints. */

import { openSource } from "../../src/checkpoint.js";
import { differences } from "../../src/differences.js";
import { InputError, NotFoundError, UnsupportedError } from "../../src/errors.js";
import { MANIFEST } from "../../src/manifest.js";
import { names as order } from "../parts/numbers.js";
import { checkpointContents } from "./contents.js";
import { safetensorsContents } from "./safetensors.js";
import { rowOf } from "./run_view.js";
import { within } from "./sources.js";

/** @typedef {import("../../src/sources/source.js").Source} Source */
/** @typedef {{name: string, row?: any, open: () => Promise<any>}} Step `row` is known if the source describes its steps */

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
  const folders = [...new Set(names.filter((name) => name.includes("/")).map((name) => name.slice(0, name.indexOf("/"))))].sort(order.compare);
  const steps = folders.filter((folder) => names.includes(`${folder}/${MANIFEST}`));
  // A dropped folder is the only one of its source. A run may have one step, so a manifest is no reason to go deeper.
  if (!steps.length && folders.length === 1 && !files.length) return detect(within(source, folders[0]));
  if (steps.length === 1 && !source.place) return detect(within(source, steps[0]));
  const others = folders.filter((folder) => !steps.includes(folder)).flatMap((folder) => otherFormat(folder, names) ?? []);
  if (steps.length) return { steps: [...steps.map((name) => stepOf(source, name)), ...others.map(unread)], place: source.place };
  const runs = folders.filter((folder) => names.some((name) => name.startsWith(`${folder}/`) && name.split("/").length === 3 && name.endsWith(`/${MANIFEST}`)));
  if (runs.length) return { runs: await Promise.all(runs.map((run) => runOf(within(source, run), run))), place: source.place };
  const other = others[0] ?? otherFormat("", names);
  if (other) throw new UnsupportedError(unreadText(source.place || other.name || "files", other.format));
  const found = names.length ? names.slice(0, 5).join(", ") : "no file";
  throw new InputError(
    `${source.place || "files"}: expected ${MANIFEST}, safetensors files, or folders with ${MANIFEST}; found ${found}. ` +
      "`treering view PATH` reads other formats",
  );
}

/** The files by which other formats are known. */
const OTHERS = [["orbax", /^(_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|(\w+\/)_METADATA)$/], ["t5x", /^checkpoint$/], ["zarr", /^(\.zarray|zarr\.json)$/], ["flax", /^(checkpoint_\d+|.*\.msgpack)$/]];

/** Returns the name of the format that a folder has, or null. @param {string} folder @param {string[]} names */
function otherFormat(folder, names) {
  const inside = folder ? names.filter((name) => name.startsWith(`${folder}/`)).map((name) => name.slice(folder.length + 1)) : names;
  const found = OTHERS.find(([, pattern]) => inside.some((name) => pattern.test(name)));
  return found ? { name: folder, format: found[0] } : null;
}

const unreadText = (place, format) =>
  `${place}: found the format ${format}, which this page does not read alone. Run \`treering view PATH\`, which reads it`;

/** A step of another format: it is named, and says what reads it. @returns {Step} */
function unread({ name, format }) {
  return { name, open: () => Promise.reject(new UnsupportedError(unreadText(name, format))) };
}

/** A run in a directory of runs, described as `treering view` does. */
async function runOf(source, name) {
  const { steps } = await detect({ ...source, place: source.place || name });
  const rows = [];
  for (const [n, step] of (steps ?? []).entries()) rows.push(await rowOf(step, n));
  return { name, steps: rows, found: { steps, place: source.place || name } };
}

/** @param {Source} source @param {string} name @returns {Step} */
function stepOf(source, name) {
  return { name, open: () => openCheckpoint(within(source, name)) };
}

/** @param {Source} source */
async function openCheckpoint(source) {
  let manifestBytes = 0;
  const read = async (name, start, end) => {
    const found = await source.read(name, start, end);
    if (name === MANIFEST) manifestBytes = found.bytes.length;
    return found;
  };
  const ckpt = await openSource({ ...source, read }, differences);
  return checkpointContents(ckpt, manifestBytes);
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
