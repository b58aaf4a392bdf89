"""What all tests share."""

import os

# Eight CPU devices, so that sharded arrays are real; before JAX is imported anywhere.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import collections
import gc
import importlib.metadata
import pathlib
import platform
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

import azurite
import durations
import gcs
import s3
import samples
from treering import stores
from treering._save import pending
from treering.stores.posix import Disk

settings.register_profile("part", max_examples=samples.examples(settings().max_examples))
settings.load_profile("part")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # who begins the tests in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Says where the time of the tests goes; see `durations`."""
    config.pluginmanager.register(durations)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shipped conformance suite has no marks of ours; what moves 256 MiB through every format is slow.

    What uses JAX the most, and several processes of it, is run on the oldest releases even where it takes long.

    Most of what takes minutes lies beside this file: it begins first, and what is short fills up the workers behind it.
    """
    cases: dict[tuple[str, bool], list[pytest.Item]] = collections.defaultdict(list)
    tried = {item for item in items if item.get_closest_marker("whole")}
    for item in items:
        if getattr(item, "originalname", "") == "test_any_size_is_copied_in_bounded_memory":
            item.add_marker(pytest.mark.slow)
        if item.path.parent.name in ("processes", "pytree"):
            item.add_marker(pytest.mark.elsewhere)
        long = any(item.get_closest_marker(name) for name in ("long", "slow"))
        cases[item.nodeid.partition("[")[0], long].append(item)
    for (test, long), own in cases.items():
        tried.update(own[n] for n in samples.cases(test, len(own), long=long))
    items[:] = [item for item in items if item in tried]
    items.sort(key=lambda item: item.path.parent != pathlib.Path(__file__).parent)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the tests ran on, for CI runs them on the oldest releases and the newest, and how much was tried."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy", "msgspec", "tensorstore"))
    terminalreporter.write_line(", ".join([f"Python {platform.python_version()}", *versions]))
    terminalreporter.write_line(f"tried: {samples.TRIED}")


@pytest.fixture(autouse=True)
def no_leftover_threads() -> Iterator[None]:
    """Every save of a test is over at its end, and nobody was left untold of a failure."""
    yield
    if pending.last is not None:
        assert pending.last.wait(30)
    unseen, pending.unseen[:] = list(pending.unseen), []
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
    """What a test registers is gone after it: a double that stays would be the disk of all tests that follow."""
    usual = dict(stores._stores)
    yield
    stores._stores.clear()
    stores._stores.update(usual)


@pytest.fixture
def use_disk(the_usual_stores: None) -> Any:
    """Puts a double in the place of the disk for the rest of the test."""

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
