"""The names of the steps of a run."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Protocol

from ...unsupported import refused


class NameFormat(Protocol):
    """Names the steps of a run, and finds them."""

    def build_name(self, step: int) -> str:
        """Returns the name of the directory of a step."""
        ...


@dataclasses.dataclass(frozen=True)
class StandardNameFormat:
    """Names steps ``3``, ``0003`` or ``ckpt_3``."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    def build_name(self, step: int) -> str:
        """Returns the name of the directory of a step."""
        digits = str(step).zfill(self.step_format_fixed_length or 1)
        return f"{self.step_prefix}_{digits}" if self.step_prefix else digits

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[Any]:
        """Yields the metadata of the committed steps of a run, ascending."""
        from ..training import Checkpointer

        yield from Checkpointer(base_path, step_name_format=self).checkpoints

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> Any:
        """Returns the metadata of a step. Raises `StepNotFoundError`, which is a `FileNotFoundError`."""
        from ..training import Checkpointer

        return Checkpointer(base_path, step_name_format=self)._existing(step)


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> StandardNameFormat:
    """Returns the format of names with a prefix, which "_" follows, and a least number of digits."""
    return StandardNameFormat(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


composite_name_format = refused("v1.path.step.composite_name_format")
