"""Rules change names, shapes and values between a checkpoint and a template.

>>> from treering import rules
>>> hf_to_jax = [
...     rules.rename(r"model\\.layers\\.(\\d+)\\.", r"layers/\\1/"),
...     rules.transpose("layers/*/*.weight", (1, 0)),
...     rules.stack("layers/*/**", axis=0),
... ]
>>> print(tr.open("model.safetensors").apply(hf_to_jax))

Rules are applied in order, while the leaves are still in the checkpoint: when a box of a leaf is read, Treering reads
the boxes that it is made of and no more. Arrays of typed PRNG keys have the axes that JAX shows, and rules that change
values refuse them. Paths and globs are those of `treering.Checkpoint`: ``*`` and ``?`` match within one name of a path,
``**`` matches any number of names. A rule that matches nothing is an error, unless it is `optional`.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._core import dtypes
from ._core.describe import describe_entry
from ._core.entries import KEY_SIZES, visible_shape
from ._core.tracebacks import hide_internal_frames
from ._core.views import Leaf, padded, part, tiled, transposed, wrapped
from ._core.views import cast as _cast
from ._core.views_groups import mapped, reshaped
from ._core.views_quantized import Packing, packed, unpacked
from ._rules.base import Rule, axis_of, compile_pattern, dtype_text, fill_value, require_integers, require_texts
from ._rules.dequantize import Dequantize
from ._rules.groups import Combine, Concat, Copy, Drop, Each, Rename, Scale, Split, Stack, Unstack
from ._rules.peft import Peft, check_alpha, read_config
from .errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

# `map` is not here, so that `from treering.rules import *` does not shadow Python's own `map`.
__all__ = [
    "cast",
    "combine",
    "concat",
    "copy",
    "dequantize",
    "drop",
    "from_peft",
    "pack",
    "pad",
    "rename",
    "reshape",
    "scale",
    "split",
    "stack",
    "take",
    "tile",
    "to_peft",
    "transpose",
    "unpack",
    "unstack",
    "wrap_key_data",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "map"])


def rename(pattern: str, new: str, *, optional: bool = False) -> Rule:
    """Replaces what a regular expression matches in paths; ``\\1`` in `new` is its first group.

    >>> rename(r"^encoder/block_0*(\\d+)/", r"encoder/layers_\\1/")
    """
    return Rename(compile_pattern(pattern), new, optional)


def drop(glob: str, *, optional: bool = False) -> Rule:
    """Removes leaves."""
    return Drop(glob, optional)


def copy(src: str, dst: str, *, optional: bool = False) -> Rule:
    """Copies a leaf, or all leaves below a path, to another path."""
    return Copy(src, dst, optional)


def cast(glob: str, dtype: Any, *, optional: bool = False) -> Rule:
    """Changes dtypes, as `numpy.ndarray.astype` does. But values that the dtype lacks, and text, are an error if read.

    Clip such values before, if that is meant:

    >>> [map("head/kernel", lambda x: x.clip(-448, 448)), cast("head/kernel", "float8_e4m3fn")]
    """
    text = f"cast({glob!r}, {dtype!r})"
    new = dtype_text(dtype, text)
    return Each(text, glob, functools.partial(_cast, dtype=new), optional)


def transpose(glob: str, axes: Sequence[int], *, optional: bool = False) -> Rule:
    """Changes the order of axes, as `numpy.transpose` does."""
    text = f"transpose({glob!r}, {axes!r})"
    order = require_integers(axes, (), None, text)
    return Each(text, glob, functools.partial(_transpose, order), optional, or_keys=True)


def _transpose(axes: tuple[int, ...], leaf: Leaf) -> Leaf:
    shape = visible_shape(leaf.array)
    rank = len(shape)
    own = tuple(axis + rank if axis < 0 else axis for axis in axes)
    if sorted(own) != list(range(rank)):
        raise MismatchError(f"{leaf.entry.path}: an array of shape {list(shape)} does not have the axes {axes}")
    return transposed(leaf, (*own, *range(rank, len(leaf.array.shape))))


def reshape(glob: str, shape: Sequence[int], *, optional: bool = False) -> Rule:
    """Changes shapes, as `numpy.reshape` does in C order; one size may be -1."""
    text = f"reshape({glob!r}, {shape!r})"
    sizes = require_integers(shape, (), -1, text)
    return Each(text, glob, functools.partial(_reshape, sizes), optional, or_keys=True)


def _reshape(sizes: tuple[int, ...], leaf: Leaf) -> Leaf:
    shape = visible_shape(leaf.array)
    size, known = math.prod(shape), math.prod(n for n in sizes if n != -1)
    own = tuple(size // known if n == -1 and known else n for n in sizes)
    if math.prod(own) != size or sizes.count(-1) > 1 or min(own, default=0) < 0:
        raise MismatchError(f"{leaf.entry.path}: {list(shape)} cannot become {list(sizes)}")
    return reshaped(leaf, (*own, *leaf.array.shape[len(shape) :]))


def tile(glob: str, repeats: int | Sequence[int], *, optional: bool = False) -> Rule:
    """Repeats arrays along their axes, as `numpy.tile` does.

    >>> tile("params/*/kernel", (8, 1, 1))  # an ensemble of 8: of the shape [3, 4] becomes [8, 3, 4]
    """
    text = f"tile({glob!r}, {repeats})"
    counts = require_integers([repeats] if isinstance(repeats, int) else repeats, (), 1, text)
    return Each(text, glob, functools.partial(_tile, counts), optional, or_keys=True)


def _tile(counts: tuple[int, ...], leaf: Leaf) -> Leaf:
    old = len(visible_shape(leaf.array))
    rank, of_key = max(old, len(counts)), len(leaf.array.shape) - old
    leaf = reshaped(leaf, (1,) * (rank - old) + leaf.array.shape)
    return tiled(leaf, (1,) * (rank - len(counts)) + counts + (1,) * of_key)


def pad(glob: str, widths: Sequence[tuple[int, int]], value: Any = 0, *, optional: bool = False) -> Rule:
    """Puts a value before and after arrays along their axes, as `numpy.pad` does; `widths` has a pair for each axis.

    Raises `MismatchError` if the arrays' dtype cannot hold the value exactly, so that it would be rounded or wrapped.

    >>> pad("embed/embedding", ((0, -50257 % 128), (0, 0)))  # a vocabulary that is a multiple of 128
    """
    text = f"pad({glob!r}, {widths})"
    pairs = require_integers(widths, (2,), 0, text)
    return Each(text, glob, functools.partial(_pad, pairs, value, text), optional)


def _pad(pairs: tuple[tuple[int, int], ...], value: Any, text: str, leaf: Leaf) -> Leaf:
    if len(pairs) != len(leaf.array.shape):
        raise MismatchError(f"{text}: {leaf.entry.path} of shape {list(leaf.array.shape)} needs a pair for each axis")
    return padded(leaf, pairs, fill_value(value, leaf, text))


def take(glob: str, index: int, axis: int = 0, *, optional: bool = False) -> Rule:
    """Takes one position along an axis, as ``array[index]`` does. The rest is not read.

    >>> take("**", 0)  # of a state that `pmap` replicated: of the shape [8, 3, 4] becomes [3, 4]
    """
    text = f"take({glob!r}, {index}{f', axis={axis}' if axis else ''})"
    try:
        number = operator.index(index)
    except TypeError:
        raise MismatchError(f"{text}: expected an integer, found {index!r}") from None
    return Each(text, glob, functools.partial(_take, number, axis, text), optional, or_keys=True)


def _take(number: int, axis: int, text: str, leaf: Leaf) -> Leaf:
    entry = leaf.array
    own = axis_of(axis, len(visible_shape(entry)), f"{text}: {entry.path}")
    size = entry.shape[own]
    if not -size <= number < size:
        raise MismatchError(f"{text}: {entry.path} has {size} along axis {own}, no index {number}")
    return part(leaf, entry.path, own, number % size, number % size + 1, drop_axis=True)


def wrap_key_data(glob: str, impl: str = "threefry2x32", *, optional: bool = False) -> Rule:
    """Makes typed PRNG keys of their uint32 data, as `jax.random.wrap_key_data` does.

    impl: the name of the keys' implementation. It says the size of the last axis: 2 for "threefry2x32", 4 for "rbg"
        and "unsafe_rbg".

    Raises `MismatchError` for other data. The restore raises `UnsupportedError` for an implementation that JAX lacks.

    >>> wrap_key_data("rng")  # uint32[2], of `jax.random.PRNGKey`, becomes a key of `jax.random.key`
    """
    text = f"wrap_key_data({glob!r}, {impl!r})"
    return Each(text, glob, functools.partial(_wrap_key_data, impl, text), optional)


def _wrap_key_data(impl: str, text: str, leaf: Leaf) -> Leaf:
    entry = leaf.array
    size = KEY_SIZES.get(impl)
    if entry.dtype != "uint32" or not entry.shape or size not in (None, entry.shape[-1]):
        expected = "" if size is None else f" whose last axis has {size}"
        raise MismatchError(f"{text}: {entry.path} is {describe_entry(entry)}; expected uint32{expected}")
    return wrapped(leaf, impl)


def stack(glob: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """Stacks leaves along a new axis, in the order of the numbers that the first ``*`` matches.

    >>> stack("layers/*/kernel")  # layers/0/kernel, layers/1/kernel, … become layers/kernel
    """
    return Stack(glob, axis, optional)


def unstack(glob: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """Cuts leaves into one leaf for each position of an axis: undoes `stack` with the same glob.

    >>> unstack("layers/*/kernel")  # layers/kernel becomes layers/0/kernel, layers/1/kernel, …
    """
    return Unstack(glob, axis, optional)


def split(
    pattern: str, new: Sequence[str], axis: int = 0, sizes: Sequence[int] | None = None, *, optional: bool = False
) -> Rule:
    """Cuts leaves into parts along an axis. The parts have one size, or the given `sizes`.

    pattern: a regular expression that matches the entire path.
    new: the paths of the parts, in which ``\\1`` is the first group of the pattern.

    >>> split(r"(.*)/qkv", [r"\\1/query", r"\\1/key", r"\\1/value"], axis=1)
    """
    text = f"split({pattern!r}, …)"
    own = None if sizes is None else require_integers(sizes, (), 0, f"{text}, sizes={sizes!r}")
    return Split(compile_pattern(pattern), require_texts(new, text), axis, own, optional)


def concat(patterns: Sequence[str], new: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """Concatenates leaves along an axis, in the order of the patterns: undoes `split`.

    >>> concat([r"(.*)/query", r"(.*)/key", r"(.*)/value"], r"\\1/qkv", axis=1)
    """
    return Concat(
        tuple([compile_pattern(pattern) for pattern in require_texts(patterns, f"concat(…, {new!r})")]),
        new,
        axis,
        optional,
    )


def combine(
    patterns: Sequence[str],
    new: str,
    function: "Callable[..., np.ndarray]",
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    *,
    optional: bool = False,
) -> Rule:
    """Makes one leaf of several with a function, which gets one entire array for each pattern, in their order.

    This is as costly as `map`: the arrays are read again for each box of the result.

    patterns, new: as for `concat`.
    shape, dtype: those of the results, if they differ from the first array's.

    >>> combine([r"(.*)/lora_a", r"(.*)/lora_b"], r"\\1/delta", lambda a, b: a @ b, shape=(512, 512))
    """
    given = require_texts(patterns, f"combine(…, {new!r})")
    text = f"combine({list(given)}, …)"
    own = None if dtype is None else dtype_text(dtype, text)
    return Combine(
        tuple([compile_pattern(pattern) for pattern in given]),
        new,
        function,
        None if shape is None else require_integers(shape, (), 0, f"{text}, shape={shape!r}"),
        own,
        optional,
    )


def scale(pattern: str, scale: str, dtype: Any, block: Sequence[int] | None = None, *, optional: bool = False) -> Rule:
    """Multiplies quantized arrays by their scales, box by box, and removes the scales.

    pattern: a regular expression that matches the entire path of an array.
    scale: the path of its scale, in which ``\\1`` is the first group of the pattern.
    dtype: the dtype of the product. It is computed in float32 and rounded once more, to this dtype.
    block: the shape of the blocks that have one scale each; blocks at the ends may be smaller. Without it the scale is
        a single number, or has along each axis the size 1 or the size of the array.

    An array without a scale stays as it is. If it has one byte per element (float8, int8, …) that is an error instead.

    >>> scale(r"(.*)\\.weight", r"\\1.weight_scale_inv", "bfloat16", block=(128, 128))
    """
    text = f"scale({pattern!r}, {scale!r}, …)"
    new = dtype_text(dtype, text)
    if not dtypes.is_float(dtypes.to_numpy(new)):
        raise MismatchError(f"{text}: expected a floating-point dtype, found {dtype!r}")
    sizes = None if block is None else require_integers(block, (), 1, text)
    return Scale(compile_pattern(pattern), scale, new, sizes, optional)


def from_peft(config: Mapping[str, Any], alpha: float | None = None, *, optional: bool = False) -> Rule:
    """Translates the LoRA of a PEFT adapter for layers in JAX: names, axes and scaling.

    ``base_model.model.X.lora_A.weight`` and ``….lora_B.weight`` become ``X/lora_a`` [in, rank] and ``X/lora_b``
    [rank, out], those of embeddings ``X/lora_embedding_a`` and ``…_b``. Other leaves only lose ``base_model.model.``.

    config: the contents of ``adapter_config.json``, which an open adapter has in its metadata under that name. `lora_b`
        is multiplied by ``lora_alpha / r``, or as its patterns and `use_rslora` say, and rounded to its dtype once.
    alpha: that of layers which multiply by ``alpha / rank`` themselves, as qwix's do. `lora_b` is divided by that.
        Flax's `nnx.LoRA` multiplies by nothing: None.

    Raises `MismatchError` for other kinds of adapters such as DoRA, and for arrays that do not fit the config.

    >>> from_peft(tr.open("adapter").metadata["adapter_config.json"])
    """
    return _peft("from_peft", config, alpha, back=False, optional=optional)


def to_peft(config: Mapping[str, Any], alpha: float | None = None, *, optional: bool = False) -> Rule:
    """Translates LoRA of layers in JAX to the names, axes and scaling of PEFT: undoes `from_peft`.

    Slashes in names become dots. If the config's scaling is a power of two, all values are exact.

    config: the ``adapter_config.json`` of the new adapter; save it with ``metadata={"adapter_config.json": config}``.

    Raises `MismatchError` also for modules that the config's `target_modules` do not match, as PEFT would skip them.
    """
    return _peft("to_peft", config, alpha, back=True, optional=optional)


def _peft(name: str, config: Mapping[str, Any], alpha: float | None, *, back: bool, optional: bool) -> Rule:
    own = None if alpha is None else check_alpha(alpha, f"{name}(…, alpha={alpha!r}): expected alpha")
    return Peft(read_config(config, f"{name}(…)"), own, back, optional)


def dequantize(
    glob: str, dtype: Any = None, *, config: Mapping[str, Any] | None = None, optional: bool = False
) -> Rule:
    """Makes float weights of the codes and scales that quantization libraries write, box by box.

    glob: matches paths that the float model has, such as ``layers/0/kernel`` of ``layers/0/kernel/qvalue``.
    dtype: the dtype of the weights. The default is that of their scales, or bfloat16 if the scales have 8 bits.
    config: what neither the arrays nor a model's config.json next to them say, by the names in that file. Errors name
        what is needed.

    Weights are computed in float32 and rounded once, so with the default dtype they are what the library itself
    computes, bit for bit. They have the axes that the float model has.

    Raises `MismatchError` for arrays that do not fit together and for layouts whose arithmetic is not known, and on
    reading `CorruptError` for numbers that no library writes.

    >>> tr.open("gptq-model").apply([dequantize("**", "bfloat16")])
    """
    text = f"dequantize({glob!r})"
    new = None if dtype is None else dtype_text(dtype, text)
    if new is not None and not dtypes.is_float(dtypes.to_numpy(new)):
        raise MismatchError(f"{text}: expected a floating-point dtype, found {dtype!r}")
    if config is not None and not isinstance(config, Mapping):
        raise MismatchError(f"{text}: config: expected a dict, found {config!r:.100}")
    return Dequantize(glob, new, dict(config or {}), optional)


def unpack(glob: str, dtype: Any = "int4", axis: int = -1, offset: int = 0, *, optional: bool = False) -> Rule:
    """Takes numbers of four bits out of arrays with several in each element, the first in the lowest bits.

    dtype: "int4" or "uint4".
    axis: the axis along which neighbors share an element.
    offset: what was added before they were packed: 8 for int4 numbers of compressed-tensors.

    >>> unpack("*/weight_packed", offset=8)  # int32[4096, 512] becomes int4[4096, 4096]
    """
    text = f"unpack({glob!r}, {dtype!r})"
    new = _four_bits(dtype, offset, text)
    return Each(text, glob, functools.partial(_unpack, new, axis, offset, text), optional)


def _unpack(dtype: str, axis: int, offset: int, text: str, leaf: Leaf) -> Leaf:
    entry = leaf.array
    if entry.dtype not in _WORDS:
        raise MismatchError(f"{text}: {entry.path} is {describe_entry(entry)}; expected {' or '.join(_WORDS)}")
    own = axis_of(axis, len(entry.shape), f"{text}: {entry.path}")
    return unpacked(leaf, Packing.of(entry.dtype, 4, own), dtype, offset)


def pack(glob: str, into: str = "int32", axis: int = -1, offset: int = 0, *, optional: bool = False) -> Rule:
    """Packs int4 and uint4 arrays, several neighbors into each element, the first in the lowest bits: undoes `unpack`.

    into: "int32" or "uint8", which have eight and two numbers.

    >>> pack("**/qvalue", "uint8")  # int4[4096, 4096] becomes uint8[4096, 2048]
    """
    text = f"pack({glob!r}, {into!r})"
    if into not in _WORDS:
        raise MismatchError(f"{text}: expected {' or '.join(_WORDS)}, found {into!r}")
    return Each(text, glob, functools.partial(_pack, into, axis, offset, text), optional)


def _pack(into: str, axis: int, offset: int, text: str, leaf: Leaf) -> Leaf:
    entry = leaf.array
    if entry.dtype not in ("int4", "uint4"):
        raise MismatchError(f"{text}: {entry.path} is {describe_entry(entry)}; expected int4 or uint4")
    _four_bits(entry.dtype, offset, text)
    own = axis_of(axis, len(entry.shape), f"{text}: {entry.path}")
    packing = Packing.of(into, 4, own)
    if entry.shape[own] % len(packing.places):
        raise MismatchError(
            f"{text}: {entry.path} has {entry.shape[own]} along axis {own}, expected a multiple of "
            f"{len(packing.places)}; pad it by a rule before"
        )
    return packed(leaf, packing, into, offset)


_WORDS = ("int32", "uint32", "uint8")


def _four_bits(dtype: Any, offset: Any, text: str) -> str:
    """Returns the name of a dtype of four bits. Raises `MismatchError` for others, and for an offset it cannot have."""
    new = dtype_text(dtype, text)
    if new not in ("int4", "uint4"):
        raise MismatchError(f"{text}: expected int4 or uint4, found {dtype!r}")
    if type(offset) is not int or offset not in ((0, 8) if new == "int4" else (0,)):
        raise MismatchError(
            f"{text}: expected the offset {'0 or 8' if new == 'int4' else '0'} for {new}, found {offset!r}"
        )
    return new


def map(
    glob: str,
    function: "Callable[[np.ndarray], np.ndarray]",
    shape: Sequence[int] | None = None,
    *,
    optional: bool = False,
) -> Rule:
    """Calls a function on entire arrays; `shape` is the shape of its results if it differs.

    This is the last resort, because an entire array is read again for each box of the result.
    """
    text = f"map({glob!r}, …)"
    sizes = None if shape is None else require_integers(shape, (), 0, f"{text}, shape={shape!r}")
    return Each(text, glob, functools.partial(_map, function, sizes), optional)


def _map(function: "Callable[[np.ndarray], np.ndarray]", shape: tuple[int, ...] | None, leaf: Leaf) -> Leaf:
    own = leaf.array.shape if shape is None else shape
    hint = "pass shape=, and change the dtype by a cast rule"
    return mapped([leaf], leaf.entry.path, function, own, leaf.array.dtype, hint)


for _name in (*__all__, "map"):
    globals()[_name] = hide_internal_frames(globals()[_name])
