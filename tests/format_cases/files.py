"""Cases of array files: their names, their headers, and damage to them."""

import copy
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from xxhash import xxh3_64_hexdigest as checksum

from .drafts import ArrayFile, Case, Change, Draft, base, changed, cut, numbered, refused


def files() -> Iterator[Case]:
    def renamed(name: Any) -> Change:
        return lambda d: d.files.update({name: d.files.pop("a.safetensors")})

    for name in ("no extension", "a" * 255, "ä😀", "..a"):
        yield Case(
            f"file-name-{len(name)}-{checksum(name.encode())[:4]}",
            "an array file by an unusual name",
            changed(base, renamed(name)),
        )
    bad: list[tuple[str, Change]] = []
    for name in ("../a", "/etc/passwd", ".", "..", "", "a/b", "a\\b", "a\0b", "a" * 256, "ä" * 128, "treering.json"):
        bad.append((f"the name {name[:20]!r}", renamed(name)))
    for field, each in {
        "size": (-1, 1.0, "5", None, 2**53 + 1, 2**70, True),
        "header": (-1, 7, 2**40, 100_000_009, "5", None),
        "name": (None, 5),
    }.items():
        bad += [
            (f"the {field} {value!r}", lambda d, f=field, v=value: d.files["a.safetensors"].listed.update({f: v}))
            for value in each
        ]
    for value in (None, "", "0" * 15, "0" * 17, "G" * 16, "ABCDEF0123456789", 5):
        bad.append((f"the checksum {value!r}", lambda d, v=value: d.files["a.safetensors"].listed.update(xxh3=v)))
    bad.append(("a size below that of its header", lambda d: d.files["a.safetensors"].listed.update(size=9)))
    bad.append(("the number 1, which is not listed", lambda d: d.leaves[0].__setitem__(6, 1)))
    bad.append(("the number -1", lambda d: d.leaves[0].__setitem__(6, -1)))
    bad.append(("the number 0.0", lambda d: d.leaves[0].__setitem__(6, 0.0)))
    bad.append(("the number true", lambda d: d.leaves[0].__setitem__(6, False)))
    bad.append(("no number", lambda d: d.leaves[0].__setitem__(6, None)))
    bad.append(("no entry", lambda d: d.fields.update(files=[])))
    bad.append(("null in the place of a list", lambda d: d.fields.update(files=None)))
    for name, (about, change) in zip(numbered("bad-file", len(bad)), bad, strict=True):
        yield refused(name, f"an array file with {about}", base, change)
    twice = base()
    twice.fields["files"] = twice.manifest()["files"] * 2
    yield Case("file-twice", "one array file is listed twice", twice, "unsupported")
    unused = changed(base, lambda d: d.files.update({"more": ArrayFile()}))
    yield Case("file-unused", "an array file that no leaf lies in", unused)
    yield Case(
        "file-unused-lost", "an array file that no leaf lies in is not there", changed(unused_draft, lambda d: None)
    )


def unused_draft() -> Draft:
    draft = changed(base, lambda d: d.files.update({"more": ArrayFile()}))
    draft.missing = frozenset({"more"})
    return draft


def headers() -> Iterator[Case]:
    def of(change: Callable[[ArrayFile], object]) -> Change:
        return lambda d: change(d.files["a.safetensors"])

    def case(name: str, about: str, change: Callable[[ArrayFile], object], *paths: str) -> Case:
        return Case(f"header-{name}", about, changed(base, of(change)), leaves=dict.fromkeys(paths, "unsupported"))

    both = ("a", "b")
    yield case("padded", "spaces after the JSON", lambda f: setattr(f, "text", lambda t: t + b" " * 100))
    yield case("aligned", "the buffer at a multiple of 4096", lambda f: setattr(f, "text", lambda t: t.ljust(4088)))
    yield case(
        "blanks",
        "spaces and line breaks in the JSON",
        lambda f: setattr(f, "text", lambda t: t.replace(b",", b" ,\n ")),
    )
    yield case("odd", "the buffer at an odd place", lambda f: setattr(f, "text", lambda t: t + b" " * (1 - len(t) % 2)))
    yield case("escapes", "names with escapes", lambda f: setattr(f, "text", lambda t: t.replace(b'"a"', b'"\\u0061"')))
    yield case(
        "order", "the tensors in another order", lambda f: setattr(f, "header", dict(reversed(f.header.items())))
    )
    yield case(
        "more-fields", "fields that nobody knows", lambda f: (f.header["a"].update(more=1), f.metadata.update(note="x"))
    )
    yield case("more-tensors", "a tensor that no leaf names", lambda f: f.add("zz", "int8", [1], b"\0"))
    yield case(
        "more-odd",
        "a tensor of an unknown dtype that no leaf names",
        lambda f: (f.add("zz", "int8", [1], b"\0"), f.header["zz"].update(dtype="X9")),
    )
    for name, key, value in [("next", "format", "next"), ("no-format", "format", None), ("version-2", "version", "2"), ("no-version", "version", None),
                             ("version-number", "version", 1), ("requires", "requires", "zstd"), ("requires-empty", "requires", ""),("block", "block", "4096"), ("no-block", "block", None),
                             ("no-checksums", "xxh3", None), ("checksums", "xxh3", ""), ("checksums-more", "xxh3", "0" * 32),
                             ("checksums-upper", "xxh3", "ABCDEF0123456789"), ("number", "note", 5)]:  # fmt: skip
        yield case(
            name, f"the metadata has {key}: {value!r}", lambda f, k=key, v=value: f.metadata.update({k: v}), *both
        )
    texts: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("twice", "a tensor stands twice", lambda t: t[:-1] + b',"a":{"dtype":"I32","shape":[3],"data_offsets":[0,12]}}'),
        ("twice-other", "a tensor stands twice, as another", lambda t: t[:-1] + b',"a":{"dtype":"I32","shape":[3],"data_offsets":[12,24]}}'),
        ("field-twice", "a field of a tensor stands twice", lambda t: t.replace(b'{"dtype":"I32"', b'{"dtype":"I8","dtype":"I32"')),
        ("shape-twice", "one shape stands twice, one is missing", lambda t: t.replace(b'"shape":[3]', b'"shape":[3],"shape":[3]').replace(b',"shape":[2,2]', b"")),
        ("escaped-twice", "a tensor stands twice, once with an escape", lambda t: t[:-1] + b',"\\u0061":{"dtype":"I32","shape":[3],"data_offsets":[0,12]}}'),
        ("metadata-twice", "a key of the metadata stands twice", lambda t: t.replace(b'"block":', b'"block":"1","block":')),
        ("metadata-key-twice", "the metadata stand twice", lambda t: b'{"__metadata__":{"format":"treering","version":"1"},' + t[1:]),
        ("blank-twice", "a key stands twice, once before a blank", lambda t: t.replace(b'{"dtype":"I32"', b'{"dtype" :"I8","dtype":"I32"')),
        ("cut", "the JSON is cut off", lambda t: t[:-2]), ("before", "a space before the JSON", lambda t: b" " + t), ("newline", "a line break after the JSON", lambda t: t + b"\n"),("list", "the JSON is a list", lambda t: b"[" + t + b"]"),
        ("after", "something follows the JSON", lambda t: t + b" {}"),
        ("nan", "a number that is none", lambda t: t.replace(b'"shape":[3]', b'"shape":[NaN]')),
        ("encoding", "text that is not UTF-8", lambda t: t.replace(b'"a":', b'"\xff":')),
        ("encoding-unknown", "text that is not UTF-8 in a field nobody knows", lambda t: t.replace(b'{"dtype":"I32"', b'{"more":"\xff","dtype":"I32"')),
        ("surrogate", "half of a surrogate pair in the metadata", lambda t: t.replace(b'"block":', b'"note":"\\udc00","block":')),
        ("minus-zero", "an offset that is -0", lambda t: t.replace(b"[0,12]", b"[-0,12]")),("no-metadata", "there is no metadata", lambda t: b"{" + t[t.index(b'"a":'):]),
        ("no-dtype", "a tensor has no dtype", lambda t: t.replace(b'"dtype":"I32",', b"")),
        ("no-shape", "a tensor has no shape", lambda t: t.replace(b'"shape":[3],', b"")),
        ("no-offsets", "a tensor has no offsets", lambda t: t.replace(b',"data_offsets":[0,12]', b"")),
    ]  # fmt: skip
    for name, about, change in texts:
        yield case(name, f"header: {about}", lambda f, c=change: setattr(f, "text", c), *both)
    for name, about, offsets, buffer in [
        ("overlap", "two tensors share bytes", [4, 16], b""), ("hole", "a hole between two tensors", [0, 8], b""),
        ("short", "the tensors end before the file", [0, 12], b"\0"), ("long", "a tensor ends behind the file", [0, 99], b""),
        ("negative", "a tensor begins before the buffer", [-12, 0], b""), ("backwards", "a tensor ends before it begins", [12, 0], b""),
        ("one-offset", "a tensor has one offset", [12], b""), ("huge-offset", "an offset beyond 2^64", [0, 2**70], b""),
    ]:  # fmt: skip
        yield case(
            name,
            about,
            lambda f, o=offsets, b=buffer: (f.header["a"].update(data_offsets=o), setattr(f, "buffer", f.buffer + b)),
            *both,
        )
    yield case("size", "the offsets of two tensors, side by side, do not fit their shapes", lambda f: (
        f.header["a"].update(data_offsets=[0, 16]), f.header["b"].update(data_offsets=[16, 44])), *both)  # fmt: skip
    yield case("missing", "a leaf has no tensor", lambda f: f.header.update(c=f.header.pop("a")), "a")
    yield case("code", "a tensor of another dtype of the same size", lambda f: f.header["a"].update(dtype="F32"), "a")
    yield case(
        "told-needlessly",
        "a dtype is told of a tensor that has its own",
        lambda f: f.metadata.update({"dtype:a": "int32"}),
        "a",
    )
    yield case(
        "told-of-none",
        "a dtype is told of a tensor that is not there",
        lambda f: f.metadata.update({"dtype:zz": "int4"}),
    )
    for name, dtype in [("untold", None), ("told-other", "uint4"), ("told-uint8", "uint8"), ("told-empty", "")]:
        draft = Draft().array("x", "int4", [2], b"\x01\xff").value("v", "int", 1)
        draft.files["a.safetensors"].metadata["dtype:x"] = dtype
        about = f"the dtype of an int4 array is told as {dtype!r}"
        yield Case(f"header-{name}", about, draft, leaves={"x": "unsupported"})
    draft = Draft().array("x", "uint8", [2], b"\x01\xff")
    draft.files["a.safetensors"].metadata["dtype:x"] = "uint8"
    yield Case("header-told-bytes", "a dtype is told of an uint8 array", draft, leaves={"x": "unsupported"})
    sizes = [
        ("length", lambda data: struct.pack("<Q", 1) + data[8:]),
        ("length-huge", lambda data: b"\xff" * 8 + data[8:]),
    ]
    for name, change in sizes:
        draft = base()
        data, header = draft.files["a.safetensors"].bytes()
        other = change(data)
        draft.files["a.safetensors"].damage = lambda _, other=other: other
        draft.files["a.safetensors"].listed["xxh3"] = checksum(other[:header])
        yield Case(
            f"header-{name}",
            "sealed, but the length in the header is another",
            draft,
            leaves=dict.fromkeys(both, "unsupported"),
        )
    draft = base()
    draft.files["a.safetensors"].listed = {"header": 20, "xxh3": checksum(draft.files["a.safetensors"].bytes()[0][:20])}
    yield Case(
        "header-part",
        "the manifest names a part of the header, sealed",
        draft,
        leaves=dict.fromkeys(both, "unsupported"),
    )
    draft = Draft()
    draft.array("x", "uint8", [(1 << 20) + 5], bytes(itertools.islice(itertools.cycle(range(251)), (1 << 20) + 5)))
    draft.array("y", "uint8", [4], b"abcd")
    yield Case("blocks", "a buffer of two blocks", draft)
    bad = copy.deepcopy(draft)
    bad.files["a.safetensors"].damage = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    yield Case("blocks-damaged", "the second of two blocks is damaged", bad, leaves={"x": "damaged", "y": "damaged"})


def damage() -> Iterator[Case]:
    def of(change: Callable[[bytes], bytes]) -> Change:
        return lambda d: setattr(d, "damage", change)

    manifests: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("empty", lambda t: b""), ("cut", lambda t: t[:-1]), ("half", lambda t: t[: len(t) // 2]), ("longer", lambda t: t + b"\n"),
        ("flip", lambda t: t.replace(b"1.5]", b"1.4]")), ("digit", lambda t: t[:-4] + bytes([t[-4] ^ 1]) + t[-3:]),
        ("tail", lambda t: t[:-28] + b"}\n"), ("upper", lambda t: t[:-19] + t[-19:-3].upper() + t[-3:] if t[-19:-3].upper() != t[-19:-3] else b""),
        ("zeros", lambda t: bytes(len(t))), ("crlf", lambda t: t[:-1] + b"\r\n"), ("version-2-flip", lambda t: t.replace(b'"version":1', b'"version":2')),
        ("tail-only", lambda t: t[-28:]), ("short", lambda t: t[-27:]), ("space", lambda t: t[:-1] + b" \n"),
    ]  # fmt: skip
    for name, change in manifests:
        yield Case(f"damaged-manifest-{name}", f"the manifest is damaged: {name}", changed(base, of(change)), "damaged")
    parts: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("cut", lambda t: t[:-1]), ("longer", lambda t: t + b"\0"), ("empty", lambda t: b""), ("buffer", lambda t: t[:-1] + bytes([t[-1] ^ 1])),
        ("header", lambda t: t.replace(b'"I16"', b'"U16"')), ("length", lambda t: bytes([t[0] ^ 1]) + t[1:]), ("zeros", lambda t: bytes(len(t))),
        ("version-2-flip", lambda t: t.replace(b'"version":"1"', b'"version":"2"')),
    ]  # fmt: skip
    for name, change in parts:
        draft = changed(cut, lambda d, c=change: setattr(d.files["0.safetensors"], "damage", c))
        leaves = {"s": "damaged", "w": "damaged"}
        yield Case(f"damaged-file-{name}", f"an array file is damaged: {name}", draft, leaves=leaves)
    lost = changed(cut, lambda d: setattr(d, "missing", frozenset({"1.safetensors"})))
    yield Case("damaged-file-lost", "an array file is not there", lost, leaves={"s": "damaged"})
    other = changed(cut, lambda d: d.files["1.safetensors"].listed.update(xxh3="0" * 16))
    yield Case("damaged-file-other", "an array file is not the one that is listed", other, leaves={"s": "damaged"})
    mixed = (
        base().array("x", "int8", [1], b"\1", file="b.safetensors").array("y", "int8", [1], b"\1", file="c.safetensors")
    )
    mixed.files["b.safetensors"].damage = lambda data: data[:-1]
    mixed.files["c.safetensors"].metadata["version"] = "2"
    yield Case(
        "damaged-and-later",
        "one file is damaged, another of a later version",
        mixed,
        leaves={"x": "damaged", "y": "unsupported"},
    )
    hollow = Draft().array("x", "int8", [0], b"").array("y", "int8", [1], b"\1")
    hollow.files["a.safetensors"].damage = lambda data: data[:-1]
    yield Case(
        "damaged-file-hollow",
        "an array without elements lies in a damaged file",
        hollow,
        leaves={"x": "damaged", "y": "damaged"},
    )
