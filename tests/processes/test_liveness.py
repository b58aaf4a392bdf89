"""Tests that the error of a timed-out wait names the cause: a peer that is dead, stopped, ended or makes no call."""

import pathlib
import signal

import pytest

from jobs import run_job

# Treering is imported before the job forms, so the roll knows a process only from its first call on.
OFTEN = "from treering._processes import call_tree; call_tree._IDLE_SIGN_SECONDS = 0.2"
DEAD, HINT = "dead, stopped or cut off, and nothing was committed", "if jax.process_index() == 0"


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("fates", "count", "says"),
    [
        ({2: "SIGKILL"}, 3, f"; {DEAD}"),
        ({2: "SIGKILL", 3: "SIGKILL"}, 4, f"; {DEAD}"),
        ({1: "SIGSTOP"}, 3, f"; {DEAD}"),
        ({1: "ends"}, 3, "; ended without this call"),
        ({2: "makes no call"}, 3, f"; alive; every process must make this call: `{HINT}"),
        ({0: "makes no call"}, 3, f"; alive; every process must make this call: `{HINT}"),
    ],
    ids=str,
)
def test_every_survivor_names_the_cause(tmp_path: pathlib.Path, fates: dict[int, str], count: int, says: str) -> None:
    """Every surviving process names all processes that are the cause, and no others."""
    for result in _survivors(tmp_path, fates, count, is_warm=True, before=OFTEN):
        kind, text = result
        assert kind == "PeerError" and says in text, text
        named = {index for index in range(count) if f"process {index} (" in text}
        assert named == set(fates) and (HINT in text) == (HINT in says), text


@pytest.mark.slow
def test_liveness_does_not_blame_survivor_in_next_call(tmp_path: pathlib.Path) -> None:
    """The error does not blame a survivor that has timed out and begun its next call."""
    for kind, text in _survivors(tmp_path, {2: "SIGKILL"}, 3, is_warm=True, before=OFTEN, goes_on=True):
        assert kind == "PeerError" and DEAD in text and "process 2 (" in text and "process 1" not in text, text


@pytest.mark.rare
@pytest.mark.slow
def test_liveness_knows_process_before_its_first_call(tmp_path: pathlib.Path) -> None:
    """The roll knows a process before its first call if it imported Treering after the job had formed."""
    for kind, text in _survivors(tmp_path, {2: "SIGKILL"}, 3, is_warm=False, before=""):
        assert kind == "PeerError" and f"from process 2 (not in this call, nor in one before); {DEAD}" in text, text


@pytest.mark.slow
def test_error_names_both_causes_without_a_sign_of_life(tmp_path: pathlib.Path) -> None:
    """The error names both possible causes for a process that never gave a sign."""
    for kind, text in _survivors(tmp_path, {2: "SIGKILL"}, 3, is_warm=False, before=OFTEN):
        assert kind == "PeerError" and "process 2 (not in this call, nor in one before); dead, or alive" in text, text
        assert HINT in text and "process 1" not in text, text


def _survivors(
    tmp: pathlib.Path, fates: dict[int, str], count: int, *, is_warm: bool, before: str, goes_on: bool = False
) -> list[tuple[str, str]]:
    ends: dict[int, int | None] = {index: -signal.SIGKILL for index, fate in fates.items() if fate.startswith("SIG")}
    options = {"recoverable": True, "devices": 1, "before": before, "expect": ends, "timeout": 60}
    results = run_job(tmp, "liveness.body", processes=count, FATES=fates, IS_WARM=is_warm, GOES_ON=goes_on, **options)
    return [result.report for index, result in enumerate(results) if index not in fates]
