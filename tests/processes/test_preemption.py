"""Tests saves of a job that gets SIGTERM."""

import errno
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from jobs import run_job
from treering._processes import preemption
from treering.errors import MismatchError, SaveError, UnsupportedError
from treering.stores.posix import Disk


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Sets an earlier handler, without which an unseen SIGTERM would end the tests."""

    def ignore(number: int, frame: Any) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ignore)
    yield
    assert signal.getsignal(signal.SIGTERM) == ignore, "the handler is put back"
    signal.signal(signal.SIGTERM, before)
    preemption._known.clear()  # A signal is remembered as long as the process lives.


class Full(Disk):
    def write(self, fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    prelude = "import multiprocessing, os, signal, subprocess, sys, threading, time, numpy as np, treering as tr\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_first_save_after_a_sigterm_saves_in_any_case(tmp_path: pathlib.Path) -> None:
    """`preempted` is true at once, and reading it saves. The next save saves, also if the interval would skip it."""
    with tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        assert ckpts.save(1, {"x": 1}) is None and not ckpts.preempted
        sigterm()
        assert ckpts.preempted and "preempted" in repr(ckpts)
        assert ckpts.save(2, {"x": 2}) is not None and ckpts.preempted
        assert ckpts.save(3, {"x": 3}) is None and ckpts.preempted, "once is enough"
        sigterm()
        assert ckpts.save(4, {"x": 4}) is not None, "until the next signal"
    assert tr.steps(tmp_path) == [1, 2, 4]


def test_close_saves_the_last_state_if_no_save_follows_a_signal(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that stops as soon as `preempted` is true, such as in an evaluation, loses no step."""
    with tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        state = {"w": jnp.full(3, 5.0), "n": np.arange(3)}
        ckpts.save(5, state, metrics={"loss": 2})
        sigterm()
        state["n"] += 1
        assert ckpts.preempted
    assert tr.steps(tmp_path) == [5] and tr.open(tmp_path).metrics == {"loss": 2}
    assert (tr.restore(tmp_path)["n"] == [0, 1, 2]).all() and "step 5 is saved, because SIGTERM ended" in caplog.text
    with pytest.raises(SystemExit), tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        ckpts.save(6, state)
        sigterm()
        raise SystemExit(143)
    assert tr.steps(tmp_path) == [5, 6]


def test_state_that_is_gone_defers_preempted_to_the_next_save(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost by leaving the loop when `preempted` is true, wherever the loop reads it."""
    donating = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = donating({"w": jnp.zeros(3)})
    with tr.Checkpointer(tmp_path / "a", save_every=100, save_on_preemption=True) as ckpts:
        ckpts.save(1, state)
        state = donating(state)
        sigterm()
        assert not ckpts.preempted
        ckpts.save(2, state)
        assert ckpts.preempted
    assert tr.steps(tmp_path / "a") == [2] and not [one for one in caplog.records if one.levelno > logging.WARNING]
    big = {"w": np.zeros(17 << 17)}
    with tr.Checkpointer(tmp_path / "b", save_every=100, save_on_preemption=True) as ckpts:
        ckpts.save(1, big)
        sigterm()
        assert not ckpts.preempted, "so much NumPy is not copied in each step"
    assert tr.steps(tmp_path / "b") == [] and "step 1 is not saved, though SIGTERM ended the loop" in caplog.text
    assert "NumPy arrays of 17,825,792 bytes" in caplog.text


@pytest.mark.long
def test_nnx_state_that_was_updated_in_place_defers_preempted(tmp_path: pathlib.Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        ckpts.save(1, {"model": model})
        model.bias[...] += 1
        sigterm()
        assert not ckpts.preempted
        ckpts.save(2, {"model": model})
        assert ckpts.preempted
        ckpts.save(3, {"model": model})
        sigterm()
        assert ckpts.preempted
        model.bias[...] += 1
    assert tr.steps(tmp_path) == [2, 3]
    assert (tr.restore(tmp_path, step=3)["model"]["bias"] == tr.restore(tmp_path, step=2)["model"]["bias"]).all()


def test_close_raises_the_error_of_the_last_save(tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(Full())
    ckpts = tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True)
    state = {"w": jnp.zeros(3)}
    ckpts.save(1, state)
    sigterm()
    assert ckpts.preempted
    with pytest.raises(SaveError, match="No space left"):
        ckpts.close()


@pytest.mark.parametrize("at", ["the signal", "the next step"])
@pytest.mark.parametrize("leaves", ["after both", "between", "never"])
def test_two_checkpointers_of_a_loop_save_the_same_step(tmp_path: pathlib.Path, leaves: str, at: str) -> None:
    """A signal may come between two saves of a step, and the loop may read `preempted` there."""
    options: Any = {"save_every": 5, "save_on_preemption": True}
    actor, critic = (tr.Checkpointer(tmp_path / name, **options) for name in ("actor", "critic"))
    with actor, critic:
        for step in range(1, 10):
            state = {"w": jnp.full(3, step)}
            if step == 8 and at == "the next step":
                sigterm()
            actor.save(step, state)
            if step == 7 and at == "the signal":
                sigterm()
            if leaves == "between" and (actor.preempted or critic.preempted):
                break
            critic.save(step, state)
            if leaves == "after both" and actor.preempted:
                break
    last = 7 if (leaves, at) == ("after both", "the signal") else 8
    assert tr.steps(tmp_path / "actor") == tr.steps(tmp_path / "critic") == [5, last]


def test_checkpointer_of_another_loop_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    options: Any = {"save_every": 100, "save_on_preemption": True}
    with tr.Checkpointer(tmp_path / "a", **options) as done, tr.Checkpointer(tmp_path / "b", **options) as ckpts:
        done.save(2, {"x": 2})
        ckpts.save(1, {"x": 1})
        sigterm()
        assert ckpts.save(2, {"x": 2}) and done.preempted


def test_signal_is_known_to_later_checkpointers(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless the program has seen it, and continues nevertheless."""
    with tr.Checkpointer(tmp_path / "a", save_on_preemption=True) as ckpts:
        ckpts.save(1, {"x": 1})
        sigterm()
    with tr.Checkpointer(tmp_path / "b", save_every=100, save_on_preemption=True) as ckpts:
        assert "SIGTERM came before this Checkpointer was made" in caplog.text
        assert ckpts.save(7, {"x": 1}) and ckpts.preempted
    with tr.Checkpointer(tmp_path / "c", save_every=100, save_on_preemption=True) as ckpts:
        assert not ckpts.save(8, {"x": 1}) and not ckpts.preempted


@pytest.mark.long
@pytest.mark.parametrize("how", ["return", "donate", "NNX"])
def test_state_that_preempted_promised_is_saved(tmp_path: pathlib.Path, how: str) -> None:
    """The program may drop, donate or change its state as soon as it has read `preempted`."""
    code = """
import jax, jax.numpy as jnp
from flax import nnx
donating = jax.jit(lambda x: x + 1, donate_argnums=0)
model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
def train(ckpts):
    state = {"w": donating(jnp.zeros(3)), **({"model": model} if sys.argv[2] == "NNX" else {})}
    ckpts.save(1, state)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ckpts.preempted
    if sys.argv[2] == "donate": donating(state["w"])
    model.bias[...] += 1
with tr.Checkpointer(sys.argv[1], save_every=100, save_on_preemption=True) as ckpts:
    train(ckpts)
"""
    done = run(code, tmp_path, how)
    assert done.returncode == 0 and tr.steps(tmp_path) == [1], done.stderr
    assert (tr.restore(tmp_path)["w"] == 1).all()


@pytest.mark.long
def test_signal_is_sent_again_only_after_all_saves(tmp_path: pathlib.Path) -> None:
    """Saves of other calls, and of a Checkpointer that was dropped, are committed before the process ends."""
    code = """
from treering import stores
class Slow(stores.Disk):
    def sync(self, fd):
        time.sleep(0.5)
        super().sync(fd)
stores.register(stores.Filesystem(Slow()))
for name in ("a", "b"):
    ckpts = tr.Checkpointer(sys.argv[1] + "/" + name, save_on_preemption=True)
    ckpts.save(1, {"x": np.ones(3)})
    if name == "a": ckpts.close()
pending = tr.save_async(sys.argv[1] + "/export", {"x": np.ones(3)})
os.kill(os.getpid(), signal.SIGTERM)
del ckpts
import gc; gc.collect()
time.sleep(60)
"""
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert tr.steps(tmp_path / "b") == [1] and tr.verify(tmp_path / "export").ok


def test_checkpointer_that_cannot_be_made_leaves_no_handler(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    def missing() -> None:
        raise MismatchError("no service")

    monkeypatch.setattr(preemption.coordinator, "is_multi_process", lambda: True)
    monkeypatch.setattr(preemption, "_check_service", missing)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(MismatchError, match="no service"):
        tr.Checkpointer(tmp_path, save_on_preemption=True)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
@pytest.mark.parametrize("ending", ["close", "finish", "drop", "close in a thread", "raise", "seen", "handled"])
def test_close_sends_an_unseen_signal_again(tmp_path: pathlib.Path, ending: str) -> None:
    """A signal after the last save is not swallowed, and an error that ends the block is logged."""
    code = """
from pathlib import Path
def handler(*args): Path(sys.argv[1], "handled").touch()
if sys.argv[2] == "handled": signal.signal(signal.SIGTERM, handler)
ckpts = tr.Checkpointer(sys.argv[1] + "/run", save_on_preemption=True)
ckpts.save(1, {"x": 1}).result()
os.kill(os.getpid(), signal.SIGTERM)
try:
    match sys.argv[2]:
        case "finish": ckpts.finish()
        case "drop": del ckpts; import gc; gc.collect(); time.sleep(30)
        case "raise":
            with ckpts: 1 / 0
        case "close in a thread":
            thread = threading.Thread(target=ckpts.close); thread.start(); thread.join(); time.sleep(1)
        case "seen": assert ckpts.preempted; ckpts.close(); assert ckpts.preempted
        case _: ckpts.close()
finally:
    print("lives", flush=True)
"""
    done = run(code, tmp_path, ending)
    lives = ending in ("seen", "handled")
    assert done.returncode == (0 if lives else -signal.SIGTERM), done.stderr
    assert ("lives" in done.stdout) == lives and (ending != "raise" or "ZeroDivision" in done.stderr)
    assert tr.steps(tmp_path / "run") == [1] and (tmp_path / "handled").exists() == (ending == "handled")


def test_a_step_that_is_saved_already_is_enough(tmp_path: pathlib.Path) -> None:
    """After SIGTERM, a step that exists already is not saved again."""
    with tr.Checkpointer(tmp_path, save_on_preemption=True) as ckpts:
        ckpts.save(1, {"x": 1})
        sigterm()
        assert ckpts.save(1, {"x": 1}, on_exists="skip") is None and ckpts.preempted


def test_other_signals(tmp_path: pathlib.Path) -> None:
    """Schedulers announce the end by other signals, too. Each is handled alone, or several are."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        options: Any = {"save_every": 100, "save_on_preemption": signal.SIGUSR2}
        with tr.Checkpointer(tmp_path / "a", **options) as ckpts:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert ckpts.preempted and ckpts.save(1, {"x": 1})
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        preemption._known.clear()
        for one in (signal.SIGTERM, signal.SIGUSR2):
            both = (signal.SIGUSR2, signal.SIGTERM)
            with tr.Checkpointer(tmp_path / one.name, save_every=100, save_on_preemption=both) as ckpts:
                assert not ckpts.preempted
                os.kill(os.getpid(), one)
                assert ckpts.preempted and ckpts.save(1, {"x": 1})
            preemption._known.clear()
    finally:
        signal.signal(signal.SIGUSR2, before)
    for wrong in (signal.SIGKILL, 0, 1000, (), "SIGTERM", (signal.SIGTERM, "x"), None, 1.5):
        with pytest.raises(MismatchError, match=r"save_on_preemption=.*expected False, True \(SIGTERM\), or signals"):
            tr.Checkpointer(tmp_path, save_on_preemption=wrong)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn", "thread", "subprocess"])
def test_signals_end_the_children_of_a_job(tmp_path: pathlib.Path, method: str) -> None:
    """A worker of a data loader is not the job: `terminate` ends it, whether SIGTERM came before or not."""
    code = """
def work(): time.sleep(60)
def begin(method):
    if method == "subprocess":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = multiprocessing.get_context("fork" if method == "thread" else method).Process(target=work, daemon=True)
    process.start()
    return process
if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGUSR1, lambda *args: received.append(os.getpid()))
    with tr.Checkpointer(sys.argv[1], save_on_preemption=(signal.SIGTERM, signal.SIGUSR1)) as ckpts:
        ckpts.save(1, {"x": 1})
        workers = []
        for n in range(2):
            if sys.argv[2] == "thread":
                thread = threading.Thread(target=lambda: workers.append(begin("thread"))); thread.start(); thread.join()
            else:
                workers.append(begin(sys.argv[2]))
            if n == 0: os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        for worker in workers:
            worker.terminate()
            (worker.wait if sys.argv[2] == "subprocess" else worker.join)(20)
        assert ckpts.preempted
    print([getattr(worker, "exitcode", None) or worker.returncode for worker in workers])
"""
    script = tmp_path / "job.py"
    script.write_text("import multiprocessing, os, signal, subprocess, sys, threading, time, treering as tr\n" + code)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "run"), method]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "[-15, -15]\n", done.stderr


def test_handler_that_replaces_ours_is_called_too(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    received: list[int] = []

    def later(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.getsignal(signal.SIGTERM)
    with tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        for step in (1, 2):
            signal.signal(signal.SIGTERM, later)
            ckpts.save(step, {"x": 1})
        sigterm()
        assert received == [signal.SIGTERM] and ckpts.preempted
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)
    (record,) = [one for one in caplog.records if "has another handler" in one.message]
    assert "SIGTERM has another handler since save_on_preemption was set" in record.message


@pytest.mark.slow
def test_job_of_one_process_that_is_formed_late_is_preempted(tmp_path: pathlib.Path) -> None:
    """JAX takes SIGTERM in C when the job is formed. Python still names the handler of the Checkpointer."""
    code = """
import jax, socket
ckpts = tr.Checkpointer(sys.argv[1], save_every=100, save_on_preemption=True)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
jax.distributed.initialize(address, 1, 0)
ckpts.save(1, {"x": 1})
os.kill(os.getpid(), signal.SIGTERM)
assert ckpts.preempted
ckpts.close()
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert tr.steps(tmp_path) == [1]


@pytest.mark.long
def test_child_that_is_terminated_at_once_ends(tmp_path: pathlib.Path) -> None:
    """A signal between the fork and the child's own handlers does not reach those of the job."""
    code = """
with tr.Checkpointer(sys.argv[1], save_on_preemption=True) as ckpts:
    for delay in [0, 0, 0, 0, 0, 0.001, 0.001, 0.002, 0.002, 0.004]:
        if not (child := os.fork()):
            time.sleep(20)
            os._exit(1)
        time.sleep(delay)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_forked_child_is_a_job_of_its_own_once_it_saves(tmp_path: pathlib.Path) -> None:
    """A child has the handlers from before. With a Checkpointer of its own, or an inherited one, it listens again."""
    code = """
def before(*args): print("before", flush=True)
signal.signal(signal.SIGTERM, before)
ckpts = tr.Checkpointer(sys.argv[1] + "/inherited", save_every=100, save_on_preemption=True)
os.kill(os.getpid(), signal.SIGTERM)
if not os.fork():
    assert signal.getsignal(signal.SIGTERM) is before and not ckpts.preempted
    with tr.Checkpointer(sys.argv[1] + "/own", save_every=100, save_on_preemption=True) as own:
        assert not own.preempted
        assert not ckpts.save(1, {"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        assert own.save(7, {"x": 1}) and own.preempted and ckpts.preempted
    ckpts.close()
    assert signal.getsignal(signal.SIGTERM) is before
    os._exit(0)
assert os.wait()[1] == 0 and ckpts.preempted
ckpts.close()
assert signal.getsignal(signal.SIGTERM) is before
"""
    done = run(code, tmp_path)
    assert done.returncode == 0 and done.stdout == "before\nbefore\n", done.stderr
    assert tr.steps(tmp_path / "inherited") == [1] and tr.steps(tmp_path / "own") == [7]


def test_without_the_option_sigterm_means_what_it_meant(tmp_path: pathlib.Path) -> None:
    """Without the option, a Checkpointer sets no handler."""
    before = signal.getsignal(signal.SIGTERM)
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": 1})
        assert signal.getsignal(signal.SIGTERM) is before and not ckpts.preempted


def test_earlier_handlers_are_called_and_put_back(tmp_path: pathlib.Path) -> None:
    """Handlers that were set before are called, and restored by `close`."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    own = signal.getsignal(signal.SIGTERM)
    try:
        outer = tr.Checkpointer(tmp_path / "a", save_every=100, save_on_preemption=True)
        inner = tr.Checkpointer(tmp_path / "b", save_every=100, save_on_preemption=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert outer.save(1, {"x": 1}) and inner.save(1, {"x": 1}) and outer.preempted and inner.preempted
        inner.close()
        outer.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preemption_notices_sigterm_during_setup(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM that arrives while the handler is being set is noticed."""
    set_handler = signal.signal

    def signalled(number: int, handler: Any) -> Any:
        earlier = set_handler(number, handler)
        os.kill(os.getpid(), number)
        return earlier

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", signalled)
        ckpts = tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True)
    with ckpts:
        assert ckpts.save(1, {"x": 1}) and ckpts.preempted


@pytest.mark.long
def test_unclosed_checkpointer_restores_the_handler(tmp_path: pathlib.Path) -> None:
    """A Checkpointer that is collected without `close` restores the handler."""
    before = signal.getsignal(signal.SIGTERM)
    ckpts = tr.Checkpointer(tmp_path, save_on_preemption=True)
    assert signal.getsignal(signal.SIGTERM) != before
    del ckpts
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_was_set_later_stays(tmp_path: pathlib.Path) -> None:
    """`close` keeps a handler that was set after the Checkpointer's."""
    before = signal.getsignal(signal.SIGTERM)
    ckpts = tr.Checkpointer(tmp_path, save_on_preemption=True)
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    later = lambda number, frame: ours(number, frame)  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    ckpts.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)


@pytest.mark.long
def test_preemption_closed_handler_lets_process_end(tmp_path: pathlib.Path) -> None:
    """The handler of a closed Checkpointer, called by another handler, ends the process."""
    code = f"""
import os, signal, treering as tr
ckpts = tr.Checkpointer({str(tmp_path)!r}, save_on_preemption=True)
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: ours(*args))
ckpts.close()
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM and not done.stdout


def test_option_outside_the_main_thread_raises(tmp_path: pathlib.Path) -> None:
    """Outside the main thread, the option raises an error that says what to do."""
    caught: list[Any] = []

    def work() -> None:
        try:
            tr.Checkpointer(tmp_path, save_on_preemption=True)
        except UnsupportedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "main thread" in caught[0] and "force=True" in caught[0]


@pytest.mark.slow
def test_a_loop_that_is_stopped_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    """A training loop that SIGTERM stopped resumes at the step that it saved."""
    code = f"""
import os, signal, sys, treering as tr
with tr.Checkpointer({str(tmp_path)!r}, save_every=1000, save_on_preemption=True) as ckpts:
    state, step = ckpts.restore_or_init(lambda: {{"n": 0}})
    print(step)
    for step in range(step + 1, 100):
        state = {{"n": state["n"] + step}}
        if step % 30 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpts.save(step, state, force=step == 99)
        if ckpts.preempted:
            sys.exit(7)
print(state["n"])
"""
    outputs = []
    for code_expected in (7, 7, 7, 0):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == code_expected, done.stderr
        outputs.append(done.stdout.split()[0])
    assert outputs == ["0", "30", "60", "90"] and tr.restore(tmp_path)["n"] == sum(range(100))


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True], ids=["", "made before the job came together"])
def test_all_processes_save_the_same_step(tmp_path: pathlib.Path, early: bool) -> None:
    make = "import treering; ckpts = treering.Checkpointer(TMP + '/run', save_every=1000, save_on_preemption=True)"
    body = """
with ckpts:
    for step in range(1, 2000):
        time.sleep(0.02 * (1 + INDEX))
        if step == 20 and INDEX == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpts.save(step, {"n": step, "w": put(np.full(8, step), P("x"))})
        if ckpts.preempted:
            break
report([step, ckpts.steps])
"""
    results = run_job(tmp_path, body if early else f"{make}\n{body}", processes=2, before=make if early else "")
    (first, steps), other = (result.report for result in results)
    assert other == [first, steps] and steps == [first] and 20 <= first < 1000


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.compat
@pytest.mark.parametrize(("number", "target"), [(signal.SIGTERM, 0), (signal.SIGTERM, 1), (signal.SIGUSR1, 1)])
def test_all_processes_leave_an_evaluation_at_the_same_batch(tmp_path: pathlib.Path, number: int, target: int) -> None:
    """All processes see the signal of one at the same read of `preempted`, and earlier handlers are called."""
    handler = "signal.signal(NUMBER, lambda *args: called.append(1))"
    before = f"called = []\nif INDEX == 0:\n    {handler}  # before JAX takes SIGTERM in C"
    body = f"""
if INDEX == 1:
    {handler}  # which takes it from JAX
signals = True if NUMBER == signal.SIGTERM else signal.Signals(NUMBER)
with tr.Checkpointer(tmp / "run", save_every=1000, save_on_preemption=signals, timeout=20) as ckpts:
    for step in range(1, 50):
        state = {{"w": put(np.full(8, step), P("x"))}}
        ckpts.save(step, state)
    for batch in range(500):
        sync(f"batch {{batch}}")
        if batch == 40 and INDEX == TARGET:
            os.kill(os.getpid(), NUMBER)
        if ckpts.preempted:
            break
        time.sleep(0.02)
with tr.Checkpointer(tmp / "next", save_every=1000, save_on_preemption=signals) as later:
    known = later.preempted
report([batch, ckpts.steps, known, len(called)])
"""
    results = run_job(tmp_path, body, processes=2, before=before, NUMBER=int(number), TARGET=target)
    first, other = (result.report for result in results)
    assert first[:3] == other[:3] and 40 <= first[0] < 499 and first[1:3] == [[49], False]
    assert [first[3], other[3]] == [1 - target, target], "the handlers from before are called"


@pytest.mark.slow
def test_reads_of_one_process_alone_do_not_part_the_job(tmp_path: pathlib.Path) -> None:
    """Process 0 reads `preempted` once more at the end of a step. All save one step nevertheless.

    A worker that one of them forks does not have the handler of JAX or the job.
    """
    body = """
import multiprocessing
options = {"save_every": 1000, "save_on_preemption": True, "timeout": 20}
with tr.Checkpointer(tmp / "a", **options) as a, tr.Checkpointer(tmp / "b", **options) as b:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.2)
    worker.terminate()
    worker.join(20)
    for step in range(1, 2000):
        time.sleep(0.01 * (1 + INDEX))
        state = {"w": put(np.full(8, step), P("x"))}
        a.save(step, state)
        if step == 20 and INDEX == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        b.save(step, state)
        if a.preempted and b.preempted:
            break
        if INDEX == 0:
            [a.preempted for n in range(step % 50)]
report([step, a.steps, b.steps, worker.exitcode])
"""
    first, other = (result.report for result in run_job(tmp_path, body, processes=2))
    assert first == other == [first[0], [first[0]], [first[0]], -signal.SIGTERM] and first[0] < 1000


@pytest.mark.slow
def test_processes_without_jaxs_service_raise(tmp_path: pathlib.Path) -> None:
    """Several processes without JAX's preemption service get an error that names the option."""
    body = """
from jax._src import distributed
distributed.global_state.preemption_sync_manager = None
report(caught(lambda: tr.Checkpointer(tmp / "run", save_on_preemption=True)))
"""
    for result in run_job(tmp_path, body, processes=2):
        assert result.report[0] == "MismatchError" and "jax_enable_preemption_service" in result.report[1]
