/** Statistics, a histogram and a heat map of an array, from one pass over its elements. */

const BINS = 512;
const MAX_COLUMNS = 256;
const MAX_ROWS = 192;

/** A histogram whose range grows: bins merge in pairs, so that every value is counted exactly. */
export class Histogram {
  constructor() {
    this.counts = new Float64Array(BINS);
    this.width = 0;
    this.begin = 0; // the number of the first bin: it begins at begin * width
  }

  /** Makes room for values of a range. @param {number} low @param {number} high */
  cover(low, high) {
    if (!this.width) {
      const range = Math.max(high / BINS - low / BINS, (Math.abs(high) * 2 ** -40) / BINS, 2 ** -1000);
      this.width = 2 ** Math.min(1014, Math.ceil(Math.log2(range)) + 2);
      this.begin = Math.floor(low / this.width) - BINS / 4;
    }
    while (Math.floor(low / this.width) < this.begin || Math.floor(high / this.width) >= this.begin + BINS) this.merge(low);
  }

  /** Doubles the width of the bins, and grows towards `low` if that is below. */
  merge(low) {
    const grown = new Float64Array(BINS);
    const isBelow = Math.floor(low / this.width) < this.begin;
    const begin = Math.floor(this.begin / 2) - (isBelow ? BINS / 2 - 1 : 0);
    this.counts.forEach((count, bin) => (grown[Math.floor((this.begin + bin) / 2) - begin] += count));
    this.counts = grown;
    this.begin = begin;
    this.width *= 2;
  }

  /** @param {number} value a value that is covered */
  add(value) {
    this.counts[Math.floor(value / this.width) - this.begin]++;
  }

  /** Returns at most `most` bars from the lowest to the highest value. @param {number} most */
  bars(most) {
    const first = this.counts.findIndex(Boolean);
    if (first < 0) return { low: 0, width: 0, counts: [] };
    const used = this.counts.findLastIndex(Boolean) - first + 1;
    const group = Math.ceil(used / most);
    const counts = new Array(Math.ceil(used / group)).fill(0);
    for (let bin = 0; bin < used; bin++) counts[Math.floor(bin / group)] += this.counts[first + bin];
    return { low: (this.begin + first) * this.width, width: group * this.width, counts };
  }
}

/** The mean of the elements in each cell of a grid that covers a matrix. */
export class HeatMap {
  /** @param {readonly number[]} shape the last axis becomes the columns; one axis is wrapped into rows */
  constructor(shape) {
    const size = shape.reduce((product, length) => product * length, 1);
    this.matrixColumns = shape.length > 1 ? shape.at(-1) : Math.max(1, Math.ceil(Math.sqrt(size)));
    this.matrixRows = Math.max(1, Math.ceil(size / this.matrixColumns));
    this.columns = Math.min(this.matrixColumns, MAX_COLUMNS);
    this.rows = Math.min(this.matrixRows, MAX_ROWS);
    this.sums = new Float64Array(this.rows * this.columns);
    this.counts = new Float64Array(this.rows * this.columns);
    this.odd = new Uint8Array(this.rows * this.columns); // 1 where an element is NaN or infinite
  }

  /** @param {number} index of the element in C order @param {number} value */
  add(index, value) {
    const column = index % this.matrixColumns;
    const row = (index - column) / this.matrixColumns;
    const cell =
      Math.floor((row * this.rows) / this.matrixRows) * this.columns +
      Math.floor((column * this.columns) / this.matrixColumns);
    if (value - value === 0) {
      this.sums[cell] += value;
      this.counts[cell]++;
    } else this.odd[cell] = 1;
  }
}

/** Collects the numbers of an array, part by part. */
export class Survey {
  /** @param {readonly number[]} shape */
  constructor(shape) {
    this.size = shape.reduce((product, length) => product * length, 1);
    this.read = this.nan = this.infinite = this.zeros = this.finite = 0;
    this.low = Infinity;
    this.high = -Infinity;
    this.shift = this.sum = this.squares = 0;
    this.histogram = new Histogram();
    this.heat = new HeatMap(shape);
    /** The first elements. @type {number[]} */
    this.begin = [];
  }

  /** @param {number} first @param {ArrayLike<number>} numbers */
  add(first, numbers) {
    let low = Infinity;
    let high = -Infinity;
    for (let n = 0; n < numbers.length; n++) {
      const value = numbers[n];
      if (value - value !== 0) Number.isNaN(value) ? this.nan++ : this.infinite++;
      else {
        if (value < low) low = value;
        if (value > high) high = value;
      }
      this.heat.add(first + n, value);
    }
    this.read += numbers.length;
    if (this.begin.length < 64) this.begin.push(...Array.from(numbers).slice(0, 64 - this.begin.length));
    if (low > high) return;
    if (!this.finite) this.shift = low; // Sums of differences from a typical value lose less.
    this.low = Math.min(this.low, low);
    this.high = Math.max(this.high, high);
    this.histogram.cover(low, high);
    for (let n = 0; n < numbers.length; n++) {
      const value = numbers[n];
      if (value - value !== 0) continue;
      this.histogram.add(value);
      this.finite++;
      if (value === 0) this.zeros++;
      const difference = value - this.shift;
      this.sum += difference;
      this.squares += difference * difference;
    }
  }

  get mean() {
    return this.finite ? this.shift + this.sum / this.finite : null;
  }

  get deviation() {
    if (!this.finite) return null;
    return Math.sqrt(Math.max(0, this.squares / this.finite - (this.sum / this.finite) ** 2));
  }
}
