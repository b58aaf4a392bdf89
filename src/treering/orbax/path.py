"""The namespace `path` of Orbax: names of steps."""

from . import step
from .options import AtomicityMode

__all__ = ["AtomicityMode", "step"]
