// Answers one line of JSON for each line of JSON that it reads: {"call": name, "arguments": [...]}.

import { createInterface } from "node:readline";
import { writeFileSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import * as tr from "treering";

const VERDICTS = { DamagedError: "damaged", UnsupportedError: "unsupported" };

const verdictOf = (error) => {
  if (!Object.hasOwn(VERDICTS, error.name)) throw error;
  return VERDICTS[error.name];
};

const base64 = (view) => Buffer.from(view.buffer, view.byteOffset, view.byteLength).toString("base64");

const described = (array) => ({
  dtype: array.dtype,
  impl: array.impl,
  shape: array.shape,
  type: array.type,
  bytes: base64(array.bytes),
});

async function leafVerdict(leaf) {
  try {
    const found = await leaf.read();
    if (found instanceof tr.Tensor) return described(found);
    return leaf.kind === "iterator"
      ? { type: "iterator", value: leaf.lengths }
      : { type: found.type, value: found.json };
  } catch (error) {
    return verdictOf(error);
  }
}

// JSON that tells floats from integers and -0 from 0, and has NaN and Infinity, as Python reads them.
function encode(value) {
  if (typeof value === "number" && Object.is(value, -0)) return "-0.0";
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  if (value instanceof tr.Float)
    return Number.isInteger(value.value) && !Object.is(value.value, -0) && Math.abs(value.value) < 1e21
      ? `${value.value}.0`
      : encode(value.value);
  if (Array.isArray(value) || ArrayBuffer.isView(value)) return `[${Array.from(value, encode).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value ?? null);
  return `{${Object.entries(value)
    .map(([key, child]) => `${JSON.stringify(key)}:${encode(child)}`)
    .join(",")}}`;
}

const CALLS = {
  // The verdicts on a checkpoint, its leaves and its metrics files.
  async judge(folder) {
    let ckpt;
    try {
      ckpt = await tr.open(folder);
    } catch (error) {
      return {
        checkpoint: verdictOf(error),
        leaves: {},
        late: {},
        metrics: {},
      };
    }
    const leaves = {};
    for (const [path, leaf] of ckpt.leaves) leaves[path] = await leafVerdict(leaf);
    const { metrics, files } = await ckpt.lateMetrics();
    const late = Object.fromEntries(files.map(({ name, error }) => [name, error ? verdictOf(error) : "valid"]));
    return { checkpoint: "valid", leaves, late, metrics };
  },

  // Reads checkpoints and writes them again: every tenth as a commit to a folder, the others by way of memory.
  async copy(pairs) {
    for (const [index, [from, to]] of pairs.entries()) {
      const ckpt = await tr.open(from);
      const tree = await ckpt.load();
      if (index % 10 === 0) {
        await tr.write(to, tree, ckpt.exact);
        continue;
      }
      const files = new Map();
      await tr.write(files, tree, ckpt.exact);
      mkdirSync(to);
      for (const [name, bytes] of files) writeFileSync(join(to, name), bytes);
    }
    return pairs.length;
  },

  // A leaf, or a box of it, and its numbers.
  async read(target, path, slice) {
    const array = await (await tr.open(target)).leaf(path).read(slice);
    return {
      ...described(array),
      data: ArrayBuffer.isView(array.data) ? base64(array.data) : array.data,
    };
  },

  // All leaves at once: the first element of each, and of those of `load`.
  async together(target) {
    const ckpt = await tr.open(target);
    const arrays = await Promise.all(Array.from(ckpt.leaves.values(), (leaf) => leaf.read()));
    const loaded = await (await tr.open(target)).load();
    return [arrays, loaded.children].map((all) => all.map(({ data }) => data[0]));
  },

  async verify(target) {
    const problems = await (await tr.open(target)).verify();
    return problems.map(({ leaf, error: { name, message, file, block } }) => ({ leaf, name, message, file, block }));
  },

  // One word for each checkpoint, and the first message.
  async verdicts(folders) {
    const found = [];
    for (const folder of folders) {
      try {
        const [problem] = await (await tr.open(folder)).verify();
        if (problem) throw problem.error;
        found.push(["valid", ""]);
      } catch (error) {
        found.push([verdictOf(error), error.message]);
      }
    }
    return found;
  },

  // Numbers rounded to a dtype.
  async round(dtype, numbers) {
    return base64(tr.tensor(numbers, { dtype }).bytes);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  let answer;
  try {
    const { call, arguments: given } = JSON.parse(line);
    answer = { result: await CALLS[call](...given) };
  } catch (error) {
    answer = { error: error.name, message: error.message, stack: error.stack };
  }
  process.stdout.write(`${encode(answer)}\n`);
}
