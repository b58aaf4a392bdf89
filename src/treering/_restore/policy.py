"""The differences between a template and a checkpoint that a caller allows."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, Literal

import numpy as np

from .._core import dtypes
from .._core.entries import Entry, covered
from .._core.leaf_paths import all_meant
from ..errors import MismatchError


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The differences that are allowed; see `treering.restore`."""

    missing: str | Iterable[str] = "error"
    extra: str | Iterable[str] = "error"
    dtype: Any = None
    at: str = ""  # what the caller gave, for the arguments that an error suggests
    rules: bool = False  # whether the caller gave some
    kinds: Literal["template", "saved"] = "template"  # what decides the type and dtype of a leaf
    cast_leaves: frozenset[str] = frozenset()  # leaves of which the template decides them in any case

    def __post_init__(self) -> None:
        for name, value, keyword in (("missing", self.missing, "template"), ("extra", self.extra, "ignore")):
            globs = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
            if value not in ("error", keyword) if globs is None else not all(isinstance(glob, str) for glob in globs):
                raise MismatchError(f"{name}={value!r}: expected 'error', {keyword!r} or a list of globs of paths")
            if globs is not None:
                object.__setattr__(self, name, globs)  # it is gone through once for each leaf
        if self.dtype is None or (isinstance(self.dtype, str) and self.dtype == "template"):
            return
        try:
            known = dtypes.is_float(np.dtype(self.dtype))
        except TypeError:
            known = False
        if not known:
            raise MismatchError(f"dtype={self.dtype!r}: expected 'template' or a floating-point dtype")

    def among(self, template: Collection[str], found: Collection[str]) -> "Policy":
        """The policy with the paths that its globs mean."""
        missing, extra = (
            value if isinstance(value, str) else all_meant(value, paths)
            for value, paths in ((self.missing, template), (self.extra, found))
        )
        return dataclasses.replace(self, missing=missing, extra=extra)

    def allows(self, which: Literal["missing", "extra"], path: str, entry: Entry | None = None) -> bool:
        value = self.missing if which == "missing" else self.extra
        return value != "error" if isinstance(value, str) else covered(path, entry, value)

    def cast(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype that floats become where there is no template."""
        asked = self.dtype not in (None, "template") and dtypes.is_float(dtype)
        return np.dtype(self.dtype) if asked else dtype
