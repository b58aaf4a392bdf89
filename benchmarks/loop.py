"""What saving every step costs a training loop, and what a run costs that is only asked or listed."""

import functools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import measure
from .table import Row

_STATE = (8, 1810, 1810)  # float32: 105 MB
_STEPS, _STEP_SECONDS = 15, 0.2  # seconds
_SHORT_STEPS, _SHORT_STEP_SECONDS = 60, 0.05  # seconds: no library saves within one of them
_SKIPPED_CALLS = 10_000
_LISTED_STEPS = 1_000

Save = Callable[[int, Any], object]  # true when it has begun to save
Saver = Callable[[str], tuple[Save, Callable[[], object]]]  # what saves into a directory, and what ends it


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, "loop")
    os.mkdir(place)
    each = {"none": _none, "floor": _plain, "treering": _treering, "Orbax v0": _orbax}
    lost, _ = _lost(each, _STEPS, _STEP_SECONDS, place, repeats)
    lost = {name: max(seconds, 1e-3) for name, seconds in lost.items()}  # below which the loop's own times differ
    skipping = {
        "none": _none,
        "treering": functools.partial(_treering, when_busy="skip"),
        "Orbax v0": functools.partial(_orbax, continuous=True),
    }
    lost_then, between = _lost(skipping, _SHORT_STEPS, _SHORT_STEP_SECONDS, place, repeats)
    shutil.rmtree(place)
    state = f"{np.prod(_STATE) * 4 / 1e6:.0f} MB"
    return [
        Row("lost per step by saving each", f"{state}, {_STEP_SECONDS} s", "ms", lost),
        Row(
            "lost per save by saving whenever none is under way",
            f"{state}, {_SHORT_STEP_SECONDS} s",
            "ms",
            {name: max(lost_then[name] * between[name], 1e-3) for name in between},
        ),
        Row("steps from one save to the next then", f"{state}, {_SHORT_STEP_SECONDS} s", "", between),
        Row("a `save` that is skipped", "–", "µs", {"treering": _skipped(directory)}),
        Row("list the steps of a run", f"{_LISTED_STEPS:,} steps", "ms", {"treering": _listed(directory)}),
    ]


def _lost(
    savers: dict[str, Saver], steps: int, seconds: float, place: str, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds that each step takes longer with a saver, and how many steps there are to a save."""
    step = _make_step(seconds)
    saves: dict[str, list[int]] = {name: [] for name in savers}

    def run(name: str) -> float:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            save, close = savers[name](directory)
            state = _make()
            os.sync()
            saved = 0
            begun = time.perf_counter()
            for number in range(steps):
                state = jax.block_until_ready(step(state))
                saved += bool(save(number, state))
            close()
            taken = time.perf_counter() - begun
            saves[name].append(saved)
            return taken

    found = measure.race({name: functools.partial(run, name) for name in savers}, repeats)
    lost = {name: (total - found["none"]) / steps for name, total in found.items() if name != "none"}
    return lost, {name: steps / statistics.median(saves[name]) for name in lost}


def _make_step(seconds: float) -> Callable[[Any], Any]:
    """A training step of about the wanted time, which donates the state."""
    x = jnp.ones(_STATE[1:]) * 1e-4

    def compiled(products: int) -> Callable[[Any], Any]:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any) -> Any:
            y = jax.lax.fori_loop(0, products, lambda _, y: y @ x + 1e-6, x)
            return state * 0.999 + y[0, 0]

        jax.block_until_ready(step(_make()))
        return step

    taken = min(measure.seconds(functools.partial(_once, compiled(8))) for _ in range(3))
    return compiled(max(1, round(8 * seconds / taken)))


def _make() -> Any:
    return jax.block_until_ready(jnp.asarray(np.random.default_rng(0).standard_normal(_STATE, np.float32)))


def _once(step: Callable[[Any], Any]) -> None:
    jax.block_until_ready(step(_make()))


def _none(directory: str) -> tuple[Save, Callable[[], object]]:
    return lambda number, state: None, lambda: None


def _plain(directory: str) -> tuple[Save, Callable[[], object]]:
    """One thread that writes the same bytes into a file and syncs it, keeping the last two."""
    thread: threading.Thread | None = None

    def write(number: int, view: np.ndarray) -> None:
        with open(os.path.join(directory, str(number)), "wb", buffering=0) as file:
            rest = memoryview(view).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        if number >= 2:
            os.unlink(os.path.join(directory, str(number - 2)))

    def wait() -> None:
        if thread:
            thread.join()

    def save(number: int, state: Any) -> bool:
        nonlocal thread
        wait()
        thread = threading.Thread(target=write, args=(number, np.asarray(state)))
        thread.start()
        return True

    return save, wait


def _treering(directory: str, when_busy: Literal["wait", "skip"] = "wait") -> tuple[Save, Callable[[], object]]:
    import treering as tr

    ckpts = tr.Checkpointer(directory, keep=tr.keep.last(2), when_busy=when_busy)
    return lambda number, state: ckpts.save(number, {"state": state}), ckpts.close


def _orbax(directory: str, *, continuous: bool = False) -> tuple[Save, Callable[[], object]]:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.checkpoint_managers import ContinuousCheckpointingPolicy

    policy = ContinuousCheckpointingPolicy() if continuous else None
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_decision_policy=policy)
    manager = ocp.CheckpointManager(directory, options=options)
    return lambda number, state: manager.save(number, args=ocp.args.StandardSave({"state": state})), manager.close


def _skipped(directory: str) -> float:
    import treering as tr

    with tr.Checkpointer(os.path.join(directory, "skipped"), save_every=1 << 30, save_on_preemption=True) as ckpts:

        def all_of_them() -> None:
            for number in range(1, _SKIPPED_CALLS + 1):
                ckpts.save(number, None)

        return measure.seconds(all_of_them) / _SKIPPED_CALLS


def _listed(directory: str) -> float:
    import treering as tr

    run = os.path.join(directory, "listed")
    with tr.Checkpointer(run) as ckpts:
        for number in range(_LISTED_STEPS):
            ckpts.save(number, {"x": number})
    return min(measure.seconds(lambda: tr.steps(run)) for _ in range(3))
