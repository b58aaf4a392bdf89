/** Curves over steps. */

import { add, el, svg } from "./elements.js";
import { finite, number } from "./numbers.js";

export const WIDTH = 320, HEIGHT = 110, LEFT = 4, RIGHT = 4, TOP = 14, BOTTOM = 14;

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
export function chart(title, points, { format = number, band = null, zero = false } = {}) {
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

export function spark(values) {
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
