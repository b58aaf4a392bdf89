"""Tests loaders of other libraries, where these are installed: PyTorch, torchdata and Hugging Face's datasets."""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import treering as tr

pytestmark = [
    pytest.mark.compat,
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


def stateful(*, shuffle: bool, data: Any = None) -> Any:
    loader = pytest.importorskip("torchdata.stateful_dataloader")
    return loader.StatefulDataLoader(data or list(range(40)), batch_size=2, shuffle=shuffle)


def nodes() -> Any:
    parts = pytest.importorskip("torchdata.nodes")
    return parts.Loader(parts.Batcher(parts.IterableWrapper(range(40)), 2))


def iterable() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"a": list(range(40))}).to_iterable_dataset(num_shards=2)


MAKES: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": lambda: stateful(shuffle=False),
    "shuffled StatefulDataLoader": lambda: stateful(shuffle=True),
    "nodes.Loader": nodes,
    "IterableDataset": iterable,
    "StatefulDataLoader of an IterableDataset": lambda: stateful(shuffle=False, data=iterable()),
}


def plain(element: Any) -> Any:
    return {key: plain(one) for key, one in element.items()} if isinstance(element, dict) else list(map(int, element))


def taken(data: Any, count: int) -> list[Any]:
    found = list(itertools.islice(data, count))
    return [one["a"] if isinstance(one, dict) and isinstance(one["a"], int) else plain(one) for one in found]


@pytest.mark.parametrize("library", MAKES)
@pytest.mark.parametrize("used", [0, 1, 7])
def test_a_job_resumes_twice_and_goes_back(tmp_path: pathlib.Path, library: str, used: int) -> None:
    make = MAKES[library]
    data = make()
    passing = iter(data)
    taken(passing, used)
    tr.save(tmp_path / "a", {"data": data})
    expected = taken(passing, 4)
    resumed = tr.restore(tmp_path / "a", like={"data": make()})["data"]
    tr.save(tmp_path / "b", {"data": resumed})  # before an element is taken
    again = tr.restore(tmp_path / "b", like={"data": make()})["data"]
    assert taken(iter(resumed), 4) == taken(iter(again), 4) == expected
    tr.restore(tmp_path / "a", like={"data": data})
    assert taken(iter(data), 2) == expected[:2]
    tr.save(tmp_path / "c", {"data": data})
    back = tr.restore(tmp_path / "c", like={"data": make()})["data"]
    assert taken(iter(back), 2) == expected[2:]


def test_workers_that_differ_are_an_error(tmp_path: pathlib.Path) -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    tr.save(tmp_path / "c", {"data": loader(list(range(9)))})
    with pytest.raises(
        tr.errors.MismatchError, match=r"data: this StatefulDataLoader does not accept .*AssertionError"
    ):
        tr.restore(tmp_path / "c", like={"data": loader(list(range(9)), num_workers=1)})
    with pytest.raises(tr.errors.MismatchError, match=r"data: .*'samples_yielded', 'sampler_iter_state'"):
        tr.restore(tmp_path / "c", like={"data": loader(list(range(9)), shuffle=True)})
