/** Safetensors files of any program. They have no checksums that all programs know: only the header is checked. */

import { parseDtype } from "../../src/dtypes.js";
import { DamagedError, MissingFileError, NotFoundError, UnsupportedError } from "../../src/errors.js";
import { integer, list, object, text } from "../../src/fields.js";
import { parseJson } from "../../src/json.js";
import { countOf } from "../../src/shapes.js";
import { Tensor } from "../../src/tensor.js";
import { arrayLeaf } from "./contents.js";

const MAX_HEADER_BYTES = 100_000_000;
const DTYPES = {
  BOOL: "bool",
  U8: "uint8",
  I8: "int8",
  U16: "uint16",
  I16: "int16",
  U32: "uint32",
  I32: "int32",
  U64: "uint64",
  I64: "int64",
  F16: "float16",
  BF16: "bfloat16",
  F32: "float32",
  F64: "float64",
  C64: "complex64",
  F8_E5M2: "float8_e5m2",
  F8_E4M3: "float8_e4m3fn",
  F8_E8M0: "float8_e8m0fnu",
  F8_E5M2FNUZ: "float8_e5m2fnuz",
  F8_E4M3FNUZ: "float8_e4m3fnuz",
};

/**
 * Reads the headers of files that have one model together. Raises `DamagedError` or `NotFoundError`.
 *
 * @param {import("../../src/sources/source.js").Source} source
 * @param {string[]} files
 * @returns {Promise<import("./contents.js").Contents>}
 */
export async function safetensorsContents(source, files) {
  const leaves = [];
  const metadata = {};
  let nbytes = 0;
  for (const file of files) {
    const header = await readHeader(source, file);
    nbytes += header.begin + header.size;
    for (const [name, row] of header.fields) {
      if (name === "__metadata__") Object.assign(metadata, Object.fromEntries(row));
      else leaves.push(faultless(file, name, () => leafOf(source, file, header, name, object(row, name))));
    }
  }
  const place = [source.place.replace(/\/$/, ""), files.length === 1 ? files[0] : ""].filter(Boolean).join("/");
  const facts = [
    ["files", String(files.length)],
    ["checksums", "none are checked: the format has none"],
  ];
  const shown = { ...metadata };
  delete shown.xxh3; // That of an array file of Treering is long.
  const hasMetadata = Object.keys(shown).length > 0;
  return {
    place,
    format: "safetensors",
    step: undefined,
    created: null,
    nbytes,
    metrics: {},
    metadata: hasMetadata ? shown : null,
    facts,
    leaves,
    notes: [],
  };
}

/** Reads a header: the begin of the buffer, its size, and the rows. */
async function readHeader(source, file) {
  const read = async (start, end) => {
    try {
      return await source.read(file, start, end);
    } catch (error) {
      if (!(error instanceof MissingFileError)) throw error;
      throw new NotFoundError(`${source.place}${file}: expected a safetensors file, found none. Check the path`);
    }
  };
  const first = await read(0, 8);
  const length = first.bytes.length === 8 ? Number(new DataView(first.bytes.slice().buffer).getBigUint64(0, true)) : -1;
  if (length < 2 || length > MAX_HEADER_BYTES || 8 + length > first.size) {
    throw new DamagedError(
      `${file}: expected a safetensors header, found the length ${length} in ${first.size} bytes. Check the file`,
      { file },
    );
  }
  const { bytes } = await read(8, 8 + length);
  const fields = faultless(file, "header", () => object(parseJson(bytes), "the header"));
  return { begin: 8 + length, size: first.size - 8 - length, fields };
}

/** Returns what `decode` returns. A broken rule is a damaged file. */
function faultless(file, name, decode) {
  try {
    return decode();
  } catch (error) {
    if (error.name !== "FormatFault") throw error;
    throw new DamagedError(`${file}: ${name}: ${error.message}. Check the file`, { file });
  }
}

function leafOf(source, file, { begin, size }, path, row) {
  const code = text(row.get("dtype"), "dtype");
  const shape = list(row.get("shape"), "shape").map((length) => integer(length, "shape"));
  const [from, to] = list(row.get("data_offsets"), "data_offsets", 2).map((at) => integer(at, "data_offsets", 0, size));
  const dtype = DTYPES[code];
  const facts = [["stored in", file]];
  if (!dtype) {
    const read = () => {
      throw new UnsupportedError(`${path}: expected a dtype that this page knows, found ${code}`, { file });
    };
    const what = `${code}[${shape.join(",")}]`;
    return { path, what, dtype: code, shape, nbytes: to - from, facts, read, value: null };
  }
  const { itemBytes } = parseDtype(dtype);
  if (to - from !== countOf(shape) * itemBytes) {
    const message = `${file}: ${path}: expected ${countOf(shape) * itemBytes} bytes, found ${to - from}. Check the file`;
    throw new DamagedError(message, { file });
  }
  // The page reads boxes that are consecutive elements.
  const read = async ({ start, stop }) => {
    const box = stop.map((end, axis) => end - start[axis]);
    const first = begin + from + itemBytes * start.reduce((at, one, axis) => at * shape[axis] + one, 0);
    const bytes = countOf(box) * itemBytes;
    const found = bytes ? (await source.read(file, first, first + bytes)).bytes : new Uint8Array(0);
    if (found.length === bytes) return new Tensor(dtype, box, found);
    throw new DamagedError(`${file}: ${path}: expected ${bytes} bytes at ${first}, found ${found.length}`, { file });
  };
  return arrayLeaf(path, dtype, shape, facts, read);
}
