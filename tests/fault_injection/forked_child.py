"""Children of a warmed-up process: real processes to kill, for some twenty milliseconds each."""

import faulthandler
import os
import threading
import traceback
from collections.abc import Callable

from treering.errors import TreeringError

RAISED = 3  # the exit code after an error that was to be expected
_TIMEOUT = 120  # seconds; far more than any child needs


def start(do: Callable[[], object], *, quiet: bool = False) -> int:
    """Forks a child that does something and exits: with 0, `RAISED`, or 1. Returns its process id.

    A quiet one prints nothing.
    """
    for thread in threading.enumerate():  # those of a save that is over may not have ended yet
        if thread.name.startswith("treering"):
            thread.join()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        faulthandler.enable()  # a crash is to say where
        faulthandler.dump_traceback_later(_TIMEOUT, exit=True)
        do()
        code = 0
    except (TreeringError, OSError, KeyboardInterrupt):
        code = RAISED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(child: int) -> int:
    """Waits for a child: its exit code, or the number of the signal that ended it with a minus."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
