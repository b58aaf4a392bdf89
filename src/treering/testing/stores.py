"""The tests that every store has to pass, for stores of other packages."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from .. import keep, stores
from .._restore.checkpoint import Checkpoint
from .._run.checkpointer import Checkpointer
from .._run.metrics import record
from .._run.open import open_checkpoint, restore
from .._run.run import steps
from .._save.save import save
from .._tools.convert import convert
from .._tools.verify import verify
from ..errors import CorruptError, ExistsError, MismatchError
from ..stores.buffers import aligned
from ..stores.read_errors import ReplacedError
from ..stores.sequential import file_of_new_folder
from ..stores.store import Store
from ..stores.whole_files import files_in, read_file

_PAGE = 4096  # bytes; sinks are written at multiples of it


class StoreConformance:
    """Inherit this under a name that pytest collects, and say which store it is and where in it the tests may write.

    >>> class TestMine(StoreConformance):
    ...     @pytest.fixture
    ...     def store(self):
    ...         return MyStore()
    ...
    ...     @pytest.fixture
    ...     def root(self):
    ...         return "mine://bucket/folder"
    """

    formats = ("treering", "safetensors", "flax", "equinox", "fjformer", "orbax", "t5x", "levanter")

    @pytest.fixture
    def store(self) -> Any:
        """The store."""
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> str:
        """A path in it that no other test uses: a URL whose scheme is none of Treering's, or a folder."""
        raise NotImplementedError

    @pytest.fixture
    def registered(self, store: Store, root: str) -> Iterator[str]:
        """The root, while all calls of Treering that are given such a path use the store."""
        scheme = root.partition("://")[0] if "://" in root else ""
        with stores.using(store, scheme):
            yield root

    # Reading

    def test_nothing_is_there_at_first(self, store: Store, root: str) -> None:
        assert store.stat(f"{root}/x") is None and store.list(f"{root}/folder") == []
        with pytest.raises(FileNotFoundError):
            store.open(f"{root}/x")
        with contextlib.suppress(FileNotFoundError):
            store.delete(f"{root}/x")

    def test_what_is_written_is_read(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        data = bytes(range(256)) * 100
        _put(store, f"{root}/a/b/x", data)
        _put(store, f"{root}/a/y", b"")
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
        _put(store, f"{root}/x", bytes(range(200)))
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
            blob.bring_all_in(memory, [(0, 200)])
            assert memory[:200] == bytes(range(200))
            memory[0] = 9  # it is the caller's own
            assert blob.read(0, 1) == b"\0"
        blob.close()

    def test_what_came_with_opening_is_handed_over_once(self, store: Store, root: str) -> None:
        data = random.Random(0).randbytes(3 << 20)
        store.make_folders(root, [])
        _put(store, f"{root}/x", data)
        ranges = [(100, 2 << 20), (5 << 19, len(data))]
        for wanted, expected in ((ranges, len(data)), (ranges[1:], len(data)), (ranges, 10), ([(0, 10)], 10)):
            blob = store.open(f"{root}/x", expected=expected)
            blob.read(0, 10)
            if (taken := blob.take(wanted)) is not None:  # else it is read where it is needed
                assert [bytes(one) for one in taken] == [data[begin:end] for begin, end in wanted]
                assert wanted == ranges, "the lesser part would keep the rest in memory"
                for one in taken:
                    one[:] = bytes(len(one))  # it is the caller's own
                assert blob.take(wanted) is None
            assert blob.read(0, len(data)) == data
            blob.close()

    @pytest.mark.parametrize("nbytes", [2 << 20, (2 << 20) - 1, (2 << 20) + 1, 10], ids=["as", "less", "more", "few"])
    def test_the_last_of_what_is_expected_may_come_into_other_memory(
        self, store: Store, root: str, nbytes: int
    ) -> None:
        data, begin, end = random.Random(1).randbytes(nbytes), 5000, 2 << 20
        store.make_folders(root, [])
        _put(store, f"{root}/x", data)
        memory = bytearray(end - begin)
        blob = store.open(f"{root}/x", expected=end, into=memoryview(memory))
        assert blob.size == nbytes and blob.read_up_to(10) == data[:10]
        assert blob.read(begin - 10, 20) == data[begin - 10 : begin + 10] if nbytes > begin + 10 else nbytes == 10
        if nbytes >= end and (taken := blob.take([(begin, end)])) is not None:
            assert memory == data[begin:end] == bytes(taken[0])
            memory[0] ^= 1
            assert taken[0][0] == memory[0], "it is that very memory"
        assert blob.read(0, nbytes) == data
        blob.close()

    def test_what_is_open_stays(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        _put(store, f"{root}/x", b"first")
        _put(store, f"{root}/y", b"second")
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
            with contextlib.suppress(ReplacedError):  # where what is open does not stay; it is never anything else
                assert opened.read(0, len(expected)) == expected
        assert store.stat(f"{root}/y") is None

    def test_a_folder_has_many_names(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        names = [f"{n:05}" for n in range(1_500)]  # more than a bucket lists at a time
        for name in names:
            sink = store.create(f"{root}/{name}")
            sink.finish(0)
            sink.close()
        assert store.list(root) == names

    def test_a_glance_shows_what_is_there(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        _put(store, f"{root}/a/b/x", b"text")
        _put(store, f"{root}/a/y", b"")

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
        _put(store, f"{root}/a/z", b"more")
        assert store.stat(f"{root}/a/z") and store.list(f"{root}/a") == ["b", "y", "z"]

    def test_a_name_may_begin_with_another(self, store: Store, root: str) -> None:
        for folder in ("a", "ab", "a.b"):
            store.make_folders(f"{root}/{folder}", [])
            _put(store, f"{root}/{folder}/x", folder.encode())
        assert store.list(f"{root}/a") == ["x"] and store.list(root) == ["a", "a.b", "ab"]
        with store.new_folder(f"{root}/a", overwrite=True, owned=lambda store, path: ["x"]) as folder:
            _put(store, f"{folder}/y", b"new")
        store.move(f"{root}/a", f"{root}/abc", last="y")
        assert sorted(files_in(store, root)) == ["a.b/x", "ab/x", "abc/y"] and store.stat(f"{root}/a") is None

    def test_a_folder_changes_with_its_contents(self, store: Store, root: str) -> None:
        """By this a run knows when to look at a step again."""
        store.make_folders(f"{root}/a", [])
        begun = time.time()
        _put(store, f"{root}/a/x", b"text")
        seen = [store.stat(f"{root}/a")]
        assert seen[0] == store.stat(f"{root}/a") and seen[0] and abs(seen[0].modified - begun) < 60
        time.sleep(0.02)  # what a file system's clock can tell apart
        _put(store, f"{root}/a/y", b"text")
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

    # Writing

    def test_threads_write_one_object(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        sink = store.create(f"{root}/x")
        pages = 64
        room = sink.preallocate(pages * _PAGE)

        def write(first: int, meet: Callable[[], Any]) -> None:
            meet()
            for n in range(first, pages, 4):
                page = bytes([n]) * _PAGE
                if room is not None and n % 2:
                    room[n * _PAGE : (n + 1) * _PAGE] = page
                    continue
                buffer = aligned(_PAGE)
                buffer[:_PAGE] = page
                sink.write(buffer[:_PAGE], n * _PAGE)

        _at_once(4, write)
        sink.finish(pages * _PAGE - 5, read_only=True)
        sink.close()
        expected = b"".join(bytes([n]) * _PAGE for n in range(pages))[:-5]
        assert read_file(store, f"{root}/x") == expected

    def test_a_name_is_given_once(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        _put(store, f"{root}/x", b"mine")
        with pytest.raises(FileExistsError):
            store.create(f"{root}/x", visible=True)
        sink = store.create(f"{root}/temporary", visible=True)
        sink.finish(0)
        with pytest.raises(FileExistsError):
            sink.publish(f"{root}/x", overwrite=False)
        assert read_file(store, f"{root}/x") == b"mine" and not sink.is_at(f"{root}/x")
        sink.publish(f"{root}/y", overwrite=False)
        assert sink.is_at(f"{root}/y") and read_file(store, f"{root}/y") == b""
        with store.new_file(f"{root}/y", overwrite=True) as file:
            file.write(b"another's")
        assert not sink.is_at(f"{root}/y")
        sink.close()

    def test_a_file_is_seen_while_it_is_written(self, store: Store, root: str) -> None:
        """By this the processes of a save know that they write to one store."""
        store.make_folders(root, [])
        sink = store.create(f"{root}/x", visible=True)
        assert store.stat(f"{root}/x") and store.list(root) == ["x"]
        sink.close()

    def test_of_many_writers_one_wins(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        won: list[int] = []

        def write(n: int, meet: Callable[[], Any]) -> None:
            for turn in range(25):
                meet()
                with contextlib.suppress(FileExistsError):
                    sink = store.create(f"{root}/created-{turn}", visible=True)
                    won.append(turn)
                    sink.close()
                sink = store.create(f"{root}/temporary-{turn}-{n}", visible=True)
                sink.finish(0)
                meet()
                with contextlib.suppress(FileExistsError):
                    sink.publish(f"{root}/published-{turn}", overwrite=False)
                    won.append(100 + turn)
                sink.close()

        _at_once(4, write)
        assert sorted(won) == [*range(25), *range(100, 125)]

    def test_a_name_is_given_to_another_in_one_step(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        _put(store, f"{root}/x", b"old" * 1000)
        wrong, over = [], threading.Event()

        def look() -> None:
            while not over.is_set():
                data = read_file(store, f"{root}/x")
                if data[:3] * (len(data) // 3) != data or len(data) < 3000:
                    wrong.append(data)

        def replace() -> None:
            for n in range(20):
                sink = store.create(f"{root}/temporary-{n}", visible=True)
                text = f"{n:03}".encode() * (1000 + n)
                buffer = aligned(len(text))
                buffer[: len(text)] = text
                sink.write(buffer, 0)
                sink.finish(len(text))
                sink.publish(f"{root}/x", overwrite=True)
                sink.close()

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(look)
            try:
                replace()
            finally:
                over.set()
            reader.result()
        assert store.list(root) == ["x"] and not wrong and read_file(store, f"{root}/x")[:3] == b"019"

    def test_what_a_living_writer_has_is_not_removed(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        sink = store.create(f"{root}/x", visible=True)
        assert sink.protect() and store.is_in_use(f"{root}/x")
        assert store.delete_unused(f"{root}/x", lambda: True) and sink.is_at(f"{root}/x")
        sink.close()
        assert not store.is_in_use(f"{root}/x")
        assert store.delete_unused(f"{root}/x", lambda: False) and store.stat(f"{root}/x")
        assert store.delete_unused(f"{root}/x", lambda: True) and store.stat(f"{root}/x") is None
        for call in (lambda: store.is_in_use(f"{root}/x"), lambda: store.delete_unused(f"{root}/x", lambda: True)):
            with pytest.raises(FileNotFoundError):
                call()

    def test_a_new_file_is_there_as_a_whole_or_not_at_all(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        with pytest.raises(ZeroDivisionError), store.new_file(f"{root}/x", overwrite=False) as file:
            file.write(b"half")
            raise ZeroDivisionError
        assert store.list(root) == []
        with store.new_file(f"{root}/x", overwrite=False) as file:
            file.write(b"who")
            assert store.stat(f"{root}/x") is None and file.size == 3
            file.write(memoryview(b"le"))
        assert read_file(store, f"{root}/x") == b"whole" and store.list(root) == ["x"]
        with pytest.raises(ExistsError), store.new_file(f"{root}/x", overwrite=False):
            pass
        with pytest.raises(ExistsError), store.new_file(root, overwrite=True):
            pass

    def test_of_two_new_files_one_is_there(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        with pytest.raises(ExistsError), store.new_file(f"{root}/x", overwrite=False) as file:
            file.write(b"late")
            with store.new_file(f"{root}/x", overwrite=False) as other:
                other.write(b"early")
        assert read_file(store, f"{root}/x") == b"early" and store.list(root) == ["x"]

    def test_a_new_folder_is_there_as_a_whole_or_not_at_all(self, store: Store, root: str) -> None:
        store.make_folders(root, [])

        def owned(store: Store, folder: str) -> list[str]:
            return [name for name in files_in(store, folder) if name != "notes"]

        path = f"{root}/c"
        with pytest.raises(ZeroDivisionError), store.new_folder(path, overwrite=False, owned=owned) as folder:
            _put(store, f"{folder}/x", b"half")
            raise ZeroDivisionError
        assert store.list(root) == []
        for names, overwrite in ((["x", "y"], False), (["x", "z"], True)):
            with store.new_folder(path, overwrite=overwrite, owned=owned) as folder:
                for name in names:
                    with file_of_new_folder(store, f"{folder}/{name}") as file:
                        file.write(name.encode())
            if not overwrite:
                _put(store, f"{path}/notes", b"mine")
        assert store.list(path) == ["notes", "x", "z"] and store.list(root) == ["c"]
        assert read_file(store, f"{path}/notes") == b"mine"
        with pytest.raises(ExistsError), store.new_folder(path, overwrite=False, owned=owned):
            pass
        with pytest.raises(ExistsError), store.new_folder(path, overwrite=True, owned=owned, names=["notes"]):
            pass

    def test_a_scratch_folder_is_gone_in_the_end(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        with store.scratch_folder(f"{root}/x") as folder:
            _put(store, f"{folder}/y", b"text")
            assert read_file(store, f"{folder}/y") == b"text" and store.stat(f"{root}/x") is None
        assert store.list(root) == []

    def test_folders_are_moved(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        _put(store, f"{root}/a/b/x", b"text")
        store.make_folders(f"{root}/c", [])
        _put(store, f"{root}/c/y", b"other")
        with pytest.raises(FileExistsError):
            store.move(f"{root}/a", f"{root}/c", last="x")
        with pytest.raises(FileNotFoundError):
            store.move(f"{root}/b", f"{root}/e", last="x")
        with pytest.raises(OSError, match="not empty"):
            store.remove_folder(f"{root}/c")
        store.move(f"{root}/a", f"{root}/d", last="x")
        assert sorted(files_in(store, root)) == ["c/y", "d/b/x"]

    def test_a_run_has_one_writer(self, store: Store, root: str) -> None:
        busy = True
        first, second = store.lease(f"{root}/run", lambda: busy), store.lease(f"{root}/run")
        first.acquire()
        first.acquire()
        with pytest.raises(ExistsError, match="is saving"):
            second.acquire()
        store.lease(f"{root}/other").acquire()
        busy = False
        second.acquire()
        assert first.lost and not second.lost
        with pytest.raises(MismatchError, match="taken this run over"):
            first.acquire()
        first.release()
        second.acquire()
        second.release()
        third = store.lease(f"{root}/run")
        third.acquire()
        assert not second.lost
        third.release()

    # The calls of Treering

    def test_every_format_works_on_it(self, registered: str) -> None:
        tree = {"params": {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}}
        for format in self.formats:
            path = f"{registered}/{format}"
            save(path, tree, format=format)
            with pytest.raises(ExistsError):
                save(path, tree, format=format)
            save(path, tree, format=format, overwrite=True)
            ckpt = open_checkpoint(path)
            assert ckpt.format == format
            _assert_same(restore(path, jax.tree.map(np.zeros_like, tree)), tree)
            assert verify(path).ok
            if format != "equinox":  # which has no names
                convert(path, f"{registered}/native-{format}")
                _assert_same(restore(f"{registered}/native-{format}", jax.tree.map(np.zeros_like, tree)), tree)
            assert isinstance(ckpt, Checkpoint)

    def test_a_run_goes_on(self, registered: str) -> None:
        run, tree = f"{registered}/run", {"w": np.arange(6)}
        with Checkpointer(run, keep=keep.last(2)) as ckpts:
            for step in range(1, 6):
                ckpts.save(step, {"w": tree["w"] + step}, metrics={"loss": 1 / step})
        assert steps(run) == [4, 5]
        with Checkpointer(run) as ckpts:
            assert ckpts.restore(tree)["w"][0] == 5 and ckpts.latest_step == 5
            ckpts.pin(4)
            with pytest.raises(MismatchError, match="pinned"):
                ckpts.delete(4)
            record(run, 5, {"accuracy": 0.5})
            assert ckpts.open(5).metrics == {"loss": 0.2, "accuracy": 0.5}
            ckpts.save(6, tree)
            ckpts.rewind(5)
            ckpts.save(6, {"w": tree["w"] * 2})
            ckpts.delete(5)
            ckpts.finish()
        assert steps(run) == [4, 6] and open_checkpoint(run)["w"][1] == 2 and verify(run).ok

    def test_damage_is_found(self, registered: str, store: Store) -> None:
        save(f"{registered}/c", {"w": np.arange(100_000)})
        (name,) = [name for name in store.list(f"{registered}/c") if name.startswith("arrays-")]
        path = f"{registered}/c/{name}"
        data = read_file(store, path)
        with store.new_file(path, overwrite=True) as file:
            file.write(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        with pytest.raises(CorruptError):
            restore(f"{registered}/c")
        assert not verify(f"{registered}/c").ok


def _at_once(count: int, work: Callable[[int, Callable[[], Any]], None]) -> None:
    """Calls `work(0, meet)`, `work(1, meet)`, … in threads, which wait for each other where they call `meet`. The first
    error that any of them met is raised, and the others do not wait for that one."""
    barrier, errors = threading.Barrier(count, timeout=60), list[BaseException]()

    def run(n: int) -> None:
        try:
            work(n, barrier.wait)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with ThreadPoolExecutor(count) as pool:
        for n in range(count):
            pool.submit(run, n)
    if errors:
        raise errors[0]


def _put(store: Store, path: str, data: bytes) -> None:
    with store.new_file(path, overwrite=False) as file:
        file.write(data)


def _assert_same(found: Any, tree: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, tree)
