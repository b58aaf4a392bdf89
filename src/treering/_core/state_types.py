"""Converts the values in the state of a data iterator that are not plain: tensors, JAX arrays, sets, ordered dicts.

Each becomes a plain value and the name of its type, and is made again from these. Neither PyTorch nor JAX is imported
to recognize a value, because a value of either exists only in a program that has imported it.
"""

import collections
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import dtypes

_TORCH, _JAX, _WEAK, _KEY = "torch", "jax", "jax-weak", "key:"
_DEFAULT_DICT, _DEQUE = "defaultdict:", "deque:"
_TORCH_DTYPES = {*dtypes.SAFETENSORS, "complex32", "complex128"}
_FACTORIES = {kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)}
_CONTAINERS: dict[type, tuple[str, Callable[[Any], Any]]] = {  # to the name, and to the plain value
    collections.OrderedDict: ("OrderedDict", dict),
    collections.Counter: ("Counter", dict),
    set: ("set", lambda value: sorted(value, key=_order)),
    frozenset: ("frozenset", lambda value: sorted(value, key=_order)),
    collections.deque: (_DEQUE, list),
    bytearray: ("bytearray", bytes),
}
_MADE_OF: dict[str, Callable[[Any], Any]] = {name: kind for kind, (name, _) in _CONTAINERS.items()}


def to_plain(value: Any) -> tuple[str, Any] | None:
    """Returns the name of a value's type, and the plain value that it is made of; None for all other types.

    Raises `UnsupportedError` for a value that would not come back as it is, such as a tensor on a GPU.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        name, plain = _CONTAINERS[kind]
        return (f"{name}{'' if value.maxlen is None else value.maxlen}" if name == _DEQUE else name), plain(value)
    if kind is collections.defaultdict:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise UnsupportedError(f"a defaultdict that makes its values by {factory!r:.100}; use a dict")
        return _DEFAULT_DICT + (factory.__name__ if factory else ""), dict(value)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and kind is getattr(torch, "Tensor", None):
        return _TORCH, _tensor_to_numpy(torch, value)
    if jax is not None and isinstance(value, jax.Array):
        return _jax_to_numpy(jax, value)
    return None


def from_plain(name: str, plain: Any) -> Any:
    """Undoes `to_plain`.

    Raises `UnsupportedError` for an unknown name, and if this process lacks the library or the dtype that it needs.
    """
    is_array = isinstance(plain, np.ndarray)
    if name == _TORCH and is_array:
        return _tensor_from_numpy(plain)
    if name in (_JAX, _WEAK) and is_array:
        return _jax_from_numpy(plain, weak=name == _WEAK)
    if name.startswith(_KEY) and is_array:
        return importlib.import_module("jax").random.wrap_key_data(plain, impl=name.removeprefix(_KEY))
    if name.startswith(_DEFAULT_DICT) and isinstance(plain, dict):
        factory = name.removeprefix(_DEFAULT_DICT)
        if not factory or factory in _FACTORIES:
            return collections.defaultdict(_FACTORIES.get(factory), plain)
    if name.startswith(_DEQUE) and isinstance(plain, list):
        limit = name.removeprefix(_DEQUE)
        return collections.deque(plain, int(limit) if limit else None)
    if name in _MADE_OF and not is_array:
        return _MADE_OF[name](plain)
    raise UnsupportedError(f"the type {name!r:.100}, which this release does not know; upgrade treering")


def is_loaded(name: str) -> bool:
    """Returns True if the library of a type is in use, so that a value can be made without a slow import."""
    library = "torch" if name == _TORCH else "jax" if name in (_JAX, _WEAK) or name.startswith(_KEY) else "sys"
    return library in sys.modules


def _order(value: Any) -> tuple[str, Any]:
    """Returns a key that sorts the items of equal sets alike."""
    if isinstance(value, tuple):
        return "tuple", [_order(item) for item in value]
    return type(value).__name__, sorted(map(_order, value)) if isinstance(value, frozenset) else repr(value)


def _tensor_to_numpy(torch: Any, tensor: Any) -> np.ndarray:
    text = str(tensor.dtype).removeprefix("torch.")
    for is_odd, what in (
        (tensor.device.type == "meta", "on meta, which has no values; load them, or leave it out of the state"),
        (tensor.device.type != "cpu", f"on {tensor.device}; put a copy on the CPU into the state"),
        (tensor.layout is not torch.strided or tensor.is_nested, "that is sparse or nested; use a dense one"),
        (tensor.requires_grad, "that requires a gradient; use tensor.detach()"),
        (text not in _TORCH_DTYPES, f"of {tensor.dtype}; use another dtype"),
    ):
        if is_odd:
            raise UnsupportedError(f"a torch.Tensor {what}")
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), dtypes.to_numpy(text))
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.view(dtypes.to_numpy(text)).reshape(tuple(tensor.shape))


def _tensor_from_numpy(array: np.ndarray) -> Any:
    try:
        torch = importlib.import_module("torch")
        dtype = getattr(torch, dtypes.to_text(array.dtype))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"a torch.Tensor, which PyTorch here cannot make ({error}); install it") from error
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(array.shape)


def _jax_to_numpy(jax: Any, array: Any) -> tuple[str, np.ndarray]:
    if isinstance(array, jax.core.Tracer):
        raise UnsupportedError("a tracer; call the iterator outside of jit")
    if array.is_deleted():
        raise UnsupportedError("a jax.Array that was deleted; was it donated to a jitted function?")
    if len(array.sharding.device_set) > 1:
        raise UnsupportedError("a jax.Array on several devices; use one on a single device, or save it as a leaf")
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return f"{_KEY}{jax.random.key_impl(array)}", np.asarray(jax.random.key_data(array))
    dtypes.to_text(array.dtype)  # It refuses a dtype that only JAX has.
    plain = np.asarray(array)
    if not array.weak_type:
        return _JAX, plain
    if _weak_zeros(jax.numpy, plain).dtype != plain.dtype:
        raise UnsupportedError(f"a weakly typed jax.Array of {plain.dtype}; give it a dtype, as x.astype(x.dtype) does")
    return _WEAK, plain


def _weak_zeros(jnp: Any, array: np.ndarray) -> Any:
    """Returns a weakly typed array, which JAX makes of Python numbers, in their default dtype."""
    return jnp.full(array.shape, array.dtype.type(0).item())


def _jax_from_numpy(array: np.ndarray, *, weak: bool) -> Any:
    jnp = importlib.import_module("jax.numpy")
    made = _weak_zeros(jnp, array).at[...].set(array) if weak else jnp.asarray(array)
    if made.dtype != array.dtype:
        raise UnsupportedError(
            f"a jax.Array of {array.dtype}, which would become {made.dtype}; set jax_enable_x64 as in the saved job"
        )
    return made
