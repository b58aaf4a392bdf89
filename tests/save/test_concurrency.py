"""Tests several processes that use one checkpoint or run at the same time, and forks."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import treering as tr
from fault_injection.scenarios import assert_tidy
from treering import stores
from treering.formats.treering import removal
from treering.stores.posix import Disk

# A version is consistent if all of its leaves are the same number.
PRELUDE = """
    import faulthandler, json, os, pathlib, random, signal, sys, threading, time
    import numpy as np, treering as tr
    from treering import stores
    from treering.formats.treering import removal
    from treering.formats.treering import removal
    faulthandler.dump_traceback_later(100, exit=True)
    place = pathlib.Path(sys.argv[1])

    def tree(n):
        return {"w": np.full(1000, n), "v": [np.full(7, n), n]}

    def version(found):
        values = {*found["w"].tolist(), *found["v"][0].tolist(), found["v"][1]}
        assert len(found["w"]) == 1000 and len(values) == 1, values
        return values.pop()
    """

# Reads until its input ends, and prints how often it found a version and how often none.
READER = """
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
    seen = gone = 0
    while not (ended.is_set() and seen):
        try:
            version(tr.restore(place, mmap=random.choice([None, False])))
            seen += 1
        except tr.errors.NotFoundError:
            gone += 1
    print(json.dumps([seen, gone]))
    """


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_leftover_processes() -> Iterator[None]:
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def start(code: str, *args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code), *map(str, args)]
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    return STARTED[-1]


def result(process: subprocess.Popen[str]) -> Any:
    """Ends the input of a process, and returns what it printed as JSON."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output) if output else None


@pytest.mark.rare
@pytest.mark.slow
def test_readers_see_one_version_during_overwrite(tmp_path: pathlib.Path) -> None:
    """Readers find a consistent version or none, while a writer overwrites and deletes the checkpoint."""
    writer = """
        for n in range(1, 61):
            tr.save(place, tree(n), overwrite=True)
            time.sleep(0.01)
            if n % 3 == 0 and n < 60:
                removal.delete(stores.get(""), str(place))
        """
    readers = [start(READER, tmp_path / "c") for _ in range(2)]
    result(start(writer, tmp_path / "c"))
    assert all(result(reader)[0] for reader in readers)
    assert tr.verify(tmp_path / "c").ok
    assert_tidy(tmp_path / "c")


@pytest.mark.rare
@pytest.mark.slow
def test_readers_of_a_run_always_find_a_step(tmp_path: pathlib.Path) -> None:
    """Readers of a run always find a step, while a writer saves and deletes steps."""
    result(start("tr.save(place / 'step-1', tree(1)); tr.save(place / 'step-2', tree(2))", tmp_path / "run"))
    writer = """
        with tr.Checkpointer(place, keep=tr.keep.last(2)) as ckpts:
            for n in range(3, 80):
                ckpts.save(n, tree(n))
                if n % 5 == 0:
                    ckpts.save(n, tree(n), on_exists="overwrite")
                if n % 7 == 0:
                    ckpts.delete(n - 1)
        """
    readers = [start(READER, tmp_path / "run") for _ in range(2)]
    result(start(writer, tmp_path / "run"))
    for reader in readers:
        seen, gone = result(reader)
        assert seen and not gone
    assert tr.steps(tmp_path / "run")[-1] == 79 and tr.verify(tmp_path / "run").ok


@pytest.mark.rare
@pytest.mark.slow
def test_two_writers_of_one_run(tmp_path: pathlib.Path) -> None:
    writer = """
        saved, refused = 0, 0
        ckpts = tr.Checkpointer(place, keep=tr.keep.last(3))
        for n in range(1, 50):
            try:
                ckpts.save(n, tree(n), on_exists=random.choice(["error", "skip", "overwrite"]))
                ckpts.wait()
                saved += 1
            except tr.errors.TreeringError as error:
                assert str(place) in str(error), error
                refused += 1
        print(json.dumps([saved, refused]))
        """
    found = [result(one) for one in [start(writer, tmp_path / "run") for _ in range(2)]]
    assert sum(saved for saved, _ in found) >= 49
    assert tr.steps(tmp_path / "run")[-1] == 49 and tr.verify(tmp_path / "run").ok
    result(start("with tr.Checkpointer(place, keep=tr.keep.last(3)) as c: c.save(50, tree(50))", tmp_path / "run"))
    for step in tr.steps(tmp_path / "run"):
        assert_tidy(tmp_path / "run" / f"step-{step:08}")
        assert tr.restore(tmp_path / "run", step=step)["v"][1] == step
    assert len(os.listdir(tmp_path / "run")) == 3


@pytest.mark.long
def test_a_forked_child_does_not_hold_its_parents_locks(tmp_path: pathlib.Path) -> None:
    """A child that is forked during a save releases the locks. Data loading workers live as long as the training."""
    code = """
        inside, go = threading.Event(), threading.Event()
        class Held(stores.Disk):
            def preallocate(self, fd, size):
                inside.set()
                go.wait()
        stores.register(stores.Filesystem(Held()))
        pending = tr.save_async(place, tree(1))
        inside.wait()
        worker = os.fork()
        if not worker:
            try:
                sys.stdin.read()  # stays alive until the test is over
            finally:
                os._exit(0)
        go.set()
        pending.result()
        stores.register(stores.Filesystem(stores.Disk()))
        for n in (2, 3):
            tr.save(place, tree(n), overwrite=True)
        print(json.dumps(sorted(os.listdir(place))), flush=True)
        os.waitpid(worker, 0)
        """
    process = start(code, tmp_path / "c")
    assert process.stdout and len(json.loads(process.stdout.readline())) == 2
    process.communicate(timeout=60)
    assert tr.restore(tmp_path / "c")["v"][1] == 3


@pytest.mark.long
def test_children_that_are_forked_at_any_time_save_and_restore(tmp_path: pathlib.Path) -> None:
    """A child can save and restore, at whatever moment of its parent's saves it was forked."""
    code = """
        ckpts = tr.Checkpointer(place / "run", keep=tr.keep.last(2))
        for n in range(12):
            ckpts.save(n, tree(n))
            time.sleep(random.uniform(0, 0.01))
            child = os.fork()
            if not child:
                try:
                    signal.alarm(60)
                    tr.save(place / f"child-{n}", tree(n))
                    assert version(tr.restore(place / f"child-{n}")) == n
                    assert version(tr.restore(place / "run")) <= n if tr.steps(place / "run") else n == 0
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        ckpts.close()
        """
    process = start(code, tmp_path)
    result(process)
    assert tr.steps(tmp_path / "run") == [10, 11] and tr.verify(tmp_path / "run").ok
    for step in (10, 11):
        assert_tidy(tmp_path / "run" / f"step-{step:08}")


def test_a_run_whose_known_steps_all_give_way_to_newer_ones(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A reader lists the steps, and all of them are replaced before it opens one. It restores a newer step."""
    tr.save(tmp_path / "step-1", {"n": 1})

    class Late(Disk):
        again = True

        def open(self, path: str) -> int:
            if self.again and path == str(tmp_path / "step-1" / "treering.json"):
                self.again = False
                tr.save(tmp_path / "step-2", {"n": 2})
                removal.delete(stores.get(""), str(tmp_path / "step-1"))
            return super().open(path)

    use_disk(Late())
    assert tr.restore(tmp_path) == {"n": 2}


@pytest.mark.long
def test_a_forked_child_finds_no_lock_held_and_gc_enabled(tmp_path: pathlib.Path) -> None:
    """Other threads of the parent hold every lasting lock at the fork. The child reads what its parent has opened."""
    code = """
        import gc
        from treering._threads import forks, python_gc
        tr.save(place / "a", tree(7))
        tr.save(place / "z", tree(8), format="orbax")
        ckpts = tr.Checkpointer(place / "run")
        ckpts.save(1, tree(1)).result()
        opened, zarr = tr.open(place / "a"), tr.open(place / "z")
        assert zarr["w"][3] == 8
        held = threading.Event()
        def hold():
            for lock in forks._locks.all():
                lock.acquire()
            with python_gc.gc_paused():
                held.set()
                time.sleep(60)
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        assert len(forks._locks.all()) > 5 and not gc.isenabled()
        child = os.fork()
        if not child:
            try:
                signal.alarm(30)
                assert gc.isenabled() and version(opened.restore()) == 7 and opened["w"][3] == 7
                assert version(tr.restore(place / "run")) == 1
                tr.save(place / "b", tree(9))
                for read in (lambda: zarr["w"][3], lambda: tr.restore(place / "z")):
                    try:
                        read()
                    except tr.errors.UnsupportedError as error:
                        assert "zarr arrays cannot be used in a process that was forked" in str(error)
                    else:
                        raise AssertionError
                os._exit(0)
            finally:
                os._exit(1)
        print(os.waitpid(child, 0)[1], flush=True)
        os._exit(0)
        """
    process = start(code, tmp_path)
    out, err = process.communicate(timeout=60)
    assert out == "0\n", err
    assert tr.restore(tmp_path / "b")["v"][1] == 9
