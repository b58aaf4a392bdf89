"""What a store under test declares, and tests of reading: bytes, names, versions, the methods of a `KeyValueStore`."""

import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .. import stores
from ..errors import CorruptError
from ..stores.file_io import files_in, read_file
from ..stores.key_values import KeyValues, KeyValueStore
from ..stores.read_errors import ReplacedError
from ..stores.store import Store

PAGE = 4096  # bytes; sinks are written at multiples of it
_REPLACING_SECONDS = 0.3  # for which a thread looks at a value that another one replaces
_SWITCH_SECONDS = 1e-4  # between two threads of Python: short, so that they meet within a call


class StoreSubject:
    """The declarations of `treering.testing.StoreConformance`, which its subclasses override."""

    formats = ("treering", "safetensors", "flax", "equinox", "fjformer", "orbax", "t5x", "levanter")

    @pytest.fixture
    def store(self) -> Any:
        """The store under test. One process writes to it, with several threads."""
        raise self._missing("store", "the store under test")

    @pytest.fixture
    def root(self) -> str:
        """A path in the store that no other test uses: a folder, or a URL with any scheme, registered or not."""
        raise self._missing("root", "a path in the store, another one for each test")

    def _missing(self, name: str, returned: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}: define the fixture `{name}`; it returns {returned}")

    @pytest.fixture
    def registered(self, store: Store, root: str) -> Iterator[str]:
        """The root. While a test runs, Treering uses the store for all paths with this scheme."""
        scheme = root.partition("://")[0] if "://" in root else ""
        with stores.using(store, scheme):
            yield root


def put(store: Store, path: str, data: bytes) -> None:
    """Writes a new file."""
    with store.new_file(path, overwrite=False) as file:
        file.write(data)


class StoreReading(StoreSubject):
    """The tests of `StoreConformance` that read."""

    def test_nothing_is_there_at_first(self, store: Store, root: str) -> None:
        assert store.stat(f"{root}/x") is None and store.list(f"{root}/folder") == []
        with pytest.raises(FileNotFoundError):
            store.open(f"{root}/x")
        with contextlib.suppress(FileNotFoundError):
            store.delete(f"{root}/x")

    def test_what_is_written_is_read(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        data = bytes(range(256)) * 100
        put(store, f"{root}/a/b/x", data)
        put(store, f"{root}/a/y", b"")
        assert read_file(store, f"{root}/a/b/x") == data and read_file(store, f"{root}/a/y") == b""
        assert store.list(f"{root}/a") == ["b", "y"] and sorted(files_in(store, root)) == ["a/b/x", "a/y"]
        found, folder = store.stat(f"{root}/a/b/x"), store.stat(f"{root}/a/b")
        assert found and found.is_file and not found.is_folder and found.nbytes == len(data)
        assert folder and folder.is_folder and not folder.is_file
        with pytest.raises(CorruptError):
            store.open(f"{root}/a/b")

    def test_it_says_where_bytes_are_read(self, store: Store, root: str) -> None:
        with store.new_file(f"{root}/a/b", overwrite=False) as file:
            file.write(b"data")
        assert type(store.is_local(f"{root}/a")) is type(store.is_local(f"{root}/a/b")) is bool
        assert store.is_local(f"{root}/a") == store.is_local(f"{root}/a/b")

    def test_parts_are_read_and_missing_ones_are_errors(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        put(store, f"{root}/x", bytes(range(200)))
        blob = store.open(f"{root}/x")
        assert blob.size == 200 and blob.read(10, 5) == bytes(range(10, 15)) and blob.read_up_to(3) == b"\0\1\2"
        assert blob.read_up_to(1000) == bytes(range(200)) and blob.read(200, 0) == b""
        buffer = bytearray(7)
        blob.read_into(memoryview(buffer), 190)
        assert buffer == bytes(range(190, 197))
        for read in (lambda: blob.read(195, 6), lambda: blob.read_into(memoryview(buffer), 194)):
            with pytest.raises(CorruptError):
                read()
        if (memory := blob.mapped([(0, 200)])) is not None:
            blob.populate(memory, [(0, 200)])
            assert memory[:200] == bytes(range(200))
            memory[0] = 9  # The mapping is private, so this does not change the file.
            assert blob.read(0, 1) == b"\0"
        blob.close()

    def test_what_came_with_opening_is_handed_over_once(self, store: Store, root: str) -> None:
        data = random.Random(0).randbytes(3 << 20)
        store.make_folders(root, [])
        put(store, f"{root}/x", data)
        ranges = [(100, 2 << 20), (5 << 19, len(data))]
        for wanted, expected in ((ranges, len(data)), (ranges[1:], len(data)), (ranges, 10), ([(0, 10)], 10)):
            blob = store.open(f"{root}/x", expected=expected)
            blob.read(0, 10)
            if (taken := blob.take(wanted)) is not None:  # A store may return None, and then the bytes are read later.
                assert [bytes(one) for one in taken] == [data[begin:end] for begin, end in wanted]
                assert wanted == ranges, "the small part would keep the other bytes in memory"
                for one in taken:
                    one[:] = bytes(len(one))  # The memory belongs to the caller now.
                assert blob.take(wanted) is None
            assert blob.read(0, len(data)) == data
            blob.close()

    @pytest.mark.parametrize("nbytes", [2 << 20, (2 << 20) - 1, (2 << 20) + 1, 10], ids=["as", "less", "more", "few"])
    def test_the_last_of_what_is_expected_may_come_into_other_memory(
        self, store: Store, root: str, nbytes: int
    ) -> None:
        data, begin, end = random.Random(1).randbytes(nbytes), 5000, 2 << 20
        store.make_folders(root, [])
        put(store, f"{root}/x", data)
        memory = bytearray(end - begin)
        blob = store.open(f"{root}/x", expected=end, into=memoryview(memory))
        assert blob.size == nbytes and blob.read_up_to(10) == data[:10]
        assert blob.read(begin - 10, 20) == data[begin - 10 : begin + 10] if nbytes > begin + 10 else nbytes == 10
        if nbytes >= end and (taken := blob.take([(begin, end)])) is not None:
            assert memory == data[begin:end] == bytes(taken[0])
            memory[0] ^= 1
            assert taken[0][0] == memory[0], "expected the memory that was given as `into`"
        assert blob.read(0, nbytes) == data
        blob.close()

    def test_what_is_open_stays(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        put(store, f"{root}/x", b"first")
        put(store, f"{root}/y", b"second")
        one, other = store.open(f"{root}/x"), store.open(f"{root}/y")
        with store.new_file(f"{root}/x", overwrite=True) as file:
            file.write(b"another one")
        store.delete(f"{root}/y")
        blob = store.open(f"{root}/x")
        sink = store.create(f"{root}/z")
        sink.finish(0)
        sink.publish(f"{root}/x", overwrite=True)
        sink.close()
        assert blob.read(0, 11) == b"another one" and store.open(f"{root}/x").size == 0
        for opened, expected in ((one, b"first"), (other, b"second")):
            # Some stores cannot keep the bytes of a replaced file. They raise, but never return other bytes.
            with contextlib.suppress(ReplacedError):
                assert opened.read(0, len(expected)) == expected
        assert store.stat(f"{root}/y") is None

    def test_a_folder_has_many_names(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        names = [f"{n:05}" for n in range(1_500)]  # more than a bucket returns in one reply
        for name in names:
            sink = store.create(f"{root}/{name}")
            sink.finish(0)
            sink.close()
        assert store.list(root) == names

    def test_a_glance_shows_what_is_there(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        put(store, f"{root}/a/b/x", b"text")
        put(store, f"{root}/a/y", b"")

        def look() -> list[Any]:
            stats = [store.stat(f"{root}{name}") for name in ("", "/a", "/a/b", "/a/b/x", "/a/y", "/a/z", "/b")]
            lists = [store.list(f"{root}{name}") for name in ("", "/", "/a", "/a/", "/a/b", "/a/b/", "/b")]
            return [lists, [found and (found.kind, found.nbytes if found.is_file else 0) for found in stats]]

        for place in (root, f"{root}/a", f"{root}/a/b/x", f"{root}/b"):
            with store.glance(place), store.glance(f"{root}/a"):
                seen = look()
                blobs = [store.open(f"{root}/a/b/x") for _ in range(2)]
                assert seen == look() and [blob.read(0, 4) for blob in blobs] == [b"text"] * 2
            assert seen == look()
        put(store, f"{root}/a/z", b"more")
        assert store.stat(f"{root}/a/z") and store.list(f"{root}/a") == ["b", "y", "z"]

    def test_a_name_may_begin_with_another(self, store: Store, root: str) -> None:
        for folder in ("a", "ab", "a.b"):
            store.make_folders(f"{root}/{folder}", [])
            put(store, f"{root}/{folder}/x", folder.encode())
        assert store.list(f"{root}/a") == ["x"] and store.list(root) == ["a", "a.b", "ab"]
        with store.new_folder(f"{root}/a", overwrite=True, owned=lambda store, path: ["x"]) as folder:
            put(store, f"{folder}/y", b"new")
        store.move(f"{root}/a", f"{root}/abc", last="y")
        assert sorted(files_in(store, root)) == ["a.b/x", "ab/x", "abc/y"] and store.stat(f"{root}/a") is None

    def test_a_folder_changes_with_its_contents(self, store: Store, root: str) -> None:
        """The version of a folder tells a run when it must read a step again."""
        store.make_folders(f"{root}/a", [])
        begun = time.time()
        put(store, f"{root}/a/x", b"text")
        seen = [store.stat(f"{root}/a")]
        assert seen[0] == store.stat(f"{root}/a") and seen[0] and abs(seen[0].modified - begun) < 60
        time.sleep(0.02)  # longer than the resolution of the clock of a file system
        put(store, f"{root}/a/y", b"text")
        seen.append(store.stat(f"{root}/a"))
        assert len({found.version for found in seen if found}) == 2

    def test_other_contents_have_another_version(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        seen: set[Any] = set()
        for text in (b"first", b"other", b"first"):
            with store.new_file(f"{root}/x", overwrite=True) as file:
                file.write(text)
            found = store.stat(f"{root}/x")
            assert found and found == store.stat(f"{root}/x")
            seen.add(found.version)
        assert len(seen) >= 2


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
