"""A double of an accelerator, for there is none here: CPU arrays count as a device's, and go through pinned memory."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from treering._pytree import device_digests, devices, leaves
from treering._restore import restore

_REAL = devices._moved


class Accelerator:
    """Counts what is asked of pinned host memory, and refuses on request.

    `refuses`: "at once" when copies are begun, "later" when they are waited for, as a backend does that allocates in
    the background.
    """

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.requests: list[int] = []  # bytes of each

    @property
    def nbytes(self) -> int:
        return sum(self.requests)

    def moved(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """Does what `jax.device_put` does, with real pinned memory of the CPU backend."""
        self.requests.append(sum(array.nbytes for array in arrays))
        if self.refuses == "at once":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate pinned host memory")
        copies = _REAL(list(arrays), list(shardings))
        return [_Late(copy) for copy in copies] if self.refuses == "later" else copies


class _Late:
    """A copy whose memory turns out to be missing."""

    def __init__(self, copy: Any):
        self.nbytes = copy.nbytes

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate pinned host memory")


def install(monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> Accelerator:
    """Takes CPU devices for accelerators until the test is over."""
    double = Accelerator(refuses)
    for module in (leaves, device_digests):
        monkeypatch.setattr(module, "on_host", lambda sharding: sharding.memory_kind in devices._HOST_KINDS)
    monkeypatch.setattr(device_digests, "_COMPILE_SECONDS", math.inf)  # On a busy machine a function may take longer.
    monkeypatch.setattr(devices, "_pinned", lambda sharding: sharding.with_memory_kind("pinned_host"))
    monkeypatch.setattr(devices, "_moved", double.moved)
    monkeypatch.setattr(
        restore, "_pass_through_host", lambda targets, places: any(one.make == "jax" for one in targets)
    )
    return double
