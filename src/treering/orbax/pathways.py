"""The namespace `pathways` of Orbax, for programs that ask whether to use it. Pathways itself is not supported."""

from typing import Any

from . import unsupported

__all__ = ["CheckpointingImpl"]


class CheckpointingImpl:
    """The way to save with Pathways."""

    @staticmethod
    def from_options(**options: bool) -> None:
        """Returns None, the default of `Context`, if no option is True. Raises `UnsupportedNameError` otherwise."""
        for name, value in options.items():
            if value:
                raise unsupported.error(f"pathways.CheckpointingImpl.from_options({name}=True)")


def __getattr__(name: str) -> Any:
    raise unsupported.error(f"pathways.{name}")
