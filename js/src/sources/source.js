/** Places that hold the files of one checkpoint. */

/** Takes a part of what is read, and the size of the file if it is known. @typedef {(bytes: Uint8Array, size: number | undefined) => void} Passing */
/**
 * @typedef {object} Source
 * @property {string} place a path or a URL, for messages
 * @property {(name: string, start: number, end: number | undefined, passing?: Passing) => Promise<{bytes: Uint8Array, size: number | undefined}>} read
 *   returns the bytes from `start` to `end`, or to the end of the file, and the size of the file if it is known. Fewer bytes come back
 *   if the file is shorter. A source may hand them to `passing` instead, part by part and in order, and return the rest.
 *   Raises `MissingFileError`, `DamagedError` if the file is not a regular one, or `SourceError`
 * @property {(() => Promise<string[]>) | undefined} list returns the names of all files; missing where that is impossible
 * @property {(name: string, levels: number) => Source} [sibling] returns the directory of that name, so many levels higher; missing
 *   where that is impossible
 * @property {number} [chunkBytes] longer reads are split, so that less memory is needed; not on a server, where each read
 *   is a request
 */

export {};
