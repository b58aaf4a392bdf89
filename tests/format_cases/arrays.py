"""Cases of arrays: dtypes, shapes, pieces, and the files of the pieces."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from .drafts import ArrayFile, Case, Change, Draft, base, changed, cut, numbered, refused


def samples() -> dict[str, np.ndarray]:
    """Returns a small array of every dtype."""
    found: dict[str, np.ndarray] = {"bool": np.array([True, False, True])}
    for name in ["int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]:
        if hasattr(ml_dtypes, name):
            found[name] = np.array([0, 1]).astype(getattr(ml_dtypes, name))
    for name in ["e5m2", "e4m3fn", "e8m0fnu", "e5m2fnuz", "e4m3fnuz", "e3m4", "e4m3", "e4m3b11fnuz"]:
        found[f"float8_{name}"] = np.array([1, 0.5, 2]).astype(getattr(ml_dtypes, f"float8_{name}"))
    for name in ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]:
        found[name] = np.array([np.iinfo(name).min, 1, np.iinfo(name).max], name)
    for name in ["float16", "float32", "float64", "complex64", "complex128"]:
        found[name] = np.array([1.5, -0.0, np.nan, np.inf]).astype(name)
    found["bfloat16"] = np.array([1.5, -0.0, np.nan]).astype(ml_dtypes.bfloat16)
    for name in ("complex32", "bcomplex32"):
        if hasattr(ml_dtypes, name):
            found[name] = np.array([1.5 - 2j]).astype(getattr(ml_dtypes, name))
    for unit in [
        "",
        "[Y]",
        "[M]",
        "[W]",
        "[D]",
        "[h]",
        "[m]",
        "[s]",
        "[ms]",
        "[us]",
        "[ns]",
        "[ps]",
        "[fs]",
        "[as]",
        "[25s]",
    ]:
        found[f"datetime64{unit}"] = np.array([1, -1, np.iinfo("int64").min], "<i8").view(f"datetime64{unit}")
    found["timedelta64[s]"] = np.array([60], "<i8").view("timedelta64[s]")
    found["<U3"] = np.array(["a", "äöü", ""], "<U3")
    found["|S2"] = np.array([b"ab", b"c"], "|S2")
    return found


def dtypes() -> Iterator[Case]:
    for name, array in samples().items():
        if name in ("int1", "int2", "int4", "uint1", "uint2", "uint4"):
            array = array.astype(np.int8)  # sign-extended
        draft = Draft().array("x", name, list(array.shape), array.tobytes())
        yield Case(f"dtype-{name.replace('<', '').replace('|', '')}", f"an array of {name}", draft)
    for key, shape in [("threefry2x32", [2]), ("rbg", [3, 4])]:
        data = np.arange(np.prod(shape), dtype="<u4").tobytes()
        yield Case(
            f"dtype-key-{key}", f"PRNG keys of {key}", Draft().array("k", "uint32", shape, data, type="key", impl=key)
        )
    for type in ("jax", "jax-weak", "numpy", "numpy-scalar"):
        yield Case(
            f"type-{type}", f"an array of the type {type}", Draft().array("x", "float32", [], b"\0\0\x80?", type=type)
        )
    unused = [
        ("int4", b"\xff\x07", b"\x0f\x17"),
        ("uint4", b"\x0f\x01", b"\xff\x21"),
        ("int2", b"\xfe\x01", b"\x06\x01"),
    ]
    unused += [
        ("float4_e2m1fn", b"\x0f\x01", b"\xff\x31"),
        ("float6_e2m3fn", b"\x3f\x01", b"\xff\x41"),
        ("bool", b"\x01\0", b"\x02\0"),
    ]
    for name, data, stored in unused:
        about = f"an array of {name} whose unused bits are set"
        yield Case(f"unused-bits-{name}", about, Draft().array("x", name, [2], data, stored=stored))
    bad = [
        "int7",
        "float33",
        "object",
        "",
        "Float32",
        "int32 ",
        ">i4",
        "f4",
        "datetime64[x]",
        "datetime64[1s]",
        "datetime64[01s]",
    ]
    bad += ["datetime64[]", "<U0", "<U03", "<U", "|S", "|S-1", "<U1234567890", "string", "complex256", 4, None, "int٨"]
    for name, dtype in zip(numbered("bad-dtype", len(bad)), bad, strict=True):
        yield refused(name, f"an array of the dtype {dtype!r}", base, lambda d, t=dtype: d.leaves[0].__setitem__(3, t))


def shapes() -> Iterator[Case]:
    for name, shape in [
        ("scalar", []),
        ("empty", [0]),
        ("empty-rows", [0, 3]),
        ("empty-columns", [3, 0]),
        ("axes", [1] * 64),
    ]:
        data = b"\x07" * int(np.prod(shape, dtype=int))
        yield Case(f"shape-{name}", f"an array of the shape {shape}", Draft().array("x", "uint8", shape, data))
    yield Case(
        "shape-long", "an array without elements and of great length", Draft().array("x", "uint8", [0, 2**53], b"")
    )
    bad: list[Any] = [
        [0, 2**53, 2**10],
        [2**53, 0, 2**10],
        [-1],
        [1] * 65,
        [2**61, 0],
        [2**40, 2**40],
        [3.0],
        [True, 3],
        "3",
        3,
        None,
        [[3]],
        [2**70],
    ]
    for name, shape in zip(numbered("bad-shape", len(bad)), bad, strict=True):
        yield refused(
            name, f"an array of the shape {json.dumps(shape)}", base, lambda d, s=shape: d.leaves[0].__setitem__(4, s)
        )
    for name, row in [
        ("shape", [4, "int32"]),
        ("flat", [2, "float64"]),
        ("dtype", [3, "uint32"]),
        ("narrow", [12, "int4"]),
        ("wide", [3, "float32"]),
    ]:
        draft = base()
        draft.leaves[0][4], draft.leaves[0][3] = [row[0]], row[1]
        about = "a tensor of another dtype or shape than its leaf has"
        draft.content["a"] = "unsupported"
        if name == "flat":
            draft = base()
            draft.leaves[1][4] = [4]
            draft.content["b"] = "unsupported"
        yield Case(f"other-tensor-{name}", about, draft)


def layouts() -> Iterator[Case]:
    yield Case("layout", "an array in four pieces of two files, one of them by its turn", cut())
    informed = changed(
        cut, lambda d: d.fields["layouts"][0].update(sharding={"mesh": {"x": 2, "y": 2}, "spec": ["x", ["y"]]})
    )
    yield Case("layout-sharding", "the mesh and the spec are recorded", informed)
    yield Case(
        "layout-unused",
        "layouts and holders that no leaf has",
        changed(base, lambda d: d.fields.update(cut().fields, holders=[[[0]] * 4])),
    )
    yield Case("layout-turn", "a great turn", changed(cut, lambda d: d.leaves[0].__setitem__(6, [0, 2**53 - 1])))
    one = changed(base, lambda d: d.fields.update(layouts=[{"cuts": [[0, 3]], "holders": 0}], holders=[[[0]]]))
    one.leaves[0][6] = [0, 0]
    yield Case("layout-one-piece", "a layout of one piece, whose tensor has the name of the leaf", one)
    scalar = Draft(fields={"layouts": [{"cuts": [], "holders": 0}], "holders": [[[0]]]}).array("x", "int8", [], b"\x05")
    scalar.leaves[0][6] = [0, 0]
    yield Case("layout-scalar", "a layout of an array without axes", scalar)
    empty = Draft(fields={"layouts": [{"cuts": [[0, 0], [0, 2, 4]], "holders": 0}], "holders": [[[0], [0]]]})
    empty.child("x")
    empty.leaves.append(["array", "x", "jax", "int8", [0, 4], "", [0, 0]])
    empty.found("x", "jax", "int8", [0, 4], "", b"")
    empty.files["a"] = ArrayFile()
    for start in (0, 2):
        empty.files["a"].add(f"x~@0,{start}", "int8", [0, 2], b"")
    yield Case("layout-empty", "an array without elements in two pieces", empty)
    lost = copy.deepcopy(empty)
    lost.files["a"].header.pop("x~@0,2")
    yield Case("layout-empty-lost", "a piece without elements has no tensor", lost, leaves={"x": "unsupported"})
    key = Draft(fields={"layouts": [{"cuts": [[0, 1, 2], [0, 2]], "holders": 0}], "holders": [[[0], [0]]]})
    key.child("k")
    key.leaves.append(["array", "k", "key", "uint32", [2, 2], "threefry2x32", [0, 0]])
    words = np.arange(4, dtype="<u4")
    key.found("k", "key", "uint32", [2, 2], "threefry2x32", words.tobytes())
    key.files["a"] = ArrayFile()
    for n in range(2):
        key.files["a"].add(f"k~@{n},0", "uint32", [1, 2], words[2 * n : 2 * n + 2].tobytes())
    yield Case("layout-keys", "keys in two pieces", key)
    swapped = changed(cut, lambda d: d.fields["holders"].__setitem__(0, [[1], [0], [0, 1], [1]]))
    yield Case(
        "layout-elsewhere", "pieces that lie in other files than it is said", swapped, leaves={"s": "unsupported"}
    )
    bad: list[tuple[str, Change]] = []
    for cuts in ([[0, 1, 3]], [[0, 1, 3], [0, 2, 4], [0, 1]], [[0, 1, 3], [0, 2, 2, 4]], [[0, 1, 3], [0, 3, 2, 4]], [[1, 3], [0, 2, 4]],
                 [[0, 1, 4], [0, 2, 4]], [[0, 1, 3], [0, 2, 3]], [[0, 1, 3], [0]], [[0, 1, 3], []], [[0, -1, 3], [0, 2, 4]],
                 [[0, 1.0, 3], [0, 2, 4]], [[0, True, 3], [0, 2, 4]], [[0, 1, 3], None], None, [[0, 3], [0, 2, 4]], [[0, 0], [0, 2, 4]],
                 [[0, 0, 3], [0, 4]], [list(range(4)), list(range(5))]):  # fmt: skip
        bad.append((f"cuts {cuts}", lambda d, c=cuts: d.fields["layouts"][0].update(cuts=c)))
    for holders in ([[[0], [1], [0, 1]]], [[[0], [1], [0, 1], [1], [1]]], [[[0], [1], [0, 1], []]], [[[0], [1], [0, 1], [2]]],
                    [[[0], [1], [0, 1], [-1]]], [[[0], [1], [0, 1], 1]], [[0, 1, 1, 1]], [], [[]], [[[0], [1], [0, 1], [True]]]):  # fmt: skip
        bad.append((f"holders {holders}", lambda d, h=holders: d.fields.update(holders=h)))
    for number in (1, -1, None, "0", 0.0):
        bad.append(
            (f"the number {number!r} of its holders", lambda d, n=number: d.fields["layouts"][0].update(holders=n))
        )
    for where in ([0, 2**53 + 1], [1, 0], [-1, 0], [0, -1], [0], [0, 0, 0], [0, 0.0], ["0", 0], [0, None], [True, 0]):
        bad.append((f"the place {where}", lambda d, w=where: d.leaves[0].__setitem__(6, w)))
    for sharding in (
        None,
        {},
        {"mesh": {"x": 2}},
        {"mesh": {"x": 0}, "spec": []},
        {"mesh": {"x": "2"}, "spec": []},
        {"mesh": {}, "spec": [1]},
        5,
    ):
        bad.append((f"the sharding {sharding}", lambda d, s=sharding: d.fields["layouts"][0].update(sharding=s)))
    bad.append(("layouts that are null", lambda d: d.fields.update(layouts=None)))
    bad.append(("holders that are null", lambda d: d.fields.update(holders=None)))
    bad.append(("no holders", lambda d: d.fields.pop("holders")))
    bad.append(("no cuts", lambda d: d.fields["layouts"][0].pop("cuts")))
    bad.append(
        (
            "boxes, as no release has them",
            lambda d: d.fields["layouts"].__setitem__(0, {"boxes": [[[0, 3], [0, 4]]], "files": [[0]]}),
        )
    )
    for name, (about, change) in zip(numbered("bad-layout", len(bad)), bad, strict=True):
        yield refused(name, f"a layout with {about}", cut, change)


def placements() -> Iterator[Case]:
    places = [
        {"mesh": {"x": 2, "y": 2}, "spec": ["x", ["y"]], "axis_types": ["auto", "explicit"], "devices": [3, 2, 1, 0],
         "job_devices": 4, "memory_kind": "pinned_host", "layout": [1, 0]},
        {"mesh": {"x": 1}, "spec": [], "local": True, "platform": "cpu"},
        {"device": 1, "committed": False},
        {"committed": False},
        {"unrecorded": "a sharding of another kind", "more": {"a": [1]}},
        {},
    ]  # fmt: skip

    def placed(draft: Draft, runs: Any = None, place: Any = None) -> None:
        count = len(draft.leaves)
        listed = places if place is None else [place]
        draft.fields["placement"] = {"places": listed, "leaves": [[count, 0]] if runs is None else runs}

    yield Case("placement", "every field of a place", changed(base, placed))
    yield Case("placement-cast", "an array that was cast", changed(base, lambda d: placed(d, place={"cast": True})))
    rest = len(base().leaves) - 1
    yield Case("placement-runs", "runs of leaves", changed(base, lambda d: placed(d, [[1, 5], [rest, -1]])))
    yield Case("placement-unknown", "a field that is not known", changed(base, lambda d: placed(d, place={"x": None})))
    static = {"": {"epoch": 3}, "a/b": {"rate": 0.5, "axes": [1, [None]], "name": "x"}}
    yield Case("static", "static values of containers", changed(base, lambda d: d.fields.update(static=static)))
    bad: list[tuple[str, Change]] = []
    for runs in ([], [[rest, 0]], [[rest + 2, 0]], [[rest + 1, 6]], [[rest + 1, -2]], [[0, 0], [rest + 1, 0]], [[rest + 1]],
                 [[rest + 1, 0, 0]], [[rest + 1, None]], [[float(rest + 1), 0]], None, {}, [0]):  # fmt: skip
        bad.append((f"the runs {runs}", lambda d, r=runs: (placed(d), d.fields["placement"].update(leaves=r))))
    for place in (
        None, [], 0, {"mesh": {"x": 1}}, {"spec": []}, {"mesh": {"x": 0}, "spec": []}, {"mesh": {"x": 1}, "spec": [1]},
        {"mesh": {"x": 1}, "spec": None}, {"mesh": {"x": 2}, "spec": [], "devices": [0]},
        {"mesh": {"x": 2}, "spec": [], "devices": [0, 0]}, {"mesh": {"x": 2}, "spec": [], "devices": [0, -1]},
        {"mesh": {"x": 2}, "spec": [], "axis_types": ["auto", "auto"]}, {"axis_types": ["other"]}, {"device": -1},
        {"device": 0.0}, {"device": None}, {"committed": 0}, {"committed": None}, {"local": "true"}, {"memory_kind": None},
        {"platform": 1}, {"layout": [0.5]}, {"layout": 1}, {"job_devices": "8"}, {"unrecorded": []}, {"devices": [True]},
    ):  # fmt: skip
        bad.append((f"the place {place}", lambda d, p=place: (placed(d), d.fields["placement"].update(places=[p]))))
    for value in (None, [], {"places": []}, {"leaves": []}, 0):
        bad.append((f"the placement {value}", lambda d, v=value: d.fields.update(placement=v)))
    for found in (None, [], {"a": 1}, {"a": None}, {"a": []}, {"a": {"n": 1 << 64}}):
        bad.append((f"the static values {found}", lambda d, f=found: d.fields.update(static=f)))
    bad.append(("the place {'cast': 1}", lambda d: (placed(d), d.fields["placement"].update(places=[{"cast": 1}]))))
    for name, (about, change) in zip(numbered("bad-placement", len(bad)), bad, strict=True):
        yield refused(name, f"a manifest with {about}", base, change)


def ties() -> Iterator[Case]:
    def tied() -> Draft:
        draft = base()
        draft.child("t")
        draft.leaves.append(["array", "t", "jax", "int32", [3], "", "a"])
        draft.content["t"] = draft.content["a"]
        return draft

    yield Case("tie", "the same array at two places", tied())
    both = changed(cut, lambda d: (d.child("z"), d.leaves.append(["array", "z", "jax", "int16", [3, 4], "", "s"])))
    both.content["z"] = both.content["s"]
    yield Case("tie-layout", "the same array at two places, in pieces", both)
    bad: list[tuple[str, Change]] = [
        ("nothing", lambda d: d.leaves[3].__setitem__(6, "nothing")),
        ("itself", lambda d: d.leaves[3].__setitem__(6, "t")),
        ("a value", lambda d: d.leaves[3].__setitem__(6, "v")),
        ("an array of another shape", lambda d: d.leaves[3].__setitem__(4, [1, 3])),
        ("an array of another dtype", lambda d: d.leaves[3].__setitem__(3, "uint32")),
        ("an array of another type", lambda d: d.leaves[3].__setitem__(2, "numpy")),
        ("a later leaf", lambda d: (d.leaves[0].__setitem__(6, "t"), d.leaves[3].__setitem__(6, 0))),
        (
            "a leaf that is tied itself",
            lambda d: (d.child("u"), d.leaves.append(["array", "u", "jax", "int32", [3], "", "t"])),
        ),
        ("a container", lambda d: d.leaves[3].__setitem__(6, "")),
    ]
    for name, (about, change) in zip(numbered("bad-tie", len(bad)), bad, strict=True):
        yield refused(name, f"an array that is said to be {about}", tied, change)


def states() -> Iterator[Case]:
    """Yields cases of an iterator whose states are stored in an array file."""

    def packed(text: str, rest: bytes = b"", more: int = 0) -> bytes:
        return (len(text.encode()) + more).to_bytes(8, "little") + text.encode() + rest

    def stored(*states: bytes) -> Draft:
        draft = base().array("s", "uint8", [sum(map(len, states))], b"".join(states))
        lengths = list(map(len, states))
        draft.leaves[-1][6] = {"requires": ["iterator-states"], "lengths": lengths, "where": draft.leaves[-1][6]}
        draft.content["s"] = {"type": "iterator", "value": lengths}
        return draft

    array = '["array",[true,"int16",[2],4]]'
    every = f'["dict",[[["bytes",1],["list",[["bytes",2],{array},["bytes",0]]]],[["str","ä"],["tuple",[["int",1]]]]]]'
    good = {
        "one": stored(packed('["none",null]')),
        "two": stored(packed('["int",1]'), packed(' ["int",2] ')),
        "apart": stored(packed(every, b"kxx\1\0\2\0")),
        "more": changed(lambda: stored(packed('["int",1]')), lambda d: d.leaves[-1][6].update(more={"a": None})),
    }
    for name, draft in good.items():
        yield Case(f"states-{name}", "the states of an iterator in an array file", draft)
    bad = [
        b"", b"\1", packed("["), packed('["int",1]', more=1), packed('["int",1]', more=-1), packed('["int",1]', b"x"),
        packed('["int",-0]'), packed('["str","\\ud800"]'), packed('["function","f"]'), packed('["iterator",["all",[["int",1]]]]'),
        packed('["bytes","eA=="]'), packed('["bytes",2]', b"x"), packed('["bytes",-1]', b"x"), packed('["bytes",true]', b"x"),
        packed('["bytes",1.0]', b"x"), packed('["array",[true,"int16",[2],2]]', b"xx"), packed('["array",[true,"int8",[1],"eA=="]]'),
        packed('["dict",[[["bytes",1],["int",1]],[["bytes",1],["int",1]]]]', b"xx"), packed("5"), packed('{"int":1}'),
    ]  # fmt: skip
    for name, state in zip(numbered("bad-state", len(bad)), bad, strict=True):
        draft = stored(packed('["int",1]'), state)
        yield Case(name, f"an iterator with the state {state!r}", draft, leaves={"s": "unsupported"})
    wrong: list[dict[str, Any]] = [
        {"lengths": value} for value in (None, [], [16], [18], [20, -3], [17.0], [True], "17", 17)
    ]
    wrong += [{"where": value} for value in (None, "a", 9, -1, True, [9, 0], {"requires": ["x"]}, [0])]
    for name, change in zip(numbered("bad-states", len(wrong)), wrong, strict=True):
        draft = stored(packed('["int",1]'))
        yield refused(name, f"states at {change}", lambda d=draft: d, lambda d, c=change: d.leaves[-1][6].update(c))
    rows: list[tuple[int, Any]] = [(2, "jax"), (2, "numpy-scalar"), (3, "int8"), (4, [17, 1]), (5, "rbg")]
    for name, (at, value) in zip(numbered("bad-states-row", len(rows)), rows, strict=True):
        draft = stored(packed('["int",1]'))
        yield refused(
            name, f"states with {value}", lambda d=draft: d, lambda d, a=at, v=value: d.leaves[-1].__setitem__(a, v)
        )
    row = ["array", "t", "numpy", "uint8", [17], "", "s"]
    yield refused(
        "bad-states-tie",
        "an array that is said to be the states of an iterator",
        lambda: stored(packed('["int",1]')),
        lambda d: (d.child("t"), d.leaves.append(row)),
    )
