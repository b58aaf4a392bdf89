"""Measures the speed of Treering, of its peers and of the raw disk, all in one run: `python -m benchmarks`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX
