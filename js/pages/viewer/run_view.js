/** A run on the page: its metrics over steps. */

import { chart } from "../parts/chart.js";
import { el, printable } from "../parts/elements.js";
import { bytes, counted, duration, number, when } from "../parts/numbers.js";
import { metric, metricNames, metricPoints, noMetrics } from "../parts/runs.js";
import { table } from "../parts/table.js";

const DRAW_EVERY = 20; // A run may have thousands of steps: the curves grow while they are read.
const MAX_NOTES = 10;

/** Returns the elements, and a function that shows the steps of a run, oldest first, and what is wrong with them. */
export function runView() {
  const status = el("p", { id: "run-status", "aria-live": "polite" });
  const charts = el("div", { class: "cards", id: "metrics" });
  const details = el("div");
  const notes = el("div", { id: "run-notes" });
  let turn = 0;

  /** @param {import("./detect.js").Step[]} steps @param {string} more what else the status says */
  async function show(steps, more = "") {
    const own = ++turn;
    const rows = [], wrong = [];
    for (const [n, step] of steps.entries()) {
      const row = step.row ?? (await rowOf(step, n));
      if (own !== turn) return;
      if (row.state === "good") rows.push(row);
      else wrong.push([step, row]);
      if (!step.row && ((n + 1) % DRAW_EVERY === 0 || n + 1 === steps.length)) draw(rows, n + 1, steps.length, more);
    }
    draw(rows, steps.length, steps.length, more);
    const texts = await Promise.all(wrong.slice(0, MAX_NOTES).map(([step, row]) => reasonOf(step, row)));
    if (own !== turn) return;
    if (wrong.length > MAX_NOTES) texts.push(`${wrong.length - MAX_NOTES} more steps are not valid`);
    if (texts.join("\n") !== Array.from(notes.children, (note) => note.textContent).join("\n"))
      notes.replaceChildren(...texts.map((text) => el("p", { class: "note", role: "alert" }, text)));
  }

  function draw(rows, read, all, more) {
    const begin = read < all ? `reading step ${read} of ` : "";
    const text = [`${begin}${counted(all, "step")}, ${rows.length.toLocaleString("en")} valid`, more].filter(Boolean).join(" · ");
    if (status.textContent !== text) status.textContent = text;
    const sorted = [...rows].sort((a, b) => a.step - b.step);
    const names = metricNames(sorted);
    const gaps = sorted.slice(1).map((row, n) => [row.step, row.created - sorted[n].created]);
    charts.replaceChildren(...(names.length || read < all || !sorted.length ? [] : [noMetrics()]), ...names.map((name) => chart(printable(name), metricPoints(sorted, name))),
      ...(sorted.length ? [chart("size", sorted.map((row) => [row.step, row.nbytes]), { format: bytes, zero: true })] : []),
      ...(gaps.length ? [chart("time between saves", gaps, { format: duration, zero: true })] : []));
    const columns = [{ title: "step", value: (row) => row.step, cell: (row) => String(row.step) },
      { title: "saved", value: (row) => row.created, cell: (row) => when(row.created) },
      { title: "size", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
      ...names.map((name) => ({ title: printable(name), value: (row) => metric(row, name), cell: (row) => number(metric(row, name)),
        class: (row) => (typeof metric(row, name) === "string" ? "bad" : "") })),
      { title: "notes", value: notesOf, cell: notesOf }];
    details.replaceChildren(table(columns, sorted, { name: "steps" }).node);
  }

  const nodes = [el("h3", {}, "Run"), status, notes, charts, el("details", {}, el("summary", {}, "The steps as a table"), details)];
  return { nodes, show };
}

const notesOf = (row) => [row.format === "treering" ? "" : row.format, ...row.marks].filter(Boolean).join(", ");

/** Reads a step, and describes it as `treering view` does. */
export async function rowOf(step, n) {
  try {
    const { step: number, created, metrics, nbytes, format } = await step.open();
    step.row = { step: number ?? n, name: step.name, state: "good", format, created, metrics, nbytes, marks: [] };
  } catch (error) {
    step.row = { state: "damaged", error: error.message };
  }
  return step.row;
}

/** Says what is wrong with a step. */
async function reasonOf(step, row) {
  if (!["unfinished", "closed"].includes(row.state)) row.error ??= await step.open().then(() => "", (error) => error.message);
  if (!row.error) return `${printable(step.name)} is ${row.state}`;
  return printable(row.error.includes(step.name) ? row.error : `${step.name}: ${row.error}`);
}
