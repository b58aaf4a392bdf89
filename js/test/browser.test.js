import assert from "node:assert/strict";
import { readdir, readFile } from "node:fs/promises";
import { test } from "node:test";
import * as tr from "treering";
import * as browser from "../src/index.js";

const checkpoint = async (tree) => {
  const files = new Map();
  await browser.write(files, tree);
  return files;
};

test("picked files are opened", async () => {
  const files = await checkpoint({ x: new Float32Array([1, 2]) });
  const picked = (folder) =>
    Array.from(files, ([name, bytes]) =>
      Object.defineProperty(new File([bytes], name), "webkitRelativePath", { value: `${folder}${name}` }),
    );
  const ckpt = await browser.open(picked("run/step-00000001/"));
  assert.deepEqual((await ckpt.leaf("x").read()).data, new Float32Array([1, 2]));
  assert.equal((await ckpt.verify()).length, 0);
  await assert.rejects(
    browser.open([...picked("a/"), ...picked("b/")]),
    /expected one treering.json, found a\/treering.json, b\/treering.json/,
  );
  await assert.rejects(browser.open([]), /found none/);
});

test("a directory handle is opened", async () => {
  const files = await checkpoint({ x: new Float32Array([1, 2]) });
  const handle = {
    kind: "directory",
    name: "picked",
    async getFileHandle(name) {
      if (!files.has(name)) throw new DOMException("none", "NotFoundError");
      return { getFile: async () => new File([files.get(name)], name) };
    },
    async *keys() {
      yield* files.keys();
    },
  };
  const ckpt = await browser.open(handle);
  assert.deepEqual((await ckpt.leaf("x").read()).data, new Float32Array([1, 2]));
  assert.deepEqual((await ckpt.lateMetrics()).files, []);
  files.delete("treering.json");
  await assert.rejects(browser.open(handle), { name: "NotFoundError" });
});

test("targets of other kinds are refused", async () => {
  for (const target of ["folder", undefined, null, 5, {}])
    await assert.rejects(browser.open(target), { name: "InputError" });
  await assert.rejects(tr.open(new Map(), { fetch }), { name: "InputError" });
  await assert.rejects(tr.open("folder", { other: 1 }), { name: "InputError" });
  await assert.rejects(browser.write("folder", {}), { name: "InputError" });
});

test("browsers load nothing of Node", async () => {
  const names = (await readdir(new URL("../src/", import.meta.url), { recursive: true })).filter((name) =>
    name.endsWith(".js"),
  );
  assert.ok(names.length > 40);
  for (const name of names.filter((one) => !one.startsWith("node"))) {
    assert.doesNotMatch(
      await readFile(new URL(`../src/${name}`, import.meta.url), "utf8"),
      /from "(node:|\.\.?\/node\/)/,
      name,
    );
  }
});

test("the types and the package name what is exported", async () => {
  const types = await readFile(new URL("../types/index.d.ts", import.meta.url), "utf8");
  const declared = Array.from(types.matchAll(/^export (?:class|function) (\w+)/gm), ([, name]) => name);
  assert.deepEqual(declared.sort(), Object.keys(tr).sort());
  assert.deepEqual(Object.keys(browser).sort(), Object.keys(tr).sort());
  const described = JSON.parse(await readFile(new URL("../package.json", import.meta.url), "utf8"));
  const { VERSION } = await import("../src/version.js");
  assert.equal(described.version, VERSION);
});
