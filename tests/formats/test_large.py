"""Tests of large manifests and headers: fields are decoded directly, and single tensors found without full parsing."""

import json
import pathlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest

import treering as tr
from treering.errors import UnsupportedError
from treering.formats._shared import strict_json
from treering.formats.safetensors.header import Tensor, decode_header, encode_header, find_tensor
from treering.formats.treering import manifest
from treering.formats.treering.array_file import ArrayHeader

_ODD = [
    "-0", "{", "}", "[", "]", ",", ":", '"', "null", "true", "1.0", "1e999", "NaN", "-1", "\\u0041", "\\ud800",
    "\\ud83d\\ude00", "\\n", '\\"', "é", "\x7f", "\x01", "9" * 25, " ", "\n", '"a"', '"a":1', '{"b":1,"b":2}',
    '"tree":[]',
]  # fmt: skip


def _outcome(parse: Any) -> Any:
    try:
        return parse()
    except strict_json.MALFORMED:
        return "refused"


@pytest.mark.long
def test_fields_decoded_at_once_are_those_of_strict_parsing() -> None:
    """Both ways of parsing return the same value for any changed text, or both refuse it."""
    draw = random.Random(0)
    types: dict[str, Any] = {"tree": list[int | list[str]], "leaves": list[tuple[str, float | str]]}
    fields: Any = msgspec.defstruct("fields", [("tree", types["tree"], None), ("leaves", types["leaves"], None)])
    text = '{"a":{"b":[1,2.5,"x"]},"tree":[0,["k","l-0,"],0],"leaves":[["é",1.5],["-0",0]],"step":1}'
    kept = 0
    for _ in range(20_000):
        changed = text
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            begin = draw.randrange(len(changed))
            changed = changed[:begin] + draw.choice(_ODD) + changed[begin + draw.randrange(3) :]
        data = changed.encode("utf-8", "surrogatepass")

        def strictly(data: bytes = data) -> Any:
            top = strict_json.parse(data)
            made = msgspec.convert(top, fields)
            return {**top, **{key: getattr(made, key) for key in types if key in top}}

        expected = _outcome(strictly)
        assert _outcome(lambda data=data: strict_json.parse_typed(data, types)) == expected, changed
        kept += expected != "refused"
    assert 1000 < kept < 19_000


def _header(count: int) -> tuple[bytes, dict[str, Tensor]]:
    tensors = {f"l{n}/w": Tensor("F32", (2, n % 5), (n * 8, n * 8 + 8)) for n in range(count)}
    return encode_header(tensors, {"format": "treering", "n": "1"}, 8), tensors


def test_a_tensor_is_found_without_the_others() -> None:
    data, tensors = _header(100)
    parsed = decode_header(data, "x").tensors
    for key, tensor in tensors.items():
        assert find_tensor(data, key) == tensor == Tensor(*msgspec.structs.astuple(parsed[key]))
    assert find_tensor(data.replace(b'"l7/w":', b'"l7/w": '), "l7/w") == tensors["l7/w"]
    assert find_tensor(data, "l1") is find_tensor(data, "/w") is find_tensor(data, "format") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"n":"1"', r'"n":"\"l7/w\":{"'),  # Text in the metadata looks like an entry.
        lambda text: text.replace('"l8/w":', '"l7/w":'),  # The tensor occurs twice.
        lambda text: text.replace('"l7/w":{', '"l7/w":{"dtype":"U8",'),  # A field of the tensor occurs twice.
        lambda text: text.replace('"l7/w":{"dtype":"F32",', '"l7/w":{'),
        lambda text: text.replace('"l7/w":{"dtype":"F32","shape":[2,2]', '"l7/w":{"dtype":"F32","shape":[2,-0]'),
        lambda text: text.replace('"l7/w":', '"l7":'),
        lambda text: text.replace('"l7/w":', '"l7":').replace("[48,56]", '[48,56],"x":{"l7/w":{"data_offsets":[0,8]}}'),
        lambda text: text.replace('"l7/w":', '"l7/w": ').replace("[0,8]", '[0,8],"l7/w":{"shape":[1]}'),
    ],
)
def test_a_tensor_of_which_one_cannot_be_sure_is_left_to_parsing(change: Any) -> None:
    """`find_tensor` returns None if the text of a header is ambiguous, so that all of it is parsed."""
    data, _ = _header(10)
    text = change(data[8:].decode())
    assert text != data[8:].decode()
    assert find_tensor(data[:8] + text.encode(), "l7/w") is None


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("large") / "many"
    tr.save(path, {f"l{n:05}": {"w": np.full(3, n, np.float32)} for n in range(20_000)})
    return path


def _headers(monkeypatch: pytest.MonkeyPatch) -> list[ArrayHeader]:
    made: list[ArrayHeader] = []
    init = ArrayHeader.__init__

    def noted(self: ArrayHeader, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ArrayHeader, "__init__", noted)
    return made


@pytest.mark.long
def test_a_few_leaves_of_many(many: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _headers(monkeypatch)
    ckpt = tr.open(many)
    for n in range(0, 20_000, 2000):
        assert np.array_equal(ckpt[f"l{n:05}/w"][:], np.full(3, n, np.float32))
        assert len(made) == 1 and (made[0]._tensors is not None) == (n >= 4 * 2000), "all are parsed when many are read"
    restored: Any = tr.restore(many)
    assert all(np.array_equal(restored[f"l{n:05}"]["w"], np.full(3, n, np.float32)) for n in range(20_000))
    assert tr.verify(many).ok


@pytest.mark.long
def test_what_is_wrong_with_the_tensor_itself_is_found_at_once(many: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An error in a sealed header is found when its tensor is read, and when all tensors are read.

    One header has another shape than the manifest, the other a gap between two tensors.
    """
    file = next(many.glob("arrays-*"))
    data, top = file.read_bytes(), json.loads((many / "treering.json").read_bytes())
    size = top["files"][0]["header"]
    entry = b'"l00007/w":{"dtype":"F32","shape":[3]'
    for name, old, new, about in (
        ("shape", entry, entry.replace(b"3", b"4"), "expected a tensor"),
        ("hole", b'"data_offsets":[84,96]', b'"data_offsets":[85,96]', "in 11 bytes"),
    ):
        path = tmp_path / name
        path.mkdir()
        header = data[:size].replace(old, new)
        assert header != data[:size]
        (path / file.name).write_bytes(header + data[size:])
        top["files"][0]["xxh3"] = manifest.xxh3(header)
        body = {key: value for key, value in top.items() if key != "xxh3"}
        sealed = json.dumps(body, separators=(",", ":")).encode()[:-1]
        (path / "treering.json").write_bytes(sealed + b',"xxh3":"' + manifest.xxh3(sealed).encode() + b'"}\n')
        ckpt = tr.open(path)
        assert np.array_equal(ckpt["l00001/w"][:], np.full(3, 1, np.float32))
        with pytest.raises(UnsupportedError, match=about):
            ckpt["l00007/w"][:]
        for use in (tr.restore, tr.verify):
            with pytest.raises(UnsupportedError, match="undamaged, but not as format version 1 has it"):
                use(path)
