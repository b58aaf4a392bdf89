"""Serves the viewer, a page that shows checkpoints in the browser, and what it shows of one path on loopback."""

from .server import Served, ViewServer

__all__ = ["Served", "ViewServer"]
