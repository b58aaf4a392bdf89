"""Crashes while a run is written: its steps, their retention, and the files next to them.

The view of a run, in words, lists the steps and which save of each it is, "1 2b": with "*" if a step is pinned, and
"!" if metrics were recorded for it later. "finished" follows if the run is, and "archived 3 4" for archived steps.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from treering import keep, stores
from treering._run.checkpointer import Checkpointer
from treering._run.metrics import record as record_metrics
from treering._run.open import open_checkpoint
from treering._run.run_layout import FINISHED_MARK, steps
from treering._save import saved_arrays
from treering.errors import NotFoundError, TreeringError
from treering.formats.treering import manifest, metrics, pins, schema

from .recording import RecordingDisk, View
from .scenarios import NOTHING, Broken, Record, Scenario, label_at, tree
from .scenarios_single import assert_tidy_inside

_RUN, _ARCHIVED = "runs/gpt", "archived"
_SHARED = jnp.asarray(tree("s")["w"])


def runs() -> Iterator[Scenario]:
    """Yields the scenarios of a `Checkpointer`, and of `treering.record`."""
    yield _of_run("run: keeping the last two", _retaining)
    yield _of_run("run: in the background", _in_background)
    yield _of_run("run: a step again", _resaving, before=(1, 2))
    yield _of_run("run: pinning and deleting", _pinning, before=(1, 2))
    yield _of_run("run: killed, then saved", _killed("1 2"), before=(1, 2), broken="killed")
    yield _of_run("run: killed first, then saved", _killed(""), broken="killed")
    yield _of_run("run: rewinding", _rewinding, before=(1, 2, 3, 4))
    yield _of_run("run: going back", _going_back(0), before=(1, 2, 3, 4))
    yield _of_run("run: an error of the disk, going back", _failing_to_go_back, before=(1, 2, 3, 4), broken="failing")
    yield _of_run("run: killed, then going back", _going_back(1), before=(1, 2, 3, 4), broken="killed")
    yield _of_run("run: killed twice, then going back", _going_back(2), before=(1, 2, 3, 4), broken="killed twice")
    yield _of_run("run: killed while going back, then rewound", _killed_then_rewound, before=(1, 2, 3), broken="killed")
    yield _of_run("run: killed while going back, then saved", _killed_going_back, before=(1, 2, 3), broken="killed")
    yield _of_run("run: recording metrics", _recording, before=(1, 2))
    yield _of_run("run: an error of the disk, recording metrics", _failing_to_record, before=(1, 2), broken="failing")
    yield _of_run("run: killed, then recording metrics", _killed_recording, before=(1, 2), broken="killed")
    yield _of_run("run: finishing and continuing", _finishing, before=(1, 2))
    yield _of_run("run: killed, then finishing", _killed_finishing, before=(1, 2), broken="killed")
    yield _of_run("run: killed, then pinning", _killed_pinning, before=(1, 2), broken="killed")
    yield _of_run("run: with unchanged arrays", _unchanged)
    yield _of_run("run: an error of the disk, with unchanged arrays", _failing_unchanged, broken="failing")


def _of_run(name: str, record: Record, *, before: Sequence[int] = (), broken: Broken = "") -> Scenario:
    return Scenario(
        name=name,
        record=lambda root, disk: record(root / _RUN, disk),
        look=lambda root: _look_at(root / _RUN),
        again=lambda root, seen: _save_again(root / _RUN, seen),
        prepare=lambda root: _save(root / _RUN, *map(str, before)),
        broken=broken,
        subject="run",
    )


def _step(label: str) -> int:
    return int(label.rstrip("bcds"))


def _save(run: Path, *labels: str, **options: Any) -> None:
    """Saves steps; "2b" overwrites a "2" if there is one."""
    with Checkpointer(run, **options) as ckpts:
        for label in labels:
            ckpts.save(_step(label), tree(label), on_exists="error" if label.isdigit() else "overwrite")


# What must hold


def _look_at(run: Path) -> View:
    ckpts = Checkpointer(run)
    seen = _labels(run)
    assert ckpts.steps == steps(run)
    assert ckpts.latest_step == max(ckpts.steps, default=None)
    if seen:
        assert open_checkpoint(run).path == ckpts.path(ckpts.steps[-1])
    else:
        with contextlib.suppress(NotFoundError):
            raise AssertionError(f"{open_checkpoint(run).path}: it is in no list of steps")
    archived = [label for place in sorted(run.glob("rewound-*")) for label in _labels(place)]
    return _view(seen, archived, finished=(run / FINISHED_MARK).exists())


def _labels(run: Path) -> list[str]:
    ckpts = Checkpointer(run)
    return [_label(ckpts.path(step), step) for step in steps(run)]


def _label(path: str, step: int) -> str:
    """Which save it is, with its marks. The same files are looked at once: most steps are alike in most states."""
    files = frozenset((file.name, file.read_bytes()) for file in Path(path).iterdir())
    key = hash((step, files))
    if key not in _known:
        _known[key] = _read_label(path, step)
    return _known[key]


_known: dict[int, str] = {}


def _read_label(path: str, step: int) -> str:
    label = label_at(path, [f"{step}{branch}" for branch in ("", "b", "c", "d", "s")])
    pinned = "*" if pins.is_pinned(stores.get(""), path) else ""
    identity = manifest.xxh3(Path(path, schema.MANIFEST).read_bytes())
    found = [content for _, content in metrics.read(stores.get(""), path, identity)]
    assert all(isinstance(one, dict) for one in found), f"{path}: metrics are there in part"
    return label + pinned + ("!" if found else "")


def _view(seen: Iterable[str], archived: Collection[str] = (), *, finished: bool = False) -> View:
    words = [*sorted(seen), *["finished"] * finished, *[_ARCHIVED] * bool(archived), *sorted(archived)]
    return " ".join(words) or NOTHING


def _save_again(run: Path, before: View) -> None:
    """Checks that archived steps stay there, and that a finished run continues."""
    _save(run, "99")
    seen, _, archived = before.partition(_ARCHIVED)
    words = [word for word in seen.split() if word not in (NOTHING, "finished")]
    assert _look_at(run) == _view([*words, "99"], archived.split())
    places = [run, *run.glob("rewound-*")]
    for place in places:
        committed = {os.path.basename(Checkpointer(place).path(step)) for step in steps(place)}
        expected = {*committed, *(one.name for one in places if one.parent == place)}
        assert set(os.listdir(place)) == expected, f"{sorted(set(os.listdir(place)) ^ expected)} in {place}"
        assert committed, f"{place} is left over"
        for name in committed:
            (place / name / schema.PIN).unlink(missing_ok=True)
            assert_tidy_inside(place / name)


def _killed_job(disk: RecordingDisk, job: Callable[[], object]) -> bool:
    """Returns True if a job got to its end before it was killed. The next one begins."""
    try:
        job()
    except (TreeringError, OSError):
        return False
    finally:
        disk.revive()
    return True


# Saving and deleting


def _retaining(run: Path, disk: RecordingDisk) -> None:
    """Each step is waited for."""
    with Checkpointer(run, keep=keep.last(2)) as ckpts:
        disk.expect(NOTHING)
        # What is deleted is so durably when the run is closed, in whatever order.
        before = [NOTHING]
        for number, after in enumerate((["1"], ["1 2"], ["1 2 3", "2 3"], ["1 2 3 4", "2 3 4", "1 3 4", "3 4"]), 1):
            disk.expect(*before, *after)
            pending = ckpts.save(number, tree(str(number)))
            assert pending is not None
            pending.result()
            disk.expect(*after)
            before = after
    disk.expect("3 4")


def _in_background(run: Path, disk: RecordingDisk) -> None:
    """Saves without waiting before the end."""
    disk.expect(NOTHING, "1", "1 2", "1 2 3", "2 3", "1 2 3 4", "2 3 4", "1 3 4", "3 4")
    _save(run, "1", "2", "3", "4", keep=keep.last(2))
    disk.expect("3 4")


def _save_unchanged(ckpts: Checkpointer, number: int) -> bool:
    """Saves a step whose `w` is the array of all such steps. Returns True if it is in a file of an earlier step."""
    before, saved_arrays.MIN_BYTES = saved_arrays.MIN_BYTES, 1
    try:
        pending = ckpts.save(number, {**tree(f"{number}s"), "w": _SHARED})
        assert pending is not None
        return pending.result().shared_bytes > 0
    finally:
        saved_arrays.MIN_BYTES = before


def _unchanged(run: Path, disk: RecordingDisk) -> None:
    """Two steps share files with earlier ones. Then one of these earlier ones is deleted."""
    seen: list[str] = []
    with Checkpointer(run) as ckpts:
        for number in range(1, 6):
            disk.expect(_view(seen), _view([*seen, f"{number}s"]))
            assert _save_unchanged(ckpts, number) == (number > 3)
            seen.append(f"{number}s")
            disk.expect(_view(seen))
        del seen[1]
        disk.expect(_view([*seen, "2s"]), _view(seen))
        ckpts.delete(2)
    disk.expect(_view(seen))


def _failing_unchanged(run: Path, disk: RecordingDisk) -> None:
    """A step that fails leaves the others as they are, and the next one has all arrays."""
    seen: list[str] = []
    disk.expect(NOTHING)
    with contextlib.suppress(TreeringError, OSError), Checkpointer(run) as ckpts:
        for number in range(1, 6):
            disk.expect(_view(seen), _view([*seen, f"{number}s"]))
            with contextlib.suppress(TreeringError, OSError):
                _save_unchanged(ckpts, number)
            seen = [f"{step}s" for step in ckpts.committed_steps]
            disk.expect(_view(seen))


def _resaving(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1 2b")
    _save(run, "2b")
    disk.expect("1 2b")


def _pinning(run: Path, disk: RecordingDisk) -> None:
    ckpts = Checkpointer(run)
    disk.expect("1 2", "1* 2")
    ckpts.pin(1)
    disk.expect("1* 2", "1* 2 3", "1* 3")
    _save(run, "3", keep=keep.last(1))
    disk.expect("1* 3", "1 3")
    ckpts.unpin(1)
    disk.expect("1 3", "3")
    ckpts.delete(1)
    disk.expect("3")


def _killed_pinning(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1* 2")
    _killed_job(disk, lambda: Checkpointer(run).pin(1))
    Checkpointer(run).pin(1)
    disk.expect("1* 2")


def _killed(before: str) -> Record:
    """A job is killed while it saves step 3; the next one saves it again, and may delete the first."""

    def record(run: Path, disk: RecordingDisk) -> None:
        old = before.split()
        disk.expect(*(_view([*some, *third]) for some in (old, old[1:]) for third in ([], ["3"], ["3b"])))
        _killed_job(disk, lambda: _save(run, "3", keep=keep.last(2)))
        _save(run, "3b", keep=keep.last(2))
        disk.expect(_view([*old[1:], "3b"]))

    return record


# Rewinding: a state is the steps of the run and the archived steps.

_Steps = tuple[frozenset[str], frozenset[str]]


def _archive(states: Iterable[_Steps], step: int) -> set[_Steps]:
    """While all behind a step are moved, of several any may be: a crash can undo one move and not another."""
    found: set[_Steps] = set()
    for seen, archived in states:
        later = [label for label in seen if _step(label) > step]
        for count in range(len(later) + 1):
            found |= {(seen - {*some}, archived | {*some}) for some in itertools.combinations(later, count)}
    return found


def _only(states: Iterable[_Steps], step: int) -> set[_Steps]:
    """Those in which nothing lies behind a step."""
    return {(seen, archived) for seen, archived in states if max(map(_step, seen), default=-1) <= step}


def _with(states: Iterable[_Steps], label: str) -> set[_Steps]:
    return {(seen | {label}, archived) for seen, archived in states}


def _views(states: Iterable[_Steps]) -> list[View]:
    return [_view(seen, archived) for seen, archived in states]


def _all_of(labels: str) -> set[_Steps]:
    return {(frozenset(labels.split()), frozenset[str]())}


def _go_back_and_save(run: Path, label: str) -> None:
    with Checkpointer(run) as ckpts:
        ckpts.restore(step=2)
        ckpts.save(3, tree(label))


def _rewind(run: Path, step: int | None) -> None:
    with Checkpointer(run) as ckpts:
        ckpts.rewind(step)


def _rewinding(run: Path, disk: RecordingDisk) -> None:
    states = _all_of("1 2 3 4")
    with Checkpointer(run) as ckpts:
        disk.expect(*_views(_archive(states, 2)))
        ckpts.rewind(2)
        states = _only(_archive(states, 2), 2)
        disk.expect(*_views(states))
        disk.expect(*_views(states | _with(states, "3b")))
        ckpts.save(3, tree("3b"))
    states = _with(states, "3b")
    disk.expect(*_views(states | _archive(states, 1)))
    _rewind(run, 1)
    states = _only(_archive(states, 1), 1)
    disk.expect(*_views(states | _archive(states, -1)))
    _rewind(run, None)
    disk.expect(*_views(_only(_archive(states, -1), -1)))


def _going_back(times: int) -> Record:
    """Kills so many jobs that go back to step 2 and save step 3 again; then one that is not killed does the same."""

    def record(run: Path, disk: RecordingDisk) -> None:
        states = _all_of("1 2 3 4")
        for label in ("3b", "3c")[:times]:
            states = _archive(states, 2)
            saved = _with(_only(states, 2), label)
            disk.expect(*_views(states | saved))
            done = _killed_job(disk, lambda label=label: _go_back_and_save(run, label))
            states = saved if done else states | saved
        states = _archive(states, 2)
        saved = _with(_only(states, 2), "3d")
        disk.expect(*_views(states | saved))
        _go_back_and_save(run, "3d")
        disk.expect(*_views(saved))

    return record


def _failing_to_go_back(run: Path, disk: RecordingDisk) -> None:
    states = _archive(_all_of("1 2 3 4"), 2)
    saved = _with(_only(states, 2), "3b")
    disk.expect(*_views(states | saved))
    with contextlib.suppress(TreeringError, OSError):
        _go_back_and_save(run, "3b")
        disk.expect(*_views(saved))


def _killed_then_rewound(run: Path, disk: RecordingDisk) -> None:
    """Checks that steps which an earlier `rewind` moved are durable when the next one returns."""
    states = _archive(_all_of("1 2 3"), 1)
    disk.expect(*_views(states))
    _killed_job(disk, lambda: _rewind(run, 1))
    _rewind(run, 1)
    disk.expect(*_views(_only(states, 1)))


def _killed_going_back(run: Path, disk: RecordingDisk) -> None:
    """Continues in a job that knows nothing of the rewind: from the latest step, which is the latest from then on."""
    states = _archive(_all_of("1 2 3"), 1)
    disk.expect(*_views(states))
    _killed_job(disk, lambda: _rewind(run, 1))
    found = steps(run)
    number = found[-1] + 1
    states |= {(seen | {f"{number}b"}, archived) for seen, archived in states if sorted(map(_step, seen)) == found}
    disk.expect(*_views(states))
    _save(run, f"{number}b")
    disk.expect(*_views(state for state in states if f"{number}b" in state[0]))


# Metrics that come later, and the end of a run


def _recording(run: Path, disk: RecordingDisk) -> None:
    """Checks that recorded metrics are gone with their step when it is saved again."""
    disk.expect("1 2", "1! 2")
    record_metrics(run, 1, {"loss": 0.5})
    disk.expect("1! 2")
    record_metrics(run, 1, {"loss": 0.25, "accuracy": 1.0})
    disk.expect("1! 2", "1! 2!")
    record_metrics(run, 2, {"loss": 0.5})
    disk.expect("1! 2!", "1! 2b")
    _save(run, "2b")
    disk.expect("1! 2b")


def _failing_to_record(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1! 2")
    with contextlib.suppress(TreeringError):
        record_metrics(run, 1, {"loss": 0.5})
        disk.expect("1! 2")


def _killed_recording(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1! 2")
    done = _killed_job(disk, lambda: record_metrics(run, 1, {"loss": 0.5}))
    disk.expect("1! 2") if done else None
    record_metrics(run, 1, {"loss": 0.25})
    disk.expect("1! 2")


def _finishing(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1 2 3", "1 2 3 finished")
    ckpts = Checkpointer(run)
    ckpts.save(3, tree("3"))
    ckpts.finish()
    disk.expect("1 2 3 finished")
    disk.expect("1 2 3 finished", "1 2 3", "1 2 3 4")
    _save(run, "4")
    disk.expect("1 2 3 4")


def _finish(run: Path) -> None:
    with Checkpointer(run) as ckpts:
        ckpts.finish()


def _killed_finishing(run: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1 2 finished")
    _killed_job(disk, lambda: _finish(run))
    _finish(run)
    disk.expect("1 2 finished")
