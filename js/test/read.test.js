import assert from "node:assert/strict";
import { test } from "node:test";
import * as tr from "treering";

const numbers = (length) => Float32Array.from({ length }, (_, at) => at);

/** A checkpoint in memory, and the ranges that are read of it. */
async function recorded(tree) {
  const files = new Map();
  await tr.write(files, tree);
  const reads = [];
  class Recorder {
    place = "test";
    async read(name, start, end) {
      reads.push([name, start, end]);
      const bytes = files.get(name);
      if (!bytes) throw new tr.MissingFileError(name);
      return { bytes: bytes.subarray(start, end), size: bytes.length };
    }
    async list() {
      return Array.from(files.keys());
    }
  }
  return { files, reads, ckpt: await tr.open(new Recorder()) };
}

test("a box has the elements of the array", async () => {
  const shape = [4, 3, 5];
  const { ckpt } = await recorded({ x: tr.tensor(numbers(60), { shape }) });
  for (const [start, stop] of [
    [[0, 0, 0], shape],
    [
      [1, 1, 2],
      [3, 3, 4],
    ],
    [
      [2, 0, 0],
      [3, 3, 5],
    ],
    [
      [0, 2, 0],
      [4, 3, 5],
    ],
    [
      [1, 1, 1],
      [1, 3, 5],
    ],
  ]) {
    const expected = [];
    for (let i = start[0]; i < stop[0]; i++)
      for (let j = start[1]; j < stop[1]; j++)
        for (let k = start[2]; k < stop[2]; k++) expected.push((i * 3 + j) * 5 + k);
    const part = await ckpt.leaf("x").read({ start, stop });
    assert.deepEqual([...part.data], expected);
    assert.deepEqual(
      part.shape,
      stop.map((end, axis) => end - start[axis]),
    );
  }
});

test("a box reads only its blocks, and small leaves share one", async () => {
  const { ckpt, reads } = await recorded({ a: new Uint8Array(10 << 20), b: numbers(4), c: numbers(2) });
  await ckpt.leaf("a").read({ start: [5], stop: [(3 << 20) + 1] });
  assert.deepEqual(
    reads.slice(1).map(([, start, end]) => end - start),
    [4096, 4 << 20],
  );
  await ckpt.leaf("b").read();
  await ckpt.leaf("c").read();
  assert.equal(reads.length, 4);
});

test("bytes and files that no leaf names are verified", async () => {
  const { ckpt, files } = await recorded({ x: numbers(3), y: [] });
  assert.deepEqual(await ckpt.verify(), []);
  const late = `metrics-${ckpt.identity}-00000000000000000001-abcdef.json`;
  files.set(late, new TextEncoder().encode("{}"));
  const [{ leaf, error }] = await ckpt.verify();
  assert.deepEqual([leaf, error.name, error.file], [null, "DamagedError", late]);
});

test("reads at once bring each block once", async () => {
  const shape = [5, 700_000];
  const { ckpt, reads } = await recorded({ a: tr.tensor(numbers(3_500_000), { shape }), b: numbers(4), c: numbers(2) });
  const boxes = [[0, 5], [1, 2], [4, 5], [0, 3]]; // prettier-ignore
  const parts = boxes.map(([from, to]) => ckpt.leaf("a").read({ start: [from, 5], stop: [to, 699_990] }));
  const others = [ckpt.leaf("b").read(), ckpt.leaf("c").read(), ckpt.leaf("a").read()];
  for (const [n, { data, shape: found }] of (await Promise.all(parts)).entries()) {
    assert.deepEqual(found, [boxes[n][1] - boxes[n][0], 699_985]);
    for (const at of [0, 1, 699_984, 699_985, data.length - 1].filter((one) => one < data.length)) {
      const row = boxes[n][0] + Math.floor(at / 699_985);
      assert.equal(data[at], row * 700_000 + 5 + (at % 699_985));
    }
  }
  assert.deepEqual(
    (await Promise.all(others)).map(({ data }) => data.at(-1)),
    [3, 1, 3_499_999],
  );
  assert.equal(reads.length, 3);
});

test("an abort of one read leaves the others alone", async () => {
  const files = new Map();
  await tr.write(files, { x: numbers(3), y: numbers(5) });
  let abort;
  let failing = 0;
  const fetch = async (url, { headers }) => {
    const bytes = files.get(String(url).split("/").at(-1));
    const range = /bytes=(\d+)-(\d+)/.exec(headers?.Range ?? "");
    if (range && failing-- > 0) await new Promise((_, reject) => (abort = reject));
    return new Response(range ? bytes.slice(+range[1], +range[2] + 1) : bytes, { status: range ? 206 : 200 });
  };
  // The header and the blocks are on their way for one read when others come.
  for (const step of [0, 1]) {
    const ckpt = await tr.open("https://example.org/c", { fetch });
    if (step) await ckpt.leaf("y").read();
    if (step) for (const file of ckpt.files) file.recent.clear();
    failing = 1;
    const one = ckpt.leaf("x").read();
    await new Promise((resolve) => setTimeout(resolve, 1));
    const others = ["x", "y"].map((path) => ckpt.leaf(path).read());
    await new Promise((resolve) => setTimeout(resolve, 1));
    abort(new DOMException("left", "AbortError"));
    await assert.rejects(one, { name: "AbortError" });
    assert.deepEqual(
      (await Promise.all(others)).map(({ data }) => data.length),
      [3, 5],
    );
  }
});

test("boxes outside the shape are refused", async () => {
  const { ckpt } = await recorded({ x: numbers(3) });
  for (const slice of [
    { start: [-1] },
    { stop: [4] },
    { start: [2], stop: [1] },
    { start: [0, 0] },
    { begin: [0] },
    { start: [0.5] },
  ]) {
    await assert.rejects(ckpt.leaf("x").read(slice), { name: "InputError" });
  }
  assert.throws(() => ckpt.leaf("y"), /expected a path of a leaf, found "y"/);
});

test("a checkpoint that was replaced or deleted is not damaged", async () => {
  const { ckpt, files } = await recorded({ x: numbers(3) });
  const [array] = [...files.keys()].filter((name) => name.endsWith(".safetensors"));
  files.delete(array);
  await assert.rejects(ckpt.leaf("x").read(), { name: "DamagedError", file: array });
  const manifest = files.get("treering.json");
  const other = new Map();
  await tr.write(other, { y: 1 });
  files.set("treering.json", other.get("treering.json"));
  await assert.rejects(ckpt.leaf("x").read(), { name: "ReplacedError" });
  files.delete("treering.json");
  await assert.rejects(ckpt.leaf("x").read(), { name: "NotFoundError" });
  files.set("treering.json", manifest.slice(0, -1));
  await assert.rejects(tr.open(files), { name: "DamagedError", file: "treering.json" });
});

test("a failed read is repeated", async () => {
  const files = new Map();
  await tr.write(files, { x: numbers(3) });
  let failures = 1;
  const read = async (name, start, end) => {
    if (name.endsWith(".safetensors") && failures-- > 0) throw new tr.SourceError("the network");
    return { bytes: files.get(name).subarray(start, end), size: files.get(name).length };
  };
  const ckpt = await tr.open({ place: "test", read });
  await assert.rejects(ckpt.leaf("x").read(), { name: "SourceError" });
  assert.deepEqual((await ckpt.leaf("x").read()).data, numbers(3));
});

test("an abort stays one, and a hidden Content-Range is not needed", async () => {
  const files = new Map();
  await tr.write(files, { x: numbers(3) });
  const fetch = async (url, { headers }) => {
    const bytes = files.get(String(url).split("/").at(-1));
    const range = /bytes=(\d+)-(\d+)/.exec(headers?.Range ?? "");
    return new Response(range ? bytes.slice(+range[1], +range[2] + 1) : bytes, { status: range ? 206 : 200 });
  };
  const ckpt = await tr.open("https://example.org/c", { fetch });
  assert.deepEqual((await ckpt.leaf("x").read()).data, numbers(3));
  const abort = () => Promise.reject(new DOMException("left", "AbortError"));
  await assert.rejects(tr.open("https://example.org/c", { fetch: abort }), { name: "AbortError" });
});
