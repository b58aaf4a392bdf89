"""Tests how pytrees become paths, leaves and skeletons."""

import collections
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import treering
from treering._core import leaf_paths as _paths
from treering._core import skeleton as _skeleton
from treering._pytree import walk
from treering.errors import CorruptError, UnsupportedError

pytestmark = pytest.mark.compat

Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    a: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A container whose children have no names."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Unnamed":
        return cls(*children)


TREE = {
    "dict": {"b": 1, "a": 2},
    "ints": {2: 1, 10: 2},
    "list": [1, [2, 3], []],
    "tuple": (1, (), (2,)),
    "point": Point(1, {"z": 2}),
    "record": Record(1, [2]),
    "unnamed": Unnamed(1, (2, 3)),
    "none": [None, 1],
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(int, q=1),
}


def test_the_order_is_that_of_jax() -> None:
    flat_tree = walk.flatten_tree(TREE)
    assert list(flat_tree.leaves) == walk.flatten_leaves(TREE)[0]
    by_jax = jax.tree_util.tree_flatten_with_path(TREE, is_leaf=lambda x: x is None)[0]
    assert len(by_jax) == len(flat_tree.paths)


def test_paths_read_the_same_for_keys_attributes_and_indices() -> None:
    paths = set(walk.flatten_tree(TREE).paths)
    assert {"dict/a", "ints/10", "list/1/0", "point/x", "point/y/z", "record/b/0", "unnamed/1/1", "none/0"} <= paths


def test_the_skeleton_builds_nested_containers() -> None:
    flat_tree = walk.flatten_tree(TREE)
    built = _skeleton.build(flat_tree.skeleton, flat_tree.leaves)
    assert built == {
        **TREE,
        "point": {"x": 1, "y": {"z": 2}},
        "record": {"a": 1, "b": [2]},
        "unnamed": [1, (2, 3)],
        "ordered": {"b": 1, "a": 2},
        "default": {"q": 1},
    }


@pytest.mark.parametrize("at", ["dict", "list/1", "tuple/1", "point/y", "none", "unnamed", "record/b/0", ""])
def test_a_subtree_of_the_skeleton_builds_that_part(at: str) -> None:
    flat_tree = walk.flatten_tree(TREE)
    part = _skeleton.subtree(flat_tree.skeleton, at)
    assert part is not None
    expected: Any = _skeleton.build(flat_tree.skeleton, flat_tree.leaves)
    for key in at.split("/") if at else ():
        expected = expected[int(key)] if isinstance(expected, list | tuple) else expected[key]
    below = [
        leaf
        for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True)
        if _paths.relative_to(path, at) is not None
    ]
    assert _skeleton.build(part, below) == expected


def test_no_such_place_in_the_skeleton() -> None:
    assert _skeleton.subtree(walk.flatten_tree(TREE).skeleton, "dict/c") is None


def test_the_same_structure_is_named_once() -> None:
    first, second = walk.flatten_tree(TREE), walk.flatten_tree(jax.tree.map(lambda x: x + 1, TREE))
    assert first.paths is second.paths
    assert list(second.leaves) != list(first.leaves)


def test_keys_with_dots_stay_distinct() -> None:
    assert set(walk.flatten_tree({"a.b": 1, "a": {"b": 2}, "a/b": 3}).paths) == {"a.b", "a/b", "a~1b"}


def test_depth_is_no_limit() -> None:
    tree: Any = 7
    for _ in range(200):
        tree = {"a": [tree]}
    flat_tree = walk.flatten_tree(tree)
    assert flat_tree.paths == ["/".join(["a/0"] * 200)]
    assert _skeleton.build(flat_tree.skeleton, flat_tree.leaves) == tree


class Two:
    """A container with an attribute and an index that look the same in a path."""

    def __init__(self, a: Any, b: Any):
        self.pair = a, b


jax.tree_util.register_pytree_with_keys(
    Two,
    lambda two: (((jax.tree_util.GetAttrKey("1"), two.pair[0]), (jax.tree_util.SequenceKey(1), two.pair[1])), None),
    lambda _, children: Two(*children),
)


def test_two_leaves_with_one_path_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"inner/1: two leaves have this path"):
        walk.flatten_tree({"inner": Two(1, 2)})


class Equal:
    """A container whose keys are equal, although their texts may differ."""

    def __init__(self, keys: Any, *parts: Any):
        self.keys, self.parts = keys, parts


jax.tree_util.register_pytree_with_keys(
    Equal,
    lambda equal: (tuple(zip(equal.keys, equal.parts, strict=True)), equal.keys),
    lambda keys, parts: Equal(keys, *parts),
)


@pytest.mark.parametrize("keys", [("a", "a"), (1, True), (0, 0.0)])
def test_two_children_with_one_key_are_refused_by_name(keys: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"inner: two children of this Equal have one key"):
        walk.flatten_tree({"inner": Equal(keys, {}, 1), "x": 1})


class Slashes(tuple[Any, ...]):
    """A tuple with names of fields that `namedtuple` does not allow."""

    _fields = ("a/b", "c~d")


def test_fields_are_escaped_like_other_keys(tmp_path: pathlib.Path) -> None:
    assert walk.flatten_tree({"n": Slashes([1, 2])}).paths == ["n/a~1b", "n/c~0d"]
    treering.save(tmp_path / "c", {"n": Slashes([1, 2])})
    assert treering.restore(tmp_path / "c") == {"n": {"a/b": 1, "c~d": 2}}


def test_keys_that_cannot_be_sorted_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"a/b: JAX cannot flatten this dict"):
        walk.flatten_tree({"a": {"b": {1: 2, "x": 3}}})


def test_keys_of_other_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"the key frozenset\(\{1\}\) is a frozenset; keys may be str"):
        walk.flatten_tree({"a": {frozenset([1]): 3}})
    with pytest.raises(UnsupportedError, match=r"is a numpy\.bool_?; keys may be str"):
        walk.flatten_tree({np.True_: 3})
    with pytest.raises(UnsupportedError, match=r"the key \('a', None\) has a NoneType in it; .* a tuple of"):
        walk.flatten_tree({"a": {("a", None): 3}})


@pytest.mark.parametrize(
    "skeleton",
    [
        [],
        [0, 0],
        [_skeleton.Node("list", "", 2), 0],
        [_skeleton.Node("dict", "", [[1]]), 0],
        [_skeleton.Node("dict", "", [["tuple", [["tuple", []]]]]), 0],
    ],
)
def test_a_skeleton_that_does_not_add_up_is_corrupt(skeleton: Any) -> None:
    with pytest.raises(CorruptError):
        _skeleton.build(skeleton, [1])


Swapped = collections.namedtuple("Swapped", "first second")  # registered with its own children, in its own order
jax.tree_util.register_pytree_with_keys(
    Swapped,
    lambda s: (((jax.tree_util.GetAttrKey("second"), s.second), (jax.tree_util.GetAttrKey("first"), s.first)), None),
    lambda _, children: Swapped(*reversed(children)),
)
Packed = collections.namedtuple("Packed", "state about")
jax.tree_util.register_pytree_node(
    Packed, lambda p: ((p.state,), p.about), lambda about, children: Packed(*children, about)
)


def test_namedtuples_may_have_registered_children_of_their_own() -> None:
    tree = {"swapped": Swapped(1, 1), "packed": Packed({"x": 2}, "static"), "plain": Point(3, 4)}
    flat_tree = walk.flatten_tree(tree)
    assert dict(zip(flat_tree.paths, flat_tree.leaves, strict=True)) == {
        **{"swapped/second": 1, "swapped/first": 1, "packed/0/x": 2},
        **{"plain/x": 3, "plain/y": 4},
    }
    assert _skeleton.build(flat_tree.skeleton, flat_tree.leaves) == {
        "swapped": {"second": 1, "first": 1},
        "packed": [{"x": 2}],
        "plain": {"x": 3, "y": 4},
    }
