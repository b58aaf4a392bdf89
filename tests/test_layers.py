"""Tests that imports run downwards, from the public calls to the threads at the bottom, without circles."""

import ast
import functools
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "treering"
LAYERS = [  # from top to bottom
    {"testing", "keras", "orbax"},
    {"__main__"},
    {"_cli"},
    {"__init__"},
    {"_tools"},
    {"_publish"},
    {"_run"},
    {"_save"},
    {"_restore"},
    {"formats"},
    {"_processes"},
    {"_pytree"},
    {"rules"},
    {"_rules"},
    {"keep"},
    {"stores"},
    {"_core"},
    {"_threads"},
    {"errors", "_version"},
    {"_printable"},
]


def _name(path: pathlib.Path) -> str:
    parts = ["treering", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in SOURCE.rglob("*.py")}
FLOOR = {name: len(LAYERS) - n for n, layer in enumerate(LAYERS) for name in layer}


def _imports(module: str) -> set[str]:
    """Returns the modules of the library that a module imports, within functions and for type checkers too."""
    tree = ast.parse(FILES[module].read_text())
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found |= {name if (name := f"{origin}.{alias.name}") in FILES else origin for alias in node.names}
    return {name for name in found if name in FILES and name != module}


@functools.cache  # Not at import: every test process collects this file, and would read all sources.
def _graph() -> dict[str, set[str]]:
    return {module: _imports(module) for module in FILES}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_file_has_a_layer() -> None:
    assert {_room(module) for module in FILES} == set().union(*LAYERS)


@pytest.mark.long
def test_imports_run_downwards() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in _graph().items()
        for other in others
        if _room(module) != _room(other) and FLOOR[_room(module)] <= FLOOR[_room(other)]
    ]
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.long
@pytest.mark.whole
def test_imports_form_no_circle() -> None:
    left = {module: set(others) for module, others in _graph().items()}
    while ends := {module for module, others in left.items() if not others} | left.keys() - set().union(*left.values()):
        for module in ends:
            del left[module]
        for others in left.values():
            others.difference_update(ends)
    circle = "\n".join(f"{module} imports {', '.join(sorted(others))}" for module, others in left.items())
    assert not left, circle


def test_nothing_above_the_native_format_knows_its_files() -> None:
    """No module above the native format names its files."""
    above = [module for module in FILES if not module.startswith(("treering.formats.treering", "treering.testing"))]
    naming = [module for module in above if "treering.json" in FILES[module].read_text()]
    naming += [module for module in above if "treering.formats.treering.schema" in _graph()[module]]
    assert not naming


def test_formats_know_no_mesh() -> None:
    """A format that several processes write together gets their call and the layouts of arrays, as data.

    Reading, committing and copying native checkpoints need not even that. `_save` writes them.
    """
    formats = {module: others for module, others in _graph().items() if module.startswith("treering.formats")}
    wrong = [module for module, others in formats.items() if "_processes" in map(_room, others)]
    pure = ("calls", "layouts")
    for module, others in formats.items():
        if module.startswith("treering.formats.treering.") and any(
            _room(other) == "_pytree" or other.removeprefix("treering._core.") in pure for other in others
        ):
            wrong.append(module)
    assert not wrong


def test_what_is_private_to_jax_is_used_in_one_file() -> None:
    """Only one module uses `jax._src`."""
    using = {module for module, path in FILES.items() if "jax._src" in path.read_text()}
    assert using == {"treering._pytree.jax_private"}


def test_only_stores_know_where_bytes_live() -> None:
    """The modules above the stores get a store from their caller, and work on any. They use only these modules."""
    offered = {
        "buffers", "file_io", "lease_registry", "nearest_copy", "nfs", "owners", "probe",
        "read_errors", "sequential", "served_file", "store", "temporary_names",
        "tensorstore_memory",
    }  # fmt: skip
    used = {
        (module, other.split(".")[2])
        for module, others in _graph().items()
        for other in others
        if other.startswith("treering.stores.") and _room(module) not in ("stores", "testing")
    }
    wrong = [f"{module} imports {name}" for module, name in used if name not in offered]
    assert not wrong, "\n".join(sorted(wrong))
    assert offered == {name for _, name in used}, "take what is gone from the list"


def test_decoded_types_are_preloaded_at_import() -> None:
    """Modules with types to decode call `learn`, because two threads that decode a new type crash (msgspec 0.22)."""
    forgotten: list[str] = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        decodes = "msgspec.json.decode(" in text or "msgspec.convert(" in text
        if decodes and "(msgspec.Struct" in text and "\npreload_decoders(" not in text:
            forgotten.append(str(path.relative_to(SOURCE)))
    assert forgotten == []
