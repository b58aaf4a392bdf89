"""Transfers between devices and the host that the user has asked for, under `jax.transfer_guard`."""

import contextlib
from collections.abc import Iterator

import jax

_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
_OF_IMPLICIT_ONES = ("disallow", "log")  # and not "disallow_explicit"


@contextlib.contextmanager
def explicit() -> Iterator[None]:
    """Allows transfers where the user has forbidden only implicit ones: a save or restore asks for them explicitly."""
    with contextlib.ExitStack() as stack:
        for guard in _GUARDS:
            if getattr(jax.config, f"jax_transfer_guard_{guard}", None) in _OF_IMPLICIT_ONES:
                stack.enter_context(getattr(jax, f"transfer_guard_{guard}")("allow"))
        yield
