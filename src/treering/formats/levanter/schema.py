"""The metadata file in Levanter's folders."""

import datetime
import posixpath
import re

import msgspec

from ..._core.source import Source
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store

FILE = "metadata.json"
MAX_METADATA_BYTES = 1 << 16  # bytes of that file
NAME = re.compile(r"step-([0-9]+)")


class LevanterMetadata(msgspec.Struct):
    """The contents of ``metadata.json``. Levanter removes temporary checkpoints when it writes a later one."""

    step: int
    timestamp: str
    is_temporary: bool = False

    def time(self) -> datetime.datetime:
        """Returns the time of writing; `datetime.min` if it cannot be parsed."""
        try:
            time = datetime.datetime.fromisoformat(self.timestamp)
        except ValueError:
            time = datetime.datetime.min
        return time.replace(tzinfo=time.tzinfo or datetime.UTC)


preload_decoders(LevanterMetadata)


def own_metadata(contents: Source) -> tuple[str, bool] | None:
    """Returns the timestamp of a Levanter checkpoint and whether it is temporary; None for any other metadata."""
    about = contents.metadata
    if not isinstance(about, dict) or about.keys() != {"timestamp", "is_temporary"}:
        return None
    timestamp, temporary = about["timestamp"], about["is_temporary"]
    return (timestamp, temporary) if type(timestamp) is str and type(temporary) is bool else None


def read_metadata(store: Store, path: str) -> LevanterMetadata:
    """Reads ``metadata.json``. Raises `CorruptError`."""
    file = posixpath.join(path, FILE)
    with reading(file), opened(store, file) as blob:
        data = blob.read_up_to(MAX_METADATA_BYTES)
    try:
        about = msgspec.json.decode(data, type=LevanterMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{file}: expected step and timestamp of a Levanter checkpoint: {error}") from None
    if about.step < 0:
        raise CorruptError(f"{file}: expected a step, found {about.step}")
    return about
