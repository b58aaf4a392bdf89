/** A heat map on the page: a pixel for each cell, read by the pointer or by arrow keys. */

import { el } from "../parts/elements.js";
import { number } from "../parts/numbers.js";

// Blue below zero, red above; or from light to dark if all values have one sign. White alone would vanish on a page.
const BELOW = [33, 102, 172], MIDDLE = [240, 238, 232], ABOVE = [178, 60, 43], ODD = [255, 0, 200], EMPTY = [128, 128, 128];

/** @param {import("./survey.js").HeatMap} heat @param {number} low @param {number} high */
export function heatMap(heat, low, high) {
  const canvas = el("canvas", { width: heat.columns, height: heat.rows, tabindex: 0, role: "img", class: "heat",
    "aria-label": `heat map of ${heat.rows} by ${heat.columns} cells; arrow keys read cells` });
  const readout = el("span", { class: "faint", "aria-live": "polite" });
  const means = Array.from(heat.sums, (sum, n) => (heat.counts[n] ? sum / heat.counts[n] : NaN));
  const finite = means.filter((mean) => mean - mean === 0);
  // Cells are means, whose range may be much smaller than that of the values.
  const least = finite.reduce((a, b) => Math.min(a, b), Infinity), most = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const image = canvas.getContext("2d").createImageData(heat.columns, heat.rows);
  means.forEach((mean, n) => image.data.set([...colour(mean, heat.odd[n], least, most), 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);

  let at = [0, 0];
  const show = (row, column) => {
    at = [Math.min(heat.rows - 1, Math.max(0, row)), Math.min(heat.columns - 1, Math.max(0, column))];
    const cell = at[0] * heat.columns + at[1];
    const range = (n, cells, all) => {
      const first = Math.ceil((n * all) / cells), last = Math.ceil(((n + 1) * all) / cells) - 1;
      return first >= last ? String(first) : `${first}…${last}`;
    };
    const text = heat.counts[cell] ? number(means[cell]) : heat.odd[cell] ? "" : "empty";
    const place = `[${range(at[0], heat.rows, heat.matrixRows)}, ${range(at[1], heat.columns, heat.matrixColumns)}]`;
    readout.textContent = `${place}: ${[text, heat.odd[cell] ? "NaN or infinite" : ""].filter(Boolean).join(", ")}`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    show(Math.floor(((event.clientY - box.top) / box.height) * heat.rows), Math.floor(((event.clientX - box.left) / box.width) * heat.columns));
  });
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    show(at[0] + move[0], at[1] + move[1]);
  });
  const isSampled = heat.rows * heat.columns < heat.matrixRows * heat.matrixColumns;
  const range = finite.length ? `${isSampled ? "means of cells " : ""}${number(least)} to ${number(most)}` : "no finite value";
  const colours = least < 0 && most > 0 ? ", blue below zero, red above" : "";
  const odd = heat.odd.some(Boolean) ? el("span", {}, el("i", { style: `background:rgb(${ODD})` }), "NaN or infinite") : null;
  return el("div", { class: "card" }, el("header", {}, el("b", {}, "heat map"), readout), canvas,
    el("div", { class: "legend" }, el("span", {}, `${heat.matrixRows} × ${heat.matrixColumns}, ${range}${colours}`), odd));
}

function colour(mean, isOdd, least, most) {
  if (isOdd) return ODD;
  if (Number.isNaN(mean)) return EMPTY;
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  const hasBoth = least < 0 && most > 0;
  const share = hasBoth ? Math.abs(mean) / size : most > least ? (mean - least) / (most - least) : 0;
  const end = (hasBoth ? mean < 0 : most <= 0) ? BELOW : ABOVE;
  const amount = !hasBoth && most <= 0 ? 1 - share : share;
  return MIDDLE.map((from, n) => Math.round(from + (end[n] - from) * amount));
}
