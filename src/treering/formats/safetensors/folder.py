"""Finds the files of a folder that are a checkpoint in safetensors."""

import itertools
import logging
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.leaf_paths import join_names
from ..._printable import safe
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.file_io import read_file
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Store
from .._shared import strict_json

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"  # the stem of PEFT's files, and what describes them
# transformers and diffusers name the index of a variant model.safetensors.index.fp16.json, and its files model.fp16-….
_INDEX = re.compile(r"(.+)\.safetensors\.index(?:\.([^.]+))?\.json", re.DOTALL)
_NATIVE = re.compile(r"arrays-[0-9a-f]{6}-\d{5,}-of-\d{5,}\.safetensors")  # without a manifest: leftovers
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})(.*)\.safetensors", re.DOTALL)
_RANK = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")  # by torch.distributed.checkpoint
# By vLLM's save_sharded_state and DeepSeek's converter. Nothing says how the pieces in them are joined.
_PARALLEL = re.compile(r"model(?:-rank-(?!0-)\d+-part-\d+|[1-9]\d*-mp\d+)\.safetensors")
_USUAL = ("model", "diffusion_pytorch_model")  # stems that libraries load from a folder without being asked
_FLAX = ("flax_model.msgpack", "flax_model.msgpack.index.json")
_log = logging.getLogger("treering")
_MAX_NAMED_FILES = 3  # missing files that a message names


class ChosenFiles(NamedTuple):
    """Names the index, the file or the files that open a folder.

    `missing` holds the first files that a set lacks. `rival` has the files that would open the same model if there were
    no index.
    """

    names: tuple[str, ...]
    missing: tuple[str, ...] = ()
    rival: tuple[str, ...] = ()


class Index(NamedTuple):
    """The contents of an index: the name of the file of each tensor, by key, and what the writer recorded."""

    weights: Mapping[str, str]
    metadata: Mapping[str, Any]


def is_index(name: str) -> bool:
    """Returns True for the name of an index."""
    return _INDEX.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """Returns the number, from 1, of the rank whose file has this name; None for other names."""
    rank = _RANK.fullmatch(name)
    return int(rank[1]) if rank else None


def candidates(names: Sequence[str]) -> list[str]:
    """Returns the names of indexes and of files of tensors, without leftovers of the native format."""
    return [name for name in names if (name.endswith(SUFFIX) and not _NATIVE.fullmatch(name)) or is_index(name)]


def stem_of(name: str) -> str:
    """Returns the name of a model with its variant, without numbers: "model.fp16" for each of its files."""
    if index := _INDEX.fullmatch(name):
        return f"{index[1]}.{index[2]}" if index[2] else index[1]
    if _RANK.fullmatch(name):
        return "model"
    part = _PART.fullmatch(name)
    return part[1] + part[4] if part else name.removesuffix(SUFFIX)


def chosen(names: Sequence[str]) -> ChosenFiles | str:
    """Returns the files that open a folder with these names, or the reason why none do."""
    found = candidates(names)
    if not found:
        return "there is no safetensors file in this folder"
    unnumbered = [name for name in found if not _PART.fullmatch(name)]
    usual = next(filter(None, ([name for name in unnumbered if stem_of(name) == stem] for stem in _USUAL)), found)
    indexes = [name for name in usual if is_index(name)]
    if len(indexes) == 1:
        stem = stem_of(indexes[0])
        numbered = [name for name in found if stem_of(name) == stem and _PART.fullmatch(name)]
        rest = chosen(
            [stem + SUFFIX] if stem + SUFFIX in found else [*itertools.filterfalse(_RANK.fullmatch, numbered)]
        )
        return ChosenFiles(
            (indexes[0],), rival=rest.names if isinstance(rest, ChosenFiles) and not rest.missing else ()
        )
    ranks = [rank for name in usual if (rank := _RANK.fullmatch(name))]
    if ranks and not any(stem_of(name) == "model" for name in usual if not _RANK.fullmatch(name)):
        return _rank_files(ranks)
    if not indexes and (parts := _set(usual)):
        return parts
    if not indexes and (rank := next(filter(_PARALLEL.fullmatch, usual), None)):
        return f"{safe(rank)} has pieces of tensors, of one tensor-parallel rank; save the model in complete tensors"
    if len(usual) > 1:
        kind = "indexes" if indexes else "safetensors files and no index"
        return f"several {kind} ({join_names(tuple(sorted(indexes or usual)))}); open one of them by its own path"
    return ChosenFiles((usual[0],))


def _set(files: Sequence[str]) -> ChosenFiles | str | None:
    """Returns the files of a set that is numbered ``model-00001-of-00003.safetensors``, in order; None for other files.

    Next to one complete set, other numbered files of the same model are leftovers. Returns the reason if there are
    several complete sets.
    """
    parts = [part for name in files if (part := _PART.fullmatch(name))]
    if len(parts) < len(files) or len(set(map(stem_of, files))) > 1:
        return None
    sets: dict[tuple[Any, ...], dict[int, re.Match[str]]] = {}
    for part in parts:
        sets.setdefault((part[1], len(part[2]), part[3], part[4]), {})[int(part[2])] = part
    found = [one for own in sets.values() if (one := _in_order(own))]
    complete = [one for one in found if not one.missing]
    if len(complete) > 1:
        firsts = " and ".join(one.names[0] for one in complete)
        return f"several complete sets of files, which begin with {firsts}; move the others out of this folder"
    return complete[0] if complete else found[0] if len(sets) == len(found) == 1 else None


def _in_order(parts: Mapping[int, re.Match[str]]) -> ChosenFiles | None:
    """Returns the files of a set by number, and which are missing; None if the numbers do not fit the count."""
    one = next(iter(parts.values()))
    first = min(min(parts), 1)  # some writers count from 0
    count = int(one[3])
    if max(parts) >= first + count:
        return None
    absent = (number for number in range(first, first + count) if number not in parts)
    missing = [
        f"{one[1]}-{number:0{len(one[2])}}-of-{one[3]}{one[4]}{SUFFIX}"
        for number in itertools.islice(absent, _MAX_NAMED_FILES)  # a name may claim any number of files
    ]
    return ChosenFiles(tuple(parts[number][0] for number in sorted(parts)), tuple(missing))


def _rank_files(ranks: Sequence[re.Match[str]]) -> ChosenFiles | str:
    """Returns the files of all ranks. A rank has a file of each number unless it saved nothing into it."""
    counts = {rank[3]: rank[0] for rank in ranks}
    if len(counts) > 1:
        return (
            f"files of different saves ({' and '.join(sorted(counts.values()))}); move those of one out of this folder"
        )
    (count,) = counts
    numbers = {int(rank[2]) for rank in ranks}
    absent = (number for number in range(1, int(count) + 1) if number not in numbers)
    missing = [f"shard-*-model-{number:05}-of-{count}{SUFFIX}" for number in itertools.islice(absent, _MAX_NAMED_FILES)]
    return ChosenFiles(tuple(sorted(rank[0] for rank in ranks)), tuple(missing))


def log_others(folder: str, opened: Sequence[str], names: Sequence[str]) -> None:
    """Logs the other checkpoints in the folder of the one that is opened, and warns of leftovers of the same model."""
    others = set(candidates(names)).difference(opened)
    own = {name for name in others if stem_of(name) == stem_of(opened[0])}
    if own:
        text = "%s: opens %s; other files of this model are left over, or of another save: %s"
        _log.warning(text, folder, opened[0], join_names(tuple(sorted(own))))
    if rest := sorted((others - own).union(name for name in names if name in _FLAX)):
        _log.info("%s: opens %s; open the others by their own paths: %s", folder, opened[0], join_names(tuple(rest)))


def index_of(store: Store, path: str, *, deltas: bool = False) -> Index:
    """Reads an index. Raises `CorruptError`, and `UnsafeError` for files that are not in its folder.

    Raises `UnsupportedError` for an index of differences of tensors, which are no model, unless with `deltas`.
    """
    try:
        fields = strict_json.parse_typed(read_file(store, path), {"weight_map": dict[str, str], "metadata": Any})
        weights, metadata = fields["weight_map"], fields.get("metadata")
    except FileNotFoundError:
        raise CorruptError(f"{path}: expected an index of safetensors files, found nothing") from None
    except KeyError:
        raise CorruptError(f"{path}: expected an index of safetensors files, found JSON without weight_map") from None
    except strict_json.MALFORMED as error:
        raise CorruptError(f"{path}: expected an index of safetensors files: {error}") from None
    for name in dict.fromkeys(weights.values()):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise UnsafeError(f"{path}: expected names of files in its folder, found {name!r}")
    metadata = metadata if isinstance(metadata, dict) else {}
    if "delta_encoding" in metadata and not deltas:
        raise UnsupportedError(
            f"{path}: expected the tensors of a model, found their differences to version "
            f"{safe(str(metadata.get('base_version')))}, as slime publishes them; open weight_vN within its stream"
        )
    return Index(weights, metadata)


def adapter_config(store: Store, path: str) -> dict[str, Any]:
    """Returns the contents of PEFT's ``adapter_config.json`` next to a file, by that name; nothing for other files.

    Raises `CorruptError` if it is not a JSON object.
    """
    folder, name = posixpath.split(path)
    if stem_of(name) != ADAPTER:
        return {}
    place = posixpath.join(folder, ADAPTER_CONFIG)
    try:
        found = strict_json.parse(read_file(store, place))
        if not isinstance(found, dict):
            raise ValueError(f"found a {type(found).__name__}")
    except FileNotFoundError:
        return {}
    except strict_json.MALFORMED as error:
        raise CorruptError(
            f"{place}: expected a JSON object, which says how to scale the adapter: {error}; repair it, or move it out "
            "of the folder to read the arrays alone"
        ) from None
    return {ADAPTER_CONFIG: found}


def quantization_of(store: Store, folder: str) -> Mapping[str, Any]:
    """Returns what the model's files next to its weights say about quantized ones; nothing if they do not mention them.

    Hugging Face's libraries and MLX write it into the model's configuration, AutoGPTQ into a file of its own.
    """
    for name, keys in (("config.json", ("quantization_config", "quantization")), ("quantize_config.json", ())):
        path = posixpath.join(folder, name)
        try:
            found = strict_json.parse(read_file(store, path))
        except FileNotFoundError:
            continue
        except strict_json.MALFORMED as error:
            raise CorruptError(
                f"{path}: expected JSON, which may say how the weights were quantized: {error}; repair it, or move it "
                "out of the folder"
            ) from None
        own = [found.get(key) for key in keys] if keys and isinstance(found, dict) else [found]
        if said := next((one for one in own if isinstance(one, dict)), None):
            return said
    return {}


def written_names(store: Store, folder: str) -> set[str]:
    """Returns the names of a folder's checkpoint: the index and its files, or the files that are opened without one.

    The config of an adapter is part of it. Returns nothing if the folder has several checkpoints. If the index cannot
    be read, its files are those of its stem.
    """
    names = store.list(folder)
    main = chosen(names)
    if isinstance(main, str):
        return set()
    config = {ADAPTER_CONFIG}.intersection(names) if stem_of(main.names[0]) == ADAPTER else set[str]()
    return config | _files_of(store, folder, names, main)


def _files_of(store: Store, folder: str, names: Sequence[str], main: ChosenFiles) -> set[str]:
    (index, *_) = main.names
    if not is_index(index):
        return set(main.names)
    try:
        shards = set(index_of(store, posixpath.join(folder, index), deltas=True).weights.values())
    except (CorruptError, OSError) as error:
        raise_if_momentary(error)
        stem = stem_of(index)
        shards = {name for name in names if (part := _PART.fullmatch(name)) and (part[1], part[4]) == (stem, "")}
    if not shards.issuperset(main.rival):  # The index has been left behind if it lacks files.
        return set(main.rival) if shards.difference(names) else set()
    return {index, *shards.intersection(names)}
