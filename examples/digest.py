"""Computes a fingerprint of arrays, which shows if two runs have the same weights."""

import hashlib
from typing import Any

import jax
import numpy as np


def digest(tree: Any) -> str:
    """Returns the SHA-256 of the bytes of all arrays in a pytree."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):  # Equinox modules also have functions as leaves.
            sha.update(np.asarray(leaf).tobytes())
    return sha.hexdigest()
