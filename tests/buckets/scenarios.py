"""All scenarios by name."""

from .scenarios_hosts import HOSTS
from .scenarios_runs import RUNS
from .scenarios_single import SINGLE
from .scenarios_streams import STREAMS

ALL = {**SINGLE, **RUNS, **STREAMS, **HOSTS}
