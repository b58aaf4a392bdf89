/** The report of a run. Its data are in the page. */

import { chart, spark, WIDTH } from "../parts/chart.js";
import { el, svg } from "../parts/elements.js";
import { matches } from "../parts/filter.js";
import { bytes, duration, finite, number, percent, when } from "../parts/numbers.js";
import { metric, metricNames, noMetrics, runsView } from "../parts/runs.js";
import { table } from "../parts/table.js";
import { treemap } from "../parts/treemap.js";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("report");
const STATES = ["damaged", "unsupported", "unfinished", "closed"];
const MAX_LISTED = 200; // This many leaves that only one step has are listed.

// As `treering diff` prints it: of arrays that differ a little, four digits would say 1.
const cosine = (value) => (finite(value) ? String(Number(value.toPrecision(7))) : number(value));

function title() {
  const good = data.steps.filter((row) => row.state === "good");
  const times = good.map((row) => row.created).filter(finite);
  const plural = (count, one, more) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
  const parts = [plural(good.length, "valid step", "valid steps"), ...STATES.filter((state) => data.steps.some((row) => row.state === state))
    .map((state) => `${data.steps.filter((row) => row.state === state).length} ${state}`), bytes(data.steps.reduce((sum, row) => sum + (row.nbytes || 0), 0))];
  if (times.length > 1) parts.push(`over ${duration(Math.max(...times) - Math.min(...times))}`);
  if (data.finished) parts.push("finished");
  if (data.setAside.length) parts.push(`archived by a rewind: ${data.setAside.join(", ")}`);
  return [el("h1", {}, data.run), el("p", { class: "path" }, data.path), el("p", {}, parts.join(" · ")),
    el("p", {}, `Made ${when(data.made)} by Treering ${data.version}.`),
    ...data.notes.map((note) => el("p", { class: "note" }, note))];
}

const runsTitle = () => [el("h1", {}, data.run), el("p", { class: "path" }, data.path),
  el("p", {}, `Made ${when(data.made)} by Treering ${data.version}.`), ...data.notes.map((note) => el("p", { class: "note" }, note))];

function timeline() {
  const good = data.steps.filter((row) => row.state === "good");
  const names = metricNames(good);
  const charts = names.map((name) => chart(name, good.map((row) => [row.step, metric(row, name)]).filter((p) => p[1] !== null)));
  charts.push(chart("size", good.map((row) => [row.step, row.nbytes]), { format: bytes, zero: true }));
  const gaps = good.slice(1).map((row, n) => [row.step, row.created - good[n].created])
    .filter((p, n) => good[n].created && good[n + 1].created);
  if (gaps.length) charts.push(chart("time between saves", gaps, { format: duration, zero: true }));
  const columns = [
    { title: "step", value: (row) => row.step, cell: (row) => String(row.step) },
    { title: "saved", value: (row) => row.created, cell: (row) => when(row.created) },
    { title: "size", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
    ...names.map((name) => ({ title: name, value: (row) => metric(row, name), cell: (row) => number(metric(row, name)),
      class: (row) => (typeof metric(row, name) === "string" ? "bad" : "") })),
    { title: "notes", value: (row) => row.state, class: (row) => (row.state === "good" ? "" : "bad"),
      cell: (row) => [...(row.state === "good" ? [] : [row.state]), ...(row.format === "treering" ? [] : [row.format]),
        ...row.marks].join(", ") },
  ];
  return [el("h2", {}, "Timeline"), ...(names.length ? [] : [noMetrics()]), el("div", { class: "cards", id: "timeline" }, charts),
    el("details", {}, el("summary", {}, "The steps as a table"), table(columns, data.steps, { name: "steps" }).node)];
}

const placed = []; // what can be drawn when its place on the page is known

function sizes() {
  if (!data.tree || !data.tree.nbytes) return [];
  const { nodes, draw } = treemap(data.tree);
  placed.push(draw);
  return [el("h2", {}, `What is saved, by size (step ${data.treeStep})`),
    el("p", {}, "A click goes into a part; layers that are alike are one rectangle."), ...nodes];
}

// The histograms of a leaf, a row of shades for each step, on one axis of values.
function histograms(leaf) {
  const steps = Object.keys(leaf.bins).map(Number).sort((a, b) => a - b).filter((n) => finite(leaf.low[n]));
  if (!steps.length) return null;
  const low = Math.min(...steps.map((n) => leaf.low[n])), high = Math.max(...steps.map((n) => leaf.high[n]));
  const across = (value) => 44 + (high > low ? (value - low) / (high - low) : 0) * (WIDTH - 48);
  const tall = Math.max(4, Math.min(14, 220 / steps.length)), most = steps.length * tall + 14;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${most}`, role: "img", "aria-label": "histograms" });
  steps.forEach((n, row) => {
    const counts = Uint8Array.from(atob(leaf.bins[n]), (char) => char.charCodeAt(0));
    const width = (leaf.high[n] - leaf.low[n]) / counts.length;
    counts.forEach((count, bin) => {
      if (!count) return;
      const x = across(leaf.low[n] + bin * width), right = across(leaf.low[n] + (bin + 1) * width);
      drawing.append(svg("rect", { class: "bar", x, y: row * tall, width: Math.max(right - x, 1), height: tall - 0.5,
        opacity: (0.08 + (0.92 * count) / 255).toFixed(2) }));
    });
    if (tall > 7 || row % 4 === 0) drawing.append(svg("text", { x: 0, y: (row + 1) * tall - 1 }, String(data.read[n])));
  });
  drawing.append(svg("text", { x: 44, y: most - 2 }, number(low)),
    svg("text", { x: WIDTH, y: most - 2, "text-anchor": "end" }, number(high)));
  return el("div", { class: "card" }, el("header", {}, el("b", {}, "histogram by step"),
    el("span", { class: "faint" }, "darker: more values")), drawing);
}

const last = (values) => values[values.length - 1];
const zip = (values) => values.map((value, n) => [data.read[n], value]);

function detail(leaf) {
  const around = leaf.mean.map((mean, n) => (finite(mean) ? [mean - leaf.std[n], mean + leaf.std[n]] : [null, null]));
  const range = leaf.low.map((low, n) => [low, leaf.high[n]]);
  const cards = [chart("norm", zip(leaf.norm)), chart("mean ± std", zip(leaf.mean), { band: around }),
    chart("std, with the range of the values", zip(leaf.std), { band: range }), histograms(leaf)];
  for (const [name, words] of [["nan", "NaN"], ["inf", "infinite values"], ["zeros", "zeros"]])
    if (leaf[name]) cards.push(chart(words, zip(leaf[name])));
  return el("div", { class: "cards" }, cards);
}

const path = { title: "leaf", value: (leaf) => leaf.path, class: () => "path", cell: (leaf) => leaf.path || "(root)" };

function leaves() {
  if (!data.leaves.length) return [el("h2", {}, "The leaves over time"), el("p", { id: "no-leaves" }, data.read.length
    ? "These steps have no arrays with statistics." : "No statistics: --steps N computes them for N steps.")];
  const odd = (leaf) => ["nan", "inf"].reduce((sum, name) => sum + ((leaf[name] && last(leaf[name])) || 0), 0);
  const ever = (leaf) => Boolean(leaf.nan || leaf.inf);
  const columns = [path,
    { title: "type", value: (leaf) => leaf.what, cell: (leaf) => leaf.what + (last(leaf.there) ? "" : ", not in the last step") },
    { title: "size", value: (leaf) => leaf.nbytes, cell: (leaf) => bytes(leaf.nbytes) },
    { title: "norm over steps", value: (leaf) => last(leaf.norm), cell: (leaf) => spark(zip(leaf.norm)) },
    { title: "norm", value: (leaf) => last(leaf.norm), cell: (leaf) => number(last(leaf.norm)) },
    { title: "mean", value: (leaf) => last(leaf.mean), cell: (leaf) => number(last(leaf.mean)) },
    { title: "std", value: (leaf) => last(leaf.std), cell: (leaf) => number(last(leaf.std)) },
    { title: "zeros", value: (leaf) => (leaf.zeros ? last(leaf.zeros) : 0), cell: (leaf) => (leaf.zeros && last(leaf.zeros) !== null ? percent(last(leaf.zeros) / leaf.size) : "") },
    { title: "NaN, infinite", value: odd, class: (leaf) => (ever(leaf) ? "bad" : ""), cell: (leaf) => (odd(leaf) ? number(odd(leaf)) : ever(leaf) ? "earlier" : "") },
  ];
  const shown = table(columns, data.leaves, { name: "leaves", open: detail });
  const count = el("span", { class: "faint", id: "leaf-count" });
  const tell = (rows) => { count.textContent = `${rows.length.toLocaleString("en")} of ${data.leaves.length.toLocaleString("en")} leaves`; };
  const filter = el("input", { type: "search", id: "filter", placeholder: "filter: parts of paths, * for anything",
    "aria-label": "filter leaves", oninput: () => {
      const rows = data.leaves.filter((leaf) => matches(leaf.path, filter.value));
      shown.show(rows);
      tell(rows);
    } });
  tell(data.leaves);
  const read = data.read.length === 1 ? `step ${data.read[0]}` : `${data.read.length} steps, ${data.read[0]} to ${data.read[data.read.length - 1]}`;
  return [el("h2", {}, "The leaves over time"), el("p", {}, `Read at ${read}; numbers are those of the last step and of finite values. The norm is the root of the sum of squares. A click on a leaf shows its curves and histograms.`),
    el("div", { class: "controls" }, filter, count), shown.node];
}

function comparison() {
  const parts = [];
  if (data.read.length > 1 && data.leaves.length) {
    const choices = (chosen) => data.read.map((step, n) => el("option", { value: n, selected: n === chosen ? "" : undefined }, String(step)));
    const a = el("select", { id: "compare-a", "aria-label": "first step" }, choices(0));
    const b = el("select", { id: "compare-b", "aria-label": "second step" }, choices(data.read.length - 1));
    const change = (leaf, name) => {
      const [x, y] = [leaf[name][a.value], leaf[name][b.value]];
      return finite(x) && finite(y) ? y - x : null;
    };
    const relative = (leaf) => {
      const by = change(leaf, "norm"), x = leaf.norm[a.value];
      return by === null ? null : by === 0 ? 0 : x ? by / x : null;
    };
    const columns = [path,
      { title: "norm before", value: (leaf) => leaf.norm[a.value], cell: (leaf) => number(leaf.norm[a.value]) },
      { title: "norm after", value: (leaf) => leaf.norm[b.value], cell: (leaf) => number(leaf.norm[b.value]) },
      { title: "change of the norm", value: (leaf) => (relative(leaf) === null ? null : Math.abs(relative(leaf))), cell: (leaf) => percent(relative(leaf)) },
      { title: "change of the mean", value: (leaf) => change(leaf, "mean"), cell: (leaf) => number(change(leaf, "mean")) },
      { title: "change of std", value: (leaf) => change(leaf, "std"), cell: (leaf) => number(change(leaf, "std")) },
    ];
    const shown = table(columns, data.leaves, { name: "compared", sort: 3, down: true });
    for (const select of [a, b]) select.addEventListener("change", () => shown.show(data.leaves));
    parts.push(el("p", {}, "What changed in the statistics. Equal statistics do not mean equal values."),
      el("div", { class: "controls" }, "steps", a, "and", b), shown.node);
  }
  const found = data.diff;
  if (found) {
    const kinds = new Map(data.leaves.map((leaf) => [leaf.path, leaf.what]));
    const what = (row) => (row.share === undefined ? row.what : kinds.get(row.path) ?? row.what); // The other columns have the rest.
    const columns = [path,
      { title: "type", value: what, class: () => "path", cell: what },
      { title: "values that differ", value: (row) => (row.share === undefined ? null : row.share), cell: (row) => percent(row.share) },
      { title: "largest difference", value: (row) => row.largest ?? null, cell: (row) => number(row.largest) },
      { title: "relative difference", value: (row) => row.relative ?? null, cell: (row) => number(row.relative) },
      { title: "cosine", value: (row) => row.cosine ?? null, cell: (row) => cosine(row.cosine) },
    ];
    parts.push(el("h2", {}, `Value by value: step ${found.a} and step ${found.b}`),
      el("p", { id: "diff-summary" }, [`Leaves: ${found.equal.toLocaleString("en")} equal, ${found.differing.toLocaleString("en")} different`,
        ...[["onlyA", found.a], ["onlyB", found.b]].filter(([side]) => found[side].length)
          .map(([side, step]) => `${found[side].length} only in ${step}`)].join(", ") + "."),
      ...[["onlyA", found.a], ["onlyB", found.b]].filter(([side]) => found[side].length).map(([side, step]) =>
        el("details", {}, el("summary", {}, `only in ${step}`), found[side].slice(0, MAX_LISTED).map((one) => el("p", { class: "path" }, one)))));
    if (found.changed.length) parts.push(el("p", {}, "The relative difference is the largest difference divided by the largest magnitude. "
      + "A cosine of 1 means the same direction."), table(columns, found.changed, { name: "changed", sort: 4, down: true }).node);
  }
  return parts.length ? [el("h2", {}, "Two steps compared"), ...parts] : [];
}

if (data.runs) root.append(...runsTitle(), ...runsView(data.runs, null),
  el("p", { class: "faint", id: "only-metrics" }, "A report of one run also has its tree and the statistics of its arrays."));
else root.append(...title(), ...timeline(), ...sizes(), ...leaves(), ...comparison());
placed.forEach((draw) => draw());
