"""How fast Treering is beside its peers and beside the raw disk, all in one run: `python -m benchmarks`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX
