"""A test kit for authors of formats and stores. It needs pytest, which no other part of Treering needs."""

import pytest

# pytest rewrites assertions only in test files. Registered modules too show the compared values when one fails.
for _name in (
    "_subject",
    "_reading",
    "_detection",
    "_writing",
    "_commits",
    "_doubles",
    "_samples",
    "_store_reading",
    "_store_writing",
    "conformance",
):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from ._samples import DTYPES, NAMES, VALUES, sample  # noqa: E402
from .conformance import FormatConformance, StoreConformance  # noqa: E402

__all__ = ["DTYPES", "NAMES", "VALUES", "FormatConformance", "StoreConformance", "sample"]
