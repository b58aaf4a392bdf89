"""Types of trees; the namespace `tree` of version 1."""

from typing import Any

from ..unsupported import refused

PyTree = PyTreeOf = PyTreeKey = PyTreeKeyPath = JsonType = Leaf = AbstractLeaf = Any
merge = refused("v1.tree.merge")
