"""A bucket on an S3 server of this machine, beside plain obstore with the same bytes and the same number in flight.

The server is moto's, in Python, whose speed is no matter; the ratios are. With 50 ms before each request, what counts
is how many requests follow one another.
"""

import concurrent.futures
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore

import treering as tr
from treering import stores
from treering.stores.objects.upload import OBJECT_BYTES

from . import measure
from .table import Row

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))  # whose server and proxy these are
import fault_proxy
import s3

_NBYTES = 256 << 20
_LATENCY_SECONDS = 0.05


def rows(repeats: int) -> list[Row]:
    with s3.server() as url:
        return [*_speed(url, repeats), *_latency(url, repeats)]


def _speed(url: str, repeats: int) -> list[Row]:
    client = s3.client(url, prefix="speed")
    root = stores.absolute(client)
    state = {f"layer-{n}": np.random.default_rng(n).integers(0, 255, _NBYTES // 8, np.uint8) for n in range(8)}
    parts = [array.data for array in state.values()]

    def plain_put() -> None:
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda n: obstore.put(client, f"plain-{n}", parts[n], use_multipart=False), range(8)))

    def plain_get() -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: np.array(obstore.get(client, f"plain-{n}").bytes()), range(8)))

    numbers = itertools.count()
    saving = {"treering": lambda: tr.save(f"{root}/{next(numbers)}", state), "floor": plain_put}
    restoring = {"treering": functools.partial(tr.restore, f"{root}/0"), "floor": plain_get}
    what = f"256 MiB in objects of {OBJECT_BYTES >> 20} MiB"
    return [
        Row("save to a bucket", what, "s", _medians(saving, repeats)),
        Row("restore from a bucket", what, "s", _medians(restoring, repeats)),
    ]


def _latency(url: str, repeats: int) -> list[Row]:
    state = {f"layer-{n}": np.full(1000, n, np.float32) for n in range(1000)}
    with fault_proxy.proxy(url) as slow:
        root = stores.absolute(s3.client(slow.url, prefix="latency"))
        tr.save(f"{root}/first", {"a": 1})
        slow.delay = _LATENCY_SECONDS
        numbers = itertools.count()
        calls = {
            "save to a bucket": lambda: tr.save(f"{root}/{next(numbers)}", state),
            "restore from a bucket": lambda: tr.restore(f"{root}/0"),
            "open in a bucket and read a leaf": lambda: tr.open(f"{root}/0")["layer-7"][...],
        }
        found = []
        for name, call in calls.items():
            call()
            begun = len(slow.requests)
            call()
            count = len(slow.requests) - begun
            what = f"1,000 small leaves, {count} requests of 50 ms"
            found.append(Row(name, what, "s", _medians({"treering": call}, repeats)))
        return found


def _medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median time of each call in so many rounds, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begun)
    return {name: measure.Median.of(found) for name, found in times.items()}
