"""An independent reader of the checkpoint format, written from `docs/format.md` alone."""

import base64
import datetime
import decimal
import itertools
import json
import math
import mmap
import os
import re
import stat
import struct
from functools import cached_property, lru_cache

import ml_dtypes
import numpy as np
import xxhash

BLOCK = 1 << 20
LIMIT = 1 << 53
MISSING = object()
STORED = {"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"}
STORED |= {f"{u}int{n}": f"{u[:1].upper() or 'I'}{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
STORED |= {"float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
STORED |= {"float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ"}
WIDTH = {"BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8}  # bytes of an element
WIDTH |= {s: 1 if "_" in s else int(s[1:]) // 8 for s in STORED.values() if s not in WIDTH}
BITS = {"int1": 1, "int2": 2, "int4": 4, "uint1": 1, "uint2": 2, "uint4": 4}
BITS |= {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
BYTES = dict.fromkeys([*BITS, "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"])
BYTES |= {"complex128": 16, "complex32": 4, "bcomplex32": 4}  # name -> length of the last axis of bytes, if any
TIME = re.compile(r"(datetime64|timedelta64)(\[([2-9]|[1-9][0-9]{1,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
TEXT = re.compile(r"<U[1-9][0-9]{0,7}|\|S[1-9][0-9]{0,7}")
HEX16 = re.compile(r"[0-9a-f]{16}")
CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)


class Damaged(ValueError):
    pass


class Unsupported(ValueError):
    pass


def need(condition, what="not as the page has it"):
    if not condition:
        raise Unsupported(what)


def is_int(x, low=0, high=math.inf):
    return type(x) is int and low <= x <= high


def is_texts(x):
    return type(x) is list and all(type(t) is str for t in x)


def is_hex16(x):
    return type(x) is str and HEX16.fullmatch(x) is not None


# JSON and sealed files


def number(text):
    need(math.isfinite(float(text)), "a number that is not finite")  # this refuses NaN and Infinity, too
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]*", text) else float(text)  # -0 is no integer


def unique(pairs):
    result = dict(pairs)
    need(len(result) == len(pairs), "a key twice")
    return result


def parse_object(data):
    try:
        text = data.decode("utf-8")
        hooks = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), number)
        result = json.loads(text, object_pairs_hook=unique, **hooks)
        if "\\ud" in text.lower():
            json.dumps(result, ensure_ascii=False).encode("utf-8")  # fails for half of a pair
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"JSON: {error}") from None
    need(type(result) is dict, "no JSON object")
    return result


def open_regular(path):
    if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened: it may be a pipe
        raise Damaged("no regular file")
    return open(path, "rb")


def read_sealed(path):
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            tail = re.fullmatch(rb',"xxh3":"([0-9a-f]{16})"}\n', data[-28:])
            with memoryview(data) as view, view[:-28] as covered:
                if not tail or xxhash.xxh3_64_hexdigest(covered).encode() != tail[1]:
                    raise Damaged("the checksum is wrong")
            need(len(data) < 1 << 31, "2 GiB or more")
            return data[:]
    except (Damaged, Unsupported):
        raise
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise Damaged(str(error)) from None


# Values


def decode_float(x):
    if type(x) in (int, float):
        return float(x)
    need(type(x) is str)
    if x in ("inf", "-inf", "nan"):
        return float(x)
    need(x.startswith("nan:") and is_hex16(x[4:]) and x != "nan:7ff8000000000000")
    (number,) = struct.unpack(">d", bytes.fromhex(x[4:]))
    need(math.isnan(number))
    return number


def decode_big(x):
    need(type(x) is str and re.fullmatch(r"-?0x[1-9a-f][0-9a-f]*", x))
    need(abs(number := int(x, 16)) > LIMIT)
    return number


def decode_bytes(x):
    need(type(x) is str and x.isascii())
    try:
        data = base64.b64decode(x, validate=True)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    need(base64.b64encode(data).decode() == x, "base64 with unused bits")
    return data


def decode_plain(kind, x):
    if kind == "bool":
        need(type(x) is bool)
    elif kind == "int":
        return x if is_int(x, -LIMIT, LIMIT) else decode_big(x)
    elif kind == "float":
        return decode_float(x)
    elif kind == "complex":
        need(type(x) is list and len(x) == 2)
        return complex(decode_float(x[0]), decode_float(x[1]))
    elif kind == "str":
        need(type(x) is str)
    elif kind == "bytes":
        return decode_bytes(x)
    else:
        need(kind == "none" and x is None, "an unknown type of value")
    return x


def decode_state(state, depth=1):
    need(depth <= 100 and type(state) is list and len(state) == 2 and type(state[0]) is str)
    kind, x = state
    if kind not in ("dict", "list", "tuple", "array"):
        return decode_plain(kind, x)
    need(type(x) is list)
    if kind == "array":
        need(len(x) == 4 and type(x[0]) is bool and type(x[1]) is str and is_shape(x[2]) and (x[0] or not x[2]))
        size, data = stored_as(x[1])[2], decode_bytes(x[3])
        need(math.prod(x[2]) * size == len(data), "an array of another size")
        try:
            array = to_numpy(normalised(data, x[1]), x[1], x[2])
        except ValueError as error:  # a shape without elements that NumPy cannot have
            raise Unsupported(str(error)) from None
        return array if x[0] else array[()]
    if kind != "dict":
        return (list if kind == "list" else tuple)(decode_state(y, depth + 1) for y in x)
    result = {}
    for pair in x:
        need(type(pair) is list and len(pair) == 2)
        key, value = decode_state(pair[0], depth + 1), decode_state(pair[1], depth + 1)
        need(may_be_key(pair[0]) and key not in result)
        result[key] = value
    return result


def may_be_key(state):
    kind, x = state
    if kind == "tuple":
        return all(may_be_key(y) for y in x)
    return kind not in ("dict", "list") and not (kind == "array" and x[0])


def decode_value(kind, x):
    if kind == "function":
        need(type(x) is str)
        return None
    if kind == "iterator":
        need(type(x) is list and len(x) == 2 and x[0] in ("each", "all") and type(x[1]) is list and x[1])
        need(x[0] == "each" or len(x[1]) == 1)
        return [decode_state(state) for state in x[1]]
    return decode_plain(kind, x)


def decode_metrics(x):
    need(type(x) is dict)
    return {name: decode_float(value) for name, value in x.items()}


# Arrays in memory


@lru_cache(1024)
def stored_as(dtype):
    """(dtype in safetensors, length of the last axis of bytes or None, bytes of an element, NumPy's dtype)"""
    if dtype in STORED or dtype in BYTES:
        numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
        return STORED.get(dtype, "U8"), BYTES.get(dtype), numpy_dtype.itemsize, numpy_dtype
    need(TIME.fullmatch(dtype) or TEXT.fullmatch(dtype), f"an unknown dtype {dtype[:80]!r}")
    numpy_dtype = np.dtype(dtype)
    return "U8", numpy_dtype.itemsize, numpy_dtype.itemsize, numpy_dtype


def count(shape, limit):
    """The product of the lengths, each 0 counted as 1; None when the limit is reached."""
    product = 1
    for n in shape:
        product *= n or 1
        if product >= limit:
            return None
    return product


def is_shape(x):
    return type(x) is list and len(x) <= 64 and all(is_int(n) for n in x) and count(x, 1 << 58) is not None


def normalised(data, dtype):
    raw = np.frombuffer(data, np.uint8)
    if dtype == "bool":
        return (raw != 0).tobytes()
    if dtype in BITS:
        raw = raw & ((1 << BITS[dtype]) - 1)
        if dtype.startswith("int"):
            sign = np.uint8(1 << (BITS[dtype] - 1))
            raw = (raw ^ sign) - sign
        return raw.tobytes()
    return data


def to_numpy(data, dtype, shape):
    numpy_dtype = stored_as(dtype)[3]
    if 0 in shape:
        return np.empty(shape, numpy_dtype)
    raw = np.frombuffer(bytearray(data), np.uint8)
    if dtype in BITS and "int" in dtype:
        return raw.view(np.int8 if dtype[0] == "i" else np.uint8).astype(numpy_dtype).reshape(shape)
    return raw.view(numpy_dtype).reshape(shape)


# Array files


class ArrayFile:
    def __init__(self, directory, entry):
        self.path, self.size, self.start = os.path.join(directory, entry["name"]), entry["size"], entry.get("header")
        self.tensors, self.dtypes, self.sums, self.known = {}, {}, "", {}
        self.state, self.missing = "valid", False
        try:
            self.open(entry)
        except FileNotFoundError:
            self.state, self.missing = "damaged", True
        except (Damaged, OSError):
            self.state = "damaged"
        except Unsupported:
            self.state = "unsupported"

    def open(self, entry):
        with open_regular(self.path) as file:
            if file.seek(0, 2) != self.size:
                raise Damaged("another size")
        need(not entry.get("requires"))
        header = self.bytes(0, self.start)
        if xxhash.xxh3_64_hexdigest(header) != entry["xxh3"]:
            raise Damaged("another header")
        text = header[8:].rstrip(b" ")
        need(int.from_bytes(header[:8], "little") == self.start - 8 and text[:1] == b"{" and text[-1:] == b"}")
        tensors = parse_object(text)
        meta = tensors.pop("__metadata__", None)
        need(type(meta) is dict and is_texts(list(meta.values())) and "requires" not in meta)
        need([meta.get(key) for key in ("format", "version", "block")] == ["treering", "1", str(BLOCK)])
        blocks = -(-(self.size - self.start) // BLOCK)
        need(len(meta.get("xxh3", "?")) == blocks * 16 and not set(meta["xxh3"]) - set("0123456789abcdef"))
        for tensor in tensors.values():
            need(type(tensor) is dict and type(tensor.get("dtype")) is str)
            shape, place = tensor.get("shape"), tensor.get("data_offsets")
            need(type(shape) is list and all(is_int(n) for n in shape))
            need(type(place) is list and len(place) == 2 and is_int(place[0]) and is_int(place[1], place[0]))
            if width := WIDTH.get(tensor["dtype"]):
                elements = 0 if 0 in shape else count(shape, 1 << 64)
                need(elements is not None and elements * width == place[1] - place[0])
        places = sorted(tensor["data_offsets"] for tensor in tensors.values())
        begins, ends = [begin for begin, _ in places], [end for _, end in places]
        need([*begins, self.size - self.start] == [0, *ends], "overlaps or holes")
        self.sums, self.tensors = meta["xxh3"], tensors
        self.dtypes = {key[6:]: value for key, value in meta.items() if key.startswith("dtype:")}

    def bytes(self, begin, end):
        with open(self.path, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def good(self, block):
        if block not in self.known:
            begin = self.start + block * BLOCK
            checksum = xxhash.xxh3_64_hexdigest(self.bytes(begin, min(begin + BLOCK, self.size)))
            self.known[block] = checksum == self.sums[block * 16 : block * 16 + 16]
        return self.known[block]

    @cached_property
    def undamaged(self):
        blocks = range(len(self.sums) // 16)
        return self.state == "unsupported" or (self.state == "valid" and all(map(self.good, blocks)))

    def verdict(self, name, dtype, shape):
        """Of one tensor."""
        if self.state != "valid":
            return self.state
        if name not in self.tensors:
            return "unsupported"
        tensor = self.tensors[name]
        begin, end = tensor["data_offsets"]
        if begin < end and not all(self.good(i) for i in range(begin // BLOCK, (end - 1) // BLOCK + 1)):
            return "damaged"
        kind, last, _, _ = stored_as(dtype)
        right = tensor["dtype"] == kind and tensor["shape"] == (shape if last is None else [*shape, last])
        named = self.dtypes.get(name) == (dtype if kind == "U8" and dtype != "uint8" else None)
        return "valid" if right and named else "unsupported"

    def data(self, name):
        begin, end = self.tensors[name]["data_offsets"]
        return self.bytes(self.start + begin, self.start + end)


# The manifest


def decode_key(x):
    if type(x) in (str, bool) or is_int(x, -LIMIT, LIMIT):
        return x
    need(type(x) is list and len(x) == 2 and x[0] in ("int", "float", "bytes"), "a key")
    return {"int": decode_big, "float": decode_float, "bytes": decode_bytes}[x[0]](x[1])


def name_of(key):
    if type(key) is bytes:
        key = key.decode("utf-8", "backslashreplace")
    elif type(key) is int and abs(key) > LIMIT:
        need(key.bit_length() < 1 << 20, "an integer of absurd size")
        key = decimal.Decimal(key)  # str(int) refuses more than 4300 digits
    return str(key).replace("~", "~0").replace("/", "~1")


def build_tree(nodes, leaves, values):
    """The containers with the values; compares the paths of the leaves."""
    need(type(nodes) is list)
    values, used, open_, names, done = iter(values), 0, [], [], []
    for node in nodes:
        need(not done, "nodes after the end of the tree")
        if open_:
            _, keys, children = open_[-1]
            names[-1] = name_of(len(children) if type(keys) is int else keys[len(children)])
        if type(node) is int and node == 0:
            need(used < len(leaves) and leaves[used] == "/".join(names), "another path")
            result, used = next(values), used + 1
        else:
            need(type(node) is list and len(node) == 3 and type(node[1]) is str, "a container")
            kind, _, keys = node
            if kind in ("list", "tuple", "positional"):
                need(is_int(keys))
            else:
                need(kind in ("dict", "namedtuple", "object") and type(keys) is list)
                need(kind != "namedtuple" or is_texts(keys))
                keys = [decode_key(key) for key in keys]
                need(len(set(keys)) == len(keys), "equal keys")
            open_.append((kind, keys, []))
            names.append("")
            result = MISSING
        while True:
            if result is not MISSING:
                if not open_:
                    done.append(result)
                    break
                open_[-1][2].append(result)
            kind, keys, children = open_[-1]
            if len(children) < (keys if type(keys) is int else len(keys)):
                break
            if type(keys) is int:
                result = tuple(children) if kind == "tuple" else children
            else:
                result = dict(zip(keys, children, strict=True))
            open_.pop()
            names.pop()
    need(done and used == len(leaves), "the tree has another number of nodes or leaves")
    return done[0]


def check_file(entry):
    need(type(entry) is dict and is_texts(entry.get("requires", [])))
    name = entry.get("name")
    need(type(name) is str and 1 <= len(name) <= 255 and not set(name) & set("/\\\0") and name not in (".", ".."))
    need(is_int(entry.get("size")))
    if entry.get("requires"):
        need(type(entry.get("header", 0)) is int and type(entry.get("xxh3", "")) is str)
    else:
        need(is_int(entry.get("header"), 8, min(entry["size"], 100_000_008)) and is_hex16(entry.get("xxh3")))


def check_layout(layout, holders):
    need(type(layout) is dict and type(layout.get("cuts")) is list)
    for cut in layout["cuts"]:
        need(type(cut) is list and len(cut) >= 2 and all(is_int(n) for n in cut) and cut[0] == 0)
        need(cut == [0, 0] or all(a < b for a, b in itertools.pairwise(cut)))
    need(is_int(layout.get("holders"), 0, len(holders) - 1))
    cells = count([len(cut) - 1 for cut in layout["cuts"]], 1 << 58)
    need(cells == len(holders[layout["holders"]]), "another number of cells")
    if "sharding" in layout:
        sharding = layout["sharding"]
        need(type(sharding) is dict and type(sharding.get("mesh")) is dict and type(sharding.get("spec")) is list)
        need(all(is_int(n) for n in sharding["mesh"].values()))
        need(all(x is None or type(x) is str or is_texts(x) for x in sharding["spec"]))


def check_array(leaf, earlier, files, layouts):
    need(len(leaf) == 7)
    _, _, kind, dtype, shape, impl, where = leaf
    need(kind in ("jax", "jax-weak", "numpy", "numpy-scalar", "key"))
    need(type(dtype) is str and is_shape(shape) and type(impl) is str)
    stored_as(dtype)
    need((kind == "key") == (impl != "") and (kind != "key" or (dtype == "uint32" and shape)))
    if type(where) is list:
        need(len(where) == 2 and is_int(where[0], 0, len(layouts) - 1) and is_int(where[1]))
        need([cut[-1] for cut in layouts[where[0]]["cuts"]] == shape, "a layout of another shape")
    elif type(where) is str:
        need(where in earlier, "no such earlier leaf")
        other = earlier[where]
        need(other[0] == "array" and other[2:6] == leaf[2:6] and type(other[6]) is not str)
    elif type(where) is dict:
        need(is_texts(where.get("requires")) and where["requires"])
    else:
        need(is_int(where, 0, len(files) - 1))


def check_metadata(x):
    stack = [x]
    while stack:
        x = stack.pop()
        if type(x) in (list, dict):
            stack.extend(x if type(x) is list else x.values())
        need(type(x) is not int or -(1 << 63) <= x < 1 << 64, "an integer of more than 64 bits")


class Checkpoint:
    def __init__(self, directory):
        while True:
            self.directory, self.path = directory, os.path.join(directory, "treering.json")
            if not os.path.lexists(self.path):
                raise ValueError(f"{directory} is no checkpoint")
            raw = read_sealed(self.path)
            self.checksum, self.manifest = xxhash.xxh3_64_hexdigest(raw), parse_object(raw)
            self.check(self.manifest)
            self.files = [ArrayFile(directory, entry) for entry in self.manifest["files"]]
            if not any(file.missing for file in self.files):
                break
            if os.path.lexists(self.path) and read_sealed(self.path) == raw:  # else replaced or deleted
                break

    def check(self, m):
        need(m.get("format") == "treering" and is_int(m.get("version"), 1, 1) and m.get("requires", []) == [])
        need(type(m.get("created")) is str and CREATED.fullmatch(m["created"]), "created")
        try:
            datetime.datetime.fromisoformat(m["created"])
        except ValueError as error:
            raise Unsupported(str(error)) from None
        need(type(m.get("software")) is dict and is_texts(list(m["software"].values())), "software")
        need("step" not in m or is_int(m["step"], 0, LIMIT), "step")
        self.metrics = decode_metrics(m.get("metrics", {}))
        check_metadata(m.get("metadata"))
        need(type(m.get("files")) is list, "files")
        for entry in m["files"]:
            check_file(entry)
        need(len({entry["name"] for entry in m["files"]}) == len(m["files"]), "a file twice")
        self.holders, self.layouts = m.get("holders", []), m.get("layouts", [])
        need(type(self.holders) is list and type(self.layouts) is list)
        for lists in self.holders:
            need(type(lists) is list and all(type(holder) is list and holder for holder in lists))
            need(all(is_int(f, 0, len(m["files"]) - 1) for holder in lists for f in holder))
        for layout in self.layouts:
            check_layout(layout, self.holders)
        self.cuts = [[list(itertools.pairwise(cut)) for cut in layout["cuts"]] for layout in self.layouts]
        need(type(m.get("leaves")) is list, "leaves")
        self.leaves, self.values = {}, {}
        for leaf in m["leaves"]:
            need(type(leaf) is list and len(leaf) >= 4 and type(leaf[1]) is str and leaf[1] not in self.leaves)
            if leaf[0] == "array":
                check_array(leaf, self.leaves, m["files"], self.layouts)
            else:
                need(leaf[0] == "value" and len(leaf) == 4 and type(leaf[2]) is str)
                self.values[leaf[1]] = decode_value(leaf[2], leaf[3])
            self.leaves[leaf[1]] = leaf
        build_tree(m.get("tree"), list(self.leaves), itertools.repeat(None))

    def late(self):
        """({file name: verdict}, all metrics)"""
        verdicts, metrics = {}, dict(self.metrics)
        for name in sorted(os.listdir(self.directory)):  # the same checksum: this is the order of times, then names
            if not re.fullmatch(rf"metrics-{self.checksum}-[0-9]{{20}}-[0-9a-f]{{6}}\.json", name):
                continue
            try:
                m = parse_object(read_sealed(os.path.join(self.directory, name)))
                need(m.get("format", "treering-metrics") == "treering-metrics" and is_int(m.get("version", 1), 1, 1))
                need(m.get("requires", []) == [])
                metrics |= decode_metrics(m.get("metrics"))
                verdicts[name] = "valid"
            except Damaged:
                verdicts[name] = "damaged"
            except Unsupported:
                verdicts[name] = "unsupported"
        return verdicts, metrics

    def pieces(self, path, shape, where):
        """(file, name of the tensor, begin, shape) of each piece"""
        name = "__metadata__~@" if path == "__metadata__" else path
        if type(where) is int:
            yield self.files[where], name, [0] * len(shape), shape
            return
        layout = self.layouts[where[0]]
        holders = self.holders[layout["holders"]]
        for cell, holder in zip(itertools.product(*self.cuts[where[0]]), holders, strict=True):
            begin = [a for a, _ in cell]
            full = name if len(holders) == 1 else f"{path}~@{','.join(map(str, begin))}"
            yield self.files[holder[where[1] % len(holder)]], full, begin, [b - a for a, b in cell]

    def verdict(self, leaf):
        _, path, _, dtype, shape, _, where = leaf
        if type(where) is str:
            return self.verdict(self.leaves[where])
        if type(where) is dict:
            return "unsupported"
        result = "valid"
        for file, name, _, piece in self.pieces(path, shape, where):
            verdict = file.verdict(name, dtype, piece)
            if verdict == "damaged":
                return verdict
            if verdict == "unsupported" and result == "valid":
                result = verdict
                if all(f.undamaged for f in self.files):
                    return result  # nothing could be damaged in the other pieces
        return result

    def data(self, leaf):
        """All elements in C order, normalised."""
        _, path, _, dtype, shape, _, where = leaf
        if type(where) is str:
            return self.data(self.leaves[where])
        if 0 in shape:
            return b""
        pieces = list(self.pieces(path, shape, where))
        if len(pieces) == 1:
            return normalised(pieces[0][0].data(pieces[0][1]), dtype)
        element = f"V{stored_as(dtype)[2]}"
        whole = np.empty(shape, element)
        for file, name, begin, piece in pieces:
            place = tuple(slice(a, a + n) for a, n in zip(begin, piece, strict=True))
            whole[place] = np.frombuffer(file.data(name), element).reshape(piece)
        return normalised(whole.tobytes(), dtype)


# What others call


def examine(directory):
    result = {"checkpoint": "valid", "leaves": {}, "metrics": {}, "late": {}}
    try:
        checkpoint = Checkpoint(directory)
    except (Damaged, Unsupported) as error:
        return result | {"checkpoint": "damaged" if isinstance(error, Damaged) else "unsupported"}
    result["late"], result["metrics"] = checkpoint.late()
    for path, leaf in checkpoint.leaves.items():
        if leaf[0] == "value":
            found = {"type": leaf[2], "value": leaf[3]}
        elif (found := checkpoint.verdict(leaf)) == "valid":
            checksum = xxhash.xxh3_64_hexdigest(checkpoint.data(leaf))
            found = dict(zip(("type", "dtype", "shape", "impl"), leaf[2:6], strict=True)) | {"xxh3": checksum}
        result["leaves"][path] = found
    return result


def contents(checkpoint):
    for path, leaf in checkpoint.leaves.items():
        if leaf[0] == "value":
            yield checkpoint.values[path]
            continue
        if (verdict := checkpoint.verdict(leaf)) != "valid":
            raise {"damaged": Damaged, "unsupported": Unsupported}[verdict](f"{path!r} is {verdict}")
        yield to_numpy(checkpoint.data(leaf), leaf[3], leaf[4])


def read(directory):
    checkpoint = Checkpoint(directory)
    return dict(zip(checkpoint.leaves, contents(checkpoint), strict=True))


def tree(directory):
    checkpoint = Checkpoint(directory)
    return build_tree(checkpoint.manifest["tree"], list(checkpoint.leaves), contents(checkpoint))


def metrics(directory):
    return Checkpoint(directory).late()[1]


def steps(directory, prefix=None):
    names = [n for n in os.listdir(directory) if os.path.isfile(os.path.join(directory, n, "treering.json"))]

    def found(prefix):
        matches = [(n, re.fullmatch(re.escape(prefix) + "([0-9]+)", n)) for n in names]
        return sorted((int(m[1]), n) for n, m in matches if m and int(m[1]) <= LIMIT)

    result = found("step-" if prefix is None else prefix)
    if prefix is None and not result:
        matches = [re.fullmatch(r"(.*?)([0-9]{8,})", n, re.DOTALL) for n in names]
        prefixes = sorted({m[1] for m in matches if m and int(m[2]) <= LIMIT})
        if len(prefixes) > 1:
            raise ValueError(f"several prefixes: {prefixes}")
        result = found(prefixes[0]) if prefixes else []
    for (a, name), (b, other) in itertools.pairwise(result):
        if a == b:
            raise ValueError(f"one step twice: {name!r} and {other!r}")
    return [step for step, _ in result]
