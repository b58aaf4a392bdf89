"""Tests saves of a job that gets SIGTERM."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import treering as tr
from jobs import run_job
from treering.errors import UnsupportedError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before, "the handler is put back"
    signal.signal(signal.SIGTERM, before)


def test_the_first_save_after_a_sigterm_saves_in_any_case(tmp_path: pathlib.Path) -> None:
    """The first save after SIGTERM saves, also if the interval would skip it."""
    with tr.Checkpointer(tmp_path, save_every=100, save_on_preemption=True) as ckpts:
        assert ckpts.save(1, {"x": 1}) is None and not ckpts.preempted
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ckpts.preempted, "nothing is saved yet"
        assert ckpts.save(2, {"x": 2}) is not None and ckpts.preempted
        assert ckpts.save(3, {"x": 3}) is None and ckpts.preempted, "once is enough"
    assert tr.steps(tmp_path) == [2]


def test_a_step_that_is_saved_already_is_enough(tmp_path: pathlib.Path) -> None:
    """After SIGTERM, a step that exists already is not saved again."""
    with tr.Checkpointer(tmp_path, save_on_preemption=True) as ckpts:
        ckpts.save(1, {"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpts.save(1, {"x": 1}, on_exists="skip") is None and ckpts.preempted


def test_without_the_option_sigterm_means_what_it_meant(tmp_path: pathlib.Path) -> None:
    """Without the option, a Checkpointer sets no handler."""
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": 1})
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not ckpts.preempted


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
    ckpts = tr.Checkpointer(tmp_path, save_on_preemption=True)
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    later = lambda number, frame: ours(number, frame)  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    ckpts.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
def test_processes_without_jaxs_service_raise(tmp_path: pathlib.Path) -> None:
    """Several processes without JAX's preemption service get an error that names the option."""
    body = """
from jax._src import distributed
distributed.global_state.preemption_sync_manager = None
report(caught(lambda: tr.Checkpointer(tmp / "run", save_on_preemption=True)))
"""
    for result in run_job(tmp_path, body, processes=2):
        assert result.report[0] == "MismatchError" and "jax_enable_preemption_service" in result.report[1]
