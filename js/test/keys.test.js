import assert from "node:assert/strict";
import { test } from "node:test";
import { Float } from "treering";
import { decodeKey, encodeKey, keyIdentity, keyName } from "../src/keys.js";

test("names of keys are those of the format page", () => {
  const names = [
    ["a/b~c", "a~1b~0c"],
    [true, "True"],
    [2n ** 60n, "1152921504606846976"],
    [new Float(0.5), "0.5"],
    [new Uint8Array([0x61, 0xff, 0xc3, 0xa4, 0xe2, 0x82, 0xed, 0xa0, 0x80]), "a\\xffä\\xe2\\x82\\xed\\xa0\\x80"],
    [[1, true], "(1, True)"],
    [["it's", "\\"], "('it\\'s', '\\\\')"],
    [["a"], "('a',)"],
    [[], "()"],
  ];
  for (const [key, name] of names) {
    assert.equal(keyName(key), name);
    assert.deepEqual(decodeKey(encodeKey(key)), key);
  }
});

test("keys are equal when Python says so", () => {
  const same = [
    [1, new Float(1)],
    [1, true],
    [0, new Float(-0)],
    [
      [1, "a"],
      [true, "a"],
    ],
    [2n ** 60n, new Float(2 ** 60)],
  ];
  for (const [a, b] of same) assert.equal(keyIdentity(a), keyIdentity(b));
  const different = [
    [1, "1"],
    [new Float(NaN), new Float(NaN)],
    [[new Float(NaN)], [new Float(NaN)]],
    ["a", new Uint8Array([97])],
  ];
  different.push([[1, 2], ["1,2"]], [2n ** 53n + 1n, new Float(2 ** 53)]);
  for (const [a, b] of different) assert.notEqual(keyIdentity(a), keyIdentity(b));
});
