"""Checks that all processes of a job save the same tree, before anything is written, and restore the same checkpoint.

Each process has its part of the global arrays. Every process has a copy of everything else: NumPy arrays, scalars, JAX
arrays on a process's own devices. One process writes that for all, so the copies must be equal.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from .._core.calls import Call
from .._core.describe import describe_entry, shorten
from .._core.entries import ArrayEntry, Entry, StatesEntry
from .._core.iterator_states import MAX_STATE_BYTES, encode_state
from .._core.layouts import Layout, owner
from .._core.skeleton import Skeleton
from .._pytree import iterators
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import Catalogue
from ..errors import CorruptError, MismatchError, TreeringError
from ..stores.read_errors import READ_ATTEMPTS, ReplacedError
from .assignment import layout_of

T = TypeVar("T")
_MAX_DIFFERENCES = 20  # differences that an error lists


def gather_from_equal_calls(
    call: Call, requested: str, value: Sequence[Any], choose: Callable[[Sequence[Any]], Any]
) -> Any:
    """Sends `value` to process 0 and returns its decision, as `Call.gather_and_decide` does.

    Raises `MismatchError` if the processes differ in `requested`. Each way to save must begin with this exchange:
    processes with other arguments may take another way, whose messages these processes would not understand.
    """

    def chosen(messages: Sequence[Any]) -> Any:
        for process, message in enumerate(messages):
            if message[0] != messages[0][0]:
                raise MismatchError(
                    f"expected the same call in every process: process 0 saves with {messages[0][0]}, process "
                    f"{process} with {message[0]}; nothing was written"
                )
        return choose([message[1:] for message in messages])

    return call.gather_and_decide([requested, *value], chosen)


def check_consistent(
    call: Call, tree: Skeleton, catalogue: Catalogue, staging: ShardSupply, requested: str
) -> tuple[Catalogue, dict[int, int]]:
    """Compares the arguments (`requested`) and the trees of all processes.

    Returns the catalogue, and the leaves that only one process holds, with that process.

    In process 0, the returned catalogue has the iterator states of all processes, because process 0 writes them. If a
    state is large, each process writes its own, and the catalogue of every process has the sizes instead.

    Raises, in every process, a `MismatchError` that names the paths that differ.
    """
    if call.count == 1:
        return catalogue, {}
    call.set_activity("comparing")
    remote = _single_process_leaves(catalogue)
    digests = _digests(catalogue, staging)
    rows = [_row(catalogue, leaf) for leaf in range(len(catalogue.entries))]
    message = [_hash([msgspec.to_builtins(list(tree)), rows]), _hash(list(digests.values())), list(remote.items())]
    differing, found = gather_from_equal_calls(call, requested, message, lambda messages: _compare(catalogue, messages))
    single: dict[int, int] = dict(found)
    if single and differing is None:  # The first checksum covered these leaves too; now all know to leave them out.
        contents = _hash([digest for leaf, digest in digests.items() if leaf not in single])
        differing = call.gather_and_decide(contents, _first_differing)
    if differing is None:
        catalogue = _with_all_iterators(call, catalogue)
    else:
        ours = [[*row, "" if leaf in single else digests.get(leaf, "")] for leaf, row in enumerate(rows)]
        call.gather_and_decide(
            ours if call.index == differing else None,
            lambda messages: _raise_differences(ours, messages[differing], differing),
        )
    return catalogue, single


def _first_differing(messages: Sequence[Any]) -> int | None:
    """Returns the first process whose value differs from that of process 0; None if all are equal."""
    return next((n for n, message in enumerate(messages) if message != messages[0]), None)


def _with_all_iterators(call: Call, catalogue: Catalogue) -> Catalogue:
    """Returns the catalogue with the iterator states of all processes, or with their sizes if one is large."""
    own = {n: entry for n, entry in enumerate(catalogue.entries) if isinstance(entry, StatesEntry)}
    if not own:
        return catalogue
    joined: dict[int, Entry] = dict(own)

    def join(messages: Sequence[Any]) -> list[list[int] | None]:
        large: list[list[int] | None] = []
        for n, found in zip(own, zip(*messages, strict=True), strict=True):
            sizes, states, types = zip(*found, strict=True)
            large.append(list(sizes) if None in states else None)
            info = own[n].info.with_types(types)
            if None in states:
                joined[n] = StatesEntry(own[n].path, own[n].type, sizes, info, own[n].read)
            else:
                joined[n] = iterators.join_states(own[n].path, list(zip(states, types, strict=True)), info)
        return large

    def message(entry: StatesEntry) -> list[Any]:
        """Returns the size of a state in bytes, the state if it is small enough for the manifest, and its types."""
        if entry.nbytes > MAX_STATE_BYTES:
            return [entry.nbytes, None, entry.info.types_of(0)]
        return [entry.nbytes, *encode_state(entry.state(0))]

    large = call.gather_and_decide([message(entry) for entry in own.values()], join)
    for (n, entry), sizes in zip(own.items(), large, strict=True):
        if sizes and call.index:  # Process 0 has the types of all states, which it writes.
            joined[n] = StatesEntry(entry.path, entry.type, tuple(sizes), entry.info, entry.read)
    return catalogue._replace(entries=[joined.get(n, entry) for n, entry in enumerate(catalogue.entries)])


def _single_process_leaves(catalogue: Catalogue) -> dict[int, int]:
    """Returns the leaves that only one other process holds, with that process."""
    layouts = {n: layout_of(catalogue.shardings[n], _shape(catalogue, n)) for n in catalogue.global_leaves}
    return {n: process for n, layout in layouts.items() if (process := owner(layout)) is not None}


def _shape(catalogue: Catalogue, leaf: int) -> tuple[int, ...]:
    entry = catalogue.entries[leaf]
    assert isinstance(entry, ArrayEntry)
    return entry.shape


def _digests(catalogue: Catalogue, staging: ShardSupply) -> dict[int, str]:
    """Returns the checksum of the bytes of each leaf that every process has its own copy of."""
    excluded = {n for n, entry in enumerate(catalogue.entries) if isinstance(entry, StatesEntry)}
    excluded.update(catalogue.global_leaves)
    own = [n for n, shard in enumerate(staging.shards) if shard.leaf not in excluded and not shard.for_second_copy]
    found: dict[int, xxhash.xxh3_64] = {}
    for n in sorted(own, key=lambda n: (staging.shards[n].leaf, staging.shards[n].box)):
        found.setdefault(staging.shards[n].leaf, xxhash.xxh3_64()).update(staging.peek(n).data)
    return {leaf: digest.hexdigest() for leaf, digest in found.items()}


def _row(catalogue: Catalogue, leaf: int) -> list[str]:
    """Returns path, kind, value and placement of a leaf: all that must be equal in every process, except its bytes."""
    entry = catalogue.entries[leaf]
    if entry.type == "iterator":  # Each process has its own state.
        return [entry.path, "iterator", ""]
    if not isinstance(entry, ArrayEntry):
        return [entry.path, f"{entry.type} {shorten(entry.decode())}", _hash(entry.value)]
    placement = catalogue.tied.get(leaf)
    if leaf in catalogue.shardings:
        layout = layout_of(catalogue.shardings[leaf], entry.shape)
        split = leaf in catalogue.global_leaves and owner(layout) is None
        # An array in one piece may be on another number of devices in another process, which does not matter.
        if split or len(layout.boxes) > 1:
            placement = _placement(layout, split)
    return [entry.path, f"{entry.type} {describe_entry(entry)} {entry.impl}".rstrip(), str(placement)]


@functools.lru_cache(maxsize=1024)
def _placement(layout: Layout, split: bool) -> str:
    return _hash([layout.boxes.cuts, layout.holders if split else None])


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value))


def _compare(catalogue: Catalogue, messages: Sequence[Any]) -> tuple[int | None, list[tuple[int, int]]]:
    """Returns the first process whose tree differs from that of process 0, and the leaves that only one process holds.

    Raises `MismatchError` if the processes disagree about which process holds such a leaf.
    """
    trees, contents, remotes = zip(*messages, strict=True)
    single = dict(pair for remote in remotes for pair in remote)
    for process, remote in enumerate(remotes):
        expected = {leaf: owner for leaf, owner in single.items() if owner != process}
        if (found := dict(remote)) != expected:
            leaf = next(leaf for leaf in single if found.get(leaf) != expected.get(leaf))
            raise MismatchError(
                f"{catalogue.entries[leaf].path}: expected the same array in every process; some processes have it on "
                f"the devices of process {single[leaf]} alone, process {process} does not"
            )
    differing = (n for n in range(len(messages)) if trees[n] != trees[0] or (not single and contents[n] != contents[0]))
    return next(differing, None), list(single.items())


def _raise_differences(ours: list[list[str]], theirs: list[list[str]], process: int) -> None:
    known, other = {row[0]: row for row in ours}, {row[0]: row for row in theirs}
    lines: list[str] = []
    for path in {**known, **other}:
        a, b = known.get(path), other.get(path)
        if a != b:
            shown = [row[1] if row else "nothing" for row in (a, b)]
            how = "other values" if a and b and a[3] != b[3] else "spread over processes in another way"
            found = f"{shown[1]}{f' ({how})' if shown[0] == shown[1] else ''}"
            lines.append(f"  {path or '(root)'}: process 0 has {shown[0]}, process {process} {found}")
    more = [f"  and {len(lines) - _MAX_DIFFERENCES} more"] if len(lines) > _MAX_DIFFERENCES else []
    raise MismatchError(
        "\n".join(
            [
                "expected the same tree in every process, as one process writes what all have; nothing was written:",
                *(lines[:_MAX_DIFFERENCES] or [f"  the containers of process {process} are not those of process 0"]),
                *more,
            ]
        )
    )


class CollectiveError(TreeringError):
    """Carries a problem out of an attempt that all processes make together.

    It has its own class so that code which retries alone on a `CorruptError` does not catch it.

    problem: the error of the attempt; None if all processes should try again.
    decided: True if the peers know of the problem already.
    """

    def __init__(self, problem: CorruptError | ReplacedError | None, *, decided: bool):
        super().__init__(str(problem))
        self.problem, self.decided = problem, decided


def attempt_on_all_processes(call: Call, attempt: Callable[[], tuple[str, T]]) -> tuple[str, T]:
    """Repeats `attempt` until it succeeds in every process on the same checkpoint, and returns its result.

    An attempt returns the identity of the checkpoint and a result. If any process finds damage, every process raises
    that error. Raises `ReplacedError` after five attempts on different checkpoints.
    """
    for _ in range(READ_ATTEMPTS):
        result: Any = None
        problem: CorruptError | ReplacedError | None = None
        try:
            result = attempt()
        except (CorruptError, ReplacedError) as error:
            problem = error
        except CollectiveError as error:
            problem = error.problem
            if error.decided and problem:
                raise problem from None
            if error.decided:
                continue
        if _agree(call, problem, "" if problem else result[0]):
            return result
    raise ReplacedError("the checkpoint is replaced faster than all processes can read it")


def decide_for_attempt(
    call: Call, identity: str, state: dict[str, Any], choose: Callable[[Sequence[Any]], dict[str, Any] | None]
) -> Any:
    """Returns what `choose` returns in process 0 for the states of all processes, during an attempt of all.

    `identity` is that of the checkpoint that this process reads. Raises `CollectiveError` if the attempt has failed in
    one of the processes, or if they read different checkpoints.
    """

    def chosen(messages: Sequence[Any]) -> Any:
        if problem := _first_problem(messages):
            return problem
        if len({message["identity"] for message in messages}) > 1:
            return []
        return choose(messages)

    found = call.gather_and_decide({"identity": identity, **state}, chosen)
    if isinstance(found, list):
        raise CollectiveError(_as_error(found) if found else None, decided=True)
    return found


def check_attempt(call: Call) -> None:
    """Raises `CollectiveError` if the attempt has failed in another process, so that no process waits for it."""
    decide_for_attempt(call, "", {}, lambda states: None)


def _agree(call: Call, problem: CorruptError | ReplacedError | None, identity: str) -> bool:
    """Returns True if all processes have read the same checkpoint. If one has a problem, all raise it."""
    message = [isinstance(problem, CorruptError), str(problem)] if problem else identity
    found = call.gather_and_decide(
        message, lambda messages: _first_problem(messages) or (None if len(set(messages)) == 1 else [])
    )
    if not found:
        return found is None
    raised = _as_error(found)
    raise problem if isinstance(problem, type(raised)) else raised


def _first_problem(messages: Sequence[Any]) -> list[Any] | None:
    """Returns the first process with a problem, followed by the problem. A message that is a list is a problem."""
    return next(([n, *message] for n, message in enumerate(messages) if isinstance(message, list)), None)


def _as_error(problem: list[Any]) -> CorruptError | ReplacedError:
    process, damaged, text = problem
    return (CorruptError if damaged else ReplacedError)(f"process {process}: {text}")
