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
from ...stores.read_errors import reading
from ...stores.store import Store
from ...stores.whole_files import read_file
from .._shared import strict_json
from . import manifest, validity
from .new_files import Files, write_whole

_NAME = re.compile(r"metrics-([0-9a-f]{16})-([0-9]{20})-[0-9a-f]{6}\.json")


_FORMAT = "treering-metrics"


class _File(msgspec.Struct, frozen=True):
    metrics: dict[str, float | str]
    format: str = _FORMAT
    version: int = manifest.VERSION


def write(store: Store, path: str, identity: str, metrics: Mapping[str, float | str]) -> None:
    """Adds metrics, durably, to the checkpoint whose manifest has the checksum `identity`."""
    token = secrets.token_hex(3)
    data = manifest.seal(_File(dict(metrics)))
    files = Files(store, path, token)
    try:
        sink = files.create(f"metrics.json.{token}.tmp")
        write_whole(sink, data)
        name = f"metrics-{identity}-{time.time_ns():020}-{token}.json"  # the last to be published counts
        sink.publish(os.path.join(path, name), overwrite=False)
    finally:
        files.abort()  # of the two names, the temporary one
    store.settle(path)


def names(store: Store, path: str, identity: str) -> list[str]:
    """The files that belong to a checkpoint, the oldest first."""
    with reading(path):
        listed = store.list(path)
    found = (match for name in listed if (match := _NAME.fullmatch(name)))
    return [match[0] for match in sorted(found, key=lambda match: (match[2], match[0])) if match[1] == identity]


def read(
    store: Store, path: str, identity: str
) -> Iterator[tuple[str, dict[str, float] | CorruptError | UnsupportedError]]:
    """The files and their metrics, or the error in reading them, the oldest first."""
    for name in names(store, path, identity):
        file = os.path.join(path, name)
        try:
            data = read_file(store, file)
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
