"""Writes runs as one HTML page that needs no network: timelines, contents, and changes of leaves."""

from .page import ReportPage, find_several, report

__all__ = ["ReportPage", "find_several", "report"]
