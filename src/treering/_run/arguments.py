"""Checks the arguments of a Checkpointer before anything is touched."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from .._processes import coordinator
from .._save.pending import SaveReport
from ..errors import MismatchError
from ..keep import Policy, last, size

KEEP_LOCAL = last(1)  # the default; `check` compares identity to see if it was given
_MIN_LOCAL_BYTES = 1 << 20  # A smaller number is meant as a number of steps.


def check(
    *,
    keep: Policy | None,
    prefix: str,
    when_busy: str,
    timeout: float,
    on_save: Callable[[SaveReport], object] | None,
    local: str | os.PathLike[str] | None,
    keep_local: Policy | int | None,
    upload_limit: float | None,
    local_copies: int,
) -> None:
    """Raises `MismatchError` for an invalid argument, or for one that needs another argument."""
    if local is None and keep_local is not KEEP_LOCAL:
        raise MismatchError(f"keep_local={keep_local!r}: expected local=, to which it applies")
    for name, policy in (("keep", keep), ("keep_local", local_policy(keep_local))):
        if policy is not None and not isinstance(policy, Policy):
            raise MismatchError(f"{name}={policy!r}: expected a policy such as treering.keep.last(3)")
    if not isinstance(prefix, str) or "/" in prefix or prefix[-1:].isdigit() or not prefix.isprintable():
        raise MismatchError(f"prefix={prefix!r}: expected printable text without '/' that does not end in a digit")
    if when_busy not in ("wait", "skip"):
        raise MismatchError(f"when_busy={when_busy!r}: expected 'wait' or 'skip'")
    if on_save is not None and not callable(on_save):
        raise MismatchError(f"on_save={on_save!r}: expected a function of a SaveReport")
    if local is None and upload_limit is not None:
        raise MismatchError(f"upload_limit={upload_limit!r}: expected local=, from where steps are uploaded")
    if local_copies not in (1, 2) or isinstance(local_copies, bool):
        raise MismatchError(f"local_copies={local_copies!r}: expected 1 or 2")
    if local is None and local_copies != 1:
        raise MismatchError(f"local_copies={local_copies!r}: expected local=, the disks that get the copies")
    coordinator.check_timeout(timeout)


def check_init(init: Any) -> None:
    """Raises `TypeError` unless `init` is a function that can be called without arguments."""
    if not callable(init):
        raise TypeError(
            f"restore_or_init(): expected init, a function without arguments that returns the state, found a "
            f"{type(init).__name__}; pass the function that makes it, such as lambda: make_state()"
        )
    try:
        inspect.signature(init).bind()
    except TypeError as error:
        raise TypeError(
            f"restore_or_init(): expected init, a function without arguments, found one that needs some ({error}); "
            "pass them within a lambda: lambda: init(key)"
        ) from None
    except ValueError:  # Python does not know the parameters of some functions of C.
        pass


def local_policy(keep_local: Policy | int | None) -> Policy | None:
    """Returns the policy of the local tier. Raises `MismatchError` for a number that cannot be one of bytes."""
    if not isinstance(keep_local, int):
        return keep_local
    if isinstance(keep_local, bool) or keep_local < _MIN_LOCAL_BYTES:
        raise MismatchError(
            f"keep_local={keep_local!r}: expected a policy such as treering.keep.last(3), or a number of bytes from "
            f"{_MIN_LOCAL_BYTES:,}"
        )
    return size(keep_local)
