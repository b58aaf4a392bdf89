"""The layout of safetensors files: header and tensors."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering.errors import CorruptError, TreeringError, UnsafeError
from treering.formats.safetensors.header import Tensor, check_side_by_side, decode_header, encode_header, header_size


def header(tensors: Any, metadata: Any = None) -> bytes:
    text = json.dumps({**({"__metadata__": metadata} if metadata is not None else {}), **tensors}).encode()
    return len(text).to_bytes(8, "little") + text


def entry(begin: int, end: int, shape: Any = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_round_trip() -> None:
    tensors = {"a": Tensor("F32", (2, 3), (0, 24)), "": Tensor("U8", (0,), (24, 24))}
    data = encode_header(tensors, {"k": "v"}, 4096)
    assert len(data) == 4096 == header_size(data[:8], 5000, "x")
    found = decode_header(data, "x")
    assert found.metadata == {"k": "v"} and found.size == 4096
    assert {name: (t.dtype, t.shape, t.data_offsets) for name, t in found.tensors.items()} == {
        name: (t.dtype, t.shape, t.data_offsets) for name, t in tensors.items()
    }
    check_side_by_side(found, 4096 + 24, "x")


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": entry(0, 4), "b": entry(5, 8)},
        {"a": entry(0, 4), "b": entry(3, 8)},
        {"a": entry(1, 8)},
        {"a": entry(8, 0, [8])},
    ],
)
def test_holes_and_overlaps_are_unsafe(tensors: Any) -> None:
    data = header(tensors)
    with pytest.raises(UnsafeError):
        check_side_by_side(decode_header(data, "x"), len(data) + 8, "x")


@pytest.mark.parametrize("shape", [[9], [2**40, 2**40]])
def test_a_tensor_of_another_size_than_its_shape_is_refused(tmp_path: pathlib.Path, shape: list[int]) -> None:
    (tmp_path / "x.safetensors").write_bytes(header({"a": entry(0, 8, shape)}) + bytes(8))
    with pytest.raises(CorruptError):
        tr.open(tmp_path / "x.safetensors")


def test_a_file_of_another_size_is_corrupt() -> None:
    data = header({"a": entry(0, 8)})
    for size in (7, 9):
        with pytest.raises(CorruptError):
            check_side_by_side(decode_header(data, "x"), len(data) + size, "x")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a":1}',
        b'{"a":{"shape":"x"}}',
        b'{"__metadata__":{"a":1}}',
        b'{"a":{"shape":[0.5]}}',
        b"\xff",
    ],
)
def test_other_headers_are_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptError, match="x: expected the header"):
        decode_header(len(text).to_bytes(8, "little") + text, "x")


_ENTRY = json.dumps(entry(0, 0)).replace(" ", "")


@pytest.mark.parametrize("text", [r"\"k\":1", r"\"", r"\\", r"\\\":", r"\u0022:", ":", "x"])
def test_duplicate_key_next_to_escapes_is_found(text: str) -> None:
    for about, is_twice in [
        (f'{{"__metadata__":{{"k":"{text}"}},"a":{_ENTRY}}}', False),
        (f'{{"__metadata__":{{"{text}":"v","k":"{text}"}},"{text}":{_ENTRY}}}', False),
        (f'{{"__metadata__":{{"k":"{text}"}},"a":{_ENTRY},"a":{_ENTRY}}}', True),
        (f'{{"__metadata__":{{"k":"{text}","k":"{text}"}},"a":{_ENTRY}}}', True),
        (f'{{"__metadata__":{{"k":"v"}},"a{text}":{_ENTRY},"a{text}":{_ENTRY}}}', True),
    ]:
        data = len(about).to_bytes(8, "little") + about.encode()
        if is_twice:
            with pytest.raises(CorruptError, match="occurs twice"):
                decode_header(data, "x")
        else:
            assert decode_header(data, "x").metadata == json.loads(about)["__metadata__"]


def test_sizes_beyond_the_file_or_the_format() -> None:
    with pytest.raises(CorruptError, match="cut short"):
        header_size((10**11).to_bytes(8, "little"), 10**6, "x")
    with pytest.raises(UnsafeError, match="the format allows"):
        header_size((10**9).to_bytes(8, "little"), 10**12, "x")
    with pytest.raises(TreeringError):
        header_size(b"123", 10**12, "x")


def test_small_and_large_arrays_in_turns(tmp_path: pathlib.Path) -> None:
    """Small arrays are read together, and written before a large one that follows."""
    sizes = [16, 1 << 19, 3, (1 << 18) + 16, 0, 1 << 18, 1 << 18, 7]
    tree = {f"a{n}": np.arange(size, dtype=np.float32) + n for n, size in enumerate(sizes)}
    tr.save(tmp_path / "x.safetensors", tree)
    found = tr.restore(tmp_path / "x.safetensors", tree)
    assert all(np.array_equal(found[name], array) for name, array in tree.items())
