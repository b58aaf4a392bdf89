"""Builds the pages of the package, the report and the viewer, from their modules in `js`: ``python js/pages/build.py``.

Every installation runs this (`hatch_build.py`), so Git has no built files. Users install with pip alone, and a general
bundler would need npm. These modules use few forms of import and export, and any other form is an error here.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "js" / "pages"
TOOLS = ROOT / "src" / "treering" / "_tools"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*/\*\*.*?\*/\n", re.MULTILINE | re.DOTALL)


def outputs() -> dict[Path, str]:
    """Returns the built files and their contents."""
    style = (PAGES / "parts" / "page.css").read_text("utf-8")
    return {
        TOOLS / "report" / "page.css": style,
        TOOLS / "report" / "page.js": f'"use strict";\n(() => {{\n{bundle(PAGES / "report" / "report.js")}}})();\n',
        TOOLS / "view" / "viewer.html": _viewer(style),
    }


def _viewer(style: str) -> str:
    script = "\n" + bundle(PAGES / "viewer" / "viewer.js")
    return (
        (PAGES / "viewer" / "viewer.html")
        .read_text("utf-8")
        .replace("__HASH__", "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
        .replace("__STYLE__", style + (PAGES / "viewer" / "viewer.css").read_text("utf-8"))
        .replace("__SCRIPT__", script)
    )


def bundle(entry: Path) -> str:
    """Returns one script with a module and all that it imports. A module is a function, called in order of need.

    Raises `ValueError` for a form of import or export that this builder does not know, and for a circle of imports.
    """
    numbers: dict[Path, int | None] = {}
    parts: list[str] = []

    def include(module: Path) -> int:
        if module in numbers:
            if (number := numbers[module]) is None:
                raise ValueError(f"{module}: expected no circle of imports, found one")
            return number
        numbers[module] = None
        text = module.read_text("utf-8")
        body, exports = _body(module, text, include)
        number = numbers[module] = len(parts)
        end = f"return {{ {', '.join(exports)} }};\n"
        parts.append(f"// {module.relative_to(ROOT / 'js')}\nconst m{number} = (() => {{\n{body}{end}}})();\n")
        return number

    include(entry)
    script = "\n".join(parts)
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError(f"{entry}: expected a script without '</script' and '<!--', found one")
    return script


def _body(module: Path, text: str, include: Callable[[Path], int]) -> tuple[str, list[str]]:
    """Returns the code of a module with constants for its imports, and the names that it exports."""

    def imported(match: re.Match[str]) -> str:
        names, target = match[1].strip().rstrip(",").replace(" as ", ": "), match[2]
        path = (module.parent / target).resolve()
        return f"const {{ {' '.join(names.split())} }} = m{include(path)};\n"

    body = _EXPORT.sub(r"\1", _IMPORT.sub(imported, _COMMENT.sub("", text)))
    if unknown := re.search(r"^(import|export)\b.*", body, re.MULTILINE):
        raise ValueError(f"{module}: expected imports and exports of names, found {unknown[0]!r}")
    return body.strip("\n") + "\n", [name for _, name in _EXPORT.findall(text)]


if __name__ == "__main__":
    for path, content in outputs().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, "utf-8")
