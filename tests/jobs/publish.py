"""Bodies of jobs that publish weights."""

import logging

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import tmp


def in_parts() -> None:
    """Publishes an array of which each process has a part."""
    logging.basicConfig(format="%(message)s")
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    with tr.Publisher(tmp / "stream") as publisher:
        for version in (1, 2):
            values = np.arange(16.0) + version
            publisher.publish(
                version, {"w": jax.make_array_from_callback((16,), sharding, lambda at, values=values: values[at])}
            )
