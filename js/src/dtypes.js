/** The dtypes of version 1: how each is stored, and which typed array it becomes. */

import { InputError } from "./errors.js";
import { encodeMinifloats, MINIFLOATS, tableOf } from "./minifloats.js";
import { decodeText, encodeText } from "./texts.js";

/** @typedef {Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array | Float32Array | Float64Array | BigInt64Array | BigUint64Array} Numbers */

/**
 * @typedef {object} Dtype
 * @property {string} name
 * @property {string} code the dtype of the tensor in the array file
 * @property {number} itemBytes the bytes of a stored element
 * @property {boolean} isPadded true if the tensor has a last axis with the bytes of an element
 * @property {number} perElement the numbers of one element in `decode`: 2 for complex dtypes
 * @property {((bytes: Uint8Array) => void) | undefined} normalize clears the bits that readers ignore, in place
 * @property {(bytes: Uint8Array) => Numbers | string[] | Uint8Array[]} decode
 * @property {(data: any) => Uint8Array} encode the reverse of `decode`
 */

if (new Uint8Array(new Uint16Array([1]).buffer)[0] !== 1) throw new Error("treering needs a little-endian machine");

/** @param {ArrayBufferView} view @returns {Uint8Array} */
const bytesOf = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);

/** @param {Uint8Array} bytes @param {any} Class @returns {any} */
function viewAs(bytes, Class) {
  const aligned = bytes.byteOffset % Class.BYTES_PER_ELEMENT ? bytes.slice() : bytes;
  return new Class(aligned.buffer, aligned.byteOffset, aligned.byteLength / Class.BYTES_PER_ELEMENT);
}

/** @param {string} name @param {string} code @param {any} Class @param {Partial<Dtype>} [more] @returns {Dtype} */
function plainDtype(name, code, Class, more = {}) {
  return {
    name,
    code,
    itemBytes: Class.BYTES_PER_ELEMENT,
    isPadded: false,
    perElement: 1,
    normalize: undefined,
    decode: (bytes) => viewAs(bytes, Class),
    encode(data) {
      if (data instanceof Class) return bytesOf(data);
      throw new InputError(
        `dtype ${name}: expected a ${Class.name}, found ${data?.constructor?.name}. Convert the data`,
      );
    },
    ...more,
  };
}

/** @param {string} name @param {string} code @returns {Dtype} */
function minifloat(name, code) {
  const Codes = code === "F16" || code === "BF16" ? Uint16Array : Uint8Array;
  const bits = Math.log2(tableOf(name).length);
  return plainDtype(name, code, Codes, {
    normalize: bits < 8 ? (bytes) => bytes.forEach((byte, at) => (bytes[at] = byte & (2 ** bits - 1))) : undefined,
    decode(bytes) {
      // `Float32Array.from` with a function takes five times as long.
      const codes = viewAs(bytes, Codes);
      const table = tableOf(name);
      const numbers = new Float32Array(codes.length);
      for (let at = 0; at < codes.length; at++) numbers[at] = table[codes[at]];
      return numbers;
    },
    encode: (numbers) => bytesOf(encodeMinifloats(name, numbers)),
  });
}

/** @param {number} bits @param {boolean} signed @returns {Dtype} */
function smallInteger(bits, signed) {
  const shift = 32 - bits;
  return plainDtype(`${signed ? "" : "u"}int${bits}`, "U8", signed ? Int8Array : Uint8Array, {
    normalize: (bytes) =>
      bytes.forEach((byte, at) => (bytes[at] = signed ? (byte << shift) >> shift : (byte << shift) >>> shift)),
  });
}

/** @param {string} name @param {string} part the dtype of the real and of the imaginary part @returns {Dtype} */
function complexPair(name, part) {
  const half = DTYPES[part];
  return { ...half, name, code: "U8", itemBytes: 2 * half.itemBytes, isPadded: true, perElement: 2 };
}

/** @type {Record<string, Dtype>} */
const DTYPES = {};
for (const dtype of [
  plainDtype("bool", "BOOL", Uint8Array, {
    normalize: (bytes) => bytes.forEach((byte, at) => (bytes[at] = byte ? 1 : 0)),
  }),
  plainDtype("int8", "I8", Int8Array),
  plainDtype("int16", "I16", Int16Array),
  plainDtype("int32", "I32", Int32Array),
  plainDtype("int64", "I64", BigInt64Array),
  plainDtype("uint8", "U8", Uint8Array),
  plainDtype("uint16", "U16", Uint16Array),
  plainDtype("uint32", "U32", Uint32Array),
  plainDtype("uint64", "U64", BigUint64Array),
  plainDtype("float32", "F32", Float32Array),
  plainDtype("float64", "F64", Float64Array),
  plainDtype("complex64", "C64", Float32Array, { itemBytes: 8, perElement: 2 }),
  ...[1, 2, 4].flatMap((bits) => [smallInteger(bits, true), smallInteger(bits, false)]),
]) {
  DTYPES[dtype.name] = dtype;
}
/** @type {Record<string, string>} */
const CODES = {
  float16: "F16",
  bfloat16: "BF16",
  float8_e5m2: "F8_E5M2",
  float8_e4m3fn: "F8_E4M3",
  float8_e8m0fnu: "F8_E8M0",
  float8_e5m2fnuz: "F8_E5M2FNUZ",
  float8_e4m3fnuz: "F8_E4M3FNUZ",
};
for (const name of Object.keys(MINIFLOATS)) DTYPES[name] = minifloat(name, CODES[name] ?? "U8");
DTYPES.complex128 = complexPair("complex128", "float64");
DTYPES.complex32 = complexPair("complex32", "float16");
DTYPES.bcomplex32 = complexPair("bcomplex32", "bfloat16");

const TIME = /^(datetime64|timedelta64)(\[([2-9]|[1-9][0-9]{1,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?$/;
const TEXT = /^(<U|\|S)([1-9][0-9]{0,7})$/;

/** Returns the dtype of that name, or undefined if version 1 has none. @param {unknown} name @returns {Dtype | undefined} */
export function parseDtype(name) {
  if (typeof name !== "string") return undefined;
  if (Object.hasOwn(DTYPES, name)) return DTYPES[name];
  if (TIME.test(name)) return plainDtype(name, "U8", BigInt64Array, { isPadded: true });
  const found = TEXT.exec(name);
  if (!found) return undefined;
  const isUnicode = found[1] === "<U";
  const itemBytes = Number(found[2]) * (isUnicode ? 4 : 1);
  return plainDtype(name, "U8", Uint8Array, {
    itemBytes,
    isPadded: true,
    decode: (bytes) => decodeText(bytes, itemBytes, isUnicode),
    encode: (texts) => encodeText(texts, itemBytes, isUnicode),
  });
}

/** Returns the dtype that a typed array has on its own. @param {unknown} data @returns {string | undefined} */
export function dtypeOf(data) {
  const name = /** @type {any} */ (data)?.constructor?.name ?? "";
  const own = /^(?:Big)?(Uint|Int|Float)(8|16|32|64)Array$/.exec(name);
  return ArrayBuffer.isView(data) && own && name !== "Float16Array" ? `${own[1].toLowerCase()}${own[2]}` : undefined;
}
