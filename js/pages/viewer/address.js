/** What the page shows, as the part of its address after #, which is not sent to servers. */

/**
 * @typedef {object} View
 * @property {string} place `served`, `url=` and a URL, `dropped=` and a number, or nothing
 * @property {string} run the name of a run in a directory
 * @property {string} step the name of a step; empty for the newest
 * @property {string} compare what the step is compared with: the name of another step, or a place
 * @property {string[]} leaves the paths of the leaves that are open
 */

/** @param {string} hash @returns {View} */
export function parseView(hash) {
  const text = hash.replace(/^#/, "");
  const at = /(?:^|&)url=/.exec(text); // The URL is the rest: it may have & itself.
  const fields = new URLSearchParams(at ? text.slice(0, at.index) : text);
  const field = (name) => fields.get(name) ?? "";
  let place = fields.has("served") ? "served" : fields.has("dropped") ? `dropped=${field("dropped")}` : "";
  if (at) place = `url=${decoded(text.slice(at.index + at[0].length))}`;
  return { place, run: field("run"), step: field("step"), compare: field("compare"), leaves: fields.getAll("leaf") };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {View} view @returns {string} */
export function formatView({ place, run, step, compare, leaves }) {
  const encoded = (text) => encodeURIComponent(text).replace(/%2F/g, "/");
  const fields = Object.entries({ run, step, compare }).filter(([, value]) => value);
  const pairs = [...fields, ...leaves.map((leaf) => ["leaf", leaf])].map(([name, value]) => `${name}=${encoded(value)}`);
  const isUrl = place.startsWith("url=");
  return `#${[...(isUrl || !place ? [] : [place]), ...pairs, ...(isUrl ? [`url=${encoded(place.slice(4))}`] : [])].join("&")}`;
}
