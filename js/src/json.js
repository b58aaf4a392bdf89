/**
 * The strict JSON of the format. `JSON.parse` neither finds a key that occurs twice nor tells `1` from `1.0`, and it
 * rounds great integers; all three change the verdict on a checkpoint.
 *
 * An integer is a number from -2^53 to 2^53, else a bigint. A number with a fraction or an exponent is a `Float`. An
 * object is a `Map`, which keeps every key, `__proto__` included.
 */

import { FormatFault } from "./errors.js";
import { Float } from "./float.js";

/** @typedef {import("./types.js").Json} Json */

export const MAX_INTEGER = 2 ** 53;

/** No place of the format nests deeper: 100 dicts of an iterator's state have 300 lists around the last one. */
const MAX_DEPTH = 1000;

const TEXT = /[^"\\\u0000-\u001f]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const BLANKS = /[ \t\n\r]*/y;
/** @type {Record<string, string>} */
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
/** @type {[string, Json][]} */
const WORDS = [
  ["true", true],
  ["false", false],
  ["null", null],
];

/** Parses one JSON value. Raises `FormatFault`. @param {Uint8Array} bytes @returns {Json} */
export function parseJson(bytes) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    throw new FormatFault(`expected UTF-8 of at most 500 MB, found other bytes (${error})`);
  }
  return new Parser(text).all();
}

class Parser {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
  }

  all() {
    const value = this.value();
    if (this.at !== this.text.length) this.fail("the end");
    return value;
  }

  /** @param {string} expected @returns {never} */
  fail(expected) {
    const found = this.text.slice(this.at, this.at + 20);
    throw new FormatFault(`JSON at character ${this.at}: expected ${expected}, found ${JSON.stringify(found)}`);
  }

  /** @param {RegExp} pattern @returns {RegExpExecArray | null} */
  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  /** Returns the next character that is not blank, and leaves it in place. */
  peek() {
    if (this.text.charCodeAt(this.at) <= 32) this.match(BLANKS);
    return this.text[this.at];
  }

  /** @param {string} character @returns {boolean} */
  takes(character) {
    if (this.peek() !== character) return false;
    this.at += 1;
    return true;
  }

  /** @returns {Json} */
  value() {
    const first = this.peek();
    /** @type {Json} */
    let found;
    if (first === '"') found = this.string();
    else if (first === "[" || first === "{") {
      if (++this.depth > MAX_DEPTH) this.fail(`at most ${MAX_DEPTH} nested lists and objects`);
      this.at += 1;
      found = first === "[" ? this.list() : this.object();
      this.depth -= 1;
    } else found = this.scalar();
    this.peek();
    return found;
  }

  list() {
    /** @type {Json[]} */
    const items = [];
    if (this.takes("]")) return items;
    do items.push(this.value());
    while (this.takes(","));
    if (!this.takes("]")) this.fail("`,` or `]`");
    return items;
  }

  object() {
    /** @type {Map<string, Json>} */
    const fields = new Map();
    if (this.takes("}")) return fields;
    do {
      if (this.peek() !== '"') this.fail("a key");
      const key = this.string();
      if (fields.has(key)) this.fail(`no second key ${JSON.stringify(key)}`);
      if (!this.takes(":")) this.fail("`:`");
      fields.set(key, this.value());
    } while (this.takes(","));
    if (!this.takes("}")) this.fail("`,` or `}`");
    return fields;
  }

  string() {
    this.at += 1;
    let found = "";
    let escaped = false;
    for (;;) {
      found += /** @type {RegExpExecArray} */ (this.match(TEXT))[0];
      const next = this.text[this.at];
      if (next === '"') break;
      if (next !== "\\") this.fail("text without control characters, and its end");
      escaped = true;
      found += this.escape();
    }
    this.at += 1;
    if (escaped && !found.isWellFormed()) this.fail("no half of a surrogate pair in the text before");
    return found;
  }

  escape() {
    const kind = this.text[this.at + 1];
    const digits = this.text.slice(this.at + 2, this.at + 6);
    if (kind === "u" && /^[0-9a-fA-F]{4}$/.test(digits)) {
      this.at += 6;
      return String.fromCharCode(parseInt(digits, 16));
    }
    if (!Object.hasOwn(ESCAPES, kind ?? "")) this.fail("an escape");
    this.at += 2;
    return ESCAPES[kind];
  }

  /** @returns {Json} */
  scalar() {
    for (const [word, value] of WORDS) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    const found = this.match(NUMBER);
    if (!found) return this.fail("a JSON value");
    const number = Number(found[0]);
    if (found[1] !== undefined || found[2] !== undefined) {
      if (!Number.isFinite(number)) this.fail("a number that is finite as a double before");
      return new Float(number);
    }
    if (Object.is(number, -0)) this.fail("no number `-0` before");
    // 2^53 + 1 rounds to 2^53, so only smaller numbers are surely exact.
    if (Math.abs(number) < MAX_INTEGER) return number;
    const exact = BigInt(found[0]);
    return exact <= 2n ** 53n && exact >= -(2n ** 53n) ? number : exact;
  }
}
