"""The bodies of the jobs in tests/processes/test_coordinator.py."""

import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import COUNT, INDEX, caught, devices, die_at, mesh, put, report, same, sync, tmp
from treering import stores

big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
half = devices[len(devices) // 2 :]
values = {
    "rows": big,
    "columns": big + 1,
    "replicated": big + 2,
    "grid": big + 3,
    "scalar": np.float32(2.5),
    "empty": big[:0],
    "elsewhere": big[:8] + 4,
    "alone": big[:9] + 5,
    "bf16": (big[:64] + 6).astype(jnp.bfloat16),
    "keys": np.arange(32, dtype=np.uint32).reshape(16, 2),
}


def state():
    n, own = len(devices), [d for d in devices if d.process_index == COUNT - 1]
    return {
        "rows": put(values["rows"], P("x")),
        "columns": put(values["columns"], P(None, "x")),
        "replicated": put(values["replicated"]),
        "grid": put(values["grid"], P("y", "x"), mesh(2, n // 2)),
        "scalar": put(values["scalar"]),
        "empty": put(values["empty"], P(None, "x")),
        "elsewhere": put(values["elsewhere"], P("x"), Mesh(half, ("x",))),
        "alone": put(values["alone"], P(), Mesh(np.array(own), ("x",))),
        "bf16": put(values["bf16"], P("x")),
        "keys": jax.random.wrap_key_data(put(values["keys"], P("x"))),
        "here": jnp.arange(5.0),
        "numpy": np.arange(3_000_000, dtype=np.int32),
        "step": 7,
        "name": "run",
        "none": None,
    }


def what_several_processes_save_together_restores_anywhere() -> None:
    tree = state()
    found = tr.save(tmp / "c", tree, step=7, metrics={"loss": tree["scalar"]})
    pending = tr.save_async(tmp / "again", tree)
    tree["numpy"] += 1
    pending.result()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, tree
    )
    for name in ("c", "again"):
        back = tr.restore(tmp / name, like)
        back["keys"], kind = jax.random.key_data(back["keys"]), back["keys"]
        assert kind.sharding == tree["keys"].sharding and kind.dtype == tree["keys"].dtype
        assert all(same(back[key], value) for key, value in values.items())
        assert all(back[key].sharding == tree[key].sharding for key in values if key != "keys")
        assert (back["numpy"] == np.arange(3_000_000)).all() and back["step"] == 7 and back["name"] == "run"
    report([found.nbytes, found.step])


def others_restore_what_several_processes_saved() -> None:
    back = tr.restore(
        tmp / "c",
        sharding=lambda path, shape, dtype: NamedSharding(
            Mesh(devices, ("x",)), P("x") if shape and shape[0] % len(devices) == 0 and path != "keys" else P()
        ),
    )
    back["keys"] = jax.random.key_data(back["keys"])
    report(all(same(back[key], value) for key, value in values.items()))


def trees_that_differ_between_processes_are_refused() -> None:
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


def calls_that_differ_and_guards_are_refused() -> None:
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


def a_file_system_that_is_not_shared_is_found_out() -> None:
    class Elsewhere(stores.posix.Disk):  # process 1 sees different files under the same names
        def stat(self, path):
            return super().stat(path.replace("/c", "/other").replace("/.c.", "/.other."))

    if INDEX == 1:
        stores.register(stores.Filesystem(Elsewhere()))
    tree = {"x": np.ones(3), "w": put(np.ones((4, 4)), P("x"))}
    report([caught(tr.save, tmp / "c", tree, format=f, timeout=4) for f in ("treering", "orbax", "t5x", "levanter")])


def stale_network_listing_is_read_again() -> None:
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
            errors.append(
                caught(ckpts.save, step, {"n": step, "w": put(np.arange(8, dtype=np.float32) + step, P("x"))})
            )
            errors.append(caught(ckpts.wait))
        if INDEX == 1:  # the cache is stale once more
            stores.get("").disk.missing |= {
                str(tmp / "run/step-00000002"),
                str(tmp / "run/step-00000002/treering.json"),
            }
        back = ckpts.restore({"n": 0, "w": put(np.zeros(8, np.float32), P("x"))})
        report([errors, ckpts.restored_step, back["n"], same(back["w"], np.arange(8, dtype=np.float32) + 2)])


def an_error_in_one_process_is_everybodys() -> None:
    tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x")), "n": np.ones(3)}
    tr.save(tmp / "c", tree)

    class Full(stores.posix.Disk):
        def preallocate(self, fd, size):
            raise OSError(28, "No space left on device")

    usual = stores.get("")
    found = []
    for who in range(COUNT):
        for overwrite in (False, True):
            stores.register(stores.Filesystem(Full()) if who == INDEX else usual)
            found.append(caught(tr.save, tmp / ("c" if overwrite else "d"), tree, overwrite=overwrite))
    stores.register(usual)
    found.append(caught(tr.save, tmp / "c", tree))
    sync("here")
    found.append(sorted(p.name for p in tmp.iterdir() if p.is_dir()))
    report(found)


def who_finds_the_directory_gone_waits_for_the_reason() -> None:
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


def a_process_that_dies_is_named_and_costs_nothing(FILE: Any, MODULE: Any, NAME: Any) -> None:
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


def a_process_that_dies_is_named_and_costs_nothing_2() -> None:
    back = tr.restore(tmp / "b", sharding=lambda path, shape, dtype: NamedSharding(Mesh(devices, ("x",)), P("x")))
    assert same(back["x"], np.arange(3 << 18, dtype=np.float32))
    tr.save(tmp / "c", {"x": back["x"], "n": np.arange(7)})


def when_process_0_dies_there_is_no_half_checkpoint(POINT: Any) -> None:
    tree = {"x": put(np.arange(3 << 18, dtype=np.float32), P("x")), "n": np.arange(5_000_000, dtype=np.int32)}
    tr.save(tmp / "b", tree)
    sync("saved")
    if INDEX == 0:
        die_at(*POINT.split())
    tr.save(tmp / "c", tree, timeout=3)


def a_run_of_several_processes() -> None:
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
        ckpts.save(14, tree)
        ckpts.save(16, tree)
        ckpts.wait()
        if INDEX == 1:
            time.sleep(1)  # no step may be deleted before all processes made the call
        pinned = ckpts.steps
        undeletable = caught(ckpts.delete, 10)
        ckpts.delete(16)
        sync("deleted")
        back = ckpts.restore(template)
        assert same(back["w"], np.full((8, 4), 12, np.float32)) and back["n"] == 12 and ckpts.restored_step == 14
        sync("restored")
        if INDEX == 1:  # only process 1 reads the damaged bytes
            (file,) = (tmp / "run/step-00000014").glob("*-00001-of-*")
            file.chmod(0o644)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        sync("damaged")
        ckpts.restore(template)
        after = ckpts.restored_step
    with tr.Checkpointer(tmp / "run", timeout=10) as ckpts:
        tree, step = ckpts.restore_or_init(lambda: {"w": jnp.zeros((8, 4)), "n": 0}, sharding={"w": where, "n": None})
        assert same(tree["w"], np.full((8, 4), 12, np.float32))
    timed = tr.Checkpointer(tmp / "timed", save_every=__import__("datetime").timedelta(hours=INDEX), timeout=10)
    with timed:
        first = timed.save(1, {"n": 1}) is not None
    report([steps, exists, skipped, pinned, undeletable, after, step, first])


def failure_of_one_process_is_raised_by_all() -> None:
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


def processes_meet_again_after_one_was_stopped(CALL: Any, STOPPED: Any, WHERE: Any) -> None:
    import subprocess

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
            error = caught(
                lambda at=at, tree=tree: tr.save_async(tmp / f"run/step-{at}", tree, step=at, timeout=4).result()
            )
        else:
            error = caught(ckpts.save, at, tree)
        log.append(error)
        if at >= 40 and [e for e in log[-8:] if e] == []:
            break
    last = at
    caught(ckpts.wait)
    caught(ckpts.close)
    report([last, [[n, *e] for n, e in enumerate(log, 1) if e]])


def all_processes_restore_one_and_the_same_checkpoint() -> None:
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
            code = (
                "import sys, numpy as np, treering as tr; tr.save(sys.argv[1], {'w': np.ones(8, 'f4')}, overwrite=True)"
            )
            subprocess.run([sys.executable, "-c", code, str(tmp / "run/step-00000001")], check=True)
        return usual(disk, path, *rest)

    _open.open_in_store = late
    back = ckpts.restore(template)
    report([np.asarray(shard.data).tolist() for shard in back["w"].addressable_shards])
    sync("done")


def committed_step_keeps_files_if_sync_is_in_doubt() -> None:
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


def files_stay_if_a_commit_is_in_doubt() -> None:
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


def files_of_stopped_process_are_not_removed() -> None:
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


def several_processes_save_with_rules_and_in_any_format(FORMATS: Any) -> None:
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
    for version in range(3):
        weights = {**tree, "numpy": tree["numpy"] + version}
        tr.save(tmp / f"policy/weight_v{version:06d}", weights, format="slime", rules=[*keys, *in_place])
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
