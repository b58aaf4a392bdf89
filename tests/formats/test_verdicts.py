"""Tests that the library and an independent reader reach the same verdict on every checkpoint in golden/verdicts.

These checkpoints are small. Some are valid, some are damaged, and some break a rule or are of a later version.
"""

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

import spec_reader
import treering as tr
from treering import stores
from treering._core import dtypes
from treering._core.boxes import full_box
from treering._core.entries import ArrayEntry
from treering.errors import CorruptError, UnsupportedError
from treering.formats.treering import manifest, metrics

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "verdicts"
SCHEMA = json.loads((pathlib.Path(__file__).parents[2] / "docs" / "manifest.schema.json").read_text())
VERDICTS: dict[str, Any] = json.loads((GOLDEN / "verdicts.json").read_text())


def digest(array: np.ndarray) -> str:
    """Returns the checksum of the elements as array files store them. Undefined bits count as 0."""
    if array.dtype.name.startswith(("float4_", "float6_")):
        array = array.view(np.uint8) & ((1 << int(array.dtype.name[5])) - 1)
    return manifest.xxh3(np.ascontiguousarray(dtypes.defined_bytes(array)).tobytes())


def verdict_of(read: Callable[[], Any]) -> Any:
    """Returns the result of `read`, or the verdict that its error stands for."""
    try:
        return read()
    except CorruptError:
        return "damaged"
    except UnsupportedError as error:
        return "unsupported" if "undamaged" in str(error) and "upgrade treering" in str(error) else str(error)


def examined(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the library finds in a checkpoint, in the form of `verdicts.json`."""
    reader = verdict_of(lambda: tr.formats.get("treering").open(stores.get(""), str(path)))
    if isinstance(reader, str):
        return {"checkpoint": reader, "leaves": {}, "metrics": {}, "late": {}}
    leaves: dict[str, Any] = {}
    for name, entry in reader.entries.items():
        if isinstance(entry, ArrayEntry):
            found = {"type": entry.type, "dtype": entry.dtype, "shape": list(entry.shape), "impl": entry.impl}
            ways: list[Any] = []
            for mmap in (False, True):
                read = verdict_of(lambda e=entry, m=mmap: reader.read([(e, full_box(e.shape))], mmap=m)[0])
                ways.append(read if isinstance(read, str) else {**found, "xxh3": digest(read)})
            leaves[name] = ways[0] if ways[0] == ways[1] else ways
        else:
            read = verdict_of(entry.decode)
            leaves[name] = read if read in ("damaged", "unsupported") else {"type": entry.type, "value": entry.value}
    late = {
        name: "valid" if isinstance(found, dict) else "damaged" if isinstance(found, CorruptError) else "unsupported"
        for name, found in metrics.read(stores.get(""), str(path), reader.identity)
    }
    return {"checkpoint": "valid", "leaves": leaves, "metrics": reader.metrics, "late": late}


def number(written: Any) -> float:
    """Returns the float for a number as the format writes it."""
    own_bits = isinstance(written, str) and written.startswith("nan:")
    return struct.unpack(">d", bytes.fromhex(written[4:]))[0] if own_bits else float(written)


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Returns True if a reader finds what `verdicts.json` expects. Metrics must be equal bit for bit."""
    bits = {name: struct.pack("<d", x) for name, x in found["metrics"].items()}
    written = {name: struct.pack("<d", number(x)) for name, x in expected["metrics"].items()}
    parts = [{name: one[name] for name in ("checkpoint", "leaves", "late")} for one in (found, expected)]
    return bits == written and json.dumps(parts[0], sort_keys=True) == json.dumps(parts[1], sort_keys=True)


@pytest.mark.long
@pytest.mark.parametrize("examine", [examined, spec_reader.examine], ids=["library", "independent"])
def test_readers_find_what_there_is(examine: Callable[[pathlib.Path], dict[str, Any]]) -> None:
    found = {name: examine(GOLDEN / name) for name in VERDICTS}
    assert {name: one for name, one in found.items() if not is_same(one, VERDICTS[name])} == {}


@pytest.mark.long
def test_what_people_call_comes_to_the_same_verdicts() -> None:
    """`restore` and `verify` reach the expected verdicts too."""
    for name in VERDICTS.keys() - {"file-unused-lost", "damaged-and-later"}:
        expected = VERDICTS[name]
        late = set(expected["late"].values())
        verdicts = {expected["checkpoint"], *(one for one in expected["leaves"].values() if isinstance(one, str))}
        restored = verdict_of(lambda name=name: bool(tr.restore(GOLDEN / name)) or True)
        assert restored is True if verdicts == {"valid"} else restored in verdicts, name
        report = verdict_of(lambda name=name: tr.verify(GOLDEN / name).ok)
        assert report == ("unsupported" if "unsupported" in verdicts | late else verdicts | late <= {"valid"}), name


def test_verify_reports_a_problem_that_no_leaf_needs(caplog: pytest.LogCaptureFixture) -> None:
    """`verify` also reports a problem in a file that no leaf uses."""
    assert [problem.file for problem in tr.verify(GOLDEN / "file-unused-lost").problems] == ["more"]
    with pytest.raises(UnsupportedError, match=r"(?s)c\.safetensors.*version '2'"):
        tr.verify(GOLDEN / "damaged-and-later")


@pytest.mark.parametrize(
    "name", ["requires-file", "requires-file-bare", "requires-leaf", "requires-leaf-more", "requires-tie"]
)
def test_unknown_feature_leaves_other_leaves_readable(name: str, tmp_path: pathlib.Path) -> None:
    """A leaf or file that requires an unknown feature cannot be read, but all other leaves can."""
    leaves = VERDICTS[name]["leaves"]
    good = [path for path, found in leaves.items() if not isinstance(found, str)]
    ckpt = tr.open(GOLDEN / name)
    assert set(ckpt) == set(leaves) and ckpt[next(iter(leaves))].shape is not None
    assert set(ckpt.select(good).restore()) == set(good)
    tr.save(tmp_path / "c", ckpt.select(good))
    with pytest.raises(UnsupportedError, match=r"it requires .*upgrade treering"):
        tr.save(tmp_path / "d", ckpt)


def test_there_are_cases_of_every_kind() -> None:
    assert len(VERDICTS) >= 300
    kinds = [(one["checkpoint"], *one["leaves"].values()) for one in VERDICTS.values()]
    for word in ("valid", "damaged", "unsupported"):
        assert sum(word in [part for part in kind if isinstance(part, str)] for kind in kinds) >= 20


@pytest.mark.long
def test_the_schema_accepts_what_is_valid() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for name, verdict in VERDICTS.items():
        if verdict["checkpoint"] == "valid":
            validator.validate(json.loads((GOLDEN / name / "treering.json").read_bytes()))


@pytest.mark.long
def test_the_schema_refuses_what_it_can_see() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    wrong = [
        name for name, verdict in VERDICTS.items() if verdict["checkpoint"] == "unsupported" and "text" not in name
    ]
    manifests = (json.loads((GOLDEN / name / "treering.json").read_bytes()) for name in wrong)
    assert sum(not validator.is_valid(manifest) for manifest in manifests) > len(wrong) / 2
