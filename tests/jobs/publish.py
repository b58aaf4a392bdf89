"""Bodies of jobs that publish weights, and what they publish."""

import contextlib
import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import golden_trees
import s3
import treering as tr
from jobs import process
from treering import stores
from treering._save.native_save import NativeSave
from treering._save.room import Room
from treering.errors import PeerError
from treering.stores.objects.store import ObjectStore


def values(version: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a version. Few elements are others than in the version before."""
    rng = np.random.default_rng(0)
    found = {
        "rows": rng.standard_normal((16, 300)).astype(np.float32),
        "cells": rng.standard_normal((8, 40, 10)).astype(np.float32).astype(jnp.bfloat16),
        "replicated": rng.standard_normal((600, 1000)).astype(np.float32),
        "copied": rng.standard_normal(700),
        "fixed": rng.standard_normal((8, 100)).astype(np.float32),
        "flags": rng.integers(0, 2, 4000) > 0,
        "dense": rng.standard_normal((8, 64)).astype(np.float32),
    }
    found["dense"][:4] *= version  # The other part stays.
    for step in range(1, version + 1):
        for name in ("rows", "cells", "replicated", "copied"):
            flat = found[name].reshape(-1).view(np.uint8)
            flat[rng.integers(0, flat.size, 5)] ^= np.uint8(step)
        found["flags"][step * 7] ^= True
    return found


def golden(stream: str) -> None:
    """Writes the stream `v1-differences-in-parts` of the golden set, by a job of two processes."""
    with tr.Publisher(stream) as publisher:
        for version, tree in enumerate(golden_trees.versions(), 1):
            parted = {name: process.put(tree[name], P("x")) for name in ("bf16", "f32", "same")}
            publisher.publish(version, {**tree, **parted}, metrics={"reward": version / 4})


def publish(first: int, last: int, server: str = "", dies: int = 0) -> None:
    """Publishes versions of arrays of which each process has a part. Process 1 dies before the commit of `dies`.

    server: publishes to a bucket there, in small objects.
    """
    logging.basicConfig(format="%(message)s")
    stream = str(process.tmp / "stream")
    if server:
        ObjectStore.object_bytes = 1 << 16
        buckets = ObjectStore()
        buckets.add("weights://tests", s3.client(server))
        stores.register(buckets, "weights")
        stream = f"weights://tests/{process.tmp.name}"
    mesh = process.mesh(2, process.COUNT * process.DEVICES // 2)
    fixed = process.put(values(0)["fixed"], P(("x", "y")), mesh)
    with tr.Publisher(stream, timeout=8) as publisher:
        for version in range(first, last + 1):
            if version == dies and process.INDEX == 1:
                publisher.wait()
                NativeSave.commit = lambda self: process.die()  # pyright: ignore
            now = values(version)
            tree: dict[str, Any] = {
                **{name: process.put(now[name], P(("x", "y")), mesh) for name in ("rows", "flags", "dense")},
                **{"cells": process.put(now["cells"], P("y", "x"), mesh), "fixed": fixed},
                **{"replicated": process.put(now["replicated"], P(), mesh), "copied": now["copied"]},
            }
            tree["tied"] = tree["rows"]
            publisher.publish(version, {**tree, "n": version}, metrics={"loss": version})


def alternating(version: int) -> np.ndarray:
    """Returns one of two arrays with few differences in each half."""
    return np.where(np.arange(4000) % 40 == 7, version % 2, 1).astype(np.float32)


def publish_while_a_commit_is_missed() -> None:
    """Publishes three versions, the first and the last with the same array. Process 1 misses the commit of the second.

    To it, process 0 is gone after the commit.
    """
    arrays = [process.put(alternating(version), P("x")) for version in (0, 1)]
    gather = Room.gather_and_decide

    def gather_and_miss(room: Room, *args: Any) -> Any:
        gather(room, *args)
        room._call.in_doubt = True
        raise PeerError("process 0 is gone")

    with tr.Publisher(str(process.tmp / "stream"), timeout=8) as publisher:
        for version in (1, 2, 3):
            misses = version == 2 and process.INDEX == 1
            with (
                pytest.MonkeyPatch.context() as patch,
                pytest.raises(PeerError) if misses else contextlib.nullcontext(),
            ):
                if misses:
                    patch.setattr(Room, "gather_and_decide", gather_and_miss)
                publisher.publish(version, {"w": arrays[version % 2]})
                publisher.wait()
