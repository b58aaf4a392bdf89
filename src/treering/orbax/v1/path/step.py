"""The names of the steps of a run."""

import re
from typing import Any, Protocol

from ...step import StandardNameFormat
from ...unsupported import refused


class NameFormat(Protocol):
    """Names the steps of a run, and finds them."""

    def build_name(self, step: int) -> str:
        """Returns the name of the directory of a step."""
        ...


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> StandardNameFormat:
    """Returns the format of names with a prefix, which "_" follows, and a least number of digits."""
    return StandardNameFormat(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


def as_standard(format: Any) -> Any:
    """Returns a format of another library as one of this module, or as it is if its names are not of that form."""
    if format is None or isinstance(format, StandardNameFormat):
        return format
    found = re.fullmatch(r"(?:(?P<prefix>.+)_)?(?P<digits>0*)1", format.build_name(1), re.DOTALL)
    made = None if found is None else StandardNameFormat(found["prefix"], len(found["digits"]) + 1)
    alike = made is not None and all(made.build_name(step) == format.build_name(step) for step in (0, 23, 4567))
    return made if alike else format


composite_name_format = refused("v1.path.step.composite_name_format")
