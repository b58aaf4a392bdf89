"""Serves the viewer, a page that reads checkpoints in the browser, and the files of one path on loopback."""

from .files import ServedFiles
from .server import ViewServer

__all__ = ["ServedFiles", "ViewServer"]
