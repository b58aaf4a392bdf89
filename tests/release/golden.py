"""Writes the checkpoints that all later releases must read: ``python -m release.golden``.

With `tests` on the path, into tests/golden/released/VERSION, once for each version, before its tag. It replaces
nothing: golden files never change. The tests compare each set with the trees here, so a tree never changes either. A
new feature gets a new tree.
"""

import os
from pathlib import Path

import golden_trees
import treering as tr

RELEASED = Path(__file__).parents[1] / "golden" / "released"
TREES = {  # what each checkpoint of a set holds
    "everything": golden_trees.everything,
    "sharded": golden_trees.sharded,
    "placement": golden_trees.placed,
    "reduced": golden_trees.reduced,
    "boxes": golden_trees.boxed,
    "run/step-00000001": lambda: golden_trees.trained(1),
    "run/step-00000002": lambda: golden_trees.trained(2),
    **{f"stream/step-{n:08}": lambda n=n: golden_trees.versions()[n - 1] for n in range(1, 5)},
}
METRICS = {1: {"loss": 0.5, "val/loss": float("inf")}, 2: {"loss": 0.25}}
EXPORT = "export.safetensors"  # the parameters of the run's last step
METADATA = "metadata"  # a checkpoint with `golden_trees.metadata()`


def write(folder: Path) -> None:
    """Writes the set of this release by the public calls."""
    for name in ("everything", "sharded", "placement", "reduced", "boxes"):
        tr.save(folder / name, TREES[name]())
    tr.save(folder / METADATA, {"x": 1}, metadata=golden_trees.metadata())
    with tr.Checkpointer(folder / "run") as ckpts:
        for step, metrics in METRICS.items():
            ckpts.save(step, golden_trees.trained(step), metrics=metrics)
    tr.convert(folder / "run", folder / EXPORT, at="params")
    with tr.Publisher(folder / "stream") as publisher:
        for version, tree in enumerate(golden_trees.versions(), 1):
            publisher.publish(version, tree)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    place = RELEASED / tr.__version__
    if place.exists():
        raise SystemExit(f"{place}: expected no such folder; golden files never change")
    write(place)
    print(f"{place}: {sum(path.stat().st_size for path in place.rglob('*') if path.is_file()) / 1000:.0f} kB")
