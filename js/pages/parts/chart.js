/** Curves over steps. */

import { add, el, svg } from "./elements.js";
import { finite, number } from "./numbers.js";

export const WIDTH = 320;
const HEIGHT = 90, LEFT = 4, RIGHT = 4, TOP = 4, BOTTOM = 4;
const COLOURS = 8; // Style sheets have this many; more curves begin again.

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

/** Says of which steps the values are, and the highest and the lowest of them. */
export function summary(points, format = number) {
  const shown = points.filter((point) => finite(point[1]));
  if (!shown.length) return "no finite value";
  const by = (isBetter) => shown.reduce((best, point) => (isBetter(point[1], best[1]) ? point : best));
  const [high, low] = [by((a, b) => a > b), by((a, b) => a < b)];
  const steps = shown.length > 1 ? `steps ${shown[0][0]} to ${shown.at(-1)[0]}` : `step ${shown[0][0]}`;
  return `${steps}: highest ${format(high[1])} at ${high[0]}, lowest ${format(low[1])} at ${low[0]}`;
}

// A curve over steps, with the value at the pointer next to its title; `band` has the range around it.
export const chart = (title, points, options = {}) => charts(title, [{ name: "", points }], options);

// Curves of several runs on the same axes. The text of a curve that is pointed at has the name of its run.
export function charts(title, lines, { format = number, band = null, zero = false } = {}) {
  const known = lines.flatMap(({ name, points }, n) => points.filter((p) => p[1] !== null).map((p) => [p[0], p[1], name, n]));
  const shown = known.filter((point) => finite(point[1]));
  const readout = el("span", { class: "faint" });
  const card = el("div", { class: "card chart" }, el("header", {}, el("b", {}, title), readout));
  if (!shown.length) return add(card, {}, [el("p", { class: "note" }, known.length ? "no finite value" : "no value")]);
  const limits = [...(band ? band.flat().filter(finite) : []), ...(zero ? [0] : [])];
  const at = scales(known.map((p) => p[0]), [...shown.map((p) => p[1]), ...limits]);
  const dot = svg("circle", { class: "dot", r: 3 });
  const point = (p) => `${at.x(p[0]).toFixed(1)},${at.y(p[1]).toFixed(1)}`;
  const words = lines.map(({ name, points }) => (name ? `${name}, ` : "") + summary(points, format)).join("; ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${words}` },
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  if (band) {
    const [{ points }] = lines;
    const both = points.map((p, n) => [p[0], ...band[n]]).filter((p) => finite(p[1]) && finite(p[2]));
    const edge = [...both.map((p) => [p[0], p[1]]), ...both.reverse().map((p) => [p[0], p[2]])];
    drawing.append(svg("polygon", { class: "band", points: edge.map(point).join(" ") }));
  }
  const highest = Math.max(...shown.map((p) => p[1])), lowest = Math.min(...shown.map((p) => p[1]));
  const drawn = new Map(); // by points: how many curves have them
  // Of equal curves, the later ones are dashed, so that the first shows in between.
  const curve = (run, n) => {
    const points = run.map(point).join(" "), before = drawn.get(points) || 0;
    drawn.set(points, before + 1);
    return svg("polyline", { class: `curve c${n % COLOURS}`, points, ...(before ? { "stroke-dasharray": `6 ${6 * before}` } : {}) });
  };
  drawing.append(
    ...lines.flatMap(({ points }, n) => runs(points.filter((p) => p[1] !== null)).map((run) => (run.length > 1
      ? curve(run, n)
      : svg("circle", { class: `dot c${n % COLOURS}`, r: 2, cx: at.x(run[0][0]), cy: at.y(run[0][1]) })))),
    ...known.filter((p) => !finite(p[1])).map((p) => svg("circle", { class: "dot bad", r: 2.5, cx: at.x(p[0]), cy: HEIGHT - BOTTOM })));
  const show = (p) => {
    drawing.append(dot);
    dot.setAttribute("cx", at.x(p[0]));
    dot.setAttribute("cy", finite(p[1]) ? at.y(p[1]) : HEIGHT - BOTTOM);
    dot.setAttribute("class", finite(p[1]) ? `dot c${p[3] % COLOURS}` : "dot bad");
    readout.textContent = `${p[2] ? `${p[2]}, ` : ""}step ${p[0]}: ${finite(p[1]) ? format(p[1]) : p[1]}`;
    readout.className = finite(p[1]) ? "faint" : "bad";
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * HEIGHT;
    const off = (p) => Math.abs(at.x(p[0]) - x) + (lines.length > 1 && finite(p[1]) ? Math.abs(at.y(p[1]) - y) : 0);
    show(known.reduce((best, p) => (off(p) < off(best) ? p : best)));
  });
  if (lines.length === 1) show(known.at(-1));
  // Text of its own size: in the drawing it would shrink with it.
  const ends = (a, b) => el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, a), el("span", {}, b));
  const last = at.last > at.first ? String(at.last) : "";
  return add(card, {}, [ends(`highest ${format(highest)}`, `lowest ${format(lowest)}`), drawing, ends(`step ${at.first}`, last)]);
}

/** The names of the curves of `charts`, with their colours. @param {string[]} names */
export const legend = (names) => el("div", { class: "legend" },
  names.map((name, n) => el("span", {}, el("i", { class: `c${n % COLOURS}` }), name)));

// A small curve: points are steps and values.
export function spark(points) {
  const shown = points.filter((p) => finite(p[1]));
  if (shown.length < 2) return "";
  const low = Math.min(...shown.map((p) => p[1])), high = Math.max(...shown.map((p) => p[1]));
  const first = points[0][0], last = points.at(-1)[0];
  const place = (p) => {
    const y = high > low ? (high - p[1]) / (high - low) : 0.5;
    return `${(1 + ((p[0] - first) / Math.max(last - first, 1)) * 108).toFixed(1)},${(2 + y * 18).toFixed(1)}`;
  };
  return el("span", { class: "spark", title: summary(points) },
    svg("svg", { viewBox: "0 0 110 22", role: "img", "aria-label": summary(points) },
      svg("polyline", { class: "curve", points: shown.map(place).join(" ") })),
    el("small", { "aria-hidden": "true" }, `${number(low)} … ${number(high)}`));
}
