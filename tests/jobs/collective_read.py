"""The bodies of the jobs in tests/restore/test_collective_read.py."""

import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import COUNT, INDEX, caught, devices, mesh, put, report, same, sync, tmp
from treering import stores
from treering.testing._doubles import CountingDisk


class NetworkDisk(CountingDisk):
    def is_local(self, fd):
        return False


disk = NetworkDisk()
stores.register(stores.Filesystem(disk))
rng = np.random.default_rng(7)


def bits(*shape, dtype="float32"):
    """Every bit pattern that a dtype has: NaNs with payloads and -0.0 among them."""
    dtype = np.dtype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def on(mesh, spec, value):
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))


tree = {
    "zero": np.float32(-0.0),
    "half": bits(24, 40, dtype=ml_dtypes.bfloat16),
    "eighth": bits(48, 8, dtype="float8_e4m3fn"),
    "small": rng.integers(-8, 8, (24, 24)).astype(ml_dtypes.int4),
    "flags": rng.integers(0, 2, (48,)).astype(bool),
    "complex": bits(24, 3, dtype="complex64"),
    "wide": bits(24, 24000),
    "tall": bits(48000, 12),
    "none": np.zeros((0, 3), np.float32),
    "odd": bits(7, 11, 13),
    "text": "as it is",
    "count": 7,
}


def where(mesh, *axes):
    """Along these axes where they fit an array, else everywhere."""

    def sharding(path, shape, dtype):
        sizes = [1 if axis is None else mesh.shape[axis] for axis in axes]
        fits = len(shape) >= len(axes) and all(n % size == 0 for n, size in zip(shape, sizes)) and np.prod(shape)
        return NamedSharding(mesh, P(*axes) if fits else P())

    return sharding


def every_bit_arrives_wherever_it_goes() -> None:
    sharded = {
        name: put(value, P("x"), mesh(6)) if name in ("wide", "tall", "half") else value for name, value in tree.items()
    }
    sharded["key"] = jax.random.split(jax.random.key(5), 24)
    sharded["zero"] = jnp.float32(-0.0)
    tr.save(tmp / "sharded", sharded)
    if INDEX == 0:
        tr.save(tmp / "alone", {**tree, "key": jax.random.split(jax.random.key(5), 24)}, processes="this")
    sync("saved")
    backwards = Mesh(devices[::-1].reshape(2, 3), ("x", "y"))
    everywhere = {
        "replicated": where(mesh(3, 2)),
        "rows": where(mesh(6), "x"),
        "columns": where(mesh(6), None, "x"),
        "both": where(mesh(3, 2), "x", "y"),
        "replicas": where(backwards, "y"),
        "others": where(backwards, "x"),
        "few": where(mesh(2, 2), "x", "y"),  # the last process has no part of it
        "here": None,
    }
    wrong = []

    def check(name, found):
        for path, value in found.items():
            if path == "key":
                value, right = jax.random.key_data(value), jax.random.key_data(sharded["key"])
            else:
                right = tree[path]
            if not isinstance(value, jax.Array):
                good = value == right if isinstance(right, (int, str)) else value.tobytes() == alone[path].tobytes()
            else:
                good = same(value, right)
            if not good:
                wrong.append([name, path])

    alone = tr.restore(tmp / "alone")
    assert all(alone[name].tobytes() == tree[name].tobytes() for name in ("wide", "half", "odd"))
    options = [{}, {"memory_limit": 1 << 20, "progress": True}]
    for which, saved in enumerate(("sharded", "alone")):
        entries = tr.open(tmp / saved).abstract()
        for number, (name, sharding) in enumerate(everywhere.items()):
            some = options[(which + number) % 2]  # each with each of the two others, not all three with one another
            check([saved, name], tr.restore(tmp / saved, entries, sharding=sharding, read="once", **some))
        check([saved, "NumPy"], tr.open(tmp / saved).restore(read="once"))
    rules = [tr.rules.transpose("wide", (1, 0)), tr.rules.cast("eighth", "float32"), tr.rules.rename("half", "named")]
    turned = tr.restore(tmp / "sharded", sharding=where(mesh(3, 2)), rules=rules, read="once")
    if not same(turned["wide"], tree["wide"].T) or not same(turned["named"], tree["half"]):
        wrong.append("rules")
    report(wrong)


def files_of_other_libraries_are_read_once() -> None:
    tree = {"wide": bits(64, 24000), "tall": bits(12000, 16), "half": bits(1 << 20, dtype=np.float16), "n": np.int32(7)}
    ours = [("safetensors", ".safetensors"), ("flax", ".msgpack"), ("fjformer", ".stream"), ("equinox", ".eqx")]
    found = {}
    for format, suffix in [*ours, ("orbax", ""), ("t5x", "")]:
        path = str(tmp / f"{format}{suffix}")
        if INDEX == 0:
            tr.save(path, tree, format=format, processes="this")
        sync(format)
        for name, sharding in (("rows", where(mesh(2), "x")), ("columns", where(mesh(2), None, "x"))):
            shaped = {key: (value.shape, value.dtype) for key, value in tree.items()}
            like = {key: jax.ShapeDtypeStruct(*of, sharding=sharding(key, *of)) for key, of in shaped.items()}
            for read in ("each", "once"):
                disk.nbytes = 0
                error, restored = None, {}
                try:
                    restored = tr.restore(path, like, read=read)
                except tr.errors.UnsupportedError as caught:
                    error = str(caught)
                right = all(same(restored[key], value) for key, value in tree.items()) if restored else None
                found[f"{format} {name} {read}"] = [disk.nbytes, right, error]
    rules = [tr.rules.transpose("wide", (1, 0)), tr.rules.rename("tall", "named"), tr.rules.cast("half", "float32")]
    turned = tr.restore(tmp / "safetensors.safetensors", sharding=where(mesh(2)), rules=rules, read="once")
    assert same(turned["wide"], tree["wide"].T) and same(turned["named"], tree["tall"])
    report([sum(value.nbytes for value in tree.values()), found])


def messages_stay_within_a_quarter_of_the_memory_limit() -> None:
    from treering._pytree import devices

    sent, came = [], []
    exchange = devices.exchange

    def counted(messages, *rest):
        found = exchange(messages, *rest)
        sent.append(messages.nbytes)
        came.append(found.nbytes)
        return found

    devices.exchange = counted
    value = bits(8 << 20, 4)[:, 0].copy()
    if INDEX == 0:
        tr.save(tmp / "saved", [value], processes="this")
    sync("saved")
    found = []
    like = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh(4), P()))]
    for limit in (None, 16 << 20):
        sent.clear(), came.clear()
        (restored,) = tr.restore(tmp / "saved", like, read="once", memory_limit=limit)
        assert same(restored, value)
        found.append([max(sent) + max(came), len(came)])
    report(found)


def the_job_reads_every_byte_once() -> None:
    rows, everywhere = NamedSharding(mesh(COUNT), P("x")), NamedSharding(mesh(COUNT), P())
    sizes = [(1024, 4096), (1024,), (64, 64), (8 * 87, 517), (8 * 13,)] * (3 * COUNT)
    tree = [np.full(size, n, np.float32) for n, size in enumerate(sizes)]
    tr.save(tmp / "sharded", [put(value, P("x"), mesh(COUNT)) for value in tree])
    if INDEX == 0:
        tr.save(tmp / "alone", tree, processes="this")
    sync("saved")

    def read_by_system():
        return int(open("/proc/self/io").readline().split()[1])

    found = {}
    for saved in ("sharded", "alone"):
        for name, sharding in (("rows", rows), ("everywhere", everywhere)):
            like = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) for value in tree]
            for read in ("each", "once"):
                before, disk.nbytes = read_by_system(), 0
                restored = tr.restore(tmp / saved, like, read=read)
                found[f"{saved} {name} {read}"] = [disk.nbytes, read_by_system() - before]
                assert all(map(same, restored, tree))
                del restored
    report([sum(value.nbytes for value in tree), found])


def checkpointer_reads_network_files_once() -> None:
    value = bits(1024, 4096)
    with tr.Checkpointer(tmp / "run") as ckpt:
        ckpt.save(1, {"w": put(value)})
    found = {}
    for on_network in (True, False):
        NetworkDisk.is_local = (lambda self, fd: False) if on_network else (lambda self, fd: True)
        for read in (None, "each", "once"):
            with tr.Checkpointer(tmp / "run") as ckpt:
                disk.nbytes = 0
                restored = ckpt.restore({"w": put(value)}, read=read)
                found[f"{on_network} {read}"] = [disk.nbytes / value.nbytes, same(restored["w"], value)]
    report(found)


def damage_that_one_process_reads_is_known_to_all() -> None:
    value = bits(2048, 4096)
    with tr.Checkpointer(tmp / "run") as ckpt:
        ckpt.save(1, {"w": put(value)})
        ckpt.save(2, {"w": put(value + 1)})
    sync("saved")

    def read(self, fd, buffer, offset):
        found = CountingDisk.read(self, fd, buffer, offset)
        if INDEX == 1 and os.path.basename(ckpt.path(2)) in os.readlink(f"/proc/self/fd/{fd}") and found > 1 << 19:
            buffer[found // 2] ^= 1
        return found

    NetworkDisk.read = read
    like = {"w": put(value)}
    with tr.Checkpointer(tmp / "run") as ckpt:
        restored = ckpt.restore(like)
        step = ckpt.restored_step
    error = caught(tr.restore, tmp / "run", like, step=2, read="once")
    back = tr.restore(tmp / "run", like, read="once")
    report([step, same(restored["w"], value), same(back["w"], value), error, sorted(os.listdir(tmp / "run"))])


def collective_read_restarts_after_replacement() -> None:
    value = bits(2048, 4096)
    if INDEX == 0:
        tr.save(tmp / "a", {"w": value}, processes="this")
    sync("saved")
    begun = []

    def stat(self, path):
        # After process 1 has read the manifest.
        if INDEX == 1 and not begun and path.endswith(".safetensors"):
            begun.append(path)
            tr.save(tmp / "a", {"w": value + 1}, processes="this", overwrite=True)
        return CountingDisk.stat(self, path)

    NetworkDisk.stat = stat
    found = tr.restore(tmp / "a", {"w": put(value)}, read="once")
    report([same(found["w"], value), same(found["w"], value + 1), len(begun)])


def a_process_that_dies_meanwhile_is_an_error_in_the_others() -> None:
    value = bits(4096, 4096)
    if INDEX == 0:
        tr.save(tmp / "a", {"w": value}, processes="this")
    sync("saved")

    def read(self, fd, buffer, offset):
        if INDEX == 1 and offset > 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return CountingDisk.read(self, fd, buffer, offset)

    NetworkDisk.read = read
    report(caught(tr.restore, tmp / "a", {"w": put(value)}, read="once"))
    while INDEX == 0 and not (tmp / "report-2.json").exists():
        time.sleep(0.1)
    time.sleep(1 if INDEX == 0 else 0)  # JAX ends the others when process 0 is gone


def collective_read_falls_back_or_is_refused() -> None:
    value = bits(512, 4096)
    tr.save(tmp / "a", {"w": put(value), "v": put(value[0])})
    with tr.Checkpointer(tmp / "run") as ckpt:
        ckpt.save(1, {"w": put(value), "v": put(value[0])})
    other = {"w": put(value)} if INDEX == 1 else {"w": put(value), "v": put(value[0])}
    differing = caught(tr.restore, tmp / "a", other, read="once", extra="ignore")
    alone = tr.Checkpointer(tmp / "run").restore(other, extra="ignore")
    jax.config.update("jax_cpu_collectives_implementation", None)
    unable = caught(tr.restore, tmp / "a", {"w": put(value), "v": put(value[0])}, read="once")
    also_alone = tr.Checkpointer(tmp / "run").restore({"w": put(value), "v": put(value[0])})
    nonsense = caught(tr.restore, tmp / "a", {"w": put(value)}, read="twice", extra="ignore")
    report([differing, unable, nonsense, same(alone["w"], value), same(also_alone["w"], value)])


def whatever_is_set_or_differs_nothing_wrong_comes_back() -> None:
    value, other = bits(512, 512), bits(512, 512)
    saved = {"p": {"w": value}, "ema": {"w": other}}
    if INDEX == 0:
        tr.save(tmp / "a", saved, processes="this")
        tr.save(tmp / "a.safetensors", saved, processes="this")
    sync("saved")
    first = INDEX == 0
    like = {"p": {"w": np.zeros_like(value)}, "ema": {"w": put(other)}}

    def good(found):
        return found["p"]["w"].tobytes() == value.tobytes() and same(found["ema"]["w"], other)

    def restored(like=like, path=tmp / "a", **options):
        return good(tr.restore(path, like, read="once", **options))

    found = {}
    with jax.disable_jit():
        found["disable_jit"] = restored()
    with jax.debug_nans(True), jax.transfer_guard("disallow"), jax.enable_x64(True):
        found["settings"] = restored()
    found["progress in one"] = restored(progress=first)
    found["limit in one"] = restored(memory_limit=256 << 20 if first else None)
    found["traced"] = caught(jax.eval_shape, restored)
    found["verify in one"] = caught(restored, verify=first)
    names = ("p/w", "ema/w") if first else ("ema/w", "p/w")
    rules = [tr.rules.rename(names[0], "x"), tr.rules.rename(names[1], "y")]
    both = {"x": np.zeros_like(value), "y": np.zeros_like(value)}
    found["rules"] = caught(tr.restore, tmp / "a", both, read="once", rules=rules)
    more = like if first else {**like, "z": np.zeros((0, 3), np.float32)}
    found["nothing more"] = caught(tr.restore, tmp / "a", more, read="once", missing="template")
    found["more"] = caught(tr.restore, tmp / "a", like if first else {"p": like["p"]}, read="once", extra="ignore")
    found["foreign"] = restored(path=tmp / "a.safetensors")
    found["at last"] = restored()
    report(found)


def a_process_that_leaves_in_the_middle_is_missed_at_once(KIND: Any) -> None:
    value = bits(2048, 4096)
    if INDEX == 0:
        tr.save(tmp / "a", {"w": value}, processes="this")
    sync("saved")
    from treering._pytree import devices
    from treering._restore import collective_read

    tr.restore(tmp / "a", {"w": put(value)}, read="once")
    rounds, exchange = [], devices.exchange

    def leaving(*args):
        rounds.append(1)
        if KIND == "interrupt" and len(rounds) == 3:
            raise KeyboardInterrupt
        came = exchange(*args).copy()
        if KIND == "changed" and len(rounds) == 3:
            came[2, 100] ^= 1
        return came

    def full(*args):
        raise MemoryError("no room")

    if INDEX == 1:
        devices.exchange = leaving
        if KIND == "memory":
            collective_read.empty_aligned_array = full
        if KIND == "copying":
            collective_read._Exchange._copy_received = full
    begun = time.monotonic()
    try:
        tr.restore(tmp / "a", {"w": put(value)}, read="once")
        error = None
    except BaseException as caught:
        error = [type(caught).__name__, str(caught)]
    report([error, time.monotonic() - begun])
    while INDEX == 0 and not all((tmp / f"report-{n}.json").exists() for n in (1, 2)):
        time.sleep(0.05)
    time.sleep(1 if INDEX == 0 else 0)  # JAX ends the others when process 0 is gone


def read_with_rules_restarts_after_replacement() -> None:
    value = bits(512, 512)
    tr.save(tmp / "a", {"w": put(value, P("x"))})
    tr.save(tmp / "b", {"w": put(value, P(None, "x"))})
    sync("saved")
    from treering._restore import collective_plan
    from treering._run import step_fallback

    shared, opened, attempts = collective_plan.collective_reader, step_fallback.open_in_store, []

    def replaced(*args, **options):  # after process 0 has opened it, and before process 1 does
        attempts.append(1)
        if INDEX == 0 and len(attempts) == 1:
            os.rename(tmp / "a", tmp / "old")
            os.rename(tmp / "b", tmp / "a")
            (tmp / "moved").write_text("")
        return shared(*args, **options)

    def later(*args):
        while not (tmp / "moved").exists():
            time.sleep(0.05)
        return opened(*args)

    collective_plan.collective_reader = replaced
    if INDEX == 1:
        step_fallback.open_in_store = later
    found = tr.restore(tmp / "a", {"x": put(value)}, rules=[tr.rules.rename("w", "x")], read="once")
    report([same(found["x"], value), len(attempts)])


def collective_read_survives_slow_group() -> None:
    value, other = bits(512, 512), bits(512, 512)
    if INDEX == 0:
        tr.save(tmp / "a", {"part": value, "all": other}, processes="this")
    sync("saved")
    two = Mesh(np.array([device for device in devices if device.process_index < 2]), ("x",))
    from treering._restore import collective_read

    message, waited = collective_read._Exchange._message, []

    def slow(self, dealt):
        if self._members == (0, 1) and not waited:
            waited.append(time.sleep(36))
        return message(self, dealt)

    collective_read._Exchange._message = slow
    found = tr.restore(tmp / "a", {"part": on(two, P(), value), "all": put(other)}, read="once")
    report([same(found["part"], value), same(found["all"], other)])


def collective_read_makes_devices_only_if_needed() -> None:
    from treering._pytree import devices

    asked, can = [], devices.can_exchange
    devices.can_exchange = lambda: asked.append(1) or can()
    value = np.arange(1 << 16, dtype=np.float32)
    if INDEX == 0:
        tr.save(tmp / "a" / "step-1", {"w": value}, processes="this")
    sync("saved")
    found = []
    ckpts = tr.Checkpointer(tmp / "a")
    NetworkDisk.is_local = lambda self, fd: True  # so each process reads for itself
    for options in ({}, {"read": "each"}, {"read": "once"}):
        found.append([same(ckpts.restore({"w": put(value)}, **options)["w"], value), len(asked)])
    report(found)


def a_value_that_a_cast_would_lose_in_one_process_fails_all() -> None:
    values = np.ones((24, 8), np.float32)
    values[-1, 0] = 1e6  # in the last process
    state = {"w": put(values, P("x"), mesh(6))}
    tr.save(tmp / "c", state)
    like = {"w": on(mesh(6), P("x"), values)}
    errors = []
    rules = [tr.rules.cast("w", "int8"), tr.rules.cast("w", "float32")]
    for call in (
        lambda: tr.restore(tmp / "c", like, dtype="float16", read="once"),
        lambda: tr.restore(tmp / "c", like, rules=rules, read="once"),
        lambda: tr.save(tmp / "d", state, dtype="float16"),
        lambda: tr.save(tmp / "d", state, rules=[tr.rules.cast("w", "int8")]),
    ):
        try:
            call()
        except tr.errors.MismatchError as error:
            errors.append(str(error))
    report([errors, (tmp / "d" / "treering.json").exists()])
