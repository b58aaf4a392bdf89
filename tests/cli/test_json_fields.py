"""The field names of every command's `--json`, which scripts rely on; docs/reference/command-line.md lists the same."""

import os
import pathlib
from typing import Any

import numpy as np
import pytest

import treering as tr
from hostile_input import flip
from treering._cli.main import cli

ROOT = pathlib.Path(__file__).parents[2]
NO_JSON = {"browse", "completion", "pull", "view"}
ANY = {
    "metrics",
    "metadata",
    "leaves",
    "values",
    "changed",
    "failed",
    "quantiles",
    "mesh",
}  # Their keys come from files.
# `{*: …}` has keys from files, `[…]` is a list. The words after a command say how it is called.
FIELDS = {
    "ls": "{path, finished, set_aside, steps: [{step, path, state, format, created, nbytes, metrics: {*}, pinned, "
    "link, linked_by, base, changed, seconds, deleted, latest}], closed, tier, survives, not_listed, free, best}",
    "ls (of several runs)": "{path, runs: [{path, latest, created, nbytes, finished, error, not_listed, good, damaged, "
    "unsupported, closed, unfinished, format, metrics: {*}, deleted, best, best_value}], not_listed}",
    "ls (of checkpoints)": "{path, checkpoints: [{path, format, step, created, nbytes, error, metrics: {*}}]}",
    "du": "{path, nbytes, parts: [{path, nbytes}], closed, free}",
    "show": "{path, format, step, created, nbytes, metrics: {*}, metadata: {*}, leaves: {*: {type, dtype, "
    "shape, nbytes}}}",
    "show (of a leaf)": "{path, type, dtype, shape, nbytes, stats: {size, nan, inf, zeros, low, high, mean, std, norm, "
    "quantiles: {*}, histogram, sample}}",
    "stats": "{path, step, leaves: {*: {size, nan, inf, zeros, low, high, mean, std, norm, quantiles: {*}, histogram, "
    "sample}}}",
    "diff": "{only_a, only_b, changed: {*}, equal, values: {*: {differing, size, largest, relative, cosine}}}",
    "verify": "{path, ok, nbytes, checked, problems: [{file, leaves, block, what}], unsupported, closed, deleted, "
    "archived, passed_over, unfinished, without_checksums, part}",
    "verify (of several runs)": "{path, ok, nbytes, part, not_checked, runs: [{path, ok, nbytes, checked, problems: "
    "[{file, leaves, block, what}], unsupported, closed, deleted, archived, passed_over, unfinished, "
    "without_checksums}]}",
    "convert": "{path, nbytes, seconds, dry_run}",
    "convert --dry-run": "{path, format, step, leaves, nbytes, dry_run}",
    "convert (of a run to orbax)": "{path, written, left_behind, nbytes, dry_run}",
    "cp": "{copied, there, left_behind, gone, nbytes, there_read, dry_run}",
    "cp (of several runs)": "{path, runs: [{copied, there, left_behind, gone, nbytes, there_read, dry_run}]}",
    "report": "{path, nbytes, read, notes}",
    "prune": "{path, deleted, nbytes, dry_run, failed: {*}, gone, to, verified, damaged}",
    "prune (of several runs)": "{path, runs: [{path, deleted, nbytes, dry_run, failed: {*}, gone, to, verified, "
    "damaged}]}",
    "delete": "{path, deleted, nbytes, dry_run, failed: {*}, gone, to, verified, damaged}",
    "pin": "{path, steps, pinned}",
    "unpin": "{path, steps, pinned}",
    "rewind": "{path, step, set_aside, to, dry_run}",
    "doctor": "[{name, value, unit, advice}]",
    "migrate": "{path, looked_at, changed, diff, findings: [{file, line, what}], notebooks, links, failed: {*}, "
    "written}",
}
CALLS = {  # The run has a damaged step 1. The order matters: some calls change the run.
    "ls": "ls {run} --best loss:min",
    "ls (of several runs)": "ls {runs}",
    "ls (of checkpoints)": "ls {runs}/../finals",
    "du": "du {run}",
    "show": "show {run}",
    "show (of a leaf)": "show {run} w",
    "stats": "stats {run}",
    "diff": "diff {run} --steps 2 3",
    "verify": "verify {run}",
    "verify (of several runs)": "verify {runs}",
    "convert": "convert {run} {runs}/../c.safetensors",
    "convert --dry-run": "convert {run} {runs}/../d.safetensors --dry-run",
    "convert (of a run to orbax)": "convert {run} {runs}/../orbax --format orbax",
    "cp": "cp {run} {runs}/../copy",
    "cp (of several runs)": "cp {runs} {runs}/../copies",
    "report": "report {run} --steps 0 --output {runs}/../report.html",
    "pin": "pin {run} 2",
    "unpin": "unpin {run} 2",
    "prune": "prune {run} steps:1,2 --yes",
    "prune (of several runs)": "prune {runs} steps:1,2 --yes",
    "delete": "delete {run} 1 --yes --dry-run",
    "rewind": "rewind {run} 2",
    "doctor": "doctor {runs}/.. --size 1K",
    "migrate": "migrate {runs}",
}


def fields(value: Any, name: str = "") -> str:
    """Returns the field names of a JSON value as in the table, or "" if it has none."""
    if isinstance(value, list):
        return f"[{fields(value[0])}]" if value and isinstance(value[0], dict) else ""
    if not isinstance(value, dict):
        return ""
    if name in ANY:
        inner = {fields(one) for one in value.values()}
        assert len(inner) <= 1, f"{name}: values of several kinds: {inner}"
        return "{*: " + max(inner) + "}" if any(inner) else "{*}"
    return (
        "{" + ", ".join(f"{key}: {below}" if (below := fields(one, key)) else key for key, one in value.items()) + "}"
    )


@pytest.mark.long
@pytest.mark.whole
def test_the_fields_are_those_that_are_documented(tmp_path: pathlib.Path, treering: Any) -> None:
    run = tmp_path / "runs" / "a"
    with tr.Checkpointer(run, metadata={"lr": 0.1}) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, {"w": np.arange(4.0) + step}, metrics={"loss": 1.0})
    tr.save(tmp_path / "finals" / "best", {"w": 1})
    (run.parent / "program.py").write_text("from orbax.checkpoint import _src")
    (file,) = (run / "step-00000001").glob("arrays-*")
    flip(file, os.stat(file).st_size - 1)
    found = {
        name: fields(treering(*call.format(run=run, runs=run.parent).split(), "--json").json)
        for name, call in CALLS.items()
    }
    assert found == FIELDS


def test_the_page_lists_them() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    listed = dict(FIELDS)
    for name, base in (("cp (of several runs)", "cp"), ("prune (of several runs)", "prune"), ("delete", "prune")):
        listed[name] = FIELDS[name].replace(FIELDS[base], f"as {base}")
    assert [line for name, text in listed.items() if (line := f"| `{name}` | `{text}` |") not in page] == []
    assert {name.split()[0] for name in FIELDS} == set(CALLS_OF_CLI := cli.commands) - NO_JSON, CALLS_OF_CLI
    for name in set(cli.commands) - NO_JSON:
        assert any("--json" in option.opts for option in cli.commands[name].params), name


@pytest.mark.parametrize("name", sorted(NO_JSON))
def test_what_has_no_json_says_so(name: str, treering: Any) -> None:
    assert treering(name, "--json").code == 2
