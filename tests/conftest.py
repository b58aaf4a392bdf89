"""What all tests share."""

import os

from xla_flags import xla_flags

# Eight CPU devices, so that sharded arrays are real; before JAX is imported anywhere.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import collections
import gc
import importlib.metadata
import pathlib
import platform
import random
import secrets
import shlex
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import azurite
import durations
import gcs
import s3
import sampling
from treering import stores
from treering._save import pending
from treering.stores import probe
from treering.stores.posix import Disk

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # who begins the tests in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Says where the time of the tests goes; see `durations`."""
    config.pluginmanager.register(durations)


_MANY_CASES = 8
_MARKS = {
    "test_any_size_is_copied_in_bounded_memory": ("slow", "rare"),  # 256 MiB through a format
    "test_of_many_writers_one_wins": ("long",),
    "test_a_folder_has_many_names": ("long",),
    "test_every_format_works_on_it": ("long",),
    "test_bytes_changed_anywhere": ("long",),
    "test_files_cut_off_anywhere": ("long",),
    "test_errors_of_the_disk_leave_nothing": ("long",),
    "test_large_arrays_and_odd_layouts": ("long",),
}


def _is(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for mark in marks)


def _left_out_of_quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields every second case of the tests with many, others for each commit."""
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, own in cases.items():
        if len(own) >= _MANY_CASES:
            yield from own[sampling.parity(test) :: 2]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses what is tried (see `samples`). The shipped conformance suite has no marks: they are given here.

    Most tests that take minutes are in the folder of this file: they begin first, and short tests fill up the workers
    after them.
    With `TEST_SHUFFLE=1` nothing has a place of its own: the order is that of the seed.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        for mark in _MARKS.get(getattr(item, "originalname", ""), ()):
            item.add_marker(mark)
        if _is(item, "long", "slow") and not _is(item, "whole"):
            cases[item.nodeid.partition("[")[0]].append(item)
    if not any("::" in argument for argument in config.args):
        left_out = {
            item for item in items if _is(item, "rare") and not sampling.is_sampled(item.nodeid.partition("[")[0])
        }
        for test, own in cases.items():
            left_out.update(set(own) - {own[n] for n in sampling.long_cases(test, len(own))})
        if os.environ.get("TEST_QUICK"):
            left_out.update(_left_out_of_quick(items))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.parent != pathlib.Path(__file__).parent)
    if os.environ.get("TEST_SHUFFLE"):
        random.Random(sampling.SEED).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Says with a failure how the test is chosen again, whatever the commit is by then."""
    report = yield
    if report.failed:
        report.sections.append(("once more", f"TEST_SEED={sampling.SEED} python -m pytest {shlex.quote(item.nodeid)}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the tests ran on, for CI runs them on the oldest releases and the newest, and how much was tried."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy", "msgspec", "tensorstore"))
    terminalreporter.write_line(", ".join([f"Python {platform.python_version()}", *versions]))
    terminalreporter.write_line(f"tried: {sampling.SAMPLE_TEXT}")


@pytest.fixture(autouse=True)
def no_leftover_threads() -> Iterator[None]:
    """Every save of a test is over at its end, and every failure was reported."""
    yield
    if pending.saves_finished is not None:
        assert pending.saves_finished.wait(30)
    unseen, pending.unreported[:] = list(pending.unreported), []
    assert not unseen
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("treering")]
    if "treering-loopback" in alive:  # which ends with the last reference to what it serves
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("treering"):
            thread.join(10)
            assert not thread.is_alive(), alive


@pytest.fixture(autouse=True)
def the_usual_stores() -> Iterator[None]:
    """Removes the stores that a test registers: a double that stays would be the disk of all later tests."""
    usual = dict(stores._stores)
    yield
    stores._stores.clear()
    stores._stores.update(usual)


@pytest.fixture(autouse=True)
def local_tiers_are_on_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only `/dev/shm` count as memory, even if the directory for temporary files is there too."""
    real = probe.is_in_memory
    monkeypatch.setattr(probe, "is_in_memory", lambda path: path.startswith("/dev/shm/") and real(path))


@pytest.fixture
def use_disk(the_usual_stores: None) -> Any:
    """Replaces the disk by a double for the rest of the test."""

    def use(disk: Disk) -> Disk:
        stores.register(stores.Filesystem(disk))
        return disk

    return use


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server of Azure's blobs. npm installs it; without npm the tests that use it are skipped."""
    try:
        with azurite.server(tmp_path_factory.mktemp("azurite")) as url:
            yield url
    except azurite.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The URL of a double of Google Cloud Storage in a hurry, which the tests of this process share."""
    with gcs.server(write_seconds=0.2) as url:
        yield url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a real S3 server, which the tests of this process share."""
    with s3.server() as url:
        yield url


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of the bucket, which the environment says how to reach."""
    for name, value in s3.environment(s3_server).items():
        monkeypatch.setenv(name, value)
    stores._buckets.cache_clear()
    yield f"s3://{s3.BUCKET}/{secrets.token_hex(4)}"
    stores._buckets.cache_clear()
