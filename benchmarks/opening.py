"""Importing Treering, and opening a checkpoint of very many leaves, each in a fresh process."""

import json
import os
import subprocess
import sys
import time

from . import measure
from .table import Row

_LEAVES = 100_000


def rows(directory: str, repeats: int) -> list[Row]:
    """Medians over as many processes."""
    import numpy as np

    import treering as tr

    path = os.path.join(directory, "many")
    tr.save(path, {f"l{n:06d}": {"w": np.full(8, n, np.float32)} for n in range(_LEAVES)})
    command = [sys.executable, "-m", "benchmarks.opening", path]
    # As an installed library has it: its modules are compiled once and not in every process.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": os.path.join(directory, "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    runs = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)
        for _ in range(1 + repeats)
    ][1:]  # the first compiles them
    median = {key: measure.Median.of([run[key] for run in runs]) for key in runs[0]}
    state = f"{_LEAVES:,} leaves"
    return [
        Row("JAX and NumPy modules that `import treering` loads", "–", "", {"treering": median["heavy"]}),
        Row("import treering", "–", "ms", {"treering": median["import"]}),
        Row("open and read a slice", state, "s", {"treering": median["open"]}),
        Row("open and read a slice, with the imports", state, "s", {"treering": median["total"]}),
    ]


def _child(path: str) -> None:
    begun = time.perf_counter()
    import treering as tr

    imported = time.perf_counter()
    heavy = sum(name.split(".")[0] in ("jax", "jaxlib", "numpy") for name in sys.modules)
    import numpy as np

    ready = time.perf_counter()
    n = _LEAVES // 2
    part = tr.open(path)[f"l{n:06d}/w"][2:5]
    done = time.perf_counter()
    assert np.array_equal(part, np.full(3, n, np.float32))
    print(json.dumps({"heavy": heavy, "import": imported - begun, "open": done - ready, "total": done - begun}))


if __name__ == "__main__":
    _child(sys.argv[1])
