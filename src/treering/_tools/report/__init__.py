"""Writes runs as one HTML page that needs no network: timelines, contents, and changes of leaves."""

from .gather import gather, gather_runs
from .page import check_replaceable, page

__all__ = ["check_replaceable", "gather", "gather_runs", "page"]
