/** Tables. */

import { el } from "./elements.js";
import { finite, names } from "./numbers.js";

const ROWS = 200; // A table draws this many rows at a time.

// Tables that sort by a click on a column, draw so many rows, and say how many there are. Where the columns have no room,
// a row is a list of its cells: no column is cut.
export function table(columns, rows, { sort = 0, down = false, name, open = null } = {}) {
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
        columns.map((column) => cell(column, row)));
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
      el("button", { class: "more", onclick: () => { state.most += 5 * ROWS; draw(); fit(); } }, "Show more")] : []));
  };
  draw();
  const frame = el("div", { class: "scroll" }, el("table", { id: name }, el("thead", {}, head), body));
  const fit = () => {
    frame.classList.remove("stack");
    frame.classList.toggle("stack", frame.scrollWidth > frame.clientWidth);
  };
  const watched = new ResizeObserver(([{ contentRect }]) => { if (contentRect.width !== width) { width = contentRect.width; fit(); } });
  let width = 0;
  watched.observe(frame);
  return {
    node: el("div", {}, frame, more),
    show: (some) => { state.rows = some; state.most = ROWS; draw(); fit(); },
  };
}

function cell(column, row) {
  const found = column.cell(row);
  const isEmpty = found === "" || found === null || found === undefined;
  return el("td", { class: `${(column.class && column.class(row)) || ""}${isEmpty ? " empty" : ""}`.trim() || undefined, "data-title": column.title }, found);
}
