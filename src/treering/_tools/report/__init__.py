"""Writes runs as one HTML page that needs no network: timelines, contents, and changes of leaves."""

from .page import Report, find_several, report

__all__ = ["Report", "find_several", "report"]
