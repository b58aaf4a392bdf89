"""What is killed or made to fail, and what must hold afterwards."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import treering as tr


def tree(n: int) -> dict[str, Any]:
    """Version `n` of a state. Version 4 has an array that is large enough to be written by several threads."""
    return {"w": np.full(5 << 18 if n == 4 else 1000, n, np.float32), "small": [np.arange(n, n + 3), n], "n": n}


def version(path: Path) -> int | None:
    """Returns the version at a path, complete and with every byte as it was saved; None if there is no checkpoint."""
    try:
        found = tr.restore(path)
    except tr.errors.NotFoundError:
        return None
    report = tr.verify(path)
    assert report.ok, str(report)
    assert_is(found, found["n"])
    return found["n"]


def assert_is(found: Any, n: int) -> None:
    """Asserts that a restored tree is version `n`, bit for bit."""
    expected = tree(n)
    assert found["n"] == found["small"][1] == n
    for a, b in ((found["w"], expected["w"]), (found["small"][0], expected["small"][0])):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"version {n} is not what was saved"


def assert_tidy(path: Path) -> None:
    """Asserts that a directory is a checkpoint of one process and holds nothing else."""
    names = sorted(os.listdir(path))
    assert len(names) == 2 and names[0].startswith("arrays-") and names[1] == "treering.json", names


class Scenario(NamedTuple):
    """A call that fails: `prepare` makes the state before it, `act` is the call.

    `look` returns which of the allowed states follows (or raises), and `go_on` checks that saving works and that
    nothing is left over.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], Any]
    look: Callable[[Path], str]
    go_on: Callable[[Path], None]


def at_path(act: Callable[[Path], Any], *, old: bool) -> Scenario:
    def prepare(place: Path) -> None:
        if old:
            tr.save(place / "deep" / "c", tree(1))

    def look(place: Path) -> str:
        found = version(place / "deep" / "c")
        assert found in ((1, 4) if old else (None, 4)), found
        return "new" if found == 4 else "old"

    def go_on(place: Path) -> None:
        tr.save(place / "deep" / "c", tree(3), overwrite=True)
        assert version(place / "deep" / "c") == 3
        assert os.listdir(place) == ["deep"] and os.listdir(place / "deep") == ["c"]
        assert_tidy(place / "deep" / "c")

    return Scenario(prepare, lambda place: act(place / "deep" / "c"), look, go_on)


def _of_run(act: Callable[[tr.Checkpointer], Any], *allowed: dict[int, int], before: int = 3) -> Scenario:
    """A run that has the steps 1 to `before`, each the version of its number; `allowed` are the states step by step."""

    def prepare(place: Path) -> None:
        for step in range(1, before + 1):
            tr.save(place / "run" / f"step-{step:08}", tree(step), step=step)

    def perform(place: Path) -> None:
        with tr.Checkpointer(place / "run", keep=tr.keep.last(2)) as ckpts:
            act(ckpts)

    def look(place: Path) -> str:
        found = {step: version(place / "run" / f"step-{step:08}") for step in tr.steps(place / "run")}
        assert found in allowed, found
        if found:
            latest = max(found)
            assert_is(tr.restore(place / "run"), found[latest] or 0)
            assert tr.open(place / "run").step == latest
        return "old" if found == allowed[0] else "new" if found == allowed[-1] else "between"

    def go_on(place: Path) -> None:
        with tr.Checkpointer(place / "run", keep=tr.keep.last(2)) as ckpts:
            ckpts.save(7, tree(7))
            ckpts.save(9, tree(9))
        names = ["step-00000007", "step-00000009"]
        assert os.listdir(place) == ["run"] and sorted(os.listdir(place / "run")) == names
        for name in names:
            assert_tidy(place / "run" / name)
            assert version(place / "run" / name) == int(name[-1])

    return Scenario(prepare, perform, look, go_on)


SCENARIOS = {
    "save": at_path(lambda path: tr.save(path, tree(4)), old=False),
    "save_async": at_path(lambda path: tr.save_async(path, tree(4)).result(), old=False),
    "overwrite": at_path(lambda path: tr.save(path, tree(4), overwrite=True), old=True),
    "overwrite_async": at_path(lambda path: tr.save_async(path, tree(4), overwrite=True).result(), old=True),
    "first step": _of_run(lambda ckpts: ckpts.save(4, tree(4)), {}, {4: 4}, before=0),
    "step and retention": _of_run(
        lambda ckpts: ckpts.save(4, tree(4)),
        *({1: 1, 2: 2, 3: 3}, {1: 1, 2: 2, 3: 3, 4: 4}, {2: 2, 3: 3, 4: 4}),
        {1: 1, 3: 3, 4: 4},  # a step that cannot be looked into, or deleted, stops no other
        {3: 3, 4: 4},
    ),
    "step again": _of_run(
        lambda ckpts: ckpts.save(2, tree(4), on_exists="overwrite"), {1: 1, 2: 2}, {1: 1, 2: 4}, before=2
    ),
    "delete": _of_run(lambda ckpts: ckpts.delete(2), {1: 1, 2: 2, 3: 3}, {1: 1, 3: 3}),
}
