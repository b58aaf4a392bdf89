"""Versions of published weights: every one is what was published, whatever happens in between."""

import itertools
import json
import logging
import pathlib
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import obstore.store
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import accelerator
import golden_trees
import s3
import spec_reader
import treering as tr
from helpers import assert_same
from hostile_input import flip
from jobs import publish, run_job
from resident_memory import peak_bytes
from treering import stores
from treering._cli.main import cli
from treering._tools.copy import CheckpointCopy, copy_checkpoints
from treering.errors import CorruptError, MismatchError, NotFoundError, SaveError, UnsupportedError
from treering.formats.treering import deltas
from treering.formats.treering.manifest import xxh3
from treering.formats.treering.manifest_fields import Published
from treering.formats.treering.read import Reader
from treering.stores.objects.store import ObjectStore
from treering.stores.posix import Disk

pytest.importorskip("zstandard")


@pytest.fixture(params=["disk", "bucket"])
def stream(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[str]:
    """A place for a stream."""
    if request.param == "disk":
        yield str(tmp_path / "stream")
        return
    buckets = ObjectStore()
    buckets.add("weights://b", obstore.store.MemoryStore())
    with stores.using(buckets, "weights"):
        yield f"weights://b/{secrets.token_hex(4)}"


def _tree(seed: int = 0) -> dict[str, Any]:
    """Makes arrays of every size of element, some of them odd, and leaves that are no arrays."""
    rng = np.random.default_rng(seed)
    shared = jnp.asarray(rng.standard_normal((40, 30)), jnp.bfloat16)
    return {
        "embed": shared,
        "head": shared,
        "f32": jnp.asarray(rng.standard_normal((3, 500)), jnp.float32),
        "f8": rng.standard_normal(700).astype(ml_dtypes.float8_e4m3fn),
        "f64": rng.standard_normal(90),
        "c128": rng.standard_normal(50) + 1j,
        "i4": rng.integers(-8, 8, 600).astype(ml_dtypes.int4),
        "bits": rng.integers(0, 2, 900) > 0,
        "key": jax.random.key(seed),
        "nothing": jnp.zeros((0, 4)),
        "one": np.float32(seed),
        "steps": 3,
        "name": "policy",
    }


def _changed(tree: dict[str, Any], seed: int) -> dict[str, Any]:
    """Changes a few elements of some arrays, one of them completely, by any bits."""
    rng = np.random.default_rng(seed)
    new = dict(tree)
    for name in rng.permutation([name for name, leaf in tree.items() if hasattr(leaf, "dtype") and name != "key"])[:6]:
        array = np.array(tree[name], order="C")
        flat = array.reshape(-1).view(np.uint8)
        places = slice(None) if rng.random() < 0.15 else rng.integers(0, max(flat.size, 1), min(flat.size, 9))
        if array.dtype not in (np.bool_, ml_dtypes.int4):
            flat[places] ^= rng.integers(0, 256, flat[places].size, np.uint8)
        elif array.size:
            array.reshape(-1)[rng.integers(0, array.size, 5)] = 1
        new[name] = jnp.asarray(array) if isinstance(tree[name], jax.Array) else array.reshape(tree[name].shape)[()]
    new["head"] = new["embed"]
    return {**new, "steps": seed}


def _publish(stream: str, trees: list[Any], first: int = 1, **options: Any) -> None:
    with tr.Publisher(stream, **options) as publisher:
        for version, tree in enumerate(trees, first):
            publisher.publish(version, tree)


def _reader(stream: str, version: int) -> Reader:
    found = tr.open(stream, step=version)._source
    assert isinstance(found, Reader)
    return found


def _history(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return list(itertools.accumulate(range(1, count), _changed, initial=_tree(seed)))


@pytest.mark.parametrize("full_every", [1, 3, 100])
def test_every_version_is_what_was_published(stream: str, full_every: int) -> None:
    trees = _history(8)
    _publish(stream, trees, full_every=full_every)
    for version, tree in enumerate(trees, 1):
        ckpt = tr.open(stream, step=version)
        assert_same(ckpt.restore(tree), tree)
        assert_same(tr.open(stream, step=version).at("f32").restore(tree["f32"]), tree["f32"])
        assert tr.verify(ckpt.path).ok and tr.diff(ckpt.path, tree).equal
        assert (_reader(stream, version).made_from is None) == ((version - 1) % full_every == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_differences_of_any_arrays(seed: int) -> None:
    """A difference gives the new array back. Bytes that are cut or changed give it back, or raise `CorruptError`."""
    rng = np.random.default_rng(seed)
    for size in (1, 2, 4, 8, 16):
        old = rng.integers(0, 256, size * int(rng.integers(1, 200_000)), np.uint8)
        for count in (0, 1, 3, old.size // size // 5):
            new = old.copy()
            places = rng.choice(old.size // size, min(count, old.size // size), replace=False)
            new.reshape(-1, size)[places] = rng.integers(0, 256, (places.size, size), np.uint8)
            made = deltas.difference(new, old, size)
            if made is None:
                continue
            delta = _delta(made)
            assert np.array_equal(deltas.applied(old, made.data, delta, size), new)
            for _ in range(20 if made.changed else 0):
                data = made.data.copy()[: rng.integers(1, made.data.size + 1)]
                data[rng.integers(0, data.size)] ^= 1 << rng.integers(0, 8)
                try:
                    found = deltas.applied(old, data, delta, size)
                except CorruptError:
                    continue
                assert found.size == old.size


def _delta(made: deltas.Difference) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(count=made.changed, gap=made.gap)


def test_frames_that_expand_are_refused() -> None:
    """A frame with more content than the difference has, with no size, or with a false one."""
    import zstandard

    old, large = np.zeros(5000, np.uint8), bytes(1 << 26)
    lying = bytearray(zstandard.ZstdCompressor().compress(large))
    lying[6:10] = (100).to_bytes(4, "little")
    for frame in (
        zstandard.ZstdCompressor().compress(large),
        zstandard.ZstdCompressor(write_content_size=False).compress(large),
        bytes(lying),
        zstandard.ZstdCompressor().compress(bytes(99)),
        b"",
    ):
        delta = _delta(deltas.Difference(np.frombuffer(frame, np.uint8), 50, 1))
        assert peak_bytes(lambda data=frame, delta=delta: _refused(old, data, delta))[0] < 16


def _refused(old: np.ndarray, data: bytes, delta: Any) -> None:
    with pytest.raises(CorruptError, match="zstd frame"):
        deltas.applied(old, np.frombuffer(data, np.uint8), delta, 1)


def test_ls_says_what_was_sent(tmp_path: pathlib.Path) -> None:
    """Also for the hook of the trainer, and from a manifest whose record is not as it should be."""
    reports: list[tr.SaveReport] = []
    w = np.arange(4000.0)
    trees = [{"w": w, "all": w[:1000]}, {"w": np.where(w < 10, -1, w), "all": w[:1000] + 1}]
    _publish(str(tmp_path / "s"), [*trees, trees[1]], on_save=reports.append)
    steps = json.loads(CliRunner().invoke(cli, ["ls", f"{tmp_path}/s", "--json"]).output)["steps"]
    assert [(step["base"], step["changed"]) for step in steps] == [(None, None), (1, 1010 / 5000), (2, 0.0)]
    assert all(0 < step["seconds"] < 60 for step in steps)
    assert [report.changed for report in reports] == [step["changed"] for step in steps]
    assert [report.nbytes for report in reports] == [step["nbytes"] for step in steps]
    lines = CliRunner().invoke(cli, ["ls", f"{tmp_path}/s"]).output.splitlines()
    assert "kind" in lines[0] and "complete" in lines[1] and "from 1" in lines[2] and "20.20%" in lines[2]
    tr.save(tmp_path / "run" / "step-1", {"w": 1}, step=1)
    assert "kind" not in CliRunner().invoke(cli, ["ls", f"{tmp_path}/run"]).output
    assert Published.of({"elements": -1}) is None and Published.of([1]) is None and Published.of(None) is None


def test_few_bytes_are_sent_for_few_changes(tmp_path: pathlib.Path) -> None:
    """A small step of bfloat16 weights takes less than half the bytes of the compressed exclusive or."""
    import zstandard

    rng = np.random.default_rng(0)
    master = rng.standard_normal(1 << 20, np.float32) * 0.02
    old, new = (
        (master + step * 3e-6 * rng.standard_normal(1 << 20, np.float32)).astype(ml_dtypes.bfloat16) for step in (0, 1)
    )
    _publish(f"{tmp_path}/s", [{"w": old}, {"w": new}, {"w": new}])
    sent = [_reader(f"{tmp_path}/s", version).deltas["w"][0].stored.nbytes for version in (2, 3)]
    xor = zstandard.ZstdCompressor(level=1).compress((old.view(np.uint8) ^ new.view(np.uint8)).tobytes())
    assert sent[0] < 0.5 * len(xor) and sent[1] == 0


def test_rules_casts_meshes_and_donated_arrays(tmp_path: pathlib.Path) -> None:
    """Publishes the tree after the rules, as it was at the call, whatever JAX does with its arrays later."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    weights = jax.device_put(np.arange(4096, dtype=np.float32).reshape(64, 64), NamedSharding(mesh, P("x")))
    update = jax.jit(lambda tree: jax.tree.map(lambda w: w.at[::17].add(1.0), tree), donate_argnums=0)
    rules = [tr.rules.rename("layers/w", "model.layers.0.weight"), tr.rules.drop("opt/**")]
    tree: Any = {"layers": {"w": weights}, "opt": {"mu": jnp.zeros(3)}}
    expected: list[np.ndarray] = []
    with (
        tr.Publisher(tmp_path / "plain") as plain,
        tr.Publisher(tmp_path / "ruled", rules=rules, dtype="bfloat16") as ruled,
    ):
        for version in range(1, 5):
            expected.append(np.array(tree["layers"]["w"]))
            plain.publish(version, tree)
            ruled.publish(version, tree)
            tree = update(tree)
    for version, array in enumerate(expected, 1):
        found = tr.open(tmp_path / "plain", step=version).restore()
        assert np.array_equal(found["layers"]["w"], array)
        other = tr.open(tmp_path / "ruled", step=version).restore()
        assert list(other) == ["model.layers.0.weight"]
        assert np.array_equal(other["model.layers.0.weight"], array.astype(ml_dtypes.bfloat16))
    assert _reader(str(tmp_path / "ruled"), 4).deltas and _reader(str(tmp_path / "plain"), 4).deltas


def test_arrays_that_are_the_same_object_are_not_copied(tmp_path: pathlib.Path) -> None:
    tree = {"frozen": jnp.ones(5000), "w": jnp.zeros(5000)}
    staged: list[int] = []
    with tr.Publisher(tmp_path) as publisher:
        of_save: Callable[..., Any] = publisher._run._saver.reuse  # type: ignore[assignment]

        def counting(target: Any, saved: Any) -> Any:
            found = of_save(target, saved)
            staged.append(sum(shard.nbytes for shard in found.described.shards))
            return found

        publisher._run._saver.reuse = counting
        for version in range(1, 4):
            publisher.publish(version, {**tree, "w": tree["w"].at[version].set(1.0)})
        publisher.wait()
        publisher.publish(4, tree)
    assert staged == [40_000, 20_000, 20_000, 20_000]
    assert np.array_equal(tr.open(tmp_path, step=4).restore()["frozen"], tree["frozen"])


def test_unchanged_arrays_are_not_copied_from_devices(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that a step returns as new objects with the old values are recognized on their devices from then on."""
    double = accelerator.install(monkeypatch)
    spread = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    frozen = {"f": np.arange(9000, dtype=np.float32), "s": np.arange(4000, dtype=np.float32)}
    copied: list[int] = []

    def tree(version: int) -> dict[str, Any]:
        f, w = (jax.device_put(array, jax.devices()[0]) for array in (frozen["f"], np.full(1000, float(version))))
        return {"f": f, "w": w, "s": jax.device_put(frozen["s"], spread)}

    with tr.Publisher(tmp_path, full_every=5) as publisher:
        for version in range(1, 9):
            frozen["s"][7] = max(version, 6)  # It changes again at last.
            before = double.nbytes
            publisher.publish(version, tree(version))
            publisher.wait()
            copied.append(double.nbytes - before)
    w, f, s = 4000, 36_000, 16_000
    assert copied[:4] == [w + f + s] * 4 and copied[4:] == [w, w, w + s, w + s]
    for version in range(1, 9):
        found = tr.open(tmp_path, step=version).restore()
        assert np.array_equal(found["f"], frozen["f"]) and found["s"][7] == max(version, 6)
        assert (found["w"] == version).all()


def test_a_publisher_that_starts_again_continues(stream: str, caplog: pytest.LogCaptureFixture) -> None:
    """It compares with the last version in the stream, and keeps the distance of complete versions."""
    trees = _history(7)
    _publish(stream, trees[:2], full_every=5)
    _publish(stream, trees[1:4], first=3, full_every=5)  # Version 3 is version 2 again.
    third = _reader(stream, 3)
    assert third.made_from and all(
        not part.delta or part.delta.count == 0 for parts in third.deltas.values() for part in parts
    )
    _publish(stream, trees[4:], first=6, full_every=5)
    complete = [version for version in tr.steps(stream) if _reader(stream, version).made_from is None]
    assert tr.steps(stream) == [1, 2, 3, 4, 5, 6, 7, 8] and complete == [1, 6]
    for version, tree in zip(range(3, 9), trees[1:], strict=True):
        assert_same(tr.open(stream, step=version).restore(tree), tree)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_retention_keeps_what_versions_are_made_from(stream: str) -> None:
    trees = _history(12)
    with tr.Publisher(stream, full_every=4, keep=tr.keep.last(2)) as publisher:
        for version, tree in enumerate(trees, 1):
            publisher.publish(version, tree)
            publisher.wait()
            publisher._run._saver._retention.wait()
            complete = (version - 1) // 4 * 4 + 1
            first = complete if version > complete else max(complete - 4, 1)  # The version before needs its bases.
            assert tr.steps(stream) == list(range(first, version + 1)), version
    for version in tr.steps(stream):
        assert_same(tr.open(stream, step=version).restore(trees[0]), trees[version - 1])


def test_deletions_of_versions_wait_for_a_slow_sync(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The background removes the directory of a version once that has no manifest, durably."""

    class Slow(Disk):
        def sync_dir(self, path: str) -> None:
            if threading.current_thread().name != "treering-upkeep":
                time.sleep(0.05)
            super().sync_dir(path)

    use_disk(Slow())
    _publish(str(tmp_path / "s"), _history(5), full_every=2, keep=tr.keep.last(1))
    assert tr.steps(tmp_path / "s") == [5] and "failed" not in caplog.text


def test_a_version_that_others_need_is_not_deleted(tmp_path: pathlib.Path) -> None:
    _publish(str(tmp_path), _history(6), full_every=3)
    run = tr.Checkpointer(tmp_path)
    with pytest.raises(MismatchError, match="step 2 is stored as the difference to it; delete step 2 first"):
        run.delete(1)
    run.delete(3)
    run.delete(2)
    run.pin(5)
    run.close()
    result = CliRunner().invoke(cli, ["delete", str(tmp_path), "4", "--yes"])
    assert "step 5 would stay, and is stored as the difference to step 4" in str(result.exception)
    plan = CliRunner().invoke(cli, ["prune", str(tmp_path), "last:1", "--dry-run"]).output
    done = CliRunner().invoke(cli, ["prune", str(tmp_path), "last:1", "--yes"])
    assert done.exit_code == 0 and tr.steps(tmp_path) == [4, 5, 6], (plan, done.output)


def test_a_pinned_version_keeps_its_bases(tmp_path: pathlib.Path) -> None:
    trees = _history(7)
    with tr.Publisher(tmp_path, full_every=2, keep=tr.keep.last(1)) as publisher:
        for version, tree in enumerate(trees, 1):
            publisher.publish(version, tree)
            publisher.wait()
            if version == 2:
                tr.Checkpointer(tmp_path).pin(2)
    assert tr.steps(tmp_path) == [1, 2, 7]
    assert_same(tr.open(tmp_path, step=2).restore(trees[1]), trees[1])


def test_wrong_calls_are_refused_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w": jnp.zeros((4, 2)), "b": jnp.ones(2)}
    with pytest.raises(MismatchError, match="full_every=0: expected an integer from 1 to 1000"):
        tr.Publisher(tmp_path, full_every=0)
    with tr.Publisher(tmp_path) as publisher:
        publisher.publish(5, tree)
        for version in (5, 4):
            with pytest.raises(MismatchError, match=f"version {version}: expected a later one than 5"):
                publisher.publish(version, tree)
        for other, problem in (
            ({**tree, "w": jnp.zeros((2, 4))}, r"w: expected float32 \[4, 2\], found float32 \[2, 4\]"),
            ({**tree, "w": jnp.zeros((4, 2), jnp.bfloat16)}, "found bfloat16"),
            ({"w": tree["w"]}, "missing: b"),
            ({**tree, "c": tree["b"]}, "not in it: c"),
        ):
            with pytest.raises(MismatchError, match=problem):
                publisher.publish(6, other)
        with pytest.raises(MismatchError, match="expected an integer"):
            publisher.publish(-1, tree)
    with tr.Publisher(tmp_path) as publisher, pytest.raises(MismatchError, match="missing: b"):
        publisher.publish(6, {"w": tree["w"]})  # A publisher that starts again knows the stream, too.
    assert tr.steps(tmp_path) == [5]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    publisher = tr.Publisher(tmp_path)
    pending = publisher.publish(6, {**tree, "w": tree["w"].at[0, 0].set(1.0)})
    assert pending
    with pytest.raises(UnsupportedError, match=r"pip install 'treering\[publish\]'"):
        pending.result()
    publisher.close()


def test_a_failed_version_is_not_a_base(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The version after a failed one is stored as the difference to the last committed one."""

    full = False

    class Full(Disk):
        def write(self, *args: Any) -> Any:
            if full:
                raise OSError(28, "No space left on device")
            return super().write(*args)

    use_disk(Full())
    trees = _history(4)
    publisher = tr.Publisher(tmp_path)
    publisher.publish(1, trees[0])
    publisher.wait()
    full = True
    pending = publisher.publish(2, trees[1])
    assert pending
    with pytest.raises(SaveError):
        pending.result()
    full = False
    publisher.publish(2, trees[2])  # The number is free, as nothing was published.
    publisher.close()
    made_from = _reader(str(tmp_path), 2).made_from
    assert made_from and made_from.name == "step-00000001"
    assert_same(tr.open(tmp_path, step=2).restore(trees[2]), trees[2])


def test_damage_of_a_base_is_an_error_that_names_it(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    trees = _history(4)
    _publish(str(tmp_path / "s"), trees)
    base, newest = tmp_path / "s" / "step-00000002", f"{tmp_path}/s/step-00000004"
    moved = base.rename(tmp_path / "away")
    with pytest.raises(CorruptError, match=r"expected step-00000002 next to it.*deleted, or not copied along"):
        tr.restore(newest, trees[3])
    report = tr.verify(f"{tmp_path}/s/step-00000003")
    assert not report.ok and "step-00000002" in str(report.problems[0])
    ckpt = tr.open(tmp_path / "s")
    assert ckpt.step == 1 and "step 4" in caplog.text and "step 3" in caplog.text
    _publish(str(tmp_path / "other"), trees)
    pathlib.Path(tmp_path / "other" / "step-00000002").rename(base)
    with pytest.raises(CorruptError, match="as step-00000002 next to it, found another one"):
        tr.restore(newest, trees[3])
    with tr.Publisher(tmp_path / "s") as publisher:  # The last version cannot be its base.
        publisher.publish(5, trees[3])
    assert _reader(str(tmp_path / "s"), 5).made_from is None and "the next version is complete" in caplog.text
    assert moved.is_dir()


def test_verify_names_a_damaged_base(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that are made from a damaged one are damaged, too. A run is read once, not once for each version."""
    _publish(str(tmp_path), _history(5))
    checked: list[str] = []
    own = Reader._own_problems
    monkeypatch.setattr(Reader, "_own_problems", lambda self, share: checked.append(self.path[-1]) or own(self, share))
    assert tr.verify(tmp_path).ok and checked == ["1", "2", "3", "4", "5"]
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    file.chmod(0o644)
    flip(file, file.stat().st_size - 1)
    found = [(problem.file, problem.leaves != ()) for problem in tr.verify(tmp_path).problems]
    assert {name for name, _ in found if "step-00000002" in name and "arrays" not in name} == {
        f"step-0000000{version}/step-00000002" for version in (3, 4, 5)
    }
    assert tr.verify(tmp_path / "step-00000001").ok and not tr.verify(tmp_path / "step-00000005").ok


def test_a_version_that_was_written_otherwise_is_refused(tmp_path: pathlib.Path) -> None:
    """A sealed manifest with other fields of a difference raises an error before anything is made of it."""
    old, new = np.zeros(5000, np.uint8), np.zeros(5000, np.uint8)
    new[::100] = 1
    _publish(str(tmp_path), [{"w": old}, {"w": new}])
    path = tmp_path / "step-00000002" / "treering.json"
    sound = json.loads(path.read_bytes())
    changes: dict[str, tuple[Any, type[Exception]]] = {
        "count": (5001, CorruptError),
        "gap": (3, UnsupportedError),
        "nbytes": (7, UnsupportedError),
        "xxh3": ("0123456789abcdef", CorruptError),
        "base": ("no", UnsupportedError),
        "where": (9, UnsupportedError),
    }
    for name, (value, error) in changes.items():
        changed = json.loads(json.dumps(sound))
        changed.pop("xxh3")
        changed["leaves"][0][6][name] = value
        body = json.dumps(changed, separators=(",", ":")).encode()[:-1]
        path.unlink()
        path.write_bytes(body + b',"xxh3":"' + xxh3(body).encode() + b'"}\n')
        with pytest.raises(error):
            tr.restore(tmp_path / "step-00000002", {"w": new})
    changed = json.loads(json.dumps(sound))
    changed.pop("xxh3")
    for base in (None, {"name": "../other", "xxh3": "0" * 16}, {"name": "step-00000001"}):
        changed["base"] = base
        body = json.dumps(changed, separators=(",", ":")).encode()[:-1]
        path.write_bytes(body + b',"xxh3":"' + xxh3(body).encode() + b'"}\n')
        with pytest.raises(UnsupportedError):
            tr.open(tmp_path / "step-00000002")


def _sealed(path: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with the right checksum."""
    body = json.dumps({**manifest, "xxh3": None}, separators=(",", ":")).encode().removesuffix(b',"xxh3":null}')
    path.unlink()
    path.write_bytes(body + b',"xxh3":"' + xxh3(body).encode() + b'"}\n')


def test_parts_that_were_written_otherwise_are_refused(tmp_path: pathlib.Path) -> None:
    """A manifest with other parts raises an error before anything is made of them, here and in the other reader."""
    golden = pathlib.Path(__file__).parents[1] / "golden" / "v1-differences-in-parts"
    shutil.copytree(golden, tmp_path / "s")
    path = tmp_path / "s" / "step-00000002" / "treering.json"
    sound = json.loads(path.read_bytes())
    (row,) = [n for n, leaf in enumerate(sound["leaves"]) if leaf[1] == "f32"]
    first, second = sound["leaves"][row][6]["parts"]
    size, count, gap, base, after = first
    changes: list[tuple[Any, type[Exception]]] = [
        ([first], UnsupportedError),
        ([first, second, None], UnsupportedError),
        ([first[:4], second], UnsupportedError),
        ([[*first, 0], second], UnsupportedError),
        ([[size, count, 3, base, after], second], UnsupportedError),
        ([[size, count, gap, "no", after], second], UnsupportedError),
        (None, UnsupportedError),
        ([None, second], UnsupportedError),  # The tensor is not one of the array.
        ([[size - 1, count, gap, base, after], second], UnsupportedError),
        ([second, first], UnsupportedError if second[0] != size else CorruptError),
        ([[size, count + 1, gap, base, after], second], CorruptError),
        ([[size, 301, gap, base, after], second], CorruptError),
        ([[size, count, gap, base, second[4]], second], CorruptError),
    ]
    for parts, error in changes:
        changed = json.loads(json.dumps(sound))
        changed["leaves"][row][6]["parts"] = parts
        _sealed(path, changed)
        with pytest.raises(error):
            tr.restore(tmp_path / "s" / "step-00000002")
        try:
            found = spec_reader.Checkpoint(path.parent)
            verdict = found.verdict(found.leaves["f32"])
        except spec_reader.Unsupported as refused:
            verdict = refused.verdict
        assert verdict == {CorruptError: "damaged", UnsupportedError: "unsupported"}[error], parts


def test_a_stream_that_another_release_or_model_writes(tmp_path: pathlib.Path) -> None:
    """Followers raise one error, show nothing, and a publisher that cannot read the last version says so."""
    _publish(str(tmp_path), [{"w": np.zeros(10)}, {"w": np.ones(10)}])
    for like, problem in (({"v": np.zeros(10)}, "v"), ({"w": np.zeros((2, 5))}, "w"), ({"w": np.zeros(10, int)}, "w")):
        with pytest.raises(MismatchError, match=problem):
            next(tr.follow_weights(tmp_path, like=like, timeout=0))
    path = tmp_path / "step-00000002" / "treering.json"
    _sealed(path, {**json.loads(path.read_bytes()), "version": 2})
    with pytest.raises(UnsupportedError, match="found version 2"):
        next(tr.follow_weights(tmp_path, timeout=0))


def _check_version(stream: pathlib.Path, version: int, base: int | None) -> None:
    """Checks a version of a job of several processes, also by the reader that was written from the page alone."""
    values = publish.values(version)
    expected = {**values, "fixed": publish.values(0)["fixed"], "tied": values["rows"]}
    ckpt = tr.open(stream, step=version)
    assert tr.verify(ckpt.path).ok and ckpt["n"] == version
    other = spec_reader.Checkpoint(ckpt.path)
    for name, array in expected.items():
        found = ckpt[name][...]
        assert found.dtype == array.dtype and found.tobytes() == array.tobytes(), name
        leaf = other.leaves[name]
        leaf = other.leaves[leaf[6]] if isinstance(leaf[6], str) else leaf
        assert other.verdict(leaf) == "valid" and other.data(leaf) == array.tobytes(), name
    made_from = _reader(str(stream), version).made_from
    assert made_from == (base and made_from) and (not made_from or made_from.name == f"step-{base:08}")


@pytest.mark.slow
def test_each_process_publishes_its_differences(tmp_path: pathlib.Path) -> None:
    """Jobs of other numbers of processes continue the stream, each with the parts that it has."""
    stream = tmp_path / "stream"
    results = run_job(tmp_path, "publish.publish", processes=2, devices=1, first=1, last=3)
    assert not [result.output for result in results if "complete" in result.output]
    results = run_job(tmp_path, "publish.publish", processes=4, devices=1, first=4, last=5)
    assert not [result.output for result in results if "complete" in result.output]
    fixed, rows = publish.values(0)["fixed"], publish.values(6)["rows"]
    _publish(str(stream), [{**publish.values(6), "fixed": fixed, "tied": rows, "n": 6}], 6)
    run_job(tmp_path, "publish.publish", processes=2, devices=2, first=7, last=7)
    for version in range(1, 8):
        _check_version(stream, version, version - 1 or None)
    parts = _reader(str(stream), 3).deltas
    assert [part.delta and part.delta.count for part in parts["fixed"]] == [0, 0] and len(parts["cells"]) == 2
    assert {part.delta is None for part in parts["dense"]} == {True, False}
    assert sum(file.size for file in _reader(str(stream), 3).files) < 40_000
    sent = Published.of(_reader(str(stream), 3)._manifest.published)
    assert sent and sent.elements == 614_012 and 256 < (sent.changed or 0) <= 256 + 4 * 5 + 1
    (weights,) = tr.follow_weights(stream, timeout=0)
    assert weights.version == 7 and np.array_equal(weights.tree["rows"], publish.values(7)["rows"])


@pytest.mark.slow
def test_processes_publish_to_a_bucket(tmp_path: pathlib.Path, s3_server: str) -> None:
    """There, parts are cut so that each fits an object."""
    run_job(tmp_path, "publish.publish", processes=2, devices=1, first=1, last=3, server=s3_server)
    buckets = ObjectStore()
    buckets.add("weights://tests", s3.client(s3_server))
    with stores.using(buckets, "weights"):
        stream = f"weights://tests/{tmp_path.name}"
        for version in (1, 2, 3):
            ckpt, values = tr.open(stream, step=version), publish.values(version)
            assert tr.verify(ckpt.path).ok and bool(_reader(stream, version).made_from) == (version > 1)
            assert all(ckpt[name][...].tobytes() == values[name].tobytes() for name in values if name != "fixed")
        assert len(_reader(stream, 3).deltas["replicated"]) > 30
        (weights,) = tr.follow_weights(stream, timeout=0)
        assert np.array_equal(weights.tree["replicated"], publish.values(3)["replicated"])


@pytest.mark.slow
def test_a_process_dies_before_the_commit(tmp_path: pathlib.Path) -> None:
    codes = {0: None, 1: -9}
    run_job(
        tmp_path, "publish.publish", processes=2, devices=1, recoverable=True, expect=codes, first=1, last=3, dies=3
    )
    assert tr.steps(tmp_path / "stream") == [1, 2]
    run_job(tmp_path, "publish.publish", processes=2, devices=1, first=3, last=4)
    for version in range(1, 5):
        _check_version(tmp_path / "stream", version, version - 1 or None)


@pytest.mark.slow
def test_a_process_that_missed_a_commit(tmp_path: pathlib.Path) -> None:
    """It still holds the version before the base, whose arrays may be those of the next version."""
    run_job(tmp_path, "publish.publish_while_a_commit_is_missed", processes=2, devices=1)
    for version in (1, 2, 3):
        ckpt = tr.open(tmp_path / "stream", step=version)
        assert np.array_equal(ckpt["w"], publish.alternating(version)), version
        assert bool(_reader(str(tmp_path / "stream"), version).made_from) == (version > 1)


def test_a_stream_that_is_copied_in_part(tmp_path: pathlib.Path) -> None:
    """A converted version is complete. A copy of the stream has all that its versions are made from."""
    trees = _history(3)
    _publish(str(tmp_path / "s"), trees)
    tr.convert(tmp_path / "s" / "step-00000003", tmp_path / "one")
    assert_same(tr.restore(tmp_path / "one", trees[2]), trees[2])
    result = CliRunner().invoke(cli, ["cp", f"{tmp_path}/s", f"{tmp_path}/copy"])
    assert result.exit_code == 0, result.output
    assert_same(tr.restore(tmp_path / "copy", trees[2]), trees[2])
    for args in (
        [f"{tmp_path}/s/step-00000002", f"{tmp_path}/two"],
        [f"{tmp_path}/s", f"{tmp_path}/t", "--steps", "2"],
    ):
        result = CliRunner().invoke(cli, ["cp", *args])  # Such a copy could not be read.
        assert "stored as the difference to step-00000001, which" in str(result.exception)
        assert not pathlib.Path(args[1]).exists()
    assert CliRunner().invoke(cli, ["cp", f"{tmp_path}/s", f"{tmp_path}/t", "--steps", "1,2"]).exit_code == 0
    assert CliRunner().invoke(cli, ["cp", f"{tmp_path}/s", f"{tmp_path}/t", "--steps", "3"]).exit_code == 0
    assert_same(tr.restore(tmp_path / "t", trees[2]), trees[2])
    with pytest.raises(NotFoundError):
        tr.open(tmp_path / "copy", step=4)


def test_a_copy_of_a_stream_can_be_read_at_any_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is copied before what is made from it: an interrupted copy has no version that cannot be read."""
    trees, make = _history(4), CheckpointCopy.make
    _publish(str(tmp_path / "s"), trees, full_every=2)
    seen: list[list[int]] = []

    def checked(self: CheckpointCopy, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        seen.append(tr.steps(tmp_path / "copy"))
        for step in seen[-1]:
            assert_same(tr.restore(tmp_path / "copy", trees[step - 1], step=step), trees[step - 1])

    monkeypatch.setattr(CheckpointCopy, "make", checked)
    copy_checkpoints(str(tmp_path / "s"), str(tmp_path / "copy"))
    assert seen == [[3], [3, 4], [1, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("stream", ["v1-differences", "v1-differences-in-parts"])
def test_golden_versions(stream: str, version: int) -> None:
    """The library and the independent reader find what was published by the release that introduced differences."""
    path = pathlib.Path(__file__).parents[1] / "golden" / stream / f"step-{version:08}"
    expected = golden_trees.versions()[version - 1]
    assert tr.verify(path).ok and tr.open(path).metrics == {"reward": version / 4}
    assert bool(json.loads((path / "treering.json").read_bytes()).get("base")) == (version > 1)
    for found in (spec_reader.tree(path), tr.restore(path)):
        assert_same(found, expected)


def test_leaves_that_are_no_longer_one_array(tmp_path: pathlib.Path) -> None:
    """A target network begins as the arrays of the policy and follows later, also across a restart."""
    a = jnp.arange(3000.0)
    b = a.at[3].set(7)
    trees = [{"p": p, "t": t} for p, t in ((a, a), (b, a), (b, b), (a, b), (b, b), (b, a))]
    _publish(str(tmp_path), trees[:4])
    _publish(str(tmp_path), trees[4:], first=5)
    for version, tree in enumerate(trees, 1):
        assert_same(tr.open(tmp_path, step=version).restore(tree), tree)
    assert _reader(str(tmp_path), 4).made_from and _reader(str(tmp_path), 6).made_from


def test_a_last_version_that_cannot_be_read(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A publisher that starts again after its last version was damaged continues with a complete one."""
    trees = _history(4)
    _publish(str(tmp_path), trees[:2])
    (file,) = (tmp_path / "step-00000001").glob("*.safetensors")
    file.chmod(0o644)
    flip(file, file.stat().st_size - 1)
    _publish(str(tmp_path), trees[2:], first=3)
    assert _reader(str(tmp_path), 3).made_from is None and _reader(str(tmp_path), 4).made_from
    assert "the next version is complete, because the last one cannot be read" in caplog.text
    assert_same(tr.open(tmp_path, step=4).restore(trees[3]), trees[3])


def test_versions_that_links_lead_to(tmp_path: pathlib.Path) -> None:
    """A base is next to the version itself, not to a link that leads to the version or to the stream."""
    trees = _history(4)
    _publish(str(tmp_path / "s"), trees[:3])
    (tmp_path / "latest").symlink_to(tmp_path / "s" / "step-00000003")
    assert_same(tr.restore(tmp_path / "latest", trees[2]), trees[2])
    (tmp_path / "stream").symlink_to(tmp_path / "s")
    assert_same(tr.restore(tmp_path / "stream", trees[2]), trees[2])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "step-00000003").symlink_to(tmp_path / "s" / "step-00000003")
    _publish(str(tmp_path / "other"), trees[3:], first=4)
    assert_same(tr.restore(tmp_path / "other", trees[3]), trees[3])
    assert tr.verify(tmp_path / "other").ok and _reader(str(tmp_path / "other"), 4).made_from


def test_a_version_in_the_chain_that_is_gone(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Versions that cannot be read, because one that they are made from was removed, are not published."""
    trees = _history(5)
    with tr.Publisher(tmp_path) as publisher:
        for version, tree in enumerate(trees, 1):
            publisher.publish(version, tree).result()  # type: ignore[union-attr]
            if version == 3:
                shutil.rmtree(tmp_path / "step-00000002")
    assert _reader(str(tmp_path), 4).made_from is None and _reader(str(tmp_path), 5).made_from
    assert f"the next version is complete: {tmp_path}/step-00000002 is gone" in caplog.text
    assert_same(tr.restore(tmp_path, trees[4]), trees[4])


def test_more_versions_than_files_that_may_be_open(tmp_path: pathlib.Path) -> None:
    """Neither the publisher nor a reader or a follower holds a file of each base."""
    code = """
import resource, sys
import numpy as np
import treering as tr
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
array = np.zeros(4000, np.float32)
weights = tr.follow_weights(sys.argv[1], timeout=0)
with tr.Publisher(sys.argv[1], full_every=1000) as publisher:
    for version in range(1, 121):
        array[version] = version
        publisher.publish(version, {"w": array}).result()
    assert np.array_equal(next(weights).tree["w"], array)
    publisher.publish(121, {"w": array + 1}).result()
    assert np.array_equal(next(weights).tree["w"], array + 1)
assert np.array_equal(tr.restore(sys.argv[1], step=120)["w"], array)
assert tr.verify(sys.argv[1] + "/step-00000120").ok and tr.verify(sys.argv[1]).ok
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_archived_versions_find_their_bases(tmp_path: pathlib.Path) -> None:
    """A rewind moves versions away from the one that they are made from, and other versions take their numbers."""
    trees = _history(6)
    _publish(str(tmp_path), trees[:4])
    with tr.Checkpointer(tmp_path) as run:
        run.rewind(2)
    _publish(str(tmp_path), trees[4:], first=3)
    for place, versions in ((tmp_path, [*trees[:2], *trees[4:]]), (tmp_path / "rewound-1", trees[2:4])):
        for path, tree in zip(sorted(place.glob("step-*")), versions, strict=True):
            assert_same(tr.restore(path, tree), tree)
            assert_same(spec_reader.tree(path)["f64"], tree["f64"])
            assert tr.verify(path).ok
