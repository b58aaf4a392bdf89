"""`python -m fault_injection.peers DIRECTORY COUNT [VICTIM …] [--only OPERATION] [--every N]`: SIGKILL to one process.

Each process of a job is killed at each named point of a save, an overwrite, a step with retention and a deletion. The
jobs are real ones, under `jax.distributed`; their processes are forked from one that has imported what they need.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from treering import stores
from treering._processes import coordinator
from treering.testing._doubles import SteppedDisk

from . import forked_child
from .kill_points import Outcome

_SILENCE = 3  # seconds after which a process is taken for dead
_AT_ONCE = 3  # jobs; most of their time they wait for the dead
_SIZE = 3 << 18  # numbers in the array of which every process has a part: some blocks


class Point(NamedTuple):
    """Before, within or after an operation of the disk, or the word that a process gives in a phase of a call.

    At a point that only process 0 reaches (`leader`), the victim is killed when process 0 gets there.
    """

    name: str
    operation: str  # or "word"
    at: str  # the end of the path, or the phase
    when: str
    leader: bool = False


_EVERYWHERE = (
    Point("before its file is made", "create", ".safetensors", "before"),
    Point("while its file is written", "write", ".safetensors", "within"),
    Point("before its sync", "sync", ".safetensors", "before"),
    Point("after its sync", "sync", ".safetensors", "after"),
    Point("before its word is given", "word", "waiting for the commit", "before"),
    Point("after its word is given", "word", "waiting for the commit", "after"),
)
_REMOVAL = (
    Point("before the old files are removed", "unlink", ".safetensors", "before", True),
    Point("while the old files are removed", "unlink", ".safetensors", "after", True),
)
_WITHDRAWAL = (
    Point("before the old is withdrawn", "unlink", "/treering.json", "before", True),
    Point("after the old is withdrawn", "unlink", "/treering.json", "after", True),
    *_REMOVAL,
    Point("after the old is removed", "remove_dir", "", "after", True),
)
_DECISION = (
    Point("before the word is given", "word", "deciding", "before", True),
    Point("after the word is given", "word", "deciding", "after", True),
)


def _commit(operation: str) -> tuple[Point, Point]:
    where = operation, "/treering.json"
    return Point("before the commit", *where, "before", True), Point("after the commit", *where, "after", True)


class Operation(NamedTuple):
    """`prepare` and `act` are what every process of a job does, and `go_on` what those of the next job do.

    `allowed` are the states that may be there after a kill, each the versions of steps; a checkpoint alone is step 0.
    `after` is what there is after the next job.
    """

    prepare: Callable[[Path], Any]
    act: Callable[[Path], Any]
    go_on: Callable[[Path], Any]
    allowed: tuple[dict[int, int], ...]
    after: dict[int, int]
    points: tuple[Point, ...]


def _tree(n: int) -> dict[str, Any]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    values = np.full(_SIZE, n, np.float32)
    return {"x": jax.make_array_from_callback(values.shape, sharding, lambda at: values[at]), "n": n}


def _save(n: int, *, overwrite: bool = False) -> Callable[[Path], Any]:
    return lambda place: tr.save(place / "c", _tree(n), overwrite=overwrite, timeout=_SILENCE)


def _steps(*steps: int, keep: int) -> Callable[[Path], Any]:
    def act(place: Path) -> None:
        with tr.Checkpointer(place / "run", keep=tr.keep.last(keep), timeout=_SILENCE) as ckpts:
            for step in steps:
                ckpts.save(step, _tree(step))

    return act


def _delete(place: Path) -> None:
    with tr.Checkpointer(place / "run", timeout=_SILENCE) as ckpts:
        ckpts.delete(2)


_TWO, _NEXT = _steps(1, 2, keep=2), _steps(7, 9, keep=2)
OPERATIONS = {
    "save": Operation(
        lambda place: None, _save(2), _save(3, overwrite=True), ({}, {0: 2}), {0: 3}, (*_EVERYWHERE, *_commit("link"))
    ),
    "overwrite": Operation(
        _save(1),
        lambda place: tr.save_async(place / "c", _tree(2), overwrite=True, timeout=_SILENCE).result(),
        _save(3, overwrite=True),
        ({0: 1}, {0: 2}),
        {0: 3},
        (*_EVERYWHERE, *_commit("rename"), *_REMOVAL),
    ),
    "step and retention": Operation(
        _TWO,
        _steps(3, keep=2),
        _NEXT,
        ({1: 1, 2: 2}, {1: 1, 2: 2, 3: 3}, {2: 2, 3: 3}),
        {7: 7, 9: 9},
        (*_EVERYWHERE, *_commit("link"), *_WITHDRAWAL),
    ),
    "delete": Operation(_TWO, _delete, _NEXT, ({1: 1, 2: 2}, {1: 1}), {7: 7, 9: 9}, (*_DECISION, *_WITHDRAWAL)),
}


def killed_everywhere(
    operation: Operation, count: int, directory: Path, *, victims: Sequence[int] = (), every: int = 1
) -> Outcome:
    """Kills each process of jobs of `count` at each point, or only at `every` so many; some jobs at a time."""
    before = directory / "before"
    before.mkdir(parents=True)
    ended = _Job(before, operation.prepare, count).end()
    assert all(code == 0 for code, _ in ended), ended
    kills = list(itertools.product(victims or range(count), operation.points))[::every]
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for first in range(0, len(kills), _AT_ONCE):
        batch = [
            _kill(operation, count, victim, point, before, directory / str(first + n), found, wrong)
            for n, (victim, point) in enumerate(kills[first : first + _AT_ONCE])
        ]
        collections.deque(itertools.zip_longest(*batch), 0)
    return Outcome(len(kills), dict(found), wrong)


def _kill(
    operation: Operation,
    count: int,
    victim: int,
    point: Point,
    before: Path,
    place: Path,
    found: collections.Counter[str],
    wrong: list[str],
) -> Iterator[None]:
    """One process killed at one point, and the next job; it yields while those are at work."""
    shutil.copytree(before, place)
    job = _Job(place, operation.act, count, (victim, point))
    yield
    ended = job.end()
    try:
        state = _state(operation, place)
        _check(ended, victim, state)
        job = _Job(place, operation.go_on, count)
        yield
        ended = job.end()
        assert all(code == 0 for code, _ in ended), "the next job"
        assert _versions(place) == operation.after
        _check_tidy(place, count)
        found[state] += 1
        shutil.rmtree(place)
    except Exception:
        wrong.append(f"process {victim} of {count} killed {point.name}: {ended}\n{traceback.format_exc()}")


def _check(ended: list[tuple[int, str]], victim: int, state: str) -> None:
    """Checks that each survivor succeeded or got one error that names the dead; process 0 knows the result."""
    assert ended[victim][0] == -signal.SIGKILL, "it did not come there"
    for index, (code, text) in enumerate(ended):
        if index != victim and victim != 0:
            assert code in (0, forked_child.RAISED)
            assert code == 0 or (text.startswith("PeerError: ") and f"process {victim}" in text)
        elif index != victim:  # JAX ends them when process 0 is gone, or our own error comes first
            assert code in (0, forked_child.RAISED, -signal.SIGABRT)
            assert code != forked_child.RAISED or text.startswith("PeerError: ")
        if code == 0:
            assert state == "new"
    if victim:
        assert (ended[0][0] == 0) == (state == "new")


def _state(operation: Operation, place: Path) -> str:
    found, allowed = _versions(place), operation.allowed
    assert found in allowed, found
    return "old" if found == allowed[0] else "new" if found == allowed[-1] else "between"


def _versions(place: Path) -> dict[int, int]:
    """Returns the version of each step, verified and compared."""
    if (place / "run").exists():
        return {step: _version(place / "run" / f"step-{step:08}") for step in tr.steps(place / "run")}
    return {0: _version(place / "c")} if (place / "c" / "treering.json").exists() else {}


def _version(path: Path) -> int:
    report = tr.verify(path)
    assert report.ok, str(report)
    tree = tr.restore(path)
    assert tree["x"].shape == (_SIZE,) and (tree["x"] == tree["n"]).all(), "not what was saved"
    return tree["n"]


def _check_tidy(place: Path, count: int) -> None:
    for path in place.rglob("treering.json"):
        names = sorted(os.listdir(path.parent))
        assert len(names) == count + 1 and len([n for n in names if n.startswith("arrays-")]) == count, names
    assert {path.name for path in place.rglob("*") if path.is_dir()} <= {"c", "run", "step-00000007", "step-00000009"}


class _Job:
    """Processes that do the same thing together: begun at once, ended by `end`.

    Process 0 lives as long as the others, as it does in any job; the one that is `to_kill` until it is killed.
    """

    def __init__(self, place: Path, act: Callable[[Path], Any], count: int, to_kill: tuple[int, Point] | None = None):
        self._log = place.parent / f"{place.name}-output"
        self._reading, self._writing = os.pipe()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._children = [
            forked_child.start(functools.partial(self._member, place, act, to_kill, address, count, index))
            for index in range(count)
        ]

    def end(self) -> list[tuple[int, str]]:
        """Returns the exit code and the output of each process."""
        codes = [forked_child.end(child) for child in self._children[1:]]
        os.write(self._writing, b".")
        codes.insert(0, forked_child.end(self._children[0]))
        os.close(self._reading)
        os.close(self._writing)
        return [(code, self._output(index).read_text()[-2000:]) for index, code in enumerate(codes)]

    def _output(self, index: int) -> Path:
        return self._log.with_name(f"{self._log.name}-{index}")

    def _member(
        self,
        place: Path,
        act: Callable[[Path], Any],
        to_kill: tuple[int, Point] | None,
        address: str,
        count: int,
        index: int,
    ) -> None:
        with self._output(index).open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(address, count, index)
        if to_kill:
            _set_trap(*to_kill, index)
        try:
            act(place)
        except tr.errors.TreeringError as error:
            os.truncate(1, 0)
            print(f"{type(error).__name__}: {error}", flush=True)
            raise
        finally:
            if index == 0:
                os.read(self._reading, 1)
            elif to_kill and index == to_kill[0]:
                signal.pause()


def _set_trap(victim: int, point: Point, index: int) -> None:
    """Makes the process that comes to the point kill the victim."""
    client: Any = distributed.global_state.client
    if index == victim:
        client.key_value_set("torture/victim", str(os.getpid()))
    if index != (0 if point.leader else victim):
        return

    def kill() -> None:
        pid = int(client.blocking_key_value_get("torture/victim", 60_000))
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone, and may have been before
            os.kill(pid, signal.SIGKILL)
            while " Z " not in Path(f"/proc/{pid}/stat").read_text():
                time.sleep(0.001)

    if point.operation == "word":
        _trap_word(point, kill)
    else:
        stores.register(stores.Filesystem(_DeadlyDisk(point, kill)))


def _trap_word(point: Point, kill: Callable[[], None]) -> None:
    usual = coordinator.MultiProcessCall._put_value

    def deadly(self: Any, key: str, value: Any) -> None:
        if self._activity != point.at:
            return usual(self, key, value)
        if point.when == "before":
            kill()
        usual(self, key, value)
        return kill() if point.when == "after" else None

    coordinator.MultiProcessCall._put_value = deadly


class _DeadlyDisk(SteppedDisk):
    def __init__(self, point: Point, kill: Callable[[], None]):
        super().__init__()
        self._point, self._kill = point, kill

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        point = self._point
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[-1]
        if name != point.operation or not str(path).endswith(point.at):
            return operation(*args)
        if point.when == "within":
            fd, data, offset = args
            operation(fd, data[: len(data) // 8192 * 4096], offset)
        if point.when != "after":
            self._kill()
        done = operation(*args)
        if point.when == "after":
            self._kill()
        return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fault_injection.peers", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("count", type=int, help="processes of each job")
    parser.add_argument("victims", type=int, nargs="*", help="those that are killed (default: each)")
    parser.add_argument("--only", choices=list(OPERATIONS), default="save")
    parser.add_argument("--every", type=int, default=1, help="only every so many points")
    chosen = parser.parse_args()
    outcome = killed_everywhere(
        OPERATIONS[chosen.only], chosen.count, chosen.directory, victims=chosen.victims, every=chosen.every
    )
    json.dump(outcome._asdict(), sys.stdout)
