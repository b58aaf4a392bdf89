"""The tree in which the processes of a large job speak to one another, and how often."""

FAN_OUT = 64  # processes that one hears; a job with no more than that beside process 0 is a star
_REQUESTS = 2_000  # signs of life a second that the store in process 0 may get; it answers some 10,000 requests
_HEARTBEAT_SECONDS = 1.0  # seconds between signs of life, of jobs that are not too large for it
_POLL_SECONDS = 0.25  # seconds between looks at them


def parent(index: int) -> int:
    """The process that hears a process; process 0 is heard by all."""
    return (index - 1) // FAN_OUT


def children(index: int, count: int) -> range:
    """The processes that a process hears."""
    return range(min(index * FAN_OUT + 1, count), min((index + 1) * FAN_OUT + 1, count))


def heartbeat_seconds(count: int) -> float:
    """The seconds between signs of life of each of so many processes."""
    return max(_HEARTBEAT_SECONDS, count / _REQUESTS)


def poll_seconds(count: int) -> float:
    """The seconds for which a process waits at a time; what it waits for wakes it."""
    return max(_POLL_SECONDS, count / _REQUESTS)


def timeout(seconds: float, count: int) -> float:
    """The seconds of silence after which a process is dead: those asked for, and at least four signs of life missed."""
    return seconds if count <= _REQUESTS else max(seconds, 4 * heartbeat_seconds(count))
