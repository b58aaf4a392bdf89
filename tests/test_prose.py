"""The check of the language finds what it is for."""

import pytest

import prose


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("# Somebody else may hold it.\n", "somebody"),
        ('def first() -> None:\n    """Whether it is first."""\n', "docstring: Whether"),
        ('raise ValueError(f"{path}: steps are set aside in {folder}")\n', "aside"),
        ("def look(near: str) -> None: ...\n", "name: near"),
        ("_MOST_FILES = 8\n", "name: most"),
        (f"def test_{'long' * 14}() -> None: ...\n", "test name"),
    ],
)
def test_check_finds_each_kind_in_python(source: str, rule: str) -> None:
    assert [finding.rule for finding in prose.findings_of_python("file.py", source)] == [rule]


def test_check_reads_prose_of_pages_but_no_code() -> None:
    page = (
        f"It counts `aside`.\n\n```python\nnobody = 1\n```\nIn the place of it.\n{'word ' * 30}\n| {'cell ' * 30} |\n"
    )
    found = [(finding.line, finding.rule) for finding in prose.findings_of_page("page.md", page)]
    assert found == [(6, "in the place of"), (7, "long line")]


def test_check_lets_good_language_pass() -> None:
    source = '# A peer may hold it, as far as a lease tells.\ndef first() -> bool:\n    """Returns True if so."""\n'
    assert list(prose.findings_of_python("file.py", source)) == []
