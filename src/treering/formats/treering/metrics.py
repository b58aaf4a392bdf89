"""Metrics that are added after a checkpoint was saved, in files next to the manifest. `docs/format.md` specifies them.

The name of such a file has the identity of the manifest that it belongs to, and the time when it was written.
"""

import contextlib
import os
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import read_file
from ...stores.read_errors import reading
from ...stores.store import Store
from .._shared import strict_json
from . import manifest, validity
from .save_files import SaveFiles, write_small_file
from .schema import METRICS

_FORMAT = "treering-metrics"


class _File(msgspec.Struct, frozen=True):
    metrics: dict[str, float | str]
    format: str = _FORMAT
    version: int = manifest.VERSION


preload_decoders(_File)


def write(store: Store, path: str, identity: str, metrics: Mapping[str, float | str]) -> None:
    """Adds metrics, durably, to the checkpoint whose manifest has the checksum `identity`."""
    token, data = os.urandom(3).hex(), manifest.seal(_File(dict(metrics)))
    _put(store, path, token, data, lambda: f"metrics-{identity}-{time.time_ns():020}-{token}.json")


def _put(store: Store, path: str, token: str, data: bytes, name: Callable[[], str]) -> None:
    """Writes a file of metrics durably. Calls `name` only when its bytes are on disk."""
    files = SaveFiles(store, path, token)
    try:
        sink = files.create(f"metrics.json.{token}.tmp")
        write_small_file(sink, data)
        # The name has the time. It is taken now so that the order of the names is the order of publishing: of two
        # values of one metric, readers take the later one.
        sink.publish(posixpath.join(path, name()), overwrite=False)
    finally:
        files.abort()  # This removes the temporary name and keeps the published one.
    store.settle(path)


def copy(source: Store, path: str, target: Store, to: str, identity: str) -> None:
    """Copies the metrics that were added to a checkpoint to a copy of it that lacks them."""
    existing = set(names(target, to, identity))
    for name in names(source, path, identity):
        if name not in existing:
            # Another process may have deleted the source, or copied it first.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                data = read_file(source, posixpath.join(path, name))
                _put(target, to, os.urandom(3).hex(), data, lambda name=name: name)


def names(store: Store, path: str, identity: str) -> list[str]:
    """Returns the names of the metrics files of a checkpoint, the oldest first."""
    with reading(path):
        listed = store.list(path)
    found = (match for name in listed if (match := METRICS.fullmatch(name)))
    return [match[0] for match in sorted(found, key=lambda match: (match[2], match[0])) if match[1] == identity]


def read(
    store: Store, path: str, identity: str
) -> Iterator[tuple[str, dict[str, float] | CorruptError | UnsupportedError]]:
    """Yields each metrics file and its metrics, or the error that reading it raised. The oldest file comes first."""
    for name in names(store, path, identity):
        file = posixpath.join(path, name)
        try:
            data = read_file(store, file)
            manifest.check(data, file)
            manifest.check_envelope(data, file, _FORMAT, default=manifest.VERSION)
            found = msgspec.convert(strict_json.parse(data), _File).metrics
            yield name, validity.metrics(found)
        except FileNotFoundError:
            continue  # Another process has deleted it together with its checkpoint.
        except (CorruptError, UnsupportedError) as error:
            yield name, error
        except strict_json.MALFORMED as error:
            yield name, manifest.invalid(f"{file}: {error}")
