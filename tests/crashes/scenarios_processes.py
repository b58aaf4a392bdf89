"""Several processes save together when the crash comes; they are threads here."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from treering._processes import assignment
from treering._save import write
from treering._save.job import prepare
from treering._save.save import save
from treering._save.target import SaveOptions, encode_info, target_of
from treering._threads.pool import ThreadPool
from treering.errors import TreeringError

from .recording import RecordingDisk
from .scenarios import NOTHING, Record, Scenario, tree
from .scenarios_single import single


def together() -> Iterator[Scenario]:
    """Treering's own format, written by three processes."""
    yield single("first save, three processes", _together(NOTHING))
    yield single("overwriting, three processes", _together("old"), before="old")
    for before, name in ((NOTHING, "first save"), ("old", "overwriting")):
        name = f"killed, then saved, {name}, three processes"
        yield single(name, _killed(before), before=before, broken="killed")


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

    name, timeout, in_doubt = "", 0.0, False

    def __init__(self, table: _Table, index: int):
        self.index, self.count, self._table, self._turn = index, table.count, table, 0

    def set_activity(self, what: str) -> None: ...

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        table, turn = self._table, self._turn
        self._turn += 1
        table.put(table.words, (turn, self.index), value)
        if self.index == 0:
            everyone = [(turn, index) for index in range(self.count)]
            table.wait(lambda: all(one in table.words for one in everyone))
            table.put(table.answers, turn, decide([table.words[one] for one in everyone]))
        table.wait(lambda: turn in table.answers)
        return table.answers[turn]

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return self.gather_and_decide(None, lambda words: decide())

    def check(self) -> None: ...

    def check_all(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None:
        with self._table.changed:
            self._table.failed = self._table.failed or error
            self._table.changed.notify_all()


def _save_together(path: Path, label: str, *, overwrite: bool, count: int = 3) -> None:
    """Does the work of `treering.save` in every process of a job."""
    table = _Table(count)
    errors: list[BaseException] = []

    def process(index: int) -> None:
        call = _Seat(table, index)
        try:
            options = SaveOptions("treering", overwrite, (), None, None, False, False, {})
            plan = prepare(target_of(call, str(path), encode_info(None, None, None), options), tree(label))
            plan.caller.run()
            with contextlib.closing(ThreadPool(1)) as crew:
                write.write(plan, crew)
        except BaseException as error:
            errors.append(error)
            call.close(error)

    threads = [threading.Thread(target=process, args=(index,), name=f"process-{index}") for index in range(count)]
    with mock.patch.object(assignment, "_MIN_CUT_BYTES", 8):  # so that each of them writes something
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _together(before: str) -> Record:
    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "new")
        _save_together(path, "new", overwrite=before != NOTHING)
        disk.expect("new")

    return record


def _killed(before: str) -> Record:
    """All three are killed at once; a lone process saves there later."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "first")
        done = False
        with contextlib.suppress(TreeringError, OSError):
            _save_together(path, "first", overwrite=before != NOTHING)
            done = True
        disk.revive()
        disk.expect("first", "new") if done else disk.expect(before, "first", "new")
        save(path, tree("new"), overwrite=True)
        disk.expect("new")

    return record
