"""An independent reader of the checkpoint format, written from `docs/format.md` alone."""

import base64
import datetime
import itertools
import json
import math
import os
import re
import struct
from functools import lru_cache

import ml_dtypes
import numpy as np
import xxhash

BLOCK = 1 << 20
# The features that this reader has
STATES, DELTA, PARTS = ["iterator-states"], ["differences"], ["differences-in-parts"]
LIMIT = 1 << 53  # of integers
FIELDS = {"format", "version", "requires", "created", "software", "step", "metrics", "metadata", "files"}
FIELDS |= {"base", "metadata_floats", "layouts", "holders", "placement", "static", "tree", "leaves", "xxh3"}
STORED = {"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"}
STORED |= {f"{u}int{n}": f"{u[:1].upper() or 'I'}{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
STORED |= {"float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
STORED |= {"float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ"}
BITS = {"int1": 1, "int2": 2, "int4": 4, "uint1": 1, "uint2": 2, "uint4": 4}
BITS |= {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
BYTES = dict.fromkeys([*BITS, "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"])
BYTES |= {"complex128": 16, "complex32": 4, "bcomplex32": 4}  # name -> length of the last axis of bytes, if any
TIME = re.compile(r"(datetime64|timedelta64)(\[([2-9]|[1-9][0-9]{1,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
TEXT = re.compile(r"<U[1-9][0-9]{0,7}|\|S[1-9][0-9]{0,7}")
HEX16 = re.compile(r"[0-9a-f]{16}")
HEX = re.compile(r"-?0x([1-9a-f][0-9a-f]*)")
DAY, HOURS = "([0-9]{4}-[0-9]{2}-[0-9]{2})", "([01][0-9]|2[0-3])"
CREATED = re.compile(rf"{DAY}T{HOURS}(:[0-5][0-9]){{2}}(\.[0-9]{{1,6}})?(Z|[+-]{HOURS}:[0-5][0-9])")


class Damaged(ValueError):
    verdict = "damaged"


class Unsupported(ValueError):
    verdict = "unsupported"


def need(condition, what="not as the page has it"):
    if not condition:
        raise Unsupported(what)


def is_int(x, low=0, high=LIMIT):
    return type(x) is int and low <= x <= high


def is_texts(x):
    return type(x) is list and all(type(t) is str for t in x)


def is_hex16(x):
    return type(x) is str and HEX16.fullmatch(x) is not None


# JSON and sealed files


def integer(text):
    need(text != "-0", "-0")
    return int(text[:400])  # those with more digits stand only in fields that we do not know


def number(text):
    need(math.isfinite(float(text)), "a number that is not finite")  # this refuses NaN and Infinity, too
    return float(text)


def unique(pairs):
    result = dict(pairs)
    need(len(result) == len(pairs), "a key twice")
    return result


def parse_object(data):
    result = parse(data)
    need(type(result) is dict, "no JSON object")
    return result


def parse(data):
    try:
        hooks = {"parse_int": integer, "parse_float": number, "parse_constant": number}
        result = json.loads(data.decode("utf-8"), object_pairs_hook=unique, **hooks)
        json.dumps(result, ensure_ascii=False).encode("utf-8")  # fails for half of a pair
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"JSON: {error}") from None
    return result


def check_json(x, low=-math.inf, high=math.inf, around=0):
    """Checks metadata, and the contents of unknown fields."""
    if type(x) in (list, dict):
        need(around < 200, "more than 200 objects and lists in one another")
        for y in x if type(x) is list else x.values():
            check_json(y, low, high, around + 1)
    need(type(x) is not int or low <= x <= high, "too large an integer")


def with_floats(x, pointers):
    """Metadata with the floats that JSON cannot write: each pointer says where the text of one is."""
    need(is_texts(pointers), "no list of pointers")
    need(len(set(pointers)) == len(pointers), "a pointer twice")
    left = set(pointers)

    def walk(x, at):
        if at in left:
            left.remove(at)
            need(type(x) is str, f"no text at {at}")
            return decode_float(x)
        if type(x) is list:
            return [walk(y, f"{at}/{n}") for n, y in enumerate(x)]
        if type(x) is dict:
            return {k: walk(y, at + "/" + k.replace("~", "~0").replace("/", "~1")) for k, y in x.items()}
        return x

    found = walk(x, "") if pointers else x
    need(not left, f"nothing at {left}")
    return found


def check_unknown(x, known):
    for key in set(x) - known:
        check_json(x[key])


def open_regular(path):
    if not os.path.isfile(path):  # before it is opened: it may be a pipe
        raise Damaged("no such file")
    return open(path, "rb")


def read_sealed(path):
    try:
        with open_regular(path) as file:
            size, chunks, checksum = file.seek(0, 2), [], xxhash.xxh3_64()
            file.seek(0)
            for begin in range(0, size - 28, BLOCK):
                chunk = file.read(min(BLOCK, size - 28 - begin))
                checksum.update(chunk)
                if size < 1 << 31:
                    chunks.append(chunk)
            tail = file.read(29)
    except OSError as error:
        raise Damaged(str(error)) from None
    if tail != b',"xxh3":"%b"}\n' % checksum.hexdigest().encode():
        raise Damaged("the checksum is wrong")
    need(size < 1 << 31, "2 GiB or more")
    return b"".join([*chunks, tail])


# Values


def decode_float(x):
    if type(x) in (int, float):
        try:
            return float(x)
        except OverflowError:
            raise Unsupported("a number that is not finite") from None
    need(type(x) is str)
    if x in ("inf", "-inf", "nan"):
        return float(x)
    need(x.startswith("nan:") and is_hex16(x[4:]) and x != "nan:7ff8000000000000")
    (number,) = struct.unpack(">d", bytes.fromhex(x[4:]))
    need(math.isnan(number))
    return number


def decode_big(x, digits=math.inf):
    need(type(x) is str and (match := HEX.fullmatch(x)) and len(match[1]) <= digits)
    result = int(x, 16)
    need(abs(result) > LIMIT)
    return result


def decode_bytes(x):
    need(type(x) is str)
    try:
        data = base64.b64decode(x)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    need(base64.b64encode(data).decode() == x, "base64 with other characters or unused bits")
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


class Rest:
    """The bytes after the JSON of a state in an array file."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, length):
        need(is_int(length) and self.at + length <= len(self.data), "too few bytes")
        self.at += length
        return self.data[self.at - length : self.at]


def unpack(data):
    rest = Rest(data)
    state = decode_state(parse(rest.take(int.from_bytes(rest.take(8), "little"))), rest=rest)
    need(rest.at == len(data), "bytes after the state")
    return state


def decode_state(state, around=0, in_key=False, rest=None):
    need(around <= 100, "more than 100 containers")
    need(type(state) is list and len(state) == 2 and type(state[0]) is str)
    kind, x = state
    if kind == "bytes" and rest:
        return rest.take(x)
    if kind not in ("dict", "list", "tuple", "array"):
        return decode_plain(kind, x)
    need(type(x) is list and (kind == "tuple" or not in_key))
    if kind == "array":
        return decode_array(x, rest)
    if kind != "dict":
        return (list if kind == "list" else tuple)(decode_state(y, around + 1, in_key, rest) for y in x)
    result = {}
    for pair in x:
        need(type(pair) is list and len(pair) == 2)
        key = decode_state(pair[0], around + 1, True, rest)
        need(key not in result, "equal keys")
        result[key] = decode_state(pair[1], around + 1, False, rest)
    return result


def decode_array(x, rest=None):
    need(len(x) == 4 and type(x[0]) is bool and (x[0] or x[2] == []))
    is_array, dtype, shape, data = x
    check_shape(dtype, shape)
    data = rest.take(data) if rest else decode_bytes(data)
    need(math.prod(shape) * stored_as(dtype)[2] == len(data), "an array of another size")
    array = to_numpy(normalised(data, dtype), dtype, shape)
    try:
        return array if is_array else array[()]
    except (ValueError, SystemError):  # code points that Python cannot have
        return array


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


def check_shape(dtype, shape):
    need(type(dtype) is str and type(shape) is list and len(shape) <= 64 and all(is_int(n) for n in shape))
    need(math.prod(n or 1 for n in shape) * stored_as(dtype)[2] < 1 << 63, "too large a shape")


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
        self.state = "valid"
        try:
            self.open(entry)
        except (Damaged, Unsupported, OSError) as error:
            self.state = getattr(error, "verdict", "damaged")

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
            need(type(tensor) is dict and type(tensor.get("dtype")) is str and tensor["dtype"])
            shape, place = tensor.get("shape"), tensor.get("data_offsets")
            need(type(shape) is list and all(is_int(n) for n in shape))
            need(type(place) is list and len(place) == 2 and is_int(place[0]) and is_int(place[1], place[0]))
        places = sorted(tensor["data_offsets"] for tensor in tensors.values())
        begins, ends = [begin for begin, _ in places], [end for _, end in places]
        need([*begins, self.size - self.start] == [0, *ends], "overlaps or holes")
        self.sums, self.tensors = meta["xxh3"], tensors
        self.dtypes = {key[6:]: value for key, value in meta.items() if key.startswith("dtype:")}

    def bytes(self, begin, end):
        try:
            with open_regular(self.path) as file:
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise Damaged(str(error)) from None

    def good(self, block):
        if block not in self.known:
            begin = self.start + block * BLOCK
            try:
                checksum = xxhash.xxh3_64_hexdigest(self.bytes(begin, min(begin + BLOCK, self.size)))
            except Damaged:
                checksum = None
            self.known[block] = checksum == self.sums[block * 16 : block * 16 + 16]
        return self.known[block]

    def verdict(self, name, dtype, shape):
        """Returns the verdict of one tensor."""
        if self.state != "valid":
            return self.state
        if name not in self.tensors:
            return "unsupported"
        tensor, (kind, last, size, _) = self.tensors[name], stored_as(dtype)
        begin, end = tensor["data_offsets"]
        right = tensor["dtype"] == kind and tensor["shape"] == (shape if last is None else [*shape, last])
        right = right and end - begin == math.prod(shape) * size
        if not right or self.dtypes.get(name) != (dtype if kind == "U8" and dtype != "uint8" else None):
            return "unsupported"
        blocks = range(begin // BLOCK, -(-end // BLOCK)) if begin < end else ()
        return "valid" if all(self.good(block) for block in blocks) else "damaged"

    def data(self, name):
        begin, end = self.tensors[name]["data_offsets"]
        return self.bytes(self.start + begin, self.start + end)


# The manifest


def decode_key(x, in_tuple=False):
    if type(x) in (str, bool) or is_int(x, -LIMIT, LIMIT):
        return x
    need(type(x) is list and len(x) == 2, "a key")
    kind, value = x
    if kind == "int":
        return decode_big(value, 3000)
    if kind == "float":
        return decode_float(value)
    need(not in_tuple and kind in ("bytes", "tuple"), "a key")
    if kind == "bytes":
        return decode_bytes(value)
    need(type(value) is list, "a key")
    return tuple(decode_key(y, True) for y in value)


def decode_keys(container):
    """The keys of a container, or the numbers of its children."""
    need(type(container) is list and len(container) == 3 and type(container[1]) is str, "a container")
    kind, _, keys = container
    if kind in ("list", "tuple", "positional"):
        need(is_int(keys))
        return range(keys)
    need(kind in ("dict", "namedtuple", "object") and type(keys) is list)
    need(kind != "namedtuple" or is_texts(keys))
    keys = [decode_key(key) for key in keys]
    need(len(set(keys)) == len(keys), "equal keys")
    return keys


def text_of(key, in_tuple=False):
    if type(key) is tuple:
        texts = [text_of(x, True) for x in key]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    if type(key) is bytes:
        return key.decode("utf-8", "backslashreplace")
    if type(key) is str and in_tuple:
        text = key.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{text}'"
    return str(key)


def name_of(key):
    return text_of(key).replace("~", "~0").replace("/", "~1")


def paths_of(nodes):
    """The paths of the leaves of the tree."""
    need(type(nodes) is list)
    names, coming = [""], [iter([""])]  # from the root down: the name of the child, the names of those that follow
    for node in nodes:
        while coming and (name := next(coming[-1], None)) is None:
            coming.pop()
            names.pop()
        need(coming, "nodes after the end of the tree")
        names[-1] = name
        if type(node) is int and node == 0:
            yield "/".join(names[1:])
        else:
            coming.append(map(name_of, decode_keys(node)))
            names.append("")
    need(all(next(rest, None) is None for rest in coming), "the tree is not complete")


def build_tree(nodes, values):
    """The containers with the values."""
    values, built = list(values), []
    for node in reversed(nodes):
        if node == 0:
            built.append(values.pop())
            continue
        keys = decode_keys(node)
        children = [built.pop() for _ in keys]
        if type(keys) is list:
            children = dict(zip(keys, children, strict=True))
        built.append(tuple(children) if node[0] == "tuple" else children)
    return built[0]


def check_name(name):
    need(type(name) is str and 1 <= len(name.encode()) <= 255 and not set(name) & set("/\\\0"))
    need(name not in (".", "..", "treering.json"))


def check_file(entry):
    need(type(entry) is dict and is_texts(entry.get("requires", [])))
    check_name(entry.get("name"))
    need(is_int(entry.get("size")))
    if entry.get("requires"):
        need(is_int(entry.get("header", 0), -LIMIT) and type(entry.get("xxh3", "")) is str)
    else:
        need(is_int(entry.get("header"), 8, min(entry["size"], 100_000_008)) and is_hex16(entry.get("xxh3")))


def check_layout(layout, holders):
    need(type(layout) is dict and type(layout.get("cuts")) is list)
    need(is_int(layout.get("holders"), 0, len(holders) - 1))
    cells, holder = 1, holders[layout["holders"]]
    for cut in layout["cuts"]:
        need(type(cut) is list and len(cut) >= 2 and all(is_int(n) for n in cut) and cut[0] == 0)
        need(cut == [0, 0] or all(a < b for a, b in itertools.pairwise(cut)))
        cells *= len(cut) - 1
        need(cells <= len(holder))
    need(cells == len(holder), "another number of cells")
    # Of arrays that have the layout; one that no array has could be that of single bytes.
    need(len(layout["cuts"]) <= 64 and math.prod(cut[-1] or 1 for cut in layout["cuts"]) < 1 << 63, "too large a shape")
    sharding = layout.get("sharding", {"mesh": {}, "spec": []})
    need(type(sharding) is dict and type(sharding.get("mesh")) is dict and type(sharding.get("spec")) is list)
    need(all(is_int(n, 1) for n in sharding["mesh"].values()))
    need(all(x is None or type(x) is str or is_texts(x) for x in sharding["spec"]))


def check_placement(placement, leaves):
    need(type(placement) is dict and type(placement.get("places")) is list and type(placement.get("leaves")) is list)
    for place in placement["places"]:
        need(type(place) is dict and ("mesh" in place) == ("spec" in place))
        mesh, spec = place.get("mesh", {}), place.get("spec", [])
        need(type(mesh) is dict and all(is_int(n, 1) for n in mesh.values()) and type(spec) is list)
        need(all(x is None or type(x) is str or is_texts(x) for x in spec))
        for field in ("axis_types", "devices", "layout"):
            need(field not in place or type(place[field]) is list)
        types = place.get("axis_types", ["auto"] * len(mesh))
        need(all(type(kind) is str and kind in ("auto", "explicit", "manual") for kind in types))
        devices = place.get("devices", [])
        need(all(map(is_int, devices)) and all(map(is_int, place.get("layout", []))))
        if "mesh" in place:
            need(len(types) == len(mesh))
            need("devices" not in place or len(set(devices)) == len(devices) == math.prod(mesh.values()))
        need(all(is_int(place.get(field, 0)) for field in ("job_devices", "device")))
        need(all(type(place.get(field, True)) is bool for field in ("local", "committed", "cast")))
        need(all(type(place.get(field, "")) is str for field in ("platform", "memory_kind", "unrecorded")))
    for run in placement["leaves"]:
        need(type(run) is list and len(run) == 2 and is_int(run[0], 1))
        need(is_int(run[1], -1, len(placement["places"]) - 1))
    need(sum(count for count, _ in placement["leaves"]) == leaves, "another number of leaves")


def check_array(leaf, earlier, files, layouts):
    need(len(leaf) == 7)
    _, _, kind, dtype, shape, impl, where = leaf
    need(kind in ("jax", "jax-weak", "numpy", "numpy-scalar", "key"))
    need(type(impl) is str and (kind != "numpy-scalar" or shape == []))
    check_shape(dtype, shape)
    need((kind == "key") == (impl != "") and (kind != "key" or (dtype == "uint32" and shape)))
    if type(where) is list:
        need(len(where) == 2 and is_int(where[0], 0, len(layouts) - 1) and is_int(where[1]))
        need([cut[-1] for cut in layouts[where[0]]["cuts"]] == shape, "a layout of another shape")
    elif type(where) is str:
        need(where in earlier, "no such earlier leaf")
        other = earlier[where]
        need(other[0] == "array" and other[2:6] == leaf[2:6] and type(other[6]) is not str and not is_states(other))
    elif type(where) is dict:
        need(is_texts(where.get("requires")) and where["requires"])
        if is_states(leaf):
            lengths = where.get("lengths")
            need(type(lengths) is list and lengths and all(map(is_int, lengths)))
            need((kind, dtype, shape) == ("numpy", "uint8", [sum(lengths)]) and type(where.get("where")) in (int, list))
            check_array(plain(leaf), earlier, files, layouts)
        if is_parted(leaf):
            parts = where.get("parts")
            need(type(parts) is list and type(where.get("where")) is list)
            check_array(plain(leaf), earlier, files, layouts)
            need(len(parts) == math.prod(len(cut) - 1 for cut in layouts[where["where"][0]]["cuts"]))
            for part in parts:
                need(part is None or (type(part) is list and len(part) == 5))
                need(part is None or (is_int(part[0]) and is_int(part[1]) and part[2] in (1, 2, 4, 8)))
                need(part is None or (is_hex16(part[3]) and is_hex16(part[4])))
        elif is_delta(leaf):
            need(is_int(where.get("nbytes")) and is_int(where.get("count")) and where.get("gap") in (1, 2, 4, 8))
            need(
                is_hex16(where.get("base")) and is_hex16(where.get("xxh3")) and type(where.get("where")) in (int, list)
            )
            check_array(plain(leaf), earlier, files, layouts)
    else:
        need(is_int(where, 0, len(files) - 1))


def is_states(leaf):
    return type(leaf[6]) is dict and leaf[6].get("requires") == STATES


def is_delta(leaf):
    return type(leaf[6]) is dict and leaf[6].get("requires") in (DELTA, PARTS)


def is_parted(leaf):
    return type(leaf[6]) is dict and leaf[6].get("requires") == PARTS


def plain(leaf):
    """Returns a leaf of states, or of a difference, as the array in its files; another leaf as it is."""
    if is_delta(leaf) and not is_parted(leaf):
        return [*leaf[:2], "numpy", "uint8", [leaf[6]["nbytes"]], "", leaf[6]["where"]]
    return [*leaf[:6], leaf[6]["where"]] if is_states(leaf) or is_parted(leaf) else leaf


def applied(before, data, dtype, count, gap, base, xxh3):
    """Returns the bytes of an array, or of a piece, from those in the base and the stored difference."""
    array = np.frombuffer(bytearray(before), np.uint8)
    size = next(n for n in (8, 4, 2, 1) if stored_as(dtype)[2] % n == 0)
    elements = array.view(f"<u{size}")
    if xxhash.xxh3_64_hexdigest(array) != base or count > elements.size:
        raise Damaged("another base")
    if count:
        import zstandard

        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=count * (gap + size))
        if len(data) != count * (gap + size):
            raise Damaged("another length")
        place = -1
        for n in range(count):
            place += 1 + sum(data[n + count * byte] << 8 * byte for byte in range(gap))
            change = sum(data[count * gap + n + count * byte] << 8 * byte for byte in range(size))
            change = change // 2 if change % 2 == 0 else -(change + 1) // 2
            if place >= elements.size:
                raise Damaged("beyond the array")
            elements[place] = (int(elements[place]) + change) % (1 << 8 * size)
    if xxhash.xxh3_64_hexdigest(array) != xxh3:
        raise Damaged("another array")
    return array.tobytes()


class Checkpoint:
    def __init__(self, directory):
        while True:
            self.directory, self.path = directory, os.path.join(directory, "treering.json")
            if not os.path.isfile(self.path):
                raise ValueError(f"{directory} is no checkpoint")
            raw = read_sealed(self.path)
            self.checksum, self.manifest = xxhash.xxh3_64_hexdigest(raw), parse_object(raw)
            self.check(self.manifest)
            self.files = [ArrayFile(directory, entry) for entry in self.manifest["files"]]
            if all(os.path.exists(file.path) for file in self.files):
                break
            if os.path.isfile(self.path) and read_sealed(self.path) == raw:  # else replaced or deleted
                break

    def check(self, m):
        need(m.get("format") == "treering" and is_int(m.get("version"), 1, 1) and m.get("requires", []) == [])
        need(type(m.get("created")) is str and (created := CREATED.fullmatch(m["created"])), "created")
        try:
            need(1970 <= datetime.date.fromisoformat(created[1]).year <= 9998)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        need(type(m.get("software")) is dict and is_texts(list(m["software"].values())), "software")
        need(is_int(m.get("step", 0)), "step")
        if "base" in m:
            need(type(m["base"]) is dict and is_hex16(m["base"].get("xxh3")))
            check_name(m["base"].get("name"))
        self.metrics = decode_metrics(m.get("metrics", {}))
        check_json(m.get("metadata"), -(1 << 63), (1 << 64) - 1)
        self.metadata = with_floats(m.get("metadata"), m.get("metadata_floats", []))
        check_unknown(m, FIELDS)
        need(type(m.get("files")) is list, "files")
        for entry in m["files"]:
            check_file(entry)
        need(len({entry["name"] for entry in m["files"]}) == len(m["files"]), "a file twice")
        self.holders, self.layouts = m.get("holders", []), m.get("layouts", [])
        need(type(self.holders) is list and type(self.layouts) is list)
        for lists in self.holders:
            need(type(lists) is list and lists and all(type(holder) is list and holder for holder in lists))
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
                need(not is_delta(leaf) or "base" in m, "a difference without a base")
            else:
                need(leaf[0] == "value" and len(leaf) == 4 and type(leaf[2]) is str)
                self.values[leaf[1]] = decode_value(leaf[2], leaf[3])
            self.leaves[leaf[1]] = leaf
        if "placement" in m:
            check_placement(m["placement"], len(self.leaves))
        static = m.get("static", {})
        need(type(static) is dict and all(type(named) is dict for named in static.values()), "static")
        check_json(static, -(1 << 63), (1 << 64) - 1)
        for path, of_tree in itertools.zip_longest(self.leaves, paths_of(m.get("tree"))):
            need(path == of_tree, "another path")

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
                check_unknown(m, {"format", "version", "requires", "metrics", "xxh3"})
                metrics |= decode_metrics(m.get("metrics"))
                verdicts[name] = "valid"
            except (Damaged, Unsupported) as error:
                verdicts[name] = error.verdict
        return verdicts, metrics

    def pieces(self, leaf):
        """(file, name of the tensor, begin, shape) of each piece"""
        leaf = plain(leaf)
        _, path, _, _, shape, _, where = leaf
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
        if type(leaf[6]) is dict and not (is_states(leaf) or is_delta(leaf)):
            return "unsupported"
        pieces = list(self.pieces(leaf))
        kinds = [(plain(leaf)[3], shape) for *_, shape in pieces]
        if is_parted(leaf):
            kinds = [(("uint8", [p[0]]) if p else kind) for p, kind in zip(leaf[6]["parts"], kinds, strict=True)]
        verdicts = (file.verdict(name, *kind) for (file, name, *_), kind in zip(pieces, kinds, strict=True))
        found = next((verdict for verdict in verdicts if verdict != "valid"), "valid")
        if found == "valid" and is_delta(leaf):
            try:
                self.data(leaf)
            except (Damaged, Unsupported) as error:
                return error.verdict
        return found

    def data(self, leaf):
        """All elements of an array that is valid, in C order, normalised."""
        if is_delta(leaf):
            return normalised(self.with_difference(leaf), leaf[3])
        dtype, shape = leaf[3:5]
        if 0 in shape:
            return b""
        element = f"V{stored_as(dtype)[2]}"
        array = np.empty(shape, element)
        for file, name, begin, piece in self.pieces(leaf):
            place = tuple(slice(a, a + n) for a, n in zip(begin, piece, strict=True))
            array[place] = np.frombuffer(file.data(name), element).reshape(piece)
        return normalised(array.tobytes(), dtype)

    def with_difference(self, leaf):
        base, where = self.manifest["base"], leaf[6]
        folder = os.path.dirname(os.path.abspath(self.directory))
        if not os.path.exists(os.path.join(folder, base["name"])):
            folder = os.path.dirname(folder)
        try:
            other = Checkpoint(os.path.join(folder, base["name"]))
        except ValueError as error:
            raise Damaged(str(error)) from None
        old = other.leaves.get(leaf[1])
        old = other.leaves[old[6]] if old and type(old[6]) is str else old
        if other.checksum != base["xxh3"] or not old or old[3:5] != leaf[3:5] or other.verdict(old) != "valid":
            raise Damaged("another base")
        before = other.data(old)
        if not is_parted(leaf):
            described = [where[name] for name in ("count", "gap", "base", "xxh3")]
            return applied(before, self.data(plain(leaf)), leaf[3], *described)
        element = f"V{stored_as(leaf[3])[2]}"
        array = np.frombuffer(bytearray(before), element).reshape(leaf[4])
        for (file, name, begin, shape), part in zip(self.pieces(leaf), where["parts"], strict=True):
            place = tuple(slice(a, a + n) for a, n in zip(begin, shape, strict=True))
            data = file.data(name) if math.prod(shape) else b""
            if part is not None:
                data = applied(array[place].tobytes(), data if part[0] else b"", leaf[3], *part[1:])
            array[place] = np.frombuffer(data, element).reshape(shape)
        return array.tobytes()

    def states(self, leaf, data):
        ends = list(itertools.accumulate(leaf[6]["lengths"], initial=0))
        return [unpack(data[a:b]) for a, b in itertools.pairwise(ends)]

    def verdict_of_states(self, leaf):
        if (found := self.verdict(leaf)) != "valid":
            return found
        try:
            self.states(leaf, self.data(leaf))
        except Unsupported:
            return "unsupported"
        return {"type": "iterator", "value": leaf[6]["lengths"]}

    def contents(self):
        """path -> value or array"""
        result = {}
        for path, leaf in self.leaves.items():
            if leaf[0] == "value":
                result[path] = self.values[path]
            elif type(leaf[6]) is str:
                result[path] = result[leaf[6]]
            elif (verdict := self.verdict(leaf)) == "valid":
                data = self.data(leaf)
                result[path] = self.states(leaf, data) if is_states(leaf) else to_numpy(data, leaf[3], leaf[4])
            else:
                raise (Damaged if verdict == "damaged" else Unsupported)(f"{path!r} is {verdict}")
        return result


# What others call


def examine(directory):
    """Returns the verdicts of the checkpoint and its leaves, the contents of valid leaves, and the late metrics."""
    result = {"checkpoint": "valid", "leaves": {}, "metrics": {}, "late": {}}
    try:
        checkpoint = Checkpoint(directory)
    except (Damaged, Unsupported) as error:
        return result | {"checkpoint": error.verdict}
    result["late"], result["metrics"] = checkpoint.late()
    for path, leaf in checkpoint.leaves.items():
        if leaf[0] == "value":
            found = {"type": leaf[2], "value": leaf[3]}
        elif type(leaf[6]) is str:
            found = result["leaves"][leaf[6]]
        elif is_states(leaf):
            found = checkpoint.verdict_of_states(leaf)
        elif (found := checkpoint.verdict(leaf)) == "valid":
            checksum = xxhash.xxh3_64_hexdigest(checkpoint.data(leaf))
            found = dict(zip(("type", "dtype", "shape", "impl"), leaf[2:6], strict=True)) | {"xxh3": checksum}
        result["leaves"][path] = found
    return result


def read(directory):
    """path -> value or array; raises for what is damaged or unsupported."""
    return Checkpoint(directory).contents()


def tree(directory):
    """The same as containers: classes are lists or dicts."""
    checkpoint = Checkpoint(directory)
    return build_tree(checkpoint.manifest["tree"], checkpoint.contents().values())


def metrics(directory):
    """name -> float, those that were found later included."""
    return Checkpoint(directory).late()[1]


def steps(directory, prefix=None):
    """The numbers of the steps of a run, in order."""
    names = [n for n in os.listdir(directory) if os.path.isfile(os.path.join(directory, n, "treering.json"))]

    def found(prefix):
        matches = [(n, re.fullmatch(re.escape(prefix) + "([0-9]+)", n)) for n in names]
        return sorted((int(m[1]), n) for n, m in matches if m and int(m[1]) <= LIMIT)

    result = found("step-" if prefix is None else prefix)
    if prefix is None and not result:
        matches = [re.fullmatch(r"(.*?)[0-9]{8,}", n, re.DOTALL) for n in names]
        prefixes = sorted({m[1] for m in matches if m})
        if len(prefixes) > 1:
            raise ValueError(f"several prefixes: {prefixes}")
        result = found(prefixes[0]) if prefixes else []
    for (a, name), (b, other) in itertools.pairwise(result):
        if a == b:
            raise ValueError(f"one step twice: {name!r} and {other!r}")
    return [step for step, _ in result]
