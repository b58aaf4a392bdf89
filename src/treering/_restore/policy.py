"""Holds the differences between a template and a checkpoint that the caller of a restore allows."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._core import dtypes
from .._core.entries import Entry, glob_covers
from .._core.leaf_paths import Globs, find_globs, globs_of
from .._core.quantized import Member
from ..errors import MismatchError


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The differences that are allowed; see `treering.restore`. Raises `MismatchError` for bad arguments."""

    missing: str | Iterable[str] = "error"
    extra: str | Iterable[str] = "error"
    dtype: Any = None
    grow: Sequence[str] = ()
    at: str = ""  # the caller's `at`, because an error that suggests arguments must include it
    rules: bool = False  # True if the caller gave rules
    kinds: Literal["template", "saved"] = "template"  # decides the type and dtype of a leaf
    cast_leaves: frozenset[str] = frozenset()  # leaves whose type and dtype the template decides in any case
    quantized: Callable[[], Mapping[str, Member]] = dict  # finds the members of quantized weights, whose dtypes stay

    def __post_init__(self) -> None:
        for name, value, keyword in (("missing", self.missing, "template"), ("extra", self.extra, "ignore")):
            globs = Globs(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
            if value not in ("error", keyword) if globs is None else not all(isinstance(glob, str) for glob in globs):
                such = f", such as [{value!r}]" if isinstance(value, str) else ""
                raise MismatchError(
                    f"{name}={value!r}: expected 'error', {keyword!r} or a list of globs of paths{such}"
                )
            if globs is not None:
                object.__setattr__(self, name, globs)  # An iterator could be read only once.
        grown = tuple(self.grow) if isinstance(self.grow, Iterable) and not isinstance(self.grow, str) else (None,)
        if not all(isinstance(glob, str) for glob in grown):
            raise MismatchError(f"grow={self.grow!r}: expected a list of globs of paths")
        object.__setattr__(self, "grow", grown)
        if self.dtype is None or (isinstance(self.dtype, str) and self.dtype == "template"):
            return
        try:
            known = dtypes.is_float(np.dtype(self.dtype))
        except TypeError:
            known = False
        if not known:
            raise MismatchError(
                f"dtype={self.dtype!r}: expected 'template' or a floating-point dtype such as 'bfloat16'; "
                "tr.rules.cast changes the dtype of other leaves"
            )

    def among(self, template: Collection[str], found: Collection[str]) -> "Policy":
        """Returns the policy in which globs without wildcards are the paths that they mean; see `find_path`."""
        missing, extra = (
            value if isinstance(value, str) else find_globs(value, paths)
            for value, paths in ((self.missing, template), (self.extra, found))
        )
        return dataclasses.replace(self, missing=missing, extra=extra)

    def allows(self, which: Literal["missing", "extra"], path: str, entry: Entry | None = None) -> bool:
        """Returns True if the leaf at a path may be missing from the checkpoint, or from the template (`extra`)."""
        value = self.missing if which == "missing" else self.extra
        return value != "error" if isinstance(value, str) else glob_covers(path, entry, globs_of(value))

    def cast(self, path: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype that an array becomes in a restore without a template. Only floats are cast."""
        asked = self.dtype not in (None, "template") and dtypes.is_float(dtype) and path not in self.quantized()
        return np.dtype(self.dtype) if asked else dtype
