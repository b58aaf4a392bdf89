"""Tests of threads that end without a sign, as when no memory is left even for an error: nothing waits for them."""

import itertools
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
import zygote
from treering._run.background_queue import BackgroundQueue
from treering._save.pending import PendingSave
from treering._threads import pool, thread
from treering._threads.pool import Task
from treering._threads.thread import Thread, start_threads
from treering.stores.objects import upload

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
TREE = {f"l{n}": np.full(1 << 16, n, np.float32) for n in range(4)}


def within_seconds(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the error that it raised. Fails if it neither returns nor raises."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(30)
    assert found, "the call stands still"
    return found[0]


def no_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: Any) -> None:
    monkeypatch.setattr(thread, "_MAX_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(pool, "_WORKER_POLL_SECONDS", 0.02)
    monkeypatch.setattr(pool, "_LOST_POLL_SECONDS", 0.02)
    monkeypatch.setattr(upload, "_LOST_POLL_SECONDS", 0.02)


@pytest.fixture
def ends_at_start(monkeypatch: Any) -> Callable[[str], None]:
    """Lets the threads with a name end like those that Python lacks the memory to begin."""
    real = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def let_end(name: str) -> None:
        def begin(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                raise MemoryError
            real(thread)

        monkeypatch.setattr(threading.Thread, "_bootstrap_inner", begin)

    return let_end


@pytest.mark.long
def test_a_thread_that_cannot_begin_is_noticed(ends_at_start: Any, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A save raises if its thread ends at once. All other work is done by fewer threads, or by the caller."""
    ends_at_start("treering-save")
    error = within_seconds(lambda: tr.save(tmp_path / "a", TREE))
    assert isinstance(error, tr.errors.SaveError) and "no memory" in str(error)
    with pytest.raises(tr.errors.NotFoundError):
        tr.open(tmp_path / "a")
    for name in ("treering-0", "treering-1", "treering-ahead", "treering-upkeep"):
        ends_at_start(name)

        def use(run: pathlib.Path = tmp_path / name) -> Any:
            with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:
                for step in (1, 2):
                    ckpts.save(step, TREE)
            tr.convert(run, run / "copy.safetensors", step=2)
            return tr.steps(run), float(tr.restore(run / "copy.safetensors")["l3"][7])

        assert within_seconds(use) == ([2], 3.0)
    ends_at_start("treering-ahead")
    assert within_seconds(Task(lambda: 5).result) == 5
    ends_at_start("no thread")
    with monkeypatch.context() as patch:  # The thread that starts the threads ends before it has started one.
        real = pool.start_threads.__globals__["_thread"].start_new_thread
        patch.setattr("_thread.start_new_thread", lambda begin, args: real(lambda: None, ()))
        assert isinstance(within_seconds(lambda: start_threads(Thread(target=int))), tr.errors.SaveError)


def test_a_save_whose_thread_ends_is_a_failed_save(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Every call that waits for it raises, and the next save works. Its caller does not wait for staging memory."""
    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "_run", no_memory)
        for options in ({}, {"memory_limit": 1}):
            error = within_seconds(lambda options=options: tr.save(tmp_path / "a", TREE, **options))
            assert isinstance(error, tr.errors.SaveError) and "ended without a result" in str(error)
        pending = within_seconds(lambda: tr.save_async(tmp_path / "a", TREE, memory_limit=1))
        assert isinstance(within_seconds(pending.result), tr.errors.SaveError) and pending.failed and pending.done()
        ckpts = tr.Checkpointer(tmp_path / "run")
        ckpts.save(1, TREE)
        assert isinstance(within_seconds(ckpts.wait), tr.errors.SaveError)
    ckpts.save(2, TREE)
    ckpts.close()
    assert tr.steps(tmp_path / "run") == [2]


def test_work_whose_thread_ends_raises(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    real, given = pool._Share.do, []

    def do(share: Any) -> None:
        given.append(share)
        if len(given) == 2:
            raise MemoryError
        real(share)

    large = {"w": np.ones(1 << 22, np.float32)}  # for four threads
    with monkeypatch.context() as patch:
        patch.setattr(pool._Share, "do", do)
        error = within_seconds(lambda: tr.save(tmp_path / "a", large, memory_limit=1 << 18))
        assert isinstance(error, tr.errors.SaveError) and "ended without a result" in str(error.__cause__ or error)
        patch.setattr(Task, "_run", no_memory)
        assert isinstance(within_seconds(Task(lambda: 5).result), tr.errors.SaveError)
    with monkeypatch.context() as patch:
        patch.setattr(upload.Upload, "run", no_memory)
        uploads = upload.Uploads()
        for n in range(12):  # more than slots, which the threads that have ended do not release
            within_seconds(lambda n=n: uploads.start(f"memory://bucket/{n}/a", lambda: None))
        assert isinstance(within_seconds(lambda: uploads.wait_for_folder("memory://bucket/0")), tr.errors.SaveError)
    done: list[int] = []
    queue = BackgroundQueue()
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundQueue, "_run_jobs", no_memory)
        queue.add("first", lambda: done.append(1))
        queue.add("second", lambda: done.append(2))
        within_seconds(queue.wait)
    assert done == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's limit on private memory")
@pytest.mark.parametrize("spare", [0, 50_000, 2_000_000])
def test_calls_without_memory_end(tmp_path: pathlib.Path, spare: int) -> None:
    """With a real limit on memory, a save and a restore return or raise, and no thread is left over."""
    code = f"""
import os, resource, threading, time
import numpy as np, treering as tr
top = {str(tmp_path)!r}
tree = {{f"l{{n}}": np.full(1 << 18, n, np.float32) for n in range(8)}}
tr.save(top + "/a", tree)
tr.restore(top + "/a", mmap=False)  # imports what the one below needs
(used,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData:")]
resource.setrlimit(resource.RLIMIT_DATA, (used + {spare}, -1))
for call in (lambda: tr.save(top + "/b", tree), lambda: tr.restore(top + "/a", mmap=False)):
    try: call()
    except (MemoryError, OSError): pass
resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
end = time.monotonic() + 30
while any(one.name.startswith("treering") and one.is_alive() for one in threading.enumerate()):
    assert time.monotonic() < end, threading.enumerate()
    time.sleep(0.01)
tr.save(top + "/b", tree, overwrite=True)
assert tr.verify(top + "/b").ok
print("ended")
"""
    exit_code, output = zygote.Process(code, os.environ).communicate(60)
    assert exit_code == 0 and output.rstrip().endswith("ended"), output


def test_a_latch_may_be_set_while_it_is_asked() -> None:
    """Another thread may set a latch between any two steps of `is_set` and `wait`."""

    def asked(ask: Callable[[thread.Latch], bool], count: int) -> bool:
        """Sets the latch before the step of that number. Returns False if there are fewer."""
        latch, steps = thread.Latch(lambda: False), itertools.count()

        def trace(frame: Any, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = frame.f_code.co_filename == thread.__file__
            if event == "opcode" and next(steps) == count:
                sys.settrace(None)
                latch.set()
            return trace

        sys.settrace(trace)
        try:
            ask(latch)
        finally:
            sys.settrace(None)
        return next(steps) > count

    for ask in (thread.Latch.is_set, lambda latch: latch.wait(0.001)):
        counts = itertools.count()
        while asked(ask, next(counts)):
            pass
        assert next(counts) > 5
