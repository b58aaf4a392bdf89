"""Tests of checkpoints of a later version: Treering never reports them as damaged, and never skips or changes them."""

import functools
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering.errors import CorruptError, ExistsError, UnsupportedError
from treering.formats.treering import manifest
from treering.stores.store import LOCK_NAME
from treering.testing._subject import listing

TREE = {"w": np.arange(1000.0), "n": 3}


def sealed(content: Any) -> bytes:
    """Returns a file of JSON that ends in its own checksum."""
    body = json.dumps(content).encode()[:-1]
    return body + b',"xxh3":"' + manifest.xxh3(body).encode() + b'"}\n'


def change(file: pathlib.Path, how: Callable[[Any], Any]) -> None:
    """Changes the content of a sealed file and seals it again."""
    content = json.loads(file.read_bytes())
    content.pop("xxh3")
    found = how(content)
    file.chmod(0o644)
    file.write_bytes(sealed(content if found is None else found))


FUTURES: dict[str, Callable[[Any], Any]] = {
    "a later version": lambda m: m.update(version=2),
    "a later version without files": lambda m: {key: m[key] for key in m if key != "files"} | {"version": 2},
    "files of another form": lambda m: m.update(version=2, files=[{"name": "a", "chunks": 3}]),
    "a version as text": lambda m: m.update(version="2"),
    "version 0": lambda m: m.update(version=0),
    "a version that is a bool": lambda m: m.update(version=True),
    "no version": lambda m: {key: m[key] for key in m if key != "version"},
    "another format": lambda m: m.update(format="treering-next"),
    "a feature": lambda m: m.update(requires=["zstd"]),
    "features of another form": lambda m: m.update(requires=[{"name": "zstd", "level": 3}]),
    "features that are no list": lambda m: m.update(requires={"zstd": 1}),
    "nothing but the envelope": lambda m: {"format": "treering", "version": 9},
}
# Unknown contents in a manifest whose envelope does not say so. This breaks the rules, but is still unsupported.
ODD: dict[str, Callable[[Any], Any]] = {
    "a type of values": lambda m: m["leaves"].__setitem__(0, ["value", "n", "decimal", "3"]),
    "a kind of leaves": lambda m: m["leaves"].__setitem__(0, ["ragged", "n", []]),
    "a type of arrays": lambda m: m["leaves"][1].__setitem__(2, "torch"),
    "a kind of containers": lambda m: m["tree"][0].__setitem__(0, "set"),
    "another form of where": lambda m: m["leaves"][1].__setitem__(6, {"chunk": 1}),
}


def change_header(step: pathlib.Path, about: Any) -> pathlib.Path:
    """Changes the metadata in the header of an array file, and the checksum of the header in the manifest.

    about: metadata to change, as a dict; other metadata; or `...` to remove the metadata.
    """
    file = step / json.loads((step / "treering.json").read_bytes())["files"][0]["name"]
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = {**header["__metadata__"], **about} if isinstance(about, dict) else about
    if about is ...:
        del header["__metadata__"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    file.chmod(0o644)
    file.write_bytes(data[:8] + text + data[8 + size :])
    digest = manifest.xxh3(file.read_bytes()[: 8 + size])
    change(step / "treering.json", lambda m: m["files"][0].update(xxh3=digest))
    return file


def add_metrics(step: pathlib.Path, about: dict[str, Any]) -> pathlib.Path:
    tr.record(step.parent, 3 if step.name.endswith("3") else 1, {"loss": 9.0})
    (file,) = step.glob("metrics-*.json")
    change(file, lambda m: m.update(about))
    return file


LATER_HEADERS: list[Any] = [
    {"version": "2"},
    {"version": 2},
    {"format": "next"},
    {"requires": "zstd"},
    {"requires": ["zstd"]},
    None,
    ...,
]
LATER_METRICS: list[dict[str, Any]] = [
    {"version": 2},
    {"requires": ["x"]},
    {"version": 2, "metrics": [1]},
    {"metrics": {"loss": {}}},
]
LATER_FILE: Callable[[Any], Any] = lambda m: m["files"][0].update(requires=["zstd"])  # noqa: E731
LATER_LEAF: Callable[[Any], Any] = lambda m: m["leaves"][1].__setitem__(6, {"requires": ["delta"]})  # noqa: E731
# Parts of a checkpoint that a later version wrote, below a manifest of this version.
PARTS: dict[str, Callable[[pathlib.Path], object]] = {
    "a file that requires something": lambda step: change(step / "treering.json", LATER_FILE),
    "a leaf that requires something": lambda step: change(step / "treering.json", LATER_LEAF),
    **{f"an array file with {about}": functools.partial(change_header, about=about) for about in LATER_HEADERS},
    **{f"metrics with {about}": functools.partial(add_metrics, about=about) for about in LATER_METRICS},
}


@pytest.fixture(params=FUTURES)
def run(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> pathlib.Path:
    """A run whose newest step has a manifest of a later version."""
    return made(tmp_path, FUTURES[request.param])


@pytest.fixture(params=FUTURES | ODD)
def any_run(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> pathlib.Path:
    """A run as in `run`, or one whose newest step has unknown contents that only full decoding shows."""
    return made(tmp_path, (FUTURES | ODD)[request.param])


@pytest.fixture(params=[*FUTURES, *ODD, *PARTS])
def any_part(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> pathlib.Path:
    """A run as in `any_run`, or one whose newest step has another part of a later version."""
    if request.param in PARTS:
        run = made(tmp_path, lambda m: m)
        PARTS[request.param](run / "step-00000003")
        return run
    return made(tmp_path, (FUTURES | ODD)[request.param])


def made(tmp_path: pathlib.Path, future: Callable[[Any], Any]) -> pathlib.Path:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, TREE, metrics={"loss": 1.0})
    newest = tmp_path / "run" / "step-00000003"
    change(newest / "treering.json", future)
    # Without a readable manifest, this file may belong to the checkpoint, so it must stay.
    (newest / "arrays-abcdef-00000-of-00001.safetensors").write_bytes(b"perhaps a leftover")
    return tmp_path / "run"


def refused() -> Any:
    return pytest.raises(UnsupportedError, match="upgrade treering")


@pytest.mark.long
@pytest.mark.whole
def test_it_is_never_passed_over(any_run: pathlib.Path) -> None:
    run = any_run
    before = listing(run)
    assert tr.steps(run) == [1, 2, 3]
    for use in (tr.open, tr.restore, tr.verify, lambda path: list(tr.follow(path, timeout=0))):
        with refused():
            use(run)
    for use in (tr.open, tr.restore, tr.verify):
        with refused():
            use(run / "step-00000003")
    with refused():
        tr.restore(run, step=3)
    with tr.Checkpointer(run) as ckpts:
        for call in (ckpts.restore, ckpts.open, lambda: ckpts.restore_or_init(lambda: TREE)):
            with refused():
                call()
        assert ckpts.steps == [1, 2, 3] and ckpts.latest_step == 3
    assert tr.restore(run, step=2)["n"] == 3 and listing(run) == before


@pytest.mark.long
def test_it_is_never_replaced_moved_or_deleted(any_part: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    run = any_part
    newest = run / "step-00000003"
    before = listing(newest)
    with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:
        with pytest.raises(ExistsError, match="step 3 is saved already"):
            ckpts.save(3, TREE)
        with refused():
            ckpts.save(3, TREE, on_exists="overwrite")
        assert ckpts.save(3, TREE, on_exists="skip") is None
        for call in (ckpts.rewind, ckpts.delete):
            with refused():
                call(2 if call == ckpts.rewind else 3)
        for step in (4, 5, 6):
            ckpts.save(step, TREE)
            ckpts.wait()
    assert tr.steps(run) == [3, 6] and listing(newest) == before
    assert "step 3 cannot be read by this release and is left alone" in caplog.text
    with refused():
        tr.save(newest, TREE, overwrite=True)
    with refused():
        tr.save_async(newest, TREE, overwrite=True).result()
    assert listing(newest) == before


@pytest.mark.long
@pytest.mark.whole
def test_it_is_not_the_best_and_gets_no_metrics(run: pathlib.Path) -> None:
    before = listing(run / "step-00000003")
    with tr.Checkpointer(run, keep=tr.keep.best(1, "loss", "min")) as ckpts:
        with refused():
            tr.record(run, 3, {"loss": 0.0})
        for step in (4, 5):
            ckpts.save(step, TREE, metrics={"loss": float(step)})
            ckpts.wait()
        assert ckpts.best_step("loss", "min") == 2
    assert tr.steps(run) == [2, 3, 5] and listing(run / "step-00000003") == before


@pytest.mark.long
@pytest.mark.whole
def test_calls_are_refused_before_a_step_of_a_later_version(any_part: pathlib.Path) -> None:
    """No call can archive, replace or delete a step of a later version, or save after a restore of an older step."""
    run = any_part
    before = listing(run)
    with tr.Checkpointer(run) as ckpts:
        with refused():
            ckpts.rewind(2)
        with refused():
            ckpts.delete(3)
        with refused():
            ckpts.save(3, TREE, on_exists="overwrite")
    assert listing(run) == before
    ckpts = tr.Checkpointer(run)
    ckpts.restore(step=2)
    with refused():
        ckpts.save(3, TREE)
    with refused():
        ckpts.save(7, TREE)
    ckpts.close()
    assert listing(run) == before


def test_the_message_names_the_release(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", TREE)
    change(tmp_path / "c" / "treering.json", lambda m: m.update(version=2, software={"treering": "7.1"}))
    with pytest.raises(UnsupportedError, match=r"found version 2; it is undamaged: treering 7\.1 wrote it"):
        tr.open(tmp_path / "c")


def test_damage_is_still_damage(tmp_path: pathlib.Path) -> None:
    for step in (1, 2):
        tr.save(tmp_path / f"step-0000000{step}", TREE)
    file = tmp_path / "step-00000002" / "treering.json"
    change(file, lambda m: m.update(version=2))
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        tr.open(tmp_path / "step-00000002")
    assert tr.open(tmp_path).path.endswith("step-00000001")


@pytest.mark.long
def test_late_metrics_of_a_later_version(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, TREE, metrics={"loss": float(step)})
    for about in LATER_METRICS:
        file = add_metrics(tmp_path / "run" / "step-00000001", about)
        caplog.clear()
        assert tr.open(tmp_path / "run" / "step-00000001").metrics == {"loss": 1.0}
        assert "metrics that were recorded are left out" in caplog.text
        with refused():
            tr.verify(tmp_path / "run")
        before = listing(tmp_path / "run" / "step-00000001")
        with tr.Checkpointer(tmp_path / "run", keep=tr.keep.best(1, "loss", "max")) as ckpts:
            ckpts.save(3, TREE, metrics={"loss": 3.0}, on_exists="overwrite")
        assert listing(tmp_path / "run" / "step-00000001") == before, "its metrics are unknown, so it must stay"
        file.unlink()


def test_late_metrics_without_a_version_are_of_the_first(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", TREE)
    identity = manifest.xxh3((tmp_path / "c" / "treering.json").read_bytes())
    name = f"metrics-{identity}-{1:020}-abcdef.json"
    (tmp_path / "c" / name).write_bytes(sealed({"metrics": {"loss": 0.5}}))
    assert tr.open(tmp_path / "c").metrics == {"loss": 0.5}


@pytest.mark.parametrize("about", LATER_HEADERS)
def test_array_files_of_a_later_version(tmp_path: pathlib.Path, about: Any) -> None:
    for step in (1, 2):
        tr.save(tmp_path / f"step-0000000{step}", TREE)
    file = change_header(tmp_path / "step-00000002", about)
    for use in (tr.restore, tr.verify):
        with refused():
            use(tmp_path)
    with refused():
        tr.save(tmp_path / "step-00000002", TREE, overwrite=True)
    with tr.Checkpointer(tmp_path) as ckpts, refused():
        ckpts.restore()
    assert tr.open(tmp_path)["n"] == 3  # Leaves that are not in that file can be read.
    data = bytearray(file.read_bytes())
    data[20] ^= 1  # Now the header is damaged, so it cannot show the version that wrote it.
    file.write_bytes(data)
    assert not tr.verify(tmp_path).ok
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.delete(2)
    assert tr.steps(tmp_path) == [1]


def test_what_cannot_be_verified_hides_no_damage(any_run: pathlib.Path) -> None:
    """`verify` of a run reports the damage of other steps even if one step is of a later version."""
    (file,) = (any_run / "step-00000001").glob("arrays-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    (any_run / "step-00000002" / "treering.json").write_bytes(b"{}")
    with refused() as raised:
        tr.verify(any_run)
    message = str(raised.value)
    assert "1 of 3 checkpoints cannot be checked" in message and "step-00000003/treering.json" in message
    assert "2 problems" in message and file.name in message and "step-00000002/treering.json" in message


def test_later_array_file_hides_no_damage_of_others(tmp_path: pathlib.Path) -> None:
    """`verify` reports damaged metrics of a checkpoint even if its array file is of a later version."""
    tr.save(tmp_path / "step-1", TREE)
    change_header(tmp_path / "step-1", {"version": "2"})
    tr.record(tmp_path, 1, {"loss": 1.0})
    (metrics,) = (tmp_path / "step-1").glob("metrics-*.json")
    metrics.chmod(0o644)
    metrics.write_bytes(b"{}")
    for path in (tmp_path, tmp_path / "step-1"):
        with refused() as raised:
            tr.verify(path)
        assert ", 1 problem\n" in str(raised.value) and metrics.name in str(raised.value)


@pytest.mark.long
def test_a_writers_lock_of_a_later_version(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, TREE)
    lock = tmp_path / LOCK_NAME
    abouts: list[dict[str, Any]] = [{"version": 2}, {"version": 1, "requires": ["lease"]}, {"version": "1"}]
    abouts += [{"version": True}, {"requires": "zstd"}]
    texts = [json.dumps(about) for about in abouts]
    texts += [json.dumps(about | {"leases": list(range(n))}) for about in abouts for n in (1000, 300_000)]
    texts += [json.dumps({"leases": list(range(n)), "version": 2})[:-1] for n in (1000, 300_000)]  # cut off
    for text in texts:
        lock.write_text(text)
        calls: list[Callable[[tr.Checkpointer], object]] = [
            lambda ckpts: ckpts.save(2, TREE),
            lambda ckpts: ckpts.save(1, TREE, on_exists="overwrite"),
            lambda ckpts: ckpts.rewind(1),
            lambda ckpts: ckpts.finish(),
        ]
        for call in calls:
            with tr.Checkpointer(tmp_path, keep=tr.keep.last(1)) as ckpts, refused():
                call(ckpts)
            assert lock.read_text() == text and tr.steps(tmp_path) == [1]
        assert tr.restore(tmp_path)["n"] == 3
    for killed in ("", '{"host":"a","process":1,"since":"x"}', '{"ver'):  # left by killed jobs of this release
        lock.write_text(killed)
        with tr.Checkpointer(tmp_path) as ckpts:
            ckpts.save(2, TREE, on_exists="overwrite")
        assert not lock.exists()


def test_the_log_says_why_a_step_does_not_count(run: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Retention logs that it ignores a step of a later version."""
    with caplog.at_level(logging.WARNING), tr.Checkpointer(run, keep=tr.keep.last(5)) as ckpts:
        ckpts.save(4, TREE)
    assert "step 3 cannot be read by this release and is left alone" in caplog.text
