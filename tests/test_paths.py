"""Key paths as text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from treering import _paths
from treering.errors import UnsupportedError

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(texts, min_size=1, max_size=5))
def test_components_survive_joining_and_splitting(components: list[str]) -> None:
    path = _paths.join("", _paths.key_text(components[0]), root=True)
    for component in components[1:]:
        path = _paths.join(path, _paths.key_text(component), root=False)
    assert _paths.split(path) == components


@pytest.mark.parametrize(
    ("key", "text"),
    [("a/b", "a~1b"), ("a~b", "a~0b"), ("~1", "~01"), (1, "1"), (True, "True"), (0.5, "0.5"), (b"\xff/", "\\xff~1")],
)
def test_keys_are_escaped_as_in_json_pointer(key: object, text: str) -> None:
    assert _paths.key_text(key) == text


@pytest.mark.parametrize("key", [None, (1, 2), "\ud800", object()])
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(UnsupportedError):
        _paths.key_text(key)


@pytest.mark.parametrize(
    ("glob", "path", "fits"),
    [
        ("**/kernel", "kernel", True),
        ("**/kernel", "a/b/kernel", True),
        ("**/kernel", "a/kernel/b", False),
        ("*/kernel", "a/b/kernel", False),
        ("layers/*/w", "layers/10/w", True),
        ("layers/?/w", "layers/10/w", False),
        ("params/**", "params/a/b", True),
        ("params/**", "params", True),
        ("**", "", True),
        ("a[0]", "a[0]", True),
        ("a.b", "axb", False),
    ],
)
def test_globs(glob: str, path: str, fits: bool) -> None:
    assert _paths.matches(path, glob) is fits
    assert _paths.matches(path, ["nothing", glob]) is fits


def test_the_closest_name_prefers_the_same_ending() -> None:
    assert _paths.closest("params/dense_1/kernel", ["params/dense1/kernel", "params/dense_1/bias"]) == (
        "params/dense1/kernel"
    )
    assert _paths.closest("x", ["entirely/different"]) is None


def test_below() -> None:
    assert _paths.below("a/b", "a") == "b"
    assert _paths.below("ab", "a") is None
    assert _paths.below("a", "a") == ""
    assert _paths.below("a", "") == "a"
