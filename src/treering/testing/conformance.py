"""The tests that every format and every store must pass. Authors of other packages run them too."""

from typing import Any

import jax
import numpy as np
import pytest

from .. import keep
from .._restore.checkpoint import Checkpoint
from .._run.checkpointer import Checkpointer
from .._run.metrics import record
from .._run.open import open_checkpoint, restore
from .._run.run_layout import steps
from .._save.save import save
from .._tools.convert import convert
from .._tools.verify import verify
from ..errors import CorruptError, ExistsError, MismatchError
from ..stores.file_io import read_file
from ..stores.store import Store
from ._commits import Commits
from ._detection import Damage, Detection
from ._reading import Reading
from ._store_reading import StoreReading, StoreValues
from ._store_writing import StoreWriting
from ._writing import Writing


class FormatConformance(Reading, Detection, Writing, Commits, Damage):
    """The tests of a format. Subclass it under a name that pytest collects, and declare what the format can store.

    >>> class TestMine(FormatConformance):
    ...     format = MyFormat()
    ...     dtypes = ("float32", "int32")
    ...     keys = False

    Only `format` is required. The defaults of all other declarations are those of a format that can store everything.
    The tests expect that declared leaves are read bit for bit, and that a save refuses all others and names them.

    - A format that can store less declares it with `dtypes`, `values`, `left_out`, `keys`, `names`, `empty`, `fields`
      and `numbers_are_arrays`.
    - A format that Treering cannot write has `writes = False` and its own `make`.
    - Override `files` if a checkpoint is neither a file nor a folder, `small` if large arrays are stored in another way
      than small ones, and `wipe` if no file has the plain bytes of an array.

    The tests replace `treering.stores.get("")` by test doubles and change nothing outside of pytest's `tmp_path`.
    """


class StoreConformance(StoreReading, StoreWriting, StoreValues):
    """The tests of a store. Subclass it under a name that pytest collects, with the store and a path for the tests.

    >>> class TestMine(StoreConformance):
    ...     @pytest.fixture
    ...     def store(self, tmp_path):
    ...         return KeyValueStore(MyDatabase(tmp_path / "values.db"))
    ...
    ...     @pytest.fixture
    ...     def root(self):
    ...         return f"mine://tests/{uuid.uuid4()}"  # a new path for each test

    The tests run in one process and cut no power. So they show neither that `write` is durable nor that its conditions
    hold between processes.
    """

    def test_every_format_works_on_it(self, registered: str) -> None:
        tree = {"params": {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}}
        for format in self.formats:
            path = f"{registered}/{format}"
            save(path, tree, format=format)
            with pytest.raises(ExistsError):
                save(path, tree, format=format)
            save(path, tree, format=format, overwrite=True)
            ckpt = open_checkpoint(path)
            assert ckpt.format == format
            _assert_same(restore(path, jax.tree.map(np.zeros_like, tree)), tree)
            assert verify(path).ok
            if format != "equinox":  # It stores no names, so `convert` cannot restore the tree.
                convert(path, f"{registered}/native-{format}")
                _assert_same(restore(f"{registered}/native-{format}", jax.tree.map(np.zeros_like, tree)), tree)
            assert isinstance(ckpt, Checkpoint)

    def test_a_run_goes_on(self, registered: str) -> None:
        run, tree = f"{registered}/run", {"w": np.arange(6)}
        with Checkpointer(run, keep=keep.last(2)) as ckpts:
            for step in range(1, 6):
                ckpts.save(step, {"w": tree["w"] + step}, metrics={"loss": 1 / step})
        assert steps(run) == [4, 5]
        with Checkpointer(run) as ckpts:
            assert ckpts.restore(tree)["w"][0] == 5 and ckpts.latest_step == 5
            ckpts.pin(4)
            with pytest.raises(MismatchError, match="pinned"):
                ckpts.delete(4)
            record(run, 5, {"accuracy": 0.5})
            assert ckpts.open(5).metrics == {"loss": 0.2, "accuracy": 0.5}
            ckpts.save(6, tree)
            ckpts.rewind(5)
            ckpts.save(6, {"w": tree["w"] * 2})
            ckpts.delete(5)
            ckpts.finish()
        assert steps(run) == [4, 6] and open_checkpoint(run)["w"][1] == 2 and verify(run).ok

    def test_damage_is_found(self, registered: str, store: Store) -> None:
        save(f"{registered}/c", {"w": np.arange(100_000)})
        (name,) = [name for name in store.list(f"{registered}/c") if name.startswith("arrays-")]
        path = f"{registered}/c/{name}"
        data = read_file(store, path)
        with store.new_file(path, overwrite=True) as file:
            file.write(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        with pytest.raises(CorruptError):
            restore(f"{registered}/c")
        assert not verify(f"{registered}/c").ok


def _assert_same(found: Any, tree: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, tree)
