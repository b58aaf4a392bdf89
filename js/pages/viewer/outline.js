/** The tree of a checkpoint: levels of paths, with the leaves and bytes below each. */

import { printable } from "../parts/elements.js";

/**
 * @typedef {object} Node
 * @property {string} name
 * @property {string} path
 * @property {Node[]} children
 * @property {import("./contents.js").Leaf | null} leaf
 * @property {number} leaves
 * @property {number} nbytes
 */

/** Returns the root. @param {import("./contents.js").Contents} contents @returns {Node} */
export function outline({ format, leaves }) {
  // In safetensors files, names of PyTorch have dots for levels.
  const separator = format === "safetensors" && !leaves.some(({ path }) => path.includes("/")) ? "." : "/";
  const root = makeNode("", "");
  /** @type {Map<string, Node>} */
  const nodes = new Map([["", root]]);
  for (const leaf of leaves) {
    const names = leaf.path.split(separator);
    let node = root;
    for (let depth = 0; depth < names.length; depth++) {
      node.leaves++;
      node.nbytes += leaf.nbytes;
      const path = names.slice(0, depth + 1).join(separator);
      // A leaf and a level may have one name in safetensors files.
      const key = depth === names.length - 1 ? `leaf:${path}` : path;
      let child = nodes.get(key);
      if (!child) {
        child = makeNode(names[depth], path);
        nodes.set(key, child);
        node.children.push(child);
      }
      node = child;
    }
    Object.assign(node, { leaf, leaves: 1, nbytes: leaf.nbytes });
  }
  return root;
}

/** @returns {Node} */
function makeNode(name, path) {
  return { name, path, children: [], leaf: null, leaves: 0, nbytes: 0 };
}

const MAX_RECTANGLES = 300; // This many parts of a level are drawn; the rest is one.

/** Returns the tree as the rectangles of `treemap` need it. @param {Node} node @param {string} [name] */
export function rectangles(node, name = node.name) {
  const about = { name: printable(name), path: printable(node.path), nbytes: node.nbytes, leaves: node.leaves };
  if (node.leaf) return { ...about, leaf: node.path, what: node.leaf.what, dtype: node.leaf.dtype };
  const sized = node.children.filter((child) => child.nbytes).sort((a, b) => b.nbytes - a.nbytes);
  const parts = sized.slice(0, MAX_RECTANGLES).map((child) => rectangles(child));
  const rest = sized.slice(MAX_RECTANGLES);
  const sum = (of) => rest.reduce((total, child) => total + child[of], 0);
  if (rest.length) parts.push({ name: `${rest.length} smaller`, path: "", nbytes: sum("nbytes"), leaves: sum("leaves") });
  return { ...about, parts };
}
