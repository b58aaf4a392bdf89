"""Tests of the names in the source: a class name has one owner, and a name in backticks exists."""

import ast
import builtins
import collections
import functools
import io
import keyword
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "src" / "treering"
# The adapter has the classes of Orbax under the names of Orbax, and those of its version 1 under the same names.
_ADAPTER = {
    "ArrayMetadata", "AsyncOptions", "AtomicityOptions", "CheckpointMetadata", "Checkpointer", "FileOptions",
    "MultiprocessingOptions", "RootMetadata",
}  # fmt: skip
# May only shrink. `Difference`, `Policy` and `Stored` are public or parts of public signatures.
_SHARED = {
    "Difference", "File", "Layout", "Placement", "Policy", "Stored", "Uploads", "Version", "_Handler",
    "_Search",
}  # fmt: skip
_EXTERNAL = frozenset(ROOT.joinpath("tests", "external_names.txt").read_text().splitlines())
_LIBRARIES = {"flax", "jax", "keras", "orbax", "safetensors", "tensorflow", "torch", "treering", "zarr"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@functools.cache
def _sources() -> dict[str, tuple[str, ast.Module]]:
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module defines, uses or spells out as text."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or "")
            case ast.Constant(value=str(text)) if text.isidentifier():
                yield text
            case _:
                pass


def _comments(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module with their lines, and its comments if one has a name in backticks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            doc := ast.get_docstring(node, clean=False)
        ):
            yield node.body[0].lineno, doc
    if re.search("#.*`", text):  # Tokens of all files would take seconds.
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@pytest.mark.long
def test_class_names_have_one_owner() -> None:
    owners = collections.defaultdict[str, list[str]](list)
    for name, (_, tree) in _sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
    shared = {name: files for name, files in owners.items() if len(files) > 1}
    assert shared.keys() <= _ADAPTER | _SHARED, shared
    assert shared.keys() >= _ADAPTER | _SHARED, "take these from the lists above"


@pytest.mark.long
def test_names_in_backticks_exist() -> None:
    """A name in a comment or a docstring is one of the source, of Python, of a file, or in `external_names.txt`."""
    sources = _sources()
    modules = collections.defaultdict[str, set[str]](set)
    for name, (_, tree) in sources.items():
        path = pathlib.PurePath(name)
        modules[path.parent.name if path.stem == "__init__" else path.stem] |= set(_names(tree))
    known = {*dir(builtins), *keyword.kwlist, *modules, "treering", *set().union(*modules.values())}
    known |= {part for name in sources for part in pathlib.PurePath(name).with_suffix("").parts}
    wrong: list[str] = []
    used: set[str] = set()
    for name, (text, tree) in sources.items():
        for line, comment in _comments(text, tree):
            for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", comment):
                if quoted in _EXTERNAL or (ROOT / quoted).exists():
                    used.add(quoted)
                    continue
                words = re.findall(r"[A-Za-z_]\w*", _QUOTED.sub("", quoted))
                lost = {word for word in words if word not in known and word not in _EXTERNAL}
                used |= {*words}
                module, _, member = quoted.partition(".")
                if (
                    module in modules.keys() - _LIBRARIES
                    and member.isidentifier()
                    and member not in modules[module]
                    and member not in modules
                ):
                    lost.add(quoted)
                if lost:
                    wrong.append(f"{name}:{line}: `{quoted}`: {', '.join(sorted(lost))}")
    assert not wrong, "\n".join(wrong)
    assert used >= _EXTERNAL, f"take these from external_names.txt: {sorted(_EXTERNAL - used)}"
