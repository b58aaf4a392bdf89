"""The namespace `type_handlers` of Orbax: the arguments for leaves. Its handlers of types are not supported."""

from typing import Any

from . import unsupported
from .restore_args import ArrayRestoreArgs, RestoreArgs, SaveArgs

__all__ = ["ArrayRestoreArgs", "RestoreArgs", "SaveArgs"]


def __getattr__(name: str) -> Any:
    raise unsupported.error(f"type_handlers.{name}")
