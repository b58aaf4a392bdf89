"""Published weights: what a step sends, and how long it takes, next to the layout of slime on the same bytes.

The peer is written here from a description of slime's layout: exclusive or, zstd level 1, XXH3-128, files patched in
place, two threads. It writes no manifest and syncs nothing.
"""

import contextlib
import mmap
import os
import pathlib
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
import zstandard

import treering as tr
from treering.formats.treering import deltas
from treering.formats.treering.read import Reader
from treering.stores.buffers import empty_aligned_array

from .table import markdown

_LAYERS, _WIDTH, _VOCABULARY, _TOKENS = 12, 768, 16_384, 64
_CHUNK_BYTES = 2 << 20
_COPIED_BYTES = 1 << 18
_THREADS = 2
_NOTE = (
    "A transformer of {millions:.0f} million bfloat16 parameters, {steps} steps of Adam at learning rate 3e-6 with "
    "gradients of random tokens. Medians. The peer is slime's layout: exclusive or, zstd 1, XXH3-128, patched in "
    "place. A follower fills new memory, so it takes at least as long as to copy the weights and to hash the copy. "
    "The targets are 2, 1.5 and 4 times: publishing and applying miss them, because both go through all weights at the "
    "speed of memory, as the peer does; threads and blocks that stay in the cache gave what the table has."
)


def _init(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {"embed": (_VOCABULARY, _WIDTH)}
    for n in range(_LAYERS):
        shapes |= {f"{n}.qkv": (_WIDTH, 3 * _WIDTH), f"{n}.out": (_WIDTH, _WIDTH)}
        shapes |= {f"{n}.up": (_WIDTH, 4 * _WIDTH), f"{n}.down": (4 * _WIDTH, _WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.02 * jax.random.normal(one, shape) for one, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    mask = jnp.tril(jnp.ones((tokens.size, tokens.size), bool))
    for n in range(_LAYERS):
        q, k, v = jnp.split(_normed(x) @ params[f"{n}.qkv"], 3, axis=-1)
        weights = jax.nn.softmax(jnp.where(mask, q @ k.T / _WIDTH**0.5, -1e9))
        x = x + weights @ v @ params[f"{n}.out"]
        x = x + jax.nn.gelu(_normed(x) @ params[f"{n}.up"]) @ params[f"{n}.down"]
    logits = _normed(x) @ params["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], 1))


def _normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def _versions(steps: int) -> Iterator[dict[str, jax.Array]]:
    """Yields the weights as a trainer publishes them, in bfloat16."""
    optimizer = optax.adam(3e-6)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        gradients = jax.grad(_loss)(params, jax.random.randint(key, (_TOKENS,), 0, _VOCABULARY))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    params = _init(jax.random.key(0))
    state = optimizer.init(params)
    for n in range(steps + 1):
        yield {name: array.astype(jnp.bfloat16) for name, array in params.items()}
        params, state = step(params, state, jax.random.key(n))


class _Peer:
    """A trainer that keeps its last bytes, and a receiver that patches a file."""

    def __init__(self, folder: pathlib.Path, first: dict[str, np.ndarray]):
        self._folder, self._last = folder, first
        self._at: dict[str, int] = {}
        with open(folder / "weights", "wb") as file:
            for name, data in first.items():
                self._at[name] = file.tell()
                file.write(data)

    def send(self, new: dict[str, np.ndarray], pool: ThreadPoolExecutor) -> tuple[int, dict[str, tuple[bytes, str]]]:
        """Encodes and writes a version. Returns its bytes."""

        def encode(name: str) -> tuple[str, tuple[bytes, str]]:
            data = new[name]
            packed = zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(data, self._last[name]).data)
            return name, (packed, xxhash.xxh3_128_hexdigest(data.data))

        found = dict(pool.map(encode, new))
        with open(self._folder / "delta", "wb") as file:
            file.writelines(packed for packed, _ in found.values())
        self._last = new
        return sum(len(packed) for packed, _ in found.values()), found

    def receive(self, found: dict[str, tuple[bytes, str]], pool: ThreadPoolExecutor) -> None:
        """Patches the file, and checks every tensor."""
        with open(self._folder / "weights", "r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 0)) as memory:
            # Its views must go before the mapping is closed.
            list(pool.map(lambda name: self._patch(memory, name, *found[name]), found))

    def _patch(self, memory: mmap.mmap, name: str, packed: bytes, expected: str) -> None:
        region = np.frombuffer(memory, np.uint8, self._last[name].size, self._at[name])
        hasher, reader, at = xxhash.xxh3_128(), zstandard.ZstdDecompressor().stream_reader(packed), 0
        while block := reader.read(_CHUNK_BYTES):
            chunk = np.frombuffer(block, np.uint8)
            region[at : at + chunk.size] ^= chunk
            hasher.update(region[at : at + chunk.size])
            at += chunk.size
        assert hasher.hexdigest() == expected


def _copy(data: np.ndarray) -> None:
    """Copies and hashes an array while its blocks are in the cache."""
    made, hasher = empty_aligned_array(data.shape, data.dtype), xxhash.xxh3_64()
    for at in range(0, data.size, _COPIED_BYTES):
        block = made[at : at + _COPIED_BYTES]
        np.copyto(block, data[at : at + _COPIED_BYTES])
        hasher.update(block.data)


def report(directory: str, steps: int) -> str:
    """Returns the table: bytes, and seconds to publish and to apply a version."""
    place = pathlib.Path(directory)
    rows: dict[str, list[tuple[float, float]]] = {"share": [], "publish": [], "apply": [], "floor": [], "stall": []}
    held: dict[str, np.ndarray] = {}
    peer: _Peer | None = None
    parameters = 0
    with tr.Publisher(place / "stream", full_every=1000) as publisher, ThreadPoolExecutor(_THREADS) as pool:
        for n, tree in enumerate(_versions(steps)):
            jax.block_until_ready(tree)
            data = {name: np.asarray(array).reshape(-1).view(np.uint8).copy() for name, array in tree.items()}
            total = sum(one.size for one in data.values())
            begun = time.perf_counter()
            pending = publisher.publish(n, tree)
            stall = time.perf_counter() - begun
            assert pending
            pending.result()
            ours = time.perf_counter() - begun
            reader = tr.open(place / "stream", step=n)._source
            assert isinstance(reader, Reader)
            if peer is None:
                peer, parameters = _Peer(place, data), total // 2
                held = deltas.read_arrays(reader, list(data))
                last = reader.identity
                continue
            begun = time.perf_counter()
            sent, found = peer.send(data, pool)
            theirs = time.perf_counter() - begun
            begun = time.perf_counter()
            held = deltas.read_arrays(reader, list(data), held, last)
            apply = time.perf_counter() - begun
            begun = time.perf_counter()
            peer.receive(found, pool)
            rows["apply"].append((apply, time.perf_counter() - begun))
            begun = time.perf_counter()
            list(pool.map(_copy, held.values()))
            rows["floor"].append((time.perf_counter() - begun, rows["apply"][-1][1]))
            rows["share"].append((os.stat(_array_file(place, n)).st_size / total, sent / total))
            rows["publish"].append((ours, theirs))
            rows["stall"].append((stall, float("nan")))
            last = reader.identity
            assert all(np.array_equal(held[name], data[name]) for name in data)
    middle = {name: [statistics.median(one) for one in zip(*pairs, strict=True)] for name, pairs in rows.items()}
    lines = [
        ["bytes sent, of all", *(f"{100 * one:.2f} %" for one in middle["share"]), _ratio(*middle["share"])],
        ["publish: compare, encode, write", *(f"{one:.3f} s" for one in middle["publish"]), _ratio(*middle["publish"])],
        ["apply and verify", *(f"{one:.3f} s" for one in middle["apply"]), _ratio(*middle["apply"])],
        ["copy and hash alone", f"{middle['floor'][0]:.3f} s", "", _ratio(*middle["floor"])],
        ["the loop is stopped", f"{1e3 * middle['stall'][0]:.1f} ms", "", ""],
    ]
    note = _NOTE.format(millions=parameters / 1e6, steps=steps)
    return "\n\n".join([note, markdown(["", "Treering", "slime's layout", "ratio"], lines)])


def _array_file(place: pathlib.Path, version: int) -> pathlib.Path:
    (file,) = (place / "stream" / f"step-{version:08}").glob("*.safetensors")
    return file


def _ratio(ours: float, theirs: float) -> str:
    return f"{theirs / ours:.2f} ×"
