/** The viewer: shows checkpoints in the browser and sends nothing anywhere. The address says what it shows. */

import { InputError, NotFoundError } from "../../src/errors.js";
import { el, printable } from "../parts/elements.js";
import { bytes, counted, number, when } from "../parts/numbers.js";
import { runsView } from "../parts/runs.js";
import { treemap } from "../parts/treemap.js";
import { formatView, parseView } from "./address.js";
import { valueText } from "./contents.js";
import { detect } from "./detect.js";
import { diffView } from "./diff_view.js";
import { leafView } from "./leaf_view.js";
import { admit, lock } from "./lock.js";
import { acceptDrops, opener, openUrl } from "./opener.js";
import { outline, rectangles } from "./outline.js";
import { runView } from "./run_view.js";
import { openServed } from "./served.js";
import { tree } from "./tree.js";

const MAX_METADATA = 20_000;
const LOOK_AGAIN_MS = 3000; // or twenty times as long as the look before took
const EXPECTED_ERRORS = ["TreeringError", "InputError", "NotFoundError", "DamagedError", "UnsupportedError", "SourceError", "ReplacedError"];

const place = (id, ...children) => el("div", { id }, ...children);
const status = place("status");
const places = { head: place("top"), controls: place("controls"), diff: place("comparison"), runs: place("runs-view"), leaves: place("contents"),
  sizes: place("sizes"), run: place("run"), facts: place("facts") };
const another = el("details", { id: "another", open: "" }, el("summary"));
/** What was dropped or picked, by number: the address has no more of it. @type {{source: any}[]} */
const dropped = [];
/** What is on the page. @type {any} */
let shown = {};
let turns = 0;

/** Shows an error, or that something is read. */
function say(text, isError = false) {
  status.replaceChildren(...(text ? [el("p", isError ? { class: "note", role: "alert" } : {}, printable(text))] : []));
}

/** Shows another view; the back button returns to this one. @param {Partial<import("./address.js").View>} changes */
function go(changes) {
  const next = formatView({ ...parseView(location.hash), ...changes });
  if (next !== location.hash) history.pushState(null, "", next);
  apply();
}

/** Makes the page show what the address says. */
async function apply() {
  const view = parseView(location.hash);
  const turn = ++turns;
  const isLate = () => turn !== turns;
  try {
    if (shown.place !== view.place || shown.run !== view.run) {
      clear();
      if (!view.place) return;
      say("Reading…");
      const found = await find(view.place, view.run);
      if (isLate()) return;
      show(view, found);
    }
    if (shown.found.runs) return say("");
    if (shown.step !== view.step || !shown.contents) {
      Object.assign(shown, { contents: null, compare: "" });
      for (const one of ["diff", "leaves", "sizes", "facts"]) places[one].replaceChildren();
      const opened = await openStep(view.step);
      if (isLate()) return;
      showContents(opened, view.step);
    }
    shown.tree.show(view.leaves);
    if (shown.compare !== view.compare) await compare(view.compare, isLate);
    if (!isLate()) say("");
  } catch (error) {
    if (isLate()) return;
    if (!EXPECTED_ERRORS.includes(error.name)) console.error(error);
    say(error.message, true);
  }
}

/** Finds what a place has. @param {string} where @param {string} run */
async function find(where, run) {
  if (where === "served") {
    admit(location.origin);
    lock();
    return openServed(run);
  }
  let opened;
  if (where.startsWith("url=")) opened = await openUrl(where.slice(4));
  else opened = dropped[Number(where.slice("dropped=".length))];
  if (!opened) throw new InputError("A page keeps no files after it was reloaded: drop them again");
  const found = await detect(opened.source, opened.file);
  return run ? found.runs.find(({ name }) => name === run).found : found;
}

function clear() {
  clearTimeout(shown.timer);
  shown = {};
  Object.values(places).forEach((one) => one.replaceChildren());
  document.title = "Treering viewer";
  offer(true);
}

/** Shows the ways to open something, or folds them away. @param {boolean} isEmpty */
function offer(isEmpty) {
  another.open = isEmpty;
  another.firstChild.textContent = isEmpty ? "Open" : "Open another";
}

/** Begins to show what was found. */
function show(view, found) {
  // The text tells later whether anything has changed. What the page notes at the steps is not in it.
  shown = { place: view.place, run: view.run, found, text: JSON.stringify(found), step: null, compare: "" };
  offer(false);
  if (found.place) heading(found.place, "");
  if (found.runs) {
    places.runs.replaceChildren(...runsView(found.runs, (run) => go({ run, step: "", compare: "", leaves: [] })));
  } else if (found.steps) {
    shown.runView = runView();
    places.run.replaceChildren(...shown.runView.nodes);
    shown.runView.show(found.steps, found.finished ? "finished" : "");
  }
  drawControls();
  if (found.refresh) watch(2 * LOOK_AGAIN_MS);
}

/** Looks again now and then, as a run may be written while the page is open. */
function watch(delay) {
  const own = shown;
  own.timer = setTimeout(async () => {
    const begin = Date.now();
    let found = null;
    if (!document.hidden) {
      try {
        found = await own.found.refresh();
      } catch (error) {
        if (own === shown) places.controls.append(el("p", { class: "note", role: "alert" }, printable(`No longer updated: ${error.message}`)));
        return;
      }
    }
    if (own !== shown) return;
    const text = found && JSON.stringify(found);
    if (found && text !== own.text) {
      Object.assign(own, { found, text });
      if (found.runs) places.runs.replaceChildren(...runsView(found.runs, (run) => go({ run, step: "", compare: "", leaves: [] })));
      else if (found.steps) own.runView.show(found.steps, found.finished ? "finished" : "");
      drawControls();
      if (found.steps && !own.contents) apply(); // The first step may have come.
    }
    watch(Math.max(LOOK_AGAIN_MS, 20 * (Date.now() - begin)));
  }, delay);
}

/** Opens a step; the newest valid one if the name is empty. @param {string} name */
async function openStep(name) {
  const { contents, steps, place: where } = shown.found;
  if (!steps) return contents;
  const named = (wanted) => {
    const found = steps.find((step) => step.name === wanted);
    if (!found) throw new NotFoundError(`${where}: expected the step ${wanted}, found none of that name. It may have been deleted`);
    return found;
  };
  if (name) {
    shown.opened = name;
    return named(name).open();
  }
  let last = null;
  for (const step of [...steps].reverse()) {
    if (step.row && step.row.state !== "good") continue;
    try {
      const opened = await step.open();
      shown.opened = step.name;
      return opened;
    } catch (error) {
      last = error;
    }
  }
  throw last ?? new NotFoundError(`${where}: expected a valid step, found none`);
}

function heading(where, text) {
  const parts = where.split("/").filter(Boolean);
  document.title = printable(`${parts.at(-1) ?? ""} · Treering viewer`);
  const back = shown.run ? [el("button", { class: "link", id: "all-runs", onclick: () => go({ run: "", step: "", compare: "", leaves: [] }) }, "← all runs")] : [];
  places.head.replaceChildren(...back, el("h2", { id: "title" }, printable(parts.slice(shown.contents && shown.found.steps ? -2 : -1).join(" / ") || "files")),
    ...(text ? [el("p", { id: "head" }, text)] : []), el("p", { class: "path", id: "place" }, printable(where)));
}

/** Shows a checkpoint. */
function showContents(contents, step) {
  Object.assign(shown, { contents, step, compare: "" });
  places.diff.replaceChildren();
  const root = outline(contents);
  heading(contents.place, [contents.format, contents.step === undefined ? "" : `step ${contents.step}`, counted(contents.leaves.length, "leaf", "leaves"),
    bytes(contents.nbytes), contents.created ? `saved ${when(contents.created)}` : ""].filter(Boolean).join(" · "));
  drawControls();
  const toggle = (path, isOpen) => {
    const { leaves } = parseView(location.hash);
    go({ leaves: [...leaves.filter((one) => one !== path), ...(isOpen ? [path] : [])] });
  };
  shown.tree = tree(root, leafView, toggle);
  places.leaves.replaceChildren(...contents.notes.map((note) => el("p", { class: "note" }, printable(note))), ...shown.tree.nodes);
  const sizes = root.nbytes ? treemap(rectangles(root, "all"), ({ leaf }) => { toggle(leaf, true); shown.tree.reveal(leaf); }) : null;
  places.sizes.replaceChildren(...(sizes ? [el("h3", {}, "Sizes"), ...sizes.nodes] : []));
  sizes?.draw();
  const metrics = Object.entries(contents.metrics).flatMap(([name, value]) => [el("dt", {}, printable(name)),
    el("dd", { class: Number.isFinite(value) ? "" : "bad" }, number(Number.isFinite(value) ? value : String(value)))]);
  const facts = contents.facts.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
  const metadata = valueText(contents.metadata, MAX_METADATA).split("\n").map(printable).join("\n");
  places.facts.replaceChildren(...(metrics.length ? [el("h3", {}, "Metrics of the step"), el("dl", { id: "values" }, metrics)] : []),
    ...(facts.length ? [el("h3", {}, "Files"), el("dl", {}, facts)] : []),
    ...(metadata ? [el("details", {}, el("summary", {}, "Metadata"), el("pre", { id: "metadata" }, metadata))] : []));
}

/** Draws the choice of the step, and of what it is compared with. */
function drawControls() {
  const { found, opened, contents } = shown;
  if (found.runs) return places.controls.replaceChildren();
  const label = ({ name, row }) => printable(name) + (row && row.state !== "good" ? ` (${row.state})` : "");
  const options = (chosen) => [...(found.steps ?? [])].reverse().map((step) => el("option", { value: step.name, selected: step.name === chosen ? "" : undefined }, label(step)));
  const view = parseView(location.hash);
  const step = el("select", { id: "step", onchange: () => go({ step: step.value, compare: view.compare === step.value ? "" : view.compare }) }, options(opened));
  const other = el("select", { id: "other-step", onchange: () => go({ compare: other.value }) }, el("option", { value: "" }, "nothing"), options(view.compare));
  const newest = found.steps?.findLast(({ row }) => row?.state === "good");
  const isOld = contents && newest && newest.row.step > (contents.step ?? Infinity) && !view.step;
  const open = places.controls.querySelector("#compare")?.open;
  places.controls.replaceChildren(...(found.steps ? [el("label", {}, "step ", step), el("label", {}, "compare with ", other)] : []),
    ...(isOld ? [el("button", { class: "act", id: "newer", onclick: () => { shown.contents = null; apply(); } }, `Show ${printable(newest.name)}, which is new`)] : []),
    el("details", { id: "compare", open: open ? "" : undefined }, el("summary", {}, found.steps ? "Compare with files" : "Compare"),
      opener("Compare with another: drop it here, or choose", (opening) => goTo(opening, "compare"))));
}

/** Shows the difference to another checkpoint. @param {string} other the name of a step, or a place */
async function compare(other, isLate) {
  shown.compare = other;
  places.diff.replaceChildren();
  drawControls();
  if (!other) return;
  say("Reading…");
  let second;
  if (/^(dropped|url)=/.test(other)) {
    const found = await find(other, "");
    second = found.contents ?? (await [...(found.steps ?? [])].reverse()[0]?.open());
  } else second = await shown.found.steps?.find(({ name }) => name === other)?.open();
  if (isLate()) return;
  if (!second) throw new NotFoundError(`${other}: expected a step or a checkpoint to compare with, found none`);
  places.diff.replaceChildren(el("section", {}, ...diffView(shown.contents, second, () => go({ compare: "" }))));
  places.diff.scrollIntoView({ block: "nearest" });
}

/** Shows what the user has dropped, picked or typed. @param {Promise<any>} opening @param {"place" | "compare"} as */
async function goTo(opening, as) {
  try {
    const opened = await opening;
    const where = opened.url ? `url=${opened.url}` : `dropped=${dropped.push(opened) - 1}`;
    go(as === "place" ? { place: where, run: "", step: "", compare: "", leaves: [] } : { compare: where });
  } catch (error) {
    say(error.message, true);
  }
}

function start() {
  const root = document.getElementById("viewer");
  const openFirst = (opening) => goTo(opening, "place");
  another.append(opener("Drop a checkpoint, a run, a directory of runs or safetensors files here, or choose. The page sends nothing anywhere.", openFirst));
  offer(true);
  status.setAttribute("aria-live", "assertive");
  root.append(another, status, places.head, places.controls, places.diff, places.runs,
    el("div", { class: "columns" }, places.leaves, place("side", places.sizes, places.run, places.facts)),
    el("p", { class: "faint", id: "keys" }, "Keys: / filters, ↑ ↓ ← → move, Enter opens, Escape closes."));
  acceptDrops(document.documentElement, openFirst);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && parseView(location.hash).compare && !event.target.matches("input, select")) go({ compare: "" });
    const filter = document.getElementById("filter");
    if (event.key !== "/" || !filter || event.target.matches("input, select")) return;
    event.preventDefault();
    filter.focus();
  });
  addEventListener("hashchange", apply);
  apply();
}

start();
