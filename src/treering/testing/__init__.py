"""A test kit for those who add to Treering. It needs pytest, which nothing else of Treering does."""

import pytest

# Failing assertions show what they compared, as they do in one's own tests.
for _name in (
    "_subject",
    "_reading",
    "_detection",
    "_writing",
    "_commits",
    "_damage",
    "_doubles",
    "_samples",
    "_store_subject",
    "_store_reading",
    "_store_writing",
    "stores",
):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from ._samples import DTYPES, NAMES, VALUES, sample  # noqa: E402
from .conformance import FormatConformance  # noqa: E402
from .stores import StoreConformance  # noqa: E402

__all__ = ["DTYPES", "NAMES", "VALUES", "FormatConformance", "StoreConformance", "sample"]
