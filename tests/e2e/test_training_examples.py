"""Kills and stops the training loops of the examples: they end with the same bits as an uninterrupted run."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Self

import pytest

import treering as tr

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
TRAINING = ["equinox_optax.py", "flax_nnx.py", "flax_linen.py", "lora.py"]


class Job:
    """A running example. Its output buffer has few lines, so it waits for the test to read them."""

    def __init__(self, name: str, run: pathlib.Path, *options: object, devices: int = 1):
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the smallest buffer, some lines
        self._lines = ours.makefile()
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), str(run), *map(str, options)],
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                # A compilation cache: compiling again after each kill would take most of the time.
                "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )
        ours.close()
        theirs.close()

    def until(self, beginning: str) -> list[str]:
        """Returns the lines up to the first that begins with a text."""
        lines: list[str] = []
        for line in self._lines:
            lines.append(line.strip())
            if line.startswith(beginning):
                return lines
        raise AssertionError(f"expected {beginning!r}, found {lines[-3:]} and {self.end()}")

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, list[str]]:
        """Sends a signal, if any, and waits. Returns the exit code, the errors printed, and the lines not yet read."""
        if number:
            self._process.send_signal(number)
        lines = [line.strip() for line in self._lines]
        _, complaints = self._process.communicate(timeout=300)
        return self._process.returncode, complaints, lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._lines.close()


def finish(name: str, run: pathlib.Path, *options: object, devices: int = 1) -> list[str]:
    """Runs an example to its end, and returns what it prints."""
    with Job(name, run, *options, devices=devices) as started:
        code, complaints, lines = started.end()
    assert code == 0, complaints
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_killed_and_preempted_run_ends_with_same_bits(name: str, tmp_path: pathlib.Path) -> None:
    """A run that is killed and stopped by SIGTERM ends with the bits of an uninterrupted run."""
    peaceful = finish(name, tmp_path / "peaceful", "--steps", 120)
    run, begun, losses = tmp_path / "killed", [], {}
    for number, more_steps in ((signal.SIGKILL, 0), (signal.SIGKILL, 45), (signal.SIGTERM, 15)):
        with Job(name, run, "--steps", 120) as started:
            (line,) = started.until("begins after step ")
            begun.append(int(line.split()[-1]))
            lines = started.until(f"step {begun[-1] + more_steps} ") if more_steps else []
            code, complaints, rest = started.end(number)
        lines += rest
        losses |= {line.split()[1]: line for line in lines}
        if number == signal.SIGKILL:
            assert code == -number, complaints
        else:
            assert code == 1 and "stopped by SIGTERM" in complaints
    assert begun[:2] == [0, 0] and begun[2] >= 20 and begun[2] % 20 == 0
    stopped = tr.steps(run)[-1]
    assert lines[-1].startswith(f"step {stopped} ") and tr.verify(run).ok, "the last completed step is saved"
    begin, *rest = finish(name, run, "--steps", 120)
    assert begin == f"begins after step {stopped}", "no step is repeated"
    losses |= {line.split()[1]: line for line in rest}
    assert list(losses.values()) == peaceful[1:] and peaceful[-1].startswith("digest ")
    assert not tr.diff(tmp_path / "peaceful", run)


@pytest.mark.slow
def test_killed_loop_of_orbax_ends_with_same_bits(tmp_path: pathlib.Path) -> None:
    """A loop with the calls of Orbax continues its model, its optimizer and its data after SIGKILL."""
    peaceful = finish("orbax_loop.py", tmp_path / "peaceful", "--steps", 60)
    run = tmp_path / "killed"
    with Job("orbax_loop.py", run, "--steps", 60) as started:
        started.until("step 50 ")
        started.end(signal.SIGKILL)
    begin, *rest = finish("orbax_loop.py", run, "--steps", 60)
    assert begin in ("begins after step 20", "begins after step 40")  # The save of step 40 may not have ended.
    assert rest == peaceful[-len(rest) :] and rest[-1].startswith("digest ")
    assert not tr.diff(tmp_path / "peaceful", run) and tr.steps(run)[-1] == 60


@pytest.mark.rare
@pytest.mark.slow
def test_parameters_of_orbax_are_tuned_and_read_by_orbax(tmp_path: pathlib.Path) -> None:
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    (encoder,) = finish("orbax_finetune.py", pretrained, "--pretrain")
    found, restored, *_, trained = finish("orbax_finetune.py", pretrained, tuned)
    assert (found, restored) == ("found opt_state params step", encoder)
    assert finish("orbax_finetune.py", tuned, "--check") == [trained] and tr.open(tuned).format == "orbax"


@pytest.mark.rare
@pytest.mark.slow
def test_adapters_are_saved_without_the_weights_that_they_adapt(tmp_path: pathlib.Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model.safetensors"
    *_, trained = finish("lora.py", run, "--steps", 20)
    assert {path.split("/")[0] for path in tr.open(run)} == {"lora", "opt"}
    (run / "model.safetensors").rename(model)
    assert finish("lora.py", run, "--steps", 20, "--model", model) == ["begins after step 20", trained]
    tr.save(model, {name: 2 * array[...] for name, array in tr.open(model).items()}, overwrite=True)
    assert finish("lora.py", run, "--steps", 20, "--model", model)[-1] != trained, "the file is what counts"


@pytest.mark.rare
@pytest.mark.slow
def test_the_best_step_by_an_evaluator_that_is_killed_is_kept(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    with Job("evaluator.py", run) as first, Job("flax_linen.py", run, "--steps", 120) as training:
        training.until("step 45 ")
        scored = first.until("step 20 ")
        first.end(signal.SIGKILL)
        with Job("evaluator.py", run) as second:
            assert training.end()[0] == 0
            code, complaints, lines = second.end()
    assert code == 0, complaints
    assert "step 20" not in " ".join(lines), "a step with a score is not scored again"
    scores = {int(line.split()[1]): float(line.split()[-1]) for line in scored + lines[:-1]}
    best = int(lines[-1].removeprefix("best "))
    metrics = tr.open(run, step=best).metrics
    assert round(metrics["val/loss"], 4) <= min(scores.values()) and "loss" in metrics
    assert 20 < best < 100, "the net overfits"
    finish("flax_linen.py", run, "--steps", 140)  # now that all other steps have their scores
    assert tr.steps(run) == [best, 120, 140]


@pytest.mark.rare
@pytest.mark.slow
def test_parameters_of_eight_devices_on_one(tmp_path: pathlib.Path) -> None:
    *_, many, saved = finish("params_only.py", tmp_path / "run", "--save", devices=8)
    *_, one, loaded = finish("params_only.py", tmp_path / "run")
    assert (many, one) == ("devices 8", "devices 1") and loaded == saved and saved.startswith("digest ")
