"""Tests iterators that are set to a saved state, and those that are saved again before they move."""

import copy
import gc
import itertools
import json
import logging
import pathlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from treering._pytree import iterators
from treering._pytree.iterator_restore import misfit
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat


class Deferred:
    """A double of the `IterableDataset` of Hugging Face's datasets 5.2.

    A loaded state is kept until the next pass begins, and longer; until then `state_dict` returns the one before. Each
    pass has a state of its own, which has a dict where there was None.
    """

    def __init__(self, size: int = 20) -> None:
        self._size = size
        self._state = {"at": 0, "previous": None}
        self._starting_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        self._state = copy.deepcopy(self._starting_state or {"at": 0, "previous": None})
        for n in range(self._state["at"], self._size):
            self._state = self._state if n else dict(self._state)
            self._state.update(at=n + 1, previous={"shard": 0})
            yield n

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state = state


class Wrapper:
    """A loader whose state is that of what it loads from, such as a `StatefulDataLoader`."""

    def __init__(self, data: Any) -> None:
        self.parts = {"data": data}

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts["data"])

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.parts["data"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["data"].load_state_dict(state["data"])


class Unhashable(Deferred):
    """The same, equal to all others and without a hash."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return True


class Caching(Deferred):
    """The same, with an attribute that each reading changes."""

    def state_dict(self) -> dict[str, Any]:
        self.last = super().state_dict()
        return dict(self.last)


MAKES: list[Callable[[], Any]] = [Deferred, lambda: Wrapper(Deferred()), Unhashable, Caching]


def taken(data: Any, count: int) -> list[int]:
    return list(itertools.islice(iter(data), count))


def restored(path: pathlib.Path, data: Any) -> Any:
    return tr.restore(path, like={"data": data})["data"]


@pytest.fixture
def at_seven(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint of each kind after seven elements."""
    for n, make in enumerate(MAKES):
        data = make()
        taken(data, 7)
        tr.save(tmp_path / f"{n}", {"data": data})
    return tmp_path


@pytest.mark.parametrize("kind", range(len(MAKES)))
def test_a_state_is_saved_again_until_the_iterator_moves(at_seven: pathlib.Path, kind: int) -> None:
    """A job that is preempted before its first element loses no position, however it saves."""
    make, path = MAKES[kind], at_seven / f"{kind}"
    data = restored(path, make())
    tr.save(at_seven / "a", {"data": data})
    tr.save_async(at_seven / "b", {"data": data}).result()
    assert taken(restored(at_seven / "a", make()), 3) == taken(restored(at_seven / "b", make()), 3) == [7, 8, 9]
    again = restored(at_seven / "b", make())
    tr.save(at_seven / "c", {"data": again})  # a third job that is preempted
    assert taken(restored(at_seven / "c", make()), 2) == [7, 8]
    assert taken(data, 2) == [7, 8]
    tr.save(at_seven / "d", {"data": data})
    assert taken(restored(at_seven / "d", make()), 2) == [9, 10]


def test_an_iterator_that_moves_in_place_has_moved(tmp_path: pathlib.Path) -> None:
    """Another state shows it, even if all attributes are the same objects."""

    class InPlace:
        def __init__(self) -> None:
            self.at, self.resume = [0], [0]

        def __next__(self) -> int:
            self.at[0], self.resume[0] = max(self.at[0], self.resume[0]) + 1, 0
            return self.at[0] - 1

        def state_dict(self) -> list[int]:
            return [*self.at]

        def load_state_dict(self, state: list[int]) -> None:
            self.resume[:] = state

    data = InPlace()
    for _ in range(7):
        next(data)
    tr.save(tmp_path / "a", {"data": data})
    resumed = restored(tmp_path / "a", InPlace())
    tr.save(tmp_path / "b", {"data": resumed})
    assert next(restored(tmp_path / "b", InPlace())) == next(resumed) == 7
    tr.save(tmp_path / "c", {"data": resumed})
    assert next(restored(tmp_path / "c", InPlace())) == 8
    circle = restored(tmp_path / "a", InPlace())
    next(circle)
    circle.at[0] = 0  # the start of the next epoch, which is the state that it returned after the restore
    tr.save(tmp_path / "d", {"data": circle})
    assert next(restored(tmp_path / "d", InPlace())) == 0


def test_save_on_error_saves_the_state_that_was_set(at_seven: pathlib.Path) -> None:
    run = at_seven / "run"
    with pytest.raises(RuntimeError), tr.Checkpointer(run, save_every=10, save_on_error=True) as ckpts:
        ckpts.save(1, {"data": restored(at_seven / "0", Deferred())})
        ckpts.save(2, {"data": restored(at_seven / "0", Deferred())})
        raise RuntimeError
    assert tr.steps(run)[-1] == 2 and taken(restored(run, Deferred()), 1) == [7]


@pytest.mark.parametrize("kind", range(len(MAKES)))
def test_a_job_that_went_back_saves_where_it_is(
    at_seven: pathlib.Path, kind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An iterator that returns the state of before the restore has moved there, if an attribute has changed."""
    make = MAKES[kind]
    data = make()
    taken(data, 12)
    restored(at_seven / f"{kind}", data)
    assert taken(data, 5) == [7, 8, 9, 10, 11]
    tr.save(at_seven / "back", {"data": data})
    assert "data: this" in caplog.text and "it has changed since" in caplog.text
    assert taken(restored(at_seven / "back", make()), 2) == [12, 13]
    caplog.clear()
    tr.save(at_seven / "more", {"data": data})
    assert not caplog.text


def test_a_second_restore_replaces_the_first(at_seven: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    tr.save(at_seven / "start", {"data": Deferred()})
    data = restored(at_seven / "0", Deferred())
    tr.save(at_seven / "x", {"data": restored(at_seven / "start", data)})
    assert taken(restored(at_seven / "x", Deferred()), 1) == [0]
    tr.save(at_seven / "x", {"data": restored(at_seven / "0", data)}, overwrite=True)
    assert taken(restored(at_seven / "x", Deferred()), 1) == [7] and not caplog.text


def test_nothing_is_kept_of_an_iterator_that_is_dropped(at_seven: pathlib.Path) -> None:
    class Itself(Deferred):
        def __init__(self) -> None:
            super().__init__()
            self.me, self.all = self, [self, {"me": self}]

    kept = [*iterators._pending]
    for make in (Deferred, Itself):
        ref = weakref.ref(restored(at_seven / "0", make()))
        gc.collect()
        assert ref() is None and [*iterators._pending] == kept


def test_an_iterator_that_cannot_be_watched_is_named(at_seven: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    readings = itertools.count()

    class Timed(Deferred):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "at": next(readings) + 100}

    class Bare:
        """An iterator without attributes and weak references."""

        __slots__ = ()
        data = Deferred()

        def state_dict(self) -> dict[str, Any]:
            return self.data.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.data.load_state_dict(state)

    for make in (Timed, Bare):
        caplog.clear()
        restored(at_seven / "0", make())
        assert f"data: this {make.__name__} returns another state than the restored one" in caplog.text


def test_two_leaves_with_one_iterator(tmp_path: pathlib.Path) -> None:
    data, other = Deferred(), Deferred()
    taken(data, 3)
    tr.save(tmp_path / "shared", {"a": data, "b": data})
    one = Deferred()
    tr.restore(tmp_path / "shared", like={"a": one, "b": one})
    tr.save(tmp_path / "again", {"a": one, "b": one})
    assert tr.open(tmp_path / "again")["a"] == tr.open(tmp_path / "again")["b"] == [data.state_dict()]
    tr.save(tmp_path / "two", {"a": data, "b": other})
    with pytest.raises(MismatchError, match="a and b: expected two iterators"):
        tr.restore(tmp_path / "two", like={"a": one, "b": one})


class Loader:
    """A double of the `Loader` of torchdata.nodes 0.11: its state_dict() makes the iterator of the next pass."""

    def __init__(self) -> None:
        self._it: Any = None
        self._next_state: Any = None
        self._iter_for_state_dict = False

    def __iter__(self) -> Any:
        if self._it is None:
            self._it = _Counter()
        elif self._iter_for_state_dict:
            self._iter_for_state_dict = False
            return self._it
        self._it.n, self._next_state = (self._next_state or {"n": 0})["n"], None
        return self._it

    def load_state_dict(self, state: Any) -> None:
        self._next_state = state

    def state_dict(self) -> Any:
        if self._it is None:
            iter(self)
            self._iter_for_state_dict = True
        it: Any = self._it
        return {"n": it.n}


class _Counter:
    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> "_Counter":
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n - 1


def test_reading_the_state_back_does_not_move_a_loader(tmp_path: pathlib.Path) -> None:
    data = Loader()
    tr.save(tmp_path / "0", {"data": data})
    taken(data, 4)
    tr.save(tmp_path / "4", {"data": data})
    twice = restored(tmp_path / "4", restored(tmp_path / "0", Loader()))
    assert taken(twice, 2) == [4, 5]
    assert taken(restored(tmp_path / "0", twice), 2) == [0, 1]


# States whose structure is another one


def interleaved(cycle: int) -> Any:
    pieces: Any = grain.MapDataset.range(8).map(lambda n: grain.MapDataset.range(n).to_iter_dataset())
    return iter(grain.experimental.InterleaveIterDataset(pieces, cycle_length=cycle))


def mixed(count: int) -> Any:
    return iter(grain.IterDataset.mix([grain.MapDataset.range(50).to_iter_dataset()] * count, weights=[1] * count))


def zipped(count: int) -> Any:
    return iter(grain.experimental.ZipIterDataset([grain.MapDataset.range(50).to_iter_dataset()] * count))


UNFIT = {
    "cycle": (
        lambda: interleaved(2),
        lambda: interleaved(4),
        "states'] the saved state has 2 items, that of this .* 4",
    ),
    "parents": (lambda: mixed(2), lambda: mixed(3), "'parents'] the saved state has 2 items, that of this iterator 3"),
    "class": (
        lambda: mixed(2),
        lambda: zipped(2),
        "keys 'parents', 'index', 'stop', .* 'parents'; the state is that of",
    ),
    "raises": (Deferred, lambda: Wrapper(Deferred()), "KeyError.'data'.; the state is that of a .*Deferred, this is a"),
}


@pytest.mark.parametrize(("saved", "other", "says"), UNFIT.values(), ids=UNFIT)
def test_a_state_with_other_parts_is_an_error(
    tmp_path: pathlib.Path, saved: Callable[[], Any], other: Callable[[], Any], says: str
) -> None:
    """The error names the leaf, and both structures or both classes."""
    data = saved()
    for _ in range(3):
        next(data) if hasattr(data, "__next__") else taken(data, 2)
    tr.save(tmp_path / "c", {"data": data})
    with pytest.raises(
        MismatchError, match=f"data: this .* does not accept the saved state: .*{says.replace(']', '.')}"
    ):
        restored(tmp_path / "c", other())


@pytest.mark.parametrize(
    ("saved", "own", "fits", "strict"),
    [
        ({"a": None}, {"a": {"b": 1}}, True, True),  # in the middle of an epoch
        ({"a": {"b": 1}}, {"a": {}}, True, True),
        ({"buffer": [1, 2, 3]}, {"buffer": [1]}, True, True),
        ({"buffer": [{"x": 1}] * 3}, {"buffer": []}, True, True),
        ({"n": 1}, {"n": 1.5}, True, True),
        ({"n": 1, "new": 2}, {"n": 1}, True, False),
        ({"n": 1, "part": {"m": 2}}, {"n": 1}, False, False),
        ({"position": 1}, {"index": 1}, False, False),
        ({"states": [{"n": 1}] * 2}, {"states": [{"n": 1}] * 4}, False, False),
        ({"states": [{"n": 1}, None]}, {"states": [None, {"m": {"k": 1}}]}, True, True),
        ([{"n": {"a": [1]}}], [{"n": 3}], False, False),
        ({"3": 1}, {3: 2}, True, True),  # JSON has only text as keys
        (b"{}", {"n": 1}, False, False),
    ],
)
def test_parts_that_vary_during_an_epoch_fit(saved: Any, own: Any, fits: bool, strict: bool) -> None:
    assert (misfit(saved, own, strict=strict) is None) is fits
    assert (misfit(own, saved, strict=strict) is None) is fits
    assert fits is strict or misfit(saved, own, strict=True)


class Growing:
    """An iterator with a buffer that grows, whose state has other parts as it moves. It is set at once."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"buffer": []}

    def __next__(self) -> int:
        n = len(self.state["buffer"])
        self.state = {"buffer": [{"n": k} for k in range(n + 1)], "rng": {"key": [n]}, f"seen-{n}": {"n": n}}
        return n

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_whose_parts_vary_is_accepted(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    data, other = Growing(), Growing()
    for n in range(4):
        tr.save(tmp_path / f"{n}", {"data": data})
        next(data)
    for n in (2, 0, 3, 1):
        assert next(restored(tmp_path / f"{n}", other)) == n
    assert not caplog.text


def test_a_loader_of_a_later_release_accepts_an_earlier_state(at_seven: pathlib.Path) -> None:
    """A value that the saved state does not have yet is no other part."""

    class Later(Deferred):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "epoch": 0}

    Later.__qualname__ = Deferred.__qualname__
    data = restored(at_seven / "0", Later())
    tr.save(at_seven / "x", {"data": data})
    assert taken(data, 1) == taken(restored(at_seven / "x", Later()), 1) == [7]


class Late(Deferred):
    """A loader that has no state before its first element, and raises an error of `kind` until then."""

    kind: type[Exception] = AttributeError

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def __iter__(self) -> Iterator[int]:
        self.begun = True
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        if not self.begun:
            raise self.kind("not begun")
        return super().state_dict()


def test_a_state_that_cannot_be_read_back(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loader that has not begun is named in a log line. One that does not find its parts in the state is an error."""
    data = Late()
    taken(data, 7)
    tr.save(tmp_path / "c", {"data": data})
    other = restored(tmp_path / "c", Late())
    assert "data: this Late cannot return its state before it moves" in caplog.text
    with pytest.raises(UnsupportedError, match=r"data: a .*Late whose state_dict\(\) raises AttributeError.*not begun"):
        tr.save(tmp_path / "d", {"data": other})
    assert taken(other, 1) == [7] and not (tmp_path / "d").exists()

    class Unfit(Late):
        kind = AssertionError

    Unfit.__qualname__ = Late.__qualname__
    with pytest.raises(MismatchError, match=r"data: this .* does not accept .* state_dict\(\) raises AssertionError"):
        restored(tmp_path / "c", Unfit())


def test_another_class_that_accepts_the_state_is_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Deferred()
    taken(data, 7)
    tr.save(tmp_path / "c", {"data": data})
    assert taken(restored(tmp_path / "c", Unhashable()), 1) == [7]
    assert "data: the state is that of a" in caplog.text and "Deferred, this is a" in caplog.text
    assert "Unhashable; it accepts the saved state" in caplog.text


# State methods that raise


class NeedsArguments:
    """Has the methods of the `StreamingDataset` of mosaicml-streaming 0.13 and of litdata 0.2."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_method_that_raises_names_the_leaf(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every such leaf is in one error, whose cause is the error of the method, and nothing is written."""
    tree = {"model": jnp.ones(2), "in": {"stream": NeedsArguments(), "rng": random.SystemRandom()}}
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "c", tree)
    text = str(caught.value)
    assert "2 of 3 leaves cannot be saved; nothing was written" in text
    assert f"in/stream: a {__name__}.NeedsArguments whose state_dict() raises TypeError" in text
    assert "in/rng: a random.SystemRandom whose getstate() raises NotImplementedError" in text
    assert "leave it out of the tree" in text and isinstance(caught.value.__cause__, NotImplementedError)
    assert not list(tmp_path.iterdir())
    run = tmp_path / "run"
    with pytest.raises(KeyError), tr.Checkpointer(run, save_every=10, save_on_error=True) as ckpts:
        ckpts.save(1, tree)
        raise KeyError
    assert not tr.steps(run) and "in/rng: a random.SystemRandom" in caplog.text


def test_the_class_of_an_iterator_is_recorded(tmp_path: pathlib.Path) -> None:
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    tr.save(tmp_path / "c", {"data": data, "own": Deferred(), "w": np.ones(1)})
    found = json.loads((tmp_path / "c" / "treering.json").read_bytes())["iterators"]
    assert found["data"] == {
        "module": type(data).__module__, "class": type(data).__qualname__, "version": grain.__version__
    }  # fmt: skip
    assert found["own"]["class"] == "Deferred" and found.keys() == {"data", "own"}
    tr.convert(tmp_path / "c", tmp_path / "d", rules=[tr.rules.rename("^own$", "other")])
    moved = json.loads((tmp_path / "d" / "treering.json").read_bytes())["iterators"]
    assert moved == {"data": found["data"], "other": found["own"]}


def test_a_log_of_what_was_not_taken(at_seven: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treering")
    tr.save(at_seven / "a", {"data": restored(at_seven / "0", Deferred())})
    assert "data: nothing was taken from it since the restore; its state is saved again" in caplog.text
