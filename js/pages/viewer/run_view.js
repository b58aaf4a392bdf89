/** A run on the page: its metrics over steps, read from the manifests one after another. */

import { chart } from "../parts/chart.js";
import { el } from "../parts/elements.js";
import { bytes, duration, number, when } from "../parts/numbers.js";
import { table } from "../parts/table.js";
import { printable } from "./contents.js";

const DRAW_EVERY = 20; // A run may have thousands of steps: the curves grow while they are read.

/**
 * Returns the section of a run. `choose` is called with the contents of the newest valid step, and of each step that the
 * user selects.
 *
 * @param {string} place
 * @param {import("./detect.js").Step[]} steps oldest first
 * @param {(contents: any) => void} choose
 * @param {((contents: any) => void) | null} compare is called with the step that the user selects to compare
 */
export function runView(place, steps, choose, compare) {
  const status = el("p", { id: "run-status", "aria-live": "polite" });
  const charts = el("div", { class: "cards", id: "metrics" });
  const details = el("div");
  const notes = el("div");
  const options = () => steps.map((step) => el("option", {}, printable(step.name)));
  const select = el("select", { id: "step", "aria-label": "step", onchange: () => show(steps[select.selectedIndex], choose) }, options());
  const other = el("select", { id: "other-step", onchange: () => other.selectedIndex && show(steps[other.selectedIndex - 1], compare) },
    el("option", {}, "choose a step"), options());
  const note = (step, error) => notes.append(el("p", { class: "note", role: "alert" }, `${printable(step.name)}: ${printable(error.message)}`));

  async function show(step, use) {
    const contents = await step.open().catch((error) => note(step, error));
    if (contents) use(contents);
  }

  async function newest() {
    for (const step of [...steps].reverse()) {
      const contents = await step.open().catch(() => null); // `readAll` names the error.
      if (!contents) continue;
      select.selectedIndex = steps.indexOf(step);
      return choose(contents);
    }
  }

  async function readAll() {
    const rows = [];
    for (const [n, step] of steps.entries()) {
      try {
        const { step: number, created, metrics, leaves } = await step.open();
        const nbytes = leaves.reduce((sum, leaf) => sum + leaf.nbytes, 0);
        rows.push({ step: number ?? n, created: Date.parse(created) / 1000, metrics, nbytes, name: step.name });
      } catch (error) {
        note(step, error);
      }
      if ((n + 1) % DRAW_EVERY === 0 || n + 1 === steps.length) draw(rows, n + 1);
    }
  }

  function draw(rows, read) {
    status.textContent = `${read < steps.length ? `reading step ${read} of ` : ""}${steps.length} steps, ${rows.length} valid`;
    const sorted = [...rows].sort((a, b) => a.step - b.step);
    const names = [...new Set(sorted.flatMap((row) => Object.keys(row.metrics)))];
    const metric = (row, name) => (Object.hasOwn(row.metrics, name) ? shown(row.metrics[name]) : null);
    const points = (name) => sorted.map((row) => [row.step, metric(row, name)]).filter((point) => point[1] !== null);
    const gaps = sorted.slice(1).map((row, n) => [row.step, row.created - sorted[n].created]);
    charts.replaceChildren(...names.map((name) => chart(printable(name), points(name))),
      ...(sorted.length ? [chart("size", sorted.map((row) => [row.step, row.nbytes]), { format: bytes, zero: true })] : []),
      ...(gaps.length ? [chart("time since the step before", gaps, { format: duration, zero: true })] : []));
    const columns = [{ title: "step", value: (row) => row.step, cell: (row) => String(row.step) },
      { title: "saved", value: (row) => row.created, cell: (row) => when(row.created) },
      { title: "size", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
      ...names.map((name) => ({ title: printable(name), value: (row) => metric(row, name), cell: (row) => number(metric(row, name)),
        class: (row) => (typeof metric(row, name) === "string" ? "bad" : "") }))];
    details.replaceChildren(table(columns, sorted, { name: "steps" }).node);
  }

  newest().finally(readAll);
  return [el("h2", {}, "Run"), el("p", { class: "path" }, printable(place)), status, notes, charts,
    el("details", {}, el("summary", {}, "The steps as a table"), details),
    el("div", { class: "controls" }, el("label", {}, "step ", select), compare && el("label", {}, "compare with ", other))];
}

const shown = (value) => (Number.isFinite(value) ? value : String(value).toLowerCase().replace("infinity", "inf"));
