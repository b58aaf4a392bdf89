/** A leaf on the page: its facts, and on request its statistics, histogram, heat map and values. */

import { WIDTH } from "../parts/chart.js";
import { el, printable, svg } from "../parts/elements.js";
import { bytes, number, percent } from "../parts/numbers.js";
import { isNumeric, numbersOf, tensorsOf } from "./chunks.js";
import { valueText } from "./contents.js";
import { heatMap } from "./heat_map.js";
import { Survey } from "./survey.js";

const READ_AT_ONCE = 32 << 20; // A larger leaf is read on request.
const BARS = 64;
const MAX_TEXT = 10_000;

/** Returns the element for a leaf. @param {import("./contents.js").Leaf} leaf */
export function leafView(leaf) {
  const result = el("div", { class: "result", "aria-live": "polite" });
  const facts = el("dl", {}, leaf.facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: "path" }, text)]));
  const panel = el("div", { class: "panel", role: "region", "aria-label": printable(leaf.path) }, facts, result);
  const read = () => run(leaf, result).catch((error) => result.replaceChildren(el("p", { class: "note", role: "alert" }, printable(error.message))));
  if (leaf.nbytes <= READ_AT_ONCE) setTimeout(read); // once the panel is on the page
  else result.append(el("button", { class: "act", onclick: read }, `Read ${bytes(leaf.nbytes)}`));
  return panel;
}

async function run(leaf, result) {
  if (leaf.value) return result.replaceChildren(el("pre", {}, printableLines(valueText(await leaf.value(), MAX_TEXT))));
  if (!isNumeric(leaf.dtype) || leaf.what.startsWith("key<")) return result.replaceChildren(el("pre", {}, await firstElements(leaf)));
  const survey = new Survey(leaf.shape);
  let stopped = false;
  const progress = el("progress", { max: Math.max(survey.size, 1), value: 0, "aria-label": "reading" });
  result.replaceChildren(progress, el("button", { class: "act", onclick: () => (stopped = true) }, "Stop"));
  for await (const { first, numbers } of numbersOf(leaf)) {
    survey.add(first, numbers);
    progress.value = survey.read;
    if (stopped || !result.isConnected) break; // The user has closed the panel.
  }
  result.replaceChildren(...surveyed(survey, leaf));
}

/** @param {Survey} survey @param {import("./contents.js").Leaf} leaf */
function surveyed(survey, leaf) {
  const rows = [["minimum", survey.finite ? number(survey.low) : "–"], ["maximum", survey.finite ? number(survey.high) : "–"],
    ["mean", number(survey.mean) || "–"], ["std", number(survey.deviation) || "–"],
    ["zeros", counted(survey.zeros, survey.read)], ["NaN", counted(survey.nan, survey.read)], ["infinite", counted(survey.infinite, survey.read)]];
  const isOdd = (name) => (name === "NaN" && survey.nan) || (name === "infinite" && survey.infinite);
  const parts = [el("dl", { class: "stats" }, rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: isOdd(name) ? "bad" : "" }, text)]))];
  if (survey.read < survey.size) parts.unshift(el("p", { class: "note" }, `Stopped: of the first ${percent(survey.read / survey.size)} of the elements.`));
  const cards = [];
  if (survey.finite) cards.push(histogram(survey.histogram.bars(BARS)));
  if (survey.size > 1) cards.push(heatMap(survey.heat, survey.low, survey.high));
  parts.push(el("div", { class: "cards" }, cards));
  const values = survey.begin.map(leaf.dtype.startsWith("bool") ? (one) => String(Boolean(one)) : short).join(", ");
  const title = survey.begin.length < survey.size ? `the first ${survey.begin.length} values` : "values";
  parts.push(el("details", { open: survey.size <= 16 ? "" : undefined }, el("summary", {}, title), el("pre", {}, values)));
  return parts;
}

const counted = (count, of) => (count ? `${number(count)} (${percent(count / of)})` : "0");
const short = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6))));
const printableLines = (text) => text.split("\n").map(printable).join("\n");

/** A bar for each part of the range. */
function histogram({ low, width, counts }) {
  const most = Math.max(...counts), tall = 110, across = WIDTH / counts.length;
  const readout = el("span", { class: "faint" }, `${counts.length} bars`);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${tall + 14}`, role: "img", "aria-label": `histogram from ${number(low)} to ${number(low + width * counts.length)}` },
    counts.map((count, n) => {
      const high = count ? Math.max(1, (count / most) * tall) : 0;
      return svg("rect", { class: "bar", x: n * across, y: tall - high, width: Math.max(across - 0.5, 0.5), height: high });
    }),
    svg("text", { x: 0, y: tall + 11 }, number(low)), svg("text", { x: WIDTH, y: tall + 11, "text-anchor": "end" }, number(low + width * counts.length)));
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const n = Math.min(counts.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * counts.length)));
    readout.textContent = `from ${number(low + n * width)}: ${number(counts[n])}`;
  });
  return el("div", { class: "card histogram" }, el("header", {}, el("b", {}, "histogram"), readout), drawing);
}

async function firstElements(leaf) {
  for await (const { data } of tensorsOf(leaf)) {
    return printableLines(Array.from(data.slice(0, 64), (one) => valueText(one, 200)).join("\n"));
  }
  return "no elements";
}
