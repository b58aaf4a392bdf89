"""Tests the paths of leaves, globs, and the paths of files."""

import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import treering as tr
from treering import stores
from treering._core import leaf_paths as _paths
from treering._core.entries import glob_covers, lost_entry
from treering._core.entries import glob_fits as fits_entry
from treering.errors import MismatchError, UnsupportedError
from treering.stores.memory import MemoryStore

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(texts, min_size=1, max_size=5))
def test_components_survive_joining_and_splitting(components: list[str]) -> None:
    path = _paths.join("", _paths.key_text(components[0]), root=True)
    for component in components[1:]:
        path = _paths.join(path, _paths.key_text(component), root=False)
    assert _paths.split(path) == components


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a/b", "a~1b"),
        ("a~b", "a~0b"),
        ("~1", "~01"),
        (1, "1"),
        (True, "True"),
        (0.5, "0.5"),
        (b"\xff/", "\\xff~1"),
        (("a", 1), "('a', 1)"),
        (("/",), "('~1',)"),
        ((), "()"),
    ],
)
def test_keys_are_escaped_as_in_json_pointer(key: object, text: str) -> None:
    assert _paths.key_text(key) == text


@pytest.mark.parametrize("key", [None, (1, (2,)), ("\ud800",), (b"",), "\ud800", object()])
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(UnsupportedError):
        _paths.key_text(key)


parts = texts | st.integers() | st.booleans() | st.floats(allow_nan=False)


@pytest.mark.long
@given(*[st.lists(parts, max_size=3).map(tuple)] * 2)
def test_tuples_as_keys_stay_distinct(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    same = [(type(part), repr(part)) for part in a] == [(type(part), repr(part)) for part in b]
    assert (_paths.key_text(a) == _paths.key_text(b)) == same


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
    assert _paths.Globs(["nothing", glob]).match(path) is fits


def test_the_closest_name_prefers_the_same_ending() -> None:
    assert _paths.closest("params/dense_1/kernel", ["params/dense1/kernel", "params/dense_1/bias"]) == (
        "params/dense1/kernel"
    )
    assert _paths.closest("x", ["entirely/different"]) is None
    assert _paths.closest("layers/*/kernel", [f"layers/{n}/kernel" for n in range(12)]) == "layers/0/kernel"


def test_below() -> None:
    assert _paths.relative_to("a/b", "a") == "b"
    assert _paths.relative_to("ab", "a") is None
    assert _paths.relative_to("a", "a") == ""
    assert _paths.relative_to("a", "") == "a"


# Every public call that takes a path.
ENTRIES: dict[str, Callable[[Any], object]] = {
    "save": lambda path: tr.save(path, {"a": 1}),
    "save_async": lambda path: tr.save_async(path, {"a": 1}),
    "open": tr.open,
    "restore": tr.restore,
    "steps": tr.steps,
    "follow": lambda path: list(tr.follow(path, timeout=0)),
    "record": lambda path: tr.record(path, 1, {"loss": 1.0}),
    "verify": tr.verify,
    "diff, left": lambda path: tr.diff(path, {"a": 1}),
    "diff, right": lambda path: tr.diff({"a": 1}, path),
    "convert, from": lambda path: tr.convert(path, "there"),
    "convert, to": lambda path: tr.convert("here", path),
    "Checkpointer": tr.Checkpointer,
    "tensorboard": lambda path: tr.Checkpointer("run", tensorboard=path),
}


@pytest.fixture
def workdir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns a working directory with a checkpoint ``here`` in it."""
    monkeypatch.chdir(tmp_path)
    tr.save("here", {"a": 1})
    return tmp_path


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "url",
    [
        "GS://bucket",
        "ftp://example.org/run",
        "file://host/run",
        "gs:/bucket/run",
        pathlib.PurePosixPath("gs://bucket/run"),
    ],
)
def test_a_url_is_never_taken_for_a_local_folder(workdir: pathlib.Path, entry: str, url: Any) -> None:
    with pytest.raises(UnsupportedError, match="found a URL"):
        ENTRIES[entry](url)
    assert os.listdir(workdir) == ["here"]


@pytest.mark.parametrize(
    "entry", [entry for entry in ENTRIES if not entry.startswith("diff")]
)  # which takes any pytree
@pytest.mark.parametrize("path", ["", None, 7, b"", "a\0b"])
def test_what_is_no_path_is_refused(workdir: pathlib.Path, entry: str, path: Any) -> None:
    if entry == "tensorboard" and path is None:
        return  # which is its default
    with pytest.raises(MismatchError, match="expected a path"):
        ENTRIES[entry](path)
    assert os.listdir(workdir) == ["here"]


def test_a_tilde_at_the_beginning_is_the_home(workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir / "home"))
    assert tr.save("~/ckpt", {"a": 1}).path == str(workdir / "home" / "ckpt")
    assert tr.restore(pathlib.Path("~/ckpt")) == {"a": 1}
    with tr.Checkpointer("~/run") as ckpts:
        ckpts.save(1, {"a": 1})
    assert tr.steps("~/run") == [1] and sorted(os.listdir(workdir)) == ["here", "home"]
    with pytest.raises(MismatchError, match="no home of that user"):
        tr.save("~nobody-of-this-name/ckpt", {"a": 1})


def test_a_variable_of_the_shell_is_no_folder(workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir / "home"))
    for path in ("$HOME/ckpt", "${HOME}/ckpt"):
        with pytest.raises(MismatchError, match=rf"variable \$.*HOME.*; give {workdir}/home/ckpt, or ./\$"):
            tr.save(path, {"a": 1})
    assert os.listdir(workdir) == ["here"]
    assert tr.save("./$HOME/ckpt", {"a": 1}).path == str(workdir / "$HOME" / "ckpt")
    assert tr.save("$no_such_variable", {"a": 1}).path == str(workdir / "$no_such_variable")


def test_names_like_urls_are_reached_as_paths(workdir: pathlib.Path) -> None:
    tr.save("./gs:/ckpt", {"a": 1})
    tr.save("./~", {"a": 2})
    assert tr.restore("./gs:/ckpt") == {"a": 1} and tr.restore("./~") == {"a": 2}


@pytest.mark.long
def test_what_globs_may_match_below_a_path() -> None:
    """Compares `Globs.may_match_below` with all paths of up to four components of three names."""
    paths = ["/".join(parts) for n in range(1, 5) for parts in itertools.product("abc", repeat=n)]
    segments = ["a", "b", "*", "?", "**", "a*"]
    for glob in ("/".join(parts) for n in range(1, 4) for parts in itertools.product(segments, repeat=n)):
        globs = _paths.Globs([glob])
        fits = {path for path in paths if globs.match(path)}
        for at in paths[:12]:
            inside = {path for path in paths if _paths.relative_to(path, at) is not None}
            assert globs.may_match_below(at) is bool(fits & inside), (at, glob)
            for entry in (lost_entry(at, "why", tree=True), lost_entry(at, "why")):
                assert not entry.tree or not glob_covers(at, entry, globs) or inside <= fits or glob == at, (at, glob)
                assert glob_covers(at, entry, globs) or entry.tree or at not in fits
                assert fits_entry(at, entry, globs) is (bool(fits & inside) if entry.tree else at in fits)


@pytest.mark.parametrize("text", ["memory://", "memory:///", "memory://a//b", "memory://a/../b", "memory://./a"])
def test_a_url_of_a_store_has_names(text: str) -> None:
    with stores.using(MemoryStore(), "memory"), pytest.raises(MismatchError, match="expected memory:// and names"):
        tr.save(text, {"x": 1})


@pytest.mark.parametrize("text", ["memory2://a", "MEMORY2://a"])
def test_a_url_of_no_store_is_refused(text: str) -> None:
    with stores.using(MemoryStore(), "memory"), pytest.raises(UnsupportedError, match="found a URL"):
        tr.open(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("s3:/bucket/run", "s3://bucket/run"), ("GS://b/r/", "gs://b/r"), ("S3:/b", "s3://b")]
)
def test_a_misspelt_url_is_answered_with_the_right_one(text: str, meant: str) -> None:
    for call in (tr.open, tr.Checkpointer):
        with pytest.raises(UnsupportedError, match=rf"{text}: expected a path, found a URL .*; write {meant}\n"):
            call(text)
    with pytest.raises(UnsupportedError, match="whose scheme this process does not know"):
        tr.open("s4://bucket/run")
