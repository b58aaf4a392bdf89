"""Saves of a tree in several calls, which are not supported; the namespace `partial` of version 1."""

from ..unsupported import refused

save = refused("v1.partial.save")
save_async = refused("v1.partial.save_async")
finalize = refused("v1.partial.finalize")
