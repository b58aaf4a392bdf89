import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { blockChecksums, xxh3 } from "../src/checksum.js";

test("checksums are those of hash-wasm", async () => {
  const peer = {};
  new Function("exports", "module", readFileSync(new URL("../vendor/hash-wasm.js", import.meta.url), "utf8"))(peer, {});
  const hasher = await peer.createXXHash3(0, 0);
  const expected = (bytes) => hasher.init().update(bytes).digest("hex");
  const bytes = new Uint8Array((2 << 20) + 100);
  for (let n = 0; n < bytes.length; n++) bytes[n] = (n * 2654435761) >>> 13;
  const around = [1 << 14, 1 << 15, 1 << 20, 2 << 20].flatMap((n) =>
    [-1024, -64, -1, 0, 1, 63, 64, 65].map((d) => n + d),
  );
  for (const length of [...Array(1200).keys(), ...around]) {
    assert.equal(xxh3(bytes.subarray(3, 3 + length)), expected(bytes.subarray(3, 3 + length)), length);
  }
  const parts = [0, 5, 1 << 20, (2 << 20) - 7, bytes.length].map((end, n, ends) =>
    bytes.subarray(ends[n - 1] ?? 0, end),
  );
  const blocks = [0, 1, 2].map((n) => expected(bytes.subarray(n << 20, (n + 1) << 20)));
  assert.equal(blockChecksums(parts), blocks.join(""));
});
