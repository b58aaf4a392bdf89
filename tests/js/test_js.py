"""Tests the JavaScript package against the golden files, and against checkpoints that Treering writes and reads."""

import base64
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

import sampling
import treering as tr
from js import node
from js.mutants import write_mutant
from js.random_trees import DTYPES, SMALL_FLOATS, SMALL_INTEGERS, RandomTrees, dtype_of, random_array
from js.range_server import serve

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
DIFFERENCES = ("v1-differences", "v1-differences-in-parts")
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


def test_unit_tests_pass(js: node.Driver) -> None:
    done = subprocess.run(["node", "--test", "test/"], cwd=js.package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_example_runs(tmp_path: pathlib.Path, js: node.Driver) -> None:
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    tr.save(tmp_path / "runs" / "gpt" / "step-00001000", {"params": {"w": w}}, step=1000, metrics={"loss": 0.5})
    text = (node.ROOT / "js" / "README.md").read_text("utf-8")
    (example,) = re.findall(r"^```ts\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (js.package / "example.mjs").write_text(example)
    command = ["node", str(js.package / "example.mjs")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(tr.restore(tmp_path / "small")["params"]["w"], w.astype(ml_dtypes.bfloat16))


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
        if path.name in DIFFERENCES:  # the next tests read these
            continue
        assert js("verify", str(folder)) == []
    for path in sorted((GOLDEN / "future").iterdir()):
        with pytest.raises(node.CallError) as caught:
            js("verify", str(path))
        assert caught.value.name == "UnsupportedError"


def assert_read_alike(js: node.Driver, step: pathlib.Path) -> None:
    """Checks that JavaScript reads from a version what Treering reads."""
    assert js("verify", str(step)) == []
    for name, expected in tr.restore(step).items():
        assert base64.b64decode(js("read", str(step), name)["bytes"]) == expected.tobytes(), (step, name)


def sealed(manifest: dict[str, Any]) -> bytes:
    """Returns the bytes of a manifest, with its checksum."""
    manifest.pop("xxh3", None)
    body = json.dumps(manifest)[:-1].encode()
    return body + f',"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()


@pytest.mark.parametrize("golden", DIFFERENCES)
def test_versions_of_every_release_are_read(golden: str, js: node.Driver) -> None:
    for step in sorted((GOLDEN / golden).iterdir()):
        assert_read_alike(js, step)


def test_parts_that_are_stored_as_they_are(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """Between parts that are differences. One part too few, or without a base, is no version of this format."""
    shutil.copytree(GOLDEN / "v1-differences-in-parts", tmp_path / "s")
    first, second = (tmp_path / "s" / f"step-0000000{number}" for number in (1, 2))
    manifest, complete = (json.loads((step / "treering.json").read_text()) for step in (second, first))
    for name in (file["name"] for file in complete["files"]):
        shutil.copy(first / name, second)
    manifest["files"] += complete["files"]
    for row in manifest["leaves"]:
        where = row[6]
        if where["requires"] == ["differences-in-parts"]:
            where["parts"][1] = None
            layout = manifest["layouts"][where["where"][0]]
            # Its second piece is in the second file of the base, which is the fourth here.
            manifest["holders"].append([manifest["holders"][layout["holders"]][0], [3]])
            layout["holders"] = len(manifest["holders"]) - 1
    (second / "treering.json").write_bytes(sealed(manifest))
    assert_read_alike(js, second)
    ((_, bf16),) = [item for item in tr.restore(second).items() if item[0] == "bf16"]
    assert bf16.tobytes()[600:] == tr.restore(first)["bf16"].tobytes()[600:]
    assert bf16.tobytes()[:600] != tr.restore(first)["bf16"].tobytes()[:600]
    rows = json.dumps(manifest["leaves"])
    for change in ("short", "long", "no base", "no list", "file", "constructor"):
        manifest["leaves"] = json.loads(rows)
        where = manifest["leaves"][0][6]
        where["parts"] = {"short": where["parts"][:1], "long": [*where["parts"], None]}.get(change, where["parts"])
        where["parts"] = {"no list": 3}.get(change, where["parts"])
        where["where"] = {"file": 0}.get(change, where["where"])
        where["requires"] = {"constructor": ["constructor"]}.get(change, where["requires"])
        wrong = {key: value for key, value in manifest.items() if change != "no base" or key != "base"}
        (second / "treering.json").write_bytes(sealed(wrong))
        ((found, message),) = js("verdicts", [str(second)])
        assert found == "unsupported", (change, found, message)
        with pytest.raises(tr.errors.UnsupportedError):
            tr.restore(second)


def test_differences_to_a_base_are_read(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """From folders and servers, in a rewound run, and none of a base that is missing or another."""
    numbers = np.random.default_rng(0)
    tree = {
        name: numbers.integers(0, 256, (100_000, dtype_of(name).itemsize), np.uint8).view(dtype_of(name)).reshape(-1)
        for name in ("uint8", "bfloat16", "int64", "complex128")
    }
    with tr.Publisher(tmp_path / "run") as publisher:
        for version in range(1, 5):
            for array in tree.values():
                part = array.view(f"u{min(8, array.itemsize)}")
                part[numbers.integers(0, part.size, 2000)] += numbers.integers(-9, 9, 2000).astype(part.dtype)
            publisher.publish(version, {name: array.copy() for name, array in tree.items()})
        publisher.wait()
    (tmp_path / "run" / "rewound-1").mkdir()
    last = tmp_path / "run" / "rewound-1" / "step-00000004"
    (tmp_path / "run" / "step-00000004").rename(last)
    assert "differences" in (last / "treering.json").read_text()
    with serve(tmp_path / "run") as server:
        for place in (str(last), f"{server.url}/rewound-1/step-00000004"):
            for name, array in tree.items():
                assert base64.b64decode(js("read", place, name)["bytes"]) == array.tobytes()
                part = js("read", place, name, {"start": [5], "stop": [700]})
                assert base64.b64decode(part["bytes"]) == array[5:700].tobytes()
    shutil.copy(tmp_path / "run" / "step-00000002" / "treering.json", tmp_path / "run" / "step-00000003")
    (problem, *_) = js("verify", str(last))
    assert problem["name"] == "DamagedError" and "expected its base, found" in problem["message"]
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    (problem, *_) = js("verify", str(last))
    assert problem["leaf"] and "found no treering.json" in problem["message"]


@pytest.mark.parametrize("golden", DIFFERENCES)
def test_random_damage_of_a_difference_is_found(golden: str, js: node.Driver, tmp_path: pathlib.Path) -> None:
    """Frames with right checksums that are no frames, or of another size, do not pass, crash or hang."""
    origin = GOLDEN / golden
    shutil.copytree(origin / "step-00000001", tmp_path / "step-00000001")
    choice, folders = random.Random(sampling.SEED), []
    for number in range(200 if sampling.STRIDE == 1 else 25):
        folder = tmp_path / f"changed-{number}"
        shutil.copytree(origin / "step-00000002", folder)
        manifest = json.loads((folder / "treering.json").read_text())
        listed = choice.choice(manifest["files"])
        file, header = folder / listed["name"], listed["header"]
        data = bytearray(file.read_bytes())
        for _ in range(choice.choice([1, 1, 3])):
            data[choice.randrange(header, len(data))] ^= 1 << choice.randrange(8)
        begin = bytes(data[:header]).replace(
            xxhash.xxh3_64_hexdigest((origin / "step-00000002" / file.name).read_bytes()[header:]).encode(),
            xxhash.xxh3_64_hexdigest(bytes(data[header:])).encode(),
        )
        file.write_bytes(begin + data[header:])
        listed["xxh3"] = xxhash.xxh3_64_hexdigest(begin)
        (folder / "treering.json").write_bytes(sealed(manifest))
        folders.append(folder)
    for folder, (found, message) in zip(folders, js("verdicts", [str(folder) for folder in folders]), strict=True):
        try:
            tr.restore(folder)
            expected = "valid"
        except tr.errors.CorruptError:
            expected = "damaged"
        assert found == expected, (folder, message)


def described(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a copy keeps of a manifest: everything but places, files and times."""
    manifest = json.loads((folder / "treering.json").read_text("utf-8"))
    for row in manifest["leaves"]:
        if row[0] == "array":
            row[6] = row[6] if isinstance(row[6], str) else ""
    return {key: manifest.get(key) for key in ("step", "metrics", "metadata", "metadata_floats", "tree", "leaves")}


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


def test_mutants_have_the_verdict_of_treering(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """Changes checkpoints and seals them again. Where the readers differ, the format page leaves a question open."""
    choice = random.Random(sampling.SEED)
    origins = [GOLDEN / name for name in ("v1-everything", "v1-sharded", "v1-placement", "v1-iterator-states")]
    origins += [GOLDEN / name / "step-00000001" for name in DIFFERENCES]
    for name, expected in VERDICTS.items():
        if (
            re.match("field-m|layout|placement|requires|stat|tie|tree-k|value-[^i]", name)
            and expected["checkpoint"] == "valid"
        ):
            origins.append(GOLDEN / "verdicts" / name)
    folders = [tmp_path / str(number) for number in range(10_000 if sampling.STRIDE == 1 else 200)]
    for folder in folders:
        write_mutant(choice, choice.choice(origins), folder)
    for folder, (found, message) in zip(folders, js("verdicts", [str(folder) for folder in folders]), strict=True):
        try:
            expected = "valid" if tr.verify(folder).ok else "damaged"
        except tr.errors.UnsupportedError:
            expected = "unsupported"
        # What is both damaged and unsupported may be called either.
        assert (found == "valid") == (expected == "valid"), (folder, found, expected, message)


def in_javascript(name: str, array: np.ndarray) -> np.ndarray:
    """Returns the numbers that the README promises."""
    if name in (*SMALL_FLOATS, "float16"):
        return array.astype(np.float32)
    if name in ("complex32", "bcomplex32"):
        return array.view(ml_dtypes.bfloat16 if name == "bcomplex32" else np.float16).astype(np.float32)
    return array.astype(np.int8) if name in SMALL_INTEGERS else array


def test_numbers_are_those_of_numpy(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """All codes of the floats of 16 bits and fewer, and random bits of the other dtypes."""
    tree: dict[str, np.ndarray] = {}
    for name in DTYPES:
        tree[name] = random_array(np.random.default_rng(0), name, (64,))
        if name in (*SMALL_FLOATS, "float16"):
            bits = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}.get(name, 8 * dtype_of(name).itemsize)
            tree[name] = np.arange(1 << bits).astype(f"u{dtype_of(name).itemsize}").view(dtype_of(name))
    tr.save(tmp_path / "a", tree)
    for name, array in tree.items():
        data = js("read", str(tmp_path / "a"), name)["data"]
        if name == "<U3":
            assert data == array.tolist()
        elif name == "|S5":
            assert [bytes(text) for text in data] == array.tolist()
        else:
            expected = in_javascript(name, array).reshape(-1)
            found = np.frombuffer(base64.b64decode(data), expected.dtype)
            np.testing.assert_array_equal(found, expected)
            if expected.dtype.kind == "f":
                numbers = ~np.isnan(expected)
                assert np.array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers])), name


def test_numbers_are_rounded_as_by_ml_dtypes(js: node.Driver) -> None:
    """Random numbers, and ties: the middles between neighbours."""
    for name in (*SMALL_FLOATS, "float16"):
        dtype = dtype_of(name)
        largest = float(ml_dtypes.finfo(dtype).max)  # beyond it ml_dtypes takes infinity, NaN or the largest number
        spread = np.random.default_rng(0).standard_normal(2000).clip(-largest, largest)
        spread = np.abs(spread) if name == "float8_e8m0fnu" else spread
        known = np.unique(np.append(spread.astype(dtype), largest).astype(np.float64))
        numbers = np.concatenate([spread, (known[:-1] + known[1:]) / 2]).astype(np.float32)
        numbers = numbers[numbers != 0]
        expected = numbers.astype(dtype)
        assert base64.b64decode(js("round", name, numbers.tolist())) == expected.tobytes(), name
    with pytest.raises(node.CallError, match=r"float4_e2m1fn.*found 100"):
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


def test_small_leaves_at_once_share_requests(js: node.Driver, tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {f"p{n:04d}": np.full(1000, n, np.float32) for n in range(1000)})
    with serve(tmp_path / "c") as server:
        assert js("together", server.url) == [list(range(1000))] * 2
        size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
        assert len(server.requests) == 6  # for each of both: the manifest, the header and all blocks
        assert sum(sent for _, sent in server.requests) <= 2 * size


def test_faults_of_a_server_that_pass_are_waited_for(js: node.Driver, tmp_path: pathlib.Path) -> None:
    leaf = np.arange(1 << 20, dtype=np.float32)
    tr.save(tmp_path / "c", {"leaf": leaf})
    with serve(tmp_path / "c") as server:
        server.faults = ["cut", (503, {}), (429, {"Retry-After": "0"}), "cut", "cut", (500, {}), "cut"]
        assert base64.b64decode(js("read", server.url, "leaf")["data"]) == leaf.tobytes()
        assert not server.faults
        assert sum(sent for _, sent in server.requests) < 3 * leaf.nbytes  # each continues where the last one ended

        for faults, expected in (
            ([(503, {"Retry-After": "0"})] * 4, r"expected 206, found 503\. Try again in 0 s"),
            ([(429, {"Retry-After": "99"})], r"expected 206, found 429\. Try again in 99 s"),
            ([(403, {})], r"expected 206, found 403\. Check the URL and your access"),
            ([(206, {"Content-Encoding": "gzip"})], r"found them encoded as gzip\. Store it without Content-Encoding"),
        ):
            server.faults = list(faults)
            with pytest.raises(node.CallError, match=expected) as caught:
                js("read", server.url, "leaf")
            assert caught.value.name == "SourceError" and not server.faults

        # Another file takes the place while a read waits: its bytes never mix with those that came.
        (file,) = (tmp_path / "c").glob("*.safetensors")
        data = file.read_bytes()
        for other, message in ((bytes(len(data)), "expected the checksum"), (data + b"x", f"found {len(data) + 1}")):
            server.faults = [str, "cut", lambda other=other: file.write_bytes(other)]
            with pytest.raises(node.CallError, match=message) as caught:
                js("read", server.url, "leaf")
            assert caught.value.name == "DamagedError" and not server.faults
            file.write_bytes(data)


def test_servers_that_cannot_serve_are_named(js: node.Driver, tmp_path: pathlib.Path) -> None:
    with serve(GOLDEN / "v1-sharded", ranges=False) as server:
        assert js("verify", server.url) == []
        names = [name for name, _ in server.requests]
        assert len(set(names)) == len(names)  # every file is read once
        with pytest.raises(node.CallError, match=r"expected a checkpoint, found no treering\.json"):
            js("read", f"{server.url}/nothing", "both")
    sparse(tmp_path / "large", (64, 1 << 20), np.zeros(1 << 18, np.float32))
    message = r"expected 206, found 200\. A server must support ranges if .* more than 64 MiB"
    with serve(tmp_path / "large", ranges=False) as server, pytest.raises(node.CallError, match=message):
        js("read", server.url, "leaf")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(node.CallError, match="expected an answer") as caught:
        js("read", f"http://127.0.0.1:{port}", "both")
    assert caught.value.name == "SourceError"


@pytest.mark.rare
def test_memory_is_that_of_the_leaf(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """A leaf on a server, and `verify` of one that is larger than any array of JavaScript."""
    sparse(tmp_path / "part", (256, 1 << 20), np.zeros(1 << 18, np.float32))
    sparse(tmp_path / "large", (4097, 1 << 20), np.zeros(1 << 18, np.float32))
    begin = "import * as tr from 'treering';\nconst before = process.resourceUsage().maxRSS >> 10;\n"
    end = "console.log((process.resourceUsage().maxRSS >> 10) - before);"
    with serve(tmp_path / "part") as server:
        for work, most in (
            (f"await (await tr.open({server.url!r})).leaf('zeros').read();", 1.2 * 256),
            (f"const found = await (await tr.open({str(tmp_path / 'large')!r})).verify();", 200),
        ):
            (js.package / "memory.mjs").write_text(begin + work + end)
            done = subprocess.run(["node", js.package / "memory.mjs"], capture_output=True, text=True, check=True)
            assert float(done.stdout) <= most


def test_damage_is_found_and_named(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """A bit of any byte of a block, of the header, the manifest; a lost file; a longer one."""
    tree = {"a": np.arange(3 * BLOCK, dtype=np.uint8), "b": np.arange(4)}
    folder = tmp_path / "c"
    tr.save(folder, tree)
    (file,) = folder.glob("*.safetensors")
    intact = file.read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    for at in (header, header + BLOCK, header + 2 * BLOCK + 77, header + 3 * BLOCK - 1, len(intact) - 1, 20, 0):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        errors = js("verify", str(folder))
        assert errors and {error["name"] for error in errors} == {"DamagedError"}
        for error in errors:
            assert error["file"] == file.name and file.name in error["message"]
            assert error.get("block") == (None if at < header else (at - header) // BLOCK)
        with serve(folder) as server:
            assert js("verify", server.url) == errors
    file.write_bytes(intact + b"x")
    assert f"expected {len(intact)} bytes, found {len(intact) + 1}" in js("verify", str(folder))[0]["message"]
    file.unlink()
    assert f"expected the file {file.name}, found none" in js("verify", str(folder))[0]["message"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_commit_is_one_rename_between_syncs(js: node.Driver, tmp_path: pathlib.Path) -> None:
    """The files and their folder are synced before the rename, and every folder above that is new or changed after."""
    target = tmp_path / "new" / "run" / "ckpt"
    (js.package / "commit.mjs").write_text(
        f"import {{ write }} from 'treering'; await write({str(target)!r}, {{ x: new Float32Array(10) }});"
    )
    command = ["strace", "-f", "-y", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=fsync,rename"]
    subprocess.run([*command, "node", str(js.package / "commit.mjs")], check=True)
    calls = re.findall(r"(fsync|rename)\((?:\d+<|\")([^>\"]+)", (tmp_path / "trace").read_text())
    renamed = [path for name, path in calls if name == "rename"]
    (hidden,) = renamed
    assert re.fullmatch(r"\.ckpt\.[0-9a-f]{6}\.tmp", pathlib.Path(hidden).name)
    at = calls.index(("rename", hidden))
    before, after = ([path for _, path in part] for part in (calls[:at], calls[at + 1 :]))
    names = sorted(file.name for file in target.iterdir())
    assert before == [f"{hidden}/{name}" for name in names] + [hidden]
    assert after == [str(target.parent), str(target.parent.parent), str(tmp_path)]
    assert not tr.verify(target).problems
