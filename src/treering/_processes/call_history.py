"""The calls that a process has made in its job: their numbers, by which processes meet in the same call.

A process has lives. With JAX's option `jax_enable_recoverability`, a process that was killed can be started again and
join the living job. The numbers of its calls are lost with it, but the keys of these calls are still in the store. What
holds then:

- The second life never reads an answer that the first life was given. Process 0 notes the number of its latest call of
  each kind. The second life takes part in that call if it is not over, or else in the next one.
- A call in which the first life took part fails in all processes, because the second life may have other values.
- Until it has met process 0 in a call, the second life counts as far ahead of it: peers that wait for the first life in
  another call see that it will not come there, and fail early. It waits for them three times as long as other processes
  do. Then the order of its calls, and the numbers of its questions to JAX's preemption service, are those of process 0.

Without the option, no job survives its processes, and nothing is noted.
"""

import collections
import dataclasses
import secrets

import xxhash

from ..errors import PeerError
from . import call_tree, messages
from .job_store import JobStore

_MAX_COUNTED_CALLS = 10_000  # kinds of calls that are counted
AHEAD = 1 << 40  # ordinals above it are those of a second life; no job makes so many calls
PATIENCE = 3  # times the time-out, for which a second life waits for its peers before it has met them
NOW, NOWHERE = "treering/now/", '["",-1,0]'  # the latest call of a process: its kind, number and ordinal
_LIFE, _BEGUN = "treering/life/", "treering/begun/"  # the life of a process, and the latest call of process 0 of a kind


def listed_key(index: int) -> str:
    """Returns the last part of a key of a process. It begins with the parent, which lists its children at once."""
    return f"{call_tree.parent(index) if index else 'first'}/{index}"


def is_recoverable() -> bool:
    """Returns True if the job survives a process that dies, so that this can be started again."""
    import jax  # not at the top: commands that only read manifests do without it

    return bool(getattr(jax.config, "jax_enable_recoverability", False))


def hash_of(kind: str) -> str:
    """Returns the part of the keys of a call that stands for its kind, which is its description."""
    return xxhash.xxh3_64_hexdigest(kind.encode("utf-8", "backslashreplace"))


def call_name(kind: str, number: int) -> str:
    """Returns the beginning of the keys of a call. `kind` is the hash of its kind."""
    return f"treering/{kind}/{number}"


def heartbeat_key(name: str, index: int) -> str:
    """Returns the key of the signs of life of a process in a call, or of its error."""
    return f"{name}/heartbeat/{listed_key(index)}"


@dataclasses.dataclass
class History:
    """The calls that a process has made.

    counts: the number of the latest call of each kind.
    ended_calls: the finished calls whose keys still exist, each with the time when it finished.
    ordinal: the number of calls that the main thread has begun.
    token: the token of the job, once it was needed.
    questions: the number of the last question to JAX's preemption service; see `preemption`.
    is_restarted: True if this process had an earlier life in the job.
    has_met: True once this process was in a call with process 0.
    """

    counts: collections.OrderedDict[str, int] = dataclasses.field(default_factory=collections.OrderedDict)
    ended_calls: collections.deque[tuple[float, str]] = dataclasses.field(default_factory=collections.deque)
    ordinal: int = 0
    token: str = ""
    questions: int = 0
    is_restarted: bool = False
    has_met: bool = False
    life: str = ""  # a random name, if processes have lives

    def begin_life(self, store: JobStore, index: int) -> None:
        """Finds out, before the first call, if this process had an earlier life. Raises `PeerError`."""
        if self.life or not is_recoverable():
            return
        if store.get(_LIFE + listed_key(index), ""):
            self.is_restarted = True
            self.ordinal = AHEAD
        life = secrets.token_hex(8)
        store.put(_LIFE + listed_key(index), life)
        self.life = life

    def next_number(self, store: JobStore, index: int, kind: str) -> int:
        """Returns the number of the next call of a kind, and counts it."""
        number = self.counts.get(kind, -1) + 1
        if self.is_restarted:
            number = max(number, _number_after_restart(store, index, hash_of(kind)))
        self.counts[kind] = number
        self.counts.move_to_end(kind)
        if len(self.counts) > _MAX_COUNTED_CALLS:
            forgotten, _ = self.counts.popitem(last=False)
            if self.life and not index:
                store.delete(_BEGUN + hash_of(forgotten))
        return number

    def free_number(self, kind: str, number: int) -> None:
        """Frees the number of a call for the next call of its kind, because process 0 has not used it yet."""
        if self.counts.get(kind) == number:
            self.counts[kind] -= 1

    def note(self, store: JobStore, kind: str, number: int, *, is_over: bool) -> None:
        """Notes, in process 0, the begin or the end of a call."""
        if self.life:
            store.put(_BEGUN + hash_of(kind), messages.encode([number, is_over, self.ordinal, self.questions]))

    def meet(self, store: JobStore, kind: str) -> None:
        """Continues the order of process 0 after the first call with it. Raises `PeerError`."""
        if self.is_restarted and not self.has_met:
            _, _, self.ordinal, self.questions = messages.decode(store.get(_BEGUN + hash_of(kind), ""))
        self.has_met = True


def _number_after_restart(store: JobStore, index: int, kind: str) -> int:
    """Returns the number of the first call of a kind that this life of a process takes part in."""
    number, is_over, _, _ = messages.decode(store.get(_BEGUN + kind, "[-1,true,0,0]"))
    own = heartbeat_key(call_name(kind, number), index)
    if not is_over and not store.get(own, ""):
        return number
    if not is_over:
        error = PeerError("it was killed in this call and has been started again")
        store.put(own, messages.encode_error(error))
    # The first life may have begun the next call already. Its values must not count as those of this life.
    for key in store.list_keys(f"{call_name(kind, number + 1)}/"):
        if key.rpartition("/")[2] == str(index):
            store.delete(key)
    return number + 1
