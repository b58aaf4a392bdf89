"""The golden checkpoints in Orbax's package, complete and damaged: Treering reads what Orbax reads of them."""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.experimental import v1 as ocp1

import treering as tr
from helpers import assert_same
from treering.errors import CorruptError

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::pytest.PytestWarning"),
]

FOLDER = Path(ocp.__file__).parent / "experimental/v1/_src/testing/compatibility/checkpoints"
GOLDEN = sorted(path for path in FOLDER.glob("*/*/*/*") if path.is_dir())
DIRECT = "direct_checkpoint"


def template() -> Any:
    def leaf(size: int) -> Any:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=SingleDeviceSharding(jax.devices()[0]))

    return {"a": leaf(8), "b": {"c": leaf(3)}}


def on_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Ends the coroutines that Orbax leaves behind after an error, before the next test."""
    yield
    gc.collect()


def first(*attempts: Callable[[], Any]) -> Any:
    """Returns the result of the first of Orbax's readers that succeeds; None if all of them raise."""
    for attempt in attempts:
        try:
            return on_host(attempt())
        except Exception as error:  # each of Orbax's readers raises other types of errors
            logging.info("refused: %s", error)
    return None


def items(path: Path, args: dict[str, Any], *, zarr3: bool = False) -> dict[str, Any]:
    handlers = {"state": ocp.PyTreeCheckpointHandler(use_zarr3=zarr3), "metadata": ocp.JsonCheckpointHandler()}
    used = {name: handlers[name] for name in args}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**used)) as checkpointer:
        return dict(checkpointer.restore(path, ocp.args.Composite(**args)).items())


def without_template(path: Path) -> Any:
    """Returns what Orbax reads without a template."""
    if DIRECT in path.parts:
        return first(lambda: ocp1.load(path), lambda: restored(ocp.StandardCheckpointer(), path))
    every = {"state": ocp.args.PyTreeRestore(), "metadata": ocp.args.JsonRestore()}
    return first(lambda: ocp1.load_checkpointables(path), lambda: items(path, every))


def into(path: Path, like: Any) -> Any:
    """Returns the state that Orbax reads with a template."""
    args = {"state": ocp.args.PyTreeRestore(like, ocp.checkpoint_utils.construct_restore_args(like))}
    if DIRECT in path.parts:
        return first(lambda: ocp1.load(path, like), lambda: restored(ocp.StandardCheckpointer(), path, like))
    return first(
        lambda: ocp1.load(path, like),
        lambda: items(path, args)["state"],
        lambda: items(path, args, zarr3=True)["state"],
    )


def restored(checkpointer: Any, *args: Any) -> Any:
    with checkpointer:
        return checkpointer.restore(*args)


def damage_of(path: Path) -> str | None:
    """Returns the words that an error must contain about a removed or added file; None for a complete checkpoint."""
    if path.parent.name.startswith("critical_"):
        return "dummy" if path.name.startswith("dummy") else "a/|d|manifest"
    if path.name == "pytree_checkpointable_missing_metadata":
        return "_METADATA"
    return "the item 'state'" if path.name == "deleted_checkpointable" else None


@pytest.mark.long
def test_they_are_there() -> None:
    assert len(GOLDEN) >= 44
    assert {path.relative_to(FOLDER).parts[0] for path in GOLDEN} >= {"v0_checkpoints", "v1_checkpoints"}
    damaged = [path for path in GOLDEN if damage_of(path)]
    assert len(damaged) >= 14
    assert [path.name for path in damaged if without_template(path) is not None] == ["deleted_checkpointable"]
    assert sum(into(path, template()) is not None for path in GOLDEN) >= 37


@pytest.mark.long
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: "-".join(path.relative_to(FOLDER).parts))
def test_what_orbax_reads(path: Path) -> None:
    direct, theirs, like = DIRECT in path.parts, without_template(path), template()
    with_template = into(path, like)
    damage = damage_of(path)
    if damage is None:
        ours = tr.restore(path)
        assert tr.verify(path).ok
        if theirs is not None:
            assert_same(ours, theirs)
        # Without a template, Orbax does not restore arrays whose devices are not recorded.
        assert_same(ours if direct else ours["state"], with_template)
    else:
        with pytest.raises(CorruptError, match=damage):
            tr.restore(path)
        assert not tr.verify(path).ok
    if damage is not None and theirs is not None:  # Orbax left it out silently; Treering must be asked to
        for name, value in theirs.items():
            assert_same(tr.restore(path, at=name), value)
            assert_same(tr.restore(path, {name: value}, extra="ignore"), {name: value})
    asked: Any = like if direct else {"state": like}
    if with_template is None:
        with pytest.raises(CorruptError):
            tr.restore(path, asked, extra="ignore")
    else:
        found = tr.restore(path, asked, extra="ignore")
        assert all(leaf.sharding == like["a"].sharding for leaf in jax.tree.leaves(found))
        assert_same(on_host(found if direct else found["state"]), with_template)
    if not direct and (path / "metadata").exists():
        value = next(iter((path / "metadata").iterdir())).read_text()
        assert tr.restore(path, at="metadata") == {"metadata": "json_data"} and "json_data" in value
