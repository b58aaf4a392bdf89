"""Unpacks zstd frames of a known size, by the package `zstandard`."""

from typing import Any

import numpy as np

from ...errors import CorruptError, UnsupportedError


def zstandard() -> Any:
    """Returns the package. Raises `UnsupportedError` if it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            "published weights need the package zstandard: pip install 'treering[publish]'"
        ) from None
    return zstandard


def unpack(packed: np.ndarray, nbytes: int | None, *, max_bytes: int = 0) -> np.ndarray:
    """Returns the contents of a frame. Raises `CorruptError` unless they have `nbytes` bytes, or at most `max_bytes`.

    The size is looked at before memory is taken for it.
    """
    package = zstandard()
    try:
        size = package.get_frame_parameters(packed.data).content_size
        if size != nbytes if nbytes is not None else size > max_bytes:
            expected = f"{nbytes} bytes" if nbytes is not None else f"at most {max_bytes} bytes"
            raise CorruptError(f"expected a zstd frame of {expected}, found one of {size}")
        data = package.ZstdDecompressor().decompress(packed.data, max_output_size=size)
    except package.ZstdError as error:
        raise CorruptError(f"the zstd frame cannot be unpacked: {error}") from None
    if len(data) != size:
        raise CorruptError(f"expected a zstd frame of {size} bytes, found one of {len(data)}")
    return np.frombuffer(data, np.uint8)
