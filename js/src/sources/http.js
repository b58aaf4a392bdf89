/** Checkpoints on a server: each read is one request for a range. */

import { MissingFileError, SourceError } from "../errors.js";

/**
 * @param {URL} base the URL of the directory; a query is kept in every request
 * @param {typeof fetch} [request] a `fetch` that adds what the server needs, such as a token
 * @returns {import("./source.js").Source}
 */
export function httpSource(base, request = fetch) {
  return {
    place: base.href,
    list: undefined,
    async read(name, start, end) {
      const url = new URL(base);
      url.pathname = `${url.pathname.replace(/\/$/, "")}/${encodeURIComponent(name)}`;
      // The manifest has no known size, and is read in one piece.
      const isRange = start !== 0 || end !== undefined;
      const headers = isRange ? { Range: `bytes=${start}-${end === undefined ? "" : end - 1}` } : undefined;
      let answer;
      try {
        // A cache may hold a manifest that was replaced. A name of an array file is never used twice.
        answer = await request(url.href, { headers, cache: isRange ? "default" : "no-cache" });
        if (answer.status === 200 && !isRange) return sized(new Uint8Array(await answer.arrayBuffer()));
        if (answer.status === 206 && isRange) return partOf(answer, start, end, new Uint8Array(await answer.arrayBuffer()));
      } catch (error) {
        // `fetch` raises a TypeError if the network fails. Anything else is an abort, or an error of the caller's `fetch`.
        if (!(error instanceof TypeError)) throw error;
        throw new SourceError(`${url.href}: expected an answer, found ${error}. Check the server and CORS`, {
          cause: error,
        });
      }
      await answer.body?.cancel();
      if (answer.status === 404 || answer.status === 410) throw new MissingFileError(name);
      const size = answer.status === 416 ? totalOf(answer) : undefined;
      if (size !== undefined) return { bytes: new Uint8Array(0), size };
      const advice = answer.status === 200 ? "The server must support ranges" : "Check the URL and your access";
      throw new SourceError(`${url.href}: expected ${isRange ? "206" : "200"}, found ${answer.status}. ${advice}`);
    },
  };
}

/** @param {Uint8Array} bytes */
function sized(bytes) {
  return { bytes, size: bytes.length };
}

/**
 * A browser hides Content-Range of another origin unless the server exposes it. The size is unknown then, unless the file
 * ends in the range; the checksums verify the bytes.
 *
 * @param {Response} answer @param {number} start @param {number | undefined} end @param {Uint8Array} bytes
 */
function partOf(answer, start, end, bytes) {
  const isShort = end !== undefined && bytes.length < end - start;
  return { bytes, size: totalOf(answer) ?? (isShort ? start + bytes.length : undefined) };
}

/** @param {Response} answer @returns {number | undefined} */
function totalOf(answer) {
  const total = /\/([0-9]+)$/.exec(answer.headers.get("Content-Range") ?? "");
  return total ? Number(total[1]) : undefined;
}
