"""A drop-in for `from orbax.checkpoint import v1 as ocp`: the same names, saved and loaded by Treering.

>>> from treering.orbax import v1 as ocp

A checkpoint of one tree is one checkpoint of Treering. `save_checkpointables` saves a tree whose root is a `Composite`.
``ocp.Context(write="orbax")``, or the environment variable ``TREERING_ORBAX_WRITE=orbax``, writes Orbax's format.
"""

from ..namespaces import homes, lookup

__getattr__ = lookup("v1")


def __dir__() -> list[str]:
    return sorted([*homes("v1"), "delete", "delete_async"])
