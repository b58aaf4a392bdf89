"""Writes a run as one HTML page that needs no network: its timeline, its contents, and changes of its leaves."""

from .gather import gather
from .page import check_replaceable, page

__all__ = ["check_replaceable", "gather", "page"]
