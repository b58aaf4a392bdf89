"""A drop-in for `import orbax.checkpoint as ocp`: the same names, saved and restored by Treering.

>>> import treering.orbax as ocp

It writes Treering's format, or Orbax's with ``write="orbax"``, and reads both. docs/migrate/orbax.md says what differs.
"""

from .namespaces import homes, lookup, register

__getattr__ = lookup("")


def __dir__() -> list[str]:
    return sorted(homes(""))


register()
