"""Crashes while versions of weights are published, and while a directory is made the newest one."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treering import keep
from treering._publish.follower import follow_weights
from treering._publish.publisher import Publisher
from treering._publish.pull import pull
from treering._run.open import open_checkpoint
from treering._run.run_layout import steps
from treering._save.save import save
from treering._tools.verify import verify
from treering.errors import NotFoundError, TreeringError

from .recording import RecordingDisk, View
from .scenarios import NOTHING, Broken, Record, Scenario

Save = Callable[[Path, int], None]
_STREAM, _DIRECTORY = "streams/policy", "engine"


def streams() -> Iterator[Scenario]:
    """Yields the scenarios of a `Publisher` and of `treering pull`. A view lists the versions, "1 2 3"."""
    yield _of_stream("stream: publishing", _publishing)
    yield _of_stream("stream: keeping the last", _retaining, before=(1, 2, 3))
    yield _of_stream("stream: an error of the disk, publishing", _failing, before=(1,), broken="failing")
    yield _of_stream("stream: killed, then published", _killed, before=(1, 2), broken="killed")
    for format, name in (("slime", "weight_v{:06d}"), ("skyrl", "delta-{:08d}")):
        yield _of_versions(format, name, _saving)
        yield _of_versions(format, name, _killed_saving, broken="killed")
    yield _of_directory("pull: first version", _pulling(NOTHING, "2"), before=(1, 2))
    yield _of_directory("pull: a later version", _pulling("1", "2"), before=(1,), after=(2,))
    yield _of_directory("pull: killed, then pulled", _killed_pulling, before=(1,), after=(2,), broken="killed")


def _of_stream(name: str, record: Record, *, before: Sequence[int] = (), broken: Broken = "") -> Scenario:
    return Scenario(
        name=name,
        record=lambda root, disk: record(root / _STREAM, disk),
        look=lambda root: _look_at(root / _STREAM),
        again=lambda root, seen: _publish_again(root / _STREAM, seen),
        prepare=lambda root: _publish(root / _STREAM, *before),
        broken=broken,
        subject="stream",
    )


def _of_versions(format: str, name: str, record: Callable[[Path, RecordingDisk, Save], None], **how: Any) -> Scenario:
    """Versions for the receivers of PyTorch's trainers."""

    def save_version(stream: Path, version: int) -> None:
        save(stream / name.format(version), _weights(version), format=format, overwrite=True)

    def again(root: Path, seen: View) -> None:
        following = int(seen.split()[-1]) + 1
        save_version(root / _STREAM, following)
        assert _look_at(root / _STREAM) == f"{seen} {following}"

    return Scenario(
        name=f"stream for {format}: {'killed, then saved' if how else 'saving'}",
        record=lambda root, disk: record(root / _STREAM, disk, save_version),
        look=lambda root: _look_at(root / _STREAM),
        again=again,
        prepare=lambda root: save_version(root / _STREAM, 0),
        subject=f"stream for {format}",
        **how,
    )


def _of_directory(
    name: str, record: Record, *, before: Sequence[int], after: Sequence[int] = (), broken: Broken = ""
) -> Scenario:
    def prepare(root: Path) -> None:
        _publish(root / _STREAM, *before)
        if after:
            list(pull(root / _STREAM, root / _DIRECTORY))
            _publish(root / _STREAM, *after)

    return Scenario(
        name=name,
        record=record,
        look=lambda root: _look_at_directory(root / _DIRECTORY),
        again=lambda root, seen: _pull_again(root),
        prepare=prepare,
        broken=broken,
        subject="pull",
    )


def _weights(version: int) -> dict[str, Any]:
    """Returns a version, of which few elements are others than in the one before."""
    w = np.linspace(-1, 1, 3000, dtype=np.float32)
    w[: 7 * version : 7] = version
    return {"w": w, "same": np.arange(400.0), "n": np.asarray(version)}


def _publish(stream: Path, *versions: int, **options: Any) -> None:
    with Publisher(stream, full_every=3, **options) as publisher:
        for version in versions:
            publisher.publish(version, _weights(version))


def _is_version(tree: Any, version: int) -> bool:
    wanted = _weights(version)
    return all(np.array_equal(tree[name], wanted[name]) for name in wanted)


def _look_at(stream: Path) -> View:
    seen = steps(stream)
    for version in seen:
        report = verify(open_checkpoint(stream, step=version).path)
        assert report.ok, report
        assert _is_version(open_checkpoint(stream, step=version).restore(), version)
    followed = list(follow_weights(stream, timeout=0))
    assert [one.version for one in followed] == seen[-1:] and all(
        _is_version(one.tree, one.version) for one in followed
    )
    return " ".join(map(str, seen)) or NOTHING


def _publish_again(stream: Path, before: View) -> None:
    _publish(stream, 99)
    assert _look_at(stream) == " ".join([*(word for word in before.split() if word != NOTHING), "99"])


def _look_at_directory(directory: Path) -> View:
    try:
        ckpt = open_checkpoint(directory)
    except NotFoundError:
        return NOTHING
    version = int(ckpt.metadata["version"])
    wanted = _weights(version)
    assert verify(directory).ok and all(np.array_equal(ckpt[name][...], wanted[name]) for name in ("w", "same"))
    return str(version)


def _pull_again(root: Path) -> None:
    _publish(root / _STREAM, 99)
    assert [version for version, _ in pull(root / _STREAM, root / _DIRECTORY)] == [99]
    assert _look_at_directory(root / _DIRECTORY) == "99"


# What happens


def _publishing(stream: Path, disk: RecordingDisk) -> None:
    seen = [NOTHING, "1", "1 2", "1 2 3"]
    disk.expect(NOTHING)
    with Publisher(stream, full_every=3) as publisher:
        for version in (1, 2, 3):
            disk.expect(seen[version - 1], seen[version])
            publisher.publish(version, _weights(version))
            publisher.wait()
            disk.expect(seen[version])


def _retaining(stream: Path, disk: RecordingDisk) -> None:
    """A complete version comes, and the chain before it goes."""
    disk.expect("1 2 3", "1 2 3 4", "1 2 4", "1 4", "4")
    _publish(stream, 4, keep=keep.last(1))
    disk.expect("4")


def _failing(stream: Path, disk: RecordingDisk) -> None:
    """A version that failed is missing; the next one is made from one that is there."""
    seen = [1]
    disk.expect("1")
    with contextlib.suppress(TreeringError, OSError), Publisher(stream, full_every=9) as publisher:
        for version in (2, 3):
            now = " ".join(map(str, seen))
            disk.expect(now, f"{now} {version}")
            with contextlib.suppress(TreeringError, OSError):
                publisher.publish(version, _weights(version))
                publisher.wait()
            seen = steps(stream)
            disk.expect(" ".join(map(str, seen)))


def _killed(stream: Path, disk: RecordingDisk) -> None:
    disk.expect("1 2", "1 2 3")
    with contextlib.suppress(TreeringError, OSError):
        _publish(stream, 3)
    disk.revive()
    is_there = steps(stream) == [1, 2, 3]
    seen = "1 2 3" if is_there else "1 2"
    disk.expect("1 2", seen, f"{seen} 4")
    _publish(stream, 4)
    disk.expect(f"{seen} 4")


def _saving(stream: Path, disk: RecordingDisk, save_version: Save) -> None:
    disk.expect("0", "0 1")
    save_version(stream, 1)
    disk.expect("0 1", "0 1 2")
    save_version(stream, 2)
    disk.expect("0 1 2")


def _killed_saving(stream: Path, disk: RecordingDisk, save_version: Save) -> None:
    disk.expect("0", "0 1")
    with contextlib.suppress(TreeringError, OSError):
        save_version(stream, 1)
    disk.revive()
    save_version(stream, 1)
    disk.expect("0 1")


def _pulling(before: View, after: View) -> Callable[[Path, RecordingDisk], None]:
    def record(root: Path, disk: RecordingDisk) -> None:
        disk.expect(before, after)
        list(pull(root / _STREAM, root / _DIRECTORY))
        disk.expect(after)

    return record


def _killed_pulling(root: Path, disk: RecordingDisk) -> None:
    disk.expect("1", "2")
    with contextlib.suppress(TreeringError, OSError):
        list(pull(root / _STREAM, root / _DIRECTORY))
    disk.revive()
    list(pull(root / _STREAM, root / _DIRECTORY))
    disk.expect("2")
