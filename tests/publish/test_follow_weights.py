"""Followers of published weights: they show what was published, and nothing else."""

import logging
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from helpers import assert_same
from hostile_input import flip
from resident_memory import peak_bytes
from treering.errors import MismatchError

pytest.importorskip("zstandard")


def _weights(version: int) -> dict[str, Any]:
    """The weights of a version, a function of its number alone."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(3000).astype(np.float32)
    w[: 3 * version] += 1.0
    return {"w": jnp.asarray(w), "frozen": jnp.ones(2000), "n": jnp.int32(version)}


def _publish(stream: Any, *versions: int, **options: Any) -> None:
    with tr.Publisher(stream, **options) as publisher:
        for version in versions:
            publisher.publish(version, _weights(version), metrics={"reward": float(version)})


def _next(weights: Iterator[Any]) -> int:
    """Takes the next version and checks it."""
    found = next(weights)
    assert_same(found.tree, _weights(found.version))
    assert found.metrics == {"reward": float(found.version)}
    return found.version


def test_a_follower_gets_each_newest_version(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays that have not changed are the same objects. Versions that were left out are logged."""
    caplog.set_level(logging.INFO)
    weights = tr.follow_weights(tmp_path, _weights(0), timeout=10)
    _publish(tmp_path, 1)
    first = next(weights)
    _publish(tmp_path, 2)
    second = next(weights)
    assert [first.version, second.version] == [1, 2]
    assert second.tree["frozen"] is first.tree["frozen"] and second.tree["w"] is not first.tree["w"]
    _publish(tmp_path, 3, 4, 5)
    assert _next(weights) == 5 and "left out: 3, 4" in caplog.text
    assert_same(first.tree, _weights(1))  # Nothing was changed in place.
    late = tr.follow_weights(tmp_path, _weights(0), timeout=0)
    assert [one.version for one in late] == [5]


def test_only_differences_are_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete version is read once, although versions refer to it."""
    from treering.formats.treering.read import Reader

    reads: list[tuple[str, int]] = []
    read = Reader._read_stored

    def counting(self: Reader, wanted: Any, *args: Any) -> Any:
        found = read(self, wanted, *args)
        reads.append((self.path[-1:], sum(array.nbytes for array in found)))
        return found

    monkeypatch.setattr(Reader, "_read_stored", counting)
    weights = tr.follow_weights(tmp_path, timeout=0)
    _publish(tmp_path, 1, 2)
    assert next(weights).version == 2 and sum(nbytes for path, nbytes in reads if path == "1") == 20_000
    _publish(tmp_path, 3, 4)
    reads.clear()  # those of the publisher, which begins again
    assert next(weights).version == 4
    assert {path for path, nbytes in reads if nbytes} == {"3", "4"} and sum(nbytes for _, nbytes in reads) < 500


_LARGE = """
import sys, jax.numpy as jnp, treering as tr
tree = {f"w{n}": jnp.zeros(8 << 18) for n in range(12)}
with tr.Publisher(sys.argv[1]) as publisher:
    for version in range(1, 6):
        names = ["w3"] if version == 5 else [*tree]
        publisher.publish(version, tree := {**tree, **{name: tree[name].at[::4999].set(version) for name in names}})
"""


@pytest.mark.slow
def test_memory_of_a_follower(tmp_path: pathlib.Path) -> None:
    """Reading versions takes the memory of the arrays that change, however many versions are in between."""
    subprocess.run([sys.executable, "-c", _LARGE, str(tmp_path / "all")], check=True)

    def arrive(*numbers: int) -> None:
        for name in (f"step-{number:08}" for number in numbers):
            shutil.copytree(tmp_path / "all" / name, tmp_path / "s" / name)

    arrive(1)
    like = {f"w{n}": jax.ShapeDtypeStruct((8 << 18,), np.float32) for n in range(12)}
    versions = tr.follow_weights(tmp_path / "s", like=like, timeout=1)
    shown = next(versions)
    arrive(2, 3, 4)
    grown, shown = peak_bytes(lambda: next(versions))
    assert grown <= 96 + 64 and int(shown.tree["w3"][4999]) == 4
    arrive(5)
    grown, shown = peak_bytes(lambda: next(versions))
    assert grown <= 8 + 64 and (int(shown.tree["w3"][4999]), int(shown.tree["w4"][4999])) == (5, 4)


def test_leaves_that_become_another_array(tmp_path: pathlib.Path) -> None:
    """A leaf that has become another array than before is never the array before, although neither has changed."""
    a, b = jnp.arange(3000.0), jnp.arange(3000.0).at[3].set(7)
    keys = [jax.random.key(1, impl=impl) for impl in ("rbg", "unsafe_rbg", "unsafe_rbg")]
    trees = [{"a": a, "b": one, "key": key} for one, key in zip((b, a, b), keys, strict=True)]
    weights = tr.follow_weights(tmp_path, timeout=5)
    for version, tree in enumerate(trees, 1):
        with tr.Publisher(tmp_path) as publisher:
            publisher.publish(version, tree)
        found = next(weights).tree
        assert found["key"].dtype == tree["key"].dtype
        assert_same(jax.tree.map(np.asarray, {**found, "key": 0}), jax.tree.map(np.asarray, {**tree, "key": 0}))


def test_rules_and_shardings(tmp_path: pathlib.Path) -> None:
    """Options of `restore` hold for every version."""
    rules = [tr.rules.rename("w", "policy/w"), tr.rules.drop("n")]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    weights = tr.follow_weights(
        tmp_path,
        {"policy": {"w": jnp.zeros(3000)}, "frozen": jnp.ones(2000)},
        rules=rules,
        sharding=sharding,
        timeout=5,
    )
    trees = []
    for version in (1, 2):
        _publish(tmp_path, version)
        found = next(weights).tree
        assert np.array_equal(found["policy"]["w"], _weights(version)["w"])
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(found))
        trees.append(found)
    assert trees[0]["frozen"] is trees[1]["frozen"]


def test_it_ends_with_the_stream_and_by_time(tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    assert list(tr.follow_weights(tmp_path / "none", timeout=0.2)) == []
    assert time.monotonic() - begun < 20
    with tr.Publisher(tmp_path / "s") as publisher:
        publisher.publish(3, _weights(3), metrics={"reward": 3.0})
        publisher.finish()
    assert [one.version for one in tr.follow_weights(tmp_path / "s")] == [3]
    assert [one.version for one in tr.follow_weights(tmp_path / "s", version=3)] == [3]
    assert [one.version for one in tr.follow_weights(tmp_path / "s", version=4)] == []
    with pytest.raises(MismatchError, match="expected an integer"):
        tr.follow_weights(tmp_path / "s", version=-1)
    with pytest.raises(MismatchError, match="timeout"):
        tr.follow_weights(tmp_path / "s", timeout=-1)
    with pytest.raises(MismatchError, match="frozen"):
        next(tr.follow_weights(tmp_path / "s", {"w": jnp.zeros(3000)}))


@pytest.mark.parametrize("what", ["damaged", "base gone", "base replaced"])
def test_a_version_that_cannot_be_read_is_left_out(
    what: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A late follower takes the newest version that it can read, and continues with the next complete one."""
    _publish(tmp_path / "s", 1, 2, 3, 4)
    if what == "damaged":
        (file,) = (tmp_path / "s" / "step-00000003").glob("*.safetensors")
        file.chmod(0o644)
        flip(file, file.stat().st_size - 3)
    elif what == "base gone":
        shutil.rmtree(tmp_path / "s" / "step-00000003")
    else:
        _publish(tmp_path / "other", 3)
        shutil.rmtree(tmp_path / "s" / "step-00000003")
        (tmp_path / "other" / "step-00000003").rename(tmp_path / "s" / "step-00000003")
    weights = tr.follow_weights(tmp_path / "s", _weights(0), timeout=5)
    expected = 3 if what == "base replaced" else 2
    assert _next(weights) == expected and " 4 is left out" in caplog.text
    _publish(tmp_path / "s", 5, full_every=1)
    assert _next(weights) == 5


def test_every_version_that_is_left_out_is_logged(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    _publish(tmp_path, 1, 2, 3, 4, full_every=1)
    for version, name in ((4, "*.safetensors"), (3, "treering.json")):
        (file,) = (tmp_path / f"step-0000000{version}").glob(name)
        file.chmod(0o644)
        flip(file, file.stat().st_size - 3)
    assert _next(tr.follow_weights(tmp_path, _weights(0), timeout=0)) == 2
    assert "version 4 is left out" in caplog.text and "version 3 is left out" in caplog.text


def test_a_stream_that_begins_again(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A version with a number that was shown is shown again if it is another one."""
    weights = tr.follow_weights(tmp_path / "s", _weights(0), timeout=5)
    _publish(tmp_path / "s", 1, 2)
    assert _next(weights) == 2
    shutil.rmtree(tmp_path / "s")
    time.sleep(0.05)
    _publish(tmp_path / "s", 2)
    assert _next(weights) == 2
    _publish(tmp_path / "s", 3)
    assert _next(weights) == 3


@pytest.mark.parametrize("name", ["w", "frozen"])
def test_arrays_that_were_changed_are_never_shown(
    name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that changes the memory of a tree in place gets the next version nevertheless."""
    weights: Any = tr.follow_weights(tmp_path, _weights(0), timeout=5)
    _publish(tmp_path, 1, 2)
    assert _next(weights) == 2
    held = weights.gi_frame.f_locals["versions"].gi_frame.f_locals["held"]
    held._arrays[name].flags.writeable = True
    held._arrays[name][1999 * 4] ^= 1
    _publish(tmp_path, 3)
    assert _next(weights) == 3 and "read completely" in caplog.text


_PUBLISHER = """
import sys, time
sys.path.insert(0, sys.argv[2])
import treering as tr
from publish.test_follow_weights import _weights
with tr.Publisher(sys.argv[1], full_every=4, keep=tr.keep.last(2)) as publisher:
    print("ready", flush=True)
    for version in range((max(tr.steps(sys.argv[1]), default=0)) + 1, 10_000):
        publisher.publish(version, _weights(version % 900), metrics={"reward": float(version)}).result()
        print(version, flush=True)
"""


@pytest.mark.slow
def test_a_publisher_is_killed_at_any_moment(tmp_path: pathlib.Path) -> None:
    """Followers that come and go see only what was published, and no version that was reported is lost."""
    chance, stream = random.Random(0), tmp_path / "s"
    seen: list[int] = []
    wrong: list[str] = []
    over = threading.Event()

    def follow(stay: float) -> None:
        while not over.is_set():
            begun = time.monotonic()
            for one in tr.follow_weights(stream, _weights(0), timeout=0.5):
                expected = _weights(one.version % 900)
                if not all(np.array_equal(one.tree[name], expected[name]) for name in expected):
                    wrong.append(f"version {one.version}")
                seen.append(one.version)
                if over.is_set() or time.monotonic() - begun > stay:
                    break

    threads = [threading.Thread(target=follow, args=(stay,)) for stay in (0.3, 60.0)]
    for thread in threads:
        thread.start()
    reported = 0
    try:
        for _ in range(4):
            command = [sys.executable, "-c", _PUBLISHER, stream, str(pathlib.Path(__file__).parents[1])]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout and process.stdout.readline() == "ready\n"
                first = [process.stdout.readline(), process.stdout.readline()]
                time.sleep(chance.uniform(0.0, 0.8))
                process.send_signal(signal.SIGKILL)
                last = max(map(int, [*first, *process.stdout.read().split()]))
            assert last > reported
            reported = last
            newest = tr.open(stream)
            assert newest.step is not None and newest.step >= reported
            restored = newest.restore(_weights(0))
            assert all(np.array_equal(leaf, _weights(newest.step % 900)[name]) for name, leaf in restored.items())
            while newest.step not in seen:
                assert all(thread.is_alive() for thread in threads)
                time.sleep(0.01)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong
