"""Runs, overwriting and formats at providers other than S3, and what only Google's store does."""

import os
import pathlib
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

import azurite
import gcs
import treering as tr
from treering import stores
from treering.errors import ExistsError, NotFoundError
from treering.stores.objects.store import ObjectStore
from treering.stores.read_errors import RequestError

pytestmark = pytest.mark.slow
_TREE = {"params": {"w": np.arange(300_000, dtype=np.float32)}, "step": np.array(7)}


@pytest.fixture(params=["azure", "google"])
def container(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a folder in a container of a real Azure server, or in a bucket of Google's double."""
    made = {"azure": azurite.client, "google": gcs.client}
    server = request.getfixturevalue({"azure": "azure_server", "google": "gcs_server"}[request.param])
    containers = ObjectStore()
    containers.add("provider://c", made[request.param](server))
    with stores.using(containers, "provider"):
        yield f"provider://c/{secrets.token_hex(4)}"


def test_one_checkpoint(container: str) -> None:
    with pytest.raises(NotFoundError):
        tr.restore(f"{container}/a")
    tr.save(f"{container}/a", _TREE)
    with pytest.raises(ExistsError):
        tr.save(f"{container}/a", _TREE)
    tr.save(f"{container}/a", {"w": np.ones(3)}, overwrite=True)
    assert tr.restore(f"{container}/a")["w"].sum() == 3
    assert len(stores.get(container).list(f"{container}/a")) == 2


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
    large = {"w": np.arange(9_000_000, dtype=np.float32)}  # uploaded in parts if the format has one file
    tr.save(f"{container}/{format}", large, format=format)
    np.testing.assert_array_equal(tr.restore(f"{container}/{format}", large)["w"], large["w"])
    tr.convert(f"{container}/{format}", tmp_path / "here", format="treering")
    np.testing.assert_array_equal(tr.restore(tmp_path / "here", large)["w"], large["w"])


@pytest.mark.rare
def test_google_rate_limit_delays_changes() -> None:
    """Google changes an object once per second; a save waits, even if the client itself repeats nothing."""
    path = f"gs://{gcs.BUCKET}/{secrets.token_hex(4)}"
    buckets = ObjectStore()
    with gcs.server() as server, stores.using(buckets, "gs"):
        buckets.add(f"gs://{gcs.BUCKET}", gcs.client(server, retry_config={"max_retries": 0}))
        for n in range(2):
            tr.save(path, {"n": n}, overwrite=True)
            assert tr.restore(path) == {"n": n}
        with tr.Checkpointer(f"{path}/run", keep=tr.keep.last(1)) as ckpts:
            for n in range(2):
                ckpts.save(1, {"n": n}, on_exists="overwrite")
                ckpts.wait()
        assert tr.restore(f"{path}/run") == {"n": 1} and tr.steps(f"{path}/run") == [1]


def test_the_objects_of_a_client_of_googles_have_its_url(gcs_server: str) -> None:
    """A store object for Google stands for the URL of its bucket."""
    report = tr.save(gcs.client(gcs_server, prefix=secrets.token_hex(4)), _TREE)
    assert report.path.startswith(f"gs://{gcs.BUCKET}/")
    np.testing.assert_array_equal(tr.restore(report.path)["params"]["w"], _TREE["params"]["w"])


@pytest.mark.parametrize("name", ["a b", "ü/ö", "50%", "a+b", "#?&", "~@0", "x/latest/meta-data/y", "a 403 429 b"])
def test_any_name_is_a_name(container: str, name: str) -> None:
    tr.save(f"{container}/{name}", _TREE)
    np.testing.assert_array_equal(tr.restore(f"{container}/{name}")["params"]["w"], _TREE["params"]["w"])
    assert tr.verify(f"{container}/{name}").ok


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("s3://nobodys", {"AWS_METADATA_ENDPOINT": "{}", "AWS_REGION": "us-east-1"}),
        ("gs://nobodys", {"GCE_METADATA_HOST": "{}", "GCE_METADATA_IP": "{}"}),
        ("az://nobodys", {"AZURE_STORAGE_ACCOUNT_NAME": "nobody", "AZURE_MSI_ENDPOINT": "{}/metadata/identity/"}),
    ],
)
def test_without_credentials_it_says_so(
    url: str, asked: dict[str, str], gcs_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Without credentials, an error says so. A server without any replaces the provider's metadata service."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in asked.items():
        monkeypatch.setenv(name, value.format(gcs_server.removeprefix("http://") if "GCE" in name else gcs_server))
    with stores.using(ObjectStore(), url.partition(":")[0]), pytest.raises(RequestError, match="no credentials were"):
        tr.open(f"{url}/run")
