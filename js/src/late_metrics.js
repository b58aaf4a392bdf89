/** Metrics files: metrics that were added after the commit. */

import { DamagedError, supported, UnsupportedError } from "./errors.js";
import { unknownFields } from "./fields.js";
import { decodeMetrics } from "./manifest.js";
import { openSealed } from "./sealed.js";

/** @typedef {import("./float.js").Float} Float */
/** @typedef {{name: string, error: DamagedError | UnsupportedError | null}} LateFile */

/**
 * Reads the metrics files of one manifest. Values of the greatest time count, then of the greatest name.
 *
 * @param {import("./sources/source.js").Source} source
 * @param {string[]} listed the names of its files
 * @param {string} identity the checksum of all bytes of the manifest
 * @param {ReadonlyMap<string, Float>} early the metrics of the manifest
 * @returns {Promise<{metrics: Map<string, Float>, files: LateFile[]}>}
 */
export async function readLateMetrics(source, listed, identity, early) {
  const pattern = new RegExp(`^metrics-${identity}-[0-9]{20}-[0-9a-f]{6}\\.json$`);
  const names = listed.filter((name) => pattern.test(name)).sort();
  const metrics = new Map(early);
  /** @type {LateFile[]} */
  const files = [];
  for (const name of names) {
    try {
      const { bytes } = await source.read(name, 0, undefined);
      const found = decodeLate(name, bytes);
      files.push({ name, error: null });
      for (const [metric, value] of found) metrics.set(metric, value);
    } catch (error) {
      if (!(error instanceof DamagedError || error instanceof UnsupportedError)) throw error;
      files.push({ name, error });
    }
  }
  return { metrics, files };
}

/** @param {string} name @param {Uint8Array} bytes @returns {Map<string, Float>} */
function decodeLate(name, bytes) {
  const fields = openSealed(name, bytes, { format: "treering-metrics", optional: true });
  return supported(name, () => {
    unknownFields(fields, ["format", "version", "requires", "metrics"], "the field");
    return decodeMetrics(fields.get("metrics"));
  });
}
