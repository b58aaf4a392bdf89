"""Tests of the five methods of a `KeyValueStore`, called as Treering calls them."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..stores.key_values import KeyValues, KeyValueStore
from ..stores.store import Store
from ._store_subject import StoreSubject

_REPLACING_SECONDS = 0.3  # for which a thread looks at a value that another one replaces
_SWITCH_SECONDS = 1e-4  # between two threads of Python: short, so that they meet within a call


class StoreValues(StoreSubject):
    """The tests of `StoreConformance` for the five methods. Other stores than a `KeyValueStore` skip them."""

    def test_conditions_of_write_hold(self, store: Store, root: str) -> None:
        values, key = _values_and_key(store, root)
        first = values.write(key, b"first", exclusive=True, replaces=None)
        assert values.stat(key) == first and first.nbytes == 5 and list(values.list(key)) == [first]
        with pytest.raises(FileExistsError):
            values.write(key, b"other", exclusive=True, replaces=None)
        second = values.write(key, b"second", exclusive=False, replaces=first.version)
        with pytest.raises(FileExistsError):
            values.write(key, b"other", exclusive=False, replaces=first.version)
        assert second.version != first.version and values.stat(key) == second
        assert values.read(key, 0, 100) == (b"second", second) and values.read(key, 2, 4)[0] == b"co"
        values.delete(key)
        assert values.stat(key) is None and list(values.list(key)) == []
        with pytest.raises(FileNotFoundError):
            values.read(key, 0, 1)
        for version in (first.version, second.version):
            with pytest.raises(FileExistsError):  # A deleted value is not replaced: its writer has lost its lease.
                values.write(key, b"other", exclusive=False, replaces=version)
        assert values.stat(key) is None
        third = values.write(key, b"", exclusive=True, replaces=None)
        assert third.version not in (first.version, second.version) and values.read(key, 0, 1) == (b"", third)

    def test_prefixes_are_literal(self, store: Store, root: str) -> None:
        values, key = _values_and_key(store, root)
        names = ("a_b", "aXb", "A_b", "a%b", "a*b", "aä b")
        for name in names:
            values.write(f"{key}/{name}", name.encode(), exclusive=True, replaces=None)
        for name in names:
            assert [one.key for one in values.list(f"{key}/{name[:2]}")] == [f"{key}/{name}"]
            assert values.read(f"{key}/{name}", 0, 10)[0] == name.encode()

    def test_a_value_is_replaced_in_one_step(self, store: Store, root: str) -> None:
        """A write without a condition shows the old or the new bytes, never none and never parts."""
        values, key = _values_and_key(store, root)
        values.write(key, b"0" * 1000, exclusive=True, replaces=None)
        wrong, over = list[object](), threading.Event()

        def look() -> None:
            while not over.is_set():
                try:
                    data, value = values.read(key, 0, 2000)
                except FileNotFoundError as error:
                    wrong.append(error)
                else:
                    if len({*data}) != 1 or len(data) != value.nbytes:
                        wrong.append(data)

        interval, end = sys.getswitchinterval(), time.monotonic() + _REPLACING_SECONDS
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with ThreadPoolExecutor(1) as pool:
                reader, count = pool.submit(look), 0
                try:
                    while time.monotonic() < end or count < 5:
                        count += 1
                        data = b"%d" % (count % 10) * (1000 + count % 10)
                        values.write(key, data, exclusive=False, replaces=None)
                finally:
                    over.set()
                reader.result()
        finally:
            sys.setswitchinterval(interval)
        assert not wrong, wrong[:1]


def _values_and_key(store: Store, root: str) -> tuple[KeyValues, str]:
    if not isinstance(store, KeyValueStore):
        pytest.skip("only a `KeyValueStore` has the five methods")
    return store.values, f"{root.partition('://')[2]}/values"
