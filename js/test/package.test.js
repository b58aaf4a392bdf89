import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";
import * as tr from "treering";
import * as browser from "../src/index.js";

execFileSync(process.execPath, ["build.mjs"], { cwd: new URL("..", import.meta.url) });
const require = createRequire(import.meta.url);

test("CommonJS has the same names and reads the same", async () => {
  for (const [file, modules] of [
    ["../cjs/node/index.js", tr],
    ["../cjs/index.js", browser],
  ]) {
    const common = require(file);
    assert.deepEqual(Object.keys(common).sort(), Object.keys(modules).sort());
    const files = new Map();
    await common.write(files, { x: new Float32Array([1, 2]) });
    assert.deepEqual((await (await modules.open(files)).leaf("x").read()).data, new Float32Array([1, 2]));
  }
});

test("a file: URL as text names a folder", async () => {
  const url = pathToFileURL(join(await mkdtemp(join(tmpdir(), "a b-")), "c")).href;
  await tr.write(url, { x: 1 });
  assert.equal((await tr.open(url)).leaf("x").value, 1);
  await assert.rejects(tr.open("file://elsewhere.example/c"), { name: "InputError" });
  await assert.rejects(browser.open(url), /expected an http\(s\) URL/);
});

test("a page opens relative URLs", async () => {
  const files = new Map();
  await tr.write(files, { x: 1 }, { step: 7 });
  globalThis.location = { href: "https://example.org/app/index.html" };
  try {
    const asked = [];
    const fetch = async (url) => {
      asked.push(String(url));
      return new Response(files.get("treering.json"));
    };
    assert.equal((await browser.open("../models/a", { fetch })).step, 7);
    assert.deepEqual(asked, ["https://example.org/models/a/treering.json"]);
  } finally {
    delete globalThis.location;
  }
});

test("the package names its license and has it", async () => {
  const described = JSON.parse(await readFile(new URL("../package.json", import.meta.url), "utf8"));
  const text = await readFile(new URL("../LICENSE", import.meta.url), "utf8");
  assert.match(text, /Apache License/);
  assert.equal(described.sideEffects, false);
});
