/** The public names of the package. The README has a table of what the elements of each dtype become. */

export type ArrayType = "jax" | "jax-weak" | "numpy" | "numpy-scalar" | "key";
export type ContainerKind = "dict" | "list" | "tuple" | "namedtuple" | "object" | "positional";
export type ValueType = "bool" | "int" | "float" | "complex" | "str" | "bytes" | "none" | "function" | "iterator";

/** A key of a container. A tuple is a list. */
export type Key = string | boolean | number | bigint | Float | Uint8Array | readonly Key[];

/** A JSON value as the format has it: an object is a Map, and a number is an integer. */
export type Json = null | boolean | number | bigint | string | Float | Json[] | Map<string, Json>;

export type Numbers =
  | Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array | Float32Array | Float64Array
  | BigInt64Array | BigUint64Array; // prettier-ignore

/** The files of one checkpoint, wherever they are. */
export interface Source {
  /** A path or a URL, for messages. */
  place: string;
  /**
   * Returns the bytes from `start` to `end`, or to the end of the file, and the size of the file, or undefined if it is
   * not known. Fewer bytes come back if the file is shorter. Raises `MissingFileError` if there is no such file.
   */
  read(name: string, start: number, end: number | undefined): Promise<{ bytes: Uint8Array; size: number | undefined }>;
  /** Returns the names of all files. */
  list?: () => Promise<string[]>;
  /** Returns the directory of that name, so many levels higher: for differences. */
  sibling?: (name: string, levels: number) => Source;
}

/** What a read uses of a `Response`. */
export interface Answer {
  readonly status: number;
  readonly headers: { get(name: string): string | null };
  arrayBuffer(): Promise<ArrayBuffer>;
}

export interface OpenOptions {
  /** Makes the requests to a server, for example with a token. The global `fetch` is one. */
  fetch?: (
    url: string,
    options?: { headers?: Record<string, string>; cache?: "default" | "no-cache" },
  ) => Promise<Answer>;
  /** `differences` of "treering/differences": reads arrays that are stored as differences to another checkpoint. */
  differences?: { read(checkpoint: any, row: any): Promise<Uint8Array> };
}

/** A file that a user picked: a `File`. */
export interface PickedFile {
  readonly name: string;
  readonly size: number;
  slice(start?: number, end?: number): { arrayBuffer(): Promise<ArrayBuffer> };
}

/** A directory that a user picked: a `FileSystemDirectoryHandle`. */
export interface PickedDirectory {
  readonly kind: "directory";
  readonly name: string;
  getFileHandle(name: string): Promise<{ getFile(): Promise<PickedFile> }>;
}

export interface WriteOptions {
  /** An integer from 0 to 2^53. */
  step?: number;
  metrics?: Record<string, number | Float> | ReadonlyMap<string, number | Float>;
  /** JSON that may hold NaNs and infinities. A number without a fraction is an integer. */
  metadata?: unknown;
}

/** Positions for each axis, `stop` exclusive. */
export interface Slice {
  start?: readonly number[];
  stop?: readonly number[];
}

/**
 * Opens a checkpoint: a path (Node), a URL, a directory handle, files, a Map from names to bytes, or a source. Raises
 * `NotFoundError`, `DamagedError`, `UnsupportedError`, `SourceError` or `InputError`.
 */
export function open(
  target: string | { readonly href: string } | PickedDirectory | Iterable<PickedFile> | ReadonlyMap<string, Uint8Array> | Source,
  options?: OpenOptions,
): Promise<Checkpoint>;

/** Writes a new checkpoint into a folder (Node), or into an empty Map. Raises `InputError`. */
export function write(
  target: string | { readonly href: string } | Map<string, Uint8Array>,
  tree: unknown,
  options?: WriteOptions,
): Promise<void>;

/** Makes an array. Raises `InputError` if the data do not fit the dtype or the shape. */
export function tensor(
  data: Numbers | readonly number[] | readonly string[] | readonly Uint8Array[],
  options?: { dtype?: string; shape?: readonly number[]; type?: ArrayType; impl?: string },
): Tensor;

/** Makes a leaf of bytes. A `Uint8Array` alone is an array. */
export function bytes(bytes: Uint8Array): Value;

export class Checkpoint {
  private constructor();
  readonly created: string;
  readonly software: Record<string, string>;
  readonly step: number | undefined;
  readonly metrics: Record<string, number>;
  /** The metadata in plain values: a float without a fraction looks like an integer. */
  readonly metadata: unknown;
  /** Options with which `write` repeats step, metrics and metadata, every type and bit kept. */
  readonly exact: WriteOptions;
  /** The checksum of the manifest, which identifies the checkpoint. */
  readonly identity: string;
  readonly leaves: ReadonlyMap<string, Leaf>;
  /** Returns the leaf of that path. Raises `InputError`. */
  leaf(path: string): Leaf;
  /** Reads every leaf. Returns the tree that `write` takes. */
  load(): Promise<Container | Tensor | Value>;
  /** Reads every byte, and on a server all but metrics files. `leaf` is `null` if an error concerns no leaf. */
  verify(): Promise<{ leaf: string | null; error: DamagedError | UnsupportedError }[]>;
  /** Reads the metrics that were added after the commit, over those of the manifest. */
  lateMetrics(): Promise<{
    metrics: Record<string, number>;
    files: { name: string; error: DamagedError | UnsupportedError | null }[];
  }>;
}

export type Leaf = ArrayLeaf | IteratorLeaf | ValueLeaf;

export class ArrayLeaf {
  private constructor();
  readonly kind: "array";
  readonly path: string;
  readonly type: ArrayType;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly impl: string;
  /** The path of an earlier leaf that is the same array. */
  readonly tied: string | undefined;
  /** Where the array was in the job that saved it, in the fields of the format. */
  readonly placement: Record<string, unknown> | undefined;
  /** Reads the array or a box of it. Verifies every block that it reads. */
  read(slice?: Slice): Promise<Tensor>;
}

export class IteratorLeaf {
  private constructor();
  readonly kind: "iterator";
  readonly path: string;
  /** The bytes of the state of each process. */
  readonly lengths: readonly number[];
  read(): Promise<Value>;
}

export class ValueLeaf {
  private constructor();
  readonly kind: "value";
  readonly path: string;
  readonly type: ValueType;
  readonly value: unknown;
  read(): Promise<Value>;
}

/** An array in memory, in C order. */
export class Tensor {
  constructor(dtype: string, shape: readonly number[], bytes: Uint8Array, type?: ArrayType, impl?: string);
  readonly dtype: string;
  readonly shape: readonly number[];
  /** The elements as the format stores them. */
  readonly bytes: Uint8Array;
  readonly type: ArrayType;
  readonly impl: string;
  /** The elements in JavaScript. */
  readonly data: Numbers | string[] | Uint8Array[];
}

/** A leaf that is no array. */
export class Value {
  constructor(type: ValueType, json: Json);
  readonly type: ValueType;
  readonly json: Json;
  readonly value: unknown;
}

/** A float that stays one, though its value is an integer. `bits` are those of an unusual NaN. */
export class Float {
  constructor(value: number, bits?: bigint);
  readonly value: number;
  readonly bits: bigint | undefined;
}

/** A node of the tree. `keys` has one key for each child, or is `null` if children are only counted. */
export class Container {
  constructor(kind: ContainerKind, name: string, keys: readonly Key[] | null, children: unknown[]);
  readonly kind: ContainerKind;
  readonly name: string;
  readonly keys: readonly Key[] | null;
  readonly children: unknown[];
}

export class TreeringError extends Error {}
/** The target holds no checkpoint, or it was deleted while it was open. */
export class NotFoundError extends TreeringError {}
/** Another checkpoint has taken the place of the one that is open. */
export class ReplacedError extends TreeringError {}
/** Bytes are not those that were written. */
export class DamagedError extends TreeringError {
  readonly file: string;
  /** The number of the block in the buffer, from 0. */
  readonly block: number | undefined;
}
/** A file is sealed but does not follow version 1 of the format. */
export class UnsupportedError extends TreeringError {
  readonly file: string;
}
/** An argument cannot be used. Nothing was written. */
export class InputError extends TreeringError {}
/** A server failed, or cannot do what a read needs. */
export class SourceError extends TreeringError {}
/** A source of your own raises it for a file that it does not have. */
export class MissingFileError extends TreeringError {
  constructor(file: string, found?: string);
}
