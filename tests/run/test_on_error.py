"""Tests of `on_error`: saves fail while a loop continues."""

import logging
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, proxy
from treering import stores
from treering.errors import ExistsError, MismatchError, SaveError
from treering.stores.objects.store import ObjectStore


@pytest.fixture
def between(s3_server: str) -> Iterator[Proxy]:
    """A proxy in front of a bucket, because a test can cut a network but cannot remove a disk."""
    with proxy(s3_server) as one:
        buckets = ObjectStore()
        buckets.add("flaky://tests", s3.client(one.url, retry_config={"max_retries": 0}))
        with stores.using(buckets, "flaky"):
            yield one


def _down(between: Proxy) -> None:
    between.fault = lambda request: "503 SlowDown"


def _up(between: Proxy) -> None:
    between.fault = lambda request: None


@pytest.mark.long
@pytest.mark.parametrize("at", ["the call", "the commit"])
@pytest.mark.parametrize("on_error", ["log", "function", "broken function"])
def test_a_loop_goes_on(between: Proxy, at: str, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[BaseException] = []
    run = f"flaky://tests/{secrets.token_hex(4)}"

    def collect(error: BaseException) -> None:
        errors.append(error)
        if on_error == "broken function":
            raise ZeroDivisionError

    with (
        caplog.at_level(logging.ERROR),
        tr.Checkpointer(run, on_error="log" if on_error == "log" else collect) as ckpts,
    ):
        for step in range(1, 6):
            if step == 3 and at == "the call":
                _down(between)
            elif step == 3:
                between.fault = lambda request: "503 SlowDown" if request.method == "PUT" else None
            ckpts.save(step, {"w": np.full(4, step)})
            if step == 3:
                while ckpts.is_saving:
                    pass
                _up(between)
            elif step == 4:
                assert isinstance(ckpts.last_error, SaveError)
            ckpts.wait() if step != 3 else None
        assert ckpts.last_error is None
    assert tr.steps(run) == [1, 2, 4, 5]
    assert caplog.text.count("a save failed, and the run continues") == 1
    assert len(errors) == (on_error != "log") and all(isinstance(error, SaveError) for error in errors)
    assert ("on_error failed" in caplog.text) == (on_error == "broken function")


@pytest.mark.long
def test_the_failure_of_the_last_save_is_raised(between: Proxy) -> None:
    run = f"flaky://tests/{secrets.token_hex(4)}"
    ckpts = tr.Checkpointer(run, on_error="log")
    ckpts.save(1, {"w": 1})
    ckpts.wait()
    between.fault = lambda request: "503 SlowDown" if request.method == "PUT" else None
    ckpts.save(2, {"w": 2})
    with pytest.raises(SaveError):
        ckpts.close()
    assert ckpts.last_error is not None
    _up(between)
    assert tr.steps(run) == [1]


@pytest.mark.long
def test_a_wrong_call_is_raised_in_any_case(between: Proxy) -> None:
    with tr.Checkpointer(f"flaky://tests/{secrets.token_hex(4)}", on_error="log") as ckpts:
        ckpts.save(1, {"w": 1})
        with pytest.raises(ExistsError):
            ckpts.save(1, {"w": 1})
        with pytest.raises(tr.errors.UnsupportedError):
            ckpts.save(2, {"w": object()})
    with pytest.raises(MismatchError, match="on_error"):
        tr.Checkpointer("run", on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.long
def test_reported_failure_is_raised_at_close(between: Proxy) -> None:
    """Calls for steps that are not due report the failed save. No successful save follows."""
    errors: list[BaseException] = []
    ckpts = tr.Checkpointer(f"flaky://tests/{secrets.token_hex(4)}", save_every=10, on_error=errors.append)
    ckpts.save(10, {"w": np.zeros(4)})
    ckpts.wait()
    between.fault = lambda request: "503 SlowDown" if request.method == "PUT" else None
    ckpts.save(20, {"w": np.zeros(4)})
    while ckpts.is_saving:
        pass
    for step in range(21, 25):
        ckpts.save(step, {"w": np.zeros(4)})
    _up(between)
    assert errors and ckpts.last_error is errors[-1]
    with pytest.raises(SaveError, match="step-00000020"):
        ckpts.close()
    ckpts.close()  # The error is raised only once.
