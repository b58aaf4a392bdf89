"""What saving every step costs a training loop, and what a run costs that is only asked or listed."""

import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import measure
from .table import Row

_STEPS = 15
_STATE = (8, 1810, 1810)  # float32: 105 MB
_STEP = 0.2  # seconds
_SKIPPED = 10_000
_LISTED = 1_000

Save = Callable[[int, Any], object]


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, "loop")
    os.mkdir(place)
    step = _make_step()
    savers = {"none": _none, "floor": _plain, "treering": _treering, "Orbax v0": _orbax}
    runs = {name: functools.partial(_run, step, saver, place) for name, saver in savers.items()}
    found = measure.race(runs, repeats)
    # Not less than a millisecond, below which the loop's own times differ.
    lost = {name: max((total - found["none"]) / _STEPS, 1e-3) for name, total in found.items() if name != "none"}
    shutil.rmtree(place)
    return [
        Row("lost per step by saving each", f"{np.prod(_STATE) * 4 / 1e6:.0f} MB, {_STEP} s", "ms", lost),
        Row("a `save` that is skipped", "–", "µs", {"treering": _skipped(directory)}),
        Row("list the steps of a run", f"{_LISTED:,} steps", "ms", {"treering": _listed(directory)}),
    ]


def _make_step() -> Callable[[Any], Any]:
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
    return compiled(max(1, round(8 * _STEP / taken)))


def _make() -> Any:
    return jax.block_until_ready(jnp.asarray(np.random.default_rng(0).standard_normal(_STATE, np.float32)))


def _once(step: Callable[[Any], Any]) -> None:
    jax.block_until_ready(step(_make()))


def _run(step: Callable[[Any], Any], saver: Callable[[str], tuple[Save, Callable[[], object]]], place: str) -> float:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        save, close = saver(directory)
        state = _make()
        os.sync()
        begun = time.perf_counter()
        for number in range(_STEPS):
            state = jax.block_until_ready(step(state))
            save(number, state)
        close()
        return time.perf_counter() - begun


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

    def save(number: int, state: Any) -> None:
        nonlocal thread
        wait()
        thread = threading.Thread(target=write, args=(number, np.asarray(state)))
        thread.start()

    return save, wait


def _treering(directory: str) -> tuple[Save, Callable[[], object]]:
    import treering as tr

    ckpts = tr.Checkpointer(directory, keep=tr.keep.last(2))
    return lambda number, state: ckpts.save(number, {"state": state}), ckpts.close


def _orbax(directory: str) -> tuple[Save, Callable[[], object]]:
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    return lambda number, state: manager.save(number, args=ocp.args.StandardSave({"state": state})), manager.close


def _skipped(directory: str) -> float:
    import treering as tr

    with tr.Checkpointer(os.path.join(directory, "skipped"), save_every=1 << 30, save_on_preemption=True) as ckpts:

        def all_of_them() -> None:
            for number in range(1, _SKIPPED + 1):
                ckpts.save(number, None)

        return measure.seconds(all_of_them) / _SKIPPED


def _listed(directory: str) -> float:
    import treering as tr

    run = os.path.join(directory, "listed")
    with tr.Checkpointer(run) as ckpts:
        for number in range(_LISTED):
            ckpts.save(number, {"x": number})
    return min(measure.seconds(lambda: tr.steps(run)) for _ in range(3))
