/** Checkpoints on a server: each read is one request for a range, and further ones where the server fails. */

import { MissingFileError, SourceError } from "../errors.js";

/** So many requests in a row may fail before bytes come. */
const MAX_FAILURES = 4;
/** The wait after the first failure; each further one is twice as long. */
const WAIT_MS = 250;
/** A server that asks for a longer wait is not waited for. */
const MAX_WAIT_MS = 30_000;
/** The statuses of faults that may pass. */
const PASSING_STATUSES = [408, 425, 429, 500, 502, 503, 504];
/** What a checkpoint may take on a server that ignores ranges: its files are read completely, and kept. */
const MAX_KEPT_BYTES = 64 * 2 ** 20;

/**
 * @param {URL} base the URL of the directory; a query is kept in every request
 * @param {typeof fetch} [request] a `fetch` that adds what the server needs, such as a token
 * @returns {import("./source.js").Source}
 */
export function httpSource(base, request = fetch) {
  /** @type {Map<string, Uint8Array>} */
  const kept = new Map();
  const budget = { free: MAX_KEPT_BYTES };
  return {
    place: base.href,
    list: undefined,
    sibling(name, levels) {
      const url = new URL(base);
      const folders = url.pathname.replace(/\/$/, "").split("/").slice(0, -levels);
      url.pathname = [...folders, encodeURIComponent(name)].join("/");
      return httpSource(url, request);
    },
    chunkBytes: Infinity,
    async read(name, start, end, passing) {
      const file = kept.get(name);
      if (file) return { bytes: file.subarray(start, end), size: file.length };
      const url = new URL(base);
      url.pathname = `${url.pathname.replace(/\/$/, "")}/${encodeURIComponent(name)}`;
      const download = new Download(url.href, name, start, end, passing);
      await download.run(request, budget);
      const { bytes, size, isComplete } = download;
      if (!isComplete) return { bytes, size };
      kept.set(name, bytes);
      return { bytes: bytes.subarray(start, end), size };
    },
  };
}

/** The bytes that may still be kept. @typedef {{free: number}} Budget */

/** A failure that may pass. */
class Failure extends Error {
  /** @param {string} message @param {{wait?: number, cause?: unknown}} [about] the wait that the server asks for, in milliseconds */
  constructor(message, { wait, cause } = {}) {
    super(message, { cause });
    this.wait = wait;
  }
}

/** The bytes of a file from `start` to `end`, or of all of a file whose size is not known: the manifest. */
class Download {
  /**
   * @param {string} url @param {string} name @param {number} start @param {number | undefined} end
   * @param {import("./source.js").Passing | undefined} passing
   */
  constructor(url, name, start, end, passing) {
    this.url = url;
    this.name = name;
    this.start = start;
    this.end = end;
    this.passing = passing;
    this.isRange = start !== 0 || end !== undefined;
    /** The next byte. */
    this.at = start;
    /** @type {Uint8Array[]} */
    this.parts = [];
    /** The size of the file. @type {number | undefined} */
    this.size = undefined;
    /** True if the server ignores ranges, so that all of the file has come. */
    this.isComplete = false;
  }

  /** The bytes that were not passed on. */
  get bytes() {
    if (this.parts.length === 1) return this.parts[0];
    const bytes = new Uint8Array(this.parts.reduce((sum, { length }) => sum + length, 0));
    let at = 0;
    for (const part of this.parts) {
      bytes.set(part, at);
      at += part.length;
    }
    return bytes;
  }

  /** Sends requests until all bytes have come. @param {typeof fetch} request @param {Budget} budget */
  async run(request, budget) {
    for (let failures = 0; ;) {
      const before = this.at;
      try {
        return await this.ask(request, budget);
      } catch (error) {
        if (!(error instanceof Failure)) throw error;
        failures = this.at > before && this.isRange ? 1 : failures + 1;
        const wait = error.wait ?? WAIT_MS * 2 ** (failures - 1) * (0.5 + Math.random() / 2);
        if (failures === MAX_FAILURES || wait > MAX_WAIT_MS)
          throw new SourceError(`${this.url}: ${error.message}`, { cause: error.cause });
        await new Promise((resolve) => setTimeout(resolve, wait));
      }
    }
  }

  /** Sends one request for what is missing. Raises `Failure` if another one may bring it. @param {typeof fetch} request @param {Budget} budget */
  async ask(request, budget) {
    const { url, isRange, start, end } = this;
    // A part of a file without a known size may be one of another version.
    if (!isRange) [this.at, this.parts] = [start, []];
    const headers = isRange ? { Range: `bytes=${this.at}-${end === undefined ? "" : end - 1}` } : undefined;
    // A cache may hold a manifest that was replaced. A name of an array file is never used twice.
    const answer = await raised(request(url, { headers, cache: isRange ? "default" : "no-cache" }));
    const { status } = answer;
    const encoding = answer.headers.get("Content-Encoding") ?? "identity";
    const total = totalOf(answer);
    if (status === 200 && isRange) return this.keep(answer, budget);
    if (status === 416 && (total !== undefined || this.at > start)) {
      // Without a total, the file ends where the bytes that came do.
      this.size = total ?? this.at;
      return answer.body?.cancel();
    }
    if (status !== (isRange ? 206 : 200) || (isRange && encoding !== "identity")) {
      await answer.body?.cancel();
      throw this.refusal(answer, encoding);
    }
    this.size = total;
    for await (const bytes of bodyOf(answer)) {
      this.at += bytes.length;
      if (this.passing && isRange) this.passing(bytes, total);
      else this.parts.push(bytes);
    }
    const isShort = end !== undefined && this.at < Math.min(end, total ?? end);
    if (isShort) throw new Failure(`expected ${end - start} bytes, found ${this.at - start}. Read again`);
    if (!isRange) this.size = this.at;
  }

  /** Takes all of a file, from a server that ignores ranges. @param {Response} answer @param {Budget} budget */
  async keep(answer, budget) {
    [this.at, this.parts] = [0, []];
    const isLong = Number(answer.headers.get("Content-Length") ?? 0) > budget.free;
    try {
      for await (const bytes of isLong ? [] : bodyOf(answer)) {
        this.at += bytes.length;
        this.parts.push(bytes);
        budget.free -= bytes.length;
        if (budget.free < 0) break;
      }
      if (isLong || budget.free < 0) {
        await answer.body?.cancel().catch(() => {});
        const advice = `A server must support ranges if the files of a checkpoint have more than ${MAX_KEPT_BYTES >> 20} MiB`;
        throw new SourceError(`${this.url}: expected 206, found 200. ${advice}`);
      }
    } catch (error) {
      budget.free += this.at;
      throw error;
    }
    this.size = this.at;
    this.isComplete = true;
  }

  /** @param {Response} answer @param {string} encoding @returns {Error} */
  refusal({ status, headers }, encoding) {
    if (status === 404 || status === 410) return new MissingFileError(this.name);
    const found = `expected ${this.isRange ? "206" : "200"}, found ${status}`;
    if (PASSING_STATUSES.includes(status)) {
      const wait = waitOf(headers.get("Retry-After"));
      const advice = wait === undefined ? "Try again later" : `Try again in ${Math.ceil(wait / 1000)} s`;
      return new Failure(`${found}. ${advice}`, { wait });
    }
    if (status === 206)
      return new SourceError(
        `${this.url}: expected the bytes of the file, found them encoded as ${encoding}. Store it without Content-Encoding`,
      );
    return new SourceError(`${this.url}: ${found}. Check the URL and your access`);
  }
}

/**
 * Awaits what `fetch` returns. It raises a TypeError if the network fails, which may pass; anything else is an abort, or
 * an error of the caller's `fetch`.
 *
 * @template T @param {Promise<T>} promise @returns {Promise<T>}
 */
async function raised(promise) {
  try {
    return await promise;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new Failure(`expected an answer, found ${error}. Check the server and CORS`, { cause: error });
  }
}

/** Lists the parts of a body. @param {Response} answer @returns {AsyncGenerator<Uint8Array>} */
async function* bodyOf(answer) {
  // A `fetch` of the caller may return less than a Response.
  if (!answer.body?.getReader) return yield new Uint8Array(await raised(answer.arrayBuffer()));
  const reader = answer.body.getReader();
  try {
    for (;;) {
      const { done, value } = await raised(reader.read());
      if (done) return;
      yield value;
    }
  } finally {
    // Without an error of its own: the one that ended the loop counts.
    await reader.cancel().catch(() => {});
  }
}

/** Returns the size of the file. Browsers hide it unless the server exposes the header. @param {Response} answer @returns {number | undefined} */
function totalOf(answer) {
  const total = /\/([0-9]+)$/.exec(answer.headers.get("Content-Range") ?? "");
  return total ? Number(total[1]) : undefined;
}

/** Returns the milliseconds of `Retry-After`: seconds, or a date. @param {string | null} text @returns {number | undefined} */
function waitOf(text) {
  if (text === null) return undefined;
  const wait = /^\d+$/.test(text) ? Number(text) * 1000 : Date.parse(text) - Date.now();
  return Number.isNaN(wait) ? undefined : Math.max(0, wait);
}
