/** Boxes, and the runs of consecutive bytes that they share. */

/** @typedef {{start: readonly number[], shape: readonly number[]}} Box */
/** @typedef {{from: number, to: number, length: number}} ByteRun positions in the two arrays, and a number of bytes */

/** Returns the common part of two boxes; some lengths are 0 or less if there is none. @param {Box} a @param {Box} b @returns {Box} */
export function intersection(a, b) {
  const start = a.start.map((at, axis) => Math.max(at, b.start[axis]));
  const ends = a.start.map((at, axis) => Math.min(at + a.shape[axis], b.start[axis] + b.shape[axis]));
  return { start, shape: ends.map((end, axis) => end - start[axis]) };
}

/** @param {Box} box @returns {boolean} */
export function isEmpty(box) {
  return box.shape.some((length) => length <= 0);
}

/**
 * Lists the runs that copy `part` from one array to another, in the order of the first. Both are in C order.
 *
 * @param {Box} part inside both boxes
 * @param {Box} from
 * @param {Box} to
 * @param {number} itemBytes
 * @param {number} [after] most runs that end before this position of the first array are left out
 * @returns {Generator<ByteRun>}
 */
export function* byteRuns(part, from, to, itemBytes, after = 0) {
  if (isEmpty(part)) return;
  const axes = part.shape.length;
  // Trailing axes that are complete in both boxes make longer runs.
  let inner = axes;
  while (inner > 0 && part.shape[inner - 1] === from.shape[inner - 1] && part.shape[inner - 1] === to.shape[inner - 1])
    inner--;
  const outer = Math.max(0, inner - 1);
  let length = itemBytes;
  for (let axis = outer; axis < axes; axis++) length *= part.shape[axis];
  const fromStrides = strides(from.shape, itemBytes);
  const toStrides = strides(to.shape, itemBytes);
  let source = offset(part, from, fromStrides);
  let target = offset(part, to, toStrides);
  const index = new Array(outer).fill(0);
  // The last run that begins at or before `after`: what precedes it ends before it begins.
  let rest = after - source;
  for (let axis = 0; axis < outer && rest > 0; axis++) {
    index[axis] = Math.min(part.shape[axis] - 1, Math.floor(rest / fromStrides[axis]));
    rest -= index[axis] * fromStrides[axis];
    source += index[axis] * fromStrides[axis];
    target += index[axis] * toStrides[axis];
  }
  for (;;) {
    yield { from: source, to: target, length };
    let axis = outer - 1;
    for (; axis >= 0; axis--) {
      source += fromStrides[axis];
      target += toStrides[axis];
      if (++index[axis] < part.shape[axis]) break;
      source -= fromStrides[axis] * part.shape[axis];
      target -= toStrides[axis] * part.shape[axis];
      index[axis] = 0;
    }
    if (axis < 0) return;
  }
}

/**
 * Copies `part` from one array to another.
 *
 * @param {Box} part inside both boxes
 * @param {[Box, Uint8Array]} from
 * @param {[Box, Uint8Array]} to
 * @param {number} itemBytes
 */
export function copyPart(part, [from, source], [to, target], itemBytes) {
  for (const run of byteRuns(part, from, to, itemBytes))
    target.set(source.subarray(run.from, run.from + run.length), run.to);
}

/** @param {readonly number[]} shape @param {number} itemBytes @returns {number[]} */
function strides(shape, itemBytes) {
  const found = new Array(shape.length);
  let stride = itemBytes;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    found[axis] = stride;
    stride *= shape[axis];
  }
  return found;
}

/** @param {Box} part @param {Box} box @param {number[]} steps @returns {number} */
function offset(part, box, steps) {
  return part.start.reduce((sum, at, axis) => sum + (at - box.start[axis]) * steps[axis], 0);
}
