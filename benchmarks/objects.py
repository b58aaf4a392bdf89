"""Compares a bucket on a local S3 server with plain obstore: the same bytes and the same number in flight.

The server is moto's, in Python, whose speed is no matter; the ratios are. With 50 ms before each request, what counts
is how many requests follow one another.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator

import numpy as np
import obstore

import treering as tr
from treering import stores
from treering.stores.objects.upload import IN_FLIGHT, OBJECT_BYTES

from . import measure
from .table import Row

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))  # whose server and proxy these are
import fault_proxy
import s3

_NBYTES = 256 << 20
_LATENCY_SECONDS = 0.05
_SMALL = "1,000 small leaves"


def rows(repeats: int) -> list[Row]:
    with s3.server() as url:
        return _speed(url, repeats)


def requests(repeats: int) -> list[Row]:
    with s3.server() as url:
        return _latency(url, repeats)


@contextlib.contextmanager
def slow_bucket() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yields a bucket that answers late: its URL here, that in other processes, and the variables for these."""
    with s3.server() as url, fault_proxy.proxy(url) as slow:
        slow.delay = _LATENCY_SECONDS
        environment = {**s3.environment(slow.url), "AWS_ALLOW_HTTP": "true"}
        yield stores.absolute(s3.client(url)), f"s3://{s3.BUCKET}", environment


def _speed(url: str, repeats: int) -> list[Row]:
    client = s3.client(url, prefix="speed")
    root = stores.absolute(client)
    state = {f"layer-{n}": np.random.default_rng(n).integers(0, 255, _NBYTES // 8, np.uint8) for n in range(8)}
    parts = _cut(state)
    numbers = range(len(parts))

    def plain_put(place: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda n: obstore.put(client, f"{place}/{n}", parts[n].data, use_multipart=False), numbers))

    def plain_get() -> dict[str, np.ndarray]:
        found = {name: np.empty_like(array) for name, array in state.items()}
        places = _cut(found)

        def get(n: int) -> None:
            places[n][...] = np.frombuffer(obstore.get(client, f"plain/{n}").bytes(), np.uint8)

        with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(get, numbers))
        return found

    def saved(put: Callable[[str], object]) -> float:
        """The seconds of a save to a new place; it is deleted then, or the server would grow with some contestants."""
        taken = measure.seconds(lambda: put("new"))
        obstore.delete(client, [one["path"] for one in obstore.list(client, "new").collect()])
        return taken

    savers: dict[str, Callable[[str], object]] = {
        "treering": lambda place: tr.save(f"{root}/{place}", state),
        "floor": plain_put,
    }
    saving = {name: functools.partial(saved, put) for name, put in savers.items()}
    tr.save(f"{root}/saved", state)
    plain_put("plain")
    getters: dict[str, Callable[[], object]] = {
        "treering": functools.partial(tr.restore, f"{root}/saved"),
        "floor": plain_get,
    }
    restoring = {name: functools.partial(measure.seconds, get) for name, get in getters.items()}
    what = f"256 MiB in objects of {OBJECT_BYTES >> 20} MiB"
    return [
        Row("save to a bucket", what, "s", _medians(saving, repeats)),
        Row("restore from a bucket", what, "s", _medians(restoring, repeats)),
    ]


def _cut(state: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Views of the arrays, each as long as an object."""
    return [array[at : at + OBJECT_BYTES] for array in state.values() for at in range(0, array.nbytes, OBJECT_BYTES)]


def _latency(url: str, repeats: int) -> list[Row]:
    state = {f"layer-{n}": np.full(1000, n, np.float32) for n in range(1000)}
    with fault_proxy.proxy(url) as slow:
        root = stores.absolute(s3.client(slow.url, prefix="latency"))
        tr.save(f"{root}/first", {"a": 1})
        slow.delay = _LATENCY_SECONDS
        numbers = itertools.count()
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("save to a bucket", _SMALL): lambda: tr.save(f"{root}/{next(numbers)}", state),
            ("restore from a bucket", _SMALL): lambda: tr.restore(f"{root}/0"),
            ("open in a bucket and read a leaf", _SMALL): lambda: tr.open(f"{root}/0")["layer-7"][...],
        }
        some = dict(list(state.items())[:200])
        for format, ending in (("safetensors", ".safetensors"), ("orbax", ""), ("levanter", "")):
            path = f"{root}/{format}{ending}"
            tr.save(path, some, format=format)
            calls["open in a bucket and read a leaf", f"200 small leaves of {format}"] = functools.partial(
                lambda path: tr.open(path)["layer-7"][...], path
            )
        found: list[Row] = []
        for (name, what), call in calls.items():
            call()
            begun = len(slow.requests)
            call()
            count = float(len(slow.requests) - begun)
            timed = functools.partial(measure.seconds, call)
            found.append(Row(f"requests: {name}", what, "", {"treering": count}))
            found.append(Row(f"{name}, 50 ms a request", what, "s", _medians({"treering": timed}, repeats)))
        return found


def _medians(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Returns the median of the results of each run, after one round to warm up."""
    for run in runs.values():
        run()
    return measure.race(runs, repeats)
