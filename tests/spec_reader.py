"""An independent reader of the format, written from `docs/format.md` alone. Every violation is a `ValueError`."""

import base64
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
from xxhash import xxh3_64_hexdigest as checksum

STORED = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
STORED |= {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
STORED |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
WIDE = r"complex128|(datetime64|timedelta64)(\[\w+\])?|<U\d+|\|S\d+"  # stored as U8 with a last axis of bytes
COUNTED, NAMED = {"list": list, "tuple": tuple, "positional": list}, ("dict", "namedtuple", "object")


def read(directory) -> dict[str, object]:
    """Path -> NumPy array (`uint32` for typed PRNG keys) or Python value (`None` for functions)."""
    return _load(directory)[0]


def tree(directory):
    """The containers with their leaves: named tuples and objects as dicts, positional ones as lists."""
    return _load(directory)[1]


def _load(directory):
    try:
        return _checkpoint(Path(directory))
    except Exception as error:
        raise ValueError(f"{directory} is damaged or no checkpoint: {type(error).__name__}: {error}") from error


def _check(condition, message):
    if not condition:
        raise ValueError(message)


def _object(items):
    _check(len(dict(items)) == len(items), f"an object holds a key twice: {[key for key, _ in items]}")
    return dict(items)


def _checkpoint(directory):
    data = (directory / "treering.json").read_bytes()
    _check(data[-28:] == b',"xxh3":"%s"}\n' % checksum(data[:-28]).encode(), "the manifest's checksum does not match")
    manifest = json.loads(data.decode(), object_pairs_hook=_object)
    _check((manifest["format"], manifest["version"]) == ("treering", 1), f"not version 1 but {manifest['version']!r}")
    _check(not manifest.get("requires"), f"needs unknown features: {manifest.get('requires')}")
    files = {i: _file(directory, **entry) for i, entry in enumerate(manifest["files"])}
    layouts, arrays, values = dict(enumerate(manifest.get("layouts", []))), {}, {}
    for kind, path, *what in sorted(manifest["leaves"], key=lambda leaf: isinstance(leaf[-1], str)):  # ties last
        _check(len(what) == {"array": 5, "value": 2}.get(kind), f"unknown leaf {kind!r}, {path!r}, {what}")
        _check(path not in values, f"two leaves have the path {path!r}")
        if kind == "value":
            values[path] = _value(*what)
        elif isinstance(what[4], str):
            _check(arrays.get(what[4]) == what[:4], f"{path!r} is tied to {what[4]!r}, which is no such array")
            values[path] = values[what[4]]
        else:
            arrays[path], values[path] = what[:4], _array(path, *what, files, layouts)
    leaves = {leaf[1]: values[leaf[1]] for leaf in manifest["leaves"]}
    nodes, pending = iter(manifest["tree"]), iter(leaves.items())
    root = _node(nodes, pending, [])
    _check(not [*nodes, *pending], "nodes or leaves are left over at the end of the tree")
    return leaves, root


def _node(nodes, leaves, above):
    if (node := next(nodes)) == 0:
        path, value = next(leaves)
        _check(path == "/".join(above), f"{path!r} is found at {'/'.join(above)!r} in the tree")
        return value
    kind, _, keys = node
    keys = [_value(*key) if isinstance(key, list) else key for key in (range(keys) if kind in COUNTED else keys)]
    texts = [key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key) for key in keys]
    children = [_node(nodes, leaves, [*above, text.replace("~", "~0").replace("/", "~1")]) for text in texts]
    _check(kind in COUNTED or (kind in NAMED and len(set(keys)) == len(keys)), f"unknown kind or a key twice: {node}")
    return COUNTED[kind](children) if kind in COUNTED else dict(zip(keys, children, strict=True))


def _file(directory, *, name, size, header, xxh3, **_):
    data = (directory / name).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    _check(len(data) == size >= start == header, f"{name}: the file or its header has another size")
    _check(checksum(data[:start]) == xxh3, f"{name}: the header is damaged: its checksum does not match")
    tensors, buffer = json.loads(data[8:start].decode(), object_pairs_hook=_object), memoryview(data)[start:]
    meta = tensors.pop("__metadata__")
    _check((meta["format"], meta["version"], start % 4096) == ("treering", "1", 0), f"{name}: not version 1")
    blocks = [buffer[i : i + int(meta["block"])] for i in range(0, len(buffer), int(meta["block"]))]
    _check("".join(map(checksum, blocks)) == meta["xxh3"], f"{name}: damaged: a block's checksum does not match")
    begins, ends = zip([0, 0], *sorted(tensor["data_offsets"] for tensor in tensors.values()), strict=True)
    _check((*begins[1:], len(buffer)) == ends, f"{name}: the tensors overlap or do not fill the file")
    return tensors, meta, buffer


def _array(path, kind, dtype, shape, impl, where, files, layouts):
    known = rf"(jax|jax-weak|numpy|numpy-scalar) (bool|b?float\w+|u?int\d+|complex64|{WIDE}) |key uint32 .+"
    _check(re.fullmatch(known, f"{kind} {dtype} {impl}"), f"{path!r}: unknown array {kind!r} {dtype!r} {impl!r}")
    array, seen = np.empty(shape, getattr(ml_dtypes, dtype, dtype)), np.zeros(shape, bool)
    whole, names = [[0, size] for size in shape], {"__metadata__": "__metadata__~@"}
    if not isinstance(where, list):
        layouts, where = {0: {"boxes": [whole], "files": [[where]]}}, [0, 0]
    layout, turn = layouts[where[0]], where[1]
    for box, among in zip(layout["boxes"], layout["files"], strict=True):
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))
        part = (*(slice(*bounds) for bounds in box), ...)  # `...` keeps it an array
        _check(inside and not seen[part].any(), f"{path!r}: the box {box} lies outside of {shape} or over another")
        name = f"{path}~@{','.join(str(start) for start, _ in box)}" if box != whole else names.get(path, path)
        array[part], seen[part] = _tensor(*files[among[turn % len(among)]], name, dtype, array[part]), True
    _check(seen.all(), f"{path!r}: its pieces do not cover it")
    return array


def _tensor(tensors, meta, buffer, name, dtype, like):
    tensor, (begin, end) = tensors[name], tensors[name]["data_offsets"]
    stored = STORED.get(tensor["dtype"]) if dtype == "uint8" or tensor["dtype"] != "U8" else meta.get(f"dtype:{name}")
    _check(stored == dtype, f"{name!r}: {tensor['dtype']} ({stored}) is stored for {dtype}")
    shape = [*like.shape, like.itemsize] if re.fullmatch(WIDE, dtype) else [*like.shape]
    _check(tensor["shape"] == shape and end - begin == like.nbytes, f"{name!r}: {tensor} does not fit {like.shape}")
    array = np.ndarray(like.shape, like.dtype, bytes(buffer[begin:end]))
    if narrow := re.fullmatch(r"(u?int)[24]", dtype):
        codes = array.view(narrow[1] + "8")
        array = codes.astype(like.dtype)
        _check((array.astype(codes.dtype) == codes).all(), f"{name!r}: bytes out of range for {dtype}")
    return array


def _value(kind, value):
    match kind, value:
        case ("none", None) | ("function", str()):
            return None
        case ("bool", True | False) | ("str", str()):
            return value
        case ("int", int()) if not isinstance(value, bool) and abs(value) <= 2**53:
            return value
        case ("int", str()) if re.fullmatch(r"-?0x[0-9a-f]+", value):
            return int(value, 16)
        case ("float", int() | float()) if not isinstance(value, bool) and np.isfinite(value):
            return float(value)
        case ("float", str()) if re.fullmatch(r"-?inf|nan(:[7f]ff(?!0{13})[0-9a-f]{13})?", value):
            return float(np.uint64(int(value[4:], 16)).view(np.float64) if value[3:4] == ":" else value)
        case ("complex", [real, imaginary]):
            return complex(_value("float", real), _value("float", imaginary))
        case ("bytes", str()):
            return base64.b64decode(value, validate=True)
        case ("iterator", ["each" | "all" as which, [_, *more] as states]) if which == "each" or not more:
            return [_state(*state) for state in states]
    raise ValueError(f"unknown value: {kind!r}, {value!r}")


def _state(kind, value):
    match kind, value:
        case "dict", [*items]:
            return {_state(*key): _state(*item) for key, item in items}
        case "list" | "tuple", [*items]:
            return {"list": list, "tuple": tuple}[kind](_state(*item) for item in items)
        case "array", [bool(is_array), dtype, shape, data]:
            kind = getattr(ml_dtypes, dtype, dtype)
            array = np.frombuffer(base64.b64decode(data, validate=True), kind).reshape(shape)
            return array if is_array else array[()]
    return _value(kind, value)


def metrics(directory):
    """Name -> float: the manifest's metrics with those that were found later."""
    manifest = (directory / "treering.json").read_bytes()
    found = {name: _value("float", value) for name, value in json.loads(manifest).get("metrics", {}).items()}
    for path in sorted(directory.glob(f"metrics-{checksum(manifest)}-*.json")):
        data = path.read_bytes()
        _check(data[-28:] == b',"xxh3":"%s"}\n' % checksum(data[:-28]).encode(), "the checksum does not match")
        found |= {name: _value("float", value) for name, value in json.loads(data)["metrics"].items()}
    return found
