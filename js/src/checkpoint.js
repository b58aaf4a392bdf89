/** An open checkpoint. */

import { ArrayFile } from "./array_file.js";
import { xxh3 } from "./checksum.js";
import {
  DamagedError,
  InputError,
  MissingFileError,
  NotFoundError,
  ReplacedError,
  SourceError,
  UnsupportedError,
} from "./errors.js";
import { plain } from "./fields.js";
import { readLateMetrics } from "./late_metrics.js";
import { leafOf } from "./leaf.js";
import { decodeManifest, MANIFEST } from "./manifest.js";
import { decodeTree } from "./tree.js";

/** @typedef {import("./sources/source.js").Source} Source */
/** @typedef {import("./leaf.js").Differences} Differences */
/** @typedef {ReturnType<typeof leafOf>} Leaf */

/** Reads of array files at a time: browsers make no more requests to one server over HTTP/1.1. */
const MAX_READS = 6;

export class Checkpoint {
  /**
   * @param {Source} source @param {Uint8Array} bytes those of the manifest
   * @param {Differences} [differences] reads arrays that are stored as differences
   */
  constructor(source, bytes, differences) {
    const manifest = decodeManifest(bytes, differences);
    this.source = source;
    this.differences = differences;
    this.manifest = manifest;
    this.identity = xxh3(bytes);
    this.created = manifest.created;
    this.software = Object.fromEntries(manifest.software);
    this.step = manifest.step;
    /** @type {Record<string, number>} */
    this.metrics = numbers(manifest.metrics ?? new Map());
    /** The user's metadata in plain values; a float without a fraction looks like an integer. */
    this.metadata = plain(manifest.metadata);
    /** The options with which `write` repeats step, metrics and metadata, every type and bit kept. */
    this.exact = {
      ...(manifest.step !== undefined && { step: manifest.step }),
      ...(manifest.metrics && { metrics: manifest.metrics }),
      ...(manifest.hasMetadata && { metadata: manifest.metadata }),
    };
    const onMissing = (/** @type {MissingFileError} */ error) => this.explainMissing(error);
    const limited = limit(MAX_READS);
    this.files = manifest.files.map((entry) => new ArrayFile(source, entry, limited, onMissing));
    /** @type {ReadonlyMap<string, Leaf>} */
    this.leaves = new Map(manifest.leaves.map((row, n) => [row.path, leafOf(row, this, manifest.places[n])]));
  }

  /** Returns the leaf of that path. Raises `InputError`. @param {string} path @returns {Leaf} */
  leaf(path) {
    const found = this.leaves.get(path);
    if (!found)
      throw new InputError(
        `${this.source.place}: expected a path of a leaf, found ${JSON.stringify(path)}. See \`leaves\``,
      );
    return found;
  }

  /**
   * Reads every leaf. Returns the tree that `write` takes: containers with tensors and values. Tied leaves are one tensor.
   *
   * @returns {Promise<unknown>}
   */
  async load() {
    // All at once, so that leaves share requests. All end before an error is raised: that of the first leaf.
    const rows = this.manifest.leaves;
    const settled = await Promise.allSettled(
      rows.map((row) => (tiedOf(row) === undefined ? this.leaf(row.path).read() : undefined)),
    );
    const read = new Map();
    settled.forEach((one, n) => {
      if (one.status === "rejected") throw one.reason;
      read.set(rows[n].path, one.value ?? read.get(tiedOf(rows[n])));
    });
    // Decoded again, so that the caller owns the containers.
    const { top, paths, leafPlaces } = decodeTree(this.manifest.tree, this.leaves.size);
    leafPlaces.forEach(([children, position], index) => (children[position] = read.get(paths[index])));
    return top[0];
  }

  /**
   * Reads every byte, and on a server all but metrics files. Returns what is wrong: the path of the leaf, or `null` if it
   * concerns no leaf, and the error.
   *
   * @returns {Promise<{leaf: string | null, error: DamagedError | UnsupportedError}[]>}
   */
  async verify() {
    /** @type {Map<ArrayFile, Map<number, Error> | Error>} */
    const damage = new Map();
    await Promise.all(this.files.map(async (file) => damage.set(file, await orError(file.verify()))));
    const problems = [];
    const known = new Set();
    for (const [path, leaf] of this.leaves) {
      const found = await orError(leaf.damage(damage));
      const errors = found instanceof Error ? [found] : found;
      for (const error of errors) known.add(error.message);
      if (errors.length) problems.push({ leaf: path, error: judged(errors[0]) });
    }
    for (const found of damage.values()) {
      for (const error of found instanceof Error ? [found] : found.values()) {
        if (!known.has(error.message)) problems.push({ leaf: null, error: judged(error) });
        known.add(error.message);
      }
    }
    const late = this.source.list ? (await this.lateMetrics()).files : [];
    for (const { error } of late) if (error) problems.push({ leaf: null, error });
    return problems;
  }

  /**
   * Reads the metrics that were added after the commit, over those of the manifest. `files` has an error for each
   * metrics file that is damaged or unsupported. Raises `SourceError` if the source cannot list files.
   */
  async lateMetrics() {
    const { place, list } = this.source;
    if (!list) throw new SourceError(`${place}: expected a source that lists files, found a server. Use \`metrics\``);
    const early = this.manifest.metrics ?? new Map();
    const { metrics, files } = await readLateMetrics(this.source, await list.call(this.source), this.identity, early);
    return { metrics: numbers(metrics), files };
  }

  /** Raises the error that says why a file is missing. @param {MissingFileError} error @returns {Promise<never>} */
  async explainMissing({ file, found }) {
    const { place } = this.source;
    const bytes = await readManifest(this.source);
    if (xxh3(bytes) !== this.identity)
      throw new ReplacedError(`${place}: expected the checkpoint that is open, found another. Open it again`);
    throw new DamagedError(
      `${place}: expected the file ${file}, found ${found}. Restore it from a copy, or take an earlier step`,
      { file },
    );
  }
}

/** Returns what a promise brings, or its error about the bytes. @template T @param {Promise<T>} promise */
async function orError(promise) {
  try {
    return await promise;
  } catch (error) {
    return judged(error);
  }
}

/** Raises an error that is not about the bytes: it leaves open whether they are right. @param {unknown} error */
function judged(error) {
  if (error instanceof DamagedError || error instanceof UnsupportedError) return error;
  throw error;
}

/** Returns the path of the leaf that is the same array. @param {import("./leaf_rows.js").LeafRow} row */
function tiedOf(row) {
  return row.kind === "array" ? row.tied : undefined;
}

/** Returns a function that does at most so many works at a time. @param {number} most @returns {<T>(work: () => Promise<T>) => Promise<T>} */
function limit(most) {
  /** @type {(() => void)[]} */
  const waiting = [];
  let free = most;
  return async (work) => {
    if (free) free--;
    else await new Promise((/** @type {(_: void) => void} */ resolve) => waiting.push(resolve));
    try {
      return await work();
    } finally {
      const next = waiting.shift();
      if (next) next();
      else free++;
    }
  };
}

/**
 * Opens a checkpoint: reads its manifest. Raises `NotFoundError`, `DamagedError` or `UnsupportedError`.
 *
 * @param {Source} source @param {Differences} [differences]
 */
export async function openSource(source, differences) {
  return new Checkpoint(source, await readManifest(source), differences);
}

/** @param {Source} source @returns {Promise<Uint8Array>} */
async function readManifest(source) {
  try {
    return (await source.read(MANIFEST, 0, undefined)).bytes;
  } catch (error) {
    if (!(error instanceof MissingFileError)) throw error;
    throw new NotFoundError(
      `${source.place}: expected a checkpoint, found no ${MANIFEST}. Check the path, or take another step`,
    );
  }
}

/** @param {ReadonlyMap<string, import("./float.js").Float>} metrics @returns {Record<string, number>} */
function numbers(metrics) {
  return Object.fromEntries(Array.from(metrics, ([name, { value }]) => [name, value]));
}
