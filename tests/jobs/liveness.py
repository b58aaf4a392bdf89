"""The bodies of the jobs in tests/processes/test_liveness.py."""

import os
import signal
import sys
import time
from typing import Any

import treering as tr
from jobs.process import COUNT, INDEX, caught, report, sync, tmp


def body(FATES: Any, GOES_ON: Any, IS_WARM: Any) -> None:
    def reported(*indices):
        while not all((tmp / f"report-{n}.json").exists() for n in indices):
            time.sleep(0.05)

    survivors = [n for n in range(COUNT) if n not in FATES]
    fate = FATES.get(INDEX)
    if IS_WARM:
        tr.save(tmp / "warm", {"n": 1})
    (tmp / f"pid-{INDEX}").write_text(str(os.getpid()))
    sync("begun")
    if fate in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fate))
    elif fate == "ends":
        sys.exit()
    elif fate == "makes no call":
        reported(*survivors)
    else:
        first, *others = survivors
        if first == INDEX and "makes no call" not in FATES.values():  # it waits in its step while its peers time out
            reported(*others)
        error = caught(tr.save, tmp / "c", {"n": 1}, timeout=1.5)
        if first == INDEX:
            for index in (index for index, fate in FATES.items() if fate == "SIGSTOP"):
                os.kill(int((tmp / f"pid-{index}").read_text()), signal.SIGKILL)
        report(error)
        if first != INDEX:
            if GOES_ON:
                caught(tr.save, tmp / "later", {"n": 1}, timeout=1.5)
            sys.exit()
