"""What damaged and hostile files must not do."""

import random
from collections.abc import Iterator
from pathlib import Path

import treering as tr
from treering.errors import TreeringError


def outcome(path: Path) -> str:
    """Opens a checkpoint and reads all of it. Only a `TreeringError` may come of that, whose name is returned."""
    try:
        ckpt = tr.open(path)
        str(ckpt)
        tr.restore(path)
    except TreeringError as error:
        return type(error).__name__
    return "fine"


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flips a bit of a file, in place."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def damaged(data: bytes) -> Iterator[bytes]:
    """A file cut off anywhere, with any byte changed, with bytes taken out and put in."""
    yield from (data[:size] for size in range(len(data)))
    for at, byte in enumerate(data):
        for other in {byte ^ 1, byte ^ 0x80, byte ^ 0xFF, 0x93, 0xDF}:
            yield data[:at] + bytes([other]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]
        yield data[:at] + b"\xdf" + data[at:]


def shuffled(data: bytes, seed: int) -> bytes:
    """A file with a few bytes and stretches changed at random."""
    draw = random.Random(seed)
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, to = draw.randrange(len(found)), draw.randrange(len(found))
        size = draw.randint(1, 8)
        match draw.randrange(3):
            case 0:
                found[at : at + size] = draw.randbytes(size)
            case 1:
                found[at : at + size] = found[to : to + size]
            case _:
                found[at:at] = found[to : to + size]
    return bytes(found)
