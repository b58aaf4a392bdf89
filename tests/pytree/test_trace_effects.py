"""Tests programs that set themselves up when `init` runs first: a resumed job, which traces `init`, is not spoiled."""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import treering as tr
from treering._pytree import trace_effects
from treering.errors import UnsupportedError

pytestmark = pytest.mark.compat

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
Program = tuple[Callable[[], Any], Callable[[], Any]]  # `init`, and what is set up by it


def scale() -> Any:
    return jnp.asarray(X[1]) + 1


def state(by: Any) -> dict[str, Any]:
    return {"w": jnp.ones(3) / by}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes a module of source text."""

    def make(source: str, name: str = "user_code", **given: Any) -> Any:
        made = types.ModuleType(name)
        vars(made).update(given, jnp=jnp, scale=scale, state=state)
        exec(source, vars(made))
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


class Trainer:
    scale: Any = None

    def init(self) -> Any:
        if self.scale is None:
            self.scale = scale()
        return state(self.scale)


class WithSlots:
    __slots__ = ("ready", "scale")

    def init(self) -> Any:
        if not hasattr(self, "ready"):
            self.scale, self.ready = scale(), True
        return state(self.scale)


class Lazy:
    @functools.cached_property
    def scale(self) -> Any:
        return scale()

    def __call__(self) -> Any:
        return state(self.scale)


class Nested:
    """Has a flag in another object than the array."""

    def __init__(self) -> None:
        self.inner, self.ready = types.SimpleNamespace(stats={}), False

    def init(self) -> Any:
        if not self.ready:
            self.inner.stats["scale"], self.ready = scale(), True
        return state(self.inner.stats["scale"])


class Failing:
    """Cannot be traced, and fails after it has set up a part."""

    mean: Any = None
    total: Any = None

    def init(self) -> Any:
        if self.mean is None:
            self.mean = scale()
        self.total = float(self.mean.sum()) if self.total is None else self.total
        return {**state(self.mean), "total": self.total}


class Replacing:
    def init(self) -> Any:
        self.scale = scale()
        return state(self.scale)


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any = None

    def init(self) -> Any:
        if self.held is None:
            object.__setattr__(self, "held", scale())
        return state(self.held)


class Containers:
    def __init__(self) -> None:
        self.all: dict[str, Any] = {
            **{"list": [], "deque": collections.deque(maxlen=3), "default": collections.defaultdict(list)},
            **{"ordered": collections.OrderedDict(b=1, a=2), "tuple": ([],), "set": set()},
        }
        self.all["ordered"].move_to_end("b")

    def init(self) -> Any:
        if not self.all["list"]:
            self.all["list"].append(scale())
            self.all["deque"].append(scale())
            self.all["default"]["x"].append(scale())
            self.all["ordered"]["c"] = scale()
            self.all["tuple"][0].append(scale())
            self.all["set"].add(Box(scale()))
        assert list(self.all["ordered"])[:2] == ["a", "b"]
        return state(self.all["list"][0])

    def found(self) -> Any:
        box = next(iter(self.all["set"]))
        return [self.all["list"], [*self.all["deque"]], self.all["default"], self.all["ordered"]["c"], box.value]


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class LazyModules:
    """Makes modules at its first call, as lazily initialized layers do."""

    def __init__(self) -> None:
        self.net: Any = None
        self.linear: Any = None

    def init(self) -> Any:
        if self.net is None:
            self.net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.linear = eqx.nn.Linear(3, 2, key=jax.random.key(1))
        return {"w": self.net.kernel.get_value() * 2, "v": self.linear.weight}


def with_object(kind: type, find: Callable[[Any], Any] = lambda one: one.scale) -> Callable[[Any], Program]:
    def make(module: Any) -> Program:
        one = kind()
        return getattr(one, "init", one), lambda: find(one)

    return make


def of_a_class(module: Any) -> Program:
    class Own:
        scale: Any = None

        @classmethod
        def init(cls) -> Any:
            if cls.scale is None:
                cls.scale = scale()
            return state(cls.scale)

    return Own.init, lambda: Own.scale


def of_a_closure(module: Any) -> Program:
    ready, held = False, None

    def init() -> Any:
        nonlocal ready, held
        if not ready:
            ready, held = True, scale()
        return state(held)

    return init, lambda: held


def of_a_default(module: Any) -> Program:
    def init(cache: dict[str, Any] = {}, *, more: Any = {}) -> Any:  # noqa: B006
        if not cache:
            cache["scale"] = more["scale"] = scale()
        return state(more["scale"])

    init.__defaults__, init.__kwdefaults__ = ({},), {"more": {}}  # as a new process has them
    return init, lambda: [init.__defaults__, init.__kwdefaults__]


def of_a_partial(module: Any) -> Program:
    one = Trainer()
    return functools.partial(lambda key, trainer: trainer.init(), 0, trainer=one), lambda: one.scale


def of_globals(module: Any) -> Program:
    made = module(
        "SCALE, READY = None, False\n"
        "def set_up():\n    global SCALE, READY, NEW\n    SCALE, READY, NEW = scale(), True, scale()\n"
        "def init():\n    if not READY:\n        set_up()\n    return state(SCALE)\n"
    )
    return made.init, lambda: [made.SCALE, made.NEW]


def of_another_module(module: Any) -> Program:
    library = module(
        "import functools\nTABLES = {}\n@functools.lru_cache(maxsize=2)\ndef cached(n):\n    return scale() * n\n"
        "def table():\n    if not TABLES:\n        TABLES['x'] = scale()\n    return TABLES['x']\n",
        name="its_library",
    )
    made = module(
        "import its_library\nfrom its_library import table\n"
        "def init():\n    from its_library import cached\n"
        "    its_library.LAST = getattr(its_library, 'LAST', None)\n"
        "    if its_library.LAST is None:\n        its_library.LAST = scale()\n"
        "    return state(table() * cached(2) * its_library.LAST)\n"
    )
    return made.init, lambda: [library.TABLES, library.cached(2), library.LAST]


def of_a_thread(module: Any) -> Program:
    local = threading.local()

    def init() -> Any:
        if not hasattr(local, "scale"):
            local.scale = scale()
        return state(local.scale)

    return init, lambda: local.scale


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "attribute": with_object(Trainer),
    "slots": with_object(WithSlots),
    "cached property": with_object(Lazy),
    "nested": with_object(Nested, lambda one: one.inner.stats),
    "failing": with_object(Failing, lambda one: [one.mean, one.total]),
    "replacing": with_object(Replacing),
    "frozen": with_object(Frozen, lambda one: one.held),
    "containers": with_object(Containers, Containers.found),
    "modules": with_object(LazyModules, lambda one: [one.net.kernel.get_value(), one.linear.weight]),
    **{"class": of_a_class, "closure": of_a_closure, "default": of_a_default, "partial": of_a_partial},
    **{"globals": of_globals, "another module": of_another_module, "thread": of_a_thread},
}


def bits(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "sharded"), [*((name, False) for name in PROGRAMS), ("attribute", True), ("failing", True)]
)
def test_a_program_that_sets_itself_up_once_is_resumed(
    tmp_path: pathlib.Path, module: Any, name: str, sharded: bool
) -> None:
    options = {"sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0])} if sharded else {}
    found = []
    for step in range(2):
        init, set_up = PROGRAMS[name](module)  # as in a new process
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            restored, number = ckpts.restore_or_init(init, **options)
            assert number == step
            again = jax.tree.map(lambda x: x, init())  # The program may call `init` again.
            found.append(bits([restored, set_up(), again]))
            ckpts.save(step + 1, restored)
    assert found[0] == found[1]


def hidden(name: str) -> Callable[[], Any]:
    """Returns an `init` that keeps an array where Treering does not look."""

    def init() -> Any:
        home = __import__("importlib").import_module("".join(["home", "_of_", "tables"]))
        if not home.tables:
            home.tables.append(scale())
        return state(home.tables[0])

    return init


@pytest.mark.long
def test_a_tracer_that_cannot_be_undone_is_an_error_with_advice(tmp_path: pathlib.Path, module: Any) -> None:
    def ckpts_of(name: str) -> tr.Checkpointer:
        module("tables = []", name="home_of_tables")  # as in a new process
        return tr.Checkpointer(tmp_path / name)

    init = hidden("home")
    with ckpts_of("run") as ckpts:
        first, _ = ckpts.restore_or_init(init)
        ckpts.save(1, first)
    with ckpts_of("run") as ckpts, pytest.raises(UnsupportedError) as caught:
        ckpts.restore_or_init(init)
    text = str(caught.value)
    assert "the global tables of the module home_of_tables" in text
    advice = text.partition("`")[2].partition("`")[0]
    for name, expected in (("run", 1), ("new", 0)):
        with ckpts_of(name) as ckpts:
            given = {"ckpts": ckpts, "init": init}
            exec(advice, given)
            assert bits(given["state"]) == bits(first) and given["step"] == expected
            assert bits(init()) == bits(first)


def test_the_error_of_an_init_that_a_trace_has_changed_says_so(tmp_path: pathlib.Path) -> None:
    def make() -> Any:
        flags, held = set(), {}

        def init() -> Any:
            if "ready" not in flags:
                flags.add("ready")
                held["scale"] = scale()
            return state(held["scale"])

        return init

    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, ckpts.restore_or_init(make())[0])
    with tr.Checkpointer(tmp_path / "run") as ckpts, pytest.raises(KeyError) as caught:
        ckpts.restore_or_init(make())
    assert any("Treering traced init before it called it" in note for note in caught.value.__notes__)


def test_what_another_thread_changes_during_the_trace_is_kept(tmp_path: pathlib.Path) -> None:
    """A loader in the same object as the array that is set up may continue in its own thread."""

    class Owner(Trainer):
        def __init__(self) -> None:
            self.loader = types.SimpleNamespace(buffer=collections.deque([1]), position=1)

        def init(self) -> Any:
            def load() -> None:
                self.loader.buffer.append(2)
                self.loader.position = 2

            if self.scale is None:
                thread = threading.Thread(target=load)
                thread.start()
                thread.join()
            return super().init()

    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, ckpts.restore_or_init(Owner().init)[0])
    owner = Owner()
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.restore_or_init(owner.init)
    assert owner.loader.position == 2 and list(owner.loader.buffer) == [1, 2, 2]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the objects of each walk."""
    counts: list[int] = []
    edges = trace_effects.edges

    def counted(roots: Any) -> Any:
        counts.append(0)
        for edge in edges(roots):
            counts[-1] += 1
            yield edge

    monkeypatch.setattr(trace_effects, "edges", counted)
    return counts


@pytest.mark.long
def test_a_pure_init_is_only_traced_and_little_is_searched(tmp_path: pathlib.Path, walks: list[int]) -> None:
    calls: list[bool] = []
    data = list(map(str, range(100_000)))  # not walked through

    def init() -> Any:
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            jax.jit(lambda x: float(jnp.asarray(X).sum() * x))(1.0)
        net = nnx.Linear(2, len(data) // 50_000, rngs=nnx.Rngs(0))
        calls.append(isinstance(net.kernel.get_value(), jax.core.Tracer))
        return {"net": net, "mlp": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))}

    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, ckpts.restore_or_init(init)[0])
    calls.clear()
    walks.clear()
    kind = trace_effects.TraceEffects
    of_others = [one for one in gc.get_objects() if isinstance(one, kind)]  # errors that other tests keep hold some
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.restore_or_init(init)
    assert calls == [True] and max(walks) < 1000
    assert sum(isinstance(one, kind) for one in gc.get_objects()) == len(of_others)
    assert next(itertools.islice(trace_effects.edges([init]), 0, 1))[1] is init
