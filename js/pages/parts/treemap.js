/** The sizes of a tree as rectangles. */

import { el } from "./elements.js";
import { bytes } from "./numbers.js";

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
export function treemap(tree) {
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
