"""Recognizes quantized weights: codes, and the scales and other arrays without which the codes mean nothing.

Each library names and shapes these arrays in its own way; `LAYOUTS` has a row for each. A row only recognizes. Only
names, dtypes and shapes are looked at, so that ordinary arrays named ``scale`` or ``weight`` are not mistaken.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from .entries import ArrayEntry, Entry, LostEntry
from .leaf_paths import join_names
from .source import Source
from .subtree import full_source
from .units import count
from .views import View

_log = logging.getLogger("treering")

Members = Mapping[str, ArrayEntry]  # by role

_FLOAT8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3"))
SMALL_DTYPES = _FLOAT8 | {"int8", "int4", "int2", "uint8", "uint4", "uint2", "float4_e2m1fn", "float8_e4m3b11fnuz"}
_SIGNED = _FLOAT8 | {"int8", "int4"}
_CODES = SMALL_DTYPES | {"int32", "uint32"}
_FLOATS = frozenset(("float32", "bfloat16", "float16", "float64"))
_SCALES = _FLOATS | {"float8_e8m0fnu", "float8_e4m3fn"}
_LEVELS = ("", "/value", "/raw_value", ".value", ".raw_value")  # which some formats write for boxes of Flax


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names of the arrays of one quantized weight.

    name: what messages call it.
    source: the release and file where names and arithmetic were read.
    codes: the end of the codes' path; what precedes it is the stem that all members share. In it and in all other ends,
        ``/`` stands for a dot if the checkpoint's names have dots.
    needed, optional: the ends of the paths of further members, by role.
    weight: the end of the float weight's path; it replaces `codes`.
    certain: True if nothing else has such codes, so that codes alone are a group whose other members are missing.
    fits: returns True if dtypes and shapes of the members that exist are those of the layout.
    """

    name: str
    source: str
    codes: str
    needed: Mapping[str, str]
    optional: Mapping[str, str]
    weight: str
    certain: bool
    fits: Callable[[Members], bool]


@dataclasses.dataclass(frozen=True)
class Group:
    """The arrays of one quantized weight.

    path: the path of the float weight that they stand for.
    members: their paths by role; ``codes`` is the first.
    missing: the paths of needed members that the checkpoint lacks.
    """

    layout: Layout
    path: str
    members: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def codes(self) -> str:
        """The path of the codes."""
        return self.members["codes"]


class Member(NamedTuple):
    """A leaf of a quantized weight, and what it is there: ``codes``, ``scale`` and so on."""

    group: Group
    role: str


def find_groups(entries: Mapping[str, Entry]) -> list[Group]:
    """Returns the quantized weights among the leaves of a checkpoint, in its order."""
    found = [
        group
        for path, entry in entries.items()
        if _is_array(entry) and entry.dtype in _CODES
        if (group := _group_of(path, entries)) is not None
    ]
    others = {path for group in found for role, path in group.members.items() if role != "codes"}
    return [group for group in found if group.codes not in others]


def find_members(source: Source, entries: Mapping[str, Entry]) -> dict[str, Member]:
    """Returns the leaves of a source that are members of quantized weights, by their keys in `entries`.

    entries: the leaves of the source under any names.

    Rules may have renamed the leaves, or left out the rest of the weight. They are members of what the checkpoint has,
    unless a rule has changed the dtype.
    """
    full, base = _levels(source)
    known = {path: Member(group, role) for group in find_groups(base.entries) for role, path in group.members.items()}
    found: dict[str, Member] = {}
    for key, entry in entries.items() if known else ():
        origin = full.source(entry.path) if isinstance(full, View) else entry.path
        member = known.get(origin)
        if member is not None and isinstance(entry, ArrayEntry) and entry.dtype == dtype_of(base.entries[origin]):
            found[key] = member
    return found


def find_cast_codes(source: Source) -> dict[str, set[str]]:
    """Returns codes that rules have made floats of without the scales, and the other members, by paths of the source.

    A rule that uses the scales, such as `dequantize`, makes weights.
    """
    full, base = _levels(source)
    groups = {group.codes: group for group in find_groups(base.entries)} if isinstance(full, View) else {}
    if not (groups and isinstance(full, View)):
        return {}
    origins = {path: full.source(path) for path in full.entries}
    others = {codes: {*group.members.values()} - {codes} for codes, group in groups.items()}
    return {
        path: {one for one, there in origins.items() if there in others[origin]}
        for path, origin in origins.items()
        if origin in groups
        if dtype_of(full.entries[path]) in _FLOATS
        if others[origin].isdisjoint(entry.path for entry, _ in full.origins(path))
    }


def _levels(source: Source) -> tuple[Source, Source]:
    """Returns the source of which this is a part, and the one below all rules."""
    full = full_source(source)
    base = full
    while isinstance(base, View):
        base = full_source(base._reader)
    return full, base


def catalogue(paths: Iterable[str], leaves: Iterable[Any]) -> dict[str, Entry]:
    """Returns entries for the arrays of a live tree or a template."""
    return {
        path: ArrayEntry(path, "jax", leaf.dtype.name, tuple(leaf.shape))
        for path, leaf in zip(paths, leaves, strict=True)
        if hasattr(leaf, "shape") and hasattr(getattr(leaf, "dtype", None), "name")
    }


def dtype_of(entry: Entry) -> str:
    """Returns the dtype of an array, and "" for another leaf."""
    return entry.dtype if isinstance(entry, ArrayEntry) else ""


def warn_of_kept(name: str, groups: Iterable[Group], dtype: object) -> None:
    """Logs the quantized weights whose codes and scales keep their dtypes although another one was asked for."""
    if found := {group.path or "(root)": group.layout.name for group in groups}:
        _log.warning(
            "%s: dtype=%s: codes and scales of %s (%s) keep their dtypes: %s; "
            "tr.rules.dequantize makes floats of known layouts",
            name,
            dtype,
            count(len(found), "quantized weight"),
            ", ".join(dict.fromkeys(found.values())),
            join_names(tuple(found)),
        )


def warn_of_codes(name: str, codes: Collection[str]) -> None:
    """Logs the codes that become numbers because the caller leaves out what gives them their values."""
    _log.warning(
        "%s: without their scales, these codes of quantized weights become plain numbers: %s; "
        "tr.rules.dequantize multiplies them",
        name,
        join_names(tuple(sorted(codes))),
    )


def _is_array(entry: Entry | None) -> TypeGuard[ArrayEntry]:
    """Returns True for an array that can be read and is not a typed key."""
    return isinstance(entry, ArrayEntry) and entry.type != "key" and not isinstance(entry, LostEntry)


def find_misfits(entries: Mapping[str, Entry], groups: Iterable[Group]) -> list[Group]:
    """Returns arrays that have all names of a layout, but not its dtypes or shapes.

    groups: what `find_groups` has found. The misfits are none of them.
    """
    known = {path for group in groups for path in group.members.values()}
    found = [
        group
        for path, entry in entries.items()
        if _is_array(entry) and path not in known
        if (group := _group_of(path, entries, by_name=True)) is not None and known.isdisjoint(group.members.values())
    ]
    # Arrays of other kinds may have such names. They are misfits if they look like codes, or only one library has the
    # names.
    sure = {layout.name for layout in LAYOUTS if layout.certain}
    return [one for one in found if one.layout.name in sure or dtype_of(entries[one.codes]) in _CODES]


def _group_of(path: str, entries: Mapping[str, Entry], *, by_name: bool = False) -> Group | None:
    """Returns the group of which a leaf is the codes, if it is. A group with all members is preferred.

    by_name: True if only names count, and those of all members must be there.
    """
    incomplete: Group | None = None
    for level in _LEVELS:
        if not path.endswith(level):
            continue
        below = path.removesuffix(level)
        for layout, codes in _ROWS.get(_last_name(below), _ANY_NAME):
            stem = below.removesuffix(codes)
            if not below.endswith(codes) or (stem and codes and codes[0] != "_" and stem[-1] not in "/."):
                continue
            if not (codes or stem) or (by_name and not codes):
                continue
            group = _made(layout, path, stem, level, entries, by_name=by_name)
            if group is not None and not group.missing:
                return group
            incomplete = incomplete or group
    return incomplete


def _last_name(path: str) -> str:
    return path[max(path.rfind("/"), path.rfind(".")) + 1 :]


def _made(
    layout: Layout, path: str, stem: str, level: str, entries: Mapping[str, Entry], *, by_name: bool
) -> Group | None:
    """Returns the group of a layout with this stem, or None if dtypes or shapes differ, or too much is missing."""

    def names(end: str) -> Iterable[str]:
        dotted = stem.endswith(".") or (not layout.codes and "." in stem.rpartition("/")[2])
        both = (end.replace("/", "."), end) if dotted else (end, end.replace("/", "."))
        return [f"{stem}{one}{level}" for one in both]

    members, missing = {"codes": path}, []
    for role, end in (*layout.needed.items(), *layout.optional.items()):
        there = next((one for one in names(end) if _is_array(entries.get(one))), None)
        if there is not None:
            members[role] = there
        elif role in layout.needed:
            if by_name or not layout.certain:
                return None
            missing.append(next(iter(names(end))))
    found = {role: entry for role, there in members.items() if isinstance(entry := entries[there], ArrayEntry)}
    if not (by_name or layout.fits(found)):
        return None
    weight = stem + layout.weight if layout.weight else stem.rstrip("/.")
    return Group(layout, weight + level, members, tuple(missing))


def _tiles(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if each size of the scale divides that of the codes."""
    return len(codes.shape) == len(scale.shape) and all(
        n == m or (m > 0 and n % m == 0) for n, m in zip(codes.shape, scale.shape, strict=True)
    )


def _blocks(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True for one scale, one for each row, or one for each block, of which the last may be smaller."""
    shape, own = codes.shape, scale.shape
    same_rank = len(shape) == len(own) and all(m <= n for n, m in zip(shape, own, strict=True))
    return math.prod(own) == 1 or same_rank or (0 < len(own) < len(shape) and own == shape[: len(own)])


def _fits(
    codes: Iterable[str],
    scale: Iterable[str] = _SCALES,
    shapes: Callable[[ArrayEntry, ArrayEntry], bool] = _blocks,
    **others: Iterable[str],
) -> Callable[[Members], bool]:
    """Returns a test of dtypes by role, and of the scale's shape, for members that exist."""
    dtypes = {"codes": frozenset(codes), "scale": frozenset(scale), **{k: frozenset(v) for k, v in others.items()}}

    def fits(members: Members) -> bool:
        if any(entry.dtype not in dtypes[role] for role, entry in members.items() if role in dtypes):
            return False
        return "scale" not in members or shapes(members["codes"], members["scale"])

    return fits


def _qwix_fits(members: Members) -> bool:
    codes = members["codes"]
    return codes.dtype in SMALL_DTYPES and all(
        _tiles(codes, entry) and entry.dtype in (_SCALES if role == "scale" else {codes.dtype})
        for role, entry in members.items()
        if role in ("scale", "zero")
    )


def _gptq_fits(members: Members) -> bool:
    """Tests that codes are packed along the inputs: the columns of codes and scales are the same."""
    codes, scale, zero = members["codes"], members.get("scale"), members.get("zero")
    columns = codes.shape[-1:]
    return (
        codes.dtype == "int32"
        and len(codes.shape) == 2
        and (scale is None or (scale.dtype in _FLOATS and scale.shape[-1:] == columns))
        and (zero is None or scale is None or _packs(zero.shape, scale.shape, -1))
    )


def _awq_fits(members: Members) -> bool:
    """Tests that codes are packed along the outputs: several columns of scales for each of the codes."""
    codes, scale, zero = members["codes"], members.get("scale"), members.get("zero")
    return (
        codes.dtype == "int32"
        and len(codes.shape) == 2
        and scale is not None
        and len(scale.shape) == 2
        and scale.dtype in _FLOATS
        and scale.shape[1] in (8 * codes.shape[1], 4 * codes.shape[1])
        and (zero is None or zero.shape == (scale.shape[0], codes.shape[1]))
    )


def _awq_gemv_fits(members: Members) -> bool:
    codes, scale, zero = members["codes"], members["scale"], members["zero"]
    rows = {entry.shape[:1] for entry in (codes, scale, zero)}
    return codes.dtype == "int32" and len(codes.shape) == 2 and scale.dtype in _FLOATS and len(rows) == 1


def _packs(packed: Sequence[int], plain: Sequence[int], axis: int) -> bool:
    """Returns True if along an axis some 2 to 8 bits of each number are packed into 32 bits, and no axis else differs.

    Both shapes have the same length.
    """
    if len(packed) != len(plain) or not packed:
        return False
    n, m = plain[axis], packed[axis]
    rest = [one for k, one in enumerate(packed) if k != axis % len(packed)]
    return rest == [one for k, one in enumerate(plain) if k != axis % len(plain)] and any(
        m == math.ceil(n * bits / 32) for bits in (1, 2, 3, 4, 5, 6, 7, 8)
    )


def _rows(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if codes and scales, of which there may be one for each row, differ in the last axis alone."""
    return codes.shape[:-1] == scale.shape[:-1] or math.prod(scale.shape) == 1


def _sixteenths(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is one scale for each 8 bytes, which are 16 codes of 4 bits."""
    return _rows(codes, scale) and codes.shape[-1:] == tuple(8 * n for n in scale.shape[-1:])


def _thirty_seconds(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is one scale for each 16 bytes, which are 32 codes of 4 bits."""
    return _rows(codes, scale) and codes.shape[-1:] == tuple(16 * n for n in scale.shape[-1:])


def _in_groups(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if the scales are those of groups of 16 bytes each, along the codes' last axis."""
    return codes.shape == (*scale.shape, 16)


def _mlx_fits(members: Members) -> bool:
    """Tests that scales and biases are alike, and each covers an entire number of packed codes."""
    codes, scale, bias = members["codes"], members["scale"], members.get("bias")
    return (
        codes.dtype == "uint32"
        and len(codes.shape) >= 2
        and _tiles(codes, scale)
        and scale.dtype in (_FLOATS if bias else {"uint8"})
        and (bias is None or (bias.shape, bias.dtype) == (scale.shape, scale.dtype))
    )


def _per_output(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is a scale for each row of a matrix."""
    return len(codes.shape) == 2 and scale.shape == codes.shape[:1]


def _any_shape(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    return True


_NF4 = {"state_nf4": "/quant_state/bitsandbytes__nf4", "state_fp4": "/quant_state/bitsandbytes__fp4"}
_NESTED = {"nested_scale": "/nested_absmax", "nested_table": "/nested_quant_map"}
_QWIX = {"zero": "zero_point"}
_AQT_MORE = {"scale_1": "scale/1", "bias": "bias/0", "bias_1": "bias/1", "mask": "sparsity_mask"}
_INPUT = {"activation": "input_scale"}

# The first row that fits wins, so that narrow rows precede wide ones.
LAYOUTS = (
    Layout(
        "qwix",
        "qwix 0.1.8, qwix/_src/core/qarray.py",
        "array/qvalue",
        {"scale": "array/scale"},
        {"zero": "array/zero_point", "awq": "awq_scale", "smooth": "sq_scale"},
        "",
        True,
        _qwix_fits,
    ),
    Layout("qwix", "qwix 0.1.8, qwix/_src/core/qarray.py", "qvalue", {"scale": "scale"}, _QWIX, "", True, _qwix_fits),
    Layout(
        "AQT",
        "aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py",
        "qvalue",
        {"scale": "scale/0"},
        {**_AQT_MORE, "scale_t": "scale_t/0"},
        "",
        False,
        _fits(SMALL_DTYPES, shapes=_tiles),
    ),
    Layout(
        "AQT with transposed scales",
        "aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py",
        "qvalue",
        {"scale": "scale_t/0"},
        {"bias": "bias/0", "mask": "sparsity_mask"},
        "",
        False,
        _fits(SMALL_DTYPES, shapes=_any_shape),
    ),
    *(
        Layout(
            "AQT with transposed scales",
            "aqtp 0.9.0, aqt/jax/v2/flax/aqt_flax.py, its legacy Freezer",
            f"{side}/value",
            {"scale": f"{side}/scale"},
            {},
            side,
            False,
            _fits(SMALL_DTYPES, _FLOATS, _any_shape),
        )
        for side in ("qrhs", "qlhs")
    ),
    Layout(
        "GPTQ",
        "gptqmodel 7.7.0, gptqmodel/nn_modules/qlinear/__init__.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {"order": "g_idx"},
        "weight",
        True,
        _gptq_fits,
    ),
    Layout(
        "AWQ",
        "autoawq 0.2.9, awq/modules/linear/gemm.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {},
        "weight",
        True,
        _awq_fits,
    ),
    Layout(
        "AWQ for GEMV",
        "autoawq 0.2.9, awq/modules/linear/gemv.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {},
        "weight",
        False,
        _awq_gemv_fits,
    ),
    Layout(
        "compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/pack_quantized/base.py",
        "weight_packed",
        {"scale": "weight_scale", "shape": "weight_shape"},
        {"zero": "weight_zero_point", "order": "weight_g_idx", **_INPUT},
        "weight",
        True,
        _fits({"int32"}, _FLOATS, _rows, zero={"int32"}),
    ),
    Layout(
        "NVFP4",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/nvfp4/base.py",
        "weight_packed",
        {"scale": "weight_scale", "global_scale": "weight_global_scale"},
        {"activation": "input_global_scale"},
        "weight",
        True,
        _fits({"uint8"}, {"float8_e4m3fn"}, _sixteenths),
    ),
    Layout(
        "MXFP4 of compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp4/base.py",
        "weight_packed",
        {"scale": "weight_scale"},
        {},
        "weight",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _thirty_seconds),
    ),
    Layout(
        "MXFP6",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp6/base.py",
        "weight_packed",
        {"scale": "weight_scale"},
        {},
        "weight",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _rows),
    ),
    Layout(
        "NVFP4 of ModelOpt",
        "not read",
        "weight",
        {"scale": "weight_scale", "global_scale": "weight_scale_2"},
        _INPUT,
        "weight",
        False,
        _fits({"uint8"}, {"float8_e4m3fn"}, _sixteenths),
    ),
    Layout(
        "MXFP8",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp8/base.py",
        "weight",
        {"scale": "weight_scale"},
        _INPUT,
        "weight",
        False,
        _fits(_FLOAT8, {"uint8", "float8_e8m0fnu"}, _rows),
    ),
    Layout(
        "fp8",
        "transformers 4.57.1, integrations/finegrained_fp8.py",
        "weight",
        {"scale": "weight_scale_inv"},
        _INPUT,
        "weight",
        False,
        _fits(_SIGNED),
    ),
    Layout(
        "compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/naive_quantized/base.py",
        "weight",
        {"scale": "weight_scale"},
        {"zero": "weight_zero_point", "order": "weight_g_idx", **_INPUT},
        "weight",
        False,
        _fits(_SIGNED, _FLOATS),
    ),
    Layout(
        "quanto",
        "optimum-quanto 0.2.7, optimum/quanto/tensor/qbytes.py",
        "weight/_data",
        {"scale": "weight/_scale"},
        _INPUT,
        "weight",
        False,
        _fits(_SIGNED, _FLOATS),
    ),
    Layout(
        "MXFP4",
        "transformers 4.57.1, integrations/mxfp4.py",
        "_blocks",
        {"scale": "_scales"},
        {},
        "",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _in_groups),
    ),
    Layout(
        "MLX",
        "mlx-lm 0.32.2, mlx.nn.QuantizedLinear",
        "weight",
        {"scale": "scales", "bias": "biases"},
        {},
        "weight",
        False,
        _mlx_fits,
    ),
    Layout("MXFP4 of MLX", "not read", "weight", {"scale": "scales"}, {}, "weight", False, _mlx_fits),
    Layout(
        "bitsandbytes",
        "bitsandbytes 0.48.2, bitsandbytes/functional.py",
        "",
        {"scale": "/absmax", "table": "/quant_map"},
        {**_NF4, **_NESTED},
        "",
        False,
        _fits({"uint8", "int8"}, {"float32", "uint8"}, _any_shape),
    ),
    Layout(
        "LLM.int8",
        "bitsandbytes 0.48.2, bitsandbytes/nn/modules.py",
        "weight",
        {"scale": "SCB"},
        {"format": "weight_format"},
        "weight",
        False,
        _fits({"int8"}, _FLOATS, _per_output),
    ),
    Layout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/dense.py",
        "kernel",
        {"scale": "kernel_scale"},
        {"zero": "kernel_zero", "order": "g_idx"},
        "kernel",
        False,
        _fits({"int8", "uint8"}, _FLOATS, _any_shape),
    ),
    Layout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/dense.py",
        "quantized_kernel",
        {"scale": "kernel_scale"},
        {"zero": "kernel_zero", "order": "g_idx", "awq": "awq_scales"},
        "kernel",
        True,
        _fits({"int8", "uint8"}, _FLOATS, _any_shape),
    ),
    Layout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/embedding.py",
        "embeddings",
        {"scale": "embeddings_scale"},
        {"zero": "embeddings_zero", "order": "g_idx"},
        "embeddings",
        False,
        _fits({"int8", "uint8"}, _FLOATS, _any_shape),
    ),
    # Several libraries write such names for other arrays than `weight`, too. Some multiply by the scale, others divide.
    Layout("fp8", "transformers 4.57.1", "", {"scale": "_scale_inv"}, {}, "", False, _fits(_SIGNED)),
    Layout("unknown", "not read", "", {"scale": "_scale"}, {}, "", False, _fits(_SIGNED, _FLOATS)),
)

# The rows and spellings of codes that a name may be the last part of, in the order of `LAYOUTS`.
_SPELLED = [
    (layout, codes) for layout in LAYOUTS for codes in dict.fromkeys((layout.codes, layout.codes.replace("/", ".")))
]
_ANY_NAME = [(layout, codes) for layout, codes in _SPELLED if codes.startswith("_") or not codes]
_ROWS = {
    name: [(layout, codes) for layout, codes in _SPELLED if _last_name(codes) == name or (layout, codes) in _ANY_NAME]
    for name in {_last_name(codes) for _, codes in _SPELLED}
}
