"""Serves the viewer, a page that shows checkpoints in the browser, and what it shows of one path on loopback."""

from .server import RunningView, Served, ViewServer, view

__all__ = ["RunningView", "Served", "ViewServer", "view"]
