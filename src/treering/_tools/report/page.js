"use strict";
(() => {
// pages/parts/elements.js
const m0 = (() => {
function add(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => add(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  add(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
return { add, el, svg };
})();

// pages/parts/numbers.js
const m1 = (() => {
function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value; // nan, inf
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}
function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit++; }
  return `${unit ? Number(count.toPrecision(3)) : count} ${units[unit]}`;
}
function duration(seconds) {
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600)} h` : `${number(seconds / 86400)} d`;
}
const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");
const percent = (part) => (part === null || part === undefined ? "" : `${number(100 * part)} %`);
const names = new Intl.Collator("en", { numeric: true });
const finite = (value) => typeof value === "number" && Number.isFinite(value);
return { number, bytes, duration, when, percent, names, finite };
})();

// pages/parts/chart.js
const m2 = (() => {
const { add, el, svg } = m0;
const { finite, number } = m1;

const WIDTH = 320, HEIGHT = 110, LEFT = 4, RIGHT = 4, TOP = 14, BOTTOM = 14;

function scales(xs, ys) {
  const low = Math.min(...ys), high = Math.max(...ys), first = Math.min(...xs), last = Math.max(...xs);
  return {
    low, high, first, last,
    x: (x) => LEFT + (last > first ? (x - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT),
    y: (y) => TOP + (high > low ? (high - y) / (high - low) : 0.5) * (HEIGHT - TOP - BOTTOM),
  };
}

// The stretches of finite values: a curve is not drawn across what is not.
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (finite(point[1])) found[found.length - 1].push(point);
    else found.push([]);
  }
  return found.filter((run) => run.length);
}

// A curve over steps, with the value at the pointer next to its title; `band` has the range around it.
function chart(title, points, { format = number, band = null, zero = false } = {}) {
  const known = points.filter((point) => point[1] !== null), shown = known.filter((point) => finite(point[1]));
  const readout = el("span", { class: "faint" });
  const card = el("div", { class: "card chart" }, el("header", {}, el("b", {}, title), readout));
  if (!shown.length) return add(card, {}, [el("p", { class: "note" }, known.length ? "no finite value" : "no value")]);
  const limits = [...(band ? band.flat().filter(finite) : []), ...(zero ? [0] : [])];
  const at = scales(known.map((p) => p[0]), [...shown.map((p) => p[1]), ...limits]);
  const dot = svg("circle", { class: "dot", r: 3 });
  const point = (p) => `${at.x(p[0]).toFixed(1)},${at.y(p[1]).toFixed(1)}`;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  if (band) {
    const both = points.map((p, n) => [p[0], ...band[n]]).filter((p) => finite(p[1]) && finite(p[2]));
    const edge = [...both.map((p) => [p[0], p[1]]), ...both.reverse().map((p) => [p[0], p[2]])];
    drawing.append(svg("polygon", { class: "band", points: edge.map(point).join(" ") }));
  }
  drawing.append(
    ...runs(known).map((run) => svg("polyline", { class: "curve", points: run.map(point).join(" ") })),
    ...known.filter((p) => !finite(p[1])).map((p) => svg("circle", { class: "dot bad", r: 2.5, cx: at.x(p[0]), cy: HEIGHT - BOTTOM })),
    svg("text", { x: LEFT, y: 10 }, format(at.high)),
    svg("text", { x: LEFT, y: HEIGHT - 3 }, `step ${at.first}`),
    svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, at.last > at.first ? String(at.last) : ""),
    svg("text", { x: WIDTH - RIGHT, y: 10, "text-anchor": "end" }, `low ${format(at.low)}`), dot);
  const show = (p) => {
    dot.setAttribute("cx", at.x(p[0]));
    dot.setAttribute("cy", finite(p[1]) ? at.y(p[1]) : HEIGHT - BOTTOM);
    dot.setAttribute("class", finite(p[1]) ? "dot" : "dot bad");
    readout.textContent = `${p[0]}: ${finite(p[1]) ? format(p[1]) : p[1]}`;
    readout.className = finite(p[1]) ? "faint" : "bad";
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    show(known.reduce((best, p) => (Math.abs(at.x(p[0]) - x) < Math.abs(at.x(best[0]) - x) ? p : best)));
  });
  show(known[known.length - 1]);
  return add(card, {}, [drawing]);
}

function spark(values) {
  const points = values.map((value, n) => [n, value]).filter((p) => finite(p[1]));
  if (points.length < 2) return "";
  const low = Math.min(...points.map((p) => p[1])), high = Math.max(...points.map((p) => p[1]));
  const place = (p) => {
    const y = high > low ? (high - p[1]) / (high - low) : 0.5;
    return `${(1 + (p[0] / Math.max(values.length - 1, 1)) * 108).toFixed(1)},${(2 + y * 18).toFixed(1)}`;
  };
  return svg("svg", { viewBox: "0 0 110 22", "aria-hidden": "true" },
    svg("polyline", { class: "curve", points: points.map(place).join(" ") }));
}
return { WIDTH, chart, spark };
})();

// pages/parts/filter.js
const m3 = (() => {
// What is typed: parts of paths in any order, with * for anything.
function matches(path, typed) {
  return typed.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const parts = word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(parts.join(".*")).test(path.toLowerCase());
  });
}
return { matches };
})();

// pages/parts/table.js
const m4 = (() => {
const { el } = m0;
const { finite, names } = m1;

const ROWS = 200; // A table draws this many rows at a time.

// Tables that sort by a click on a column, draw so many rows, and say how many there are.
function table(columns, rows, { sort = 0, down = false, name, open = null } = {}) {
  const body = el("tbody"), head = el("tr"), more = el("p");
  const state = { sort, down, most: ROWS, rows };
  const value = (row) => columns[state.sort].value(row);
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (typeof x !== typeof y || x === null || y === null) return finite(x) ? -1 : finite(y) ? 1 : 0; // what is no number comes last
    const compared = typeof x === "string" ? names.compare(x, y) : x - y;
    return compared * (state.down ? -1 : 1);
  };
  const draw = () => {
    head.replaceChildren(...columns.map((column, n) => el("th", {
      "aria-sort": n === state.sort ? (state.down ? "descending" : "ascending") : undefined },
      el("button", { onclick: () => {
        state.down = n === state.sort ? !state.down : n > 0;
        state.sort = n;
        draw();
      } }, column.title + (n === state.sort ? (state.down ? " ↓" : " ↑") : "")))));
    const sorted = [...state.rows].sort(order).slice(0, state.most);
    body.replaceChildren(...sorted.map((row) => {
      const line = el("tr", { class: open ? "leaf" : undefined, tabindex: open ? 0 : undefined },
        columns.map((column) => el("td", { class: column.class && column.class(row) }, column.cell(row))));
      if (open) {
        const toggle = () => {
          if (line.nextSibling && line.nextSibling.className === "inside") line.nextSibling.remove();
          else line.after(el("tr", { class: "inside" }, el("td", { class: "detail", colspan: columns.length }, open(row))));
        };
        line.addEventListener("click", toggle);
        line.addEventListener("keydown", (event) => event.key === "Enter" && toggle());
      }
      return line;
    }));
    const left = state.rows.length - sorted.length;
    more.replaceChildren(...(left > 0 ? [`${sorted.length} of ${state.rows.length.toLocaleString("en")} are shown. `,
      el("button", { class: "more", onclick: () => { state.most += 5 * ROWS; draw(); } }, "Show more")] : []));
  };
  draw();
  return {
    node: el("div", {}, el("div", { class: "scroll" }, el("table", { id: name }, el("thead", {}, head), body)), more),
    show: (some) => { state.rows = some; state.most = ROWS; draw(); },
  };
}
return { table };
})();

// pages/parts/treemap.js
const m5 = (() => {
const { el } = m0;
const { bytes } = m1;

const COLOURS = ["#8ab6d6", "#e3b778", "#9cc69b", "#d99a9a", "#b8a5d3", "#c9c27a", "#8fc7c2", "#d3a5c4"];

// Rectangles of as even sides as can be: Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
function squarify(parts, x, y, width, height) {
  const placed = [], left = [...parts].sort((a, b) => b.nbytes - a.nbytes);
  let rest = left.reduce((sum, part) => sum + part.nbytes, 0);
  while (left.length && width > 0 && height > 0) {
    const side = Math.min(width, height), scale = (width * height) / rest;
    let row = [], sum = 0, worst = Infinity;
    while (left.length) {
      const next = sum + left[0].nbytes * scale, areas = [...row.map((part) => part.nbytes), left[0].nbytes];
      const ratio = Math.max((side * side * areas[0] * scale) / (next * next),
        (next * next) / (side * side * areas[areas.length - 1] * scale));
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      row.push(left.shift());
    }
    const thick = sum / side;
    let along = 0;
    for (const part of row) {
      const long = (part.nbytes * scale) / thick;
      placed.push(width >= height ? [part, x, y + along, thick, long] : [part, x + along, y, long, thick]);
      along += long;
      rest -= part.nbytes;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
  }
  return placed;
}

// Returns the elements, and the function that draws them: call it when their place on the page is known.
function treemap(tree) {
  const dtypes = new Map(); // by their bytes
  const count = (part) => {
    if (part.parts) part.parts.forEach(count);
    else dtypes.set(part.dtype || "", (dtypes.get(part.dtype || "") || 0) + part.nbytes);
  };
  count(tree);
  const order = [...dtypes.keys()].sort((a, b) => dtypes.get(b) - dtypes.get(a));
  const colour = (part) => (part.dtype ? COLOURS[order.indexOf(part.dtype) % COLOURS.length] : "#cfcac0");
  const map = el("div", { class: "map", id: "treemap" }), crumbs = el("div", { class: "crumbs" });
  let trail = [tree];

  function rectangles(part, x, y, width, height, level) {
    for (const [one, left, top, wide, high] of squarify(part.parts || [], x, y, width, height)) {
      if (wide < 1 || high < 1) continue;
      const about = `${one.path || one.name}\n${one.what || `${one.leaves.toLocaleString("en")} leaves`}, ${bytes(one.nbytes)}`;
      map.append(el("button", { class: one.parts ? "" : "end", title: about, "data-path": one.path,
        style: `left:${left}px;top:${top}px;width:${wide}px;height:${high}px;background:${colour(one)}`,
        onclick: () => go(trail[trail.length - 1], one) },
        wide > 30 && high > 15 ? `${one.name}${high > 34 || wide > 160 ? `  ${bytes(one.nbytes)}` : ""}` : ""));
      if (one.parts && level < 4 && wide > 24 && high > 34) rectangles(one, left + 2, top + 16, wide - 4, high - 18, level + 1);
    }
  }
  // The way from a part to one of those in it.
  function way(from, to) {
    if (from === to) return [];
    for (const part of from.parts || []) {
      const rest = way(part, to);
      if (rest) return [part, ...rest];
    }
    return null;
  }
  function go(from, to) {
    const path = way(from, to);
    trail.push(...(to.parts ? path : path.slice(0, -1)));
    draw();
  }
  function draw() {
    const top = trail[trail.length - 1];
    crumbs.replaceChildren(...trail.flatMap((part, n) => [n ? " / " : "", el("button", {
      onclick: () => { trail = trail.slice(0, n + 1); draw(); } }, n ? part.name : "all")]), ` ${bytes(top.nbytes)}`);
    map.replaceChildren();
    const width = map.clientWidth, height = map.clientHeight;
    if (top.parts) rectangles(top, 0, 0, width, height, 0);
    else rectangles({ parts: [top] }, 0, 0, width, height, 0);
  }
  let width = 0;
  const fit = () => { if (map.clientWidth !== width) { width = map.clientWidth; draw(); } };
  new ResizeObserver(fit).observe(map);
  const legend = order.filter(Boolean).map((dtype) => el("span", {},
    el("i", { style: `background:${COLOURS[order.indexOf(dtype) % COLOURS.length]}` }), `${dtype} ${bytes(dtypes.get(dtype))}`));
  return { nodes: [crumbs, map, el("div", { class: "legend" }, legend)], draw: fit };
}
return { treemap };
})();

// pages/report/report.js
const m6 = (() => {
const { chart, spark, WIDTH } = m2;
const { el, svg } = m0;
const { matches } = m3;
const { bytes, duration, finite, number, percent, when } = m1;
const { table } = m4;
const { treemap } = m5;

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("report");
const STATES = ["damaged", "unsupported", "unfinished", "closed"];
const MAX_LISTED = 200; // This many leaves that only one step has are listed.

function title() {
  const good = data.steps.filter((row) => row.state === "good");
  const times = good.map((row) => row.created).filter(finite);
  const plural = (count, one, more) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
  const parts = [plural(good.length, "good step", "good steps"), ...STATES.filter((state) => data.steps.some((row) => row.state === state))
    .map((state) => `${data.steps.filter((row) => row.state === state).length} ${state}`), bytes(data.steps.reduce((sum, row) => sum + (row.nbytes || 0), 0))];
  if (times.length > 1) parts.push(`over ${duration(Math.max(...times) - Math.min(...times))}`);
  if (data.finished) parts.push("finished");
  if (data.setAside.length) parts.push(`archived by a rewind: ${data.setAside.join(", ")}`);
  return [el("h1", {}, data.run), el("p", { class: "path" }, data.path), el("p", {}, parts.join(" · ")),
    el("p", {}, `Made ${when(data.made)} by Treering ${data.version}.`),
    ...data.notes.map((note) => el("p", { class: "note" }, note))];
}

const metric = (row, name) => (Object.hasOwn(row.metrics, name) ? row.metrics[name] : null);

function timeline() {
  const good = data.steps.filter((row) => row.state === "good");
  const names = [...new Set(good.flatMap((row) => Object.keys(row.metrics)))];
  const charts = names.map((name) => chart(name, good.map((row) => [row.step, metric(row, name)]).filter((p) => p[1] !== null)));
  charts.push(chart("size", good.map((row) => [row.step, row.nbytes]), { format: bytes, zero: true }));
  const gaps = good.slice(1).map((row, n) => [row.step, row.created - good[n].created])
    .filter((p, n) => good[n].created && good[n + 1].created);
  if (gaps.length) charts.push(chart("time since the step before", gaps, { format: duration, zero: true }));
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
  return [el("h2", {}, "Timeline"), el("div", { class: "cards", id: "timeline" }, charts),
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
  const cards = [chart("norm", zip(leaf.norm)), chart("mean ± deviation", zip(leaf.mean), { band: around }),
    chart("deviation, and the range", zip(leaf.std), { band: range }), histograms(leaf)];
  for (const [name, words] of [["nan", "NaN"], ["inf", "infinite values"], ["zeros", "zeros"]])
    if (leaf[name]) cards.push(chart(words, zip(leaf[name])));
  return el("div", { class: "cards" }, cards);
}

const path = { title: "leaf", value: (leaf) => leaf.path, class: () => "path", cell: (leaf) => leaf.path || "(root)" };

function leaves() {
  if (!data.leaves.length) return [];
  const odd = (leaf) => ["nan", "inf"].reduce((sum, name) => sum + ((leaf[name] && last(leaf[name])) || 0), 0);
  const ever = (leaf) => Boolean(leaf.nan || leaf.inf);
  const columns = [path,
    { title: "what", value: (leaf) => leaf.what, cell: (leaf) => leaf.what + (last(leaf.there) ? "" : ", not in the last") },
    { title: "size", value: (leaf) => leaf.nbytes, cell: (leaf) => bytes(leaf.nbytes) },
    { title: "norm over steps", value: (leaf) => last(leaf.norm), cell: (leaf) => spark(leaf.norm) },
    { title: "norm", value: (leaf) => last(leaf.norm), cell: (leaf) => number(last(leaf.norm)) },
    { title: "mean", value: (leaf) => last(leaf.mean), cell: (leaf) => number(last(leaf.mean)) },
    { title: "deviation", value: (leaf) => last(leaf.std), cell: (leaf) => number(last(leaf.std)) },
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
  return [el("h2", {}, "The leaves over time"), el("p", {}, `Read at ${read}; numbers are those of the last. A click on a leaf shows its curves and histograms.`),
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
      { title: "change", value: (leaf) => (relative(leaf) === null ? null : Math.abs(relative(leaf))), cell: (leaf) => percent(relative(leaf)) },
      { title: "of the mean", value: (leaf) => change(leaf, "mean"), cell: (leaf) => number(change(leaf, "mean")) },
      { title: "of the deviation", value: (leaf) => change(leaf, "std"), cell: (leaf) => number(change(leaf, "std")) },
    ];
    const shown = table(columns, data.leaves, { name: "compared", sort: 3, down: true });
    for (const select of [a, b]) select.addEventListener("change", () => shown.show(data.leaves));
    parts.push(el("div", { class: "controls" }, "steps", a, "and", b), shown.node);
  }
  const found = data.diff;
  if (found) {
    const columns = [path,
      { title: "what", value: (row) => row.what, class: () => "path", cell: (row) => row.what },
      { title: "values that differ", value: (row) => (row.share === undefined ? null : row.share), cell: (row) => percent(row.share) },
      { title: "largest", value: (row) => row.largest ?? null, cell: (row) => number(row.largest) },
      { title: "relative", value: (row) => row.relative ?? null, cell: (row) => number(row.relative) },
      { title: "cosine", value: (row) => row.cosine ?? null, cell: (row) => number(row.cosine) },
    ];
    parts.push(el("h2", {}, `Value by value: step ${found.a} and step ${found.b}`),
      el("p", { id: "diff-summary" }, `Of the leaves ${found.equal.toLocaleString("en")} are equal, ${found.differing.toLocaleString("en")} differ, `
        + `${found.onlyA.length} are only in ${found.a}, ${found.onlyB.length} only in ${found.b}.`),
      ...[["onlyA", found.a], ["onlyB", found.b]].filter(([side]) => found[side].length).map(([side, step]) =>
        el("details", {}, el("summary", {}, `only in ${step}`), found[side].slice(0, MAX_LISTED).map((one) => el("p", { class: "path" }, one)))));
    if (found.changed.length) parts.push(table(columns, found.changed, { name: "changed", sort: 4, down: true }).node);
  }
  return parts.length ? [el("h2", {}, "Two steps compared"), ...parts] : [];
}

root.append(...title(), ...timeline(), ...sizes(), ...leaves(), ...comparison());
placed.forEach((draw) => draw());
return {  };
})();
})();
