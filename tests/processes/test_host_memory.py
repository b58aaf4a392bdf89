"""Tests the memory of a host whose processes copy from accelerators together, with a double: see `accelerator`."""

import pathlib

import pytest

from jobs import run_job

MIB = 1 << 20
_PORTION, _LEAVES, _LEAF = 4 * MIB, 64, 2 * MIB  # bytes, number, bytes of a leaf in each process

_COPYING = f"""
import logging, threading
import pytest
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
import accelerator
from treering._core import host_memory
from treering._pytree import staged_supply
from treering.testing._doubles import HeldDisk

accelerator.install(pytest.MonkeyPatch())
host_memory._MIN_LIMIT_BYTES = staged_supply._MAX_COPY_BYTES_PER_DEVICE = {_PORTION}
host_memory._AVAILABLE_DIVISOR = 1  # processes share the memory, so this makes them look like many
where = NamedSharding(mesh(COUNT), P("x"))
shard = ({_LEAF} // 4,)
state = {{
    f"w{{n}}": jax.make_array_from_callback((COUNT * shard[0],), where, lambda index: np.full(shard, n, np.float32))
    for n in range({_LEAVES})
}}
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("treering").addHandler(handler)

def resident(pid):
    with open(f"/proc/{{pid}}/statm") as file:
        return int(file.read().split()[1]) * 4096

tr.save_async(tmp / "warm", state, memory_limit={_PORTION}).result()  # objects that are made only once exist now
(tmp / f"before-{{INDEX}}").write_text(json.dumps([os.getpid(), resident(os.getpid())]))
sync("all are there")
before = dict(json.loads((tmp / f"before-{{n}}").read_text()) for n in range(COUNT))

def left():
    "Of the memory of a host that has as much as the copies of half of the processes take."
    return {_LEAVES * _LEAF} * COUNT // 2 - sum(resident(pid) - size for pid, size in before.items())

most = left()
host_memory._memory_pools = lambda: [(left(), most)]
disk = HeldDisk()
stores.register(stores.Filesystem(disk))
pending, least = [], [most]
thread = threading.Thread(target=lambda: pending.append(tr.save_async(tmp / "c", state)))
thread.start()
while len(least) < 500:
    least.append(left())
    time.sleep(0.01)
waits = thread.is_alive()
sync("all of them wait")
disk.go.set()
thread.join()
pending[0].result()
found = tr.restore(tmp / "c", state)
right = [same(found[f"w{{n}}"], np.full(COUNT * shard[0], n, np.float32)) for n in range({_LEAVES})]
report([min(least), most, waits, len(warnings), all(right)])
"""


@pytest.mark.rare
@pytest.mark.slow
def test_host_memory_keeps_an_eighth_free(tmp_path: pathlib.Path) -> None:
    """Together the processes leave an eighth of the host's memory free.

    Each alone is within its limit; without the check they would need twice the memory.
    """
    for result in run_job(tmp_path, _COPYING, processes=4, devices=1):
        least, most, waits, warnings, right = result.report
        assert waits and warnings == 1 and right
        assert least > most // 8 - 4 * _PORTION - 8 * MIB, f"{least >> 20} of {most >> 20} MiB left"
