"""Counts the work for each leaf and byte. Unlike times, counts show a slower hot path on any machine.

Each limit is what it takes today; where a change lowers it, lower the limit.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest

import treering as tr
import treering.orbax as ocp
from call_counts import BYTES, Counts, counted, walked
from sqlite_store import SqliteValues
from treering import stores
from treering._cli.main import main
from treering._save import saved_arrays
from treering._tools import listing
from treering._tools.listing import list_run
from treering.orbax import errors
from treering.stores.key_values import KeyValueStore
from treering.stores.objects.upload import OBJECT_BYTES

_SMALL, _MANY = 100, 300  # leaves
_HELD_SLACK = 1.5  # the size of Python objects differs between releases
_LARGE = 1 << 22  # bytes of a large leaf
_FROZEN = 80 << 10  # bytes of an unchanged array


class _Most(NamedTuple):
    """The most that one more leaf may take: calls and bytes."""

    calls: float
    builtins: float
    held: int
    parsed: int = 0
    hashed: int = 0
    copied: int = 0
    read: int = 0
    written: int = 0


class _Requests(SqliteValues):
    """A store with the numbers of the calls of its methods."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self.requests = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("stat", "list", "read", "write", "delete"):
            self.requests[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def paths(tmp_path: pathlib.Path) -> Iterator[str]:
    """Yields paths that do not exist."""
    return (f"{tmp_path}/{n}" for n in itertools.count())


def tree(count: int) -> dict[str, Any]:
    return {f"l{n:04}": {"w": jnp.full(4, n)} for n in range(count)}


def saving_what_is_known(paths: Iterator[str], count: int) -> Callable[[], Any]:
    state = tree(count)
    tr.save(next(paths), state)
    return lambda: tr.save(next(paths), state)


def saving_what_is_new(paths: Iterator[str], count: int) -> Callable[[], Any]:
    state = tree(count)
    return lambda: tr.save(path := next(paths), {pathlib.Path(path).name: state})


def saving_as(suffix: str) -> Callable[[Iterator[str], int], Callable[[], Any]]:
    def make(paths: Iterator[str], count: int) -> Callable[[], Any]:
        state = {f"l{n:04}": np.full(4, n) for n in range(count)}
        tr.save(next(paths) + suffix, state)
        return lambda: tr.save(next(paths) + suffix, state)

    return make


def opening(paths: Iterator[str], count: int) -> Callable[[], Any]:
    tr.save(path := next(paths), tree(count))
    return lambda: tr.open(path)


def reading_one(paths: Iterator[str], count: int) -> Callable[[], Any]:
    tr.save(path := next(paths), tree(count))
    return lambda: tr.open(path)["l0005/w"][:2]


def restoring(format: str, *, like: bool) -> Callable[[Iterator[str], int], Callable[[], Any]]:
    def make(paths: Iterator[str], count: int) -> Callable[[], Any]:
        state = tree(count) if like else {f"l{n:04}": np.full(4, n) for n in range(count)}
        tr.save(path := next(paths), state, format=format)
        restore = lambda: tr.restore(path, state if like else None)  # noqa: E731
        restore()  # Work that a process does only once is then done.
        return restore

    return make


_SAVE = Counter(
    stat=10, urandom=1, open=9, fsync=6, close=9, mkdir=1, flock=2, fstat=6, posix_fallocate=1, pwrite=3, ftruncate=2,
    fchmod=2, link=1, unlink=1, readlink=3,
)  # fmt: skip
_SAVE_FILE = Counter(
    stat=4, urandom=1, open=4, fsync=3, close=4, flock=1, fstat=1, pwrite=1, ftruncate=1, link=1, unlink=1, listdir=1,
    readlink=1,
)  # fmt: skip
_OPEN = Counter(stat=2, open=1, fstat=3, preadv=1, close=1, listdir=1)
_READ = _OPEN + Counter(open=1, fstat=3, preadv=1, close=1)


_UNCHANGED = Counter(
    stat=22, urandom=1, open=12, fsync=7, close=12, mkdir=1, flock=2, fstat=10, posix_fallocate=1, pwrite=3,
    ftruncate=2, fchmod=2, link=2, unlink=1, listdir=2, preadv=1, getpid=1, readlink=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "most", "system"),
    [
        (saving_what_is_known, _Most(1.1, 6.1, 785, hashed=154, copied=16, written=185), _SAVE),
        (saving_what_is_new, _Most(32.1, 50, 1770, parsed=253, hashed=266, copied=16, written=185), _SAVE),
        (saving_as(".safetensors"), _Most(14.1, 17.1, 935, written=82), _SAVE_FILE),
        (saving_as(".msgpack"), _Most(19.1, 44.1, 1085, written=41), _SAVE_FILE),
        # Equal parts of the tree are parsed once.
        (opening, _Most(0.1, 1.1, 620, parsed=229, hashed=153, read=77), _OPEN),
        (reading_one, _Most(0.1, 2.1, 930, parsed=351, hashed=291, copied=8, read=138), _READ),
        (restoring("treering", like=True), _Most(1.1, 29.1, 2170, 351, 291, 8, 138), _READ),
        (restoring("treering", like=False), _Most(0.1, 19.1, 870, 282, 261, 8, 115), _READ),
        (
            restoring("safetensors", like=False),
            _Most(6.1, 23.1, 490, parsed=127, copied=8, read=191),
            Counter(stat=9, listdir=2, open=4, fstat=15, preadv=6, close=4),
        ),
        (
            restoring("flax", like=False),
            _Most(3.1, 26.1, 560, read=156),
            Counter(stat=12, listdir=2, open=5, fstat=18, preadv=7, close=5),
        ),
    ],
    ids=[
        *("save", "new structure", "save safetensors", "save flax", "open", "one leaf", "restore", "restore to NumPy"),
        *("safetensors", "flax"),
    ],
)
def test_what_each_leaf_takes(
    paths: Iterator[str], make: Callable[..., Callable[[], Any]], most: _Most, system: Counter[str]
) -> None:
    """One more leaf takes no more calls and bytes than the limits, and no system call."""
    few, many = (counted(make(paths, count)) for count in (_SMALL, _MANY))
    each = {what: (getattr(many, what) - getattr(few, what)) / (_MANY - _SMALL) for what in _Most._fields}
    limits = most._replace(held=int(most.held * _HELD_SLACK))._asdict()
    assert {what: taken for what, taken in each.items() if taken > limits[what]} == {}
    assert few.system == many.system, "no system call for a leaf"
    assert many.system - system == Counter()


def saving_again(run: str, state: Any) -> Callable[[], Any]:
    ckpts, steps = tr.Checkpointer(run), itertools.count()
    return lambda: ckpts.save(next(steps), state).result()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("make", "files", "calls"),
    [
        (lambda paths, first, state: lambda: tr.save(next(paths), state), 38, 263),
        (lambda paths, first, state: saving_again(next(paths), state), 52, 346),
        (lambda paths, first, state: lambda: tr.restore(first, state), 53, 307),
        (lambda paths, first, state: lambda: tr.open(first), 26, 125),
        (lambda paths, first, state: lambda: tr.verify(first), 31, 255),
    ],
    ids=["save", "Checkpointer.save", "restore", "open", "verify"],
)
def test_what_a_maintainer_walks_through(
    paths: Iterator[str], make: Callable[[Iterator[str], str, Any], Callable[[], Any]], files: int, calls: int
) -> None:
    """The second of two equal calls enters about as many files and functions as today. JAX may add a few."""
    state = tree(6)
    tr.save(first := next(paths), state)
    call = make(paths, first, state)
    call()  # Work that a process does only once is then done.
    entered, made = walked(call)
    assert entered <= files + 1 and made <= calls + 10


def test_the_adapter_walks_less_than_orbax(paths: Iterator[str]) -> None:
    """A manager is made, saves a step and is closed: by the adapter in at most 0.6 of the calls of Orbax's own."""
    state = tree(6)

    def manage(library: Any) -> None:
        with library.CheckpointManager(next(paths)) as manager:
            manager.save(0, args=library.args.StandardSave(state))

    manage(ocp), manage(orbax)
    (files, calls), (_, theirs) = walked(lambda: manage(ocp)), walked(lambda: manage(orbax), orbax)
    assert files <= 84 and calls <= 908 and calls <= 0.6 * theirs


def stalling(paths: Iterator[str], state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Counts what a save in the background takes until the caller continues.

    An earlier save waits for the disk meanwhile, so that no thread writes.
    """
    tr.save(next(paths), state)
    disk, fsync = threading.Event(), os.fsync
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: disk.wait() and fsync(fd))
        waiting = [tr.save_async(next(paths), state)]
        taken = counted(lambda: waiting.append(tr.save_async(next(paths), state)), threads=False)
        disk.set()
        assert all(pending.result().step is None for pending in waiting)
    return taken


def test_the_caller_of_a_loop_calls_nothing_for_each_leaf(
    paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the structure is cached, `save_async` treats all leaves in bulk, so more leaves take no more calls."""
    few, many = (stalling(paths, tree(count), monkeypatch) for count in (_SMALL, _MANY))
    assert many.calls - few.calls <= 0.1 * _MANY and many.builtins - few.builtins <= 0.1 * _MANY
    assert many.system == few.system <= Counter(stat=2)
    assert many.held - few.held <= _HELD_SLACK * 290 * (_MANY - _SMALL)  # a view of each array
    assert (many.read, many.written, many.parsed, many.hashed, many.copied) == (0, 0, 0, 0, 0)


def test_the_caller_of_a_loop_copies_no_bytes(paths: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background takes views of large arrays."""
    taken = stalling(paths, {f"w{n}": jnp.full(_LARGE // 4, n, jnp.float32) for n in range(2)}, monkeypatch)
    assert taken.copied == taken.hashed == 0 and taken.held < _LARGE // 50


_SHORT, _LONG = 100, 300  # steps


def run_of(run: str, count: int) -> str:
    """Makes a run of steps that were saved an hour ago."""
    tr.save(f"{run}/step-00000001", {"w": np.ones(4)}, step=1, metrics={"loss": 1.0})
    for step in range(2, count + 1):
        shutil.copytree(f"{run}/step-00000001", f"{run}/step-{step:08}", copy_function=os.link)
        os.utime(f"{run}/step-{step:08}", (time.time() - 3600,) * 2)
    return run


def saving_on(**options: Any) -> Callable[[str], Callable[[], Any]]:
    def make(run: str) -> Callable[[], Any]:
        ckpts = tr.Checkpointer(run, **options)
        assert ckpts.restore_or_init(lambda: {"w": np.ones(4)})[1] == len(os.listdir(run))
        numbers = itertools.count(10**6)

        def save() -> None:
            pending = ckpts.save(next(numbers), {"w": np.ones(4)}, metrics={"loss": 2.0})
            assert pending and pending.result()

        return save

    return make


def following(**options: Any) -> Callable[[str], Callable[[], Any]]:
    """Makes a call that polls a run once, whose steps were all yielded before."""

    def make(run: str) -> Callable[[], Any]:
        polls = [tr.follow(run, timeout=0, **options) for _ in range(3)]
        for one in polls:
            for _ in range(1 if options.get("newest") else len(os.listdir(run))):
                next(one)
        return lambda: next(polls.pop(), None)

    return make


@pytest.mark.parametrize(
    "make",
    [
        saving_on(),
        saving_on(keep=tr.keep.best(10**5, "loss", "min")),
        lambda run: lambda: tr.open(run),
        lambda run: lambda: tr.open(run, step=3),
        lambda run: lambda: tr.restore(run),
        lambda run: lambda: tr.record(run, 3, {"late": 1.0}),
        lambda run: lambda: tr.Checkpointer(run).latest_step,
        lambda run: lambda: tr.Checkpointer(run).pin(3),
        lambda run: lambda: tr.Checkpointer(run).restore_or_init(lambda: {"w": np.ones(4)}),
        following(),
        following(newest=True),
    ],
    ids=[
        *("save", "keep.best", "open", "open a step", "restore", "record", "latest_step", "pin", "resume"),
        *("poll", "poll of the newest"),
    ],
)
def test_a_long_run_takes_no_more_system_calls(paths: Iterator[str], make: Callable[[str], Callable[[], Any]]) -> None:
    """Takes the same for a call, whatever the run has kept."""

    def taken(count: int) -> Counter[str]:
        call = make(run_of(next(paths), count))
        call()  # Work that a job or a process does only once is then done.
        return counted(call).system

    assert taken(_SHORT) == taken(_LONG)


def renamed(run: str, count: int) -> str:
    """Gives the steps of a run names that Orbax gives. The newest one has to be a step of that number."""
    tr.save(f"{run}/step-{count:08}", {"w": np.ones(4)}, step=count, overwrite=True)
    for step in range(1, count + 1):
        os.rename(f"{run}/step-{step:08}", f"{run}/{step}")
    return run


def of_orbax(run: str, count: int) -> str:
    """Makes a run of Orbax's."""
    tr.save(f"{run}/1", {"w": np.ones(4)}, format="orbax")
    for step in range(2, count + 1):
        shutil.copytree(f"{run}/1", f"{run}/{step}", copy_function=os.link)
    return run


@pytest.mark.parametrize("newest", [False, True], ids=["each", "newest"])
@pytest.mark.parametrize("make", [lambda run, count: renamed(run_of(run, count), count), of_orbax])
def test_a_poll_with_names_of_orbax_looks_at_few(
    paths: Iterator[str], make: Callable[[str, int], str], newest: bool
) -> None:
    def taken(count: int) -> Counter[str]:
        poll = following(newest=newest)(make(next(paths), count))
        poll()
        return counted(poll).system

    assert taken(40) == taken(80)


def test_a_manager_for_orbax_looks_for_one_step(paths: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A save asks whether its step and the one before it exist, not which steps there are."""

    def taken(count: int) -> Counter[str]:
        run = renamed(run_of(next(paths), count), count)
        with ocp.CheckpointManager(run) as manager:
            monkeypatch.setattr(manager, "all_steps", None)
            for step in (1000, 1001):
                manager.save(step, args=ocp.args.StandardSave({"w": np.ones(4)}))
                manager.wait_until_finished()
            with pytest.raises(errors.StepAlreadyExistsError):
                manager.save(3, args=ocp.args.StandardSave({"w": np.ones(4)}), force=True)
            return counted(lambda: [manager._run.has_step(step) for step in (3, 5000)]).system

    assert taken(_SHORT) == taken(_LONG)


def test_listing_a_run_is_linear(paths: Iterator[str]) -> None:
    def calls(count: int) -> float:
        run = run_of(next(paths), count)
        return counted(lambda: list_run(run).latest).calls / count

    assert calls(_LONG) <= 1.1 * calls(_SHORT)


def test_the_error_for_a_deep_tree_is_quadratic(paths: Iterator[str]) -> None:
    """Takes work for each pair of levels, as the texts of the paths do, and no more."""

    def calls(levels: int) -> int:
        tree: Any = {"w": np.ones(1)}
        for _ in range(levels):
            tree = {"c": tree, "w": np.ones(1)}
        tr.save(path := next(paths), tree)
        count = [0]
        sys.setprofile(lambda frame, event, argument: count.__setitem__(0, count[0] + (event == "c_call")))
        try:
            with contextlib.suppress(tr.errors.MismatchError):
                tr.restore(path, {"x": tree})
        finally:
            sys.setprofile(None)
        return count[0]

    assert calls(80) <= 4 * calls(40)


def _error(path: str, template: Any, **options: Any) -> None:
    with pytest.raises(tr.errors.MismatchError):
        tr.restore(path, template, **options)


def _grown(path: str, layers: list[Any]) -> None:
    tr.save(path, layers)
    assert len(tr.restore(path, layers[:1], grow=["**"])) == len(layers)


@pytest.mark.parametrize(
    "work",
    [
        lambda path, tree: _error(path, {layer: {"w": one["w"].astype(int)} for layer, one in tree.items()}),
        lambda path, tree: _error(path, {layer: {"w": one["w"][:2]} for layer, one in tree.items()}),
        lambda path, tree: _error(path, {f"{layer}x": one for layer, one in tree.items()}),
        lambda path, tree: tr.restore(path, {"layer0": tree["layer0"]}, extra=[f"{layer}/w" for layer in tree]),
        lambda path, tree: tr.restore(path, {**tree, **{f"{n}x": 0 for n in tree}}, missing=[f"{n}x" for n in tree]),
        lambda path, tree: tr.open(path).select([f"{layer}/w" for layer in tree]),
        lambda path, tree: _error(path, dict.fromkeys(tree)),
        lambda path, tree: _grown(f"{path}.list", [*tree.values()]),
        lambda path, tree: _error(tr.save(f"{path}.list", [*tree.values()]).path, tree),
    ],
    ids=["dtypes", "shapes", "names", "extra", "missing", "select", "None", "grow", "list"],
)
def test_many_leaves_and_globs_are_linear(paths: Iterator[str], work: Callable[[str, Any], Any]) -> None:
    """Errors compare leaves of the template with others, and the caller's globs are compared with the leaves."""

    def calls(count: int) -> int:
        tree = {f"layer{n}": {"w": np.full(4, n, np.float32)} for n in range(count)}
        tr.save(path := next(paths), tree)
        number = [0]
        sys.setprofile(lambda frame, event, argument: number.__setitem__(0, number[0] + (event in ("call", "c_call"))))
        try:
            work(path, tree)
        finally:
            sys.setprofile(None)
        return number[0]

    calls(10)
    assert calls(400) <= 4.5 * calls(100)


def test_what_each_folder_takes_that_is_no_step(paths: Iterator[str]) -> None:
    """Each format looks for its own files, and yet a folder is listed once."""
    run = run_of(next(paths), 1)
    before = counted(lambda: tr.steps(run)).system.total()
    for n in range(100):
        os.mkdir(f"{run}/sample_{n}")
    assert counted(lambda: tr.steps(run)).system.total() - before <= 3 * 100 + 10


def test_tensorboards_files_are_known_by_name(paths: Iterator[str]) -> None:
    """Their names end in numbers, as those of Flax do, and a look at each would be a request of a bucket."""
    run = run_of(next(paths), 1)
    before = counted(lambda: tr.open(run)).system.total()
    for n in range(100):
        pathlib.Path(run, f"events.out.tfevents.17000000{n:02}.host.4711.{n}").write_bytes(b"event")
    assert counted(lambda: tr.open(run)).system.total() <= before + 100 + 2


@pytest.mark.long
@pytest.mark.whole
def test_unchanged_arrays_are_linked(paths: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later save of a run links the files of unchanged arrays. It writes and hashes only the trained ones."""
    monkeypatch.setattr(saved_arrays, "MIN_BYTES", 64 << 10)

    def make(count: int) -> Counts:
        frozen = [jnp.full(_FROZEN // 4, n, jnp.float32) for n in range(count)]
        with tr.Checkpointer(next(paths)) as ckpts:
            steps = itertools.count()

            def save() -> None:
                pending = ckpts.save(step := next(steps), {"frozen": frozen, "trained": jnp.full(4, step)})
                assert pending and (pending.result().shared_bytes > 0) == (step > 2)

            for _ in range(3):  # Each writes everything.
                save()
            return counted(save)

    few, many = make(4), make(12)
    assert few.system == many.system <= _UNCHANGED
    each = {what: (getattr(many, what) - getattr(few, what)) / 8 for what in ("calls", "builtins", *BYTES)}
    limits = {"calls": 14.1, "builtins": 25.1, "read": 0, "written": 0, "parsed": 0, "hashed": 60, "copied": 8}
    assert {what: taken for what, taken in each.items() if taken > limits[what]} == {}
    assert many.written < _FROZEN


def _requests_of_a_poll(
    requests: Callable[[Callable[[], Any]], Counter[str]], count: int, newest: bool
) -> Counter[str]:
    """Returns what a poll asks a bucket for, whose `count` steps were all yielded before."""
    run = f"counted://bucket/run-{count}"
    for step in range(1, count + 1):
        tr.save(f"{run}/step-{step:08}", {"w": np.ones(4)}, step=step, overwrite=True)
    steps = tr.follow(run, timeout=0, newest=newest)
    for _ in range(1 if newest else count):
        next(steps)
    return requests(lambda: next(steps, None))


@pytest.mark.long
@pytest.mark.whole
def test_a_bucket_takes_a_request_for_each_object(tmp_path: pathlib.Path) -> None:
    """More small leaves take no more requests, and more bytes one for each object. Each byte is copied once."""
    store = _Requests(tmp_path / "bucket")
    with stores.using(KeyValueStore(store), "counted"):
        tr.save("counted://bucket/first", {"a": 1})  # which tests the store

        def requests(call: Callable[[], Any]) -> Counter[str]:
            store.requests.clear()
            call()
            return Counter(store.requests)

        def make(name: str, state: Any) -> tuple[Counter[str], Counter[str]]:
            path = f"counted://bucket/{name}"
            return requests(lambda: tr.save(path, state)), requests(lambda: tr.restore(path, state))

        small = Counter(write=3, list=1, stat=3, delete=1), Counter(read=2)
        for count in (_SMALL, _MANY):
            assert make(f"small-{count}", {f"l{n:04}": np.full(4, n) for n in range(count)}) == small
        for call in (
            lambda path: tr.diff(path, path),
            lambda path: main(["stats", path]),
            lambda path: tr.convert(path, tmp_path / "x.safetensors", overwrite=True),
            lambda path: tr.convert(path, tmp_path / "orbax", format="orbax", overwrite=True),
        ):
            few, many = (requests(functools.partial(call, f"counted://bucket/small-{n}")) for n in (_SMALL, _MANY))
            assert few == many and few["read"] <= 4
        tr.save("counted://bucket/middle", {f"l{n}": np.full(12_500, n) for n in range(100)})
        middle = requests(lambda: tr.convert("counted://bucket/middle", tmp_path / "x.safetensors", overwrite=True))
        assert middle["read"] <= 4
        polls = [_requests_of_a_poll(requests, count, newest) for newest in (False, True) for count in (3, 9)]
        assert polls[0] == polls[1] == polls[2] == polls[3]
        objects = [np.full(OBJECT_BYTES, n, np.uint8) for n in range(2)]
        one, two = make("one", objects[:1]), make("two", objects)
        assert [later - before for before, later in zip(one, two, strict=True)] == [Counter(write=1), Counter(read=1)]
        saved = counted(lambda: tr.save("counted://bucket/again", objects, overwrite=True))
        restored = counted(lambda: tr.restore("counted://bucket/two", objects))
        for taken in (saved, restored):
            assert [round(getattr(taken, what) / 2 / OBJECT_BYTES, 2) for what in ("hashed", "copied")] == [1, 1]


def test_a_directory_in_a_bucket_is_listed_once(tmp_path: pathlib.Path) -> None:
    """Each run of one step, and each checkpoint, takes a request for its manifest; copies take few more."""
    store = _Requests(tmp_path / "bucket")
    with stores.using(KeyValueStore(store), "counted"):

        def requests(*arguments: str) -> int:
            store.requests.clear()
            assert main([*arguments]) == 0
            return sum(store.requests.values())

        for n, name in itertools.product(range(8), ("runs-8/run{n}/step-00000001", "checkpoints-8/{n}c")):
            tr.save(f"counted://bucket/{name.format(n=n)}", {"w": np.ones(4)})
            if n < 4:
                tr.save(f"counted://bucket/{name.format(n=n).replace('-8', '-4')}", {"w": np.ones(4)})
        for each, command in ((1, ["ls"]), (0, ["du"]), (5, ["cp", f"{tmp_path}/copy", "--dry-run"])):
            for what in ("runs", "checkpoints"):
                few, many = (requests(command[0], f"counted://bucket/{what}-{n}", *command[1:]) for n in (4, 8))
                assert many - few <= each * 4, (command[0], what, few, many)


def test_a_report_reads_each_file_of_a_step_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more step takes requests for its manifest and its arrays. Manifests are read at the same time."""
    store = _Requests(tmp_path / "bucket")
    several = threading.Barrier(2, timeout=30)
    with stores.using(KeyValueStore(store), "counted"):

        def report(steps: int) -> Counter[str]:
            run = f"counted://bucket/run{steps}"
            for step in range(steps):
                tr.save(f"{run}/step-{step:08}", {"w": np.full(4, step)}, step=step)
            store.requests.clear()
            assert main(["report", run, "--output", f"{tmp_path}/report.html"]) == 0
            return Counter(store.requests)

        few, many = report(4), report(8)
        assert many - few == Counter(read=2 * 4) and few <= Counter(read=2 * 4 + 2, list=2, stat=1)
        row = listing._native_row
        monkeypatch.setattr(listing, "_native_row", lambda *step: (several.wait(), row(*step))[1])
        assert len(list_run("counted://bucket/run4").rows) == 4


def test_a_folder_of_checkpoints_is_looked_at_little(paths: Iterator[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`treering ls` looks at each checkpoint, and searches nothing for the error of a path that is no run."""

    def taken(count: int) -> int:
        folder = next(paths)
        for n in range(count):
            tr.save(f"{folder}/model_{n}x", {"w": np.ones(4)})
        system = counted(lambda: main(["ls", folder])).system
        assert f"{count} checkpoints" in capsys.readouterr().out
        return system.total()

    assert taken(8) - taken(4) <= 4 * 23


def test_closing_a_job_lists_no_steps(tmp_path: pathlib.Path) -> None:
    store = _Requests(tmp_path / "bucket")
    with stores.using(KeyValueStore(store), "counted"):
        ckpts = tr.Checkpointer("counted://bucket/run", keep=tr.keep.last(5))
        for step in range(1, 5):
            ckpts.save(step, {"w": np.ones(4)})
        ckpts.wait()
        store.requests.clear()
        ckpts.close()
        assert store.requests == {"write": 1}, "the lease is released"


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, False], ids=["mapped", "read"])
def test_each_byte_is_gone_through_once(paths: Iterator[str], mmap: bool | None) -> None:
    """A save and a restore copy and hash each byte once."""

    def make(count: int) -> tuple[Counts, Counts]:
        state = {f"w{n}": jnp.full(_LARGE // 4, n, jnp.float32) for n in range(count)}
        tr.save(path := next(paths), state)
        saving = counted(lambda: tr.save(next(paths), state))
        return saving, counted(lambda: tr.restore(path, state, mmap=mmap))

    def share(what: str, one: int) -> float:
        return (getattr(many[one], what) - getattr(few[one], what)) / (4 * _LARGE)

    few, many = make(2), make(6)
    assert [round(share(what, 0), 2) for what in ("written", "copied", "hashed", "read", "held")] == [1, 1, 1, 0, 0]
    read = 0 if mmap is None else 1
    assert [round(share(what, 1), 2) for what in ("written", "copied", "hashed", "read", "held")] == [0, 0, 1, read, 0]
    moved = [many[one].system - few[one].system for one in (0, 1)]
    assert moved == [Counter(pwrite=4), Counter(preadv=4 * read)], "large reads and writes, and few"
