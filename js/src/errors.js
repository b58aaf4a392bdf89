/** Errors of this package. Every message has the place, what was expected, what was found, and what to do. */

/** The base of all errors that this package raises on purpose. */
export class TreeringError extends Error {
  /** @param {string} message @param {{cause?: unknown}} [options] */
  constructor(message, options) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The target holds no checkpoint, or the checkpoint was deleted while it was open. */
export class NotFoundError extends TreeringError {}

/** Another checkpoint has taken the place of the one that is open. */
export class ReplacedError extends TreeringError {}

/** Bytes are not those that were written. */
export class DamagedError extends TreeringError {
  /**
   * @param {string} message
   * @param {{file: string, block?: number, cause?: unknown}} about the file, and the number of the block from 0
   */
  constructor(message, about) {
    super(message, { cause: about.cause });
    this.file = about.file;
    this.block = about.block;
  }
}

/** A file is sealed but does not follow version 1 of the format. */
export class UnsupportedError extends TreeringError {
  /** @param {string} message @param {{file: string, cause?: unknown}} about */
  constructor(message, about) {
    super(message, { cause: about.cause });
    this.file = about.file;
  }
}

/** A call has an argument that cannot be used. Nothing was read or written. */
export class InputError extends TreeringError {}

/** A server or a file system failed, or cannot do what a read needs. */
export class SourceError extends TreeringError {}

/** The source has no regular file of that name. Callers inside the package turn it into one of the errors above. */
export class MissingFileError extends TreeringError {
  /** @param {string} file @param {string} [found] */
  constructor(file, found = "none") {
    super(`${file}: expected a regular file, found ${found}`);
    this.file = file;
    this.found = found;
  }
}

/** A rule of the format is broken, at a place inside a file that the caller knows. */
export class FormatFault extends TreeringError {}

/**
 * Checks one rule of the format. Raises `FormatFault`.
 *
 * @param {unknown} holds
 * @param {string} place
 * @param {string} expected
 * @param {unknown} found
 * @returns {asserts holds}
 */
export function check(holds, place, expected, found) {
  if (!holds) throw new FormatFault(`${place}: expected ${expected}, found ${show(found)}`);
}

/**
 * Runs `decode`. A broken rule becomes an `UnsupportedError` about `file`.
 *
 * @template T
 * @param {string} file
 * @param {() => T} decode
 * @returns {T}
 */
export function supported(file, decode) {
  try {
    return decode();
  } catch (error) {
    if (!(error instanceof FormatFault)) throw error;
    const advice = "The file is undamaged; read it with the release that wrote it";
    throw new UnsupportedError(`${file}: ${error.message}. ${advice}`, { file });
  }
}

/** Returns a short text for a message. @param {unknown} found @returns {string} */
export function show(found) {
  if (found === undefined) return "nothing";
  if (found instanceof Map) return "an object";
  const text =
    typeof found === "bigint"
      ? `${found}`
      : (JSON.stringify(found, (_, v) => (typeof v === "bigint" ? `${v}` : v)) ?? String(found));
  return text.length > 80 ? `${text.slice(0, 80)}…` : text;
}
