"""Tests the public names, signatures and errors."""

import builtins
import difflib
import inspect
import json
import pathlib
import re
import subprocess
import sys
import traceback
import types
import typing
from collections.abc import Callable

import pytest

import treering as tr
from release import public
from treering._restore import options as _options

pytestmark = pytest.mark.compat

NAMES = [name for name in dir(tr) if name not in ("__version__", "errors", "keep")]


def test_there_are_few_names_and_dir_shows_them() -> None:
    assert len(tr.__all__) <= 27
    assert dir(tr) == sorted([*tr.__all__, "open"])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tr.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_every_name_and_its_public_members_have_docstrings(name: str) -> None:
    public = getattr(tr, name)
    assert inspect.getdoc(public)
    obvious = {"ndim", "step", "count", "index", "get", "items", "keys", "values"}
    if inspect.isclass(public):
        for member, value in vars(public).items():
            if (
                not member.startswith("_")
                and member not in obvious
                and (callable(value) or isinstance(value, property))
            ):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_what_formats_of_others_are_made_of() -> None:
    """The modules for writing one's own format have their documented public names."""
    from treering import formats

    found: dict[str, object] = {}
    exec("from treering.formats import *", found)
    del found["__builtins__"]
    assert sorted(found) == formats.__all__
    assert {"Format", "Source", "Problem", "ArrayEntry", "ValueEntry", "Box", "register"} <= set(found)
    assert all(inspect.getdoc(value) for name, value in found.items() if name not in ("Box", "Entry", "Skeleton"))


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isfunction(getattr(tr, n))])
def test_options_are_keyword_only(name: str) -> None:
    for parameter in inspect.signature(getattr(tr, name)).parameters.values():
        assert (
            parameter.kind is parameter.KEYWORD_ONLY or parameter.default is parameter.empty or parameter.name == "like"
        )


def test_the_same_options_restore_everywhere() -> None:
    def options(function: object) -> dict[str, object]:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
        found = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        return {n: default for n, default in found.items() if n not in ("step", "best", "format")}

    assert options(tr.restore) == options(tr.Checkpoint.restore)
    assert set(options(tr.restore)) == set(typing.get_type_hints(_options.RestoreOptions))
    saving = options(tr.save), options(tr.save_async)
    assert saving[0].keys() == saving[1].keys()


def test_unknown_option_is_refused_by_the_first_job(tmp_path: pathlib.Path) -> None:
    """An unknown option raises also if the run has no step to restore yet."""
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for restore in (ckpts.restore, lambda **options: ckpts.restore_or_init(dict, **options)):
            with pytest.raises(TypeError, match=r"has no argument mising; expected (like|init), .*, at, dtype"):
                restore(mising="template")


@pytest.mark.parametrize("module", [tr, tr.rules, tr.keep, tr.formats, tr.errors])
def test_public_modules_show_what_is_public_and_shadow_nothing(module: types.ModuleType) -> None:
    found: dict[str, object] = {}
    exec(f"from {module.__name__} import *", found)
    shown = {name for name in found if not name.startswith("__")}
    assert not shown & (set(dir(builtins)) | {"np", "numpy", "jax", "jnp", "os", "math", "datetime", "dataclasses"})
    left_out = {tr: {"open"}, tr.rules: {"map"}}.get(module, set())
    assert {name for name in dir(module) if not name.startswith("__")} == shown | left_out


@pytest.mark.long
@pytest.mark.whole
def test_the_interface_changes_only_with_its_snapshot() -> None:
    """Names, parameters, defaults, bases of errors, commands, exit codes and extras are those of tests/public.txt."""
    changed = [line for line in difflib.ndiff(public.expected_lines(), public.lines()) if line[0] in "-+"]
    assert not changed, (
        "the public interface changed; if that is meant, update the snapshot with `PYTHONPATH=tests "
        ".venv/bin/python -m release.public`, and add a changelog line:\n" + "\n".join(changed)
    )


@pytest.mark.long
def test_type_checkers_see_the_names_that_exist(tmp_path: pathlib.Path) -> None:
    lines = [f"reveal_type(tr.{name})" for name in dir(tr) if not name.startswith("__")]
    (tmp_path / "use.py").write_text("import treering as tr\n" + "\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        str(tmp_path / "use.py"),
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert found["summary"]["errorCount"] == 0, found["generalDiagnostics"]
    revealed = [d["message"] for d in found["generalDiagnostics"] if d["severity"] == "information"]
    assert len(revealed) == len(lines) and not any("Unknown" in message for message in revealed)


def test_the_traceback_of_a_mistake_ends_at_the_users_line(tmp_path: pathlib.Path) -> None:
    """The traceback of a wrong call has no frames of Treering."""
    tr.save(tmp_path / "c", {"w": [1, 2, 3]})
    ckpt, ckpts = tr.open(tmp_path / "c"), tr.Checkpointer(tmp_path / "run")
    ckpts.save(1, {"w": 1})
    ckpts.wait()
    mistakes: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: tr.restore(tmp_path / "c", {"v": 1}), tr.errors.MismatchError),
        (lambda: ckpt.restore({"v": 1}), tr.errors.MismatchError),
        (lambda: ckpt.at("v"), tr.errors.NotFoundError),
        (lambda: ckpt.apply([tr.rules.drop("v")]), tr.errors.MismatchError),
        (lambda: ckpts.restore({"v": 1}), tr.errors.MismatchError),
        (lambda: ckpts.restore_or_init(lambda: {"v": 1}), tr.errors.MismatchError),
        (lambda: ckpts.save(1, {"w": 1}), tr.errors.ExistsError),
        (lambda: tr.Checkpointer(tmp_path, keep=3), tr.errors.MismatchError),  # type: ignore[arg-type]
        (lambda: tr.open(tmp_path / "d"), tr.errors.NotFoundError),
        (lambda: tr.save(tmp_path / "d", {"x": object()}), tr.errors.UnsupportedError),
        (lambda: tr.save_async(tmp_path / "c", {"x": 1}), tr.errors.ExistsError),
        (lambda: tr.convert(tmp_path / "c", tmp_path / "c"), tr.errors.ExistsError),
        (lambda: tr.diff(tmp_path / "c", tmp_path / "d"), tr.errors.NotFoundError),
        (lambda: tr.verify(tmp_path / "d"), tr.errors.NotFoundError),
        (lambda: tr.record(tmp_path / "run", 7, {"x": 1}), tr.errors.NotFoundError),
    ]
    for mistake, kind in mistakes:
        with pytest.raises(kind) as caught:
            mistake()
        files = {pathlib.Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert files == {pathlib.Path(__file__)}, caught.value
    ckpts.close()


def test_error_inside_a_callback_keeps_its_frames(tmp_path: pathlib.Path) -> None:
    """An error in a function that the user passes keeps the frames of that function."""

    def init() -> object:
        return load_pretrained()

    def load_pretrained() -> object:
        return tr.restore(tmp_path / "backbone")

    with pytest.raises(tr.errors.NotFoundError) as caught:
        tr.Checkpointer(tmp_path / "run").restore_or_init(init)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "init" in names and "load_pretrained" in names


def test_what_the_users_own_code_raises_keeps_its_frames(tmp_path: pathlib.Path) -> None:
    """An error of another library or the user's code keeps all its frames."""

    def broken() -> object:
        raise ValueError("of mine")

    with pytest.raises(ValueError, match="of mine") as caught:
        tr.Checkpointer(tmp_path / "run").restore_or_init(broken)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"


WRONG: list[tuple[str, Callable[[pathlib.Path], object]]] = [
    ("missing=None", lambda at: tr.restore(at / "c", {"x": 1}, missing=None)),  # type: ignore[arg-type]
    ("missing=True", lambda at: tr.restore(at / "c", {"x": 1}, missing=True)),  # type: ignore[arg-type]
    ("missing=\\[3\\]", lambda at: tr.restore(at / "c", {"x": 1}, missing=[3])),  # type: ignore[list-item]
    ("missing='ignore'", lambda at: tr.restore(at / "c", missing="ignore")),
    ("extra='template'", lambda at: tr.restore(at / "c", {"x": 1}, extra="template")),
    ("dtype='floaty'", lambda at: tr.restore(at / "c", dtype="floaty")),
    ("dtype='template'", lambda at: tr.save(at / "d", {"x": 1}, dtype="template")),
    ("dtype='template'", lambda at: tr.convert(at / "c", at / "d", dtype="template")),
    ("dtype=int8: expected a floating", lambda at: tr.convert(at / "c", at / "d", dtype="int8")),
    ("sharding='save'", lambda at: tr.restore(at / "c", sharding="save")),
    ("processes='one'", lambda at: tr.save(at / "d", {"x": 1}, processes="one")),  # type: ignore[arg-type]
    ("timeout='30'", lambda at: tr.save(at / "d", {"x": 1}, timeout="30")),  # type: ignore[arg-type]
    ("timeout='30'", lambda at: tr.Checkpointer(at, timeout="30")),  # type: ignore[arg-type]
    ("when_busy='drop'", lambda at: tr.Checkpointer(at, when_busy="drop")),  # type: ignore[arg-type]
    ("save_every='sometimes'", lambda at: tr.Checkpointer(at, save_every="sometimes")),  # type: ignore[arg-type]
    ("keep='last'", lambda at: tr.Checkpointer(at, keep="last")),  # type: ignore[arg-type]
    ("on_exists='x'", lambda at: tr.Checkpointer(at).save(1, 1, on_exists="x")),  # type: ignore[arg-type]
    ("'min' or 'max'", lambda at: tr.Checkpointer(at).best_step("loss", "maximum")),  # type: ignore[arg-type]
    ("'min' or 'max'", lambda at: tr.keep.best(1, "loss", "maximum")),  # type: ignore[arg-type]
    ("unscored=", lambda at: tr.keep.best(1, "loss", "max", unscored="x")),  # type: ignore[arg-type]
    ("format='tree'", lambda at: tr.save(at / "d", {"x": 1}, format="tree")),
    ("format='tree'", lambda at: tr.convert(at / "c", at / "d", format="tree")),
    ("put it in brackets", lambda at: tr.restore(at / "c", rules=tr.rules.drop("x"))),  # type: ignore[arg-type]
    # The first job of a run has nothing to restore, and must raise the error too.
    ("missing='ignore'", lambda at: tr.Checkpointer(at / "r").restore_or_init(dict, missing="ignore")),
    ("extra='template'", lambda at: tr.Checkpointer(at / "r").restore_or_init(dict, extra="template")),
    ("dtype='floaty'", lambda at: tr.Checkpointer(at / "r").restore_or_init(dict, dtype="floaty")),
]


@pytest.mark.parametrize(("words", "call"), WRONG, ids=[f"{n} {words}" for n, (words, _) in enumerate(WRONG)])
def test_an_argument_that_is_one_of_a_few_words_is_checked(
    tmp_path: pathlib.Path, words: str, call: Callable[[pathlib.Path], object]
) -> None:
    tr.save(tmp_path / "c", {"x": 1})
    with pytest.raises((tr.errors.MismatchError, tr.errors.UnsupportedError), match=words):
        call(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_misspelt_option_is_refused_on_the_first_day(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="misssing"):
        tr.Checkpointer(tmp_path).restore_or_init(dict, misssing="template")


WRONG_CALLS = [
    (lambda: tr.report("run", "x.html"), "tr.report() takes 1 positional argument but 2 were given", "output=…"),  # type: ignore[misc]
    (lambda: tr.convert("a"), "tr.convert() missing 1 required positional argument: 'dst'", "(src, dst, step=…"),  # type: ignore[call-arg]
    (lambda: tr.save("a"), "tr.save() missing 1 required positional argument: 'tree'", "(path, tree, format=…"),  # type: ignore[call-arg]
    (lambda: tr.open("run", 3), "tr.open() takes 1 positional argument", "(path, step=…"),  # type: ignore[misc]
    (lambda: tr.diff("a"), "tr.diff() missing 1 required positional argument: 'b'", "(a, b)"),  # type: ignore[call-arg]
    (lambda: tr.Checkpointer(), "tr.Checkpointer() missing 1 required", "tr.Checkpointer(run, save_every=…"),  # type: ignore[call-arg]
    (lambda: tr.Checkpointer("run").best_step("x"), "Checkpointer.best_step() missing", "(metric, mode)"),  # type: ignore[call-arg]
    (lambda: tr.Checkpointer("run").pin(), "Checkpointer.pin() missing", "Checkpointer.pin(step)"),  # type: ignore[call-arg]
    (lambda: tr.rules.rename("a"), "tr.rules.rename() missing", "(pattern, new, optional=…)"),  # type: ignore[call-arg]
    (lambda: tr.keep.last(), "tr.keep.last() missing", "tr.keep.last(n)"),  # type: ignore[call-arg]
    (lambda: tr.keep.steps(n=1), "tr.keep.steps() got an unexpected keyword", "tr.keep.steps(*numbers)"),  # type: ignore[call-arg]
    (lambda: tr.formats.get(), "tr.formats.get() missing", "tr.formats.get(name)"),  # type: ignore[call-arg]
    (lambda: tr.restore({"w": 1}, "c"), "expected a path", "tr.restore(path, state)"),  # type: ignore[arg-type]
    (lambda: tr.restore({"w": 1}, like="c"), "expected a path", "tr.restore(path, state)"),  # type: ignore[arg-type]
    (lambda: tr.save(path={"w": 1}, tree="c"), "expected a path", "tr.save(path, state)"),  # type: ignore[arg-type]
    (lambda: tr.convert({"w": 1}, "c"), "expected a path", "convert reads a path; save writes"),  # type: ignore[arg-type]
]


WRONG_CALLS += [
    (lambda: tr.save("c", 1, overwite=True), "overwite: the native format has no such", "perhaps overwrite= was meant"),  # type: ignore[call-arg]
    (lambda: tr.convert("c", "d.msgpack", overwite=True), "format='flax': expected no", "perhaps overwrite= was meant"),  # type: ignore[call-arg]
    (lambda: tr.follow_weights("s", mising=1), "tr.follow_weights() has no argument mising", "expected stream, like"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("call", "what", "right"), WRONG_CALLS, ids=[what for _, what, _ in WRONG_CALLS])
def test_a_wrong_call_is_answered_with_the_right_one(
    call: Callable[[], object], what: str, right: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Python names a function as the library defines it, such as `open_checkpoint`, and not how it is called."""
    monkeypatch.chdir(tmp_path)
    tr.save("c", {"w": 1})
    with pytest.raises(TypeError) as caught:
        call()
    assert not isinstance(caught.value, tr.errors.TreeringError)
    assert str(caught.value).startswith(what) and right in str(caught.value)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: tr.save("c", 1, memory_limit="1G"), "memory_limit='1G': expected a number of bytes"),  # type: ignore[arg-type]
        (lambda: tr.restore("x", memory_limit="1G"), "memory_limit='1G': expected a number of bytes"),  # type: ignore[call-overload]
        (lambda: tr.Checkpointer("run").save(1, 1, memory_limit="1G"), "memory_limit='1G': expected a number"),  # type: ignore[arg-type]
        (lambda: tr.Checkpointer("run", prefix=3), "prefix=3: expected printable text"),  # type: ignore[arg-type]
        (lambda: tr.Checkpointer("run", local="l", upload_limit="1G"), "upload_limit='1G': expected more than 0 bytes"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_named(
    call: Callable[[], object], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Without a check, the error would be one of an operator within the library."""
    monkeypatch.chdir(tmp_path)
    tr.save("x", 1)
    with pytest.raises(tr.errors.MismatchError, match=re.escape(what)):
        call()
