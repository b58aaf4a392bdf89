"""The tree in which the processes of a large job speak to one another, and how often."""

import math

FAN_OUT = 64  # processes that one hears; a job with no more than that beside process 0 is a star
_REQUESTS = 2_000  # signs of life a second that the store in process 0 may get; it answers some 10,000 requests
HEARTBEAT_SECONDS = 1.0  # seconds between signs of life, of jobs that are not too large for it
_ROLL_REQUESTS = 400  # signs of life a second that it may get between calls
_ROLL_SECONDS = 2.0  # seconds between those, of jobs that are not too large for it
_MISSED = 4  # signs of life, after which a process is dead
_LOOK_REQUESTS = 6  # of a process that hears others, each time it looks
_POLL_SECONDS = 0.25  # seconds between looks at them


def parent(index: int) -> int:
    """The process that hears a process; process 0 is heard by all."""
    return (index - 1) // FAN_OUT


def children(index: int, count: int) -> range:
    """The processes that a process hears."""
    return range(min(index * FAN_OUT + 1, count), min((index + 1) * FAN_OUT + 1, count))


def is_large(count: int) -> bool:
    """Whether a job is so large that one process of each host gives the signs of life of all."""
    return count > _REQUESTS


def heartbeat_seconds(count: float) -> float:
    """The seconds between signs of life of each of so many processes, or hosts."""
    return max(HEARTBEAT_SECONDS, count / _REQUESTS)


def roll_seconds(count: int) -> float:
    """The seconds between signs of life of each of so many processes, in a call or not; see `roll`."""
    return max(_ROLL_SECONDS, count / _ROLL_REQUESTS)


def poll_seconds(count: int, *, hears: bool) -> float:
    """The seconds for which a process waits at a time, one that hears others or not; what it waits for wakes it."""
    looks = math.ceil(count / FAN_OUT) * _LOOK_REQUESTS if hears else count
    return max(_POLL_SECONDS, looks / _REQUESTS)


def timeout(seconds: float, count: int) -> float:
    """The seconds of silence after which a process is dead that speaks for itself; see `patience`."""
    return patience(seconds, heartbeat_seconds(count)) if is_large(count) else seconds


def patience(seconds: float, every: float) -> float:
    """The seconds of silence after which a process is dead: those asked for, and at least four signs of life missed."""
    return max(seconds, _MISSED * every)
