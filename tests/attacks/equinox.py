"""Attacks on Equinox: NumPy records with false headers, and the line of JSON before them."""

import io
import pickle
import struct
from functools import partial
from pathlib import Path

import numpy as np

from . import Verdict, add

_W, _B = np.arange(1, 13, dtype=np.float32).reshape(3, 4), np.arange(1, 6, dtype=np.int32)


def _record(header: str | bytes, data: bytes = b"", *, version: int = 1, claim: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    size = len(text) if claim is None else claim
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text + data


def _header(descr: str = "'<i4'", fortran: str = "False", shape: str = "(5,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def _good() -> bytes:
    found = io.BytesIO()
    np.save(found, _B)
    return found.getvalue()


def _objects() -> bytes:
    found = io.BytesIO()
    np.save(found, np.array([print, {"a": 1}], object), allow_pickle=True)
    return found.getvalue()


def _file(second: bytes, line: bytes, size: int, folder: Path) -> Path:
    """Writes the records of both leaves, one of them damaged."""
    path = folder / "x.eqx"
    found = io.BytesIO()
    np.save(found, _W)
    path.write_bytes(line + second + found.getvalue())
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
    return path


_DATA = _B.tobytes()
_RECORDS: list[tuple[str, str, bytes, int, Verdict]] = [
    ("objects", "runs code when they are unpickled", _objects(), 0, "refused"),
    ("a pickle in its place", "runs code when it is opened", pickle.dumps(print), 0, "refused"),
    ("a header that is a call", "is evaluated", _record("__import__('os').system('true')\n", _DATA), 0, "refused"),
    ("a shape that is a call", "is evaluated", _record(_header(shape="(exit(),)"), _DATA), 0, "refused"),
    ("a shape of 2^64", "overflows", _record(_header(shape=f"({2**64},)"), _DATA), 0, "refused"),
    ("a shape whose product overflows", "fits in 64 bits", _record(_header(shape=f"({2**32}, {2**32}, 5)"), _DATA), 0, "refused"),
    ("an axis below zero", "goes backwards", _record(_header(shape="(-5,)"), _DATA), 0, "refused"),
    ("an axis that is a power", "is evaluated", _record(_header(shape="(10**9**9,)"), _DATA), 0, "refused"),
    ("an empty array of 2^63 rows", "overflows", _record(_header(shape=f"(0, {2**63})")), 0, "refused"),
    ("a shape of a million axes", "takes quadratic time", _record(_header(shape="(" + "1," * 15_000 + ")"), _DATA), 0, "refused"),
    ("a number of 60,000 digits", "takes quadratic time", _record(_header(shape="(" + "9" * 60_000 + ",)"), _DATA), 0, "refused"),
    ("60,000 spaces", "makes a pattern go back and forth", _record(_header(shape="(" + " " * 60_000 + ","), _DATA), 0, "refused"),
    ("a dtype of objects", "makes pointers of bytes", _record(_header("'|O'", shape="(2,)"), _DATA), 0, "refused"),
    ("a structured dtype", "makes pointers of bytes", _record(_header("[('a', '|O')]"), _DATA), 0, "refused"),
    ("a dtype of gigabytes", "is allocated", _record(_header("'<U99999999'", shape="(1,)"), _DATA), 0, "refused"),
    ("a dtype of no bytes", "divides by zero", _record(_header("'|S0'", shape=f"({2**40},)")), 0, "refused"),
    ("a header of 4 GB", "is read at once", _record(_header(), version=2, claim=2**32 - 1), 2**33, "refused"),
    ("a header of 60 GB in all", "is read at once", _record(b"", version=3, claim=2**31), 60 << 30, "refused"),
    ("version 9", "is read as if it were known", b"\x93NUMPY\x09\0" + _good()[8:], 0, "refused"),
    ("no header", "is read as one", b"\x93NUMPY\1\0\0\0" + _DATA, 0, "refused"),
    ("an array of 30 GB in holes", "is read when the file is opened", _record(_header("'|u1'", shape=f"({30 << 30},)")), 40 << 30, "refused"),
]  # fmt: skip
_LINES: list[tuple[str, str, bytes, Verdict]] = [
    ("NaN", "is no JSON", b'{"a":NaN}\n', "right"),
    ("1e999", "becomes infinity", b'{"a":1e999}\n', "right"),
    ("a number of 900,000 digits", "takes quadratic time", b'{"a":' + b"9" * 900_000 + b"}\n", "refused"),
    ("4000 digits", "is within what Python parses", b'{"a":' + b"9" * 4000 + b"}\n", "right"),
    ("nested objects", "uses up the stack", b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n", "refused"),
    ("900 levels", "uses up the stack of later operations", b"[" * 900 + b"]" * 900 + b"\n", "right"),
    ("a lone surrogate", "cannot be written again", b'{"a":"\\ud800"}\n', "right"),
    ("no UTF-8", "cannot be decoded", b'{"a":"\xff"}\n', "refused"),
    ("no end of the line", "is looked for without end", b'{"a":1' + b" " * (2 << 20), "refused"),
]  # fmt: skip

for name, tries, record, size, verdict in _RECORDS:
    add("equinox", f"record: {name}", tries, partial(_file, record, b"", size), verdict)
for name, tries, line, verdict in _LINES:
    add("equinox", f"line: {name}", tries, partial(_file, _good(), line, 0), verdict)
