"""What is under way when the crash comes, and what must be true after it."""

import contextlib
import dataclasses
import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import _save, _work, formats, keep, stores
from .._checkpoint import open_checkpoint, restore
from .._checkpointer import Checkpointer
from .._crew import Crew
from .._run import steps
from .._save import save
from .._verify import verify
from ..errors import NotFoundError, TreeringError
from ..formats.treering import manifest, write
from ..stores import local
from ._recording import RecordingDisk, View

NOTHING = "nothing"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`record` is what happens after `prepare`; it says what is expected. Both get the folder in which all happens.

    `look` says what is seen after a crash and raises when anything is there in part; `again` is told, saves once more
    and raises unless that works and tidies up. With `broken`, `record` is repeated with each operation failing in
    turn: by itself, or with all that come after it.
    """

    name: str
    record: Callable[[Path, RecordingDisk], None]
    look: Callable[[Path], View]
    again: Callable[[Path, View], None]
    prepare: Callable[[Path], None] = lambda root: None
    broken: Literal["", "failing", "killed"] = ""


@functools.cache
def tree(label: str) -> dict[str, Any]:
    """A state of its own for every label, all of the same shape."""
    chance = np.random.default_rng(zlib.crc32(label.encode()))
    return {
        "w": chance.standard_normal(560_000 if label.startswith("large") else 30, np.float32),
        "b": {"i": chance.integers(-99, 99, (3, 5), np.int16), "e": np.zeros(0, np.int8)},
    }


def _identity(found: Any) -> Any:
    return {path: (a.dtype, a.shape, a.tobytes()) for path, a in (("w", found["w"]), *found["b"].items())}


@functools.cache
def _expected(label: str) -> Any:
    return _identity(tree(label))


def _label(path: str | Path, labels: Sequence[str]) -> str:
    """Which of the trees lies at a path. Raises `AssertionError` when it is none, or not in full."""
    report = verify(path)
    assert report.ok, report
    found = _identity(restore(path))
    label = next((label for label in labels if _expected(label) == found), None)
    assert label is not None, f"{path}: it verifies, but is nothing that was saved"
    return label


# One checkpoint


def _look_at(path: Path, labels: Sequence[str]) -> View:
    try:
        open_checkpoint(path)
    except NotFoundError:
        aside = path.parent.glob(f".{path.name}.*.tmp")
        return "old, aside" if any(map(_is_old, aside)) else NOTHING
    return _label(path, labels)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(TreeringError, KeyError, AssertionError):
        return _label(path, ["old"]) == "old"
    return False


def _assert_tidy(root: Path, path: Path) -> None:
    """Only the checkpoint is there."""
    while path != root:
        there = set(os.listdir(path.parent))
        assert there == {path.name}, f"{sorted(there - {path.name})} is left over in {path.parent}"
        path = path.parent


def _assert_tidy_inside(path: Path) -> None:
    """Only what the manifest names is there."""
    named = {local.MANIFEST, *manifest.file_names((path / local.MANIFEST).read_bytes())}
    assert set(os.listdir(path)) == named, f"{sorted(set(os.listdir(path)) - named)} is left over in {path}"


def _single(
    name: str,
    record: Callable[[Path, RecordingDisk], None],
    *,
    where: str = "a/b/c",
    before: str = NOTHING,
    labels: Sequence[str] = ("old", "new"),
    broken: Literal["", "failing", "killed"] = "",
    **options: Any,
) -> Scenario:
    """A scenario about one checkpoint, of any format."""

    def again(root: Path, seen: View) -> None:
        path = root / where
        save(path, tree("next"), overwrite=True, **options)
        assert _label(path, ["next"])
        _assert_tidy(root, path)
        if not options:
            _assert_tidy_inside(path)

    return Scenario(
        name=name,
        record=lambda root, disk: record(root / where, disk),
        look=lambda root: _look_at(root / where, labels),
        again=again,
        prepare=lambda root: _save_unless_nothing(root / where, before, options),
        broken=broken,
    )


def _save_unless_nothing(path: Path, label: str, options: dict[str, Any]) -> None:
    if label != NOTHING:
        save(path, tree(label), **options)


def _saving(before: str, after: str, **options: Any) -> Callable[[Path, RecordingDisk], None]:
    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, after)
        save(path, tree(after), overwrite=before != NOTHING, **options)
        disk.expect(after)

    return record


def _in_threads(path: Path, disk: RecordingDisk) -> None:
    """Several threads write a file of several chunks."""
    chunk, write.CHUNK = write.CHUNK, manifest.BLOCK
    try:
        _saving(NOTHING, "large new")(path, disk)
    finally:
        write.CHUNK = chunk


def _without_locks(path: Path, disk: RecordingDisk) -> None:
    """Nothing is tidied up, for nobody can tell what is left over."""
    disk.lock = lambda fd: None
    _saving("old", "new")(path, disk)


def _without_exchange(**options: Any) -> Callable[[Path, RecordingDisk], None]:
    """An old directory is put aside first."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.exchange = lambda a, b: False
        disk.expect("old", "old, aside", "new")
        save(path, tree("new"), overwrite=True, **options)
        disk.expect("new")

    return record


def _deleting(path: Path, disk: RecordingDisk) -> None:
    disk.expect("old", NOTHING)
    local.delete(disk, str(path), manifest.file_names)
    disk.expect(NOTHING)


def _deleting_together(path: Path, disk: RecordingDisk) -> None:
    """Another process deletes it as well, and has come first, but stands still before it has made that durable."""
    disk.expect("old", NOTHING)
    unlink = disk.unlink

    def both(path: str) -> None:
        unlink(path)
        if os.path.basename(path) == local.MANIFEST:
            raise FileNotFoundError(path)

    disk.unlink = both
    local.delete(disk, str(path), manifest.file_names)
    disk.expect(NOTHING)


def _failing(before: str, **options: Any) -> Callable[[Path, RecordingDisk], None]:
    """A save that an error of the disk ends; what it says it did must hold."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "new")
        try:
            save(path, tree("new"), overwrite=before != NOTHING, **options)
        except TreeringError:
            seen = _look_at(path, ("old", "new"))
            assert seen == before or before != NOTHING, f"{path}: the save failed, but {seen} is there"
            disk.expect(before, seen)
        else:
            disk.expect("new")

    return record


def _killed(before: str, **options: Any) -> Callable[[Path, RecordingDisk], None]:
    """A save is killed; another process saves there later, before anything of the first is known to be durable."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "first")
        done = False
        with contextlib.suppress(TreeringError):
            save(path, tree("first"), overwrite=before != NOTHING, **options)
            done = True
        disk.revive()
        disk.expect("first", "new") if done else disk.expect(before, "first", "new")
        save(path, tree("new"), overwrite=True, **options)
        disk.expect("new")

    return record


# Several processes


class _Table:
    """Where the threads that stand for processes meet."""

    def __init__(self, count: int):
        self.count = count
        self.words: dict[tuple[int, int], Any] = {}
        self.answers: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.failed: BaseException | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: ready() or self.failed is not None, 60)
        if not ready() and self.failed:
            raise self.failed

    def put(self, where: dict[Any, Any], key: Any, value: Any) -> None:
        with self.changed:
            where[key] = value
            self.changed.notify_all()


class _Seat:
    """A process of a job, as `treering._processes.Call`; all of them are threads of this one."""

    name, undecided = "", False

    def __init__(self, table: _Table, index: int):
        self.index, self.count, self._table, self._turn = index, table.count, table, 0

    def doing(self, what: str) -> None: ...

    def agree(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        table, turn = self._table, self._turn
        self._turn += 1
        table.put(table.words, (turn, self.index), mine)
        if self.index == 0:
            everyone = [(turn, index) for index in range(self.count)]
            table.wait(lambda: all(one in table.words for one in everyone))
            table.put(table.answers, turn, decide([table.words[one] for one in everyone]))
        table.wait(lambda: turn in table.answers)
        return table.answers[turn]

    def tell(self, decide: Callable[[], Any]) -> Any:
        return self.agree(None, lambda words: decide())

    def check(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None:
        with self._table.changed:
            self._table.failed = self._table.failed or error
            self._table.changed.notify_all()


def _save_together(path: Path, label: str, *, overwrite: bool, count: int = 3) -> None:
    """What `treering.save` does in every process of a job."""
    table = _Table(count)
    errors: list[BaseException] = []

    def process(index: int) -> None:
        call = _Seat(table, index)
        try:
            wish = _work.Wish("treering", overwrite, (), None, None, False, False, {})
            info = _save.describe(None, None, None)
            work = _work.prepare(call, str(path), tree(label), info, wish, formats.get("treering"))
            work.hand_over()
            with Crew(1) as crew:
                work.write(crew)
        except BaseException as error:
            errors.append(error)
            call.close(error)

    threads = [threading.Thread(target=process, args=(index,), name=f"process-{index}") for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _together(before: str) -> Callable[[Path, RecordingDisk], None]:
    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "new")
        _save_together(path, "new", overwrite=before != NOTHING)
        disk.expect("new")

    return record


# Runs


def _look_at_run(run: Path) -> View:
    """The steps and which save of each it is."""
    found = steps(run)
    ckpts = Checkpointer(run)
    assert ckpts.steps == found
    assert ckpts.latest_step == max(found, default=None)
    if not found:
        with contextlib.suppress(NotFoundError):
            raise AssertionError(f"{open_checkpoint(run).path}: it is in no list of steps")
        return NOTHING
    seen = [_label(ckpts.path(step), [_step(step), _step(step) + "b"]) for step in found]
    assert open_checkpoint(run).path == ckpts.path(found[-1])
    pins = ["*" if local.pinned(stores.DISK, ckpts.path(step)) else "" for step in found]
    return " ".join(label + pin for label, pin in zip(seen, pins, strict=True))


def _step(step: int) -> str:
    return str(step)


def _save_again_in_run(run: Path, before: View) -> None:
    _save_steps(run, 99)
    assert _look_at_run(run).split() == [*(before.split() if before != NOTHING else ()), "99"]
    committed = {os.path.basename(Checkpointer(run).path(step)) for step in steps(run)}
    assert set(os.listdir(run)) == committed, f"{sorted(set(os.listdir(run)) - committed)} is left over"
    for name in committed:
        pin = run / name / local.PIN
        pin.unlink(missing_ok=True)
        _assert_tidy_inside(run / name)


def _save_steps(run: Path, *numbers: int, again: bool = False, **options: Any) -> None:
    with Checkpointer(run, **options) as ckpts:
        for number in numbers:
            on_exists = "overwrite" if again else "error"
            ckpts.save(number, tree(_step(number) + ("b" if again else "")), on_exists=on_exists)


def _of_run(
    name: str,
    record: Callable[[Path, RecordingDisk], None],
    *,
    before: Sequence[int] = (),
    broken: Literal["", "failing", "killed"] = "",
) -> Scenario:
    def prepare(root: Path) -> None:
        _save_steps(root / "runs/gpt", *before)

    return Scenario(
        name=name,
        record=lambda root, disk: record(root / "runs/gpt", disk),
        look=lambda root: _look_at_run(root / "runs/gpt"),
        again=lambda root, seen: _save_again_in_run(root / "runs/gpt", seen),
        prepare=prepare,
        broken=broken,
    )


def _retaining(run: Path, disk: RecordingDisk) -> None:
    """Each step is waited for."""
    with Checkpointer(run, keep=keep.last(2)) as ckpts:
        disk.expect(NOTHING)
        # What is deleted is so durably when the run is closed, in whatever order.
        before = [NOTHING]
        for number, after in enumerate((["1"], ["1 2"], ["1 2 3", "2 3"], ["1 2 3 4", "2 3 4", "1 3 4", "3 4"]), 1):
            disk.expect(*before, *after)
            pending = ckpts.save(number, tree(_step(number)))
            assert pending is not None
            pending.result()
            disk.expect(*after)
            before = after
    disk.expect("3 4")


def _in_background(run: Path, disk: RecordingDisk) -> None:
    """Nobody waits before the end."""
    disk.expect(NOTHING, "1", "1 2", "1 2 3", "2 3", "1 2 3 4", "2 3 4", "1 3 4", "3 4")
    _save_steps(run, 1, 2, 3, 4, keep=keep.last(2))
    disk.expect("3 4")


def _resaving(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1 2b")
    _save_steps(run, 2, again=True)
    disk.expect("1 2b")


def _pinning(run: Path, disk: RecordingDisk) -> None:
    ckpts = Checkpointer(run)
    disk.expect("1 2", "1* 2")
    ckpts.pin(1)
    disk.expect("1* 2", "1* 2 3", "1* 3")
    _save_steps(run, 3, keep=keep.last(1))
    disk.expect("1* 3", "1 3")
    ckpts.unpin(1)
    disk.expect("1 3", "3")
    ckpts.delete(1)
    disk.expect("3")


def _killed_in_run(before: str) -> Callable[[Path, RecordingDisk], None]:
    """A job is killed while it saves step 3; the next one saves it again, and may delete the first."""

    def record(run: Path, disk: RecordingDisk) -> None:
        old = before.split()
        possible = {" ".join([*some, third]) for some in (old, old[1:]) for third in ("", "3", "3b")}
        views = {view.strip() or NOTHING for view in possible}
        disk.expect(*views)
        with contextlib.suppress(TreeringError):
            _save_steps(run, 3, keep=keep.last(2))
        disk.revive()
        _save_steps(run, 3, again=True, keep=keep.last(2))
        disk.expect(" ".join([*old[1:], "3b"]))

    return record


# All


def _foreign(format: str, where: str, **options: Any) -> Iterator[Scenario]:
    options = {"format": format, **options}
    kind = "" if len(options) == 1 else ", several files"

    def single(name: str, record: Callable[[Path, RecordingDisk], None], before: str, **more: Any) -> Scenario:
        more = {"labels": ("old", "new", "first"), **more}
        return _single(f"{format}{kind}: {name}", record, where=where, before=before, **more, **options)

    yield single("first save", _saving(NOTHING, "new", **options), NOTHING)
    yield single("overwriting", _saving("old", "new", **options), "old")
    if kind:
        yield single("overwriting, no exchange", _without_exchange(**options), "old")
    yield single("an error of the disk, first save", _failing(NOTHING, **options), NOTHING, broken="failing")
    yield single("an error of the disk, overwriting", _failing("old", **options), "old", broken="failing")
    yield single("killed, then saved, first save", _killed(NOTHING, **options), NOTHING, broken="killed")
    yield single("killed, then saved, overwriting", _killed("old", **options), "old", broken="killed")


def scenarios() -> dict[str, Scenario]:
    """All of them, by name."""
    three = ("old", "new", "first")
    found = [
        _single("first save", _saving(NOTHING, "new")),
        _single("first save, several threads", _in_threads, labels=("large new",)),
        _single("first save, three processes", _together(NOTHING)),
        _single("overwriting", _saving("old", "new"), before="old"),
        _single("overwriting, three processes", _together("old"), before="old"),
        _single("overwriting, no locks", _without_locks, before="old"),
        _single("deleting", _deleting, before="old"),
        _single("deleting, two at once", _deleting_together, before="old"),
        _single("an error of the disk, first save", _failing(NOTHING), broken="failing"),
        _single("an error of the disk, overwriting", _failing("old"), before="old", broken="failing"),
        _single("killed, then saved, first save", _killed(NOTHING), labels=three, broken="killed"),
        _single("killed, then saved, overwriting", _killed("old"), before="old", labels=three, broken="killed"),
        _of_run("run: keeping the last two", _retaining),
        _of_run("run: in the background", _in_background),
        _of_run("run: a step again", _resaving, before=(1, 2)),
        _of_run("run: pinning and deleting", _pinning, before=(1, 2)),
        _of_run("run: killed, then saved", _killed_in_run("1 2"), before=(1, 2), broken="killed"),
        _of_run("run: killed first, then saved", _killed_in_run(""), broken="killed"),
        *_foreign("safetensors", "a/b/c.safetensors"),
        *_foreign("safetensors", "a/b/c", max_shard_size=100),
        *_foreign("flax", "a/b/c.msgpack"),
        *_foreign("orbax", "a/b/c"),
    ]
    return {scenario.name: scenario for scenario in found}
