"""Recognizes common files that are not checkpoints, and says what to do with them."""

import posixpath
import re

from ...errors import TreeringError
from ...stores.file_io import opened
from ...stores.store import Store
from ..torch.schema import CHUNKS, PICKLE, RESAVE, SAVE_SCRIPT

NPY_MAGIC = b"\x93NUMPY"
_PICKLE_ADVICE = "a pickle, which is never opened because that could run any code"
_UNPACK_ADVICE = "unpack it first"
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", f"a file of PyTorch before 1.6, {_PICKLE_ADVICE}; {RESAVE}"),
    *(
        (0, bytes([0x80, n]), f"{_PICKLE_ADVICE}; load it in the program that wrote it; save its arrays")
        for n in range(2, 6)
    ),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5 (Keras, h5py); load it with h5py, and save its arrays"),
    (0, NPY_MAGIC, "an array of NumPy; load it with numpy.load, and save it"),
    (0, b"GGUF", "GGUF, the format of llama.cpp; open the model that it was made from"),
    (0, b"\x1f\x8b", f"compressed by gzip; {_UNPACK_ADVICE}"),
    (0, b"BZh", f"compressed by bzip2; {_UNPACK_ADVICE}"),
    (0, b"\xfd7zXZ\0", f"compressed by xz; {_UNPACK_ADVICE}"),
    (0, b"\x28\xb5\x2f\xfd", f"compressed by zstd; {_UNPACK_ADVICE}"),
    (0, b"7z\xbc\xaf\x27\x1c", f"a 7z archive; {_UNPACK_ADVICE}"),
    (257, b"ustar", f"a tar archive; {_UNPACK_ADVICE}"),
    (0, b"<!DOCTYPE", "a page of HTML, as a failed download leaves it; fetch the file again"),
    (0, b"<html", "a page of HTML, as a failed download leaves it; fetch the file again"),
)
_HEAD_BYTES = 512  # that are read of a file, enough for each of these beginnings
_MAX_NAMES = 1000  # files that are looked at in a folder
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_SUFFIXES = (
    *_TORCH_SUFFIXES,
    *(".pkl", ".pickle", ".h5", ".keras", ".npz", ".gguf", ".zip", ".tar", ".gz", ".tgz"),
)


def describe(store: Store, path: str) -> str | None:
    """Describes the file at a path, or the first known one in a folder, and what to do with it.

    Returns None for a file of an unknown kind, and for one that cannot be read.
    """
    try:
        found = store.stat(path)
        if found is None:
            return None
        if found.is_file:
            what = _describe_file(store, path)
            return f"it is {what}" if what else None
        if not found.is_folder:
            return None
        for name in sorted(name for name in store.list(path) if name.endswith(_OTHER_SUFFIXES))[:_MAX_NAMES]:
            inner = posixpath.join(path, name)
            there = store.stat(inner)
            if there is not None and there.is_file and (what := _describe_file(store, inner)):
                return f"{name} in it is {what}"
    except (TreeringError, OSError, ValueError):
        pass  # The message that this text is for already has the errors that the formats met.
    return None


def is_other(data: bytes) -> bool:
    """Returns True if these are the first bytes of a known kind of file that is not a checkpoint."""
    return any(data[at:].startswith(magic) for at, magic, _ in _SIGNATURES)


def _describe_file(store: Store, path: str) -> str | None:
    with opened(store, path) as blob:
        begin = blob.read_up_to(_HEAD_BYTES)
    if not begin:
        return "empty; fetch it again"
    if begin.startswith(b"PK\x03\x04"):
        return _describe_zip(begin, path)
    return next((what for at, magic, what in _SIGNATURES if begin[at:].startswith(magic)), None)


def _describe_zip(begin: bytes, path: str) -> str:
    """Describes an archive by the name of the first file in it."""
    first = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
    if first.endswith(b".npy"):
        return "an archive of NumPy (.npz); open it by its own path"
    if first.endswith(PICKLE.encode()):
        return f"a file of PyTorch; open {'its folder' if path.endswith(CHUNKS) else 'it by its own path'}"
    if re.fullmatch(rb"[^/]+/data/0", first) and path.endswith(_TORCH_SUFFIXES):
        return f"probably a program of TorchScript; {SAVE_SCRIPT}"
    if first in (b"metadata.json", b"config.json") and path.endswith(".keras"):
        return "a model of Keras; load it with Keras, and save its arrays"
    return f"a zip archive; {_UNPACK_ADVICE}"
