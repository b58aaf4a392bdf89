"""Tests of notebooks: cells that fail, are interrupted or run again in one process, and what cells display."""

import asyncio
import functools
import gc
import http.server
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from js import chromium
from treering import orbax, stores
from treering.errors import ExistsError, MismatchError
from treering.stores.posix import Disk


class Notebook:
    """Runs cells one after the other. As in a kernel, the last traceback and its frames stay alive."""

    def __init__(self, **names: Any):
        self.names, self.errors = names, list[BaseException]()

    def run(self, cell: str) -> BaseException | None:
        try:
            exec(compile(cell, "<cell>", "exec"), self.names)
        except BaseException as error:
            self.errors.append(error)
            return error
        return None


class Slow(Disk):
    """A disk that waits before it writes the files of one save, until the test lets it continue."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def preallocate(self, fd: int, size: int) -> None:
        assert self.gate.wait(30)
        super().preallocate(fd, size)


TRAIN = """
ckpts = tr.Checkpointer(run, save_every=1, keep=tr.keep.last(3))
state, step = ckpts.restore_or_init(lambda: {"n": np.zeros(1)})
for step in range(step + 1, last + 1):
    state = {"n": state["n"] + step}
    if step == broken:
        raise RuntimeError("a mistake")
    ckpts.save(step, state)
ckpts.wait()
"""


def _saved(run: pathlib.Path) -> tr.Checkpointer:
    ckpts = tr.Checkpointer(run)
    ckpts.save(1, {"n": np.zeros(1)})
    ckpts.wait()
    return ckpts


def _saved_by_manager(run: pathlib.Path) -> object:
    manager = orbax.CheckpointManager(run)
    manager.save(1, args=orbax.args.StandardSave({"n": np.zeros(1)}))
    manager.wait_until_finished()
    return manager


@pytest.mark.parametrize("save", [_saved, _saved_by_manager])
def test_dropped_checkpointer_releases_the_lock_without_gc(
    tmp_path: pathlib.Path, save: Callable[[pathlib.Path], object]
) -> None:
    """An object that was not closed releases the lock when it is dropped, not when Python next collects garbage."""
    gc.disable()  # Reference cycles stay.
    try:
        ckpts = save(tmp_path)
        assert (tmp_path / "writer.lock").exists()
        del ckpts
        end = time.monotonic() + 10  # A background thread may still refer to it.
        while (tmp_path / "writer.lock").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()


def test_a_cell_that_failed_is_run_again(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    notebook = Notebook(np=np, tr=tr, run=tmp_path / "run", last=5, broken=3)
    assert isinstance(notebook.run(TRAIN), RuntimeError)
    failed = notebook.names["ckpts"]  # as `_` or a traceback may hold it
    notebook.names["broken"] = None
    assert notebook.run(TRAIN) is None
    assert tr.restore(tmp_path / "run")["n"] == sum(range(6)) and tr.steps(tmp_path / "run") == [2, 3, 4, 5]
    assert "acquired from another Checkpointer of this process, which was not closed" in caplog.text
    with pytest.raises(MismatchError, match="another Checkpointer of this process writes this run by now; save with"):
        failed.save(6, {"n": 0})
    for use in (failed.finish, lambda: failed.rewind(4)):
        with pytest.raises(MismatchError, match="writes this run by now"):
            use()
    assert failed.steps == [2, 3, 4, 5] and failed.restore()["n"] == 15, "reading still works"
    assert repr(failed) == f"<Checkpointer {tmp_path}/run: restored step 5, lost to another Checkpointer>"
    failed.close()
    assert notebook.run("last = 6") is None and notebook.run(TRAIN) is None
    assert tr.steps(tmp_path / "run") == [4, 5, 6]


@pytest.mark.long
def test_notebook_cell_resumes_after_failure_while_saving(tmp_path: pathlib.Path) -> None:
    """A cell fails during a save. The repeated cell waits for that save, and continues from its step."""
    disk = Slow()
    stores.register(stores.Filesystem(disk))
    try:
        notebook = Notebook(np=np, tr=tr, run=tmp_path / "run", last=4, broken=2)
        threading.Timer(0.3, disk.gate.set).start()
        assert isinstance(notebook.run(TRAIN), RuntimeError)
        assert tr.steps(tmp_path / "run") == [] and not disk.gate.is_set()
        notebook.names["broken"] = None
        assert notebook.run(TRAIN) is None, notebook.errors[-1:]  # The cell has waited for the save of step 1.
        assert tr.restore(tmp_path / "run")["n"] == 10
    finally:
        stores.register(stores.Filesystem(Disk()))


@pytest.mark.long
def test_a_cell_that_was_interrupted_in_a_save_is_run_again(tmp_path: pathlib.Path) -> None:
    disk = Slow()
    stores.register(stores.Filesystem(disk))
    try:
        notebook = Notebook(np=np, tr=tr, run=tmp_path / "run", last=4, broken=None)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()  # while step 2 waits for step 1
        stopped = notebook.run(TRAIN)
        assert isinstance(stopped, KeyboardInterrupt), stopped
        disk.gate.set()
        assert notebook.run(TRAIN) is None, notebook.errors[-1:]
        assert tr.restore(tmp_path / "run")["n"] == 10
    finally:
        stores.register(stores.Filesystem(Disk()))


def test_one_that_is_saving_is_not_taken_over(tmp_path: pathlib.Path) -> None:
    """A Checkpointer that is saving does not lose its run to a newer one."""
    disk = Slow()
    stores.register(stores.Filesystem(disk))
    try:
        first = tr.Checkpointer(tmp_path)
        first.save(1, {"x": np.ones(3)})
        assert repr(first) == f"<Checkpointer {tmp_path}: saving step 1>"
        with pytest.raises(ExistsError, match=r"is saving; call its wait\(\) or close\(\)"):
            tr.Checkpointer(tmp_path).save(2, {"x": 2})
        disk.gate.set()
        first.wait()
        with tr.Checkpointer(tmp_path) as second:
            second.save(2, {"x": 2})
        assert tr.steps(tmp_path) == [1, 2]
    finally:
        stores.register(stores.Filesystem(Disk()))


def test_a_run_that_another_path_leads_to_is_the_same(tmp_path: pathlib.Path) -> None:
    """Two paths of one run share one lease."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first, second = tr.Checkpointer(tmp_path / "run"), tr.Checkpointer(tmp_path / "link")
    first.save(1, {"x": 1})
    first.wait()
    second.save(2, {"x": 2})
    second.close()
    with pytest.raises(MismatchError, match="writes this run by now"):
        first.save(3, {"x": 3})
    with tr.Checkpointer(tmp_path / "other") as other:  # Another run has another lease.
        other.save(1, {"x": 1})
        with tr.Checkpointer(tmp_path / "run") as again:
            again.save(3, {"x": 3})
        other.save(2, {"x": 2})
    assert tr.steps(tmp_path / "run") == [1, 2, 3] and tr.steps(tmp_path / "other") == [1, 2]


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Makes threads take turns at almost every step of the interpreter."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.long
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_run_that_is_being_left_can_be_claimed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Another thread acquires the run during the release: the file is still locked, but names no owner."""
    leaving, usual = threading.Event(), Disk.unlink

    def slow(disk: Disk, path: str) -> None:
        if path.endswith("writer.lock"):
            leaving.set()
            time.sleep(0.2)
        usual(disk, path)

    monkeypatch.setattr(Disk, "unlink", slow)
    only = [_saved(tmp_path)]
    leaver = threading.Thread(target=only[0].close if how == "closed" else only.clear)
    leaver.start()
    assert leaving.wait(10)
    with tr.Checkpointer(tmp_path) as second:
        second.save(2, {"x": 2})
    leaver.join()
    assert tr.steps(tmp_path) == [1, 2]


def test_a_drop_waits_for_no_other_thread(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may drop a Checkpointer in a thread that the other one waits for."""
    leaving, dropped, usual = threading.Event(), threading.Event(), Disk.unlink

    def slow(disk: Disk, path: str) -> None:
        if path.endswith("writer.lock") and not leaving.is_set():
            leaving.set()
            dropped.wait(10)
        usual(disk, path)

    first, others = _saved(tmp_path / "first"), [_saved(tmp_path / "second")]
    monkeypatch.setattr(Disk, "unlink", slow)
    leaver = threading.Thread(target=first.close)
    leaver.start()
    assert leaving.wait(10)
    others.clear()
    assert leaver.is_alive() and (tmp_path / "second/writer.lock").exists()
    dropped.set()
    leaver.join()
    assert not (tmp_path / "second/writer.lock").exists(), "the other thread released it"


@pytest.mark.usefixtures("many_switches")
def test_threads_that_claim_one_run_never_write_it_together(tmp_path: pathlib.Path) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def work(n: int) -> None:
        barrier.wait()
        for step in range(n, 40, 4):
            with tr.Checkpointer(tmp_path) as ckpts:
                try:
                    ckpts.save(step, {"x": step})
                    outcomes.append("saved")
                except (ExistsError, MismatchError) as error:
                    outcomes.append(str(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [text for text in outcomes if text != "saved"]
    assert len(outcomes) == 40 and len(tr.steps(tmp_path)) == 40 - len(refused)
    foreign = [text for text in refused if "another Checkpointer of this process" not in text]
    assert not foreign, foreign
    assert not (tmp_path / "writer.lock").exists()


@pytest.mark.slow
def test_a_loop_that_was_run_again_hears_of_preemption(tmp_path: pathlib.Path) -> None:
    """The second Checkpointer calls the handler of the first one, which must not end the process."""
    code = f"""
import gc, os, signal, treering as tr
gc.disable()  # Otherwise the result depends on the time of a collection.
run = {str(tmp_path)!r}
ckpts = tr.Checkpointer(run, save_every=100, save_on_preemption=True)
ckpts = tr.Checkpointer(run, save_every=100, save_on_preemption=True)
os.kill(os.getpid(), signal.SIGTERM)
ckpts.save(1, {{"x": 1}})
ckpts.wait()
print(ckpts.preempted, flush=True)
ckpts.close()
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n" and done.returncode == -signal.SIGTERM, done.stderr
    assert tr.steps(tmp_path) == [1]


# Output of cells


def test_reprs_are_short_and_read_nothing(tmp_path: pathlib.Path) -> None:
    tree = {"params": [np.ones((2, 3), np.float32)] * 500, "step": 7}
    report = tr.save(tmp_path / "c", tree, step=7)
    assert repr(report).startswith(f"<SaveReport {tmp_path}/c: ") and len(repr(report)) < 200 + len(str(tmp_path))
    ckpt = tr.open(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / "gone")  # Any read fails now.
    lines = repr(ckpt).splitlines()
    assert lines[0] == f"Checkpoint {tmp_path}/c (treering, step 7, 501 leaves)" and len(lines) == 42
    assert lines[1].split() == ["params/0", "float32[2,3]"] and lines[-1] == "  and 461 more; print() shows all"
    assert len(str(ckpt).splitlines()) == 502 and f"{ckpt}" == str(ckpt)
    assert repr(ckpt.at("params").select("1")).splitlines()[1:] == ["  1  float32[2,3]"]
    assert repr(ckpt["params/0"]) == "<LazyArray 'params/0' float32[2,3]>"
    assert repr(ckpt.apply([tr.rules.stack("params/*")])["params"]) == "<LazyArray 'params' float32[500,2,3]>"
    diff = tr.diff({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4, "e": 5})
    assert repr(diff) == "<Diff 1 equal, 1 only in a, 2 only in b, 1 changed>" and "~ b" in str(diff)
    good = tr.verify(tmp_path / "gone")
    assert repr(good) == f"<VerifyReport {tmp_path}/gone: {good.nbytes} bytes, all good>"


def test_the_repr_of_a_checkpointer_says_what_it_does(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    ckpts = tr.Checkpointer(run)
    assert repr(ckpts) == f"<Checkpointer {run}>" and not run.exists()
    pending = ckpts.save(3, {"x": 1})
    ckpts.wait()
    assert repr(pending) == f"<PendingSave {run}/step-00000003: done>"
    ckpts.restore()
    ckpts.close()
    assert repr(ckpts) == f"<Checkpointer {run}: restored step 3, closed>"


def test_a_bar_in_a_notebook_is_shown_where_it_can_be(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import rich.console

    class ZMQInteractiveShell:  # A double of a kernel's shell: rich detects notebooks by this name.
        pass

    monkeypatch.setattr(rich.console, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    tr.save(tmp_path / "c", {"x": np.ones(1000)}, progress=True)
    assert "needs the package ipywidgets" in caplog.text and tr.verify(tmp_path / "c").ok


# What a notebook shows of a run: it is executed in a kernel of Jupyter, and its outputs are opened in a browser.

LOOK = [
    "import treering as tr",
    "tr.view('run')",
    "assert tr.view('run') is tr.view(tr.open('run').path.rpartition('/')[0])",
    "tr.report('run', output='page.html')",
    "tr.stats('run')",
    "tr.open('run')['params/w']",
    "tr.stats(tr.open('run')['params/w'])",
    "print(tr.view('run').url)",
    # The page is looked at while the kernel runs.
    "import time, pathlib\nwhile not pathlib.Path('seen').exists(): time.sleep(0.02)",
    "shown = tr.view('run')\nshown.close()\nassert tr.view('run') is not shown",
]


@pytest.mark.slow
def test_a_kernel_shows_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The viewer, the report, statistics and a lazy array appear in the cells that name them."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is installed for `make test`")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="ipykernel is installed for `make test`")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"params": {"w": np.full((8, 9), step, "float32"), "name": "x"}}, metrics={"loss": step})

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in LOOK])
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    ran = threading.Thread(target=_executed, args=(client,), daemon=True)
    ran.start()
    while ran.is_alive() and not notebook.cells[7].get("outputs"):
        time.sleep(0.02)
    outputs = [[one.get("data", {}).get("text/html", "") for one in cell.get("outputs", [])] for cell in notebook.cells]
    viewer, page, table, array, row = ("".join(outputs[n]) for n in (1, 3, 4, 5, 6))
    url = notebook.cells[7].outputs[0]["text"].strip()
    assert f'src="{url}"' in viewer and 'sandbox="allow-scripts"' in page
    assert "params/w" in table and ">17.0<" in table and "<img" in array and "params/w" in row
    if chromium.BROWSER is not None:
        _check_in_browser(tmp_path, {"params": viewer, "The leaves over time": page})
    (tmp_path / "seen").touch()
    ran.join(60)
    assert not ran.is_alive() and not [one for cell in notebook.cells for one in cell.outputs if "ename" in one]


def _executed(client: Any) -> None:
    """Executes a notebook. An error of a cell is among its outputs."""
    client.allow_errors = True
    asyncio.run(client.async_execute())


def _check_in_browser(folder: pathlib.Path, cells: dict[str, str]) -> None:
    """Opens outputs of cells, by what they show, as pages of a server of this machine, as Jupyter's page is."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium.browser(folder) as browser:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for words, cell in cells.items():
            (folder / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{cell}")
            page = browser.page(f"http://127.0.0.1:{server.server_port}/cell.html")
            end = time.monotonic() + 60
            while words not in (text := _text_of_frames(page)):
                assert time.monotonic() < end, text
        assert browser.errors == []
        server.shutdown()


def _text_of_frames(page: chromium.Page) -> str:
    """Returns the text that the frames of a page show."""
    texts: list[str] = []
    for one in page.call("Page.getFrameTree")["frameTree"].get("childFrames", ()):
        world = page.call("Page.createIsolatedWorld", frameId=one["frame"]["id"])["executionContextId"]
        found = page.call("Runtime.evaluate", expression="document.body.innerText", contextId=world)
        texts.append(str(found["result"].get("value")))
    browser = page.browser
    for one in browser.call("Target.getTargets")["targetInfos"]:  # A frame with an origin of its own is a target.
        if one["type"] == "iframe":
            session = browser.call("Target.attachToTarget", targetId=one["targetId"], flatten=True)["sessionId"]
            texts.append(str(chromium.Page(browser, session).run("document.body.innerText")))
    return "\n".join(texts)
