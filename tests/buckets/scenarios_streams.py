"""Jobs that publish weights, follow them, and keep a directory the newest version."""

from collections.abc import Callable
from typing import Any

import treering as tr
from treering._publish.pull import pull

from .scenario import KEPT, LAST, Scenario, read_value, weights
from .scenarios_runs import check_run, end_run


def _prepare(place: str, local: str) -> None:
    with tr.Publisher(place) as publisher:
        for version in (1, 2):
            publisher.publish(version, weights(100 + version))


def _publish(number: int, versions: int) -> Callable[..., None]:
    """Returns a job that publishes `versions` further versions, and reports each of them with the one before it."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Publisher(place, full_every=3, keep=KEPT) as publisher:
            begun = max(tr.steps(place), default=0)
            for version in range(begun + 1, begun + 1 + versions):
                publisher.publish(version, weights(100 * number + version))
                publisher.wait()
                job.report((begun, version))

    return job


def _follow(job: Any, place: str, local: str) -> None:
    """Checks each version that it is shown, while versions come and go."""
    before = 0
    for _ in range(2):
        for found in tr.follow_weights(place, timeout=0):
            value = int(found.tree["w"][0])
            assert value % 100 == found.version >= before, (value, found.version, before)
            assert (found.tree["few"] == weights(value)["few"]).all(), found
            before = found.version


def _pull(job: Any, place: str, local: str) -> None:
    for _ in range(2):
        for version, _ in pull(place, f"{local}/engine"):
            assert read_value(f"{local}/engine") % 100 == version


def _last_version(job: Any, place: str, local: str) -> None:
    begun = max(tr.steps(place), default=0)
    with tr.Publisher(place, keep=KEPT) as publisher:
        publisher.publish(LAST, weights(LAST))
    job.report((begun, LAST))


STREAMS = {
    "a stream": Scenario([_publish(1, 4), _last_version], check_run, end_run),
    "a stream, new owner": Scenario([_publish(1, 3), _publish(2, 3), _last_version], check_run, end_run),
    "a stream, followed": Scenario([_publish(1, 3), _follow, _last_version], check_run, end_run, _prepare),
    "a stream, pulled": Scenario([_publish(1, 3), _pull, _last_version], check_run, end_run, _prepare),
}
