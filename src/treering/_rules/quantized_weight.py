"""Makes float weights of codes and scales, with the arithmetic of the libraries that wrote them.

`treering._core.quantized_layouts` names the release and the file in which each was read.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .._core import dtypes
from .._core.describe import describe_entry
from .._core.entries import LostEntry, check_readable
from .._core.leaf_paths import join_names
from .._core.quantized import Group
from .._core.source import Source, model_config, static_values
from .._core.views import Leaf, reinterpreted, transposed
from .._core.views_groups import reshaped
from .._core.views_quantized import Packing, Step, scaled, unpacked
from ..errors import CorruptError, MismatchError, UnsupportedError
from .base import Leaves, require_array

if TYPE_CHECKING:
    import numpy as np

_BITS = (2, 4, 8)  # of codes, none of which is in two words
_DEEPSEEK_BLOCK = 128  # rows and columns, in its own programs
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ_ORDER of awq/utils/packing_utils.py
_NARROWER = "not dequantized; a narrower glob leaves it as it is"
_LLM_INT8 = 7.874015718698502e-3  # 1 / 127 as bitsandbytes writes it, in _ops.py


def deciding(groups: Sequence[Group], leaves: Leaves, text: str) -> dict[str, Leaf]:
    """Returns the small arrays that decide the shape of a weight, by path."""
    roles = ("shape", "table", "nested_table", "state_nf4", "state_fp4", "format")
    return {
        path: require_array(leaves[path], text)
        for group in groups
        for role, path in group.members.items()
        if role in roles
    }


class QuantizedWeight:
    """Makes one weight.

    values: the arrays that decide its shape, by path; see `deciding`.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        source: Source | None,
        values: "Mapping[str, np.ndarray]",
        dtype: str | None,
        config: Mapping[str, Any],
        text: str,
    ):
        self._group, self._source, self._text = group, source, text
        self._wanted, self._config = dtype, config
        self._values = {role: values[path] for role, path in group.members.items() if path in values}
        lost = [leaves[path] for path in group.missing if path in leaves]
        check_readable([leaf.entry for leaf in lost if isinstance(leaf.entry, LostEntry)])
        if group.missing:
            self._fail(f"expected {join_names(group.missing)}, found nothing", "the checkpoint is incomplete")
        self._leaves = {role: require_array(leaves[path], text) for role, path in group.members.items()}

    def made(self) -> Leaf:
        """Returns the weight. Raises `MismatchError` if its arrays do not fit, or do not say enough."""
        name = self._group.layout.name
        if name not in _RECIPES:
            self._fail(
                f"{name} is not dequantized",
                f"its arithmetic is not known here; a narrower glob leaves "
                f"{join_names(tuple(self._group.members.values()))} as they are, and tr.rules.scale multiplies by a "
                "scale",
            )
        return _RECIPES[name](self)

    def _fail(self, problem: str, advice: str) -> NoReturn:
        raise MismatchError(f"{self._text}: {self._group.path}: {problem}; {advice}")

    def _corrupt(self, role: str, problem: str) -> NoReturn:
        raise CorruptError(f"{self._text}: {self._group.members[role]}: {problem}; the file is damaged")

    def _known(self, name: str, choices: str) -> Any:
        """Returns what the caller or the checkpoint says and the arrays do not. Raises `MismatchError` if none does."""
        found = self._about(name)
        if found is None:
            self._fail(
                f"the arrays of {self._group.layout.name} do not say its {name}",
                f"pass dequantize(…, config={{{name!r}: …}}): {choices}",
            )
        return found

    def _about(self, name: str) -> Any:
        stem = self._group.path.rpartition(".")[0] or self._group.path
        given = [self._config]
        if self._source is not None:
            codes = self._leaves["codes"].source
            given += [static_values(self._source).get(codes.rpartition("/")[0], {}), model_config(self._source)]
        for one in given:  # MLX lists layers with other values by name.
            for own in (one.get(stem), one):
                if isinstance(own, Mapping) and own.get(name) is not None:
                    return own[name]
        return None

    def _has_config(self) -> bool:
        return bool(self._config or (self._source is not None and model_config(self._source)))

    def _dtype(self, scale: Leaf) -> str:
        """Returns the dtype that the caller wants, or that of the scales if they are not too small for weights."""
        own = scale.array.dtype
        return self._wanted or (own if dtypes.itemsize(own) > 1 else "bfloat16")

    def _float(self, role: str) -> Leaf:
        leaf = self._leaves[role]
        if dtypes.itemsize(leaf.array.dtype) > 4:
            self._fail(f"{leaf.entry.path} is {leaf.array.dtype}, which float32 cannot hold exactly", "cast it before")
        return leaf

    def _shape(self, role: str, *expected: int) -> None:
        entry = self._leaves[role].array
        if entry.shape != expected:
            self._fail(
                f"expected {entry.path} of the shape {list(expected)}, found {list(entry.shape)}",
                "the arrays are not of one save, or of another layout",
            )

    def _tiles(self, role: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the block of an operand whose sizes divide those of the weight."""
        own = self._leaves[role].array.shape
        if len(own) != len(shape) or any(m == 0 or n % m for n, m in zip(shape, own, strict=True) if n):
            self._fail(
                f"expected {self._leaves[role].entry.path} with sizes that divide {list(shape)}, found {list(own)}",
                "the arrays are not of one save, or of another layout",
            )
        return tuple(max(n // max(m, 1), 1) for n, m in zip(shape, own, strict=True))

    def _blocks(self, role: str, shape: Sequence[int]) -> tuple[Leaf, tuple[int, ...]]:
        """Returns an operand and its block: all of the weight, rows, or blocks of which the last may be smaller."""
        leaf = self._float(role)
        own = leaf.array.shape
        if math.prod(own) == 1:
            return reshaped(leaf, (1,) * len(shape)), tuple(max(n, 1) for n in shape)
        if len(own) < len(shape) and own == tuple(shape[: len(own)]):
            leaf = reshaped(leaf, own + (1,) * (len(shape) - len(own)))
            own = leaf.array.shape
        if len(own) != len(shape):
            self._fail(
                f"expected {leaf.entry.path} with one element, one for each row or for each block of {list(shape)}, "
                f"found {list(own)}",
                "the arrays are not of one save, or of another layout",
            )
        partial = [axis for axis, (n, m) in enumerate(zip(shape, own, strict=True)) if m not in (1, n)]
        block = [max(n, 1) if m == 1 else 1 for n, m in zip(shape, own, strict=True)]
        grouped = partial == [len(shape) - 1] and (len(shape) == 1 or own[-2] == shape[-2] != 1)
        for axis in partial:
            n, m = shape[axis], own[axis]
            block[axis] = n // m if grouped and n % m == 0 else self._block_size(leaf, n, m, axis - len(shape))
        return leaf, tuple(block)

    def _block_size(self, leaf: Leaf, n: int, m: int, axis: int) -> int:
        given = self._about("weight_block_size")
        usual = [_DEEPSEEK_BLOCK] if self._group.layout.name == "fp8" or -(-n // _DEEPSEEK_BLOCK) == m else []
        sizes = set(usual) | ({n // m} if n % m == 0 and self._group.layout.name != "fp8" else set())
        if isinstance(given, Sequence) and len(given) >= -axis:
            sizes = {given[axis]}
        if len(sizes) != 1:
            self._known("weight_block_size", "the rows and columns of a block, such as [128, 128]")
            self._fail(f"config={{'weight_block_size': {given!r}}}", "expected an integer for each axis of a block")
        (size,) = sizes
        if type(size) is not int or size < 1 or -(-n // size) != m:
            self._fail(
                f"expected {leaf.entry.path} with one element for each {size} of {n} along axis {axis}, found {m}",
                "pass the size of the blocks: dequantize(…, config={'weight_block_size': [rows, columns]})",
            )
        return size

    def _order(self, size: int, groups: int) -> tuple[Leaf | None, int]:
        """Returns the group of each input, if the checkpoint has it, and the number of inputs in a group."""
        order = self._leaves.get("order")
        if order is None:
            if groups == 0 or size % groups:
                self._fail(
                    f"expected a number of groups that divides {size}, found {groups}", f"g_idx is missing; {_NARROWER}"
                )
            return None, max(size // groups, 1)
        if order.array.shape != (size,) or not dtypes.is_integer(dtypes.to_numpy(order.array.dtype)):
            self._fail(
                f"expected {order.entry.path} as {size} integers, found {describe_entry(order.array)}",
                "the arrays are not of one save",
            )
        return order, max(-(-size // max(groups, 1)), 1)

    def _number(self, name: str) -> int:
        """Returns a positive integer that only the caller or the model's configuration knows."""
        found = self._known(name, "as in the model's config.json")
        if type(found) is not int or found < 1:
            self._fail(f"config={{{name!r}: {found!r}}}", "expected a positive integer")
        return found

    def qwix(self) -> Leaf:
        codes, scale = self._leaves["codes"], self._float("scale")
        for role in ("awq", "smooth"):
            if role in self._leaves:
                self._fail(f"the weight was multiplied by {self._group.members[role]} before", _NARROWER)
        shape = codes.array.shape
        table = None
        if codes.array.dtype in ("uint4", "uint8") and "zero" not in self._leaves:  # A cast of uint4 makes uint8.
            qtype = self._known("qtype", f"'nf4' for a code book, or {codes.array.dtype!r} for numbers")
            table = _nf4(scale.array.dtype) if qtype == "nf4" else None
        steps = [Step("multiply", scale, self._tiles("scale", shape))]
        if "zero" in self._leaves:
            steps.insert(0, Step("subtract", self._leaves["zero"], self._tiles("zero", shape)))
        return scaled(codes, steps, self._dtype(scale), table=table)

    def aqt(self) -> Leaf:
        codes, scale = self._leaves["codes"], self._float("scale")
        if "mask" in self._leaves:
            self._fail(f"{self._group.members['mask']} makes it sparse", _NARROWER)
        if self._about("tiling_state") is not None:
            self._fail("it is stored in tiles, which only its tiling_state describes", _NARROWER)
        shape, own = codes.array.shape, scale.array.dtype
        steps = [
            Step("subtract" if role.startswith("bias") else "multiply", self._float(role), self._tiles(role, shape))
            for role in ("scale", "scale_1", "bias", "bias_1")
            if role in self._leaves
        ]
        rounded = own if len(steps) > 1 and dtypes.itemsize(own) < 4 else ""  # in which the library computes
        return scaled(codes, [step._replace(rounds_to=rounded) for step in steps], self._dtype(scale))

    def blocks(self) -> Leaf:
        codes = self._leaves["codes"]
        shape = codes.array.shape
        if self._group.layout.name == "fp8" and "int" in codes.array.dtype:
            self._fail(
                f"{codes.entry.path} is {codes.array.dtype}, which may be two float4 in a byte", "expected float8"
            )
        scale, block = self._blocks("scale", shape)
        if "order" in self._leaves:
            order, size = self._order(shape[-1], scale.array.shape[-1])
            block = (*block[:-1], size)
        else:
            order = None
        steps = [Step("multiply", scale, block, order, len(shape) - 1)]
        if "zero" in self._leaves:
            self._shape("zero", *self._leaves["scale"].array.shape)
            zero = reshaped(self._leaves["zero"], scale.array.shape)
            steps.insert(0, Step("subtract", zero, block, order, len(shape) - 1))
        return scaled(codes, steps, self._dtype(scale))

    def gptq(self) -> Leaf:
        codes, scale, zero = self._leaves["codes"], self._float("scale"), self._leaves["zero"]
        if "embed" in self._group.path:
            self._fail(
                "GPTQ stores embeddings the other way round, and the arrays do not say which they are",
                "take a narrower glob",
            )
        (words, outputs), (groups, columns) = codes.array.shape, scale.array.shape
        bits = next((bits for bits in range(1, 9) if -(-columns * bits // 32) == zero.array.shape[-1]), 0)
        if bits not in _BITS:
            self._fail(
                f"codes of {bits} bits are not dequantized"
                if bits
                else f"expected {zero.entry.path} for {columns} columns",
                "expected codes of 2, 4 or 8 bits",
            )
        per = 32 // bits
        self._shape("scale", groups, outputs)
        self._shape("zero", groups, -(-outputs // per))
        size = self._leaves["order"].array.shape[0] if "order" in self._leaves else words * per
        if -(-size // per) != words:
            self._fail(
                f"expected {codes.entry.path} with {-(-size // per)} rows for {size} codes of {bits} bits, found "
                f"{words}",
                "the arrays are not of one save",
            )
        order, each = self._order(size, groups)
        text = "'gptq' for zeros stored minus one, 'gptq_v2' for zeros as they are"
        version = self._about("checkpoint_format") or ("gptq" if self._has_config() else None)
        version = version or self._known("checkpoint_format", text)
        if version not in ("gptq", "gptq_v2"):
            self._fail(f"found checkpoint_format {version!r}", f"expected {text}")
        zeros = unpacked(transposed(zero, (1, 0)), Packing.of("int32", bits, 0), size=outputs)
        check = None
        if version == "gptq":
            zeros = scaled(zeros, [Step("add", 1)], "float32")
            check = self._no_wrapped_zeros(1 << bits)
        block = (1, each)
        return scaled(
            transposed(codes, (1, 0)),
            [
                Step("subtract", zeros, block, order, 1, check=check),
                Step("multiply", transposed(scale, (1, 0)), block, order, 1),
            ],
            self._dtype(scale),
            packing=Packing.of("int32", bits, 1),
            size=size,
        )

    def _no_wrapped_zeros(self, limit: int) -> "Callable[[np.ndarray], None]":
        path = self._group.members["zero"]

        def check(zeros: "np.ndarray") -> None:
            if (zeros >= limit).any():
                raise CorruptError(
                    f"{path}: expected zeros from 0 to {limit - 2}, stored minus one, found {limit - 1}, which "
                    f"libraries read as 0 or as {limit}; quantize again, or save with checkpoint_format 'gptq_v2'"
                )

        return check

    def awq(self) -> Leaf:
        codes, scale, zero = self._leaves["codes"], self._float("scale"), self._leaves["zero"]
        (inputs, words), (groups, outputs) = codes.array.shape, scale.array.shape
        if outputs != 8 * words:
            self._fail(f"{words} words for {outputs} codes", "expected codes of 4 bits, 8 in a word")
        self._shape("zero", groups, words)
        order, each = self._order(inputs, groups)
        packing = Packing(0, 4, _AWQ_PLACES)
        steps = [
            Step("subtract", unpacked(transposed(zero, (1, 0)), packing), (1, each), order, 1),
            Step("multiply", transposed(scale, (1, 0)), (1, each), order, 1),
        ]
        return scaled(transposed(codes, (1, 0)), steps, self._dtype(scale), packing=packing)

    def compressed(self) -> Leaf:
        if "shape" not in self._leaves:
            return self.blocks()
        codes = self._leaves["codes"]
        stored, shape = codes.array.shape, tuple(int(n) for n in self._values["shape"].reshape(-1))
        if not shape or len(shape) != len(stored) or shape[:-1] != stored[:-1] or min(shape) < 0:
            self._corrupt("shape", f"expected the shape of {list(stored[:-1])} rows of codes, found {list(shape)}")
        words, columns = stored[-1], shape[-1]
        fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
        if not fitting:
            self._corrupt("shape", f"expected a size for {words} words of 32 bits, found {columns}")
        if len(fitting) > 1:
            given = self._scheme().get("num_bits") or self._known("bits", "those of a code")
            fitting = [bits for bits in fitting if bits == given] or [0]
        bits = fitting[0]
        if bits not in _BITS:
            self._fail(f"codes of {bits} bits are not dequantized", "expected codes of 2, 4 or 8 bits")
        scale, block = self._blocks("scale", shape)
        order = None
        if "order" in self._leaves:
            order, size = self._order(shape[-1], scale.array.shape[-1])
            block = (*block[:-1], size)
        axis, half = len(shape) - 1, 1 << (bits - 1)
        steps = [Step("multiply", scale, block, order, axis)]
        if "zero" in self._leaves:  # Both are stored plus half of their range.
            rows = shape[-2] if len(shape) > 1 else 1
            self._shape("zero", *shape[:-2], -(-rows * bits // 32), *scale.array.shape[axis:])
            zero = unpacked(self._leaves["zero"], Packing.of("int32", bits, axis - 1), size=rows)
            steps.insert(0, Step("subtract", zero, block, order, axis))
        else:
            steps.insert(0, Step("subtract", half))
        return scaled(codes, steps, self._dtype(scale), packing=Packing.of("int32", bits, axis), size=columns)

    def _scheme(self) -> Mapping[str, Any]:
        """Returns how all weights are quantized, if the model's config says so and they do not differ."""
        groups = self._about("config_groups")
        found = [one.get("weights") for one in groups.values()] if isinstance(groups, Mapping) else []
        return found[0] if len(found) == 1 and isinstance(found[0], Mapping) else {}

    def fp4(self) -> Leaf:
        """Makes the weight of float4 codes and scales for 16 or 32 of them."""
        codes, scale = self._leaves["codes"], self._leaves["scale"]
        axis = len(codes.array.shape) - 1
        packing = Packing.of("uint8", 4, axis)
        block = self._tiles("scale", packing.shape(codes.array.shape))
        if scale.array.dtype == "uint8":
            scale = reinterpreted(scale, "float8_e8m0fnu")
        if "global_scale" in self._leaves:
            overall = self._float("global_scale")
            if math.prod(overall.array.shape) != 1:
                self._shape("global_scale", 1)
            one = reshaped(overall, (1,) * (axis + 1))
            scale = scaled(scale, [Step("divide", one, tuple(max(n, 1) for n in scale.array.shape))], "float32")
        dtype = self._wanted or "bfloat16"
        return scaled(codes, [Step("multiply", scale, block)], dtype, packing=packing, codes="float4_e2m1fn")

    def mxfp4(self) -> Leaf:
        """Makes the weight of gpt-oss, whose last two axes change places."""
        codes, scale = self._leaves["codes"], self._leaves["scale"]
        *outer, rows, groups, size = codes.array.shape
        self._shape("scale", *outer, rows, groups)
        rank = len(outer) + 2
        axes = (*range(rank - 2), rank - 1, rank - 2)
        if scale.array.dtype == "uint8":
            scale = reinterpreted(scale, "float8_e8m0fnu")
        return scaled(
            transposed(reshaped(codes, (*outer, rows, groups * size)), axes),
            [Step("multiply", transposed(scale, axes), (*(1,) * (rank - 2), 2 * size, 1))],
            self._wanted or "bfloat16",
            packing=Packing.of("uint8", 4, rank - 2),
            codes="float4_e2m1fn",
        )

    def mxfp8(self) -> Leaf:
        codes, scale = self._leaves["codes"], self._leaves["scale"]
        block = self._tiles("scale", codes.array.shape)
        if scale.array.dtype == "uint8":
            scale = reinterpreted(scale, "float8_e8m0fnu")
        return scaled(codes, [Step("multiply", scale, block)], self._wanted or "bfloat16")

    def mlx(self) -> Leaf:
        codes, scale, bias = self._leaves["codes"], self._float("scale"), self._float("bias")
        bits, each = self._number("bits"), self._number("group_size")
        if bits not in _BITS:
            self._fail(f"codes of {bits} bits are not dequantized", "expected codes of 2, 4 or 8 bits")
        packing = Packing.of("uint32", bits, len(codes.array.shape) - 1)
        shape = packing.shape(codes.array.shape)
        if scale.array.shape != (*shape[:-1], shape[-1] // each) or shape[-1] % each:
            self._fail(
                f"expected a scale for each {each} codes of {bits} bits, found {describe_entry(scale.array)} for "
                f"{describe_entry(codes.array)}",
                "pass what the model's config.json says: dequantize(…, config={'bits': …, 'group_size': …})",
            )
        block = (*(1,) * (len(shape) - 1), each)
        own = scale.array.dtype if dtypes.itemsize(scale.array.dtype) < 4 else ""
        steps = [Step("multiply", scale, block, rounds_to=own), Step("add", bias, block, rounds_to=own)]
        return scaled(codes, steps, self._dtype(scale), packing=packing)

    def bitsandbytes(self) -> Leaf:
        role = next((role for role in ("state_nf4", "state_fp4") if role in self._leaves), None)
        if role is None:
            self._fail("expected its quant_state, found none", _NARROWER)
        codes, scale = self._leaves["codes"], self._leaves["scale"]
        try:
            about = json.loads(self._values[role].tobytes())
            shape, size, own = tuple(map(int, about["shape"])), int(about["blocksize"]), str(about["dtype"])
            offset, nested = float(about.get("nested_offset", 0)), int(about.get("nested_blocksize", 0))
            if not dtypes.is_float(dtypes.to_numpy(own)):
                raise ValueError(f"weights of {own}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, UnsupportedError) as error:
            self._corrupt(role, f"expected the JSON of a quant_state, found {error}")
        count = math.prod(shape)
        if 2 * math.prod(codes.array.shape) != count + count % 2 or min(shape, default=1) < 0 or size < 1:
            self._corrupt(role, f"expected the shape of {2 * math.prod(codes.array.shape)} codes, found {list(shape)}")
        self._shape("scale", -(-count // size))
        if "nested_scale" in self._leaves:
            step = Step("multiply", self._float("nested_scale"), (max(nested, 1),))
            self._shape("nested_scale", -(-math.prod(scale.array.shape) // max(nested, 1)))
            table = self._values["nested_table"].astype("float32")
            scale = scaled(scale, [step, Step("add", offset)], "float32", table=table)
        flat = reinterpreted(reshaped(codes, (-(-count // 2),)), "uint8")
        dtype = self._wanted or own
        table = self._values["table"].astype("float32")
        packing = Packing(0, 4, (1, 0))  # The upper half comes first.
        weight = scaled(flat, [Step("multiply", scale, (size,))], dtype, packing=packing, size=count, table=table)
        return reshaped(weight, shape)

    def llm_int8(self) -> Leaf:
        codes, scale = self._leaves["codes"], self._float("scale")
        if "format" in self._values and self._values["format"].any():
            self._fail(f"{self._group.members['format']} is not 0", "expected rows one after another")
        rows = reshaped(scale, (*scale.array.shape, 1))
        steps = [Step("multiply", rows, (1, max(codes.array.shape[1], 1))), Step("multiply", _LLM_INT8)]
        return scaled(codes, steps, self._dtype(scale))


# By the name of the layout. A layout without a recipe is recognized and refused.
_RECIPES: Mapping[str, Callable[[QuantizedWeight], Leaf]] = {
    "qwix": QuantizedWeight.qwix,
    "AQT": QuantizedWeight.aqt,
    "fp8": QuantizedWeight.blocks,
    "compressed-tensors": QuantizedWeight.compressed,
    "GPTQ": QuantizedWeight.gptq,
    "AWQ": QuantizedWeight.awq,
    "NVFP4": QuantizedWeight.fp4,
    "MXFP4 of compressed-tensors": QuantizedWeight.fp4,
    "MXFP4": QuantizedWeight.mxfp4,
    "MXFP8": QuantizedWeight.mxfp8,
    "MLX": QuantizedWeight.mlx,
    "bitsandbytes": QuantizedWeight.bitsandbytes,
    "LLM.int8": QuantizedWeight.llm_int8,
}


def _nf4(dtype: str) -> "np.ndarray[Any, Any]":
    """Returns the code book of QLoRA (appendix E of arXiv 2305.14314), as rounded to a dtype."""
    import numpy as np

    upper = [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    upper += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    lower = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    lower += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    book = dtypes.convert(np.array(lower + upper, np.float32), dtypes.to_numpy(dtype)).astype(np.float32)
    return book[np.arange(256) % 16]  # by the byte of a uint4
