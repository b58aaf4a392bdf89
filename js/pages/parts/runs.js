/** Several runs on the page: their metrics on the same axes. */

import { charts, legend } from "./chart.js";
import { el, printable } from "./elements.js";
import { bytes, counted, number, when } from "./numbers.js";
import { table } from "./table.js";

/** Returns the section. `choose` is called with the name of the run that the user opens, where that is possible. @param {any[]} runs @param {((name: string) => void) | null} choose */
export function runsView(runs, choose) {
  const shown = runs.map((run) => ({ ...run, rows: (run.steps ?? []).filter((row) => row.state === "good").sort((a, b) => a.step - b.step) }));
  const curves = shown.filter((run) => run.rows.length);
  const names = metricNames(curves.flatMap((run) => run.rows));
  const last = (run, name) => metricPoints(run.rows, name).at(-1)?.[1] ?? null;
  const bad = (run) => (run.steps ? run.steps.length - run.rows.length : 0);
  const about = (run) => run.error ?? [run.finished ? "finished" : "", bad(run) ? `${bad(run)} not valid` : ""].filter(Boolean).join(", ");
  const sum = (run) => run.rows.reduce((total, row) => total + (row.nbytes ?? 0), 0);
  const columns = [
    { title: "run", value: (run) => shown.indexOf(run), class: () => "path",
      cell: (run) => (choose ? el("button", { class: "link", onclick: () => choose(run.name) }, printable(run.name)) : printable(run.name)) },
    { title: "steps", value: (run) => run.rows.length, cell: (run) => (run.steps ? String(run.rows.length) : "one checkpoint") },
    { title: "latest", value: (run) => run.rows.at(-1)?.step ?? null, cell: (run) => String(run.rows.at(-1)?.step ?? "") },
    { title: "saved", value: (run) => run.rows.at(-1)?.created ?? null, cell: (run) => when(run.rows.at(-1)?.created) },
    { title: "size", value: sum, cell: (run) => (run.rows.length ? bytes(sum(run)) : "") },
    ...names.map((name) => ({ title: printable(name), value: (run) => last(run, name), cell: (run) => number(last(run, name)) })),
    { title: "notes", value: about, class: (run) => (run.error || bad(run) ? "bad wrap" : "wrap"), cell: (run) => printable(about(run)) },
  ];
  const cards = names.map((name) => charts(printable(name), curves.map((run) => ({ name: printable(run.name), points: metricPoints(run.rows, name) }))));
  return [el("p", { id: "run-status" }, counted(runs.length, "run")), table(columns, shown, { name: "runs" }).node,
    ...(cards.length ? [el("h3", {}, "Metrics"), legend(curves.map((run) => printable(run.name))), el("div", { class: "cards", id: "metrics" }, cards)] : curves.length ? [noMetrics()] : [])];
}

/** Says where metrics come from, on a page that would have their curves. */
export const noMetrics = () => el("p", { class: "faint", id: "no-metrics" }, "No step has a metric. save(…, metrics={\"loss\": loss}) records them, and the page draws their curves.");

/** The names of the metrics of some steps. */
export const metricNames = (rows) => [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))];

/** The steps that have a metric, and its values. */
export const metricPoints = (rows, name) => rows.map((row) => [row.step, metric(row, name)]).filter((point) => point[1] !== null);

/** A metric of a step: a number, or the text nan or inf; null without it. */
export const metric = (row, name) => (Object.hasOwn(row.metrics, name) ? shown(row.metrics[name]) : null);
const shown = (value) => (typeof value === "string" || Number.isFinite(value) ? value : String(value).toLowerCase().replace("infinity", "inf"));
