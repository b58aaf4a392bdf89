"""Metrics that are added after a checkpoint was saved, in files beside the manifest. `docs/format.md` specifies them.

The name of such a file gives the manifest that it belongs to, and the time when it was written.
"""

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping

import msgspec

from ...errors import CorruptError, UnsupportedError
from ...stores.buffers import aligned
from ...stores.posix import Disk
from ...stores.read_errors import reading
from ...stores.whole_files import read_file
from .._shared import strict_json
from . import manifest, validity
from .new_files import Files

_NAME = re.compile(r"metrics-([0-9a-f]{16})-([0-9]{20})-[0-9a-f]{6}\.json")


_FORMAT = "treering-metrics"


class _File(msgspec.Struct, frozen=True):
    metrics: dict[str, float | str]
    format: str = _FORMAT
    version: int = manifest.VERSION


def write(disk: Disk, path: str, identity: str, metrics: Mapping[str, float | str]) -> None:
    """Adds metrics, durably, to the checkpoint whose manifest has the checksum `identity`."""
    token = secrets.token_hex(3)
    data = manifest.seal(_File(dict(metrics)))
    buffer = aligned(len(data))
    buffer[: len(data)] = data
    temporary = os.path.join(path, f"metrics.json.{token}.tmp")
    files = Files(disk, path, token)
    try:
        fd = files.create(os.path.basename(temporary))
        disk.write(fd, buffer, 0)
        disk.truncate(fd, len(data))
        disk.make_read_only(fd)
        disk.sync(fd)
        disk.link(temporary, os.path.join(path, f"metrics-{identity}-{time.time_ns():020}-{token}.json"))
    finally:
        files.abort()  # of the two names, the temporary one
    disk.sync_dir(path)


def names(disk: Disk, path: str, identity: str) -> list[str]:
    """The files that belong to a checkpoint, the oldest first."""
    with reading(path):
        listed = disk.list(path)
    found = (match for name in listed if (match := _NAME.fullmatch(name)))
    return [match[0] for match in sorted(found, key=lambda match: (match[2], match[0])) if match[1] == identity]


def read(
    disk: Disk, path: str, identity: str
) -> Iterator[tuple[str, dict[str, float] | CorruptError | UnsupportedError]]:
    """The files and their metrics, or the error in reading them, the oldest first."""
    for name in names(disk, path, identity):
        file = os.path.join(path, name)
        try:
            data = read_file(disk, file)
            manifest.check(data, file)
            manifest.check_envelope(data, file, _FORMAT, default=manifest.VERSION)
            found = msgspec.convert(strict_json.parse(data), _File).metrics
            yield name, validity.metrics(found)
        except FileNotFoundError:
            continue  # deleted with its checkpoint meanwhile
        except (CorruptError, UnsupportedError) as error:
            yield name, error
        except strict_json.MALFORMED as error:
            yield name, manifest.invalid(f"{file}: {error}")
