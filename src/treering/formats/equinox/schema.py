"""The beginning of an `.eqx` file: the optional line of JSON."""

import json
from typing import Any

from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store
from .._shared.file_signatures import NPY_MAGIC as MAGIC

NAME = "equinox"
SUFFIX = ".eqx"
MAX_LINE_BYTES = 1 << 20  # bytes of the line of JSON; longer lines are not recognized


def line_before(store: Store, path: str) -> tuple[Any, int]:
    """Returns the value of the line of JSON, and the offset of the records. Raises `ValueError` for other files."""
    begin = _begin(store, path, len(MAGIC))
    if begin.startswith(MAGIC):
        return None, 0
    if begin[:1] not in b'{["0123456789-tfnNI':
        raise ValueError("it begins neither with an .npy record nor with a line of JSON")
    begin = _begin(store, path, MAX_LINE_BYTES)
    line, end, rest = begin.partition(b"\n")
    if not rest and not path.endswith(SUFFIX):
        raise ValueError(f"it has no .npy record, and its name does not end in {SUFFIX}")
    if not begin:
        return None, 0
    if not end or not MAGIC.startswith(rest[: len(MAGIC)]):
        raise ValueError(f"no .npy record follows its first line, of at most {MAX_LINE_BYTES} bytes")
    try:
        return json.loads(line), len(line) + 1
    except (ValueError, RecursionError):
        raise ValueError("its first line is not JSON") from None


def _begin(store: Store, path: str, size: int) -> bytes:
    with reading(path), opened(store, path) as blob:
        return blob.read_up_to(size)
