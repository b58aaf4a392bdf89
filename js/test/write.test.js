import assert from "node:assert/strict";
import { mkdir, mkdtemp, readdir, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import * as tr from "treering";
import { encodeArrayFile, splitByHeader } from "../src/write/array_file.js";

async function rewritten(tree, options) {
  const files = new Map();
  await tr.write(files, tree, options);
  return tr.open(files);
}

test("plain values become the leaves of the README", async () => {
  const shared = new Float64Array([1]);
  const tree = {
    b: [1, 1.5, 2n ** 70n, null, true, "x", new tr.Float(2)],
    a: new Map([
      [1, shared],
      [new tr.Float(0.5), shared],
    ]),
  };
  const ckpt = await rewritten({
    ...tree,
    c: tr.bytes(new Uint8Array([0, 255])),
    d: new tr.Value("complex", [1, "nan"]),
  });
  const found = [...ckpt.leaves.values()].map((leaf) => [leaf.path, leaf.type, leaf.value ?? leaf.tied]);
  assert.deepEqual(found, [
    ["a/1", "numpy", undefined],
    ["a/0.5", "numpy", "a/1"],
    ["b/0", "int", 1],
    ["b/1", "float", 1.5],
    ["b/2", "int", 2n ** 70n],
    ["b/3", "none", undefined],
    ["b/4", "bool", true],
    ["b/5", "str", "x"],
    ["b/6", "float", 2],
    ["c", "bytes", new Uint8Array([0, 255])],
    ["d", "complex", [1, NaN]],
  ]);
  const loaded = await ckpt.load();
  assert.equal(loaded.children[0].children[0], loaded.children[0].children[1]);
});

test("step, metrics and metadata keep their types", async () => {
  const metadata = {
    n: 1,
    f: new tr.Float(1),
    big: 2n ** 63n,
    odd: [NaN, -Infinity, "nan"],
    __proto__: null,
    "a/~": { b: Infinity },
  };
  const ckpt = await rewritten({}, { step: 3, metrics: { loss: 1, nan: NaN }, metadata });
  assert.deepEqual([ckpt.step, ckpt.metrics], [3, { loss: 1, nan: NaN }]);
  assert.deepEqual(ckpt.metadata, { n: 1, f: 1, big: 2n ** 63n, odd: [NaN, -Infinity, "nan"], "a/~": { b: Infinity } });
  const again = await rewritten({}, ckpt.exact);
  assert.deepEqual(again.manifest.metadata, ckpt.manifest.metadata);
  assert.deepEqual(again.manifest.metadata.get("f"), new tr.Float(1));
});

test("what cannot be saved is an error", async () => {
  const inside = [];
  inside.push(inside);
  const wrong = [
    undefined,
    () => 0,
    new Date(),
    { a: Symbol("x") },
    new Set(),
    new Uint8ClampedArray(1),
    new DataView(new ArrayBuffer(1)),
    inside,
    [, 1],
  ];
  wrong.push(
    { a: "\ud800" },
    { "\udc00": 1 },
    new Map([[{}, 1]]),
    new Map([
      [1, 0],
      [true, 0],
    ]),
    new tr.Container("dict", "", ["a"], []),
  );
  wrong.push(new tr.Container("set", "", null, []), new tr.Tensor("float32", [1], new Uint8Array(4), "key"), {
    [Symbol("x")]: 1,
  });
  for (const tree of wrong) await assert.rejects(tr.write(new Map(), tree), { name: "InputError" }, String(tree));
  const options = [
    { step: -1 },
    { step: 1.5 },
    { step: "1" },
    { metrics: { a: "x" } },
    { metrics: [1] },
    { metadata: undefined, other: 1 },
  ];
  options.push({ metadata: [undefined] }, { metadata: 2n ** 64n }, { metadata: new Date() }, { metadata: "\ud800" });
  for (const option of options)
    await assert.rejects(tr.write(new Map(), {}, option), { name: "InputError" }, JSON.stringify(Object.keys(option)));
  assert.throws(() => tr.tensor(new Int8Array([8]), { dtype: "int4" }), /expected numbers that it has, found 8/);
  assert.throws(() => tr.tensor(new Float32Array(3), { shape: [2] }), /expected 8 bytes, found 12/);
  assert.throws(() => tr.tensor(new Float32Array(3), { dtype: "float99" }), /expected one of the format page/);
  assert.throws(() => tr.tensor(["abcd"], { dtype: "<U3" }), /at most 12 bytes/);
  assert.throws(() => tr.tensor(new Float32Array(3), { dtype: "int32" }), /expected a Int32Array, found Float32Array/);
});

test("tensors are aligned, and long headers are split", async () => {
  const tensors = [3, 64, 6, 128, 8, 0].map((length, at) => ({
    name: `t${at}`,
    tensor: tr.tensor(new Uint8Array(length)),
  }));
  const { file } = encodeArrayFile("a", tensors);
  const header = JSON.parse(new TextDecoder().decode(file.parts[0].subarray(8)));
  for (const { name, tensor } of tensors) {
    const { length } = tensor.bytes;
    const power = length ? Math.min(64, length & -length) : 64;
    assert.equal(header[name].data_offsets[0] % power, 0);
  }
  assert.equal(file.parts[0].length % 4096, 0);
  assert.deepEqual(
    splitByHeader(tensors, 500).map((group) => group.length),
    [2, 2, 2],
  );
});

test("a folder is committed completely, or not at all", async () => {
  const parent = await mkdtemp(join(tmpdir(), "treering-"));
  const target = join(parent, "new", "parents", "ckpt");
  await tr.write(target, { x: new Float32Array(3) });
  assert.equal((await tr.open(target)).leaves.size, 1);
  assert.deepEqual(await readdir(join(parent, "new", "parents")), ["ckpt"]);
  await assert.rejects(tr.write(target, {}), /expected a missing or empty folder/);
  await assert.rejects(tr.write(join(parent, "x"), { x: undefined }), { name: "InputError" });
  await writeFile(join(parent, "file"), "");
  await assert.rejects(tr.write(join(parent, "file"), {}), /expected a missing or empty folder/);
  await mkdir(join(parent, "empty"));
  await tr.write(join(parent, "empty"), {});
  await writeFile(join(parent, "writer.lock"), "");
  await assert.rejects(tr.write(join(parent, "step-00000001"), {}), /writer\.lock next to it, which Node cannot lock/);
  await assert.rejects(tr.open(join(parent, "nothing")), { name: "NotFoundError" });
  await mkdir(join(parent, "odd", "treering.json"), { recursive: true });
  await assert.rejects(tr.open(join(parent, "odd")), { name: "NotFoundError" });
  assert.deepEqual((await readdir(parent)).sort(), ["empty", "file", "new", "odd", "writer.lock"]);
});
