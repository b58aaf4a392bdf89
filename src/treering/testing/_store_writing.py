"""Tests of writing to a store, also by several threads at once."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..errors import ExistsError, MismatchError
from ..stores.buffers import aligned
from ..stores.file_io import files_in, read_file
from ..stores.sequential import file_of_new_folder
from ..stores.store import FinishedFile, Store, Stored
from ._store_reading import PAGE, StoreSubject, put


class StoreWriting(StoreSubject):
    """The tests of `StoreConformance` that write."""

    def test_threads_write_one_object(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        sink = store.create(f"{root}/x")
        pages = 64
        room = sink.preallocate(pages * PAGE)

        def write(first: int, meet: Callable[[], Any]) -> None:
            meet()
            for n in range(first, pages, 4):
                page = bytes([n]) * PAGE
                if room is not None and n % 2:
                    room[n * PAGE : (n + 1) * PAGE] = page
                    continue
                buffer = aligned(PAGE)
                buffer[:PAGE] = page
                sink.write(buffer[:PAGE], n * PAGE)

        _at_once(4, write)
        sink.finish(pages * PAGE - 5, read_only=True)
        sink.close()
        expected = b"".join(bytes([n]) * PAGE for n in range(pages))[:-5]
        assert read_file(store, f"{root}/x") == expected

    def test_a_file_with_the_bytes_of_another_one(self, store: Store, root: str) -> None:
        """It has them whether the store copies the other file or not, also once that was replaced or removed."""
        store.make_folders(root, [])
        data, old = bytes(range(256)) * (100 * PAGE // 256), f"{root}/old"

        def write(path: str, same_as: FinishedFile | None = None) -> Stored | None:
            sink = store.create(path)
            sink.preallocate(len(data))
            buffer = aligned(len(data))
            buffer[: len(data)] = data
            sink.write(buffer, 0)
            sink.finish(len(data), read_only=True, same_as=same_as)
            store.settle(root)
            sink.close()
            return sink.stored

        write(old)
        found = store.stat(old)
        assert found
        file = FinishedFile(old, found.version, len(data))
        copied = write(f"{root}/copied", file)
        assert (copied is not None and copied.is_copy) == (store.sharing == "copies")
        store.delete(old)
        written = [write(f"{root}/removed", file)]
        put(store, old, bytes(len(data)))
        written.append(write(f"{root}/replaced", file))
        assert not any(stored and stored.is_copy for stored in written)
        for name in ("copied", "removed", "replaced"):
            assert read_file(store, f"{root}/{name}") == data

    def test_a_file_is_shared_only_in_its_version(self, store: Store, root: str) -> None:
        """The new file has the bytes of the shared one, also once that is gone."""
        store.make_folders(root, [])
        data, old = b"shared" * 1000, f"{root}/old"

        def share(name: str) -> bool:
            try:
                sink = store.share(file, f"{root}/{name}")
            except FileNotFoundError:
                sink = None
            if sink:
                store.settle(root)
                assert sink.is_at(f"{root}/{name}") and read_file(store, f"{root}/{name}") == data
                sink.close()
            return sink is not None

        put(store, old, data)
        found = store.stat(old)
        assert found
        file = FinishedFile(old, found.version, len(data))
        can_share = share("shared")
        assert can_share <= (store.sharing is not None) and can_share >= (store.sharing == "copies")
        with store.new_file(old, overwrite=True) as new:
            new.write(b"another" * 1000)
        assert not share("replaced") and store.stat(f"{root}/replaced") is None
        store.delete(old)
        assert not share("removed")
        assert not can_share or read_file(store, f"{root}/shared") == data

    def test_a_name_is_given_once(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        put(store, f"{root}/x", b"mine")
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
        """The processes of a save look for the file of process 0 to verify that they write to one store."""
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
        put(store, f"{root}/x", b"old" * 1000)
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
        with store.unused(f"{root}/x") as remove:
            assert remove is None
        assert sink.is_at(f"{root}/x")
        sink.close()
        with store.unused(f"{root}/x") as remove:
            assert remove is not None
        assert store.stat(f"{root}/x")
        with store.unused(f"{root}/x") as remove:
            assert remove is not None
            remove()
        assert store.stat(f"{root}/x") is None
        with pytest.raises(FileNotFoundError), store.unused(f"{root}/x"):
            pass

    def test_new_file_is_atomic(self, store: Store, root: str) -> None:
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

    def test_new_folder_is_atomic(self, store: Store, root: str) -> None:
        store.make_folders(root, [])

        def owned(store: Store, folder: str) -> list[str]:
            return [name for name in files_in(store, folder) if name != "notes"]

        path = f"{root}/c"
        with pytest.raises(ZeroDivisionError), store.new_folder(path, overwrite=False, owned=owned) as folder:
            put(store, f"{folder}/x", b"half")
            raise ZeroDivisionError
        assert store.list(root) == []
        for names, overwrite in ((["x", "y"], False), (["x", "z"], True)):
            with store.new_folder(path, overwrite=overwrite, owned=owned) as folder:
                for name in names:
                    with file_of_new_folder(store, f"{folder}/{name}") as file:
                        file.write(name.encode())
            if not overwrite:
                put(store, f"{path}/notes", b"mine")
        assert store.list(path) == ["notes", "x", "z"] and store.list(root) == ["c"]
        assert read_file(store, f"{path}/notes") == b"mine"
        with pytest.raises(ExistsError), store.new_folder(path, overwrite=False, owned=owned):
            pass
        with pytest.raises(ExistsError), store.new_folder(path, overwrite=True, owned=owned, names=["notes"]):
            pass

    def test_a_scratch_folder_is_gone_in_the_end(self, store: Store, root: str) -> None:
        store.make_folders(root, [])
        with store.scratch_folder(f"{root}/x") as folder:
            put(store, f"{folder}/y", b"text")
            assert read_file(store, f"{folder}/y") == b"text" and store.stat(f"{root}/x") is None
        assert store.list(root) == []

    def test_folders_are_moved(self, store: Store, root: str) -> None:
        store.make_folders(f"{root}/a/b", [])
        put(store, f"{root}/a/b/x", b"text")
        store.make_folders(f"{root}/c", [])
        put(store, f"{root}/c/y", b"other")
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
        with pytest.raises(MismatchError, match="writes this run by now"):
            first.acquire()
        first.release()
        second.acquire()
        second.release()
        third = store.lease(f"{root}/run")
        third.acquire()
        assert not second.lost
        third.release()


def _at_once(count: int, work: Callable[[int, Callable[[], Any]], None]) -> None:
    """Calls `work(0, meet)`, `work(1, meet)`, … in threads, which wait for each other when they call `meet`.

    Raises the first error of any thread. The other threads then stop waiting for that one.
    """
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
