"""Tests the assignment of pieces to processes: each element once, about as much for each, the same in every process."""

import itertools
import json
import math
import pathlib
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax.sharding import Mesh, NamedSharding

from treering._core import boxes as _sharding
from treering._core import dtypes, skeleton
from treering._core.boxes import Box, Cells, box_shape, full_box, slices
from treering._core.entries import ArrayEntry, Entry, ValueEntry
from treering._core.layouts import Layout, held_by
from treering._processes import assignment, layouts
from treering._processes.assignment import Assignment, Piece
from treering._pytree.leaves import Catalogue, Described, LocalShard, write_order_key
from treering._run.tiers import host_copies
from treering._save import layout, second_copies
from treering._save.layout import PlannedFile
from treering.formats.safetensors import header as safetensors
from treering.formats.treering import manifest
from treering.formats.treering.manifest import piece_key
from treering.formats.treering.manifest_fields import ArrayRow, File, Manifest

P = jax.P
MIB = 1 << 20
MESH_AXES = ("x", "y")
unhurried = settings(deadline=None)  # a busy machine must not fail a test


class FakeDevice:
    """A fake device of a large job. JAX needs only these attributes to say which process has which part of an array."""

    platform, device_kind, client, slice_index = "cpu", "fake", None, 0

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, process

    def default_memory(self) -> None:
        return None

    def addressable_memories(self) -> list[Any]:
        return []


def mesh_of(*sizes: int, per_process: int = 1, axes: Sequence[str] = MESH_AXES) -> Mesh:
    devices = np.array([FakeDevice(n, n // per_process) for n in range(math.prod(sizes))], object)
    return Mesh(devices.reshape(sizes), axes[: len(sizes)])


def sharing(arrays: Sequence[tuple[Layout, int]], count: int, least: int | None = None) -> tuple[list[Assignment], Any]:
    """Returns the shares that `plan` chooses for one group of arrays, and the bytes that each process must write."""
    loads = np.zeros(count, np.int64)
    total = sum(one.nbytes(itemsize) for one, itemsize in arrays)
    with pytest.MonkeyPatch.context() as patch:
        if least is not None:
            patch.setattr(assignment, "_MIN_CUT_BYTES", least)
        return assignment.balance(arrays, loads, total // count), loads


def written_bytes(shares: Sequence[tuple[Assignment, int]], count: int) -> np.ndarray:
    """Returns the bytes that each process writes, computed from the shares alone."""
    loads = np.zeros(count, np.int64)
    for share, itemsize in shares:
        np.add.at(loads, np.asarray(share.writers), [itemsize * math.prod(box_shape(box)) for box in share.boxes])
    return loads


def shape_of(one: Layout) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in axis) for axis in zip(*one.boxes, strict=True))


# Each element is written once


@st.composite
def grids(draw: st.DrawFn, count: int) -> Layout:
    """Draws grids over up to three axes, with cells of any size in any order, each held by any processes."""
    axes: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(0, 3))):
        sizes = draw(st.one_of(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.just([0])))
        axes.append(list(itertools.pairwise(itertools.accumulate(sizes, initial=0))))
    boxes = draw(st.permutations(list(itertools.product(*axes))))
    someone = st.sets(st.integers(0, count - 1), min_size=1)
    return Layout(boxes, [sorted(draw(someone)) for _ in boxes])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[tuple[Layout, int]]]:
    """Draws the number of processes, and arrays as layouts and item sizes."""
    count = draw(st.integers(1, 12))
    arrays = st.tuples(grids(count), st.sampled_from([1, 2, 4, 8, 16]))
    return count, draw(st.lists(arrays, min_size=1, max_size=5))


@pytest.mark.long
@unhurried
@given(jobs())
def test_every_element_has_one_writer_who_holds_it(job: tuple[int, list[tuple[Layout, int]]]) -> None:
    count, arrays = job
    shares, loads = sharing(arrays, count, least=64)
    for (one, _), share in zip(arrays, shares, strict=True):
        covered = np.zeros(shape_of(one), int)
        for box, writer in zip(share.boxes, share.writers, strict=True):
            covered[slices(box, full_box(covered.shape))] += 1
            holders = [own for outer, own in zip(one.boxes, one.holders, strict=True) if within(box, outer)]
            assert any(writer in own for own in holders)
        assert (covered == 1).all()
        if covered.size:  # readers need the boxes to be a grid
            assert Cells.of(share.boxes)[0].shape == covered.shape
        if share.layout is not None:  # The manifest has only the turn of these arrays.
            assert share.layout is one and share.boxes == one.boxes
            turns = [own[share.turn % len(own)] for own in one.holders]
            assert turns == np.asarray(share.writers).tolist()
    assert loads.tolist() == written_bytes([(s, a[1]) for s, a in zip(shares, arrays, strict=True)], count).tolist()
    assert loads.sum() == sum(one.nbytes(itemsize) for one, itemsize in arrays)


def within(box: Box, outer: Box) -> bool:
    return all(a <= start and stop <= b for (start, stop), (a, b) in zip(box, outer, strict=True))


@pytest.mark.long
@unhurried
@given(jobs())
def test_each_piece_is_one_run_of_bytes_of_what_its_holders_have(job: tuple[int, list[tuple[Layout, int]]]) -> None:
    """Each piece is one run of bytes of the box that its holders have."""
    count, arrays = job
    for (one, _), share in zip(arrays, sharing(arrays, count, least=64)[0], strict=True):
        for box in share.boxes:
            outer = next(outer for outer in one.boxes if within(box, outer))
            at = np.arange(math.prod(box_shape(outer))).reshape(box_shape(outer))[slices(box, outer)].ravel()
            assert at.tolist() == list(range(assignment._offset(box, outer), assignment._offset(box, outer) + at.size))


@pytest.mark.long
@unhurried
@given(jobs())
def test_the_same_in_every_process(job: tuple[int, list[tuple[Layout, int]]]) -> None:
    count, arrays = job
    again = [(Layout(one.boxes, one.holders), itemsize) for one, itemsize in arrays]
    found = [sharing(one, count, least=64)[0] for one in (arrays, again)]
    plain = [[(s.boxes, np.asarray(s.writers).tolist(), s.turn) for s in shares] for shares in found]
    assert plain[0] == plain[1]


@pytest.mark.long
@unhurried
@given(jobs(), st.sampled_from([64, 500, 4000]))
def test_what_is_small_is_never_cut(job: tuple[int, list[tuple[Layout, int]]], least: int) -> None:
    """Boxes with pieces below the limit are not cut."""
    count, arrays = job
    for (one, itemsize), share in zip(arrays, sharing(arrays, count, least)[0], strict=True):
        if max(math.prod(box_shape(box)) for box in one.boxes) * itemsize < 2 * least:
            assert share.boxes == one.boxes
        # If rows cannot be divided evenly, there are up to about eight times as many cells.
        assert len(share.boxes) <= max(1, 17 * one.nbytes(itemsize) // least) * len(one.boxes)


def test_nothing_below_two_mebibytes_is_cut_and_more_is() -> None:
    for size, parts in [(2 * MIB - 1, 1), (2 * MIB, 2), (8 * MIB, 8), (80 * MIB, 8)]:
        ((share,), _) = sharing([(Layout([((0, size),)], [range(8)]), 1)], 8)
        assert len(share.boxes) == parts


@pytest.mark.long
@pytest.mark.whole
@unhurried
@given(st.integers(1, 40_000), st.sampled_from([1, 3, 16, 64]), st.sampled_from([1, 2, 4, 8, 16]), st.integers(2, 40))
def test_cells_begin_at_addresses_that_can_be_adopted(rows: int, columns: int, itemsize: int, parts: int) -> None:
    """Cells begin at multiples of 64 bytes, so that JAX can adopt their memory."""
    box = ((0, rows), (0, columns))
    cuts = assignment._cuts(Layout([box], [[0]]), itemsize, parts)
    cells = list(assignment.cut_box(box, cuts))
    if rows >= 8 * 8 * 64 * parts or (columns * itemsize % 64 == 0 and rows >= 8 * parts):
        assert not any(assignment._offset(cell, box) * itemsize % 64 for cell in cells)
    assert len(cells) <= max(parts, 8 * parts + rows)


# All processes write about as much


def sharded(shape: Sequence[int], mesh: Mesh, spec: Any) -> Layout:
    return layouts.layout_of(NamedSharding(mesh, spec), tuple(shape))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """Draws meshes of up to three axes, each of which may cut any axis of an array, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = mesh_of(*sizes, per_process=draw(st.integers(1, 3)), axes=("x", "y", "z"))
    names = draw(st.permutations(mesh.axis_names))
    ends = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    own = [names[: ends[0]], names[ends[0] : ends[1]]]
    spec = draw(st.permutations([*(tuple(part) if len(part) > 1 else part[0] if part else None for part in own), None]))
    parts = [
        math.prod(mesh.shape[name] for name in ((part,) if isinstance(part, str) else part or ())) for part in spec
    ]
    return NamedSharding(mesh, P(*spec)), tuple(part * draw(st.integers(1, 3)) for part in parts)


@pytest.mark.long
@unhurried
@given(shardings())
def test_what_follows_from_mesh_and_spec_is_what_jax_says(found: tuple[NamedSharding, tuple[int, ...]]) -> None:
    """The layout computed from mesh and spec equals the one from JAX's own map of devices."""
    sharding, shape = found
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_sharding.box_of(index, shape), set()).add(device.process_index)
    layout = layouts.layout_of(sharding, shape)
    assert layouts._of_mesh(sharding, shape) is not None
    assert dict(zip(layout.boxes, map(set, layout.holders), strict=True)) == holders
    assert layout.elements.tolist() == [math.prod(box_shape(box)) for box in layout.boxes]
    assert list(layout.boxes) == [layout.boxes[n] for n in range(len(layout.boxes))]
    for box in layout.boxes:
        assert [layout.boxes[n] for n in layout.boxes.overlapping(box)] == [box]


LINE, SQUARE = mesh_of(64), mesh_of(8, 8)
SMALL = [((n % 97 + 1, 64), 4) for n in range(3000)]
LARGE = [((256 * (n % 3 + 1), 2048), 2) for n in range(9)]
FSDP = [(shape, P("x")) for shape in [(4096, 512), (512, 4096), (64,)] * 9]
# 8 groups of 8 processes that hold the same pieces
REPLICAS = [(shape, P("y")) for shape in [(2048, 2048), (256, 512), (8,)] * 9]
TREES: dict[str, tuple[int, list[tuple[Layout, int]]]] = {
    "many small, replicated": (64, [(sharded(shape, LINE, P()), size) for shape, size in SMALL]),
    "few large, replicated": (64, [(sharded(shape, LINE, P()), size) for shape, size in LARGE]),
    "a hundred large, replicated": (8, [(Layout([((0, 32 * MIB),)], [range(8)]), 1)] * 100),
    "one huge, replicated": (64, [(sharded((16384, 8192), LINE, P()), 4)]),
    "one huge in one axis": (64, [(sharded((1 << 28,), LINE, P()), 2)]),
    "one huge with few rows": (64, [(sharded((4, 1 << 26), LINE, P()), 2)]),
    "one huge among small": (64, [(sharded(s, LINE, P()), n) for s, n in [((16384, 8192), 4), *SMALL]]),
    "one copy": (64, [(sharded(shape, LINE, spec), 4) for shape, spec in FSDP]),
    "eight copies": (64, [(sharded(shape, SQUARE, spec), 4) for shape, spec in REPLICAS]),
    "eight copies of one": (64, [(sharded((16384, 8192), SQUARE, P("y")), 4)]),
    "eight copies of what is small": (64, [(sharded((512, 8), SQUARE, P("y")), 4)] * 1000),
    "columns": (64, [(sharded((4096, 4096), SQUARE, P(None, "y")), 4)] * 3),
    "grid": (64, [(sharded((4096, 4096), SQUARE, P("x", "y")), 4)] * 3),
    "mixed": (
        64,
        [(sharded(shape, LINE, spec), 4) for shape, spec in FSDP]
        + [(sharded(shape, SQUARE, spec), 2) for shape, spec in REPLICAS]
        + [(sharded(shape, LINE, P()), size) for shape, size in [*LARGE, *SMALL[:500]]],
    ),
    "several devices a process": (
        8,
        [(sharded((2048, 2048), mesh_of(8, 8, per_process=8), spec), 4) for spec in [P("x"), P("y"), P(), P("y", "x")]],
    ),
    # Each process has devices of several groups, and holds the same pieces as its peers.
    "groups within processes": (16, [(sharded((4096, 512), mesh_of(8, 8, per_process=4), P("y")), 4)] * 5),
}


def assert_even(count: int, arrays: Sequence[tuple[Layout, int]]) -> None:
    shares, loads = sharing(arrays, count)
    fair = sum(one.nbytes(itemsize) for one, itemsize in arrays) / count
    # The number of pieces stays bounded too.
    assert sum(len(share.boxes) for share in shares) <= sum(len(one.boxes) for one, _ in arrays) + 17 * count
    most = max(1.25 * fair + MIB, 2 * MIB)
    assert loads.max() <= most, f"{loads.max() / fair:.2f} times a fair share of {fair:.0f} bytes"


@pytest.mark.parametrize("name", TREES)
def test_all_write_about_the_same(name: str) -> None:
    assert_even(*TREES[name])


def test_small_leaves_make_up_for_large_ones_wherever_they_come() -> None:
    """Small leaves even out the loads of large ones, before or after these in the tree."""
    small, large = [(Layout([((0, 1 << 16),)], [range(8)]), 1)] * 4000, [(Layout([((0, 7 * MIB),)], [range(8)]), 1)] * 9
    for arrays in (small + large, large + small):
        _, loads = sharing(arrays, 8)
        assert loads.max() <= 1.01 * loads.mean()


@pytest.mark.long
@unhurried
@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=n, max_size=n)),
    st.lists(st.integers(0, 100), min_size=10, max_size=10),
)
def test_the_turn_is_taken_in_which_the_busiest_has_the_least(holders: list[set[int]], before: list[int]) -> None:
    """The chosen turn has the smallest load of its busiest process."""
    size = 3 * MIB // 2  # smaller pieces go to few processes instead
    boxes = [((n * size, (n + 1) * size),) for n in range(len(holders))]
    one = Layout(boxes, [sorted(own) for own in holders])
    loads = np.array(before, np.int64)
    (share,) = assignment.balance([(one, 1)], loads, 1000)
    turns = [[own[turn % len(own)] for own in one.holders] for turn in range(max(map(len, holders)))]
    assert max(before[own] for own in turns[share.turn]) == min(max(before[own] for own in turn) for turn in turns)
    assert (loads - before).tolist() == [size * turns[share.turn].count(process) for process in range(10)]


def test_few_processes_write_what_is_small() -> None:
    """Few processes write small leaves, because each that writes makes a file. A thousand leaves of 1 KiB need one."""
    everyone = [range(4096)]
    for nbytes, writers in ((1 << 10, 1), (64 << 10, 63), (MIB, 1000)):
        _, loads = sharing([(Layout([((0, nbytes),)], everyone), 1)] * 1000, 4096)
        assert np.count_nonzero(loads) == writers and loads.max() <= MIB
    large = [(Layout([((0, 64 * MIB),)], [range(16)]), 1)]
    _, loads = sharing([*large, *[(Layout([((0, 1 << 10),)], [range(16)]), 1)] * 1000], 16)
    assert loads.max() < 1.1 * loads.mean()  # If all processes write anyway, all share the small leaves.


@pytest.mark.long
@unhurried
@given(st.lists(st.integers(1, 24).map(lambda n: 1 << n), min_size=1, max_size=50), st.integers(1, 64))
def test_replicated_trees_of_any_sizes_are_written_evenly(sizes: list[int], count: int) -> None:
    assert_even(count, [(Layout([((0, size),)], [range(count)]), 4) for size in sizes])


@pytest.mark.long
@unhurried
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=3), st.integers(2, 64), st.sampled_from([1, 2, 4]))
@example([5, 4 * MIB], 8, 4)  # fewer rows than holders
@example([33, 4 * MIB], 64, 4)
@example([768, 50257], 64, 2)  # a part needs many rows to begin at a multiple of 64 bytes
@example([4096, 4095], 64, 1)
def test_one_replicated_array_of_any_shape_is_written_evenly(shape: list[int], count: int, itemsize: int) -> None:
    assert_even(count, [(Layout([full_box(tuple(shape))], [range(count)]), itemsize)])


@pytest.mark.long
@unhurried
@given(st.integers(1, 8), st.integers(1, 8), st.lists(st.integers(1, 22), min_size=1, max_size=30))
def test_replicas_of_any_number_of_parts_are_written_evenly(groups: int, copies: int, sizes: list[int]) -> None:
    arrays = []
    for n in sizes:
        boxes = [((part << n, (part + 1) << n),) for part in range(groups)]
        arrays.append((Layout(boxes, [range(part, groups * copies, groups) for part in range(groups)]), 4))
    assert_even(groups * copies, arrays)


# The bytes that the shares lead to, for all processes of a job


class State(NamedTuple):
    """The arrays of a job: their values and layouts. `together` says which arrays are global."""

    count: int
    values: list[np.ndarray]
    layouts: list[Layout]
    together: list[bool]

    def entries(self) -> list[Entry]:
        return [ArrayEntry(f"leaf/{n}", "jax", v.dtype.name, v.shape) for n, v in enumerate(self.values)]

    def described(self, process: int, copies: bool) -> Described:
        """Returns the description of what a process has, as `leaves.describe_leaves` would make it."""
        found: list[tuple[LocalShard, Any]] = []
        for leaf, (value, one) in enumerate(zip(self.values, self.layouts, strict=True)):
            for box, holders in zip(one.boxes, one.holders, strict=True):
                if process in holders:
                    data = value[slices(box, full_box(value.shape))].copy()
                    found.append((LocalShard(leaf, box, value.dtype, data.nbytes, copies), data))
        found.sort(key=lambda one: write_order_key(one[0].nbytes))
        parts = {leaf for leaf, together in enumerate(self.together) if together}
        catalogue = Catalogue(self.entries(), {}, dict.fromkeys(parts, object()), parts, [])  # type: ignore[arg-type]
        return Described(catalogue, tuple(shard for shard, _ in found), [data for _, data in found])

    def shares(self) -> dict[int, Assignment]:
        arrays = [(one, value.itemsize) for one, value in zip(self.layouts, self.values, strict=True)]
        return dict(enumerate(sharing(arrays, self.count, least=64)[0]))


@st.composite
def states(draw: st.DrawFn) -> State:
    count, arrays = draw(jobs())
    state = State(count, [], [], [])
    for n, (one, itemsize) in enumerate(arrays):
        together = draw(st.booleans())
        if not together:  # every process has its own copy
            one = Layout(one.boxes, [range(count)] * len(one.boxes))
        dtype = np.dtype({1: "int8", 2: "uint16", 4: "float32", 8: "complex64", 16: "complex128"}[itemsize])
        shape = shape_of(one)
        values = np.random.default_rng(n).integers(0, 256, (*shape, itemsize), np.uint8).view(dtype).reshape(shape)
        state.values.append(values)
        state.layouts.append(one)
        state.together.append(together)
    return state


def handed_bytes(data: Any) -> bytes:
    return np.ascontiguousarray(data).tobytes()


@pytest.mark.long
@unhurried
@given(states(), st.booleans())
def test_the_pieces_of_all_processes_are_the_arrays(state: State, copies: bool) -> None:
    """The pieces of all processes together are the arrays, byte for byte."""
    shares = state.shares()
    rebuilt = [np.zeros(value.nbytes, np.uint8).view(value.dtype).reshape(value.shape) for value in state.values]
    seen = [np.zeros(value.shape, int) for value in state.values]
    for process in range(state.count):
        described = state.described(process, copies)
        catalogue = described.catalogue
        handed, arrays = assignment.select_shards(described, shares, process)
        found = assignment.pieces(catalogue.entries, handed, shares, process)
        assert [(p.leaf, p.box, p.nbytes) for p in found] == assignment.piece_sizes(catalogue.entries, shares, process)
        for piece in found:
            value, source, held = state.values[piece.leaf], handed[piece.shard], handed_bytes(arrays[piece.shard])
            data = held[piece.begin : piece.begin + piece.nbytes]
            assert source.nbytes == len(held) and source.leaf == piece.leaf
            at = slices(piece.box, full_box(value.shape))
            assert data == value[at].tobytes()
            rebuilt[piece.leaf][at] = np.frombuffer(data, value.dtype).reshape(box_shape(piece.box))
            seen[piece.leaf][at] += 1
        falling = [min(p.nbytes & -p.nbytes, 64) or 64 for p in found]
        assert falling == sorted(falling, reverse=True)  # each then begins at an aligned offset
        # Of global arrays only the written parts are staged. Other arrays are staged in full to be compared.
        assert sum(s.nbytes for s in handed if state.together[s.leaf]) == sum(
            p.nbytes for p in found if state.together[p.leaf]
        )
        own = [s.leaf for s in handed if not state.together[s.leaf]]
        local = [n for n, one in enumerate(state.layouts) if not state.together[n] for _ in one.boxes]
        assert sorted(own) == local
    for value, copy, times in zip(state.values, rebuilt, seen, strict=True):
        assert (times == 1).all() and value.tobytes() == copy.tobytes()


@pytest.mark.long
@unhurried
@given(states())
def test_a_process_that_saves_alone_writes_all_that_it_has(state: State) -> None:
    """A process that saves alone writes all its shards, those of well aligned arrays first."""
    described = state.described(0, False)
    handed = described.shards
    found = assignment.pieces(described.catalogue.entries, handed, None, 0)
    assert [(p.leaf, p.box, p.begin, p.nbytes) for p in found] == [(s.leaf, s.box, 0, s.nbytes) for s in handed]
    falling = [min(p.nbytes & -p.nbytes, 64) or 64 for p in found]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.long
@unhurried
@given(states(), st.sampled_from([1, 1000, 100_000]))
def test_the_manifest_leads_to_every_byte(state: State, header_limit: int) -> None:
    """A reader finds every byte by the manifest of process 0 in the files as each process lays them out."""
    shares, entries = state.shares(), state.entries()
    names: list[str] = []
    buffers: list[tuple[safetensors.Header, bytes]] = []
    firsts: list[list[int]] = []
    for process in range(state.count):
        handed, arrays = assignment.select_shards(state.described(process, False), shares, process)
        found = assignment.pieces(entries, handed, shares, process)
        files = layout.plan(entries, found, header_limit)
        firsts.append([file.first for file in files])
        for n, file in enumerate(files):
            mine = found[file.first : files[n + 1].first if n + 1 < len(files) else None]
            buffer = b"".join(handed_bytes(arrays[p.shard])[p.begin :][: p.nbytes] for p in mine)
            assert len(buffer) == file.nbytes and len(file.begins) == len(mine)
            buffers.append((safetensors.decode_header(bytearray(file.header), "file"), buffer))
        names += layout.names("token", len(files), process, state.count)
    assert len(set(names)) == len(names)

    def order(process: int) -> Iterator[tuple[int, Box]]:
        return ((leaf, box) for leaf, box, _ in assignment.piece_sizes(entries, shares, process))

    rows = layout.rows(state.described(0, False).catalogue, shares, layout.FileIndex(firsts, order))
    again = manifest.decode(encoded(rows, names), "here")
    for row, value in zip(again.leaves, state.values, strict=True):
        assert isinstance(row, ArrayRow)
        for number, box, key in located(row, again):
            header, buffer = buffers[number]
            begin, end = header.tensors[key].data_offsets
            assert buffer[begin:end] == value[slices(box, full_box(value.shape))].tobytes()


# Second copies on the disks of other hosts


def with_keepers(state: State, hosts: Sequence[int]) -> dict[int, Assignment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_copies, "held_layout", lambda catalogue, leaf, everyone: (state.layouts[leaf], False))
        return second_copies.with_keepers(state.described(0, False).catalogue, state.shares(), hosts)


class Part(NamedTuple):
    """An array file as one process plans it, with the bytes that it would write."""

    name: str
    header: bytes
    begins: Sequence[int]
    data: bytes


def part_of(name: str, file: PlannedFile, pieces: Sequence[Piece], arrays: Sequence[Any]) -> Part:
    own = pieces[file.first :][: len(file.begins)]
    data = b"".join(handed_bytes(arrays[p.shard])[p.begin : p.begin + p.nbytes] for p in own)
    assert len(data) == file.nbytes
    return Part(name, file.header, file.begins, data)


@pytest.mark.long
@pytest.mark.whole
@settings(deadline=None, max_examples=60)
@given(states(), st.data())
def test_after_the_loss_of_any_disk_every_file_is_on_another(state: State, data: st.DataObject) -> None:
    """Two disks have each file, bit for bit, once the files that only one host can write are sent."""
    hosts = data.draw(st.lists(st.integers(0, 4), min_size=state.count, max_size=state.count))
    shares, entries = with_keepers(state, hosts), state.entries()
    disks: dict[int, dict[str, Part]] = {disk: {} for disk in hosts}
    files: list[File] = []
    sent = held_elsewhere = 0
    for process in range(state.count):
        shards, arrays = assignment.select_shards(state.described(process, False), shares, process)
        pieces = assignment.pieces(entries, shards, shares, process)
        assert [p.shard for p in pieces if state.together[p.leaf]] == sorted(
            p.shard for p in pieces if state.together[p.leaf]
        )
        sizes = assignment.sizes_by_keeper(entries, shares, process)
        planned = layout.plan_groups(entries, pieces, map(len, sizes.values()))
        names = layout.names("7f3a9c", len(planned), process, state.count)
        own = [part_of(name, file, pieces, arrays) for name, file in zip(names, planned, strict=True)]
        files += [File(one.name, len(one.data), 0, "") for one in own]
        copies = second_copies.plan(entries, shards, shares, process, state.count, "7f3a9c")
        kept = [p.shard for copy in copies for p in copy.pieces]
        assert kept == sorted(set(kept))  # They can be staged, and freed, in the order in which they are written.
        own += [part_of(copy.name, copy.file, copy.pieces, arrays) for copy in copies]
        for one in own:
            assert one.name not in disks[hosts[process]]
            disks[hosts[process]][one.name] = one
        for keeper, group in sizes.items():
            assert keeper == second_copies.NO_KEEPER or hosts[keeper] != hosts[process]
            sent += sum(nbytes for *_, nbytes in group) if keeper == second_copies.NO_KEEPER else 0
    for leaf, share in shares.items():
        assert share.keepers is not None
        for box, writer, keeper in zip(share.boxes, share.writers, share.keepers, strict=True):
            one = state.layouts[leaf]
            holders = next(own for outer, own in zip(one.boxes, one.holders, strict=True) if within(box, outer))
            assert keeper == second_copies.NO_KEEPER or keeper in holders
            if keeper == second_copies.NO_KEEPER and any(hosts[n] != hosts[writer] for n in holders):
                held_elsewhere += math.prod(box_shape(box)) * state.values[leaf].itemsize
    # A writer sends what another host holds only if that keeper would write less than an eighth of what is sent anyway.
    assert held_elsewhere * 8 <= sent * (state.count - 1)
    sizes_on = {disk: {name: len(one.data) for name, one in own.items()} for disk, own in disks.items()}
    for process, missing in host_copies.missing_copies(files, sizes_on, hosts).items():
        for one in missing:
            assert one.file.name not in disks[hosts[process]]
            disks[hosts[process]][one.file.name] = disks[hosts[one.source]][one.file.name]
    for lost in disks if len(disks) > 1 else ():
        left = {name: one for disk, own in disks.items() if disk != lost for name, one in own.items()}
        assert left.keys() == {file.name for file in files}
        assert all(one == left[name] for name, one in disks[lost].items())  # bit for bit
        # The next job has an empty disk instead of the lost one, and sends the files that lack a copy again.
        there = {disk: {name: len(one.data) for name, one in own.items()} for disk, own in disks.items()}
        there[lost] = {}
        for process, missing in host_copies.missing_copies(files, there, hosts).items():
            there[hosts[process]].update({one.file.name: one.file.size for one in missing})
        assert all(sum(file.name in own for own in there.values()) == 2 for file in files)


def test_keepers_follow_the_replicas() -> None:
    """Replicas keep each other's pieces, and the processes of a disk share the work."""
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    catalogue = catalogue_of({"w": ((8, 1 << 20), "float32", NamedSharding(mesh_of(4, 2), P("y")))}, 0)
    shares = second_copies.with_keepers(catalogue, assignment.assign(catalogue, 8), hosts)
    (share,) = shares.values()
    assert share.keepers is not None
    pairs = set(zip(np.asarray(share.writers).tolist(), share.keepers.tolist(), strict=True))
    assert pairs == {(n, (n + 2) % 8) for n in range(8)}
    for spec in (P(("x", "y")), P("x", "y")):  # No other process holds these pieces.
        catalogue = catalogue_of({"w": ((8, 1 << 20), "float32", NamedSharding(mesh_of(4, 2), spec))}, 0)
        (share,) = second_copies.with_keepers(catalogue, assignment.assign(catalogue, 8), hosts).values()
        assert share.keepers is not None and set(share.keepers.tolist()) == {second_copies.NO_KEEPER}


def located(row: ArrayRow, listed: Manifest) -> Iterator[tuple[int, Box, str]]:
    """Returns file, box and name of each piece, by the rules of docs/format.md."""
    if isinstance(row.where, int):
        yield row.where, full_box(row.shape), piece_key(row.path, None)
        return
    assert isinstance(row.where, tuple)
    number, turn = row.where
    cells, holders = Cells(listed.layouts[number].cuts), listed.holders[listed.layouts[number].holders]
    for box, files in zip(cells, holders, strict=True):
        yield files[turn % len(files)], box, piece_key(row.path, None if box == full_box(row.shape) else box)


def unsorted(at: str, names: list[str]) -> tuple[skeleton.Node, list[str]]:
    return skeleton.infer_container(at, names, lists=False, sort=False)


def encoded(rows: layout.Rows, names: Sequence[str]) -> bytes:
    return manifest.seal(
        Manifest(
            format=manifest.FORMAT,
            version=manifest.VERSION,
            created="2026-01-01T00:00:00+00:00",
            software={"treering": "1.2.3", "jax": "0.10.2", "numpy": "2.4.6"},
            files=[File(name, 1 << 33, 1 << 16, "0123456789abcdef") for name in names],
            layouts=rows.layouts,
            holders=rows.holders,
            tree=skeleton.assemble([row.path for row in rows.leaves], unsorted)[1],
            leaves=rows.leaves,
        )
    )


# Index arithmetic


@st.composite
def boxes_in_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    outer = tuple(tuple(sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2)))) for n in shape)
    inner = tuple(tuple(sorted(draw(st.sets(st.integers(a, b), min_size=2, max_size=2)))) for a, b in outer)
    return shape, outer, inner  # type: ignore[return-value]


@pytest.mark.long
@unhurried
@given(boxes_in_boxes())
def test_offsets_and_parts(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, outer, inner = case
    assert assignment._offset((), ()) == 0
    value = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    data = value[slices(outer, full_box(shape))].copy()
    wanted = value[slices(inner, full_box(shape))]
    assert data.ravel()[assignment._offset(inner, outer)] == wanted.ravel()[0]
    for copies in (False, True):
        part, held = assignment._part(LocalShard(3, outer, data.dtype, data.nbytes, copies), data, inner)
        assert (part.leaf, part.box, part.dtype, part.nbytes, part.needs_copy) == (
            *(3, inner, data.dtype, wanted.nbytes, copies),
        )
        np.testing.assert_array_equal(held, wanted)
        assert np.shares_memory(held, data)  # must be a view


@pytest.mark.long
@unhurried
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=3),
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 16, 64])), min_size=3, max_size=3),
)
def test_cells_fill_their_box(axes: list[tuple[int, int]], cuts: list[tuple[int, int]]) -> None:
    box = tuple((start, start + size) for start, size in axes)
    found = list(assignment.cut_box(box, [assignment.AxisCut(*cut) for cut in cuts[: len(box)]]))
    covered = np.zeros(box_shape(box), int)
    for cell in found:
        assert all(start < stop for start, stop in cell)
        covered[slices(cell, box)] += 1
    assert (covered == 1).all() and len(found) <= math.prod(parts for parts, _ in cuts[: len(box)])
    for (start, stop), cut, own in zip(box, cuts, zip(*found, strict=True), strict=False):
        assert all((a - start) % cut[1] == 0 for a, _ in own) and max(b for _, b in own) == stop


# The plan of a tree


def catalogue_of(leaves: Mapping[str, tuple[tuple[int, ...], str, Any]], process: int) -> Catalogue:
    """Returns the catalogue of arrays: by name, shape, dtype and sharding (None: a NumPy array of each process)."""
    entries: list[Entry] = []
    shardings: dict[int, Any] = {}
    spread: set[int] = set()
    for n, (path, (shape, dtype, sharding)) in enumerate(leaves.items()):
        entries.append(ArrayEntry(path, "jax" if sharding else "numpy", dtype, shape))
        if sharding is not None:
            shardings[n] = sharding
            if any(device.process_index != process for device in sharding.device_set):
                spread.add(n)
    return Catalogue(entries, {}, shardings, spread, [])


def test_assignment_is_equal_in_all_processes() -> None:
    mesh = mesh_of(2, 4, per_process=2)
    own = NamedSharding(Mesh(mesh.devices[1, 2:], ("x",)), P("x"))  # both devices of process 3
    leaves: dict[str, Any] = {
        "grid": ((64, 64), "float32", NamedSharding(mesh, P("x", "y"))),
        "rows": ((1 << 20, 4), "bfloat16", NamedSharding(mesh, P("x"))),
        "all": ((1000, 1000), "float32", NamedSharding(mesh, P())),
        "numpy": ((1 << 22,), "int8", None),
        "scalar": ((), "float32", NamedSharding(mesh, P())),
        "empty": ((0, 8), "float32", NamedSharding(mesh, P(None, "y"))),
        "one": ((1 << 20, 2), "float32", own),
    }
    catalogues = [catalogue_of(leaves, process) for process in range(4)]
    more = [catalogues[0].entries[0].at("tied"), ValueEntry("step", "int", 7)]
    catalogues = [one._replace(entries=[*one.entries, *more], tied={len(leaves): 0}) for one in catalogues]
    assert [sorted(catalogue.global_leaves) for catalogue in catalogues] == [[0, 1, 2, 4, 5, 6]] * 3 + [[0, 1, 2, 4, 5]]
    plans = [assignment.assign(catalogue, 4, single) for catalogue in catalogues for single in (None, {6: 3})]
    plain = [{n: (s.boxes, np.asarray(s.writers).tolist(), s.turn) for n, s in plan.items()} for plan in plans]
    assert all(sorted(one) == list(range(len(leaves))) for one in plain)
    assert all(one == plain[0] for one in plain[::2]) and all(one == plain[1] for one in plain[1::2])
    # Processes stage their global arrays before they know `single`, so `single` must not change the plan of these.
    assert all(plain[0][n] == plain[1][n] for n in (0, 1, 2, 4))
    boxes, writers, _ = plain[1][6]
    assert len(boxes) == 2 and set(writers) == {3}
    assert len(set(plain[0][3][1])) > 1  # Several processes write an array that all have.
    sizes = [(share, dtypes.itemsize(catalogues[0].entries[n].dtype)) for n, share in plans[0].items()]
    assert written_bytes(sizes, 4).sum() == sum(
        math.prod(shape) * dtypes.itemsize(dtype) for shape, dtype, _ in leaves.values()
    )


# Thousands of processes


PROCESSES, LEAVES = 4096, 1000


def transformer() -> dict[str, Any]:
    """Returns four kinds of layers, with the moments of an optimizer."""
    mesh = mesh_of(64, 64)
    leaves: dict[str, Any] = {}

    def add(path: str, shape: tuple[int, ...], spec: Any) -> None:
        for kind, dtype in [("params", "bfloat16"), ("mu", "float32"), ("nu", "float32")]:
            leaves[f"{kind}/{path}"] = shape, dtype, NamedSharding(mesh, spec)

    add("embedding", (128 * 1024, 8192), P("y", "x"))
    add("head", (8192, 128 * 1024), P("x", "y"))
    add("norm", (8192,), P())
    for n in range(37):
        width, path = 1024 * (4 + 4 * (n % 4)), f"layers/{n}"
        add(f"{path}/attention/qkv", (width, 3, width), P("x", None, "y"))
        add(f"{path}/attention/key", (width, width // 8), P("x", "y"))
        add(f"{path}/attention/out", (width, width), P("y", "x"))
        add(f"{path}/mlp/up", (width, 4 * width), P("x", "y"))
        add(f"{path}/mlp/gate", (width, 4 * width), P(("x", "y")))
        add(f"{path}/mlp/down", (4 * width, width), P("y"))
        add(f"{path}/mlp/bias", (4 * width,), P("y"))
        add(f"{path}/norm1", (width,), P())
        add(f"{path}/norm2", (width,), P())
    return dict(sorted(leaves.items())[:LEAVES])  # in the order of a tree


def alike(
    shapes: Sequence[tuple[int, ...]], sizes: tuple[int, ...] | None = None, spec: Any = None
) -> Callable[[], dict[str, Any]]:
    def leaves() -> dict[str, Any]:
        sharding = None if sizes is None else NamedSharding(mesh_of(*sizes), spec)
        return {f"layers/{n}/kernel": (shapes[n % len(shapes)], "float32", sharding) for n in range(LEAVES)}

    return leaves


WIDE = [(4096, 4096), (8192, 8192), (16384, 4096)]
FORTY = [(4096 * (1 + n % 8), 64 * (1 + n // 8)) for n in range(40)]
# New devices for each call, so that JAX's caches have nothing either.
SCALES: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp": alike(WIDE, (PROCESSES,), P("x")),
    "fsdp, forty shapes": alike(FORTY, (PROCESSES,), P("x")),
    "hsdp": alike(WIDE, (64, 64), P("y")),
    "fsdp x tp": alike(WIDE, (64, 64), P("x", "y")),
    "replicated": alike(WIDE, (PROCESSES,), P()),
    "replicated, few large": alike([(64 * 1024, 8192), *[(512, 512)] * 249], (PROCESSES,), P()),
    "not global": alike(WIDE),
    "transformer": transformer,
}
QUICK = ("hsdp", "replicated", "replicated, few large")


class Figures(NamedTuple):
    """The cost of planning for thousands of processes in one of them, and the plan."""

    seconds: float
    peak: int
    leaves: dict[str, Any]
    catalogue: Catalogue
    shares: dict[int, Assignment]


def planned(make: Callable[[], dict[str, Any]], process: int) -> Figures:
    """Plans twice: once for the time and once for the memory, because measuring memory is slow."""
    seconds: list[float] = []
    for traced in (True, False):
        layouts.layout_of.cache_clear()
        held_by.cache_clear()
        leaves = make()
        catalogue = catalogue_of(leaves, process)
        if traced:
            tracemalloc.start()
        try:
            begun = time.perf_counter()
            shares = assignment.assign(catalogue, PROCESSES)
            mine = assignment.piece_sizes(catalogue.entries, shares, process)
            seconds.append(time.perf_counter() - begun)
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    loads = written_bytes([(one, itemsize_of(catalogue, n)) for n, one in shares.items()], PROCESSES)
    assert sum(nbytes for _, _, nbytes in mine) == loads[process]
    assert loads.max() <= 1.25 * loads.mean() + MIB
    return Figures(seconds[1], peak, leaves, catalogue, shares)


def itemsize_of(catalogue: Catalogue, leaf: int) -> int:
    entry: Any = catalogue.entries[leaf]
    return dtypes.itemsize(entry.dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCALES]
)
def test_a_thousand_leaves_on_thousands_of_processes(name: str) -> None:
    found = planned(SCALES[name], 17)
    assert len(found.leaves) == LEAVES and len({shape for shape, *_ in found.leaves.values()}) <= 40
    begun = time.perf_counter()

    def order(process: int) -> Iterator[tuple[int, Box]]:
        raise AssertionError("who has one file needs no order")

    rows = layout.rows(found.catalogue, found.shares, layout.FileIndex([[0]] * PROCESSES, order))
    names = [f"arrays-7f3a9c-{n:05}-of-{PROCESSES:05}.safetensors" for n in range(PROCESSES)]
    data = encoded(rows, names)
    encoding = time.perf_counter() - begun
    begun = time.perf_counter()
    again = manifest.decode(data, "here")
    decoding = time.perf_counter() - begun
    print(
        f"\n{name}: plan {found.seconds:.2f} s, {found.peak / 1e6:.0f} MB; manifest {len(data) / 1e6:.2f} MB with "
        f"{len(rows.layouts)} layouts, encoded in {encoding:.2f} s, decoded in {decoding:.2f} s"
    )
    assert found.peak < 200e6
    assert len(data) < 20e6
    for leaf in range(0, LEAVES, 37):
        share, row = found.shares[leaf], again.leaves[leaf]
        shape, _, sharding = list(found.leaves.values())[leaf]
        assert isinstance(row, ArrayRow) and row.shape == shape
        pieces = [(file, box) for file, box, _ in located(row, again)]
        assert pieces == list(zip(np.asarray(share.writers).tolist(), share.boxes, strict=True))
        assert sum(math.prod(box_shape(box)) for _, box in pieces) == math.prod(shape)
        indices = sharding.devices_indices_map(shape) if sharding else {}
        for writer, box in (
            pieces[:: max(1, len(pieces) // 10)] if sharding else ()
        ):  # files have the numbers of their processes
            assert within(box, _sharding.box_of(indices[sharding.mesh.devices.flat[writer]], shape))
        if isinstance(row.where, tuple):
            assert Cells(again.layouts[row.where[0]].cuts).shape == shape


@pytest.mark.long
def test_the_benchmark_of_plans_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.planning", "transformer", "4096"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {"plan of a save", "memory of the plan", "size of the manifest"}
