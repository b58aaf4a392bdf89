/** The difference of two checkpoints on the page. */

import { el, printable } from "../parts/elements.js";
import { bytes, number, percent } from "../parts/numbers.js";
import { table } from "../parts/table.js";
import { difference, pairs } from "./compare.js";

const WORDS = { added: "only in the second", removed: "only in the first", retyped: "dtype or shape differs", same: "not read" };

const AT_ONCE = 6; // as many requests as a browser makes to one server at a time
const DRAW_EVERY_MS = 300;
const READ_AT_ONCE = 64 << 20; // More bytes of both are read on request.

/** Returns the section that compares two contents. @param {any} a @param {any} b @param {() => void} close */
export function diffView(a, b, close) {
  const rows = pairs(a.leaves, b.leaves).map((pair) => ({ ...pair, found: null, error: "" }));
  const comparable = rows.filter((row) => row.state === "same");
  const total = comparable.reduce((sum, row) => sum + row.a.nbytes, 0);
  const summary = el("p", { id: "diff-summary", "aria-live": "polite" });
  const progress = el("progress", { max: Math.max(total, 1), value: 0, hidden: "", "aria-label": "comparing" });
  let reading = false, stop = false, hidden = true;

  const state = (row) => {
    if (row.error) return row.error;
    if (row.state !== "same" || !row.found) return WORDS[row.state];
    return row.found.differing ? "differs" : "equal";
  };
  const columns = [
    { title: "leaf", value: (row) => row.path, class: () => "path", cell: (row) => printable(row.path) || "(root)" },
    { title: "state", value: state, class: (row) => (row.error ? "bad wrap" : ""), cell: state },
    { title: "type", value: what, class: () => "wrap", cell: what },
    { title: "values that differ", value: (row) => share(row), cell: (row) => percent(share(row)) },
    { title: "largest difference", value: (row) => row.found?.largest ?? null, cell: (row) => number(row.found?.largest) },
  ];
  const shown = table(columns, rows, { name: "diff", sort: 1 });
  const onlyChanges = el("input", { type: "checkbox", checked: "", onchange: () => { hidden = onlyChanges.checked; update(); } });
  const button = el("button", { class: "act", id: "read-values", onclick: () => (reading ? (stop = true) : compare()) }, `Compare values (${bytes(2 * total)})`);

  function update() {
    const count = (wanted) => rows.filter(wanted).length.toLocaleString("en");
    const parts = [`${count((row) => row.state === "added")} only in the second`, `${count((row) => row.state === "removed")} only in the first`,
      `${count((row) => row.state === "retyped")} with another dtype or shape`];
    if (rows.some((row) => row.found || row.error)) parts.push(`${count((row) => row.found && !row.found.differing)} equal`, `${count((row) => row.found?.differing)} with other values`);
    const left = comparable.filter((row) => !row.found && !row.error).length;
    if (left) parts.push(`${left.toLocaleString("en")} not read`);
    if (rows.some((row) => row.error)) parts.push(`${count((row) => row.error)} that cannot be read`);
    summary.textContent = `${parts.filter((part) => !part.startsWith("0 ")).join(", ") || "Neither has a leaf"}.`;
    shown.show(hidden ? rows.filter((row) => !row.found || row.found.differing) : rows);
  }

  async function compare() {
    [reading, stop] = [true, false];
    button.textContent = "Stop";
    const left = comparable.filter((row) => !row.found);
    progress.hidden = false;
    progress.value = total - left.reduce((sum, row) => sum + row.a.nbytes, 0);
    let drawn = performance.now();
    // Small leaves cost a request each, so several are read at a time.
    await Promise.all(Array.from({ length: AT_ONCE }, async () => {
      for (let row = left.shift(); row && !stop; row = left.shift()) {
        await compareRow(row);
        if (performance.now() - drawn < DRAW_EVERY_MS) continue;
        update();
        drawn = performance.now();
      }
    }));
    reading = false;
    progress.hidden = true;
    button.textContent = stop ? "Continue" : "Read again what failed";
    button.hidden = !stop && !rows.some((row) => row.error);
    update();
  }

  async function compareRow(row) {
    row.error = "";
    try {
      row.found = await difference(row.a, row.b, (length) => {
        progress.value += length;
        if (stop || !summary.isConnected) throw new Stopped(); // The user has closed the comparison.
      });
    } catch (error) {
      if (error instanceof Stopped) stop = true;
      else row.error = printable(error.message);
    }
  }

  update();
  if (2 * total <= READ_AT_ONCE) setTimeout(compare); // once the section is on the page
  return [el("div", { class: "bar" }, el("h2", {}, "Comparison"), el("button", { class: "act", id: "close-diff", onclick: close }, "Close")),
    el("p", { class: "path" }, `first: ${printable(title(a))}`), el("p", { class: "path" }, `second: ${printable(title(b))}`),
    summary, el("div", { class: "controls" }, button, progress, el("label", {}, onlyChanges, " hide equal leaves")), shown.node];
}

class Stopped extends Error {}

/** What a leaf is, before and after where that differs. */
const what = ({ a, b }) => (a && b && a.what !== b.what ? `${a.what} → ${b.what}` : (a ?? b).what);

const share = (row) => (row.found ? row.found.differing / Math.max(row.found.size, 1) : null);
const title = ({ place, step }) => (place || "files") + (step === undefined ? "" : ` (step ${step})`);
