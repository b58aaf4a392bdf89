"""Tests the JavaScript package against the golden files, and against checkpoints that Treering writes and reads."""

import base64
import json
import os
import pathlib
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sampling
import xxhash

import treering as tr

from js import node
from js.random_trees import DTYPES, SMALL_FLOATS, SMALL_INTEGERS, RandomTrees, dtype_of, random_array
from js.range_server import serve

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
VERDICTS = json.loads((GOLDEN / "verdicts" / "verdicts.json").read_text("utf-8"))
BLOCK = 1 << 20
TREES = 10_000 if sampling.STRIDE == 1 else 200

pytestmark = [pytest.mark.long, pytest.mark.whole]


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory) -> Iterator[node.Driver]:
    """The package, in one process of Node for all tests."""
    try:
        with node.driver(tmp_path_factory.mktemp("js")) as driver:
            yield driver
    except node.UnavailableError as error:
        pytest.skip(str(error))


def exact(value: Any) -> str:
    """Returns a text that differs for `1` and `1.0`, `0.0` and `-0.0`, and not for another order of keys."""
    return json.dumps(value, sort_keys=True)


def test_unit_tests_pass(tmp_path: pathlib.Path) -> None:
    try:
        package = node.install(tmp_path)
    except node.UnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(["node", "--test", "test/"], cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_every_verdict_is_reached(js: node.Driver) -> None:
    wrong = {}
    for name, expected in VERDICTS.items():
        found = js("judge", str(GOLDEN / "verdicts" / name))
        for leaf in found["leaves"].values():
            if "bytes" in leaf:
                leaf["xxh3"] = xxhash.xxh3_64_hexdigest(base64.b64decode(leaf.pop("bytes")))
        values = {name: str(value).partition(":")[0] for name, value in expected["metrics"].items()}
        expected = {**expected, "metrics": {name: float(value) for name, value in values.items()}}
        found["metrics"] = {name: float(value) for name, value in found["metrics"].items()}
        differing = [key for key in found if exact(found[key]) != exact(expected[key])]
        if differing:
            wrong[name] = {key: (found[key], expected[key]) for key in differing}
    assert wrong == {}
    assert len(VERDICTS) > 800


def test_files_of_every_release_are_read(js: node.Driver) -> None:
    for path in sorted(GOLDEN.glob("v1-*")):
        folder = path / "1" if path.name == "v1-orbax-run" else path
        assert js("verify", str(folder)) == {}
    for path in sorted((GOLDEN / "future").iterdir()):
        with pytest.raises(node.CallError) as caught:
            js("verify", str(path))
        assert caught.value.name == "UnsupportedError"


def described(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a copy keeps of a manifest: everything but places, files and times."""
    manifest = json.loads((folder / "treering.json").read_text("utf-8"))
    for row in manifest["leaves"]:
        if row[0] == "array":
            row[6] = row[6] if isinstance(row[6], str) else ""
    return {
        key: manifest.get(key) for key in ("step", "metrics", "metadata", "metadata_floats", "tree", "leaves")
    }


def test_random_trees_survive_both_ways(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """JavaScript reads what Treering wrote, and writes it; Treering reads that bit for bit."""
    trees = RandomTrees(int.from_bytes(sampling.SEED.encode(), "little"))
    for start in range(0, TREES, 100):
        pairs = []
        for number in range(start, start + 100):
            trees.arrays.clear()
            options: dict[str, Any] = {"metadata": trees.choice.choice([None, {"a": [1, 1.0, float("nan"), 2**63]}])}
            options["metrics"] = {"loss": trees.numbers.random(), "nan": float("nan"), "n": 1.0}
            pairs.append((tmp_path / f"{number}-py", tmp_path / f"{number}-js"))
            tr.save(pairs[-1][0], trees.tree(), step=number, **options)
        js("copy", pairs)
        for written, copied in pairs:
            assert exact(described(copied)) == exact(described(written)), written
            assert not tr.diff(written, copied), written
        for number in range(start, start + 100):
            for folder in (tmp_path / f"{number}-py", tmp_path / f"{number}-js"):
                for file in folder.iterdir():
                    file.unlink()


def test_numbers_are_those_of_numpy(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """All codes of dtypes of 16 bits and fewer, and random bits of the others."""
    tree: dict[str, np.ndarray] = {}
    for name in DTYPES:
        size = dtype_of(name).itemsize
        tree[name] = random_array(np.random.default_rng(0), name, (64,))
        if name in (*SMALL_FLOATS, "float16"):
            codes = np.arange(1 << min(8 * size, {"4": 4, "6": 6}.get(name[5:6], 16)))
            tree[name] = codes.astype(f"u{size}").view(dtype_of(name))
    tr.save(tmp_path / "a", tree)
    for name, array in tree.items():
        found = js("read", str(tmp_path / "a"), name)
        if name == "<U3":
            assert found["data"] == array.tolist()
        elif name == "|S5":
            assert [bytes(text) for text in found["data"]] == array.tolist()
        else:
            expected = array.astype(np.float32) if name in (*SMALL_FLOATS, "float16") else array
            if name in ("complex32", "bcomplex32"):
                expected = array.view(f"{'b' if name[0] == 'b' else ''}float16" if name[0] != "b" else ml_dtypes.bfloat16)
                expected = expected.astype(np.float32)
            raw = base64.b64decode(found["data"])
            if expected.dtype == np.float32:
                numbers = np.frombuffer(raw, np.float32)
                np.testing.assert_array_equal(numbers, expected.reshape(-1))
                finite = ~np.isnan(numbers)
                assert np.array_equal(np.signbit(numbers[finite]), np.signbit(expected.reshape(-1)[finite])), name
            else:
                expected = array.astype(np.int8) if name in SMALL_INTEGERS else expected
                assert raw == expected.tobytes(), name


def test_numbers_are_rounded_as_by_ml_dtypes(js: node.Driver) -> None:
    numbers = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    for name in (*SMALL_FLOATS, "float16"):
        table = np.abs(numbers) if name == "float8_e8m0fnu" else numbers
        # Beyond the range ml_dtypes takes infinity, NaN or the greatest number, by the dtype.
        table = np.clip(table, -float(ml_dtypes.finfo(dtype_of(name)).max), float(ml_dtypes.finfo(dtype_of(name)).max))
        expected = table.astype(dtype_of(name))
        assert base64.b64decode(js("round", name, table.tolist())) == expected.tobytes(), name
    with pytest.raises(node.CallError, match="float4_e2m1fn.*found 100"):
        js("round", "float4_e2m1fn", [100])


def sparse(folder: pathlib.Path, shape: tuple[int, int], leaf: np.ndarray) -> None:
    """Writes a checkpoint of zeros that takes no space on the disk, and one leaf after them."""
    zeros = shape[0] * shape[1]
    size = zeros + leaf.nbytes
    tail = bytes(-leaf.nbytes % BLOCK)
    assert zeros % BLOCK == 0 and not tail
    sums = xxhash.xxh3_64_hexdigest(bytes(BLOCK)) * (zeros // BLOCK)
    sums += "".join(xxhash.xxh3_64_hexdigest(leaf.tobytes()[at : at + BLOCK]) for at in range(0, leaf.nbytes, BLOCK))
    header = json.dumps(
        {
            "__metadata__": {"xxh3": sums, "block": str(BLOCK), "format": "treering", "version": "1"},
            "zeros": {"dtype": "U8", "shape": shape, "data_offsets": [0, zeros]},
            "leaf": {"dtype": "F32", "shape": leaf.shape, "data_offsets": [zeros, size]},
        }
    ).encode()
    header = len(header).to_bytes(8, "little") + header
    folder.mkdir()
    with open(folder / "a.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + zeros)
        file.seek(0, os.SEEK_END)
        file.write(leaf.tobytes())
    manifest = {
        "format": "treering", "version": 1, "created": "2026-11-28T00:00:00Z", "software": {},
        "files": [{"name": "a.safetensors", "size": len(header) + size, "header": len(header),
                   "xxh3": xxhash.xxh3_64_hexdigest(header)}],
        "tree": [["dict", "", ["leaf", "zeros"]], 0, 0],
        "leaves": [["array", "leaf", "numpy", "float32", leaf.shape, "", 0],
                   ["array", "zeros", "numpy", "uint8", shape, "", 0]],
    }  # fmt: skip
    body = json.dumps(manifest)[:-1].encode()
    seal = xxhash.xxh3_64_hexdigest(body)
    (folder / "treering.json").write_bytes(body + f',"xxh3":"{seal}"}}\n'.encode())


def test_requests_of_a_large_checkpoint_are_few(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """A file of 1 GiB: the manifest, the header and the blocks of one leaf are one request each."""
    leaf = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    sparse(tmp_path / "large", (1 << 10, 1 << 20), leaf)
    with serve(tmp_path / "large") as server:
        found = js("read", server.url, "leaf")
        assert base64.b64decode(found["data"]) == leaf.tobytes()
        assert [name for name, _ in server.requests] == ["treering.json", "a.safetensors", "a.safetensors"]
        assert sum(sent for _, sent in server.requests) < leaf.nbytes + 100_000

        server.requests.clear()
        found = js("read", server.url, "leaf", {"start": [300, 0], "stop": [301, 4]})
        assert base64.b64decode(found["data"]) == leaf[300:301, :4].tobytes()
        assert len(server.requests) == 3 and server.requests[-1][1] == BLOCK

        server.requests.clear()
        found = js("read", server.url, "zeros", {"start": [5, 10], "stop": [8, 20]})
        assert base64.b64decode(found["data"]) == bytes(30)
        assert len(server.requests) == 3 and server.requests[-1][1] == 3 * BLOCK

        server.requests.clear()
        found = js("read", server.url, "zeros", {"start": [5, 0], "stop": [5, 20]})
        assert found["shape"] == [0, 20] and found["data"] == ""


def test_a_sharded_leaf_takes_three_requests(js: node.Driver, tmp_path: pathlib.Path) -> None:
    with serve(GOLDEN / "v1-sharded") as server:
        expected = tr.restore(GOLDEN / "v1-sharded")
        for path in ("both", "swapped", "rows", "all"):
            server.requests.clear()
            found = js("read", server.url, path)
            assert base64.b64decode(found["data"]) == expected[path].tobytes()
            assert len(server.requests) == 3
            part = js("read", server.url, path, {"start": [3, 5], "stop": [7, 13]})
            assert base64.b64decode(part["data"]) == expected[path][3:7, 5:13].tobytes()


def test_servers_that_cannot_serve_are_named(js: node.Driver) -> None:
    with serve(GOLDEN / "v1-sharded", ranges=False) as server:
        with pytest.raises(node.CallError, match=r"expected 206, found 200\. The server must support ranges"):
            js("read", server.url, "both")
        with pytest.raises(node.CallError, match=r"expected a checkpoint, found no treering\.json"):
            js("read", f"{server.url}/nothing", "both")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(node.CallError, match="expected an answer") as caught:
        js("read", f"http://127.0.0.1:{port}", "both")
    assert caught.value.name == "SourceError"


def test_damage_is_found_and_named(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """A bit of any byte of a block, of the header, the manifest; a lost file; a longer one."""
    tree = {"a": np.arange(3 * BLOCK, dtype=np.uint8), "b": np.arange(4)}
    folder = tmp_path / "c"
    tr.save(folder, tree)
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in (header, header + BLOCK, header + 2 * BLOCK + 77, header + 3 * BLOCK - 1, len(whole) - 1, 20, 0):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        errors = js("verify", str(folder))
        assert errors and {error["name"] for error in errors.values()} == {"DamagedError"}
        for error in errors.values():
            assert error["file"] == file.name and file.name in error["message"]
            assert error.get("block") == (None if at < header else (at - header) // BLOCK)
        with serve(folder) as server:
            assert js("verify", server.url).keys() == errors.keys()
    file.write_bytes(whole + b"x")
    assert f"expected {len(whole)} bytes, found {len(whole) + 1}" in js("verify", str(folder))["a"]["message"]
    file.unlink()
    assert f"expected the file {file.name}, found none" in js("verify", str(folder))["a"]["message"]
