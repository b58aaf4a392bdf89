/** The sizes of a tree as rectangles. */

import { el } from "./elements.js";
import { bytes } from "./numbers.js";

const COLOURS = 8; // The style sheet has this many, for light and for dark pages.

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

// Returns the elements, and the function that draws them: call it when their place on the page is known. `onLeaf` is
// called with a part that has no parts. Tab reaches one rectangle; arrow keys move on, Enter goes into it, Escape back.
export function treemap(tree, onLeaf = null) {
  const dtypes = new Map(); // their bytes
  const most = new Map(); // the dtype of most bytes of a part
  const count = (part) => {
    const own = new Map();
    if (!part.parts) own.set(part.dtype || "", part.nbytes);
    for (const child of part.parts || []) for (const [dtype, nbytes] of count(child)) own.set(dtype, (own.get(dtype) || 0) + nbytes);
    most.set(part, [...own].reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0])[0]);
    return own;
  };
  for (const [dtype, nbytes] of count(tree)) dtypes.set(dtype, nbytes);
  const order = [...dtypes.keys()].sort((a, b) => dtypes.get(b) - dtypes.get(a));
  const colour = (part) => (most.get(part) ? `m${order.indexOf(most.get(part)) % COLOURS}` : "");
  const map = el("div", { class: "map", id: "treemap", role: "group", "aria-label": "sizes; arrow keys move, Enter goes into a part, Escape back" });
  const crumbs = el("div", { class: "crumbs" });
  let trail = [tree];

  function rectangles(part, x, y, width, height, level) {
    for (const [one, left, top, wide, high] of squarify(part.parts || [], x, y, width, height)) {
      if (wide < 3 || high < 3) continue; // too small to see or to point at
      const about = `${one.path || one.name}\n${one.what || `${one.leaves.toLocaleString("en")} leaves`}, ${bytes(one.nbytes)}`;
      map.append(el("button", { class: `${one.parts || onLeaf ? "" : "end "}${colour(one)}`.trim(), title: about, "aria-label": about, "data-path": one.path,
        tabindex: map.childElementCount ? -1 : 0, style: `left:${left}px;top:${top}px;width:${wide}px;height:${high}px`,
        onclick: () => (!one.parts && onLeaf && one.path ? onLeaf(one) : go(trail.at(-1), one)) },
        wide > 30 && high > 15 ? el("span", {}, fitting(one, wide)) : ""));
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
    const hadFocus = map.contains(document.activeElement);
    draw();
    if (hadFocus) focus(map.firstChild);
  }
  function draw() {
    const top = trail.at(-1);
    crumbs.replaceChildren(...trail.flatMap((part, n) => [n ? " / " : "", el("button", {
      onclick: () => { trail = trail.slice(0, n + 1); draw(); } }, n ? part.name : "all")]), ` ${bytes(top.nbytes)}`);
    map.replaceChildren();
    const width = map.clientWidth, height = map.clientHeight;
    if (top.parts) rectangles(top, 0, 0, width, height, 0);
    else rectangles({ parts: [top] }, 0, 0, width, height, 0);
  }
  const keys = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  map.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && trail.length > 1) {
      event.stopPropagation();
      trail.pop();
      draw();
      focus(map.firstChild);
    } else if (keys[event.key]) {
      event.preventDefault();
      focus(nearest(map, event.target, keys[event.key]));
    }
  });
  function focus(button) {
    if (!button) return;
    map.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    button.setAttribute("tabindex", 0);
    button.focus();
  }
  let width = 0;
  const fit = () => { if (map.clientWidth !== width) { width = map.clientWidth; draw(); } };
  new ResizeObserver(fit).observe(map);
  const legend = order.filter(Boolean).map((dtype) => el("span", {},
    el("i", { class: `m${order.indexOf(dtype) % COLOURS}` }), `${dtype} ${bytes(dtypes.get(dtype))}`));
  return { nodes: [crumbs, map, el("div", { class: "legend" }, legend)], draw: fit };
}

const CHARACTER = 6.8; // pixels, at the size of the style sheet

// The name, with the size if there is room for both.
const fitting = ({ name, nbytes }, wide) => {
  const both = `${name}  ${bytes(nbytes)}`;
  if (both.length * CHARACTER < wide - 10) return both;
  return name.length * CHARACTER < wide - 8 || wide > 60 ? name : "";
};

// The button whose centre is nearest in a direction; within a rectangle the way down leads to its parts.
function nearest(map, from, [right, down]) {
  const centre = (one) => [one.offsetLeft + Math.min(one.offsetWidth, 40) / 2, one.offsetTop + Math.min(one.offsetHeight, 14) / 2];
  const [x, y] = centre(from);
  let best = null, least = Infinity;
  for (const one of map.children) {
    const [dx, dy] = [centre(one)[0] - x, centre(one)[1] - y];
    const along = dx * right + dy * down, off = Math.abs(dx * down) + Math.abs(dy * right);
    if (along > 0.5 && along + 3 * off < least) [best, least] = [one, along + 3 * off];
  }
  return best;
}
