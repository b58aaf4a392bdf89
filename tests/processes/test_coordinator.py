"""Tests saves and restores of several processes: any job restores them, and no process waits for a dead one."""

import itertools
import os
import pathlib
import signal

import numpy as np
import pytest
from jax._src import distributed

import treering as tr
from jobs import run_job
from sampling import sample_points
from treering._processes import coordinator
from treering._processes.call_history import History

KILLED = -signal.SIGKILL

STATE = """
big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
half = devices[len(devices) // 2 :]
values = {
    "rows": big, "columns": big + 1, "replicated": big + 2, "grid": big + 3, "scalar": np.float32(2.5),
    "empty": big[:0],
    "elsewhere": big[:8] + 4, "alone": big[:9] + 5, "bf16": (big[:64] + 6).astype(jnp.bfloat16),
    "keys": np.arange(32, dtype=np.uint32).reshape(16, 2),
}
def state():
    n, own = len(devices), [d for d in devices if d.process_index == COUNT - 1]
    return {
        "rows": put(values["rows"], P("x")), "columns": put(values["columns"], P(None, "x")),
        "replicated": put(values["replicated"]), "grid": put(values["grid"], P("y", "x"), mesh(2, n // 2)),
        "scalar": put(values["scalar"]), "empty": put(values["empty"], P(None, "x")),
        "elsewhere": put(values["elsewhere"], P("x"), Mesh(half, ("x",))),
        "alone": put(values["alone"], P(), Mesh(np.array(own), ("x",))), "bf16": put(values["bf16"], P("x")),
        "keys": jax.random.wrap_key_data(put(values["keys"], P("x"))),
        "here": jnp.arange(5.0), "numpy": np.arange(3_000_000, dtype=np.int32), "step": 7, "name": "run", "none": None,
    }
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_several_processes_save_together_restores_anywhere(tmp_path: pathlib.Path, processes: int) -> None:
    body = (
        STATE
        + """
tree = state()
found = tr.save(tmp / "c", tree, step=7, metrics={"loss": tree["scalar"]})
pending = tr.save_async(tmp / "again", tree)
tree["numpy"] += 1
pending.result()
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array)
                    else x, tree)
for name in ("c", "again"):
    back = tr.restore(tmp / name, like)
    back["keys"], kind = jax.random.key_data(back["keys"]), back["keys"]
    assert kind.sharding == tree["keys"].sharding and kind.dtype == tree["keys"].dtype
    assert all(same(back[key], value) for key, value in values.items())
    assert all(back[key].sharding == tree[key].sharding for key in values if key != "keys")
    assert (back["numpy"] == np.arange(3_000_000)).all() and back["step"] == 7 and back["name"] == "run"
report([found.nbytes, found.step])
"""
    )
    results = run_job(tmp_path, body, processes=processes)
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert [result.report for result in results] == [[size, 7]] * processes
    big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    for name in ("c", "again"):
        assert tr.verify(tmp_path / name).ok
        tree = tr.restore(tmp_path / name)
        wanted = {"rows": big, "columns": big + 1, "replicated": big + 2, "grid": big + 3, "elsewhere": big[:8] + 4}
        assert all(tree[key].tobytes() == value.tobytes() for key, value in wanted.items())
        assert (tree["alone"] == big[:9] + 5).all() and (tree["numpy"] == np.arange(3_000_000)).all()
        # The job writes each byte once, even if it is replicated, and evenly.
        files = sorted((tmp_path / name).glob("arrays-*"))
        assert len(files) == processes
        sizes = [file.stat().st_size for file in files]
        assert sum(sizes) < sum(array.nbytes for array in wanted.values()) + 14_000_000
        assert max(sizes) < 1.25 * sum(sizes) / processes
    for fewer in (1, 3):
        body = (
            STATE
            + """
back = tr.restore(tmp / "c", sharding=lambda path, shape, dtype: NamedSharding(
    Mesh(devices, ("x",)), P("x") if shape and shape[0] % len(devices) == 0 and path != "keys" else P()))
back["keys"] = jax.random.key_data(back["keys"])
report(all(same(back[key], value) for key, value in values.items()))
"""
        )
        found = run_job(tmp_path, body, processes=fewer) if fewer < processes else []
        assert all(result.report for result in found)


CHANGED = (
    STATE
    + """
keys = tr.rules.drop("keys"), tr.rules.drop("none"), tr.rules.drop("name"), tr.rules.drop("step")
in_place = [tr.rules.rename("rows", "renamed"), tr.rules.cast("columns", "bfloat16"), tr.rules.drop("alone")]
across = [tr.rules.transpose("rows", (1, 0)), tr.rules.concat(["columns", "replicated"], "stacked", axis=1)]
tree = state()
tr.save(tmp / "in place", tree, rules=in_place, step=3)
pending = tr.save_async(tmp / "across", tree, rules=across, metadata={"a": 1})
tree["numpy"] += 1
pending.result()
tree["numpy"] -= 1
tr.save(tmp / "bf16", tree, dtype="bfloat16")
for format in FORMATS:
    tr.save(tmp / format, tree, format=format, rules=[*keys, *in_place])
    assert caught(tr.save, tmp / format, tree, format=format, rules=[*keys, *in_place])[0] == "ExistsError"
assert caught(tr.save, tmp / "tensorflow", tree, format="tensorflow")[0] == "UnsupportedError"
class Counting(stores.Disk):
    written = 0
    def write(self, fd, data, offset):
        Counting.written += len(data)
        super().write(fd, data, offset)
with stores.using(stores.Filesystem(Counting())):
    assert caught(tr.save, tmp / "across", tree, rules=across)[0] == "ExistsError"
    assert caught(tr.save, tmp / FORMATS[0], tree, format=FORMATS[0], rules=[*keys, *in_place])[0] == "ExistsError"
    assert Counting.written == 0
lone = put(values["alone"], P(), Mesh(np.array([d for d in devices if d.process_index == COUNT - 1]), ("x",)))
tr.save(tmp / "lone", {"lone": lone, "n": 1}, rules=[tr.rules.reshape("lone", (-1,))])
again = tr.save(tmp / "copy", tr.open(tmp / "across").select(["stacked", "rows", "step"]))
report([again.nbytes > 0, sorted(os.listdir(tmp))])
"""
)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_save_with_rules_and_in_any_format(tmp_path: pathlib.Path, processes: int) -> None:
    formats = ["safetensors", "flax", "orbax", "t5x", "levanter"]
    results = run_job(tmp_path, CHANGED, processes=processes, FORMATS=formats)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    assert all(result.report[0] for result in results)
    big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    in_place = tr.restore(tmp_path / "in place")
    assert len(list((tmp_path / "in place").glob("arrays-*"))) == processes
    assert (in_place["renamed"] == big).all() and "rows" not in in_place and "alone" not in in_place
    assert in_place["columns"].dtype == "bfloat16" and (in_place["columns"] == (big + 1).astype("bfloat16")).all()
    assert tr.open(tmp_path / "in place")["renamed"].sharding is not None and tr.open(tmp_path / "in place").step == 3
    across = tr.open(tmp_path / "across")
    assert across.metadata == {"a": 1} and across["step"] == 7 and across["numpy"][-1] == 2_999_999
    assert (across["rows"][...] == big.T).all()
    assert (across["stacked"][...] == np.concatenate([big + 1, big + 2], axis=1)).all()
    assert set(tr.open(tmp_path / "copy")) == {"stacked", "rows", "step"} and not tr.diff(
        tmp_path / "copy", across.select(["stacked", "rows", "step"])
    )
    assert (tr.restore(tmp_path / "lone")["lone"] == big[:9].reshape(-1) + 5).all()
    assert tr.restore(tmp_path / "bf16")["grid"].dtype == "bfloat16"
    for name in ("in place", "across", "bf16", "copy", *formats):
        assert tr.verify(tmp_path / name).ok, name
        if name in formats:
            found = tr.open(tmp_path / name)
            assert found.format == name
            root = found if "renamed" in found else found.at("target")
            assert (root["renamed"][...] == big).all() and root["columns"].dtype == "bfloat16"
            assert root["numpy"][-1] == 2_999_999


@pytest.mark.slow
def test_trees_that_differ_between_processes_are_refused(tmp_path: pathlib.Path) -> None:
    body = """
errors = {}
def attempt(name, tree):
    errors[name] = caught(tr.save, tmp / name, tree)
attempt("value", {"step": INDEX, "same": 1})
attempt("bytes", {"deep": {"x": np.full(3, INDEX), "y": np.ones(3)}})
attempt("shape", [np.ones(3 + INDEX)])
attempt("leaf", {"a": 1, **({"b": 2} if INDEX else {})})
attempt("kind", {"a": np.float32(1) if INDEX else 1.0})
attempt("container", {"a": [1, 2] if INDEX else (1, 2)})
attempt("local", {"a": jnp.full(3, INDEX)})
attempt("spread", {"a": put(np.ones(8), P("x") if INDEX else P())})
attempt("here", {"a": put(np.ones(8)) if INDEX else jnp.ones(8)})
attempt("unsavable", {"a": object() if INDEX else 1})
attempt("good", {"a": 1})
report([errors, sorted(os.listdir(tmp))])
"""
    for index, result in enumerate(run_job(tmp_path, body, processes=2)):
        errors, listed = result.report
        assert errors.pop("good") is None and "good" in listed
        assert not set(errors) & set(listed)  # no files are left
        kind, text = errors.pop("unsavable")
        assert kind == "UnsupportedError" and "a: object" in text.replace("builtins.", "")
        assert all(kind == "MismatchError" for kind, _ in errors.values()), errors
        found = {name: text for name, (_, text) in errors.items()}
        assert (
            "step: process 0 has int 0, process 1 int 1" in found["value"]
            and "same" not in found["value"].split("\n")[1]
        )
        assert "deep/x: process 0 has numpy int64[3], process 1 numpy int64[3] (other values)" in found["bytes"]
        assert "deep/y" not in found["bytes"]
        assert "0: process 0 has numpy float64[3], process 1 numpy float64[4]" in found["shape"]
        assert "b: process 0 has nothing, process 1 int 2" in found["leaf"]
        assert "a: process 0 has float 1.0, process 1 numpy-scalar float32[]" in found["kind"]
        assert "containers" in found["container"] and "other values" in found["local"]
        assert "spread over processes in another way" in found["spread"] and "a:" in found["here"]
        assert index == 0 or text.startswith("process") or "process 1" in text or "a: " in text


@pytest.mark.slow
def test_calls_that_differ_and_guards_are_refused(tmp_path: pathlib.Path) -> None:
    body = """
tree = {"x": np.ones(3)}
errors = [
    caught(tr.save, tmp / f"name-{INDEX}", tree, timeout=2),
    caught(tr.save, tmp / "steps", tree, step=INDEX, timeout=2),
]
tr.save(tmp / "together", tree)  # the processes are in step again
sync("before")
if jax.process_index() == 0:
    begun = time.monotonic()
    errors.append(caught(tr.save, tmp / "guarded", tree, timeout=2))
    errors.append(time.monotonic() - begun)
    errors.append(caught(tr.save, tmp / "own", tree, processes="this"))
    errors.append(tr.verify(tmp / "own").ok)
report([errors, sorted(p.name for p in tmp.iterdir() if p.is_dir())])
sync("after")
"""
    results = run_job(tmp_path, body, processes=2)
    for result in results:
        errors, listed = result.report
        assert [kind for kind, _ in errors[:2]] == ["PeerError"] * 2
        assert "not in this call; its last is save(" in errors[0][1] and "step=" in errors[1][1]
        assert "together" in listed
        assert not {"name-0", "name-1", "steps", "guarded"} & set(listed)
    kind, text = results[0].report[0][2]
    assert kind == "PeerError" and "process 1 (not in this call" in text and "process_index() == 0" in text
    assert results[0].report[0][3] < 10  # A bound, not a measurement: the call must end.
    assert results[0].report[0][4:] == [None, True]


@pytest.mark.rare
@pytest.mark.slow
def test_a_file_system_that_is_not_shared_is_found_out(tmp_path: pathlib.Path) -> None:
    """A save fails if the processes see different file systems at the path."""
    body = """
class Elsewhere(stores.posix.Disk):  # process 1 sees different files under the same names
    def stat(self, path):
        return super().stat(path.replace("/c", "/other").replace("/.c.", "/.other."))
if INDEX == 1:
    stores.register(stores.Filesystem(Elsewhere()))
tree = {"x": np.ones(3), "w": put(np.ones((4, 4)), P("x"))}
report([caught(tr.save, tmp / "c", tree, format=f, timeout=4) for f in ("treering", "orbax", "t5x", "levanter")])
"""
    for result in run_job(tmp_path, body, processes=2):
        for kind, text in result.report:
            assert kind == "SaveError" and "file system that all processes share" in text
    assert sorted(os.listdir(tmp_path)) == ["report-0.json", "report-1.json"]


@pytest.mark.slow
def test_stale_network_listing_is_read_again(tmp_path: pathlib.Path) -> None:
    """A file that a stale cache reports as missing is looked up again.

    NFS caches attributes like this. The disk is a double, because real NFS needs two hosts.
    """
    body = """
class Caching(stores.posix.Disk):  # a missing file stays missing until its directory is listed
    def __init__(self):
        self.missing = set()
    def stat(self, path):
        found = super().stat(path)
        if found is None or path in self.missing or any(path.startswith(one + "/") for one in self.missing):
            if found is None:
                self.missing.add(path)
            return None
        return found
    def list(self, path):
        if any(path == one or path.startswith(one + "/") for one in self.missing):
            return []
        names = super().list(path)
        self.missing = {one for one in self.missing if os.path.dirname(one) != path}
        return names
if INDEX == 1:
    stores.register(stores.Filesystem(Caching()))
for path in ("deep", "deep/er", "deep/er/c", "run", "run/step-00000001", "run/step-00000002"):
    stores.get("").stat(str(tmp / path))
    stores.get("").stat(str(tmp / path / "treering.json"))
sync("looked")
errors = [caught(tr.save, tmp / "deep/er/c", {"x": np.ones(3), "w": put(np.arange(8, dtype=np.float32), P("x"))})]
with tr.Checkpointer(tmp / "run", keep=tr.keep.last(1)) as ckpts:
    for step in (1, 2):
        errors.append(caught(ckpts.save, step, {"n": step, "w": put(np.arange(8, dtype=np.float32) + step, P("x"))}))
        errors.append(caught(ckpts.wait))
    if INDEX == 1:  # the cache is stale once more
        stores.get("").disk.missing |= {str(tmp / "run/step-00000002"), str(tmp / "run/step-00000002/treering.json")}
    back = ckpts.restore({"n": 0, "w": put(np.zeros(8, np.float32), P("x"))})
    report([errors, ckpts.restored_step, back["n"], same(back["w"], np.arange(8, dtype=np.float32) + 2)])
"""
    for result in run_job(tmp_path, body, processes=2):
        assert result.report == [[None] * 5, 2, 2, True]


@pytest.mark.slow
def test_an_error_in_one_process_is_everybodys(tmp_path: pathlib.Path) -> None:
    """All processes raise the error of a process that fails."""
    body = """
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x")), "n": np.ones(3)}
tr.save(tmp / "c", tree)
class Full(stores.posix.Disk):
    def preallocate(self, fd, size):
        raise OSError(28, "No space left on device")
usual = stores.get("")
found = []
for who in range(COUNT):
    for overwrite in (False, True):
        stores.register(stores.Filesystem(Full()) if INDEX == who else usual)
        found.append(caught(tr.save, tmp / ("c" if overwrite else "d"), tree, overwrite=overwrite))
stores.register(usual)
found.append(caught(tr.save, tmp / "c", tree))
sync("here")
found.append(sorted(p.name for p in tmp.iterdir() if p.is_dir()))
report(found)
"""
    for index, result in enumerate(run_job(tmp_path, body, processes=3)):
        *errors, exists, listed = result.report
        for n, (kind, text) in enumerate(errors):
            assert kind == "SaveError" and "No space left" in text
            assert index == n // 2 or f"process {n // 2}" in text
        assert exists[0] == "ExistsError" and listed == ["c"]
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 4


@pytest.mark.slow
def test_who_finds_the_directory_gone_waits_for_the_reason(tmp_path: pathlib.Path) -> None:
    """A process that finds the directory gone waits for the error of process 0, which removes its files first."""
    body = """
class Full(stores.posix.Disk):
    def create(self, path, *mode):
        if "arrays-" in path:
            time.sleep(1)  # process 1 will make its file soon
            raise OSError(28, "No space left on device")
        return super().create(path, *mode)
    def remove_dir(self, path):
        super().remove_dir(path)
        time.sleep(1)
class Late(stores.posix.Disk):
    def create(self, path, *mode):
        while os.path.exists(tmp / "c"):
            time.sleep(0.01)
        return super().create(path, *mode)
stores.register(stores.Filesystem(Late() if INDEX else Full()))
report(caught(tr.save, tmp / "c", {"x": put(np.ones(1 << 18, np.float32), P("x"))}))
"""
    for result in run_job(tmp_path, body, processes=2):
        kind, text = result.report
        assert kind == "SaveError" and "No space left" in text


POINTS = {
    "planning": ("_processes.assignment", "assign", ""),
    "comparing": ("_processes.consistency", "_digests", ""),
    "creating": ("disk", "create", "arrays-"),
    "writing": ("disk", "write", "arrays-"),
    "syncing": ("disk", "sync", "arrays-"),
    "after writing": ("disk", "sync_dir", "/c"),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", sample_points([*POINTS, "before the commit"], first=1))
def test_a_process_that_dies_is_named_and_costs_nothing(tmp_path: pathlib.Path, point: str) -> None:
    """The error names a dead process, and its files do not stay."""
    module, name, file = POINTS.get(point, ("_processes.coordinator", "MultiProcessCall.gather_and_decide", ""))
    body = """
import importlib
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x")), "n": np.arange(5_000_000, dtype=np.int32)}
tr.save(tmp / "b", tree)
sync("saved")
if INDEX == 2:
    if MODULE == "disk":
        die_at(NAME, FILE)
    else:
        owner = importlib.import_module(f"treering.{MODULE}")
        *path, last = NAME.split(".")
        for part in path:
            owner = getattr(owner, part)
        usual, calls = getattr(owner, last), []
        def dead(*args, **options):
            calls.append(1)
            if last != "gather_and_decide" or len(calls) == 2:  # the second one reports that all is written
                time.sleep(0.5)  # its peers then have seen it in this call
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*args, **options)
        setattr(owner, last, dead)
begun = time.monotonic()
error = caught(tr.save, tmp / "c", tree, timeout=3)
report([error, time.monotonic() - begun, os.path.exists(tmp / "c/treering.json"), caught(tr.restore, tmp / "c")])
while INDEX == 0 and not (tmp / "report-1.json").exists():
    time.sleep(0.1)
time.sleep(1 - INDEX)  # JAX ends the others when process 0 is gone
"""
    names = {"MODULE": module, "NAME": name, "FILE": file}
    results = run_job(tmp_path, body, processes=3, recoverable=True, expect={2: KILLED}, **names)
    for result in results[:2]:
        (kind, text), seconds, committed, _ = result.report
        assert kind == "PeerError" and "process 2" in text and seconds < 40 and not committed
    assert "last seen" in results[0].report[0][1]
    assert tr.verify(tmp_path / "b").ok and (tr.restore(tmp_path / "b")["n"] == np.arange(5_000_000)).all()
    body = """
back = tr.restore(tmp / "b", sharding=lambda path, shape, dtype: NamedSharding(Mesh(devices, ("x",)), P("x")))
assert same(back["x"], np.arange(3 << 18, dtype=np.float32))
tr.save(tmp / "c", {"x": back["x"], "n": np.arange(7)})
"""
    run_job(tmp_path, body, processes=2)
    # The files of the dead process are gone.
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", sample_points(["create arrays-", "write arrays-", "sync tmp", "link tmp", "unlink tmp"], first=3)
)
def test_when_process_0_dies_there_is_no_half_checkpoint(tmp_path: pathlib.Path, point: str) -> None:
    body = """
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x")), "n": np.arange(5_000_000, dtype=np.int32)}
tr.save(tmp / "b", tree)
sync("saved")
if INDEX == 0:
    die_at(*POINT.split())
tr.save(tmp / "c", tree, timeout=3)
"""
    # JAX decides how the other process then ends.
    results = run_job(tmp_path, body, processes=2, expect={0: KILLED, 1: None}, POINT=point)
    assert results[1].code != 0
    committed = (tmp_path / "c" / "treering.json").exists()
    assert committed == (point == "unlink tmp")
    if committed:
        assert tr.verify(tmp_path / "c").ok
    assert tr.verify(tmp_path / "b").ok
    body = 'tr.save(tmp / "c", {"n": np.arange(7)}, overwrite=True)'
    run_job(tmp_path, body, processes=2)
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 2


def test_a_forked_child_of_a_process_of_the_job_is_none_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child cannot make calls of its parent's job, but can join a job of its own (see
    `fault_injection.peers`).
    """
    monkeypatch.setattr(coordinator, "_inherited_client", None)
    monkeypatch.setattr(coordinator.liveness, "start_signs", lambda *job: History())  # this fake job has no store
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(distributed.global_state, "process_id", 0)
    monkeypatch.setattr(distributed.global_state, "client", object())
    assert isinstance(coordinator.begin_call("save"), coordinator.MultiProcessCall)
    coordinator.forget_after_fork()
    with pytest.raises(tr.errors.UnsupportedError, match="forked child"):
        coordinator.begin_call("save")
    assert isinstance(coordinator.begin_call("save", processes="this"), coordinator.SingleProcessCall)
    monkeypatch.setattr(distributed.global_state, "client", object())
    assert isinstance(coordinator.begin_call("save"), coordinator.MultiProcessCall)


@pytest.mark.slow
def test_a_run_of_several_processes(tmp_path: pathlib.Path) -> None:
    body = """
def init():
    return {"w": put(np.zeros((8, 4), np.float32), P("x")), "n": 0}
where = NamedSharding(Mesh(devices, ("x",)), P("x"))
template = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=where), "n": 0}
def advance(tree):
    return {"w": jax.jit(lambda x: x + 1)(tree["w"]), "n": tree["n"] + 1}
with tr.Checkpointer(tmp / "run", save_every=2, keep=tr.keep.last(2) | tr.keep.every(6), timeout=10) as ckpts:
    tree, step = {"w": put(np.zeros((8, 4), np.float32), P("x")), "n": 0}, 0
    for step in range(1, 13):
        tree = advance(tree)
        ckpts.save(step, tree, metrics={"loss": 1 / step})
    ckpts.wait()
    steps = ckpts.steps
    exists = caught(ckpts.save, 12, tree)
    skipped = ckpts.save(12, tree, on_exists="skip")
    ckpts.pin(10)
    ckpts.save(14, tree); ckpts.save(16, tree); ckpts.wait()
    if INDEX == 1: time.sleep(1)  # no step may be deleted before all processes made the call
    pinned = ckpts.steps
    undeletable = caught(ckpts.delete, 10)
    ckpts.delete(16)
    sync("deleted")
    back = ckpts.restore(template)
    assert same(back["w"], np.full((8, 4), 12, np.float32)) and back["n"] == 12 and ckpts.restored_step == 14
    sync("restored")
    if INDEX == 1:  # only process 1 reads the damaged bytes
        manifest = json.loads((tmp / "run/step-00000014/treering.json").read_bytes())
        (file,) = (tmp / "run/step-00000014").glob("*-00001-of-*")
        file.chmod(0o644)
        data = bytearray(file.read_bytes()); data[-1] ^= 1; file.write_bytes(data)
    sync("damaged")
    fallen = ckpts.restore(template)
    after = ckpts.restored_step
with tr.Checkpointer(tmp / "run", timeout=10) as ckpts:
    tree, step = ckpts.restore_or_init(lambda: {"w": jnp.zeros((8, 4)), "n": 0}, sharding={"w": where, "n": None})
    assert same(tree["w"], np.full((8, 4), 12, np.float32))
timed = tr.Checkpointer(tmp / "timed", save_every=__import__("datetime").timedelta(hours=INDEX), timeout=10)
with timed:
    first = timed.save(1, {"n": 1}) is not None
report([steps, exists, skipped, pinned, undeletable, after, step, first])
"""
    results = run_job(tmp_path, body, processes=2, recoverable=False)
    for result in results:
        steps, exists, skipped, pinned, undeletable, after, step, first = result.report
        assert steps == [2, 6, 10, 12] and exists[0] == "ExistsError" and skipped is None
        assert pinned == [2, 6, 10, 12, 14, 16]
        assert undeletable[0] == "MismatchError" and after == step == 12
        assert first  # Process 0 decides, and its interval is over.
    assert tr.steps(tmp_path / "timed") == [1]


@pytest.mark.slow
def test_failure_of_one_process_is_raised_by_all(tmp_path: pathlib.Path) -> None:
    body = """
log = []
with tr.Checkpointer(tmp / "run", timeout=10) as ckpts:
    for step in range(1, 8):
        bad = (INDEX, step) in ((0, 2), (1, 5))
        log.append(caught(ckpts.save, step, {"n": step}, metrics={"loss": "oops" if bad else 1.0}))
        time.sleep(0.2)
    ckpts.wait()
    steps = ckpts.steps
skipped = caught(tr.save_async, tmp / "run", {"n": 1})
later = []
for n in range(3):
    time.sleep(0.3)
    later.append(caught(tr.save_async, tmp / f"free-{n}", {"n": n}))
report([[error and error[0] for error in log], steps, skipped, [error and error[0] for error in later]])
sync("done")
"""
    reports = [result.report for result in run_job(tmp_path, body, processes=2)]
    failed = [[step for step in range(1, 8) if log[step - 1]] for log, *_ in reports]
    # A process raises its own error at once, and again when all raise it after process 0 has learned of it.
    last = failed[0][-1]
    assert failed == [[2, 3, last], [3, 5, last]] and last in (6, 7)
    for _, steps, skipped, later in reports:
        assert steps == sorted({1, 4, 6, 7} - {last}) and skipped is None and later == ["ExistsError", None, None]


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "where", "call"),
    sample_points(
        itertools.product([0, 1], ["between the calls", "while it writes"], ["Checkpointer", "save"]), first=1
    ),
)
def test_processes_meet_again_after_one_was_stopped(
    tmp_path: pathlib.Path, stopped: int, where: str, call: str
) -> None:
    """After one process was suspended for longer than the timeout, all make the same calls again.

    SIGSTOP stands for a debugger or a suspended machine. The loop has no collectives and continues after errors.
    """
    body = """
import subprocess, threading
begun = time.monotonic()
def stand_still():
    if not still:
        still.append(1)
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}; sleep 14; kill -CONT {os.getpid()}"])
        time.sleep(1)
class Standing(stores.posix.Disk):
    def sync(self, fd):
        if at == 4 and INDEX == STOPPED and WHERE == "while it writes":
            stand_still()
        super().sync(fd)
stores.register(stores.Filesystem(Standing()))
still, log, at = [], [], 0
ckpts = tr.Checkpointer(tmp / "run", timeout=4)
value = np.arange(66.0)
while time.monotonic() - begun < 60 and len(log) < 120:
    at += 1
    if at == 4 and INDEX == STOPPED and WHERE == "between the calls":
        stand_still()
    time.sleep(0.2)
    tree = {"w": put(value + at, P("x")), "n": at}
    if CALL == "save":
        error = caught(lambda: tr.save_async(tmp / f"run/step-{at}", tree, step=at, timeout=4).result())
    else:
        error = caught(ckpts.save, at, tree)
    log.append(error)
    if at >= 40 and [e for e in log[-8:] if e] == []:
        break
last = at
caught(ckpts.wait)
caught(ckpts.close)
report([last, [[n, *e] for n, e in enumerate(log, 1) if e]])
"""
    results = run_job(tmp_path, body, processes=3, STOPPED=stopped, WHERE=where, CALL=call)
    reports = [result.report for result in results]
    missed = [{step for step, *_ in errors} for _, errors in reports]
    assert any(missed), "the time-out was passed"
    assert {last for last, _ in reports} == {40}, reports
    steps = tr.steps(tmp_path / "run")
    assert set(range(33, 41)) <= set(steps) and tr.verify(tmp_path / "run").ok
    for step in steps:
        assert (tr.restore(tmp_path / "run", step=step)["w"] == np.arange(66.0) + step).all()
    for index, (_, errors) in enumerate(reports):  # without an error, no step is missing
        assert {kind for _, kind, _ in errors} <= {"PeerError"}, (index, errors)


@pytest.mark.slow
def test_all_processes_restore_one_and_the_same_checkpoint(tmp_path: pathlib.Path) -> None:
    """All processes restore the same checkpoint, although another job replaces it meanwhile."""
    body = """
import subprocess
from treering._run import step_fallback as _open
where = NamedSharding(Mesh(devices, ("x",)), P("x"))
template = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=where)}
with tr.Checkpointer(tmp / "run", timeout=20) as ckpts:
    ckpts.save(1, {"w": put(np.zeros(8, np.float32), P("x"))})
usual, calls = _open.open_in_store, []
def late(disk, path, *rest):
    if INDEX == 1 and not calls:
        calls.append(1)
        time.sleep(1)  # process 0 has read the old one by now
        code = "import sys, numpy as np, treering as tr; tr.save(sys.argv[1], {'w': np.ones(8, 'f4')}, overwrite=True)"
        subprocess.run([sys.executable, "-c", code, str(tmp / "run/step-00000001")], check=True)
    return usual(disk, path, *rest)
_open.open_in_store = late
back = ckpts.restore(template)
report([np.asarray(shard.data).tolist() for shard in back["w"].addressable_shards])
sync("done")
"""
    found = [result.report for result in run_job(tmp_path, body, processes=2)]
    assert found == [[[1.0, 1.0], [1.0, 1.0]]] * 2


@pytest.mark.slow
def test_committed_step_keeps_files_if_sync_is_in_doubt(tmp_path: pathlib.Path) -> None:
    """A checkpoint in place keeps all files if its sync failed.

    Its durability is in doubt, and all processes raise the error.
    """
    body = """
from treering._processes import coordinator as _processes
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x"))}
tr.save(tmp / "c", tree)
class Failing(stores.posix.Disk):
    renamed = False
    def rename(self, old, new):
        super().rename(old, new)
        self.renamed = True
    def sync_dir(self, path):
        if self.renamed:
            raise OSError(5, "Input/output error")
        super().sync_dir(path)
if INDEX == 0:
    stores.register(stores.Filesystem(Failing()))
else:  # process 0 answers and fails between its two requests
    check = _processes.MultiProcessCall._check
    _processes.MultiProcessCall._check = lambda self, awaited: (time.sleep(2), check(self, awaited))
report(caught(tr.save, tmp / "c", {"x": put(np.ones(3 << 18, np.float32), P("x"))}, overwrite=True))
sync("done")
"""
    for result in run_job(tmp_path, body, processes=2):
        kind, text = result.report
        assert kind == "SaveError" and "the new checkpoint is in place" in text
    assert tr.verify(tmp_path / "c").ok and (tr.restore(tmp_path / "c")["x"] == 1).all()


@pytest.mark.slow
def test_files_stay_if_a_commit_is_in_doubt(tmp_path: pathlib.Path) -> None:
    """A process whose last message may have arrived keeps its files, because the commit is in doubt."""
    body = """
from treering._processes import coordinator as _processes
from treering.errors import PeerError
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x"))}
tr.save(tmp / "c", tree)
if INDEX == 1:
    put_usually, words = _processes.MultiProcessCall._put_value, []
    def half(self, key, value):
        put_usually(self, key, value)
        words.append(key)
        if len(words) == 2:  # it reports that all is written
            raise PeerError("the answer was lost")
    _processes.MultiProcessCall._put_value = half
report(caught(tr.save, tmp / "c", {"x": put(np.ones(3 << 18, np.float32), P("x"))}, overwrite=True, timeout=5))
sync("done")
"""
    found = [result.report for result in run_job(tmp_path, body, processes=2)]
    assert found[0] is None and found[1] is not None
    assert tr.verify(tmp_path / "c").ok and (tr.restore(tmp_path / "c")["x"] == 1).all()


@pytest.mark.slow
def test_files_of_stopped_process_are_not_removed(tmp_path: pathlib.Path) -> None:
    """Another job keeps the array files that a suspended process 0 is about to commit.

    They include those of a dead peer, which no process locks any more.
    """
    body = """
import subprocess
tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x"))}
tr.save(tmp / "c", tree)
class Standing(stores.posix.Disk):
    def rename(self, old, new):
        os.kill(OTHER, signal.SIGKILL)  # now only this process holds a lock
        code = "import sys, numpy as np, treering as tr; tr.save(sys.argv[1], {'x': np.ones(4)}, overwrite=True)"
        subprocess.run([sys.executable, "-c", code, str(tmp / "c")], check=True)
        super().rename(old, new)
if INDEX == 1:
    (tmp / "pid").write_text(str(os.getpid()))
sync("pid")
OTHER = int((tmp / "pid").read_text())
if INDEX == 0:
    stores.register(stores.Filesystem(Standing()))
report(caught(tr.save, tmp / "c", {"x": put(np.zeros(3 << 18, np.float32), P("x"))}, overwrite=True, timeout=5))
"""
    results = run_job(tmp_path, body, processes=2, recoverable=True, expect={1: KILLED})
    assert results[0].report is None
    assert tr.verify(tmp_path / "c").ok and tr.restore(tmp_path / "c")["x"].shape == (3 << 18,)
