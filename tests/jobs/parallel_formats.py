"""The bodies of the jobs in tests/save/test_parallel_formats.py."""

import os
import pathlib
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import COUNT, INDEX, caught, devices, mesh, put, report, sync, tmp


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


values = {
    "rows": random(0, 1024, 2048),
    "columns": random(1, 2048, 1032),
    "replicated": random(2, 1009, 1024),
    "grid": random(3, 1024, 1024),
    "bf16": random(4, 512, 64).astype(jnp.bfloat16),
    "empty": random(5, 0, 64),
    "long": random(6, 524_296),
    "scalar": np.float32(2.5),
    "small": random(7, 8),
    "alone": random(8, 9, 5),
}


def state():
    n, last = len(devices), Mesh(np.array([d for d in devices if d.process_index == COUNT - 1]), ("x",))
    return {
        "rows": put(values["rows"], P("x")),
        "columns": put(values["columns"], P(None, "x")),
        "replicated": put(values["replicated"]),
        "grid": put(values["grid"], P("y", "x"), mesh(2, n // 2)),
        "bf16": put(values["bf16"], P("x")),
        "empty": put(values["empty"], P(None, "x")),
        "long": put(values["long"], P("x")),
        "scalar": put(values["scalar"]),
        "small": put(values["small"], P("x")),
        "alone": put(values["alone"], P(), last),
        "here": jnp.arange(5.0),
        "step": 7,
        "numpy": np.random.default_rng(9).integers(0, 1 << 30, 500_000, np.int32),
    }


def written():
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["wchar"])


def each_process_writes_its_part(FORMATS: Any) -> None:
    tree, counts = state(), {}
    tr.save(tmp / "warm", {"x": put(values["rows"], P("x"))}, format="orbax")
    for format in FORMATS:
        for again in range(2):
            before = written()
            saved = tr.save(
                tmp / format, tree, format=format, overwrite=bool(again), memory_limit=[1 << 20, None][again]
            )
            counts[format] = [written() - before, saved.nbytes]
        pending = tr.save_async(tmp / f"{format} later", tree, format=format)
        tree["numpy"] += 1
        pending.result()
        tree["numpy"] -= 1
    keys = jax.random.wrap_key_data(put(np.arange(32, dtype=np.uint32).reshape(16, 2), P("x")))
    tr.save(tmp / "keys", {"keys": keys}, format="orbax")
    rules = [tr.rules.rename("rows", "renamed"), tr.rules.cast("renamed", "bfloat16")]
    tr.save(tmp / "rules", tree, format="orbax", rules=rules)
    report(counts)


def items_of_orbax_that_several_have_written() -> None:
    tree = state()
    items = {"params": {name: tree.pop(name) for name in ("rows", "bf16", "empty")}, "state": tree}
    items |= {"small": {"x": np.arange(3)}, "config": {"a": [1, "b"]}, "bare": {"none": None}}
    for again in range(2):
        tr.save(tmp / "c", items, format="orbax", composite=True, overwrite=bool(again))
    tr.save(tmp / "values", {"config": {"a": 1}}, format="orbax", composite=True)
    rules = [tr.rules.transpose("params/rows", (1, 0))]
    tr.save(tmp / "across", items, format="orbax", composite=True, rules=rules)
    report(caught(tr.save, tmp / "across", items, format="orbax", composite=True, rules=rules))


def what_one_process_cannot_write_in_parts() -> None:
    big = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    tree = {"rows": put(big, P("x")), "w": {"v_row": put(big[:, 0], P("x"))}}
    tr.save(tmp / "across", tree, format="levanter", rules=[tr.rules.transpose("rows", (1, 0))])
    tr.save(tmp / "factors", tree, format="t5x")
    report(1)


def a_chunk_that_process_0_does_not_see_is_no_checkpoint(GONE: Any) -> None:
    import shutil

    from treering.formats._zarr.writer import ZarrWriter

    close = ZarrWriter.close

    def loses(self):
        close(self)
        if INDEX == 1 and (tmp / "loses").exists():
            one = next(pathlib.Path(self._path).glob(GONE[FORMAT]))
            shutil.rmtree(one) if one.is_dir() else one.unlink()

    ZarrWriter.close = loses
    tree = {"w": put(np.full((64, 64), 1.0, np.float32), P("x")), "n": np.arange(9), "m": np.arange(8)}
    found = []
    for FORMAT in GONE:
        tr.save(tmp / FORMAT, tree, format=FORMAT)
    sync("saved")
    (tmp / "loses").touch()
    for FORMAT in GONE:
        found.append(caught(tr.save, tmp / FORMAT, tree, format=FORMAT, overwrite=True, timeout=3))
    report(found)


def processes_that_were_called_otherwise() -> None:
    tree = {"a": put(np.arange(8.0), P("x")), "b": put(np.arange(8.0) + 100, P("x")), "n": 1}
    swap = [tr.rules.rename("a", "c"), tr.rules.rename("b", "a"), tr.rules.rename("c", "b")]
    same = [tr.rules.rename("a", "c"), tr.rules.rename("c", "a"), tr.rules.cast("b", "float32")]
    found = {}
    for format in ("treering", "orbax", "t5x", "levanter"):
        found[f"{format} rules"] = caught(tr.save, tmp / "c", tree, format=format, rules=[swap, same][INDEX])
        found[f"{format} one"] = caught(tr.save, tmp / "c", tree, format=format, rules=[swap, ()][INDEX])
        found[f"{format} other"] = caught(tr.save, tmp / "c", tree, format=[format, "safetensors"][INDEX])
        found[f"{format} dtype"] = caught(tr.save, tmp / "c", tree, format=format, dtype=["bfloat16", None][INDEX])
    found["orbax items other"] = caught(tr.save, tmp / "c", {"a": tree}, format="orbax", composite=bool(INDEX))
    tr.save(tmp / "good", tree, format="orbax", rules=swap)
    report(found)


def what_is_still_in_a_checkpoint_is_read_in_parts(FORMATS: Any) -> None:
    from treering.formats.treering.read import Reader

    read, counted, largest = Reader.read, [0], [0]

    def counting(self, wanted, **options):
        sizes = [4 * int(np.prod([b - a for a, b in box])) for entry, box in wanted if entry.path == "big"]
        counted[0] += sum(sizes)
        largest[0] = max([largest[0], *sizes])
        return read(self, wanted, **options)

    Reader.read = counting
    found = {}
    for format in FORMATS:
        counted[0] = largest[0] = 0
        tr.save(tmp / format, {"w": put(np.ones((8, 8)), P("x")), "big": tr.open(tmp / "source")["big"]}, format=format)
        found[format] = [counted[0], largest[0]]
    report(found)


def arrays_of_one_process_and_names_of_orbax_in_t5x() -> None:
    from treering.formats.t5x import write

    write.CHUNK_BYTES = 1 << 12
    last = Mesh(np.array([d for d in devices if d.process_index == COUNT - 1]), ("x",))
    tree = {
        "prime": put(np.arange(1031.0), P(), last),
        "empty": put(np.ones((0, 3)), P(), last),
        "_METADATA": put(np.arange(8.0), P("x")),
        "manifest": {"ocdbt": put(np.arange(8.0) + 1, P("x"))},
    }
    tr.save(tmp / "c", tree, format="t5x")
    report(1)


def save_in_each(FORMATS: Any) -> None:
    for format in FORMATS:
        tr.save(tmp / format, state(), format=format)


def one_ends_after_its_part(FORMAT: Any, WHO: Any, KILLED: Any) -> None:
    from treering.formats._zarr.writer import ZarrWriter

    first = {"w": put(np.full((64, 64), 1.0, np.float32), P("x")), "n": np.arange(9)}
    second = {"w": put(np.full((64, 64), 2.0, np.float32), P("x")), "n": np.arange(9) + 1}
    tr.save(tmp / "c", first, format=FORMAT)
    close = ZarrWriter.close

    def dies(self):
        close(self)  # dies after its part is written
        if INDEX == WHO:
            if KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")

    ZarrWriter.close = dies
    report(caught(tr.save, tmp / "c", second, format=FORMAT, overwrite=True, timeout=4))
