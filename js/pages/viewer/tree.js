/** The tree on the page: rows that unfold, moved through by keys as WAI-ARIA describes for trees. */

import { el, printable } from "../parts/elements.js";
import { matches } from "../parts/filter.js";
import { bytes } from "../parts/numbers.js";

const ROWS = 500; // The tree draws this many rows at a time.
const UNFOLDED = 30; // Levels are unfolded at first as long as they have so few rows.

/**
 * Returns the elements of a tree.
 *
 * @param {import("./outline.js").Node} root
 * @param {(leaf: import("./contents.js").Leaf) => Node} detail makes the element that opens below a leaf
 * @param {(path: string, isOpen: boolean) => void} choose is called if the user opens or closes a leaf
 */
export function tree(root, detail, choose) {
  const unfolded = new Set([root]);
  /** The elements below leaves that are open, by node. @type {Map<any, Node>} */
  const open = new Map();
  const list = el("div", { role: "tree", id: "tree", "aria-label": "leaves" });
  const more = el("p");
  let most = ROWS;
  let words = "";
  let current = null;

  for (let level = [root], rows = 0; level.length; ) {
    rows += level.reduce((sum, node) => sum + node.children.length, 0);
    if (rows > UNFOLDED && level[0] !== root) break;
    level.forEach((node) => unfolded.add(node));
    level = level.flatMap((node) => node.children.filter((child) => child.children.length));
  }

  /** Lists the rows that show: a node and its level. With words in the filter, all leaves that match. */
  function* rows(node, level) {
    for (const child of node.children) {
      if (words && child.leaf && matches(child.path, words)) yield { node: child, level: 1, name: child.path };
      if (!words) yield { node: child, level, name: child.name };
      if (words || unfolded.has(child)) yield* rows(child, level + 1);
    }
  }

  function row({ node, level, name }) {
    const isFolder = node.children.length > 0;
    const isOpen = isFolder ? unfolded.has(node) : open.has(node);
    const what = node.leaf ? node.leaf.what : `${node.leaves.toLocaleString("en")} ${node.leaves === 1 ? "leaf" : "leaves"}`;
    const line = el("div", {
      role: "treeitem", class: "node", "aria-level": level, "aria-expanded": String(isOpen), tabindex: node === current ? 0 : -1,
      "data-path": node.path, style: `padding-left:${0.4 + Math.min(level - 1, 12) * 0.9}rem`,
      onclick: () => { current = node; toggle(node); },
    }, el("span", { class: "fold", "aria-hidden": "true" }, isOpen ? "▾" : "▸"),
    el("span", { class: "path" }, printable(name) || "(root)"), el("span", { class: "what" }, what),
    el("span", { class: "size" }, node.leaf && !node.leaf.read ? "" : bytes(node.nbytes)));
    line.node = node;
    return open.has(node) ? [line, open.get(node)] : [line];
  }

  function draw() {
    const all = [...rows(root, 1)];
    const hadFocus = list.contains(document.activeElement) && document.activeElement.matches(".node");
    if (!all.some(({ node }) => node === current)) current = all[0]?.node ?? null;
    list.replaceChildren(...all.slice(0, most).flatMap(row));
    const left = all.length - most;
    more.replaceChildren(...(left > 0 ? [`${left.toLocaleString("en")} more rows. `,
      el("button", { class: "more", onclick: () => { most += 4 * ROWS; draw(); } }, "Show more")] : []));
    if (!all.length) more.replaceChildren(words ? "No leaf matches." : "No leaves.");
    if (hadFocus) focus(current);
  }

  const items = () => [...list.querySelectorAll(":scope > .node")];
  function focus(node) {
    const found = items().find((item) => item.node === node);
    if (!found) return;
    items().forEach((item) => item.setAttribute("tabindex", item === found ? "0" : "-1"));
    current = node;
    found.focus();
  }

  function toggle(node) {
    if (node.leaf) return choose(node.path, !open.has(node));
    unfolded.has(node) ? unfolded.delete(node) : unfolded.add(node);
    draw();
  }

  list.addEventListener("focusin", ({ target }) => { if (target.node) current = target.node; });
  list.addEventListener("keydown", (event) => {
    if (!event.target.matches(".node") || event.ctrlKey || event.metaKey || event.altKey) return;
    const shown = items(), at = shown.indexOf(event.target), node = event.target.node;
    const isOpen = node.leaf ? open.has(node) : unfolded.has(node);
    const parent = () => shown.slice(0, at).findLast((item) => item.ariaLevel < event.target.ariaLevel);
    const go = (item) => item && focus(item.node);
    const actions = {
      ArrowDown: () => go(shown[at + 1]), j: () => go(shown[at + 1]),
      ArrowUp: () => go(shown[at - 1]), k: () => go(shown[at - 1]),
      Home: () => go(shown[0]), End: () => go(shown.at(-1)),
      ArrowRight: () => (isOpen ? node.children.length && go(shown[at + 1]) : toggle(node)),
      ArrowLeft: () => (isOpen ? toggle(node) : go(parent())),
      Enter: () => toggle(node), " ": () => toggle(node),
      ...(node.leaf && isOpen ? { Escape: () => toggle(node) } : {}),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
  list.addEventListener("keydown", (event) => {
    const node = [...open].find(([, panel]) => panel.contains(event.target))?.[0];
    if (event.key !== "Escape" || !node) return;
    event.stopPropagation();
    focus(node);
    toggle(node);
  });

  /** Opens these leaves, and closes all others. Unfolds what is above them. @param {string[]} paths */
  function show(paths) {
    const wanted = new Set(paths);
    const visit = (node) => {
      let isAbove = false;
      for (const child of node.children) if (visit(child)) isAbove = true;
      if (isAbove) unfolded.add(node);
      return isAbove || Boolean(node.leaf && wanted.has(node.path));
    };
    const before = open.size;
    for (const [node] of open) if (!wanted.delete(node.path)) open.delete(node);
    if (!wanted.size && open.size === before) return;
    visit(root);
    for (const node of leavesOf(root)) if (wanted.has(node.path)) open.set(node, detail(node.leaf));
    draw();
  }

  /** Shows the row of a leaf on the screen. @param {string} path */
  function reveal(path) {
    items().find((item) => item.node.leaf && item.node.path === path)?.scrollIntoView({ block: "nearest" });
  }

  const filter = el("input", { type: "search", id: "filter", placeholder: "filter: parts of paths, * for anything",
    "aria-label": "filter leaves", oninput: () => { words = filter.value.trim(); most = ROWS; draw(); },
    onkeydown: (event) => { if (event.key === "ArrowDown" && current) { event.preventDefault(); focus(current); } } });
  draw();
  return { nodes: [el("div", { class: "controls" }, filter), list, more], show, reveal };
}

function* leavesOf(node) {
  if (node.leaf) yield node;
  for (const child of node.children) yield* leavesOf(child);
}
