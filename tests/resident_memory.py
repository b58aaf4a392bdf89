"""The memory of this process while a function runs."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_KINDS = ("RssAnon", "RssShmem")  # without the pages of mapped files
_EVERY_SECONDS = 0.005


def peak_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """By how many MiB it grew at most, and what the function has returned."""
    over, seen = threading.Event(), [_now()]

    def watch() -> None:
        while not over.wait(_EVERY_SECONDS):
            seen.append(_now())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        found = call()
    finally:
        over.set()
        watching.join()
    return max(seen) - seen[0], found


def _now() -> int:
    status = Path("/proc/self/status").read_text()
    numbers = (re.search(rf"{kind}:\s+(\d+)", status) for kind in _KINDS)
    return sum(int(number[1]) for number in numbers if number) >> 10
