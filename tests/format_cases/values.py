"""Cases of values, keys, containers and paths."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .drafts import Case, Change, Draft, base, numbered, refused


def values() -> Iterator[Case]:
    good: dict[str, list[Any]] = {
        "bool": [True, False],
        "int": [
            "0x1" + "0" * 5000,
            0,
            -1,
            2**53,
            -(2**53),
            "0x20000000000001",
            "-0x20000000000001",
            "0xffffffffffffffffffffffffffffffffffff",
        ],
        "float": [0, 1, -1.5, -0.0, 5e-324, 1.7976931348623157e308, 2**53 + 1, "inf", "-inf", "nan"],
        "complex": [[1, -0.0], ["nan", "-inf"], ["nan:fff8000000000000", 0.5]],
        "str": ["", "a/b~c\n\0", "äöü 😀", "~@0"],
        "bytes": ["", "AA==", "AAE=", "AAEC", "/+8="],
        "none": [None],
        "function": ["", "jax.nn.relu"],
        "iterator": [
            ["all", [["int", 40]]],
            ["each", [["none", None]]],
            [
                "each",
                [
                    [
                        "dict",
                        [[["str", "n"], ["int", 3]], [["int", 1], ["bytes", "AA=="]], [["none", None], ["float", 2.5]]],
                    ]
                ],
            ],
            ["each", [["list", []], ["tuple", [["bool", True], ["list", [["str", "x"]]]]], ["dict", []]]],
            ["all", [["dict", [[["tuple", [["int", 1], ["str", "a"]]], ["int", 1]]]]]],
            ["all", [["array", [True, "int32", [2, 2], code(np.arange(4, dtype="<i4"))]]]],
            ["all", [["array", [False, "float16", [], code(np.float16(1.5))]]]],
            ["all", [["array", [True, "int4", [2], "Af8="]]]],
            ["all", [["array", [True, "bfloat16", [0, 3], ""]]]],
            ["all", [["array", [True, "<U2", [1], code(np.array(["é"], "<U2"))]]]],
            ["all", [["array", [True, "datetime64[D]", [1], code(np.array(["2026-11-22"], "datetime64[D]"))]]]],
            ["all", [_nested(100)]],
        ],
    }
    good["float"] += ["nan:7ff8000000000001", "nan:fff8000000000000", "nan:7ff0000000000001"]
    for type, each in good.items():
        draft = Draft()
        for n, value in enumerate(each):
            draft.value(f"{n:02}", type, value)
        yield Case(f"value-{type}", f"values of the type {type}", draft)
    bad: dict[str, list[Any]] = {
        "bool": [0, 1, "true", None],
        "int": [
            1.0,
            True,
            "12",
            "0x1b",
            "0X20000000000001",
            "0x2000_0000000001",
            "0x020000000000001",
            "+0x20000000000001",
        ],
        "float": [True, "1.5", "Infinity", "NaN", "-nan", "nan:7ff8000000000000", "nan:3ff0000000000000", None],
        "complex": [[1], [1, 2, 3], 1.5, ["1", 2], None, {"0": 1, "1": 2}, "12"],
        "str": [1, None, ["a"]],
        "bytes": ["A", "AA", "AA=", "AB==", "A A==", "AA==\n", "-_8=", 5, None],
        "none": [0, False, "", []],
        "function": [None, 1],
        "iterator": [
            None,
            [],
            ["each", []],
            ["all", []],
            ["all", [["int", 1], ["int", 2]]],
            ["some", [["int", 1]]],
            ["each", 5],
        ],
        "decimal": ["3"],
        "array": [[True, "int8", [1], "AA=="]],
    }
    bad["int"] += [
        "0X20000000000001",
        "0x2000000000000F",
        2**53 + 1,
        -(2**53) - 1,
        "-0x1",
        "0x",
        "",
        "0x2000000000000g",
        None,
        [1],
        "0x20000000000000",
    ]
    bad["float"] += [
        "nan:7FF8000000000001",
        "nan:7ff800000000001",
        "nan:7ff0000000000000",
        "nan: 7ff800000000001",
        "+inf",
    ]
    bad["iterator"] += [
        ["all", [["int"]]],
        ["all", [["int", 1, 2]]],
        ["all", [["set", []]]],
        ["all", [["function", "f"]]],
        ["all", [["iterator", ["all", [["int", 1]]]]]],
        ["all", [["dict", [[["str", "a"], ["int", 1]], [["str", "a"], ["int", 2]]]]]],
        ["all", [["dict", [[["int", 1], ["int", 1]], [["bool", True], ["int", 2]]]]]],
        ["all", [["dict", [[["list", []], ["int", 1]]]]]],
        ["all", [["dict", [[["str", "a"]]]]]],
        ["all", [["list", {"a": 1}]]],
        ["all", [["array", [1, "int8", [1], "AA=="]]]],
        ["all", [["array", [True, "int8", [2], "AA=="]]]],
        ["all", [["array", [True, "int8", [-1], "AA=="]]]],
        ["all", [["array", [True, "int8", [True], "AA=="]]]],
        ["all", [["array", [True, "int7", [1], "AA=="]]]],
        ["all", [["array", [False, "int8", [1], "AA=="]]]],
        ["all", [["array", [True, "int8", [0, 2**62, 4], ""]]]],
        ["all", [["dict", [[["array", [False, "int8", [], "AA=="]], ["int", 1]]]]]],
        ["all", [["dict", [[["tuple", [["array", [False, "int8", [], "AA=="]]]], ["int", 1]]]]]],
        ["all", [["dict", [[["int", 1], ["int", 1]], [["complex", [1, 0]], ["int", 2]]]]]],
        ["all", [["array", [True, "int8", [1], "AB=="]]]],
        ["all", [["array", [True, "int8", [1]]]]],
        ["all", [["str", 5]]],
        ["all", [_nested(101)]],
    ]
    for type, each in bad.items():
        for name, value in zip(numbered(f"bad-value-{type}", len(each)), each, strict=True):
            about = f"a value of the type {type}: {json.dumps(value)[:60]}"
            yield refused(name, about, base, set_value(type, value))


def set_value(type: str, value: Any) -> Change:
    return lambda draft: draft.leaves.__setitem__(2, ["value", "v", type, value])


def _nested(depth: int) -> Any:
    state: Any = ["int", 1]
    for _ in range(depth):
        state = ["list", [state]]
    return state


def code(array: Any) -> str:
    return base64.b64encode(np.asarray(array).tobytes()).decode()


def keys() -> Iterator[Case]:
    names = {
        "a": "a", "": "", "a/b~c": "a~1b~0c", " ": " ", "~@0": "~0@0", "😀": "😀", 3: "3", -3: "-3", 2**53: str(2**53),
        True: "True", False: "False",
    }  # fmt: skip
    pairs = {
        ("int", "0x20000000000001"): "9007199254740993", ("float", 0.5): "0.5", ("float", 123): "123.0",
        ("float", 1e16): "1e+16", ("float", 1.5e-05): "1.5e-05", ("float", 0.0001): "0.0001", ("float", "inf"): "inf",
        ("float", "-inf"): "-inf", ("float", "nan"): "nan", ("int", "0x1" + "0" * 2999): str(16**2999),("float", 123456789012345680.0): "1.2345678901234568e+17",
        ("bytes", "AP8="): "\0\\xff", ("bytes", "w6Q="): "ä", ("bytes", "4oI="): "\\xe2\\x82",
    }  # fmt: skip
    draft = Draft()
    for key, name in [*names.items(), *(([*key], name) for key, name in pairs.items())]:
        draft.child(key)
        draft.leaves.append(["value", name, "int", 1])
        draft.content[name] = {"type": "int", "value": 1}
    yield Case("keys", "a dict with keys of every type", draft)
    tuples = {
        "()": [],
        "('a',)": ["a"],
        "(1, 'b')": [1, "b"],
        "(True, 1.5)": [True, ["float", 1.5]],
        "('it\\'s', '\\\\')": ["it's", "\\"],
        "('a~1b~0', -2)": ["a/b~", -2],
        "(9007199254740993,)": [["int", "0x20000000000001"]],
        "('\n\"é',)": ['\n"é'],
    }
    draft = Draft()
    for name, parts in tuples.items():
        draft.child(["tuple", parts])
        draft.leaves.append(["value", name, "int", 1])
        draft.content[name] = {"type": "int", "value": 1}
    yield Case("keys-tuples", "a dict with tuples as keys", draft)
    draft = Draft(tree=[["dict", "", [["float", -0.0]]], 0], leaves=[["value", "-0.0", "int", 1]])
    yield Case("key-minus-zero", "the key -0.0", replace(draft, content={"-0.0": {"type": "int", "value": 1}}))
    bad = [
        ["int", "0x1" + "0" * 3000],
        ["tuple", 5],
        ["tuple", [None]],
        ["tuple", [["bytes", "AA=="]]],
        ["tuple", [["tuple", []]]],
        ["tuple", ["a"], 1],
        ["tuple", [1.5]],
        1.5,
        None,
        [1],
        ["int", 5],
        ["str", "a"],
        ["bool", True],
        ["float", "0.5"],
        ["bytes", "A"],
        ["int", 1, 2],
        {},
    ]
    bad += [2**53 + 1, ["float"], ["none", None]]
    for name, key in zip(numbered("bad-key", len(bad)), bad, strict=True):
        draft = base()
        draft.tree[0][2][2] = key
        yield Case(name, f"a key of a dict: {json.dumps(key)}", draft, "unsupported")
    for name, one, other in [
        ("true", 1, True),
        ("float", 1, ["float", 1.0]),
        ("zero", 0, ["float", -0.0]),
        ("same", "a", "a"),
        ("tuple", ["tuple", [1]], ["tuple", [True]]),
    ]:
        draft = Draft(tree=[["dict", "", [one, other]], ["list", "", 0], ["list", "", 0]])
        yield Case(
            f"equal-keys-{name}", "two keys of a container are equal, though no path says so", draft, "unsupported"
        )
    draft = Draft(tree=[["dict", "", ["1", 1]], ["list", "", 0], ["list", "", 0]])
    yield Case("keys-of-one-path", "two keys that are not equal and read the same, without leaves", draft)
    draft = Draft(tree=[["dict", "", ["1", 1]], 0, 0], leaves=[["value", "1", "int", n] for n in range(2)])
    yield Case("leaves-of-one-path", "two leaves with one path", draft, "unsupported")


def trees() -> Iterator[Case]:
    draft = Draft(
        tree=[["tuple", "", 6], 0, ["list", "", 0], ["namedtuple", "Adam", ["count", "mu"]], 0, ["dict", "", []]]
    )
    draft.tree += [["object", "Layer", ["w", 1]], 0, 0, ["positional", "Pair", 2], 0, ["tuple", "", 1], 0]
    draft.tree += [["dict", "Frozen", ["x"]], 0]
    for path in ["0", "2/count", "3/w", "3/1", "4/0", "4/1/0", "5/x"]:
        draft.leaves.append(["value", path, "none", None])
    draft.content = {row[1]: {"type": "none", "value": None} for row in draft.leaves}
    yield Case("tree-kinds", "a container of every kind", draft)
    yield Case("tree-empty", "a checkpoint of an empty dict", Draft())
    draft = Draft(tree=[0], leaves=[["value", "", "int", 1]], content={"": {"type": "int", "value": 1}})
    yield Case("tree-root-leaf", "a leaf that is the root", draft)
    deep = Draft(tree=[["list", "", 1]] * 500 + [0], leaves=[["value", "/".join(["0"] * 500), "int", 1]])
    deep.content = {deep.leaves[0][1]: {"type": "int", "value": 1}}
    yield Case("tree-deep", "500 lists in one another", deep)
    bad: list[list[Any]] = [
        [], [0, 0], [["dict", "", ["a", "b", "v"]], 0, 0], [["dict", "", ["a", "b"]], 0, 0, 0],
        [["dict", "", ["a", "b", "v", "w"]], 0, 0, 0], [["list", "", 3], 0, 0, 0], [["dict", "", 3], 0, 0, 0],
        [["namedtuple", "T", 3], 0, 0, 0], [["object", "T", 3], 0, 0, 0], [["list", "", ["a", "b", "v"]], 0, 0, 0],
        [["positional", "", ["a", "b", "v"]], 0, 0, 0], [["namedtuple", "T", ["a", "b", 3]], 0, 0, 0],
        [["set", "", ["a", "b", "v"]], 0, 0, 0], [["dict", None, ["a", "b", "v"]], 0, 0, 0], [["dict", ["a", "b", "v"]], 0, 0, 0],
        [["dict", "", ["a", "b", "v"], 1], 0, 0, 0], [["dict", "", ["a", "b", "v"]], 0, 0, 1], [["dict", "", ["a", "b", "v"]], 0, 0, False],
        [["dict", "", ["b", "a", "v"]], 0, 0, 0], [["dict", "", ["a", "b", "c"]], 0, 0, 0], [["list", "", -1]], [["list", "", 10**9]],
        [["list", "", 1.0], ["dict", "", ["a", "b", "v"]], 0, 0, 0], [["dict", "", ["a", "b", "v"]], 0, 0, None],
        [["tuple", "", 10**30]], [["dict", "", ["x"]], ["dict", "", ["a", "b", "v"]], 0, 0, 0], [["list", "", True], 0],
        [["dict", "", ["a", "b", "v"]], 0, 0, 0, ["list", "", 0]],
    ]  # fmt: skip
    for name, tree in zip(numbered("bad-tree", len(bad)), bad, strict=True):
        yield refused(
            name,
            f"a tree of other leaves, or none: {json.dumps(tree)[:70]}",
            base,
            lambda d, t=tree: setattr(d, "tree", t),
        )


def paths() -> Iterator[Case]:
    draft = Draft()
    draft.array("__metadata__", "int8", [2], b"\x01\x02")
    yield Case("path-metadata", "an array at the path __metadata__", draft.array("dtype", "int8", [1], b"\x03"))
    for n, path in enumerate(["b", "A", "/a", "a/", "", 1, None]):
        yield refused(
            f"bad-path-{n}",
            f"a leaf with the path {path!r} where the tree says 'a'",
            base,
            lambda d, p=path: d.leaves[0].__setitem__(1, p),
        )
    rows = [[], ["array"], ["value", "a", "none"], ["thing", "a"], 7, ["array", "a", "jax", "int32", [3], "", 0, 1]]
    rows += [["array", "a", "jax", "int32", [3], ""], ["value", "a", "int", 1, 2], ["array", "a", "jax", "int32"], {}]
    rows += [["array", "a", "torch", "int32", [3], "", 0], ["array", "a", "jax", "int32", [3], None, 0], None]
    rows += [
        ["array", "a", "jax", "int32", [3], "threefry2x32", 0],
        ["array", "a", "key", "int32", [3], "threefry2x32", 0],
    ]
    rows += [["array", "a", "key", "uint32", [3], "", 0], ["array", "a", "key", "uint32", [], "threefry2x32", 0]]
    for name, row in zip(numbered("bad-row", len(rows)), rows, strict=True):
        yield refused(name, f"a leaf {json.dumps(row)}", base, lambda d, r=row: d.leaves.__setitem__(0, r))
    yield refused(
        "bad-row-scalar", "a NumPy scalar with an axis", base, lambda d: d.leaves[0].__setitem__(2, "numpy-scalar")
    )
    yield refused("leaf-missing", "a leaf of the tree is not listed", base, lambda d: d.leaves.pop())
    yield refused(
        "leaf-more",
        "a leaf is listed that the tree does not have",
        base,
        lambda d: d.leaves.append(["value", "w", "int", 1]),
    )
