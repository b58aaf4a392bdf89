"""The documentation site, of `docs` and the pages beside it: `make docs`."""

import os
import pathlib
import re
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "src"))

import treering as tr
from treering import errors

_OURS = {*tr.__all__, *vars(errors)}

project = "Treering"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "Treering"
# At the root of the site, whose index.html leads to docs/index.
html_extra_path = ["index.html", "../llms.txt", "../../src/treering/_tools/view/viewer.html"]
html_show_copyright = False
templates_path: list[str] = []

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
copybutton_prompt_text = "$ "
highlight_language = "none"

# `argument: what it is`, indented where it goes on, as the docstrings have them.
_ARGUMENT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (?=\S)")
_CODE = re.compile(r"(?<!`)(?<!:)`([^`]+)`(?!`)")
_NAME = re.compile(r"(treering\.)?(\w+\.)*[A-Z]\w+(\.\w+)?|treering(\.\w+)+")


def _as_restructured_text(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Makes lists of arguments, and of `code` links where it names something of ours, else literals."""
    listed: list[str] = []
    inside = False
    for line in lines:
        match = _ARGUMENT.match(line)
        if match:
            names = ", ".join(f"``{one}``" for one in match[1].split(", "))
            listed += [*([] if inside else [""]), f"* {names}: {line[match.end() :]}"]
        elif inside and line.startswith("    "):
            listed.append("  " + line.strip())
        else:
            listed += ["", line] if inside and line else [line]
        inside = bool(match) or (inside and line.startswith("    "))
    lines[:] = _CODE.sub(_linked, "\n".join(listed)).split("\n")


def _linked(match: re.Match[str]) -> str:
    name = match[1]
    target = name if name.startswith("treering.") else f".{name}"
    code = f":py:obj:`{name} <{target}>`" if _is_ours(name) else f"``{name}``"
    return code + "\\ " if match.string[match.end() : match.end() + 1].isalnum() else code


def _is_ours(name: str) -> bool:
    """Whether the API page has a name, or a class with it."""
    return bool(_NAME.fullmatch(name)) and name.removeprefix("treering.").partition(".")[0] in _OURS


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_restructured_text)
