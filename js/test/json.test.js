import assert from "node:assert/strict";
import { test } from "node:test";
import { Float } from "treering";
import { floatJson, floatName } from "../src/float.js";
import { parseJson } from "../src/json.js";

const parse = (text) => parseJson(new TextEncoder().encode(text));

test("integers, floats and great integers differ", () => {
  const expected = [1, new Float(1), new Float(-0), new Float(1e21), 2 ** 53, 2n ** 53n + 1n, -(10n ** 30n)];
  assert.deepEqual(parse(`[1, 1.0, -0.0, 1e21, 9007199254740992, 9007199254740993, -1${"0".repeat(30)}]`), expected);
});

test("every rule of the text holds", () => {
  const wrong = [
    "",
    "{",
    "[1,]",
    '{"a":1,}',
    '{"a":1,"a":1}',
    '{"a":1,"\\u0061":1}',
    "-0",
    "01",
    "+1",
    "1.",
    ".5",
    "1e400",
  ];
  wrong.push(
    "NaN",
    "'a'",
    '"\u0000"',
    '"\\x"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    "[1] 2",
    "\ufeff1",
    "nul",
    "\u00a01",
    "{1:2}",
  );
  for (const text of wrong) assert.throws(() => parse(text), { name: "FormatFault" }, text);
  assert.throws(() => parseJson(new Uint8Array([0x22, 0xed, 0xa0, 0x80, 0x22])), { name: "FormatFault" });
  assert.throws(() => parse("[".repeat(100_000)), /at most 1000 nested/);
});

test("objects keep every key", () => {
  const found = parse('{"__proto__": {"a": 1}, "constructor": 2, "": 3, "\\ud83d\\ude00": 4}');
  assert.deepEqual([...found.keys()], ["__proto__", "constructor", "", "😀"]);
});

test("floats are written as floats and named as by Python", () => {
  const names = {
    123: "123.0",
    0: "0.0",
    0.0001: "0.0001",
    1e16: "1e+16",
    1.5e-5: "1.5e-05",
    1e15: "1000000000000000.0",
  };
  for (const [number, name] of Object.entries(names)) assert.equal(floatName(Number(number)), name);
  assert.deepEqual([-0, -1.5, 5e-324, 1.25e300].map(floatName), ["-0.0", "-1.5", "5e-324", "1.25e+300"]);
  assert.deepEqual([1, -0, 1e21, 0.1].map(floatJson), ["1.0", "-0.0", "1e+21", "0.1"]);
});
