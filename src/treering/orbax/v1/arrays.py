"""Types of arrays; the namespace `arrays` of version 1."""

from typing import Any, Protocol

import jax
import numpy as np

Shape = tuple[int, ...]
DType = Any
Scalar = int | float | np.number[Any] | bytes | bool
AbstractScalar = Scalar


class AbstractArray(Protocol):
    """The shape and the dtype of a NumPy array."""

    shape: Shape | None
    dtype: Any


class AbstractShardedArray(Protocol):
    """The shape, the dtype and the place of a JAX array."""

    shape: Shape | None
    dtype: Any
    sharding: Any


ArrayLike = AbstractArray | AbstractShardedArray


def to_shape_dtype_struct(x: Any, dtype: Any = None) -> Any:
    """Returns a `jax.ShapeDtypeStruct` for an array or its metadata, and a number as it is."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=getattr(x, "sharding", None))
