"""The namespace `experimental` of Orbax, which has version 1 in earlier releases: `v1` is `treering.orbax.v1`."""

import sys
from typing import Any

from .. import unsupported, v1

__all__ = ["v1"]

sys.modules[f"{__name__}.v1"] = v1  # for `import treering.orbax.experimental.v1 as ocp`


def __getattr__(name: str) -> Any:
    if name != "emergency":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return unsupported.refused("experimental.emergency")
