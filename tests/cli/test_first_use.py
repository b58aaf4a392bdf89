"""Typical mistakes of the first use of the command: the error says what was probably meant."""

import pathlib
from typing import Any

import numpy as np
import pytest

import treering as tr


@pytest.fixture
def runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns a directory of two runs, in the current directory."""
    for name in ("gpt", "bert"):
        with tr.Checkpointer(tmp_path / "runs" / name) as ckpts:
            for step in (1000, 2000):
                tree = {"params": {"embed": np.arange(4.0), "layers": [np.ones(2), np.ones(3)]}, "step": step}
                ckpts.save(step, tree, metrics={"val/loss": 3 - step / 1000})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize("command", ["ls", "show", "du", "verify", "view", "stats", "report", "pull"])
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("runs/gtp", "runs/gpt"),
        ("run/gpt", "runs/gpt"),
        ("rums", "runs"),
        ("runs/gpt/step-2000", "runs/gpt/step-00002000"),
    ],
)
def test_a_misspelt_path_names_the_closest(runs: pathlib.Path, treering: Any, command: str, path: str, meant: str):
    found = treering(command, path, *(["out"] if command == "pull" else []))
    assert found.code == 3 and f"; the closest path is {runs.parent / meant}\n" in found.err, found.err


def test_nothing_similar_is_not_invented(runs: pathlib.Path, treering: Any) -> None:
    assert treering("show", "checkpoint-of-a-friend").err.partition("\n")[0].endswith("found nothing")


def test_a_path_into_a_checkpoint_names_the_checkpoint(runs: pathlib.Path, treering: Any) -> None:
    step = runs / "gpt" / "step-00001000"
    found = treering("show", step / "params" / "embed")
    assert f"; {step} is a checkpoint, so 'params/embed' can only be a part of it\n" in found.err, found.err
    with pytest.raises(tr.errors.NotFoundError, match="a part of it; pass at='params/embed' ") as caught:
        tr.open(step / "params" / "embed")
    assert str(caught.value).splitlines()[0].endswith(" (tr.open: .at('params/embed'))")
    assert len(tr.open(step).at("params/embed")) == 1
    assert "a part of it; pass --at 'params/embed'\n" in treering("convert", step / "params" / "embed", "x").err


def test_a_broken_link_is_named(runs: pathlib.Path, treering: Any) -> None:
    (runs / "last").symlink_to(runs / "gone")
    for path in ("runs/last", "runs/last/params"):
        err = treering("show", path).err
        assert f"found nothing; {runs / 'last'} is a link to a path where there is nothing\n" in err, err


def test_a_file_is_not_called_an_empty_directory(runs: pathlib.Path, treering: Any) -> None:
    (runs / "notes.txt").write_text("x")
    for command in ("ls", "view"):
        assert "expected a run, found a file\n" in treering(command, "runs/notes.txt").err
    step = runs / "gpt" / "step-00001000"
    assert f"found a file; it belongs to the checkpoint {step}\n" in treering("ls", step / "treering.json").err


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_runs_further_below_are_named(runs: pathlib.Path, treering: Any, command: str) -> None:
    err = treering(command, ".").err
    assert f"{runs / 'bert'} (newest step 2000), {runs / 'gpt'} (newest step 2000)" in err, err
    assert "t5x" not in err


@pytest.mark.parametrize("ending", [".safetensrs", ".safetensor", ".SafeTensors", ".msgpck"])
def test_a_misspelt_ending_writes_no_folder(runs: pathlib.Path, treering: Any, ending: str) -> None:
    found = treering("convert", "runs/gpt", f"model{ending}", "--at", "params")
    assert found.code == 3 and f"found {ending}; the closest ending is ." in found.err
    assert [path.name for path in runs.parent.iterdir()] == ["runs"]


def test_convert_says_which_format_it_wrote(runs: pathlib.Path, treering: Any) -> None:
    assert treering("convert", "runs/gpt", "model.v2").out.startswith(f"{runs.parent}/model.v2: treering, ")
    out = treering("convert", "runs/gpt", "model.safetensors", "--at", "params").out
    assert out.startswith(f"{runs.parent}/model.safetensors: safetensors, ")


def test_what_safetensors_cannot_hold_is_dropped(runs: pathlib.Path, treering: Any) -> None:
    """Follows the advice of the error: it must be an option of the command."""
    found = treering("convert", "runs/gpt", "model.safetensors")
    assert found.code == 3 and "step: int; " in found.err and "--drop step" in found.err, found.err
    assert treering("convert", "runs/gpt", "model.safetensors", "--drop", "step").code == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("pin runs/gpt best", "'best': expected the number of a step, such as 1000\n"),
        ("pin runs/gpt step-00001000", "'step-00001000': expected the number of a step, such as 1000, perhaps 1000\n"),
        ("delete 1000 runs/gpt", "'runs/gpt': expected the number of a step, such as 1000; RUN comes first\n"),
        ("rewind runs/gpt -- -1", "'-1': expected the number of a step"),
        ("show runs/gpt 1000", "nothing is at '1000'; there are params, step; --step 1000 chooses a step\n"),
        ("show params/embed runs/gpt", "found nothing; CHECKPOINT comes first, PATH second\n"),
        ("show runs/gpt params/layers/*", "; `treering stats` takes globs\n"),
        ("diff runs/gpt 1000", "1000: expected a checkpoint, found nothing; two steps of A are --steps N M\n"),
        ("diff runs/gpt 1000 2000", "unexpected extra argument (2000). Steps are --steps N M\n"),
        ("ls runs/gpt --step 1000", "No such option '--step'; `treering show` has it\n"),
        ("verify runs/gpt --step 1000", "'--step'; PATH may be a step, such as RUN/step-00001000\n"),
        ("convert runs/gpt out 1000", "unexpected extra argument (1000). Steps are --step N\n"),
    ],
)
def test_a_step_in_the_wrong_place(runs: pathlib.Path, treering: Any, call: str, said: str) -> None:
    found = treering(*call.split())
    assert found.code in (2, 3) and said in found.err, found.err


def test_help_has_no_limits_of_steps(treering: Any) -> None:
    assert "9007199254740992" not in treering("show", "--help").out


def test_a_run_is_not_copied_among_other_runs(runs: pathlib.Path, treering: Any) -> None:
    """`cp -r a b` makes `b/a`; steps of `a` in the folder of its sibling would make that a run."""
    found = treering("cp", "runs/gpt", "runs")
    assert found.code == 3 and "found a directory of runs: " in found.err and "; name the run in it\n" in found.err
    assert sorted(path.name for path in runs.iterdir()) == ["bert", "gpt"]
    assert treering("cp", "runs/gpt", "runs/copy").code == 0
    assert "directory of runs" in treering("prune", "runs/gpt", "last:1", "--yes", "--to", "runs").err


def test_a_file_in_place_of_a_folder(runs: pathlib.Path, treering: Any) -> None:
    (runs / "notes.txt").write_text("x")
    for call, said in (
        ("cp runs/gpt runs/notes.txt", "expected a run, or nothing, found a file"),
        ("doctor runs/notes.txt", "expected a directory, found a file"),
    ):
        assert f"/runs/notes.txt: {said}\n" in treering(*call.split()).err
    for place, kind in (("notes.txt", tr.errors.MismatchError), ("notes.txt/run", tr.errors.SaveError)):
        with pytest.raises(kind, match="expected a directory for the run, found a file"):
            tr.Checkpointer(runs / place).save(1, {"w": np.ones(2)})


def test_a_file_of_no_format_is_said_in_a_few_lines(runs: pathlib.Path, treering: Any) -> None:
    (runs / "notes.txt").write_text("x")
    out = treering("verify", "runs/notes.txt").out
    assert out.endswith("notes.txt: of no format that is known here; `treering show` says why\n") and "\\n" not in out
    err = treering("show", "runs/notes.txt").err
    assert "safetensors: the first eight" in err and "orbax" not in err  # which has folders only
    step = runs / "gpt" / "step-00001000"
    assert f"it belongs to the checkpoint {step}; open that\n" in treering("show", step / "treering.json").err


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("params", "; 'params/**' matches params/embed, params/layers/0, params/layers/1\n"),
        ("layers/*", "; '**/layers/*' matches params/layers/0, params/layers/1\n"),
        ("layers", "; '**/layers/**' matches params/layers/0, params/layers/1\n"),
        ("params/embde", "; the closest name is params/embed\n"),
    ],
)
def test_a_glob_that_matches_nothing_names_one_that_does(runs: pathlib.Path, treering: Any, glob: str, said: str):
    found = treering("stats", "runs/gpt", glob)
    assert found.code == 3 and said in found.err, found.err
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore("runs/gpt", tr.restore("runs/gpt"), missing=[glob])
    assert f"{caught.value}\n".partition("More")[0].endswith(said)


def test_arguments_of_another_type_say_what_was_found(runs: pathlib.Path) -> None:
    with pytest.raises(tr.errors.MismatchError, match=r"or a list of globs of paths, such as \['head'\]"):
        tr.restore("runs/gpt", {}, missing="head")
    with pytest.raises(tr.errors.MismatchError, match=r"expected an integer from 0 to 2\^53, found the type str"):
        tr.restore("runs/gpt", step="1000")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("convert runs/gpt x --dtype bf16", "expected a floating-point dtype, such as bfloat16, float16 or float32\n"),
        ("report runs/gpt page.html", "page.html: expected a run, found the name of a page; --output page.html names"),
        ("report runs/gpt --leaves embed", "found params/embed, params/layers/0, params/layers/1; '**/embed' matches"),
        ("pull runs out", "expected a version that can be read, found none; it has runs in it: "),
        ("pull nothing out", "nothing: expected a version, found nothing\n"),
    ],
)
def test_other_arguments(runs: pathlib.Path, treering: Any, call: str, said: str) -> None:
    (runs / "page.html").write_text("x")
    found = treering(*call.split())
    assert found.code in (2, 3) and said in found.err and "warning" not in found.err, found.err


def test_a_run_may_have_the_name_of_a_page(runs: pathlib.Path, treering: Any) -> None:
    (runs / "gpt").rename(runs / "gpt.html")
    found = treering("report", "runs/gpt.html", "--output", "runs/page.html")
    assert found.code == 0 and (runs / "page.html").is_file(), found.err


@pytest.mark.parametrize("text", ["1_000", "9" * 20, "9" * 5000, f"{(1 << 53) + 1}"])
def test_no_step_is_guessed_of_other_numbers(runs: pathlib.Path, treering: Any, text: str) -> None:
    found = treering("pin", "runs/gpt", text)
    assert found.code == 2 and "expected the number of a step, such as 1000\n" in found.err, found.err


def test_one_checkpoint_has_no_step_to_choose(runs: pathlib.Path, treering: Any) -> None:
    assert "--step" not in treering("show", "runs/gpt/step-00001000", "2000").err


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ("lst:2", "'lst:2': expected last:2. KEEP is "),
        ("last=2", "'last=2': expected last:2. KEEP is "),
        ("last", "'last': expected last:N. KEEP is "),
        ("2", "'2': expected last:2. KEEP is "),
        ("best:1:val/loss", "'best:1:val/loss': expected best:1:val/loss:min or best:1:val/loss:max. KEEP is "),
        ("runs/gpt", "'runs/gpt'. KEEP is "),
    ],
)
def test_a_policy_that_is_written_otherwise(runs: pathlib.Path, treering: Any, keep: str, said: str) -> None:
    found = treering("prune", "runs/gpt", keep)
    assert found.code == 2 and said in found.err, found.err
