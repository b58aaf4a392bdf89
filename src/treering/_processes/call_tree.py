"""Defines the tree by which the processes of a large job exchange values and signs of life, and their intervals."""

import math

FAN_OUT = 64  # children of a process in the tree; in a job of at most 65 processes all are children of process 0
# Signs of life per second that the store in process 0 may get. It can answer some 10,000 requests.
_MAX_SIGNS_PER_SECOND = 2_000
HEARTBEAT_SECONDS = 1.0  # seconds between signs of life in a call, in jobs that are not too large for it
_MAX_IDLE_SIGNS_PER_SECOND = 400  # signs of life per second that the store may get for the roll
_IDLE_SIGN_SECONDS = 2.0  # seconds between signs of life for the roll, in jobs that are not too large for it
_MAX_MISSED_SIGNS = 4  # missed signs of life, after which a process is considered dead
_REQUESTS_PER_POLL = 6  # requests of a process with children, each time it polls
_POLL_SECONDS = 0.25  # seconds between polls


def parent(index: int) -> int:
    """Returns the process that polls the signs of a process. Process 0 has no parent: all processes poll it."""
    return (index - 1) // FAN_OUT


def children(index: int, count: int) -> range:
    """Returns the processes whose signs and values a process polls."""
    return range(min(index * FAN_OUT + 1, count), min((index + 1) * FAN_OUT + 1, count))


def is_large(count: int) -> bool:
    """Returns True if a job is so large that one process of each host passes on the signs of life of all."""
    return count > _MAX_SIGNS_PER_SECOND


def heartbeat_seconds(count: float) -> float:
    """Returns the seconds between the signs of life of each of `count` processes or hosts, in a call."""
    return max(HEARTBEAT_SECONDS, count / _MAX_SIGNS_PER_SECOND)


def idle_sign_seconds(count: int) -> float:
    """Returns the seconds between the signs of life of each of `count` processes; see `liveness`."""
    return max(_IDLE_SIGN_SECONDS, count / _MAX_IDLE_SIGNS_PER_SECOND)


def poll_seconds(count: int, *, hears: bool) -> float:
    """Returns the seconds between polls of a process. A value that arrives wakes it earlier.

    `hears`: True if the process has children.
    """
    looks = math.ceil(count / FAN_OUT) * _REQUESTS_PER_POLL if hears else count
    return max(_POLL_SECONDS, looks / _MAX_SIGNS_PER_SECOND)


def timeout(seconds: float, count: int) -> float:
    """Returns the seconds of silence after which a process that sends its own signs is considered dead.

    See `silence_limit`.
    """
    return silence_limit(seconds, heartbeat_seconds(count)) if is_large(count) else seconds


def silence_limit(seconds: float, every: float) -> float:
    """Returns the seconds of silence after which a process is dead: `seconds`, but at least four missed signs."""
    return max(seconds, _MAX_MISSED_SIGNS * every)
