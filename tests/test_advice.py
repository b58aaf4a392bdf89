"""The advice in messages works when it is followed literally. Every message that contains code has a case here.

A case provokes the message, takes the code out of its text, runs it, and compares the result with what was meant. A new
message with code fails `test_every_message_with_code_has_a_case` until it has a row.
"""

import ast
import builtins
import functools
import importlib
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import treering as tr
from treering._cli.main import cli, main
from treering.errors import TreeringError

TESTS, SOURCE = Path(__file__).parent, Path(tr.__file__).parent
_OWN_TESTS = ("testing", "_tools/migrate", "_core/migration_hints.py")  # of advice: test_migrate, test_migration_hints
_ECHO = re.compile(
    r"(?:^|(?<=[ :.]))[\w.]+=(?:\[?…+\]?|%r|'\w+'|True|False|2)(?=: | cannot hold|, … rules|$)"
)  # what a message is about
_CODE = re.compile(
    r"""(?x)
    \btr\.[a-z]\w*[.(] | \b(?:ckpts|x|tensor|numpy|jax|torch)(?:\.\w+)+\( | \b(?:rules\.)?(?:RULES|rewind|restore)\(
  | (?<![\w.'"/-])[a-z]\w*=(?:\[|'|"|…|True|False|math) | \bx\.\w+ | \bdataset\[ | python[ ]-m
    """.replace("RULES", "|".join(tr.rules.__all__))
)
_OTHER_TEXT = re.compile(r"<(?:/|img|meta)|^\w+\([… ,]*\)$")  # HTML, and rules in messages about them
_NAME = re.compile(r"\b(?:tr|treering)((?:\.[a-zA-Z]\w*)+)")
_ARGUMENT = re.compile(r"(?<![\w.'\"/-])([a-z]\w*)=(?=[\['\"\w….{ ,;)]|$)")
_OPTION, _COMMAND = re.compile(r"(?<![\w-])--([a-z][\w-]+)"), re.compile(r"`treering ([a-z]+)")
# Arguments of other libraries.
_OTHERS = {
    "unreduced",
    "serialization_format",
    "weights_only",
    "locations",
    "tensorstore_spec",
    "charset",
    "conditional",
    "monitor",
}
_KERAS = {"mode", "save_freq", "initial_value_threshold", "filepath"}


def _text(node: ast.expr) -> str | None:
    """Returns a text with `…` for each inserted value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Returns the texts of the library that are sentences, each with its file. Skips docstrings and annotations."""
    found: list[tuple[str, str]] = []
    for file in sorted(SOURCE.rglob("*.py")):
        where = file.relative_to(SOURCE).as_posix()
        if where.startswith(_OWN_TESTS):
            continue
        tree = ast.parse(file.read_text())
        skipped: set[int] = set()
        for node in ast.walk(tree):
            parts = [getattr(node, name, None) for name in ("annotation", "returns")]
            parts += [node.value] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("cast", "TypeVar", "compile")):
                parts.append(node)
            if isinstance(node, ast.JoinedStr):
                parts += node.values
            skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in skipped and isinstance(node, ast.expr) else None
            if text and " " in text and not _OTHER_TEXT.search(text):
                found.append((where, text))
    return found


def with_code() -> list[str]:
    return [text for _, text in messages() if _CODE.search(_ECHO.sub("", text))]


# Where a case is: a test of this file, which registers itself, or a test of another file.
HERE: set[str] = set()
ELSEWHERE = {
    "(tr.open: .at(": "cli/test_first_use.py::test_a_path_into_a_checkpoint_names_the_checkpoint",
    "x[...] or jax.freeze(x)": "pytree/test_leaves.py::test_mutable_arrays_are_refused_with_advice_that_works",
    "x.view(ml_dtypes.bfloat16)": "pytree/test_leaves.py::test_the_advice_about_arrays_keeps_their_values",
    "numpy.array(x.tolist())": "pytree/test_leaves.py::test_dtypes_without_a_layout_are_refused_with_advice",
    "x.numpy(force=True)": "pytree/test_state_types.py::test_a_tensor_as_a_leaf_is_named",
    "numpy.asarray(x)": "pytree/test_leaves.py::test_the_advice_about_arrays_keeps_their_values",
    "numpy.ma.getmaskarray(x)": "pytree/test_leaves.py::test_the_advice_about_arrays_keeps_their_values",
    "by dataset[...].view(": "formats/test_keras_files.py::test_the_advice_about_hdf5_keeps_bfloat16",
    "torch.save(": "formats/test_torch.py::test_advice_of_messages_works",
    "python -m torch.distributed": "formats/test_torch.py::test_advice_of_messages_works",
    "`state, step = (ckpts.restore(like=init())": "pytree/test_trace_effects.py::"
    "test_a_tracer_that_cannot_be_undone_is_an_error_with_advice",
    "pass max_expansion=math.inf": "restore/test_expansion.py::test_it_is_read_only_when_asked_for",
    "tr.open(path)[leaf][:10] reads": "restore/test_expansion.py::test_what_no_memory_can_hold_is_refused",
    "mmap=True maps them": "restore/test_expansion.py::test_what_no_memory_can_hold_together_is_refused",
    "tr.rules.cast changes the dtype": "restore/test_restore.py::test_a_rule_makes_integers_of_another_dtype",
    "grow=[…] keeps": "restore/test_grown_parts.py::test_a_state_that_grows_comes_back_as_the_error_advises",
    "closed without saving step": "run/test_interval.py::test_a_loop_that_ends_with_an_unsaved_step_says_so",
    "grow= cannot make it": "restore/test_grown_parts.py::test_what_cannot_be_made_is_an_error_that_says_how_to_get_it",
    "Pass sharding='saved'": "restore/test_array_placement.py::test_spread_arrays_without_placement_are_named",
    "rules=[…] restores it": "formats/test_orbax_iterators.py::test_the_rule_that_an_error_names_takes_the_position",
    "read='each' lets": "restore/test_collective_read.py::test_checkpointer_reads_network_files_once",
    "pass processes='this' to save": "processes/test_lives.py::test_job_that_was_shut_down_saves_nothing",
    "conditional=False if": "stores/objects/test_faults.py::test_a_server_that_ignores_conditions_is_refused",
    "pass save_on_preemption=True": "save/test_reentry.py::test_save_in_signal_handler_is_refused_with_advice",
    "overwrite=True replaces it": "cli/test_found.py::test_cp_repairs_and_brings_pins_and_metrics_along",
    "format='t5x-without-zeros'": "formats/test_missing_chunks.py::test_t5x_before_tensorstore_0_1_17",
    "pass mode='min'": "test_keras.py::test_more_is_better_for_accuracies_and_a_threshold_counts",
    "pass force=True": "orbax/test_checkpointers.py::test_an_existing_checkpoint_is_replaced_only_by_force",
    "tr.rules.cast(…, …), ": "core/test_casts.py::test_the_advice_works_as_it_is_written",
    "tr.rules.map(…, lambda x:": "core/test_casts.py::test_the_advice_works_as_it_is_written",
    "for Flax's fm32": "pytree/test_leaves.py::test_the_advice_about_arrays_keeps_their_values",
    "tr.rules.scale multiplies by a scale": "rules/test_dequantize.py::"
    "test_scale_multiplies_what_dequantize_does_not_know",
    "tr.rules.dequantize multiplies them": "restore/test_quantized_weights.py::"
    "test_a_scale_that_is_left_out_by_name_is_a_warning",
    "tr.rules.dequantize makes floats of known layouts": "restore/test_quantized_weights.py::"
    "test_dtype_does_not_apply_to_quantized_weights",
    "extra='ignore' leaves out both": "restore/test_quantized_weights.py::"
    "test_a_template_may_be_a_part_of_a_quantized_model",
    "rules=[…] makes floats of both": "restore/test_quantized_weights.py::"
    "test_an_error_says_first_that_the_checkpoint_is_quantized",
    "pass dequantize(…, config={…": "rules/test_dequantize.py::test_what_nothing_says_is_asked_for",
    "pass the size of the blocks": "rules/test_dequantize.py::test_blocks_that_could_be_several",
    "pass what the model's config.json": "rules/test_dequantize.py::test_what_could_mean_two_things_is_refused",
    ": tr.rules.drop(…)": "cli/test_first_use.py::test_what_safetensors_cannot_hold_is_dropped",
    "checkpoint_layout='auto'": "orbax/test_v1.py::test_safetensors_are_loaded_on_request",
    "partial_restore=True": "orbax/test_items.py::test_a_message_says_what_the_adapter_can_do",
}
# Why nothing is run.
NOTHING_TO_RUN = {
    'processes="this" saves': "it needs several processes, of which one fails",
    'the data of each process with processes="this"': "it needs several hosts",
    "tr.open(path)[…] (Grain's": "it needs several processes",
    "processes='this' saves complete": "it says what the argument does",
    "composite=True makes an item": "it says what the argument does",
    "step=… was asked for": "it says what the caller has passed",
    "keep.best: expected unscored": "it says what may be passed",
    "use treering.save(processes=": "it says what replaces an argument of Orbax",
    "read_only=True, so": "it says what the caller has passed",
    "for_save=True or for_restore=True": "it says what may be passed",
    "handler for item=…": "it says what the caller has passed",
    "…(…, alpha=…): expected alpha": "it says what may be passed",
    "…: tr.rules.…": "it says why a rule fails",
}


def case(*fragments: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a test as the case of the messages that contain these texts."""
    HERE.update(fragments)
    return lambda test: test


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(TreeringError) as caught:
        call()
    return str(caught.value)


def follow(text: str, begin: str, **names: Any) -> Any:
    """Runs the code that begins so in a message. Returns its value, or a dict of the arguments that it names."""
    rest = text[text.index(begin) :].partition("\n")[0]
    names |= {"tr": tr, "numpy": np, "jax": jax, "math": math}
    for end in range(len(rest), len(begin) - 1, -1):  # the longest first: a part of code may be code, too
        if rest[end : end + 1] in ("", *" ;:)`,") and rest[end - 1] != ",":
            code = f"dict({rest[:end]})" if re.match(r"\w+=", rest) else rest[:end]
            try:
                tree = ast.parse(code, mode="eval")
            except SyntaxError:
                continue
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            if used <= {*names, *dir(builtins), *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))}:
                return eval(code, names)
    raise AssertionError(f"no code that begins with {begin!r} in {text}")


def same(found: Any, expected: Any) -> bool:
    """Returns True for trees of one structure whose leaves have the same bits."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(map(_alike, *zip(*pairs, strict=True)))


def _alike(a: Any, b: Any) -> bool:
    a, b = (jax.random.key_data(x) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b))  # fmt: skip
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# Templates


A = np.arange(12, dtype=np.float32).reshape(3, 4)
KEY = jax.random.key(3)
THIRD = np.float64(1 / 3)

# What is saved, the template, how the advice begins, and the leaf that is meant. `+` joins two pieces of one advice.
LEAVES: dict[str, tuple[Any, Any, str, Any]] = {
    "tr.rules.transpose(…, …) turns it": (A, np.zeros((4, 3), "f4"), "tr.rules.transpose", A.T),
    "tr.rules.reshape(…, …) keeps": (A, np.zeros((2, 6), "f4"), "tr.rules.reshape", A.reshape(2, 6)),
    "tr.rules.take(…, 0) takes": (A, np.zeros(4, "f4"), "tr.rules.take", A[0]),
    "tr.rules.pad(…, …) fills": (A, np.ones((3, 6), "f4"), "tr.rules.pad", np.pad(A, ((0, 0), (0, 2)))),
    "tr.rules.drop(…) with missing": (A, np.ones(5, "f4"), "tr.rules.drop+missing=", np.ones(5, "f4")),
    "tr.rules.cast({path!r}, …)": (A, np.zeros((3, 4), "i4"), "tr.rules.cast", A.astype("i4")),
    "dtype='template' narrows": (A, np.zeros((3, 4), "f2"), "dtype=", A.astype("f2")),
    "dtype='template' allows that": (1 / 3, np.zeros((), "f2"), "dtype=", np.array(1 / 3, "f2")),
    "tr.rules.wrap_key_data(…, …)": (np.asarray(jax.random.key_data(KEY)), KEY, "tr.rules.wrap_key_data", KEY),
    "missing='template' or missing=[…] takes": (..., A, "missing='template'", A),
    "or missing=[…] takes the": (..., A, "missing=[", A),
    "extra='ignore' or extra=[…]": (A, ..., "extra='ignore'", ...),
    "or extra=[…] leaves it out": (A, ..., "extra=[", ...),
}
HERE.update(LEAVES)
NAMES = ["w", "a/b", "it's", "q\"'\\", "w[0]", "f(x, y)", "~", "\xe9\n", "w*"]


@pytest.mark.parametrize("fragment", LEAVES)
@pytest.mark.parametrize("name", NAMES)
def test_hints_about_a_leaf(tmp_path: Path, fragment: str, name: str) -> None:
    """Following the hint restores the leaf that is meant, and changes no other, whatever its name is."""
    saved, like, begin, meant = LEAVES[fragment]

    def tree(leaf: Any, wide: Any = THIRD) -> Any:
        return {"k": wide, "w3": np.int64(7), "at": {"z": 1, **({} if leaf is ... else {name: leaf})}}

    tr.save(tmp_path / "c", tree(saved))
    places: list[tuple[Sequence[str], Any]] = [((), {}), (("at",), {"at": "at"})]
    for at, options in places:
        like_, meant_ = (functools.reduce(dict.__getitem__, at, tree(one)) for one in (like, meant))
        text = said(lambda like=like_, options=options: tr.restore(tmp_path / "c", like, **options))
        found = [follow(text, one) for one in begin.split("+")]
        given = {key: value for one in found if isinstance(one, dict) for key, value in one.items()}
        given |= {"rules": rules} if (rules := [one for one in found if not isinstance(one, dict)]) else {}
        assert same(tr.restore(tmp_path / "c", like_, **options, **given), meant_), text


def test_no_rule_is_proposed_that_would_change_another_leaf(tmp_path: Path) -> None:
    """A path with a wildcard is a glob for other leaves too. Once, following the hint rounded them."""
    tr.save(tmp_path / "c", {"w*": A.astype(int), "w2": THIRD})
    text = said(lambda: tr.restore(tmp_path / "c", {"w*": A, "w2": THIRD}))
    assert "tr.rules" not in text and "is a wildcard, so no rule changes this leaf alone" in text
    tr.save(tmp_path / "d", A)
    assert "drop" not in said(lambda: tr.restore(tmp_path / "d", np.zeros(5))), "nothing would be left to restore"


@case("missing=[…]) takes what init() makes")
def test_a_template_of_shapes(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", {"k": 1})
    text = said(lambda: tr.restore(tmp_path / "c", jax.eval_shape(init)))
    assert same(tr.restore(tmp_path / "c", init(), **follow(text, "missing=[")), {"k": 1, "w": jnp.ones(2)})


@case("it is jax.eval_shape(init)", "the path of a part: at=… chooses that")
def test_a_template_that_is_no_state(tmp_path: Path) -> None:
    """A function, a class or a path instead of the template is named, in a run as well."""
    state = {"params": {"w": jnp.ones(2)}, "opt": jnp.zeros(3)}
    tr.save(tmp_path / "c", state)
    text = said(lambda: tr.restore(tmp_path / "c", init))
    assert "likely: the template is a function" in text
    like = follow(text, "jax.eval_shape", init=lambda: state)
    assert same(tr.restore(tmp_path / "c", like), state)
    assert "likely: the template is the class Pair, and not an object of it" in said(
        lambda: tr.restore(tmp_path / "c", Pair)
    )
    text = said(lambda: tr.restore(tmp_path / "c", "params"))
    assert same(tr.restore(tmp_path / "c", **follow(text, "at=")), {"w": np.ones(2, "f4")})
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, state)
        assert "likely: the template is a function" in said(lambda: ckpts.restore(init))
    assert "likely: the template is a text" not in said(lambda: tr.restore(tmp_path / "c", "other"))


class Pair(NamedTuple):
    a: Any
    b: Any


def init() -> Any:
    return {"k": 1, "w": jnp.ones(2)}


@case("; pass optional=True")
def test_a_rule_that_matches_nothing(tmp_path: Path) -> None:
    ckpt = tr.open(tr.save(tmp_path / "c", init()).path)
    rules: Any = tr.rules
    for rule, *values in (("drop", "x"), ("rename", "x", "y"), ("cast", "x/*", "float16"), ("stack", "x/*")):
        text = said(lambda rule=rule, values=values: ckpt.apply([getattr(rules, rule)(*values)]))
        assert ckpt.apply([getattr(rules, rule)(*values, **follow(text, "optional="))]).restore().keys() == {"k", "w"}


@case("tr.rules.drop(…) leaves them out")
def test_rules_and_a_damaged_part(tmp_path: Path) -> None:
    from treering._core.entries import lost_entry
    from treering._core.views import plain_leaves

    lost = plain_leaves({"a": lost_entry("a", "gone", tree=True)})
    text = said(lambda: tr.rules.rename("^a/", "b/").apply(lost))
    assert follow(text, "tr.rules.drop").apply(lost) == {}


# Saves


@case(
    "free path, found a checkpoint; pass overwrite",
    "free path, found a …; pass overwrite",
    "pass overwrite=True to replace them",
)
@pytest.mark.parametrize("form", ["treering", "safetensors", "flax", "t5x", "shards"])
def test_a_path_in_use(tmp_path: Path, form: str) -> None:
    options: Any = {"format": "safetensors", "max_shard_size": 10**6} if form == "shards" else {"format": form}
    save = functools.partial(tr.save, tmp_path / ("x.safetensors" if form == "safetensors" else "x"), **options)
    save({"w": A})
    new = {"w": A + 1}
    text = said(lambda: save(new))
    save(new, **follow(text, "overwrite="))
    assert same(tr.restore(tmp_path / ("x.safetensors" if form == "safetensors" else "x")), new)


@case("a typed PRNG key; store jax.random.key_data(key)")
@pytest.mark.parametrize("form", ["flax", "levanter", "fjformer"])
def test_a_key_that_a_format_cannot_hold(tmp_path: Path, form: str) -> None:
    text = said(lambda: tr.save(tmp_path / "x", {"key": KEY, "w": A}, format=form))
    tr.save(tmp_path / "x", {"key": follow(text, "jax.random.key_data", key=KEY), "w": A}, format=form)
    assert same(jax.random.wrap_key_data(tr.restore(tmp_path / "x")["key"]), KEY)


def test_a_leaf_among_items_of_orbax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"step": 3, "a+b": 4, "opt": {"step": 5, "other_step": 6}}
    text = said(lambda: tr.save(tmp_path / "x", tree, format="orbax", composite=True))
    rules = [follow(line, "tr.rules.rename") for line in text.splitlines()[1:]]
    tr.save(tmp_path / "x", tree, format="orbax", composite=True, rules=rules)
    assert same(tr.restore(tmp_path / "x"), {"group": {"a+b": 4, "step": 3}, "opt": tree["opt"]})
    tr.save(tmp_path / "n", tree)
    command = ["convert", str(tmp_path / "n"), str(tmp_path / "y"), "--format", "orbax", "--composite"]
    assert main(command) == 3
    error = capsys.readouterr().err
    assert "rules." not in error
    options = re.findall(r"--rename (\S+)", error)
    assert main([*command, *(part for one in options for part in ("--rename", shlex.split(one)[0]))]) == 0
    assert not tr.diff(tmp_path / "x", tmp_path / "y")


@case("use composite=True…; or leave it ", "of its own: use composite=True")
def test_an_iterator_for_orbax(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain")
    data = iter(grain.MapDataset.range(10).to_iter_dataset())
    next(data)
    tree = {"loop": {"data": data, "a_loop/data": A}, "w": {"x": A}}
    text = said(lambda: tr.save(tmp_path / "x", tree, format="orbax"))
    rules = [follow(text, "tr.rules.rename")]
    tr.save(tmp_path / "x", tree, format="orbax", rules=rules, **follow(text, "composite="))
    assert tr.open(tmp_path / "x")["data"] == [{"next_index": 1}] and "loop/a_loop~1data" in tr.open(tmp_path / "x")
    tr.save(tmp_path / "y", tree, format="orbax", rules=[follow(text, "tr.rules.drop")])
    assert sorted(tr.open(tmp_path / "y")) == ["loop/a_loop~1data", "w/x"]


@case("store numpy.frombuffer(data, 'uint8')", "store jax.random.key_data(key), or")
def test_leaves_that_files_cannot_hold(tmp_path: Path) -> None:
    tree = {"w": A, "key": KEY, "data": b"\xff\0", "text": "hello"}
    text = said(lambda: tr.save(tmp_path / "x.safetensors", tree))
    data, key = follow(text, "numpy.frombuffer", data=tree["data"]), follow(text, "jax.random.key_data", key=KEY)
    assert "text: str; save it as metadata, and drop it" in text
    options: Any = {"metadata": {"text": "hello"}, "rules": [tr.rules.drop("text")]}
    tr.save(tmp_path / "x.safetensors", {**tree, "key": key, "data": data}, **options)
    found = tr.open(tmp_path / "x.safetensors")
    assert found.metadata == {"text": "hello"} and found["data"][...].tobytes() == tree["data"]
    assert same(jax.random.wrap_key_data(found["key"][...]), KEY)
    text = said(lambda: tr.save(tmp_path / "x.eqx", {"key": KEY}))
    tr.save(tmp_path / "x.eqx", {"key": follow(text, "jax.random.key_data", key=KEY)})


@case("open it with format='zarr'")
def test_the_format_of_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`format` of a conversion is that of its target, so there the message means another argument."""
    store = f"file://{tmp_path}/x/w/"
    ts.open({"driver": "zarr3", "kvstore": store}, create=True, dtype=A.dtype, shape=A.shape).result()[...] = A
    text = said(lambda: tr.open(tmp_path / "x"))
    given = follow(text, "format=")
    assert same(tr.restore(tmp_path / "x", **given), {"w": A})
    command = ["convert", str(tmp_path / "x"), str(tmp_path / "y")]
    assert main(command) == 3
    options = re.search(r"open it with (--\S+ \S+)", capsys.readouterr().err)
    assert options and main([*command, *shlex.split(options[1])]) == 0
    assert same(tr.restore(tmp_path / "y"), {"w": A})


@case("give it a dtype, as x.astype(x.dtype)")
def test_a_weak_array_in_a_state(tmp_path: Path) -> None:
    weak = jnp.full(2, 3)
    with jax.enable_x64(True):
        text = said(lambda: tr.save(tmp_path / "c", {"data": Loader({"a": weak})}))
        tr.save(tmp_path / "c", {"data": Loader({"a": follow(text, "x.astype", x=weak)})})
    assert tr.restore(tmp_path / "c")["data"][0]["a"].tolist() == [3, 3]


class Loader:
    """A loader that says its position, as those of Grain and PyTorch do."""

    def __init__(self, state: Any = 0):
        self.state = state

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@case("set it with …(tr.restore(path, at=…))")
def test_a_state_that_was_saved_as_a_tree(tmp_path: Path) -> None:
    path = tr.save(tmp_path / "c", {"w": A, "it": {"data": {"epoch": 2, "at": [3]}}}).path
    loader = Loader()
    text = said(lambda: tr.restore(path, {"w": A, "it": {"data": loader}}))
    found = tr.restore(path, {"w": A, "it": {"data": ...}})
    follow(text, "load_state_dict(", load_state_dict=loader.load_state_dict, path=path)
    assert loader.state == {"epoch": 2, "at": [3]} and same(found["w"], A)


@case("keeps the template's, and then … over")
def test_an_iterator_that_was_not_saved(tmp_path: Path) -> None:
    path = tr.save(tmp_path / "c", {"w": A}).path
    text = said(lambda: tr.restore(path, {"w": A, "it": {"data": Loader(5)}}))
    for begin in ("missing='template'", "missing=["):
        found = tr.restore(path, {"w": A, "it": {"data": Loader(5)}}, **follow(text, begin))
        assert found["it"]["data"].state == 5


@case("tr.open(path).select(['4', '5']).restore(part)")
def test_a_part_of_leaves_with_numbers(tmp_path: Path) -> None:
    path = tr.save(tmp_path / "x.eqx", [A + n for n in range(7)]).path
    text = said(lambda: tr.open(path).at("4/x"))
    part = {"a": np.zeros_like(A), "b": np.zeros_like(A)}
    assert same(follow(text, "tr.open", path=path, part=part), {"a": A + 4, "b": A + 5})


@case("sharding=… leaves out arrays")
def test_shardings_that_do_not_fit_all(tmp_path: Path) -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    tree = {"w": np.zeros((4, 2), "f4"), "b": np.zeros(2, "f4"), "s": np.float32(1)}
    path, mesh = tr.save(tmp_path / "c", tree).path, jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    text = said(lambda: tr.restore(path, tree, sharding=NamedSharding(mesh, PartitionSpec(None, "x"))))
    names = {"NamedSharding": NamedSharding, "PartitionSpec": PartitionSpec, "P": PartitionSpec, "mesh": mesh}
    found = tr.restore(path, tree, **follow(text, "sharding=lambda", **names))
    assert same(found, tree) and found["w"].sharding.spec == PartitionSpec(None, "x")


# Runs


@case(
    "pass on_exists='skip' or 'overwrite', or continue from ckpts.latest_step",
    "dtype='template' takes the dtype of init",
)
def test_messages_of_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halves() -> Any:
        return {"w": jnp.ones(2, "bfloat16")}

    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(3, {"w": jnp.ones(2)})
        ckpts.wait()
        text = said(lambda: ckpts.save(3, {"w": jnp.zeros(2)}))
        assert ckpts.save(3, {"w": jnp.zeros(2)}, **follow(text, "on_exists='skip'")) is None
        assert follow(text, "ckpts.latest_step", ckpts=ckpts) == 3
        ckpts.save(3, {"w": jnp.full(2, 5.0)}, on_exists="overwrite")
        assert ckpts.restore_or_init(halves)[0]["w"].dtype == "float32"
        given = follow(caplog.text, "dtype='template'")
        assert same(ckpts.restore_or_init(halves, **given)[0], {"w": jnp.full(2, 5, "bfloat16")})


@case("is in it; pass prefix=…", "to start over call rewind(None)")
def test_runs_that_go_on_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tr.Checkpointer(tmp_path, prefix="a-") as ckpts:
        ckpts.save(7, {"x": 7})
    with tr.Checkpointer(tmp_path) as ckpts:
        assert ckpts.restore_or_init(lambda: {"x": 0}) == ({"x": 0}, 0)
    text = caplog.text
    with tr.Checkpointer(tmp_path, **follow(text, "prefix=")) as ckpts:
        assert ckpts.restore_or_init(lambda: {"x": 0}) == ({"x": 7}, 7)
    with tr.Checkpointer(tmp_path, prefix="a-") as ckpts:
        ckpts.save(2, {"x": 2})
        follow(caplog.text, "rewind(", rewind=ckpts.rewind)
        assert ckpts.steps == []


@case("tensor.to_dense(), .dequantize() or .full_tensor()", "tensor.resolve_conj().resolve_neg()", "tensor.detach()")
def test_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    conj = torch.tensor([1 + 2j]).conj()
    for begin, bad, meant in (
        ("tensor.resolve_conj()", conj, np.array([1 - 2j], "c8")),
        ("tensor.to_dense()", torch.tensor([0.0, 2.0]).to_sparse(), np.array([0, 2], "f4")),
    ):
        torch.save({"w": bad}, tmp_path / "x.pt")
        text = said(lambda: tr.open(tmp_path / "x.pt"))
        torch.save({"w": follow(text, begin, tensor=bad)}, tmp_path / "x.pt")
        assert same(tr.restore(tmp_path / "x.pt")["w"], meant)
    bad = torch.ones(2, requires_grad=True)
    text = said(lambda: tr.save(tmp_path / "c", {"data": Loader({"a": bad})}))
    tr.save(tmp_path / "c", {"data": Loader({"a": follow(text, "tensor.detach", tensor=bad)})})


# Names in messages


@pytest.mark.long
def test_names_of_the_library_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message names nothing of Treering that does not exist."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for where, text in messages():
        for name in _NAME.findall(text):
            found: Any = tr
            for part in name.strip(".").split("."):
                if not hasattr(found, part) and hasattr(found, "__path__"):
                    importlib.import_module(f"{found.__name__}.{part}")
                assert hasattr(found, part), (where, text)
                found = getattr(found, part)


def test_arguments_exist() -> None:
    """A message names no argument that no call of Treering has."""
    public = (TESTS / "public.txt").read_text()
    known = {*re.findall(r"(\w+)(?==)|(?<=[(, ])(\w+)(?=[,)\n])", public)}
    names = {name for pair in known for name in pair if name} | _OTHERS
    for where, text in messages():
        if not where.startswith("orbax/"):  # whose arguments are Orbax's
            assert set(_ARGUMENT.findall(text)) <= names, (where, text)


def test_options_and_commands_exist() -> None:
    options = {option for command in cli.commands.values() for one in command.params for option in one.opts}
    for where, text in messages():
        assert {f"--{name}" for name in _OPTION.findall(text)} <= options | {"--debug"}, (where, text)
        assert set(_COMMAND.findall(text)) <= cli.commands.keys(), (where, text)


def test_extras_exist() -> None:
    extras = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for where, text in messages():
        assert set(re.findall(r"treering\[([a-z]\w*)\]", text)) <= extras.keys(), (where, text)


def test_every_message_with_code_has_a_case() -> None:
    known = {*HERE, *ELSEWHERE, *NOTHING_TO_RUN}
    texts = with_code()
    without = [text for text in texts if not any(one in text for one in known)]
    assert not without, "\n".join(map(repr, without))
    assert not [one for one in known if not any(one in text for text in texts)]


def test_the_tests_elsewhere_exist() -> None:
    for name in ELSEWHERE.values():
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE), name


def _spoken(text: str) -> str:
    """Returns the words of a text as tests write them, also as regular expressions, with single spaces."""
    return " ".join(re.sub(r"[^\w %./=-]", "", text).lower().split())


def test_every_warning_is_expected_by_a_test() -> None:
    """Tests have three words in a row of each warning and logged error. `make coverage` lists what no test causes."""
    of_tests = (file.read_text() for file in TESTS.rglob("*.py") if "golden" not in file.parts)
    expected = _spoken(re.sub(r'"\s*\n\s*[fr]*"', "", "".join(of_tests)))
    unexpected: list[str] = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_log.warning", "_log.error", "warnings.warn"):
                texts = filter(None, map(_text, (one for one in ast.walk(node.args[0]) if isinstance(one, ast.expr))))
                parts = [_spoken(part).split() for text in texts for part in re.split(r"%\w|%\.\d+f|…", text)]
                long = [words for words in parts if len(words) > 2] or [max(parts, key=len, default=[])]
                rows = {" ".join(words[n : n + 3]) for words in long for n in range(max(len(words) - 2, 1))}
                if not any(row in expected for row in rows):
                    unexpected.append(f"{file.relative_to(SOURCE)}:{node.lineno}")
    assert not unexpected
