"""Regression tests for defects that a hostile review of the command found."""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from treering._core.entries import ArrayEntry
from treering._core.outline import outline

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(5):
            ckpts.save(step, {"x": np.full(4, step)}, metrics={"loss": 1.0})
    return tmp_path / "run"


def _of_a_later_release(run: pathlib.Path, step: int, golden: str) -> None:
    path = run / f"step-{step:08}"
    shutil.rmtree(path)
    shutil.copytree(GOLDEN / "future" / golden, path)


def test_arrays_without_axes_are_shown(tmp_path: pathlib.Path, treering: Any) -> None:
    tree = {"f": np.float32(2.5), "b": jax.numpy.bfloat16(3), "k": jax.random.key(1), "a": np.array(7)}
    tr.save(tmp_path / "c", tree)
    assert [treering("show", tmp_path / "c", name).out.splitlines()[3] for name in "fba"] == ["2.5", "3", "7"]
    assert "key<threefry2x32>[]" in treering("show", tmp_path / "c", "k").out
    leaf = tr.open(tmp_path / "c")["f"]
    assert np.asarray(leaf.part(())).shape == ()


def test_layers_with_other_shardings_are_not_joined(tmp_path: pathlib.Path, treering: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    specs = [PartitionSpec("data", "model"), PartitionSpec("data", "model"), PartitionSpec("model"), None]
    x = np.ones((8, 8), "float32")
    tr.save(tmp_path / "c", {"l": [jax.device_put(x, NamedSharding(mesh, spec)) if spec else x for spec in specs]})
    found = treering("show", tmp_path / "c").out
    assert "0…1 ×2" in found and "0…2" not in found and found.count("float32[8,8]") == 3
    assert "0…1 ×2" in tr.open(tmp_path / "c")._repr_html_()


def test_joined_names_say_which_they_are() -> None:
    def top(*names: str) -> list[str]:
        entries = {name: ArrayEntry(name, "numpy", "float32", (2,)) for name in names}
        return [node.name for node in outline(entries).children]

    assert top(*(f"l_{n:02}" for n in range(12))) == ["l_00…11"]
    assert top("a01", "a1") == ["a01", "a1"] and top("0", "00", "2") == ["0", "00", "2"]
    assert top("a1", "a٣") == ["a1", "a٣"], "only ASCII digits are joined"
    assert top("x9", "x10", "y") == ["x9…10", "y"]


@pytest.mark.long
@pytest.mark.whole
def test_prune_looks_again_when_it_has_asked(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    def answer(*_: object, **__: object) -> bool:
        with tr.Checkpointer(run) as ckpts:
            ckpts.rewind(0)
        return True

    monkeypatch.setattr("click.confirm", answer)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    found = treering("prune", run, "last:1")
    assert found.code == 0 and tr.steps(run) == [0] and "nothing to delete" in found.out
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(1, {"x": 1})
    assert treering("prune", run, "last:1").code == 1 and tr.steps(run) == [0, 1]


def test_prune_leaves_what_it_cannot_delete_and_goes_on(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    """prune names steps that it cannot delete, deletes the others, and ends with 3."""
    _of_a_later_release(run, 2, "leaf-kind")
    dry = treering("prune", run, "last:1", "--dry-run", "--json")
    assert dry.json["deleted"] == [0, 1, 3] and "step 2 stays: " in dry.err
    from treering._run.plain_run import PlainRun

    remove = PlainRun.remove

    def failing(self: PlainRun, path: str, **options: Any) -> Any:
        if path.endswith("1"):
            raise OSError(5, "Input/output error")
        return remove(self, path, **options)

    monkeypatch.setattr(PlainRun, "remove", failing)
    found = treering("prune", run, "last:1", "--yes")
    assert found.code == 3 and "step 1 is not deleted: [Errno 5]" in found.err
    assert tr.steps(run) == [1, 2, 4] and found.out.startswith("2 of 3 deleted, ")


def test_a_metric_that_no_step_has_is_named(run: pathlib.Path, treering: Any) -> None:
    tr.record(run, 2, {"validation/loss": 0.5, "validation/acc": 1})
    names = "loss, validation/acc, validation/loss; the closest name is validation/loss"
    for call in (
        ["prune", run, "last:1", "best:1:val/loss:min", "--yes"],
        ["ls", run, "--keep", "best:1:val/loss:min"],
    ):
        found = treering(*call)
        assert f"no step has the metric 'val/loss', so all stay; they have {names}\n" in found.err
        assert found.code == 0 and len(tr.steps(run)) == 5
    found = treering("ls", run, "--best", "val/loss:min")
    assert found.code == 3 and f"expected a step with the metric 'val/loss', found {names}\n" in found.err
    with pytest.raises(tr.errors.MismatchError, match=names):
        tr.Checkpointer(run).best_step("val/loss", "min")


def test_cp_leaves_steps_of_a_later_release_behind(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    _of_a_later_release(run, 3, "version-2")
    found = treering("cp", run, tmp_path / "copy", "--json")
    assert found.code == 1 and len(found.json["copied"]) == 4 and len(found.json["left_behind"]) == 1
    assert tr.steps(tmp_path / "copy") == [0, 1, 2, 4]


@pytest.mark.long
@pytest.mark.whole
def test_cp_repairs_and_brings_pins_and_metrics_along(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    copy = tmp_path / "copy"
    assert treering("cp", run, copy).code == 0
    tr.Checkpointer(run).pin(2)
    tr.record(run, 1, {"late": 2.0})
    (file,) = (copy / "step-00000003").glob("arrays-*")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = treering("cp", run, copy, "--json")
    assert again.code == 0, again.err
    assert again.json["copied"] == []
    assert tr.Checkpointer(copy).pinned == [2] and tr.open(copy, step=1).metrics["late"] == 2.0
    assert treering("cp", run, copy, "--overwrite", "--json").json["copied"] == [str(copy / "step-00000003")]
    assert tr.verify(copy).ok
    file = next((copy / "step-00000003").glob("arrays-*"))
    file.unlink()
    found = treering("cp", run, copy)
    assert found.code == 3 and "--overwrite replaces it" in found.err


def test_cp_refuses_targets_in_which_the_copy_would_be_lost(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any
) -> None:
    tr.save(tmp_path / "c", {"x": 1})
    assert treering("cp", run, tmp_path / "c").code == 3 and os.listdir(tmp_path / "c") == ["treering.json"]
    with tr.Checkpointer(tmp_path / "other", prefix="ckpt-") as ckpts:
        ckpts.save(1, {"x": 1})
    found = treering("cp", run, tmp_path / "other")
    assert found.code == 3 and "begin with 'step-'" in found.err and tr.steps(tmp_path / "other") == [1]
    for flags in ([], ["--overwrite"]):
        assert "found the source itself" in treering("cp", run, run, *flags).err
        for source in (run, tmp_path / "c"):
            assert "found a place in it, inner/copy" in treering("cp", source, source / "inner/copy", *flags).err
            assert not (source / "inner").exists()


@pytest.mark.parametrize(
    "values",
    [
        np.full(9, np.finfo("float32").min),
        np.full(9, 2**60),
        np.array([1, np.nextafter(1, 2)]),
        np.array([2**60, 2**60 + 256]),
        np.array([0, 5e-324]),
        np.array([1.7e308, -1.7e308]),
        np.array([1e200, 1]),
        np.array([1.34e154]),
        np.array([5e-324, 1e-310]),
        np.array([np.inf, 1.0]),
        np.array([2**64 - 1, 0], "uint64"),
        np.array([-(2**63), 2**63 - 1]),
    ],
    ids=str,
)
def test_extreme_values_have_statistics(tmp_path: pathlib.Path, treering: Any, values: np.ndarray) -> None:
    tr.save(tmp_path / "c", {"x": values})
    shown = treering("show", tmp_path / "c", "x")
    assert shown.code == 0 and shown.err == ""
    found = treering("show", tmp_path / "c", "x", "--json").json["stats"]
    finite = values[np.isfinite(values)]
    wide = finite.astype(np.longdouble)
    assert sum(found["histogram"]) == finite.size
    assert (found["low"], found["high"]) == (finite.min().item(), finite.max().item())
    expected = [wide.mean(), wide.std(), np.sqrt((wide**2).sum())]
    with np.errstate(all="ignore"):
        exact = dict(zip(("mean", "std", "norm"), np.array(expected, float), strict=True))
    for name, value in exact.items():
        within = min(1e-12 * exact["norm"], 1e300) if name == "mean" else 0
        np.testing.assert_allclose(float(found[name]), value, 1e-12, within)


def test_differences_of_large_integers_and_of_infinities(tmp_path: pathlib.Path) -> None:
    def change(a: Any, b: Any) -> Any:
        return tr.diff({"x": np.array(a)}, {"x": np.array(b)}).values["x"]

    assert change([2**60, 5], [2**60 + 1, 5]).largest == 1
    assert change([1, 2], [1, 3]).cosine is change([True, False], [True, True]).cosine is None
    assert change([1.0, 2.0], [1.0, 3.0]).cosine == pytest.approx(7 / 50**0.5)
    assert change([-(2**63)], [2**63 - 1]).largest == float(2**64 - 1)
    assert (
        tr.diff({"x": np.array([2**64 - 1], "uint64")}, {"x": np.array([2**64 - 2], "uint64")}).values["x"].largest == 1
    )
    one = change([1, np.inf, 3], [1, 2.0, 4])
    assert (one.differing, one.largest, one.cosine) == (2, 1, None)
    assert change([1, np.nan], [1, 2.0]).largest is None


def test_huge_integers_are_shown(tmp_path: pathlib.Path, treering: Any) -> None:
    tr.save(tmp_path / "c", {"n": 2**20000})
    assert "20001 bits" in treering("show", tmp_path / "c", "n").out
    assert treering("show", tmp_path / "c", "n", "--json").json["value"] == hex(2**20000)
    assert treering("show", tmp_path / "c", "--json").code == 0


@pytest.mark.long
def test_outputs_that_are_closed_or_have_another_encoding(run: pathlib.Path) -> None:
    command = f"{sys.executable} -m treering show {run} x"
    latin = subprocess.run(command, shell=True, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert latin.returncode == 0 and b"\\u2588" in latin.stdout and latin.stderr == b""
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True)
    assert closed.returncode == 0 and closed.stderr == b""


@pytest.mark.long
@pytest.mark.whole
def test_du_counts_all_that_lies_there(run: pathlib.Path, treering: Any) -> None:
    """du counts every file of a run."""
    (run / "step-00000001" / "treering.json").unlink()
    (run / "notes.txt").write_bytes(b"x" * 1000)
    with tr.Checkpointer(run) as ckpts:
        ckpts.rewind(3)
    found = treering("du", run, "--json").json
    files = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert found["nbytes"] == files == sum(part["nbytes"] for part in found["parts"])
    assert {"step-00000001", "rewound-1", "(files)"} <= {part["path"] for part in found["parts"]}
    row = treering("ls", run, "--json").json["steps"][1]
    assert row["state"] == "unfinished" and row["nbytes"] > 0
    path = run / "step-00000000"
    parts = treering("du", path, "--json").json
    assert sum(part["nbytes"] for part in parts["parts"]) == parts["nbytes"]


def test_numbers_are_never_cut(tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any) -> None:
    from treering._cli import output

    monkeypatch.setattr(output, "terminal_columns", lambda: 40)
    output.table(["leaf", "min"], [["a/very/long/path/that/ends/in/kernel", "-9.2233720e+18"]], left=["leaf"])
    (_, row) = capsys.readouterr().out.splitlines()
    assert row.endswith("-9.2233720e+18") and len(row) <= 40 and "kernel  " in row and row.startswith("a/")


@pytest.mark.long
@pytest.mark.whole
def test_verify_reports_damage_and_steps_it_cannot_check(run: pathlib.Path, treering: Any) -> None:
    """verify reports damage also if it cannot check another step."""
    _of_a_later_release(run, 3, "version-2")
    alone = treering("verify", run, "--json")
    assert alone.code == 3 and not alone.json["ok"] and len(alone.json["unsupported"]) == 1
    next((run / "step-00000001").glob("arrays-*")).unlink()
    both = treering("verify", run, "--json")
    assert both.code == 1 and len(both.json["problems"]) == 1 and len(both.json["unsupported"]) == 1


@pytest.mark.parametrize("format", ["safetensors", "orbax", "t5x", "flax"])
def test_parts_of_one_large_array_are_shared_out(tmp_path: pathlib.Path, monkeypatch: Any, format: str) -> None:
    """The parts of `--subset` divide one large array."""
    from treering.formats._shared import reader
    from treering.formats._zarr import leaves

    monkeypatch.setattr(reader, "_CHECK_SLICE_BYTES", 4096)
    monkeypatch.setattr(leaves, "IN_FLIGHT", 4096)
    monkeypatch.setattr(leaves, "_MAX_CHUNK_BYTES", 4096)
    tree = {
        "target": {"x": np.random.default_rng(0).integers(0, 255, (64, 1024), "uint8"), "y": np.ones(3)},
        "state": {},
    }
    tr.save(tmp_path / "c", tree, format=format)
    ckpt = tr.open(tmp_path / "c")
    kind: Any = type(ckpt._source)
    original = kind._damage_of
    read: list[int] = []
    for number in range(1, 5):
        seen = 0

        def damage(self: Any, entry: Any, begin: int, end: int) -> Any:
            nonlocal seen
            seen += max(0, min(end, entry.nbytes) - max(begin, 0))
            return original(self, entry, begin, end)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "_damage_of", damage)
            assert tr.verify(tmp_path / "c", subset=(number, 4)).ok
        read.append(seen)
    assert min(read) > 16000 and sum(read) == 64 * 1024 + 24


@pytest.mark.long
def test_what_a_newcomer_tripped_over(tmp_path: pathlib.Path, treering: Any, run: pathlib.Path) -> None:
    """Errors for typical first mistakes name the expected and the found."""
    assert treering("diff", run, "--steps", 1, 2).code == 1
    assert treering("diff", run, "--steps", 1, 1).code == 0
    assert treering("diff", run).code == 2
    tr.save(tmp_path / "m.safetensors", {"head": {"kernel": np.ones(3)}, "other": np.ones(2)})
    assert "expected a run, found one checkpoint" in treering("ls", tmp_path / "m.safetensors").err
    nowhere = treering("show", tmp_path / "none").err
    assert nowhere.endswith("More about it: docs/troubleshooting.md#notfounderror in the documentation of Treering\n")
    with pytest.raises(tr.errors.NotFoundError, match=r"nothing is at 'params'; there are \w+, \w+"):
        tr.open(tmp_path / "m.safetensors").at("params")
    with pytest.raises(tr.errors.MismatchError, match=r"no leaf is 'head' itself; 'head/\*\*' matches head/kernel"):
        tr.restore(tmp_path / "m.safetensors", rules=[tr.rules.drop("head")])


def test_a_run_that_begins_says_so(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "treering"), tr.Checkpointer(tmp_path / "mistyped") as ckpts:
        ckpts.restore_or_init(lambda: {"x": 1})
    assert f"{tmp_path / 'mistyped'}: there is no step, so the run begins with init()" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("name", ["native", "file.safetensors", "orbax"])
def test_a_checkpoint_instead_of_a_run_is_named_as_one(tmp_path: pathlib.Path, treering: Any, name: str) -> None:
    """No message calls the files of a checkpoint checkpoints, and each says what reads a single one."""
    path = tr.save(tmp_path / name, {"w": np.ones(3)}, format="orbax" if name == "orbax" else None).path
    (tmp_path / "leftover").mkdir()
    (tmp_path / "leftover" / "arrays-0a1b2c-00000-of-00001.safetensors").write_bytes(b"")
    for command, *arguments in (
        ("report",), ("ls",), ("prune", "last:1"), ("pin", 1), ("unpin", 1), ("rewind", 1), ("delete", 1),
    ):  # fmt: skip
        done = treering(command, path, *arguments)
        assert done.code == 3 and f"expected a run, found one checkpoint; `treering show {path}` reads" in done.err
        assert "arrays-" not in done.err
        assert "arrays-" not in treering(command, tmp_path / "leftover", *arguments).err
    assert "arrays-" not in treering("show", path, "--step", 3).err
    for command in ("show", "verify", "du"):
        assert treering(command, path).code == 0
    with pytest.raises(tr.errors.TreeringError) as caught:
        tr.Checkpointer(path).restore()
    assert "arrays-" not in str(caught.value)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(3)})
    (step,) = (tmp_path / "run").glob("step-*")
    assert "it is step 1 of the run" in treering("report", step).err


def test_checkpoints_with_other_names_are_named(tmp_path: pathlib.Path, treering: Any) -> None:
    """A folder has the steps of two runs, and a checkpoint of its own. Each command names what it leaves out."""
    run, names = tmp_path / "run", "00000001, 00000002, best"
    for prefix, steps in (("", (1, 2)), ("step-", (4, 5))):
        with tr.Checkpointer(run, prefix=prefix) as ckpts:
            for step in steps:
                ckpts.save(step, {"w": np.ones(3)})
    tr.save(run / "best", {"w": np.ones(3)})
    found = treering("ls", run)
    assert found.code == 0 and f"not listed: 3 checkpoints with other names ({names}); use --prefix\n" in found.err
    assert treering("ls", run, "--json").json["not_listed"] == names.split(", ")
    assert "not listed" not in treering("ls", run, "--prefix", "").err
    assert "3 with other names" in treering("ls", tmp_path).out
    found = treering("prune", run, "last:1", "--yes")
    assert found.code == 0 and f"these checkpoints have other names and stay: {names}\n" in found.err
    found = treering("cp", run, tmp_path / "copy")
    assert found.code == 0 and f"checkpoints with other names are not copied: {names}\n" in found.err
    assert treering("verify", run, "--json").json["checked"] == 4


@pytest.mark.parametrize("removed", ["treering.json", "arrays"])
def test_half_a_copy_is_named(tmp_path: pathlib.Path, treering: Any, removed: str) -> None:
    """Tools copy files in any order, so an interrupted copy lacks the manifest or arrays."""
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, {"w": np.full((300, 300), step, "f4")})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for file in (tmp_path / "copy" / "step-00000003").glob(f"{removed}*"):
        file.unlink()
    found, report = treering("verify", tmp_path / "copy"), tr.verify(tmp_path / "copy")
    assert "step-00000003" in found.out and "step-00000003" in str(report)
    assert treering("ls", tmp_path / "copy").out.count("unfinished" if removed == "treering.json" else "damaged") == 1
    if removed == "treering.json":
        assert found.code == 0 and report.ok and report.unfinished == ("step-00000003",)
        assert "all good, 1 unfinished step not checked\n" in found.out
        found = treering("cp", tmp_path / "copy", tmp_path / "other")
        assert found.code == 0 and "unfinished steps are not copied: step-00000003\n" in found.err
    else:
        assert found.code == 1 and not report.ok
    assert tr.open(tmp_path / "copy").step == 2


def test_a_folder_of_checkpoints_is_listed_and_checked(tmp_path: pathlib.Path, treering: Any) -> None:
    """Ray's folder of a trial, for instance."""
    names = ["checkpoint_2026-11-28_16-26-49.999999", "checkpoint_2026-11-28_16-26-50.702806"]
    for n, name in enumerate(names):
        tr.save(tmp_path / "trial" / name, {"w": np.full(3, n)}, step=n)
    found = treering("verify", tmp_path / "trial")
    assert found.code == 0 and all(name in found.out for name in names) and "2 checkpoints, " in found.out
    found = treering("du", tmp_path / "trial", "--json").json
    assert [part["path"] for part in found["parts"]] == names
    found = treering("ls", tmp_path / "trial", "--json").json["checkpoints"]
    assert [(pathlib.Path(one["path"]).name, one["step"], one["format"]) for one in found] == [
        (name, n, "treering") for n, name in enumerate(names)
    ]
    (tmp_path / "trial" / names[0] / "treering.json").write_bytes(b"{")
    assert treering("verify", tmp_path / "trial").code == 1
    found = treering("ls", tmp_path / "trial")
    assert found.code == 3 and names[1] in found.out and "2 checkpoints" in found.out


@pytest.mark.parametrize("call", ["show", "stats", "diff", "convert"])
def test_damage_of_the_only_step_is_said_once(call: str, tmp_path: pathlib.Path, treering: Any) -> None:
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(1, {"w": np.ones(100_000)})
    os.truncate(next(run.glob("step-*/arrays*")), 1000)
    found = treering(call, run, *[tmp_path / "other"] * (call in ("diff", "convert")))
    assert (
        found.code == 3 and found.err.count("it is cut short") == 1 and found.err.startswith("error: step 1 is damaged")
    )


def test_what_is_missing_is_shown_next_to_what_is_there(tmp_path: pathlib.Path, treering: Any) -> None:
    layers = {f"layer{n}": {"kernel": np.ones(3)} for n in range(10)}
    tr.save(tmp_path / "c", {"params": layers, "step": 1})
    found = treering("show", tmp_path / "c", "params/zzz")
    assert "nothing is at 'params/zzz'; params has layer0, layer1, " in found.err and "layer7 and 2 more" in found.err
    assert "'params/layer0/x'; params/layer0 has kernel\n" in treering("show", tmp_path / "c", "params/layer0/x").err
    assert "closest: params/layer9" in treering("show", tmp_path / "c", "params/layer99").err
    found = treering("stats", tmp_path / "c", "params/*")
    assert "'params/**' matches " in found.err and found.code == 3
    assert treering("stats", tmp_path / "c", "params/**").code == 0
    assert "at any depth" not in treering("stats", tmp_path / "c", "model/*").err


def test_the_help_cuts_no_summary(treering: Any) -> None:
    """The line of each command in `treering --help` is a complete sentence."""
    lines = treering("--help").out.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 15 and [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_options_with_two_values_say_so(run: pathlib.Path, treering: Any) -> None:
    for call, names in (
        (["diff", run, "--steps", 1], "--steps N M"),
        (["report", run, "--compare", 1], "--compare A B"),
    ):
        found = treering(*call)
        assert found.code == 2 and f"requires 2 arguments. Expected {names}." in found.err


def test_checkpoints_without_a_number_are_opened_by_path(tmp_path: pathlib.Path, treering: Any) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(3)})
    tr.save(tmp_path / "run" / "final", {"w": np.ones(3)})
    found = treering("ls", tmp_path / "run")
    assert found.err == "not listed: 1 checkpoint with other names (final); open them by their paths\n"


def test_a_run_without_steps_of_the_format_says_which_it_has(tmp_path: pathlib.Path, treering: Any) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(3)})
    found = treering("show", tmp_path / "run", "--format", "orbax")
    assert found.code == 3
    assert f"{tmp_path}/run: expected steps of the format 'orbax', found only steps of treering\n" in found.err
    tr.save(tmp_path / "run" / "model.safetensors", {"w": np.ones(3)})
    assert treering("show", tmp_path / "run", "--format", "safetensors").code == 0  # weights next to the steps


def test_ls_shows_what_is_asked_for(tmp_path: pathlib.Path, treering: Any) -> None:
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan")), (4, 0.3)):
            ckpts.save(step, {"w": np.ones(3)}, metrics={"loss": loss, "acc": 1 - loss, "lr": 1e-3})
        ckpts.save(5, {"w": np.ones(3)})
    found = treering("ls", run, "--metrics", "loss,lr", "--sort", "loss", "--last", 2, "--json").json
    assert [(row["step"], row["metrics"]) for row in found["steps"]] == [
        (4, {"loss": 0.3, "lr": 0.001}), (1, {"loss": 0.5, "lr": 0.001}),
    ]  # fmt: skip
    assert [row["step"] for row in treering("ls", run, "--sort", "loss", "--json").json["steps"]] == [5, 3, 2, 4, 1]
    lines = treering("ls", run, "--sort", "loss", "--json").json["steps"]
    assert [row["step"] for row in lines if row["latest"]] == [5]
    assert not any(row["latest"] for row in found["steps"])  # The latest step is not among the lines.
    assert "latest" not in treering("ls", run, "--sort", "loss", "--last", 2).out
    found = treering("ls", run, "--best", "loss:min")
    assert " free\n" in found.out and "best" in found.out.splitlines()[2]
    assert "found acc, loss, lr; the closest name is loss\n" in treering("ls", run, "--sort", "los").err
    assert " free\n" in treering("du", run).out and treering("du", run, "--json").json["free"] > 0


@pytest.mark.parametrize(("best", "step"), [("loss:min", 2), ("loss", 1), ("acc", 2)])
def test_the_best_step_is_taken(best: str, step: int, tmp_path: pathlib.Path, treering: Any) -> None:
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        for number, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            ckpts.save(number, {"w": np.full(3, number)}, metrics={"loss": loss, "acc": 1 - loss})
    found = treering("show", run, "--best", best, "--json")
    assert found.json["step"] == step and f"step {step}: {best.partition(':')[0]} 0." in found.err
    assert ("'loss:min' takes the lowest" in found.err) == (best == "loss")
    assert treering("stats", run, "--best", best, "--json").json["step"] == step
    assert treering("convert", run, tmp_path / "m.safetensors", "--best", best).code == 0
    assert tr.restore(tmp_path / "m.safetensors")["w"][0] == step


@pytest.mark.parametrize("name", ["m.safetensors", "m.msgpack", "m.eqx", "orbax", "t5x", "levanter"])
def test_a_format_without_checksums_is_said(tmp_path: pathlib.Path, name: str, treering: Any) -> None:
    """A changed value does not show there, so a report must not say that all is good."""
    path, array = tmp_path / name, np.arange(100_000.0)
    tr.save(path, {"a": array}, format=None if "." in name else name)
    for report in (tr.verify(path), treering("verify", path).out):
        assert "all good" not in str(report) and "no damage found\n  only the structure was checked" in str(report)
    assert "only the structure" in tr.verify(path)._repr_html_()
    if name == "m.safetensors":
        path.write_bytes(path.read_bytes().replace(array.tobytes(), array[::-1].tobytes()))
    found = treering("verify", path, "--json")
    assert found.code == 0 and found.json["ok"] and found.json["without_checksums"] == ["."]
    tr.save(tmp_path / "run" / "step-00000001", {"a": array})
    tr.save(tmp_path / "run" / "2", {"a": array}, format="orbax")
    mixed = tr.verify(tmp_path / "run")
    assert mixed.without_checksums == ("2",) and "of 1 checkpoint, only the structure" in str(mixed)
    assert "all good" in str(tr.verify(tmp_path / "run", format="treering"))
