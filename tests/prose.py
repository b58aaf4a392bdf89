"""Checks the language of names, docstrings, comments, messages and Markdown: ``python tests/prose.py``.

The rules are those of CONTRIBUTING.md. ``--list`` prints every finding with its line. ``tests/prose_allowed.tsv``
holds how many findings a file may still have; ``--write`` lowers these numbers and never raises one.

vale and proselint check prose with a custom vocabulary, but neither reads Python names and docstrings, and vale
downloads its program when it first runs. codespell knows only single words.
"""

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("prose_allowed.tsv")
CODE = ("src", "tests", "benchmarks", "examples")
PAGES = ("*.md", "changes/*.md", "docs/**/*.md", "js/*.md", "tests/*.md")  # benchmarks/results is written by programs
MODULES = ("js/src/**/*.js", "js/pages/**/*.js", "js/test/*.js", "js/types/*.ts", "tests/js/*.mjs")
MAX_COLUMNS = 100
MAX_TEST_NAME = 60

# What is not written, and what is written instead.
PHRASES = {
    r"whole(?! numbers?\b)|wholly": "complete, contiguous, entire, or all of it",
    r"aside": "archive",
    r"near|(?<!as )(?<!so )(?<!how )(?<!too )far(?! (?:from|more|less|fewer)\b)": "local, remote",
    r"told": "notified, or name who knows what",
    r"nobody|somebody|no one": "no process, no user, another process",
    r"anew": "again",
    r"beside": "next to, together with",
    r"but for|be it|in the place of|belongs? into": "except, even if, instead of, belongs in",
    r"(?:gives?|gave|given|giving) (?:back|up)": "returns, releases, cancels, or raises",
    r"lets? go|letting go|hand(?:s|ed|ing)? over|(?:takes?|took|taken|taking) over": "releases, stages, acquires",
    r"goes on|go on|gone on|went on|going on": "continues",
    r"is no (?:default|longer of)|not of the": "is not the default, no longer part of",
    r"whoever|whosoever|he who|one who|who comes|those who": "name the process or the user",
    r"may not be (?:so|there)|is there already|what is there": "exists, name what exists",
    r"does not count|do not count|which counts|that counts": "is ignored, is valid, is listed",
    r"as it lies|as they lie|lies? (?:at|in|beside|there|here)|lay (?:at|in|beside|there)": "is at, is in",
    r"of its own accord|wants to (?:be|know)|has to do with": "say it plainly",
    r"thereof|therein|thereby|hitherto|henceforth|lest|ere|upon|whence|wherein": "a modern word",
}
NAME_PARTS = {
    "aside": "archived", "near": "local", "far": "remote", "told": "notified", "tell": "notify", "whole": "complete",
    "nobody": "no_process", "somebody": "another", "anew": "again", "beside": "next_to", "hear": "receive",
    "heard": "received", "apart": "separate", "lacking": "missing",
}  # fmt: skip
CONSTANT_PARTS = {
    "most": "MAX_, with the unit",
    "least": "MIN_, with the unit",
    "few": "MIN_ or MAX_",
    "enough": "MIN_",
}
OPENINGS = r"(?:What|Whether|Who|Whom|Whose|How|Where|Of)\b"


class Finding(NamedTuple):
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str


def findings_of_text(path: str, line: int, text: str) -> Iterator[Finding]:
    """Finds the phrases of PHRASES in prose; code in backticks is none."""
    prose = re.sub(r"`[^`\n]*`", lambda match: "`" + " " * (len(match[0]) - 2) + "`", text)
    for phrase, instead in PHRASES.items():
        for match in re.finditer(rf"(?<![\w-])(?:{phrase})(?![\w-])", prose, re.IGNORECASE):
            yield Finding(path, line + prose.count("\n", 0, match.start()), match[0].lower(), f"write: {instead}")


def findings_of_python(path: str, source: str) -> Iterator[Finding]:
    """Finds what is wrong in the comments, docstrings, messages and names of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from findings_of_text(path, token.start[0], token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield from findings_of_text(path, node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from findings_of_name(path, node.lineno, node.name)
            text = ast.get_docstring(node) or ""
            if not isinstance(node, ast.ClassDef) and (opening := re.match(OPENINGS, text)):
                yield Finding(
                    path, node.body[0].lineno, f"docstring: {opening[0]}", "begin with a verb: Returns, Reads"
                )
            if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
                yield Finding(path, node.lineno, "test name", f"{len(node.name)} characters, at most {MAX_TEST_NAME}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from findings_of_name(path, node.lineno, node.id)
        elif isinstance(node, ast.arg):
            yield from findings_of_name(path, node.lineno, node.arg)


def findings_of_javascript(path: str, source: str) -> Iterator[Finding]:
    """Finds phrases in the comments of a module."""
    for match in re.finditer(r"/\*(?s:.*?)\*/|(?<=\s)// .*", source):
        yield from findings_of_text(path, source.count("\n", 0, match.start()) + 1, match[0])


def findings_of_name(path: str, line: int, name: str) -> Iterator[Finding]:
    """Finds words in an identifier for which the glossary has another term."""
    words = NAME_PARTS | (CONSTANT_PARTS if name.isupper() else {})
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    for part in sorted({*parts} & {*words}):
        yield Finding(path, line, f"name: {part}", f"{name}: say {words[part]}")


def findings_of_page(path: str, text: str) -> Iterator[Finding]:
    """Finds phrases and long lines in a page, but no long lines in code, tables, headings or lines with a link."""
    text = re.sub(r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    yield from findings_of_text(path, 1, text)
    for number, line in enumerate(text.splitlines(), 1):
        if (
            len(line) > MAX_COLUMNS
            and not line.lstrip().startswith(("|", "#"))
            and "](" not in line
            and " " in line.strip()
        ):
            yield Finding(path, number, "long line", f"{len(line)} columns, at most {MAX_COLUMNS}")


def findings() -> list[Finding]:
    """Finds everything that breaks a rule in the project."""
    found: list[Finding] = []
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name not in ("prose.py", "test_prose.py"):  # they hold the words as data
                found += findings_of_python(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    for file in (file for pattern in MODULES for file in sorted(ROOT.glob(pattern))):
        found += findings_of_javascript(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    for pattern in PAGES:
        for file in sorted(ROOT.glob(pattern)):
            found += findings_of_page(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    return found


def read_allowed() -> dict[str, int]:
    """Reads how many findings each file may have."""
    lines = ALLOWED.read_text().splitlines() if ALLOWED.exists() else []
    return {path: int(number) for path, number in (line.split("\t") for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every finding")
    parser.add_argument("--write", action="store_true", help="lower the numbers of findings that are allowed")
    parser.add_argument("paths", nargs="*", help="print what is found in files whose path starts so")
    arguments = parser.parse_args()
    found, allowed = findings(), read_allowed()
    counts = collections.Counter(finding.path for finding in found)
    over = {path for path, count in counts.items() if count > allowed.get(path, 0)}
    shown = tuple(arguments.paths) or (("",) if arguments.list else ())
    for finding in sorted(set(found)):
        if finding.path.startswith(shown) if shown else finding.path in over:
            print(f"{finding.path}:{finding.line}: {finding.rule!r}; {finding.text}")
    if arguments.write:
        kept = {path: min(count, allowed.get(path, count if not allowed else 0)) for path, count in counts.items()}
        ALLOWED.write_text("".join(f"{path}\t{count}\n" for path, count in sorted(kept.items()) if count))
    if over:
        print(f"{len(over)} files break a rule of CONTRIBUTING.md (Language) too often for tests/prose_allowed.tsv")
    elif lower := [path for path, count in allowed.items() if counts[path] < count]:
        print(f"tests/prose_allowed.tsv allows too many: {', '.join(lower[:5])}; run python tests/prose.py --write")
        return 0 if arguments.write else 1
    return 1 if over and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
