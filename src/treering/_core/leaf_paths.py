"""Writes the paths of leaves as text, such as ``params/layers/0/kernel``, and matches them with globs.

Dict keys, attributes and indices look the same in a path. ``/`` and ``~`` inside a key are escaped as in JSON Pointer
(RFC 6901): ``~1`` and ``~0``. The root's path is the empty string. A path is also found as people write it, without
escapes, unless another path is written like that: Haiku's ``mlp~1~0~1linear_0/w`` as ``mlp/~/linear_0/w``.
"""

import difflib
import functools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .._printable import safe, short
from ..errors import MismatchError, UnsupportedError

# The second form is what `pathlib` and `os.path` make of a URL: they drop a slash. A single letter before the colon is
# a drive of Windows and not a URL.
_VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*)\}?(?=/|$)")  # at the beginning of a path
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_COMPARED_CHARACTERS = 100  # of names, in a search for the closest one


def key_text(key: object) -> str:
    """Returns a key as a component of a path. Raises `UnsupportedError` for a type that keys may not have."""
    if type(key) is str:
        if "~" in key or "/" in key:
            key = key.replace("~", "~0").replace("/", "~1")
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError:
                raise UnsupportedError(f"the key {key!r} is not valid Unicode") from None
        return key
    if type(key) in (int, bool, float):
        return str(key)
    if type(key) is bytes:
        return key_text(key.decode("utf-8", "backslashreplace"))
    what = f"is a {_type_name(key)}"
    if type(key) is tuple:
        parts = [_quoted(part) if type(part) is str else str(part) for part in key]
        odd = [part for part in key if type(part) not in (str, int, bool, float)]
        if not odd:
            return key_text(f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})")
        what = f"has a {_type_name(odd[0])} in it"
    raise UnsupportedError(
        f"the key {key!r:.100} {what}; keys may be str, int, bool, float, bytes, or a tuple of str, int, bool and float"
    )


def _type_name(key: object) -> str:
    """Returns the name of a type, which for a boolean of NumPy is not that of Python's."""
    module, name = type(key).__module__, type(key).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _quoted(text: str) -> str:
    """Returns text as Python writes it within a tuple, but escapes only backslashes and single quotes.

    Python's own `repr` escapes more, and what it escapes depends on Python's release.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def key_texts(keys: Sequence[object]) -> list[str]:
    """Returns the keys of one container as path components. Tests all keys at once, as most need no change."""
    if set(map(type, keys)) == {str}:
        texts: list[Any] = list(keys)
        text = "".join(texts)
        if text.isascii() and "~" not in text and "/" not in text:
            return texts
    return [key_text(key) for key in keys]


def join(parent: str, component: str, *, root: bool) -> str:
    """Returns the path of a child.

    root: True if `parent` is the root. Its path alone does not say that: the path of an empty key is empty, too.
    """
    return component if root else f"{parent}/{component}"


def split(path: str) -> list[str]:
    """Returns the components of a path without escapes."""
    if "~" not in path:
        return path.split("/")
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def relative_to(path: str, at: str) -> str | None:
    """Returns `path` relative to `at`, or None if it is not at or below `at`."""
    if not at:
        return path
    if path == at:
        return ""
    return path[len(at) + 1 :] if path.startswith(at + "/") else None


@functools.lru_cache(maxsize=256)
def _compile(glob: str) -> re.Pattern[str]:
    parts = []
    for segment in glob.split("/"):
        if segment == "**":
            parts.append("(?:[^/]*/)*")
        else:
            text = "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in segment)
            parts.append(text + "/")
    return re.compile("".join(parts), re.DOTALL)


def unescape(path: str) -> str:
    """Returns a path as people write it, without escapes."""
    return "/".join(split(path)) if "~" in path else path


def canonical(path: str) -> str:
    """Returns the path that a text means in which ``~`` may stand for itself: ``a~0b`` for ``a~b``."""
    return "/".join(map(key_text, split(path))) if "~" in path else path


class Globs(tuple[str, ...]):
    """Globs that many paths are compared with. Those without wildcards are looked up, however many they are."""

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(glob for glob in self if not has_wildcards(glob))

    @functools.cached_property
    def _above(self) -> frozenset[str]:
        return frozenset(at for path in self._paths for at in (path, *parent_paths(path)))

    @functools.cached_property
    def _patterns(self) -> list[str]:
        return [glob for glob in self if has_wildcards(glob)]

    def match(self, path: str) -> bool:
        """Returns True if one of the globs matches a path; see `matches`."""
        return path in self._paths or any(matches(path, glob) for glob in self._patterns)

    def may_match_below(self, path: str) -> bool:
        """Returns True if one of the globs could match the path, or a path below it."""
        if not path:
            return bool(self)
        ways = {path, unescape(path)}
        return not ways.isdisjoint(self._above) or any(
            _may_match_below(way.split("/"), glob) for way in ways for glob in self._patterns
        )


def globs_of(globs: str | Iterable[str], name: str = "") -> Globs:
    """Returns one or several globs for many comparisons.

    Raises `MismatchError`, which begins with the name of the argument or the rule, for anything but text.
    """
    if isinstance(globs, Globs):
        return globs
    given = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else [globs]
    if not all(isinstance(one, str) for one in given):
        raise MismatchError(f"{name}: expected a glob or a list of them, found {globs!r:.100}")
    return Globs(given)


def matches(path: str, glob: str) -> bool:
    """Returns True if a glob matches a path.

    ``*`` and ``?`` match within a component, ``**`` matches any number of components. A glob with wildcards may also
    match the path as people write it. `find_path` does that for a glob without wildcards.
    """
    if not has_wildcards(glob):
        return path == glob
    return matches_exactly(path, glob) or ("~" in path and matches_exactly(unescape(path), glob))


def matches_exactly(path: str, glob: str) -> bool:
    """Returns True if a glob matches a path with its escapes."""
    return _compile(glob).fullmatch(path + "/") is not None


def has_wildcards(glob: str) -> bool:
    """Returns True if a glob has wildcards, so that it may match several paths."""
    return "*" in glob or "?" in glob


def find_path(text: str, paths: Collection[str]) -> str:
    """Returns the path that a text means: the text itself, or else the only path that people write like that.

    Returns a text with wildcards as it is.

    Raises `MismatchError` if several of the paths are written like that.
    """
    if has_wildcards(text) or text in paths:
        return text
    found = tuple(path for path in paths if "~" in path and unescape(path) == text)
    if len(found) > 1:
        raise MismatchError(
            f"{text!r}: expected one path, found several that it may mean: {join_names(found)}; give one"
        )
    return found[0] if found else text


def find_globs(globs: str | Iterable[str], paths: Collection[str], name: str = "") -> Globs:
    """Returns the path that each of one or several globs means; see `find_path`, and `globs_of` for the name."""
    return Globs(find_path(glob, paths) for glob in globs_of(globs, name))


def parent_paths(path: str) -> list[str]:
    """Returns the paths of the containers around a path, except the root, the outermost first."""
    return [path[:n] for n, character in enumerate(path) if character == "/"]


def _may_match_below(parts: Sequence[str], glob: str) -> bool:
    """Returns True if a glob could match the path of these parts, or a path below it."""
    segments = glob.split("/")
    for n, part in enumerate(parts):
        if n == len(segments):
            return False
        if segments[n] == "**":
            return True
        if not matches(part, segments[n]):
            return False
    return True


def closest(path: str, names: Sequence[str]) -> str | None:
    """Returns the name that is most similar to `path`, for error messages, or None if none is similar enough.

    Of long names only the ends are compared, because the time grows with the square of what is compared.
    """
    leaf = path.rsplit("/", 1)[-1]
    same_ending = [n for n in names if n.rsplit("/", 1)[-1] == leaf]
    pool = same_ending if 0 < len(same_ending) <= 2000 else names[:2000]
    ends: dict[str, str] = {}
    for name in pool:
        ends.setdefault(name[-_COMPARED_CHARACTERS:], name)
    end = path[-_COMPARED_CHARACTERS:]
    found = difflib.get_close_matches(end, ends, n=max(len(ends), 1), cutoff=0.5)
    known = set(found)
    likeness = {one: difflib.SequenceMatcher(None, one, end).ratio() for one in ends if one in known}
    return ends[max(likeness, key=likeness.__getitem__)] if found else None  # the first of those that are equally close


def glob_hint(glob: str, paths: Collection[str]) -> str:
    """Returns the end of a message about a glob that matches nothing: a glob that does, or else the closest name."""
    for meant in (f"{glob}*" if glob.endswith("/*") else f"{glob}/**", f"**/{glob}", f"**/{glob}/**"):
        if found := tuple(path for path in paths if matches(path, meant)):
            return f"; {meant!r} matches {join_names(found, 3)}"
    similar = closest(glob, list(paths))
    return f"; the closest name is {safe(similar)}" if similar else ""


def absolute(path: str | os.PathLike[str], schemes: Collection[str] = ()) -> str:
    """Returns a file system path as absolute text, so that a later change of directory does not matter.

    ``~`` at its beginning is the user's home; a variable such as ``$HOME`` there is an error. A URL with one of the
    schemes stays as it is, without slashes at its end.

    Raises `MismatchError` for anything but a path, and `UnsupportedError` for any other URL, which would otherwise be
    the name of a local folder.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise MismatchError(f"expected a path, found {short(path)}") from None
    if not text or "\0" in text:
        raise MismatchError(f"expected a path, found {text!r:.100}")
    scheme, separator, rest = text.partition("://")
    if separator and scheme and scheme in schemes:
        names = rest.rstrip("/").split("/")
        if any(name in ("", ".", "..") for name in names):
            raise MismatchError(f"{text}: expected {scheme}:// and names, none of them empty, '.' or '..'")
        return f"{scheme}://{'/'.join(names)}"
    if _URL.match(text):
        name, _, rest = text.partition(":")
        if (known := name.lower()) in schemes and (rest := rest.strip("/")):
            raise UnsupportedError(f"{text}: expected a path, found a URL that is misspelt; write {known}://{rest}")
        raise UnsupportedError(
            f"{text}: expected a path of the file system, found a URL whose scheme this process does not know; known "
            f"are {', '.join(sorted(filter(None, schemes)))}; treering.stores.register adds one (a folder of that name "
            "has an absolute path)"
        )
    home = os.path.expanduser(text)
    if home.startswith("~"):
        raise MismatchError(f"{text}: expected a path, found no home of that user; give an absolute path")
    variable = _VARIABLE.match(text)
    if (
        variable and variable["name"] in os.environ
    ):  # Nothing but a shell replaces it: a folder of that name would arise.
        expanded = os.path.expandvars(text)
        raise MismatchError(
            f"{text}: expected a path, found the variable {variable[0]}, which is not replaced here; give {expanded}, "
            f"or ./{text} for a folder of that name"
        )
    return os.path.abspath(home)


def join_names(names: tuple[str, ...], most: int = 5) -> str:
    """Returns the first `most` names, and the number of the rest. Names from files cannot control a terminal."""
    return ", ".join(map(safe, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def name_known(missing: str, known: Iterable[str]) -> str:
    """Returns the known names for a message, and the one closest to a missing name; "" if none is known."""
    names = sorted(known)
    hint = closest(missing, names) if len(names) > 1 else None
    return join_names(tuple(names)) + (f"; the closest name is {safe(hint)}" if hint else "")
