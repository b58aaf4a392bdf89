/** Decodes what the manifest records about devices. It is information: no read depends on it. */

import { check } from "./errors.js";
import { integer, list, object, plain, text, unknownFields, userJson } from "./fields.js";
import { decodeSharding } from "./layouts.js";

/** @typedef {import("./json.js").Json} Json */

const AXIS_TYPES = ["auto", "explicit", "manual"];

/** @param {Json} json @param {string} place @returns {number[]} */
function positions(json, place) {
  const found = list(json, place).map((position) => integer(position, place));
  check(new Set(found).size === found.length, place, "each position once", json);
  return found;
}

/** @param {Json} json @param {string} place */
function flag(json, place) {
  check(typeof json === "boolean", place, "true or false", json);
}

/** @param {Json} json @param {string} place */
function axisTypes(json, place) {
  for (const type of list(json, place))
    check(AXIS_TYPES.includes(/** @type {any} */ (type)), place, AXIS_TYPES.join(", "), type);
}

/** @type {Record<string, (json: Json, place: string) => unknown>} */
const FIELDS = {
  axis_types: axisTypes,
  devices: positions,
  job_devices: integer,
  local: flag,
  device: integer,
  committed: flag,
  platform: text,
  memory_kind: text,
  layout: (json, place) => list(json, place).map((axis) => integer(axis, place)),
  cast: flag,
  unrecorded: text,
};

/** @param {Json} json */
function checkPlace(json) {
  const fields = object(json, "a place");
  for (const [name, read] of Object.entries(FIELDS)) {
    const found = fields.get(name);
    if (found !== undefined) read(found, `${name} of a place`);
  }
  if (fields.has("mesh") || fields.has("spec")) {
    const mesh = decodeSharding(fields);
    const types = fields.get("axis_types");
    check(types === undefined || list(types, "").length === mesh.size, "axis_types", `${mesh.size} types`, types);
    const devices = fields.get("devices");
    const count = Array.from(mesh.values()).reduce((product, length) => product * length, 1);
    check(devices === undefined || list(devices, "").length === count, "devices", `${count} devices`, devices);
  }
  unknownFields(fields, ["mesh", "spec", ...Object.keys(FIELDS)], "a place");
}

/**
 * Returns the place of each leaf in plain values, undefined for a leaf without one. Raises `FormatFault`.
 *
 * @param {Json} json
 * @param {number} leafCount
 * @returns {(Record<string, unknown> | undefined)[]}
 */
export function decodePlacement(json, leafCount) {
  const fields = object(json, "placement");
  const places = list(fields.get("places"), "places");
  places.forEach(checkPlace);
  const shown = places.map((place) => /** @type {Record<string, unknown>} */ (plain(place)));
  /** @type {[number, number][]} */
  const runs = [];
  let placed = 0;
  for (const run of list(fields.get("leaves"), "leaves of placement")) {
    const [count, number] = list(run, "a run of placement", 2);
    runs.push([integer(count, "a run of placement", 1), integer(number, "a run of placement", -1, places.length - 1)]);
    placed += runs[runs.length - 1][0];
  }
  check(placed === leafCount, "leaves of placement", `${leafCount} leaves`, placed);
  unknownFields(fields, ["places", "leaves"], "placement");
  // Only now: counts of a hostile file may be great.
  return runs.flatMap(([count, number]) => new Array(count).fill(shown[number]));
}

/** Checks `static`. Raises `FormatFault`. @param {Json} json */
export function checkStatic(json) {
  for (const [path, values] of object(json, "static")) {
    for (const value of object(values, `static ${path}`).values()) userJson(value, `static ${path}`, false);
  }
}
