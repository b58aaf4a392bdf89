"""Processes that have imported JAX and the library already: forks of one that did, and has done nothing else.

To import them takes most of what a process of a small job costs. `python zygote.py FD` is the one that is forked: it
takes a line of JSON for each process from its standard input, and says at `FD` which ones have ended, and how.

A fork whose script ends well waits for its threads and calls what is registered with `atexit`, and then ends at once,
as processes of `multiprocessing` do. To free all modules it would have to copy them first, which takes longer than
most scripts. Tests of what happens later, when the interpreter itself ends, begin a process of their own.
"""

import atexit
import functools
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from typing import Any


class Process:
    """A process that runs a script as `python -c` would, with these variables of the environment."""

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        fd, self._output = tempfile.mkstemp(prefix="output-")
        os.close(fd)
        self._one = _zygote()
        self.pid = self._one.fork(script, environment, self._output)

    def communicate(self, timeout: float) -> tuple[int, str]:
        """The exit code, -N for signal N, and what was printed.

        Raises TimeoutError after so many seconds, having killed the process.
        """
        try:
            code = self._one.wait(self.pid, timeout)
            with open(self._output, errors="replace") as file:
                return code, file.read()
        finally:
            os.unlink(self._output)


class _Zygote:
    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self.cpu_seconds = 0.0  # of the forks that have ended
        reader, writer = os.pipe()
        command = [sys.executable, __file__, str(writer)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writer], text=True)
        os.close(writer)
        self._words = os.fdopen(reader, "rb", buffering=0)  # what waits in no buffer is what `select` sees

    def fork(self, script: str, environment: Mapping[str, str], output: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([script, dict(environment), output]) + "\n")
        self._process.stdin.flush()
        while (word := self._word(60))[0] != "forked":
            pass
        self._ended.pop(word[1], None)  # of an earlier fork with that number, whose end no caller awaited
        return word[1]

    def wait(self, pid: int, timeout: float) -> int:
        end = time.monotonic() + timeout
        try:
            while pid not in self._ended:
                self._word(end - time.monotonic())
        except TimeoutError:
            os.kill(pid, 9)
            raise
        return self._ended.pop(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._words.close()

    def _word(self, timeout: float) -> Any:
        if not select.select([self._words], [], [], max(timeout, 0))[0]:
            raise TimeoutError
        what, pid, code, seconds = json.loads(self._words.readline())
        if what == "ended":
            self._ended[pid] = code
            self.cpu_seconds += seconds
        return what, pid


def cpu_seconds() -> float:
    """Seconds of CPU of all processes of this module that have ended."""
    return _zygote().cpu_seconds if _zygote.cache_info().currsize else 0.0


@functools.cache
def _zygote() -> _Zygote:
    one = _Zygote()
    atexit.register(one.close)
    return one


def _serve(words: int) -> str:
    """Forks and waits on request until the requests end; returns in each fork the code that it is to run."""
    import jax.numpy  # noqa: F401

    import treering

    for name in treering.__all__:
        getattr(treering, name)  # imports what the name is in
    gc.freeze()  # or each fork copies what its collector looks at
    running = set[int]()

    def say(*word: Any) -> None:
        os.write(words, (json.dumps(word) + "\n").encode())

    while True:
        asked, _, _ = select.select([sys.stdin], [], [], 0.02 if running else None)
        for pid in [*running]:
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                say("ended", pid, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
        if not asked:
            continue
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        script, environment, output = json.loads(line)
        with warnings.catch_warnings(action="ignore"):  # of JAX, which has no threads yet
            pid = os.fork()
        if not pid:
            os.close(words)
            os.environ.clear()
            os.environ.update(environment)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 1)
            os.dup2(1, 2)
            return script
        running.add(pid)
        say("forked", pid, None, 0)


if __name__ == "__main__":
    script = _serve(int(sys.argv[1]))
    sys.argv, sys.path[0] = ["-c"], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(script, "<string>", "exec"), main.__dict__)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
