"""Runs, overwriting and formats in a container of Azure's, on a real server."""

import pathlib
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

import azurite
import treering as tr
from treering import stores
from treering.errors import ExistsError, NotFoundError
from treering.stores.objects.store import ObjectStore

pytestmark = pytest.mark.slow
_TREE = {"params": {"w": np.arange(300_000, dtype=np.float32)}, "step": np.array(7)}


@pytest.fixture
def container(azure_server: str) -> Iterator[str]:
    """A folder of the container."""
    containers = ObjectStore()
    containers.add("azure-test://c", azurite.client(azure_server))
    with stores.using(containers, "azure-test"):
        yield f"azure-test://c/{secrets.token_hex(4)}"


def test_one_checkpoint(container: str) -> None:
    with pytest.raises(NotFoundError):
        tr.restore(f"{container}/a")
    tr.save(f"{container}/a", _TREE)
    with pytest.raises(ExistsError):
        tr.save(f"{container}/a", _TREE)
    tr.save(f"{container}/a", {"w": np.ones(3)}, overwrite=True)
    assert tr.restore(f"{container}/a")["w"].sum() == 3
    assert len(stores.of(container).list(f"{container}/a")) == 2


def test_a_run(container: str, tmp_path: pathlib.Path) -> None:
    run = f"{container}/run"
    with tr.Checkpointer(run, keep=tr.keep.last(2), local=tmp_path / "near") as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, _TREE, metrics={"loss": 1 / step})
            ckpts.wait()
    tr.record(run, 3, {"accuracy": 0.5})
    assert tr.steps(run) == [2, 3] and tr.open(run).metrics == {"loss": 1 / 3, "accuracy": 0.5}
    with tr.Checkpointer(run) as ckpts:
        ckpts.rewind(2)
    assert tr.steps(run) == [2] and tr.steps(f"{run}/rewound-1") == [3] and tr.verify(run).ok


@pytest.mark.parametrize("format", ["safetensors", "orbax", "t5x"])
def test_formats(container: str, tmp_path: pathlib.Path, format: str) -> None:
    large = {"w": np.arange(9_000_000, dtype=np.float32)}  # in parts, where it is one file
    tr.save(f"{container}/{format}", large, format=format)
    np.testing.assert_array_equal(tr.restore(f"{container}/{format}", large)["w"], large["w"])
    tr.convert(f"{container}/{format}", tmp_path / "here", format="treering")
    np.testing.assert_array_equal(tr.restore(tmp_path / "here", large)["w"], large["w"])
