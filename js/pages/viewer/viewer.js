/** The viewer: opens checkpoints in the browser and sends nothing anywhere. */

import { el } from "../parts/elements.js";
import { bytes, number } from "../parts/numbers.js";
import { treemap } from "../parts/treemap.js";
import { printable, valueText } from "./contents.js";
import { detect } from "./detect.js";
import { diffView } from "./diff_view.js";
import { leafView } from "./leaf_view.js";
import { admit, lock } from "./lock.js";
import { acceptDrops, opener, openUrl } from "./opener.js";
import { outline, rectangles } from "./outline.js";
import { runView } from "./run_view.js";
import { servedSource } from "./sources.js";
import { tree } from "./tree.js";

const MAX_METADATA = 20_000;

const place = (id) => el("div", { id });
const status = el("div", { id: "status", "aria-live": "assertive" });
const places = { run: place("run"), contents: place("contents"), compare: place("compare"), second: place("second"), diff: place("diff") };
/** What is shown first and second. @type {{a: any, b: any}} */
const shown = { a: null, b: null };
/** How often each side was opened: what an earlier one finds later is not shown. */
const opened = { a: 0, b: 0 };

/** Shows an error, or that something is read. */
function say(text, isError) {
  status.replaceChildren(...(text ? [el("p", isError ? { class: "note", role: "alert" } : {}, printable(text))] : []));
}

/** Opens the first, or the one to compare it with. @param {"a" | "b"} side @param {Promise<any>} opening */
async function open(side, opening) {
  const turn = ++opened[side];
  say("Reading…", false);
  try {
    const { source, file } = await opening;
    const found = await detect(source, file);
    if (turn !== opened[side]) return;
    say("", false);
    const [run, show] = side === "a" ? [places.run, showFirst] : [places.second, showSecond];
    const choose = (contents) => turn === opened[side] && show(contents);
    run.replaceChildren(...(found.steps ? runView(found.place, found.steps, choose, side === "a" ? showSecond : null) : []));
    if (found.contents) choose(found.contents);
  } catch (error) {
    if (!["TreeringError", "InputError", "NotFoundError", "DamagedError", "UnsupportedError", "SourceError", "ReplacedError"].includes(error.name)) console.error(error);
    say(error.message, true);
  }
}

function showFirst(contents) {
  shown.a = contents;
  const root = outline(contents);
  document.title = printable(`${contents.place.split("/").filter(Boolean).at(-1) ?? ""} · Treering viewer`);
  const count = contents.leaves.length;
  const head = [contents.format, contents.step === undefined ? "" : `step ${contents.step}`,
    `${count.toLocaleString("en")} ${count === 1 ? "leaf" : "leaves"}`, bytes(root.nbytes)].filter(Boolean).join(" · ");
  const facts = contents.facts.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
  const metrics = Object.entries(contents.metrics).flatMap(([name, value]) => [el("dt", {}, printable(name)),
    el("dd", { class: Number.isFinite(value) ? "" : "bad" }, Number.isFinite(value) ? number(value) : String(value))]);
  const metadata = valueText(contents.metadata, MAX_METADATA).split("\n").map(printable).join("\n");
  const sizes = root.nbytes ? treemap(rectangles(root, "all")) : null;
  const first = places.contents;
  first.replaceChildren(el("h2", { id: "title" }, printable(contents.place)), el("p", { id: "head" }, head),
    ...contents.notes.map((note) => el("p", { class: "note" }, printable(note))), el("dl", {}, facts),
    ...(metrics.length ? [el("h3", {}, "Metrics"), el("dl", { id: "values" }, metrics)] : []),
    ...(metadata ? [el("details", {}, el("summary", {}, "Metadata"), el("pre", { id: "metadata" }, metadata))] : []),
    el("h3", {}, "Leaves"), ...tree(root, leafView),
    ...(sizes ? [el("h3", {}, "Sizes"), ...sizes.nodes] : []));
  sizes?.draw();
  if (!places.compare.firstChild) places.compare.append(opener("Compare with another: drop it here, or choose", (opening) => open("b", opening)));
  compare();
}

function showSecond(contents) {
  shown.b = contents;
  compare();
}

function compare() {
  places.diff.replaceChildren(...(shown.a && shown.b ? diffView(shown.a, shown.b) : []));
}

const openFirst = (opening) => {
  shown.b = null;
  opened.b++;
  places.second.replaceChildren();
  open("a", opening);
};

function start() {
  const root = document.getElementById("viewer");
  root.append(el("p", {}, "It reads checkpoints, safetensors files and runs in this page, and sends nothing anywhere."),
    opener("Drop a checkpoint, a safetensors file or a run here, or choose", openFirst), status,
    places.run, places.contents, places.compare, places.second, places.diff,
    el("p", { class: "faint" }, "Keys: / filters, ↑ ↓ move, → ← unfold and fold, Enter opens a leaf."));
  acceptDrops(document.documentElement, openFirst);
  document.addEventListener("keydown", (event) => {
    const filter = document.getElementById("filter");
    if (event.key !== "/" || !filter || event.target.matches("input, select")) return;
    event.preventDefault();
    filter.focus();
  });
  openHash();
  addEventListener("hashchange", openHash);
}

/** Opens what the address names: `#served`, or `#url=…`. The part after # is not sent to servers. */
function openHash() {
  const hash = location.hash.slice(1);
  if (hash === "served") {
    admit(location.origin);
    lock();
    openFirst(servedSource().then((source) => ({ source })));
  } else if (hash.startsWith("url=")) openFirst(openUrl(decodeURIComponent(hash.slice(4))));
}

start();
