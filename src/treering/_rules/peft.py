"""Implements the rules that translate LoRA between PEFT and JAX libraries, and reads PEFT's config for them."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._core import dtypes
from .._core.entries import is_absent
from .._core.views import Leaf, multiplied, transposed
from ..errors import MismatchError
from .base import Leaves, check_any, check_known, collect_leaves, compile_pattern, require_array, require_texts

_PREFIX = "base_model.model."
# Initializations that leave the base weights as they are. After others an adapter fits only the weights that they made.
_HARMLESS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Options with which a layer computes more than x A B, besides all that begin with "use_".
_VARIANTS = ("lora_bias", "target_parameters", "alora_invocation_tokens", "arrow_config", "kasa_config")
_VARIANTS += ("monteclora_config", "velora_config")


@dataclasses.dataclass(frozen=True)
class Config:
    """The ranks, scaling and targets in PEFT's ``adapter_config.json``.

    `ranks` and `alphas` have those of modules by pattern; the first pattern that matches counts.
    """

    rank: int
    alpha: float
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    stabilized: bool
    targets: tuple[str, ...] | re.Pattern[str] | None

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.fullmatch(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.fullmatch(module)), self.alpha)
        return alpha / math.sqrt(rank) if self.stabilized else alpha / rank

    def has_target(self, module: str) -> bool:
        if isinstance(self.targets, tuple):
            return any(f".{module}".endswith(f".{target}") for target in self.targets)
        return self.targets is None or self.targets.fullmatch(module) is not None


class _Side(NamedTuple):
    """The names of one side. The parts of a module are "a", "b", "embedding_a" and "embedding_b"."""

    pattern: re.Pattern[str]
    foreign: re.Pattern[str]  # what would be lost if it were renamed like the leaves that are no part of LoRA
    hint: str
    name: Callable[[str, str], str]
    rest: Callable[[str], str]


def _peft_name(module: str, part: str) -> str:
    *embedding, letter = part.split("_")
    return f"{_PREFIX}{module}.lora_" + "_".join([*embedding, letter.upper()]) + ("" if embedding else ".weight")


_PEFT = _Side(
    re.compile(rf"(?:{re.escape(_PREFIX)})?(.+)\.lora_(?:([AB])\.weight|(embedding_[AB]))"),
    re.compile(r".*\.lora_(?:[A-Z]|embedding_|magnitude_|ranknum).*"),
    "expected lora_A.weight, lora_B.weight, lora_embedding_A and lora_embedding_B; merge it into the base model by "
    "PEFT's merge_and_unload, or rename it",
    _peft_name,
    lambda path: _PREFIX + path.replace("/", "."),
)
_JAX = _Side(
    re.compile(r"(.+)/lora_((?:embedding_)?[ab])"),
    re.compile(r".*lora_(?:embedding_)?[ab]"),
    "rename it to …/lora_a or …/lora_b by a rule before",
    lambda module, part: f"{module}/lora_{part}",
    lambda path: path.removeprefix(_PREFIX),
)


@dataclasses.dataclass(frozen=True)
class Peft:
    """Renames, transposes and scales LoRA's arrays: from PEFT, or with `back` to it.

    alpha: the layers in JAX multiply by `alpha` / rank themselves; None if they do not.
    """

    config: Config
    alpha: float | None
    back: bool
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = "to_peft(…)" if self.back else "from_peft(…)"
        source, target = (_JAX, _PEFT) if self.back else (_PEFT, _JAX)
        check_known(leaves, text)
        made: list[tuple[str, Leaf]] = []
        found: dict[tuple[str, str], str] = {}
        for path, leaf in leaves.items():
            match = source.pattern.fullmatch(path)
            if match is None or is_absent(leaf.entry):
                if match is None and source.foreign.fullmatch(path):
                    raise MismatchError(f"{text}: {path} is not a part of LoRA that has a place here; {source.hint}")
                made.append((target.rest(path), leaf))
                continue
            module, part = (match[1].replace("/", ".") if self.back else match[1]), match[match.lastindex or 0].lower()
            found[module, part] = path
            made.append((target.name(module, part), self._made(module, part, require_array(leaf, text), text)))
        check_any(found, self.optional, text, leaves)
        for (module, part), path in found.items():
            other = part[:-1] + ("a" if part[-1] == "b" else "b")
            if (module, other) not in found:
                raise MismatchError(f"{text}: {path} has no counterpart {source.name(module, other)}")
        return collect_leaves(text, made)

    def _made(self, module: str, part: str, leaf: Leaf, text: str) -> Leaf:
        path, shape, is_b = leaf.entry.path, leaf.array.shape, part[-1] == "b"
        if len(shape) != 2:
            raise MismatchError(
                f"{text}: expected two axes of {path}, found {list(shape)}; reshape it by a rule before"
            )
        rank = self.config.rank_of(module)
        if shape[is_b != self.back] != rank:
            raise MismatchError(
                f"{text}: {path} has the shape {list(shape)}, and its config says rank {rank}; pass the config of this "
                "adapter, or correct its r or rank_pattern"
            )
        if not dtypes.is_float(dtypes.to_numpy(leaf.array.dtype)):
            raise MismatchError(f"{text}: expected floating-point numbers, found {path} of {leaf.array.dtype}")
        if self.back and not self.config.has_target(module):
            raise MismatchError(
                f"{text}: {path} would be the module {module!r}, which target_modules in the config does not match, so "
                "PEFT would not load it; rename it by a rule before, or change target_modules"
            )
        leaf = transposed(leaf, (1, 0))
        own = 1.0 if self.alpha is None else self.alpha / rank
        scaling = self.config.scaling_of(module)
        if not is_b or scaling == own:
            return leaf
        return multiplied(leaf, own, scaling) if self.back else multiplied(leaf, scaling, own)


def read_config(given: Any, text: str) -> Config:
    """Returns what the rules need of a config. Raises `MismatchError` if it says more than two arrays for a layer."""
    if not isinstance(given, Mapping):
        raise MismatchError(f"{text}: expected the dict of an adapter_config.json, found {given!r:.100}")
    if given.get("peft_type") != "LORA":
        found = repr(given["peft_type"]) if "peft_type" in given else "nothing"
        raise MismatchError(f"{text}: expected an adapter_config.json whose peft_type is 'LORA', found {found}")
    for key in (*_VARIANTS, *(key for key in given if str(key).startswith("use_") and key != "use_rslora")):
        if given.get(key):
            raise MismatchError(
                f"{text}: {key} is set, so its layers compute more than x A B; merge the adapter into the base model "
                "by PEFT's merge_and_unload"
            )
    if (init := given.get("init_lora_weights")) not in _HARMLESS:
        raise MismatchError(
            f"{text}: init_lora_weights is {init!r}, which may change the base weights too; merge the adapter into the "
            "base model by PEFT's merge_and_unload"
        )
    if not isinstance(stabilized := given.get("use_rslora", False), bool):
        raise MismatchError(f"{text}: expected use_rslora, True or False, found {stabilized!r}")
    targets = given.get("target_modules")
    if isinstance(targets, str):
        targets = None if targets == "all-linear" else compile_pattern(targets)
    elif targets is not None:
        targets = require_texts(targets, f"{text}: target_modules")
    return Config(
        _rank(given.get("r", ...), f"{text}: expected r"),
        check_alpha(given.get("lora_alpha", ...), f"{text}: expected lora_alpha"),
        _patterns(given, "rank_pattern", _rank, text),
        _patterns(given, "alpha_pattern", check_alpha, text),
        stabilized,
        targets,
    )


def _patterns(given: Mapping[str, Any], key: str, check: Callable[[Any, str], Any], text: str) -> tuple[Any, ...]:
    """Returns the values of modules by pattern. A pattern matches the end of a name, from the start of a part."""
    found = given.get(key) or {}
    if not isinstance(found, Mapping):
        raise MismatchError(f"{text}: expected {key}, values by pattern, found {found!r:.100}")
    return tuple(
        (
            compile_pattern(rf"(?:.*\.)?(?:{compile_pattern(one).pattern})"),
            check(value, f"{text}: expected {key}[{one!r}]"),
        )
        for one, value in found.items()
    )


def _rank(value: Any, text: str) -> int:
    if type(value) is not int or value < 1:
        raise MismatchError(f"{text}, a positive integer, found {'nothing' if value is ... else repr(value)}")
    return value


def check_alpha(value: Any, text: str) -> float:
    """Returns a number to multiply by. Raises `MismatchError` for anything that has no reciprocal."""
    if type(value) not in (int, float) or not 0 < abs(value) <= sys.float_info.max:
        raise MismatchError(f"{text}, a finite number other than 0, found {'nothing' if value is ... else repr(value)}")
    return value
