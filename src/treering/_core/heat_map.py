"""Draws the numbers of an array as a picture for notebooks, in the colors of the viewer's heat maps."""

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

from .units import number

if TYPE_CHECKING:
    import numpy as np

_MAX_CELLS = 128  # on a side of a picture
# Below zero, zero or the end next to it, above zero, not finite.
_BELOW, _MIDDLE, _ABOVE, _ODD = (33, 102, 172), (240, 238, 232), (178, 60, 43), (255, 0, 200)


def heat_map(array: "np.ndarray[Any, Any]") -> str:
    """Returns the HTML of a picture of an array: the last axis from left to right. A cell is a mean."""
    import numpy as np

    values = np.abs(array) if "complex" in array.dtype.name else array
    columns = array.shape[-1] if array.ndim > 1 else min(array.size, _MAX_CELLS)
    rows = -(-array.size // columns)
    flat = np.full(rows * columns, np.nan)
    flat[: array.size] = values.reshape(-1)
    cells, is_padding = flat.reshape(rows, columns), np.arange(rows * columns).reshape(rows, columns) >= array.size
    is_odd = ~np.isfinite(cells) & ~is_padding
    sums, odd, used = (
        _join_cells(one) for one in (np.where(np.isfinite(cells), cells, 0.0), is_odd, ~(is_odd | is_padding))
    )
    means = sums / np.maximum(used, 1)
    known = means[used > 0]
    if not known.size:
        return ""
    low, high = float(known.min()), float(known.max())
    if low < 0 < high:
        share, end = np.abs(means) / max(-low, high), np.where(means < 0, -1, 1)
    else:
        share, end = (means - low) / ((high - low) or 1.0), np.ones_like(means)
        share, end = (1 - share, -end) if high <= 0 else (share, end)
    tints = np.where(end[..., None] < 0, _BELOW, _ABOVE)
    pixels = np.asarray(_MIDDLE) + share[..., None] * (tints - np.asarray(_MIDDLE))
    pixels[odd > 0] = _ODD
    pixels[(used == 0) & (odd == 0)] = 128
    source = base64.b64encode(_png(pixels.round().astype(np.uint8))).decode()
    range_text = f"{'means of cells ' if means.size < array.size else ''}{number(low)} to {number(high)}"
    style = "width:256px;max-width:100%;image-rendering:pixelated;border:1px solid #8888"
    image = f'<img alt="heat map, {range_text}" style="{style}" src="data:image/png;base64,{source}">'
    return f"{image}<div>{range_text}</div>"


def _join_cells(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Adds up neighbors, so that no side has more than `_MAX_CELLS`."""
    import numpy as np

    for axis in (0, 1):
        size = values.shape[axis]
        if size > _MAX_CELLS:
            values = np.add.reduceat(
                values, [n * size // _MAX_CELLS for n in range(_MAX_CELLS)], axis, dtype=np.float64
            )
    return values.astype(np.float64)


def _png(pixels: "np.ndarray[Any, Any]") -> bytes:
    """Encodes rows of RGB pixels of 8 bits."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
