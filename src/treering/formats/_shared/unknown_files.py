"""Recognizes common files that are not checkpoints, and says what to do with them."""

import itertools
import posixpath
import re
from collections.abc import Callable, Collection

from ..._core.leaf_paths import join_names
from ...errors import TreeringError
from ...stores.file_io import is_folder, opened
from ...stores.store import Store

TORCH_PICKLE = "/data.pkl"  # ends the name of the pickle in an archive
TORCH_CHUNKS = ".distcp"  # ends the names of files that have one archive after another
RESAVE_TORCH = (
    "save it again where PyTorch is, and open the new file: torch.save(torch.load(path, weights_only=True), 'model.pt')"
)
_JOIN_TORCH = "open each by its own path, and join the dicts that restore returns: first | second"
_INCOMPLETE_DCP = (
    "a distributed checkpoint of PyTorch without its file .metadata, which a copy of dir/* leaves out, and which is "
    "written last; get a complete copy of it"
)
_SAVE_SCRIPT = (
    "where PyTorch is, save its tensors, and open the new file: "
    "torch.save(torch.jit.load(path).state_dict(), 'model.pt')"
)
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
NPY_MAGIC = b"\x93NUMPY"
_PICKLE_ADVICE = "a pickle, which is never opened because that could run any code"
_UNPACK_ADVICE = "unpack it first"
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", f"a file of PyTorch before 1.6, {_PICKLE_ADVICE}; {RESAVE_TORCH}"),
    *(
        (0, bytes([0x80, n]), f"{_PICKLE_ADVICE}; load it in the program that wrote it; save its arrays")
        for n in range(2, 6)
    ),
    (0, HDF5_MAGIC, "HDF5, as Keras writes it; open it by its own path"),
    (0, NPY_MAGIC, "an array of NumPy; load it with numpy.load, and save it"),
    (0, b"\x0c\xdb\x3a\x2a", "a file of an OCDBT database of TensorStore; open the folder that it is in"),
    (0, b"GGUF", "GGUF, the format of llama.cpp; open the model that it was made from"),
    (0, b"\x1f\x8b", f"compressed by gzip; {_UNPACK_ADVICE}"),
    (0, b"BZh", f"compressed by bzip2; {_UNPACK_ADVICE}"),
    (0, b"\xfd7zXZ\0", f"compressed by xz; {_UNPACK_ADVICE}"),
    (0, b"\x28\xb5\x2f\xfd", f"compressed by zstd; {_UNPACK_ADVICE}"),
    (0, b"7z\xbc\xaf\x27\x1c", f"a 7z archive; {_UNPACK_ADVICE}"),
    (0, b"MATLAB 5.0 MAT", "a file of MATLAB; load it with scipy.io.loadmat, and save its arrays"),
    (0, b"MATLAB 7.3 MAT", "a file of MATLAB, in HDF5; load it with h5py, and save its arrays"),
    (0, b"PAR1", "Parquet, a table; load it with pandas.read_parquet or pyarrow, and save its columns as arrays"),
    (0, b"ARROW1", "Arrow, a table; load it with pyarrow, and save its columns as arrays"),
    (4, b"TFL3", "a model of TensorFlow Lite; open the checkpoint that it was made from"),
    (257, b"ustar", f"a tar archive; {_UNPACK_ADVICE}"),
    (0, b"<!DOCTYPE", "a page of HTML, as a failed download leaves it; fetch the file again"),
    (0, b"<html", "a page of HTML, as a failed download leaves it; fetch the file again"),
)
_ZARR_ADVICE = "open it with format='zarr' (treering.convert: source_format=) if it is complete"
_ZARR = {
    ".zarray": f"a zarr array (version 2); {_ZARR_ADVICE}",
    ".zgroup": f"a zarr group (version 2); {_ZARR_ADVICE}",
    ".zmetadata": f"a zarr group (version 2); {_ZARR_ADVICE}",
    "zarr.json": f"a zarr array or group (version 3); {_ZARR_ADVICE}",
    "manifest.ocdbt": f"an OCDBT database of TensorStore; {_ZARR_ADVICE} and of zarr arrays",
}
_ICECHUNK = {"manifests", "snapshots", "transactions"}
_HEAD_BYTES = 512  # that are read of a file, enough for each of these beginnings
_MAX_NAMES = 1000  # names that are looked at in a folder and those below it
_MAX_FILES = 20  # files of which the beginning is read
_MAX_FOLDERS = 20  # folders that are looked at
_MAX_OPENED = 5  # folders that a message names
_INDEX = ".index"
_KERAS_INDEX = ".weights.json"
_TORCH_INDEX = ".bin.index.json"
_SHARD = re.compile(r"-[0-9]+-of-([0-9]+)\.[^.]+$")
_NO_WEIGHTS = re.compile("training_args|optim|scheduler|scaler|rng|random_states")  # in names; named if all are such
_MAX_ZARR_NAMES = 50  # files and folders that are looked at for zarr arrays in a folder
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_SUFFIXES = (
    *_TORCH_SUFFIXES,
    *(".pkl", ".pickle", ".h5", ".keras", ".npy", ".npz", ".gguf", ".tflite", ".zip", ".tar", ".gz", ".tgz"),
    *(".onnx", ".mat", ".parquet", ".arrow"),
)


def describe(store: Store, path: str, opens: Callable[[str], bool]) -> str | None:
    """Describes the file at a path, or what a folder has in it, and what to do with it.

    Returns None for a file of an unknown kind, and for one that cannot be read.

    opens: returns True if a path in a folder is a checkpoint.
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
        return _describe_folder(store, path, opens)
    except (TreeringError, OSError, ValueError):
        pass  # The message that this text is for already has the errors that the formats met.
    return None


def _describe_folder(store: Store, path: str, opens: Callable[[str], bool]) -> str | None:
    """Describes a folder, by the nearest thing in it that is known. That may be some levels deep."""
    folders = [""]  # relative to the path; the nearest come first
    names_left, files_left, folders_left = _MAX_NAMES, _MAX_FILES, _MAX_FOLDERS
    described: list[str] = []
    for folder in folders:  # The list grows.
        listed = sorted(store.list(posixpath.join(path, folder) if folder else path), key=_newest_first)[:names_left]
        names_left -= len(listed)
        if not listed and not folder:
            return "it is an empty folder"
        if what := _describe_names(listed):
            return f"{folder} in it is {what}" if folder else f"it is {what}"
        names = [posixpath.join(folder, name) for name in listed]
        found = (name for name in names if is_folder(store, posixpath.join(path, name), links=True))
        inner = list(itertools.islice(found, folders_left))
        folders_left -= len(inner)
        known = (name for name in inner if opens(posixpath.join(path, name)))
        if some := tuple(itertools.islice(known, _MAX_OPENED)):
            return f"it is a folder with checkpoints in it; open one by its own path: {join_names(some)}"
        if not folder and (what := describe_zarr(store, path)):
            return f"it is {what}"
        if index := next((x for x in names if x.endswith(_KERAS_INDEX) and opens(posixpath.join(path, x))), None):
            return f"{index} in it is an index of files of Keras; open it by its own path"
        for name in [name for name in names if name.endswith(_OTHER_SUFFIXES)][:files_left]:
            files_left -= 1
            file = posixpath.join(path, name)
            if (there := store.stat(file)) and there.is_file and (what := _describe_file(store, file)):
                described.append(f"{name} in it is {what}")
                if not _NO_WEIGHTS.search(name):
                    return described[-1]
        if indexes := [name for name in names if name.endswith(_INDEX)][:files_left]:
            files_left -= len(indexes)
            if index := next((name for name in indexes if opens(posixpath.join(path, name))), None):
                return f"{index} in it is a checkpoint of TensorFlow; open it by its own path"
        folders += [name for name in inner if not store.is_link(posixpath.join(path, name))]
    return described[0] if described else None


def _newest_first(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts names by their text, but by their numbers from large to small."""
    parts = re.split("([0-9]+)", name)
    return [(-int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _zarr_of(names: Collection[str]) -> str | None:
    return next((what for name, what in _ZARR.items() if name in names), None)


def describe_zarr(store: Store, path: str) -> str | None:
    """Describes a folder of zarr arrays and what to do with it; None for any other folder.

    Arrays may be some levels deep, without the metadata of groups above them.
    """
    places, looked = [path], 0
    while places and looked < _MAX_ZARR_NAMES:
        place = places.pop()
        names = store.list(place)
        looked += len(names) + 1
        if what := _zarr_of(names):
            return what if place == path else f"a folder of zarr arrays; {_ZARR_ADVICE}"
        inner = [posixpath.join(place, name) for name in sorted(names, reverse=True)[-_MAX_ZARR_NAMES:]]
        places += [one for one in inner if not store.is_link(one) and is_folder(store, one)]
    return None


def _describe_names(names: Collection[str]) -> str | None:
    """Describes a folder by the names in it."""
    if "pytreedef.json" in names:
        return f"a checkpoint of JAX's pytree_serialization; {_ZARR_ADVICE}"
    if {*names} >= _ICECHUNK:
        return "a repository of Icechunk; open it with icechunk and zarr, and save its arrays"
    if ".metadata" not in names and any(name.endswith(TORCH_CHUNKS) for name in names):
        return _INCOMPLETE_DCP
    return _zarr_of(names)


def is_other(data: bytes) -> bool:
    """Returns True if these are the first bytes of a known kind of file that is not a checkpoint."""
    return any(data[at:].startswith(magic) for at, magic, _ in _SIGNATURES)


def _describe_file(store: Store, path: str) -> str | None:
    with opened(store, path) as blob:
        begin = blob.read_up_to(_HEAD_BYTES)
    if not begin:
        return "empty; fetch it again"
    if path.endswith(_TORCH_INDEX):
        return f"an index of files of PyTorch; {_JOIN_TORCH}"
    if begin.startswith(b"PK\x03\x04"):
        return _describe_zip(begin, path)
    if begin[0] == 8 and path.endswith(".onnx"):  # The version, which the file has first; it has no signature.
        return "ONNX, a program with weights; open the checkpoint that it was made from"
    return next((what for at, magic, what in _SIGNATURES if begin[at:].startswith(magic)), None)


def _describe_zip(begin: bytes, path: str) -> str:
    """Describes an archive by the name of the first file in it."""
    first = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
    if first.endswith(b".npy"):
        return "an archive of NumPy (.npz); open it by its own path"
    if first.endswith(TORCH_PICKLE.encode()):
        if (shard := _SHARD.search(path)) and int(shard[1]) > 1:
            return f"one of the {int(shard[1])} files of PyTorch of one model; {_JOIN_TORCH}"
        return f"a file of PyTorch; open {'its folder' if path.endswith(TORCH_CHUNKS) else 'it by its own path'}"
    if re.fullmatch(rb"[^/]+/data/0", first) and path.endswith(_TORCH_SUFFIXES):
        return f"probably a program of TorchScript; {_SAVE_SCRIPT}"
    if posixpath.basename(first) in (b".zarray", b".zgroup", b".zattrs", b"zarr.json"):
        return f"a zip archive of zarr arrays; {_UNPACK_ADVICE}"
    if first in (b"metadata.json", b"config.json") and path.endswith(".keras"):
        return "a model of Keras; open it by its own path"
    return f"a zip archive; {_UNPACK_ADVICE}"
