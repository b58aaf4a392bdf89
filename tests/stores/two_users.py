"""Plays two users of a group, one after the other, in a run that root has made for them.

`python two_users.py CASES` takes a list of cases as JSON: the mode of the run, what happens there, and whether the job
of the first user lives when that of the second begins. It prints the steps and the messages of each case.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import treering as tr

GROUP, FIRST, SECOND = 60000, 5001, 5002
STATE = {"w": np.zeros(300_000)}


def first_job(run: str, what: str) -> Any:
    """Returns what must not be closed while the job lives."""
    ckpts = tr.Checkpointer(run)
    if what == "unreadable":  # The job is killed before its first commit.
        os.umask(0o077)
        ckpts.save(1, STATE).result()
        os.unlink(f"{run}/step-00000001/treering.json")
        os.rename(f"{run}/step-00000001", f"{run}/begun")
        return ckpts
    for step in (1, 2, 3):
        ckpts.save(step, STATE).result()
    if what == "partial":
        os.unlink(f"{run}/step-00000003/treering.json")
    elif what == "finished":
        ckpts.finish()
    elif what == "link":
        ckpts.close()
        os.symlink("elsewhere", f"{run}/writer.lock")
    return ckpts


def second_job(run: str, what: str) -> str:
    """Returns what the lock file says while the job runs."""
    if what == "record":
        tr.record(run, 2, {"loss": 1.0})
        return ""
    with tr.Checkpointer(run, keep=tr.keep.last(1) if what == "retention" else None) as ckpts:
        state, step = ckpts.restore_or_init(lambda: STATE)
        if what == "pin":
            ckpts.pin(2)
        elif what == "delete":
            ckpts.delete(2)
        elif what == "rewind":
            ckpts.rewind(1)
        else:
            ckpts.save(step + 1, state).result()
            ckpts.save(step + 2, state).result()
            with open(f"{run}/writer.lock") as file:
                return f"the lock names {'us' if str(os.getpid()) in file.read() else 'another'}"
    return ""


def as_user(user: int, job: Callable[[str, str], Any], run: str, what: str) -> tuple[int, str]:
    """Runs a job as a user. Returns its process, which waits to be killed, and its messages."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        text = b""
        while not text.endswith(b"\0") and (more := os.read(reader, 1 << 16)):
            text += more
        os.close(reader)
        return pid, text.decode().strip("\0")
    logging.getLogger("treering").addHandler(logging.StreamHandler(os.fdopen(writer, "w", closefd=False)))
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(user)
    os.umask(0o022)
    try:
        kept = job(run, what)
        said = kept if isinstance(kept, str) else ""
    except BaseException as error:
        kept, said = error, f"{type(error).__name__} {error}"
    os.write(writer, f"{said}\0".encode())
    while True:
        signal.pause()


def kill(pid: int) -> None:
    """Kills a process, and waits until it is gone."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    """Plays all cases."""
    cases = json.loads(sys.argv[1])
    for what in ("retention", "finished", "partial", "record", "pin", "delete", "rewind"):
        run = f"{tempfile.mkdtemp()}/run"  # Other users may not be able to import modules.
        first_job(run, what).close()
        second_job(run, what)
    found: list[tuple[list[int], str]] = []
    for mode, what, is_alive in cases:
        place = tempfile.mkdtemp()
        run = f"{place}/run"
        os.mkdir(run)
        os.chmod(place, 0o755)
        os.chown(run, FIRST if mode == "2755" else 0, GROUP)
        os.chmod(run, int(mode, 8))
        pid, _ = as_user(FIRST, first_job, run, what)
        if not is_alive:
            kill(pid)
        other, text = as_user(SECOND, second_job, run, what)
        for one in (other, pid) if is_alive else (other,):
            kill(one)
        found.append((tr.steps(run), text.replace(place, "")))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
