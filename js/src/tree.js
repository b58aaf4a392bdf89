/** The tree of a checkpoint: its containers, and the paths of its leaves. */

import { check } from "./errors.js";
import { integer, list, text } from "./fields.js";
import { decodeKey, encodeKey, keyIdentity, keyName } from "./keys.js";

/** @typedef {import("./json.js").Json} Json */
/** @typedef {import("./keys.js").Key} Key */
/** @typedef {"dict" | "list" | "tuple" | "namedtuple" | "object" | "positional"} ContainerKind */

const WITH_KEYS = ["dict", "object", "namedtuple"];
const COUNTED = ["list", "tuple", "positional"];

/** A node of the tree with children, in their order. */
export class Container {
  /**
   * @param {ContainerKind} kind
   * @param {string} name the name of a class; empty for plain dicts, lists and tuples
   * @param {readonly Key[] | null} keys one for each child; `null` if children are only counted
   * @param {unknown[]} children
   */
  constructor(kind, name, keys, children) {
    this.kind = kind;
    this.name = name;
    this.keys = keys;
    this.children = children;
  }
}

/** @param {Json} json @returns {{kind: ContainerKind, name: string, keys: Key[] | null, count: number}} */
function decodeContainer(json) {
  const [kind, name, keys] = list(json, "a node of the tree", 3);
  check(typeof kind === "string", "the kind of a container", "text", kind);
  const class_ = text(name, "the name of a container");
  const known = /** @type {ContainerKind} */ (kind);
  if (COUNTED.includes(kind))
    return { kind: known, name: class_, keys: null, count: integer(keys, `the children of a ${kind}`) };
  check(WITH_KEYS.includes(kind), "the kind of a container", "one of version 1", kind);
  const decoded = list(keys, `the keys of a ${kind}`).map((key) =>
    decodeKey(kind === "namedtuple" ? text(key, "a field") : key),
  );
  const different = new Set(decoded.map(keyIdentity));
  check(different.size === decoded.length, `the keys of a ${kind}`, "no two equal keys", keys);
  return { kind: known, name: class_, keys: decoded, count: decoded.length };
}

/**
 * Decodes the tree. Raises `FormatFault`.
 *
 * @param {Json} json the nodes in pre-order
 * @param {number} leafCount
 * @returns {{top: unknown[], paths: string[], leafPlaces: [unknown[], number][]}} the root alone in a list, the paths of
 *   the leaves, and the places where they belong: lists of children, and positions in them
 */
export function decodeTree(json, leafCount) {
  const rows = list(json, "tree");
  /** @type {string[]} */
  const paths = [];
  /** @type {[unknown[], number][]} */
  const leafPlaces = [];
  /** @type {unknown[]} */
  const top = [];
  // An explicit stack: trees nest deeper than calls may.
  const stack = [{ children: top, keys: /** @type {Key[] | null} */ (null), count: 1, prefix: "", isTop: true }];
  for (const row of rows) {
    const parent = stack.at(-1);
    check(parent, "tree", "no node after the last one", row);
    const position = parent.children.length;
    const name = parent.keys ? keyName(parent.keys[position]) : String(position);
    const path = parent.isTop ? "" : parent.prefix + name;
    if (row === 0) {
      paths.push(path);
      leafPlaces.push([parent.children, position]);
      parent.children.push(0);
    } else {
      const { kind, name: class_, keys, count } = decodeContainer(row);
      const node = new Container(kind, class_, keys, []);
      parent.children.push(node);
      stack.push({ children: node.children, keys, count, prefix: parent.isTop ? "" : `${path}/`, isTop: false });
    }
    while (stack.length && /** @type {any} */ (stack.at(-1)).children.length === stack.at(-1)?.count) stack.pop();
  }
  check(!stack.length, "tree", "every child of every container", `${rows.length} nodes`);
  check(paths.length === leafCount, "leaves", `${paths.length} leaves, as in the tree`, leafCount);
  check(new Set(paths).size === paths.length, "tree", "no two leaves with one path", undefined);
  return { top, paths, leafPlaces };
}

/** Encodes a container without its children. @param {Container} node @returns {Json} */
export function encodeContainer(node) {
  return [node.kind, node.name, node.keys ? node.keys.map(encodeKey) : node.children.length];
}
