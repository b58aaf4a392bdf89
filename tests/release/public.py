"""Lists the public interface, one line each, in tests/public.txt: ``python -m release.public`` writes it.

With `tests` on the path. A line is a name with its parameters and their defaults, an error with its bases, a command
or an option of the command line, an exit code, a requirement or an extra. Annotations are left out. Of `treering.orbax`
only names are listed, because Orbax decides the rest.
"""

import importlib
import inspect
import os
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from treering._cli.main import cli
from treering._restore.options import ReadOptions, RestoreOptions
from treering._save.target import FormatOptions

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests" / "public.txt"
MODULES = [
    "treering",
    "treering.errors",
    "treering.formats",
    "treering.formats.foreign",
    "treering.keep",
    "treering.keras",
    "treering.orbax",
    "treering.orbax.v1",
    "treering.rules",
    "treering.stores",
    "treering.stores.key_values",
    "treering.stores.store",
    "treering.testing",
]
DEVELOPMENT_EXTRAS = {"bench", "demo", "dist", "docs", "fuzz", "integrations", "lint", "test"}
OPTIONS = (ReadOptions, RestoreOptions, FormatOptions)
_NAMES = {"treering.stores": ["register"]}  # The other names there are for the library itself.
_OPAQUE = {"treering.stores.key_values.KeyValueStore"}  # Users make one and pass it on.
_WITHOUT_PARAMETERS = ("treering.orbax", "treering.orbax.v1")


def lines() -> list[str]:
    """Returns the lines of the interface as it is now, without modules whose own dependencies are not installed."""
    found = [line for name in MODULES if (module := _imported(name)) for line in _of_module(module)]
    options = [f"**{kind.__name__}: {', '.join(sorted(kind.__annotations__))}" for kind in OPTIONS]
    return [*found, *options, *_of_command(cli, "treering"), *_exit_codes(), *_requirements()]


def expected_lines() -> list[str]:
    """Returns the lines of the snapshot, without modules whose own dependencies are not installed."""
    missing = tuple(f"{name}." for name in MODULES if not _imported(name))
    return [line for line in SNAPSHOT.read_text("utf-8").splitlines() if not line.startswith(missing)]


def _imported(name: str) -> types.ModuleType | None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("treering"):
            raise
        return None


def _of_module(module: types.ModuleType) -> Iterator[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    listed = _NAMES.get(module.__name__) or (
        dir(module) if "__dir__" in vars(module) else getattr(module, "__all__", own)
    )
    for name in sorted(listed):
        if not name.startswith("_"):
            yield from _of_value(f"{module.__name__}.{name}", getattr(module, name))


def _of_value(name: str, value: object) -> Iterator[str]:
    if name.rpartition(".")[0] in _WITHOUT_PARAMETERS or isinstance(value, types.ModuleType):
        yield name
    elif inspect.isclass(value) and issubclass(value, BaseException):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
        yield from _members(name, value)
    elif inspect.isclass(value) and name.rpartition(".")[0] != value.__module__ in MODULES:
        yield name  # Its own module has the rest.
    elif inspect.isclass(value):
        yield f"{name}{_parameters(value) if _is_made_by_users(name, value) else ''}"
        yield from _members(name, value) if name not in _OPAQUE else ()
    elif callable(value) and not isinstance(value, types.GenericAlias):
        yield f"{name}{_parameters(value)}"
    else:
        yield name


def _is_made_by_users(name: str, kind: type) -> bool:
    """Returns False for protocols, and for classes that the API page shows with (): Treering makes their objects."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    return not getattr(kind, "_is_protocol", False) and f"autoclass:: {name}()\n" not in page


def _members(name: str, kind: type) -> Iterator[str]:
    """Yields the public members that classes of Treering define, except the tests of the conformance suites."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("treering"):
            found |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    for member, value in sorted(found.items()):
        if not member.startswith(("_", "test_")):
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            yield f"{name}.{member}{_parameters(function) if inspect.isfunction(function) else ''}"


def _parameters(function: Any) -> str:
    """Returns the parameters with their defaults, in parentheses."""
    parameters, shown, is_keyword = inspect.signature(function).parameters.values(), [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            shown.append("*")
        is_keyword = is_keyword or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        if parameter.name == "self":
            continue
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        shown.append(f"{_STARS.get(parameter.kind, '')}{parameter.name}{default}{_options(parameter)}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            shown.append("/")
    last = len(shown) - 1 - shown[::-1].index("/") if "/" in shown else -1
    return f"({', '.join(part for n, part in enumerate(shown) if part != '/' or n == last)})"


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _options(parameter: inspect.Parameter) -> str:
    options = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
    return f": {options[1]}" if options else ""


def _default(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str | bytes | tuple | None) else f"<{type(value).__name__}>"


def _of_command(command: click.Command, path: str) -> Iterator[str]:
    for parameter in command.params:
        yield f"$ {path} {_of_parameter(parameter)}"
    for name, inner in sorted(command.commands.items()) if isinstance(command, click.Group) else ():
        yield from _of_command(inner, f"{path} {name}")


def _of_parameter(parameter: click.Parameter) -> str:
    """Returns an argument or an option: names, choices or a word for each value, default."""
    word = "|".join(parameter.type.choices) if isinstance(parameter.type, click.Choice) else str(parameter.name).upper()
    value = f" {word}" * (parameter.nargs if parameter.nargs > 0 else 1) + "..." * (parameter.nargs < 0)
    if not isinstance(parameter, click.Option):
        return value.strip() if parameter.required else f"[{value.strip()}]"
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default if isinstance(parameter.default, int | float | str) else None
    return (
        names
        + ("" if parameter.is_flag else value)
        + " (several)" * parameter.multiple
        + " (required)" * parameter.required
        + ("" if not default else f" (default {default})")
    )


def _exit_codes() -> Iterator[str]:
    text = re.search(r"Exit codes: (.*?)\.\s*$", " ".join((cli.help or "").split()))
    for code in text[1].split("; ") if text else ():
        yield f"exit code {code}"


def _requirements() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    yield f"requires python{project['requires-python']}"
    yield from (f"requires {one}" for one in project["dependencies"])
    for extra, requirements in sorted(project["optional-dependencies"].items()):
        if extra not in DEVELOPMENT_EXTRAS:
            yield f"extra {extra}: {', '.join(requirements)}"


if __name__ == "__main__":
    if missing := [name for name in MODULES if not _imported(name)]:
        raise SystemExit(f"expected all of {', '.join(MODULES)}, found no {', '.join(missing)}; run `make test` first")
    SNAPSHOT.write_text("\n".join(lines()) + "\n", "utf-8")
