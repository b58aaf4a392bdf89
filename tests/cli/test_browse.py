"""Drives the browser with keys in a terminal that Textual simulates."""

import asyncio
import pathlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering._cli.browser import Browser, CheckpointTree
from treering._tools.listing import list_run


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    layers = [{"kernel": np.full((8, 8), n, "float32"), "bias": np.zeros(4)} for n in range(3)]
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"params": layers, "step": step, "[bold]x\x1b[31m": np.ones(2)})
    return tmp_path / "run"


def drive(sources: list[Any], do: Callable[[Browser, Any], Awaitable[None]]) -> None:
    async def play() -> None:
        app = Browser(sources)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await do(app, pilot)

    asyncio.run(play())


def text(app: Browser) -> str:
    return str(app.query_one("#text").render())


def label(app: Browser) -> str:
    node = app.side.cursor_node
    return str(node.label) if node else ""


@pytest.mark.long
def test_a_checkpoint_is_walked_through_by_keys(run: pathlib.Path) -> None:
    """Keys move through a checkpoint, unfold nodes and read leaves."""

    async def do(app: Browser, pilot: Any) -> None:
        await pilot.press("j")
        names = [label(app)]
        for _ in range(2):
            await pilot.press("j")
            names.append(label(app))
        assert [name.split("  ")[0] for name in names] == [r"[bold]x\x1b[31m", "params", "step"]
        await pilot.press("k", "l", "j", "l", "j")
        assert label(app).startswith("bias  float64[4]")
        await pilot.press("s")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "4 values, 4 zeros" in text(app)
        await pilot.press("h")
        assert label(app).startswith("0  2 leaves")
        await pilot.press("h")
        assert label(app).startswith("params")
        await pilot.press("q")

    drive([tr.open(run)], do)


@pytest.mark.long
def test_a_search_unfolds_what_it_finds(run: pathlib.Path) -> None:
    async def do(app: Browser, pilot: Any) -> None:
        await pilot.press("slash", *"KERNEL", "enter")
        await pilot.pause()
        found = []
        for _ in range(4):
            node = app.side.cursor_node
            assert node and node.data and node.data.node
            found.append(node.data.node.path)
            await pilot.press("n")
            await pilot.pause()
        assert found == [*(f"params/{n}/kernel" for n in range(3)), "params/0/kernel"]
        await pilot.press("N")
        await pilot.pause()
        await pilot.press("slash", *"nothing here", "enter")
        await pilot.pause()
        assert any("no path contains" in note.message for note in app._notifications)
        await pilot.press("slash", "escape")
        assert isinstance(app.focused, CheckpointTree)

    drive([tr.open(run)], do)


@pytest.mark.long
def test_steps_of_a_run_are_opened_when_they_are_unfolded(run: pathlib.Path) -> None:
    (run / "step-00000009").mkdir()

    async def do(app: Browser, pilot: Any) -> None:
        await pilot.press("j")
        assert label(app) == "step 9  unfinished"
        await pilot.press("j", "l", "j", "j", "j")
        assert label(app) == "step  int 2"

    drive([list_run(run)], do)


@pytest.mark.long
def test_two_checkpoints_are_compared(run: pathlib.Path) -> None:
    async def do(app: Browser, pilot: Any) -> None:
        await pilot.press("slash", *"step", "enter")
        await pilot.pause()
        assert [tree.cursor_node and str(tree.cursor_node.label) for tree in app.query(CheckpointTree)] == [
            "step  int 1",
            "step  int 2",
        ]
        await pilot.press("d")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "int 1 → int 2" in text(app)
        await pilot.press("g", "d")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "7 leaves are equal" in text(app)

    drive([tr.open(run, step=1), tr.open(run, step=2)], do)


@pytest.mark.rare
@pytest.mark.long
def test_a_hundred_thousand_leaves_stall_nothing(tmp_path: pathlib.Path) -> None:
    """No action creates more nodes at once than a group has. Counts nodes, because tests assert no times."""
    tr.save(tmp_path / "c", {f"leaf{n:06}": n for n in range(100_000)})

    async def do(app: Browser, pilot: Any) -> None:
        assert len(app.side.root.children) == 100
        begun = time.perf_counter()
        await pilot.press("slash", *"leaf077777", "enter")
        await pilot.pause()
        print(f"found after {time.perf_counter() - begun:.2f} s")
        assert label(app) == "leaf077777  int 77777"
        unfolded = sum(len(node.children) for node in app.side.root.children)
        assert unfolded == 1000, "only one group is unfolded"

    drive([tr.open(tmp_path / "c")], do)


@pytest.mark.long
def test_damage_is_a_message(run: pathlib.Path) -> None:
    (file,) = (run / "step-00000002").glob("arrays-*")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    async def do(app: Browser, pilot: Any) -> None:
        await pilot.press("slash", *"params/2/bias", "enter")
        await pilot.pause()
        await pilot.press("enter")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "damaged" in text(app) or "not those that were saved" in text(app)

    drive([tr.open(run)], do)
