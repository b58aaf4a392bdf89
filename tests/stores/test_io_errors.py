"""Disk errors at every operation of a save, overwrite, delete or restore, and disks that are really full."""

import contextlib
import errno
import gc
import itertools
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import refused_syscalls
import treering as tr
from fault_injection.scenarios import SCENARIOS, Scenario, assert_is, tree
from sampling import sample_points
from treering.testing._doubles import FailingDisk, QuickDisk, SteppedDisk

CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EINTR]


def listing(path: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def assert_no_more_descriptors(before: int) -> None:
    if descriptors() > before:
        gc.collect()  # slow, so only if it seems needed
        assert descriptors() <= before


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def each_operation(
    scenario: Scenario, tmp_path: pathlib.Path, use_disk: Any, code: Callable[[int], int], lasting: bool
) -> Iterator[tuple[pathlib.Path, FailingDisk, Exception | None]]:
    """Runs a scenario with an error at its first operation, its second and so on.

    Yields the folder, the disk and the error that the scenario raised, or None.
    """
    use_disk(QuickDisk())
    scenario.prepare(tmp_path / "before")
    (tmp_path / "before").mkdir(exist_ok=True)
    for at in itertools.count(1):
        place = tmp_path / "place"
        shutil.copytree(tmp_path / "before", place)
        disk = use_disk(FailingDisk(at, code(at), lasting=lasting, looking=True))
        error: Exception | None = None
        try:
            scenario.act(place)
        except (tr.errors.TreeringError, OSError) as raised:
            error = raised
        use_disk(QuickDisk())
        yield place, disk, error
        shutil.rmtree(place)
        if not disk.failed:
            return


# Each with True if the error lasts, False if only one operation fails.
QUICK = [("save", False), ("overwrite_async", True), ("first step", False), ("delete", True)]
SLOW = [pair for pair in itertools.product(SCENARIOS, (False, True)) if pair not in QUICK]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "lasting"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in sample_points(SLOW, first=2))],
)
def test_error_at_any_operation_leaves_only_the_old_one(
    tmp_path: pathlib.Path, use_disk: Any, name: str, lasting: bool
) -> None:
    """After an error at any operation, the old checkpoint is in place and no other files are left."""
    scenario = SCENARIOS[name]
    before, errors = None, 0
    for place, disk, error in each_operation(scenario, tmp_path, use_disk, lambda at: CODES[at % 5], lasting):
        where = f"operation {disk.at}, {disk.failed[:1]}: {error!r}"
        before = before or (listing(tmp_path / "before"), descriptors())
        found = scenario.look(place)
        if error is None:
            assert found != "old", where
        else:
            errors += 1
            # A step directory without permission is not listed as a step, and the log says why.
            closed = disk.code == errno.EACCES and disk.failed[0] == "stat"
            assert closed or os.strerror(disk.code) in str(error), where
            # Errors of reads, such as listing a run, may be plain OSErrors.
            assert isinstance(error, tr.errors.SaveError) or "run" in os.listdir(place) or not before[0], where
            if found == "old":
                assert lasting or listing(place) == before[0], where
            else:
                assert "in place" in str(error) or name == "delete", where
        if "sync" in disk.failed:  # The kernel forgets data that it could not write, so a second sync would lie.
            since = [operation for operation, _ in disk.log[disk.at - 1 :]]  # from the first failed operation on
            after = since[since.index("sync") + 1 :]
            assert not {"sync", "link", "rename"} & set(after), where
        assert_no_more_descriptors(before[1])
        scenario.go_on(place)
    assert errors >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), sample_points(itertools.product(["save_async", "overwrite"], CODES)))
def test_every_error_at_any_operation(tmp_path: pathlib.Path, use_disk: Any, name: str, code: int) -> None:
    """Every kind of error at any operation is raised as a `SaveError` that contains the system's text."""
    scenario = SCENARIOS[name]
    for place, disk, error in each_operation(scenario, tmp_path, use_disk, lambda at: code, False):
        new = scenario.look(place) == "new"
        assert new == (error is None or "in place" in str(error)), f"operation {disk.at}, {disk.failed}: {error!r}"
        assert error is None or (isinstance(error, tr.errors.SaveError) and os.strerror(code) in str(error))


def test_commit_that_fails_to_sync_and_to_roll_back(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """If a new checkpoint can be neither synced nor removed, the error says that it is in place and may be lost."""

    class Broken(QuickDisk):
        def sync_dir(self, path: str) -> None:
            if os.path.exists(f"{path}/treering.json"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def unlink(self, path: str) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    use_disk(Broken())
    with pytest.raises(tr.errors.SaveError, match=r"is in place, .* after a power cut it may be gone"):
        tr.save(tmp_path / "c", tree(1))
    assert_is(tr.restore(tmp_path / "c"), 1)


# Reading


class ShortDisk(SteppedDisk):
    """A disk on which one file ends early, at the read with the number `at`."""

    def __init__(self, at: int):
        super().__init__(looking=True)
        self.at, self.shortened = at, False

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != "read":
            self.count -= 1  # only reads are counted
            return operation(*args)
        fd, buffer, offset = args
        if number != self.at:
            return operation(*args)
        self.shortened = True
        return operation(fd, buffer[: len(buffer) // 2], offset)


READS: dict[str, Callable[[pathlib.Path], Any]] = {
    "mapped": lambda run: tr.restore(run),
    "copied": lambda run: tr.restore(run, mmap=False),
    "little memory": lambda run: tr.restore(run, mmap=False, memory_limit=1000),
    "opened": lambda run: tr.open(run).restore(),
    "Checkpointer": lambda run: tr.Checkpointer(run).restore(),
}


DAMAGE = [errno.EIO, errno.EFAULT, errno.EBADMSG, errno.EUCLEAN]  # "the system cannot return the stored bytes"


@pytest.mark.long
@pytest.mark.parametrize("double", ["damage", "gone", "other", "short"])
@pytest.mark.parametrize("name", READS)
def test_what_cannot_be_read_is_never_returned(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture, name: str, double: str
) -> None:
    """Unreadable data is damage, as a file that ends early is: restore takes the step before it.

    Missing permission or too many open files raise an `OSError`. If another machine has removed a file, the step is
    gone, unless it exists when it is opened again.
    """
    caplog.set_level(logging.CRITICAL, "treering")  # pytest keeps log records, which would keep the errors alive
    use_disk(QuickDisk())
    for step in (1, 4):
        tr.save(tmp_path / f"step-{step}", tree(step))
    READS[name](tmp_path)
    gc.collect()
    codes = {"damage": DAMAGE, "gone": [errno.ESTALE], "other": [errno.EACCES, errno.EMFILE, errno.EINTR]}.get(
        double, []
    )
    before, raised, fell_back = descriptors(), 0, 0
    for at in itertools.count(1):
        disk = use_disk(FailingDisk(at, codes[at % len(codes)], looking=True) if codes else ShortDisk(at))
        try:
            found = READS[name](tmp_path)
        except (tr.errors.TreeringError, OSError) as error:
            raised += 1
            kind = {"damage": tr.errors.CorruptError, "gone": tr.errors.NotFoundError, "other": OSError}
            assert isinstance(error, kind.get(double, tr.errors.CorruptError)), disk.failed  # noqa: PT017
            assert str(tmp_path) in str(error), disk.failed  # noqa: PT017
            assert double in ("short", "gone") or os.strerror(disk.code) in str(error)  # noqa: PT017
            del error
        else:
            # A directory without permission is not listed as a step.
            closed = disk.code == errno.EACCES and disk.failed == ["stat"] if double == "other" else False
            fell_back += found["n"] == 1 and not closed
            assert_is(found, 1 if found["n"] == 1 and (double != "other" or closed) else 4)
            del found
        assert_no_more_descriptors(before)
        if not (disk.failed if codes else disk.shortened):
            break
    assert raised >= {"damage": 1, "gone": 0, "other": 5}.get(double, name == "opened")
    assert double == "short" or (fell_back >= 1) == (double == "damage")


class BadFiles(QuickDisk):
    """A disk that cannot read the files whose paths contain `part`; with `inode`, not even their `stat`."""

    def __init__(self, part: str, code: int, *, inode: bool = False):
        self.part, self.code, self.inode = part, code, inode
        self.paths: dict[int, str] = {}

    def stat(self, path: str) -> os.stat_result | None:
        if self.inode and self.part in path:
            raise OSError(self.code, os.strerror(self.code), path)
        return super().stat(path)

    def open(self, path: str) -> int:
        fd = super().open(path)
        self.paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self.paths.pop(fd, None)
        super().close(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.part in self.paths.get(fd, "/"):
            raise OSError(self.code, os.strerror(self.code))
        return super().read(fd, buffer, offset)

    def populate(self, fd: int, mapped: Any, offset: int, size: int) -> bool:
        if self.part in self.paths.get(fd, "/"):
            raise OSError(self.code, os.strerror(self.code))
        return super().populate(fd, mapped, offset, size)


@pytest.mark.parametrize("part", ["step-00000004/arrays-", "step-00000004/treering.json", "step-00000004"])
@pytest.mark.parametrize("code", DAMAGE, ids=errno.errorcode.get)
def test_run_resumes_before_an_unreadable_step(tmp_path: pathlib.Path, use_disk: Any, part: str, code: int) -> None:
    """A run continues from the step before an unreadable one."""
    use_disk(QuickDisk())
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2, 4):
            ckpts.save(step, tree(step))
    use_disk(BadFiles(part, code, inode=part == "step-00000004"))
    assert tr.steps(tmp_path) == [1, 2, 4]
    assert_is(tr.restore(tmp_path), 2)
    assert [ckpt.step for ckpt in tr.follow(tmp_path, timeout=0)][:2] == [1, 2]
    report = tr.verify(tmp_path)
    assert not report.ok and all("step-00000004" in str(problem) for problem in report.problems)
    with pytest.raises(tr.errors.CorruptError, match=rf"step-00000004.*cannot be read: .*{errno.errorcode[code]}"):
        tr.restore(tmp_path, step=4)
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(2)) as ckpts:
        assert_is(ckpts.restore(), 2)
        for step in (5, 6, 7):
            ckpts.save(step, tree(step))
        ckpts.wait()
        # The step that it continued from, and those that retention keeps.
        assert [step for step in ckpts.steps if step != 4] == [2, 6, 7]
    assert_is(tr.restore(tmp_path), 7)


@pytest.mark.parametrize("name", ["flax", "orbax", "t5x"])
@pytest.mark.parametrize("inode", [False, True])
def test_steps_of_other_libraries_that_cannot_be_read(
    tmp_path: pathlib.Path, use_disk: Any, name: str, inode: bool
) -> None:
    """Restore falls back from an unreadable step of another library to the one before it."""
    numbers = {"w": np.arange(6, dtype=np.float32)}
    for step in (1, 4):
        tr.save(
            tmp_path / {"flax": "ckpt_{}", "orbax": "{}", "t5x": "checkpoint_{}"}[name].format(step),
            numbers,
            format=name,
        )
    newest = {"flax": "/ckpt_4", "orbax": "/4/", "t5x": "/checkpoint_4/"}[name]
    use_disk(BadFiles(newest, errno.EIO, inode=inode))
    assert tr.restore(tmp_path)["w"].tolist() == list(range(6))
    with pytest.raises(tr.errors.CorruptError, match=r"cannot be read: .*EIO"):
        tr.restore(f"{tmp_path}{newest}".rstrip("/"))
    assert not tr.verify(f"{tmp_path}{newest}".rstrip("/")).ok


@pytest.mark.parametrize(
    ("name", "format"),
    [("x.safetensors", None), ("x.eqx", None), ("x.msgpack", None), ("x.stream", "fjformer"), ("x", "safetensors")],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: pathlib.Path, use_disk: Any, name: str, format: str | None
) -> None:
    """Errors about unreadable files name the file and the system's error code."""
    path = tmp_path / name
    tr.save(path, {"w": np.arange(100_000, dtype=np.float32)}, format=format)
    ckpt = tr.open(path)
    for code in DAMAGE:
        for part, inode in ((str(path), False), (str(path), True)):
            use_disk(BadFiles(part, code, inode=inode))
            for read in (
                lambda: tr.restore(path),
                lambda: tr.diff(path, path),
                lambda: tr.convert(path, tmp_path / "c"),
            ):
                with pytest.raises(tr.errors.CorruptError, match=errno.errorcode[code]):
                    read()
            assert not tr.verify(path).ok and not (tmp_path / "c").exists()
    use_disk(QuickDisk())
    assert np.asarray(ckpt[next(iter(ckpt))])[7] == 7


LOOKS: dict[str, Callable[[pathlib.Path], Any]] = {
    "steps": tr.steps,
    "follow": lambda run: [ckpt.step for ckpt in tr.follow(run, timeout=0)],
    "record": lambda run: tr.record(run, 4, {"val": 2.0}),
    "verify": tr.verify,
    "diff": lambda run: tr.diff(run, run),
    "convert": lambda run: tr.convert(run, run.parent / "copy", overwrite=True),
    "open": lambda run: (repr(ckpt := tr.open(run)), ckpt.metrics, ckpt.created, np.asarray(ckpt["w"])),
    "known": lambda run: (c := tr.Checkpointer(run), c.steps, c.latest_step, c.best_step("val", "min"), c.pinned),
    "restore_or_init": lambda run: tr.Checkpointer(run).restore_or_init(lambda: {"w": np.zeros(30)}),
    "save": lambda run: tr.save(run.parent / "new", tr.open(run), overwrite=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", [*DAMAGE, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", LOOKS)
def test_no_bare_error_of_the_system_comes_out_of_anything(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture, name: str, code: int
) -> None:
    """Public calls raise a `TreeringError` for these errors, and no bare `OSError`."""
    caplog.set_level(logging.CRITICAL, "treering")
    use_disk(QuickDisk())
    for step in (1, 4):
        tr.save(tmp_path / f"run/step-{step}", {"w": np.arange(30.0)}, step=step, metrics={"val": 1.0})
    for at in itertools.count(1):
        disk = use_disk(FailingDisk(at, code, looking=True))
        with contextlib.suppress(tr.errors.TreeringError):
            LOOKS[name](tmp_path / "run")
        if not disk.failed:
            break
    assert at > 2


TENSORSTORE = """
    import sys
    import numpy as np
    import treering as tr
    import refused_syscalls
    place, code, kinds = sys.argv[1], int(sys.argv[2]), ("CorruptError", "NotFoundError")
    for name in ("orbax", "levanter", "t5x"):
        tr.save(f"{place}/{name}", {"w": np.ones(100_000, np.float32)}, format=name)
        tr.restore(f"{place}/{name}")
    lazy = tr.open(f"{place}/levanter")["w"]
    refused_syscalls.refuse("pread64", code)  # only TensorStore reads by this call
    for name in ("orbax", "levanter", "t5x"):
        try:
            tr.restore(f"{place}/{name}")
        except tr.errors.TreeringError as error:
            assert f"{place}/{name}" in str(error), error
            print([kind for kind in kinds if isinstance(error, getattr(tr.errors, kind))][0])
        try:
            assert not tr.verify(f"{place}/{name}").ok
        except tr.errors.NotFoundError:
            pass  # another machine has removed the file
    try:
        lazy[:3]
    except tr.errors.TreeringError as error:
        print([kind for kind in kinds if isinstance(error, getattr(tr.errors, kind))][0])
    """


@pytest.mark.slow
@pytest.mark.skipif(not refused_syscalls.available(), reason="no system call can be refused here")
@pytest.mark.parametrize(
    ("code", "kind"),
    [*((code, "CorruptError") for code in DAMAGE), (errno.ESTALE, "NotFoundError")],
    ids=lambda code: errno.errorcode.get(code, code),
)
def test_what_tensorstore_cannot_read(tmp_path: pathlib.Path, code: int, kind: str) -> None:
    """Files that TensorStore cannot read raise the same errors as files that Treering reads itself."""
    script = [sys.executable, "-c", textwrap.dedent(TENSORSTORE), str(tmp_path), str(code)]
    tests = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kind] * 4


def test_a_verification_reports_what_it_cannot_read(tmp_path: pathlib.Path, use_disk: Any) -> None:
    tr.save(tmp_path / "c", tree(4))
    for at in itertools.count(1):
        disk = use_disk(FailingDisk(at, errno.EIO, looking=True))
        report = tr.verify(tmp_path / "c")
        if not disk.failed:
            break
        assert not report.ok or disk.failed[0] in ("close", "is_local"), f"operation {at}, {disk.failed}"
    assert at > 5


# Full disks

FULL = """
    import errno, os, resource, signal, sys, pathlib
    import numpy as np
    import treering as tr
    from treering import stores
    place, kind = pathlib.Path(sys.argv[1]), sys.argv[2]

    class Careless(stores.Disk):
        def preallocate(self, fd, size): ...  # so that the disk is full only in the middle of writing

    def listing():
        return sorted(str(p.relative_to(place)) for p in place.rglob("*"))

    small, large = {"x": np.zeros(1000)}, {"x": np.ones(2 << 20)}
    tr.save(place / "c", small)
    with tr.Checkpointer(place / "run", keep=tr.keep.last(1)) as ckpts:
        ckpts.save(1, small)
    before = listing()

    def step():
        with tr.Checkpointer(place / "run") as ckpts:
            ckpts.save(2, large).result()

    if kind == "limit":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
    for disk in (stores.Disk(), Careless()):
        stores.register(stores.Filesystem(disk))
        for save in (
            lambda: tr.save(place / "new/one", large),
            lambda: tr.save(place / "c", large, overwrite=True),
            lambda: tr.save_async(place / "c", large, overwrite=True).result(),
            step,
        ):
            try:
                save()
            except tr.errors.SaveError as error:
                print(error.__cause__.errno)
            assert listing() == before, listing()
            assert tr.verify(place / "c").ok and tr.verify(place / "run").ok and tr.steps(place / "run") == [1]
    tr.save(place / "c", {"x": np.full(1000, 2.0)}, overwrite=True)
    assert tr.restore(place / "c")["x"][0] == 2 and len(os.listdir(place / "c")) == 2
    """


@pytest.mark.long
def test_a_disk_that_is_really_full(tmp_path: pathlib.Path) -> None:
    """A save to a full disk raises and leaves everything as it was.

    The disk is a file system of 8 MiB where one may be mounted. Elsewhere the system's limit of file sizes replaces it.
    """
    script = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)]
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}"
    can_mount = (
        shutil.which("unshare") and not subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode
    )
    if can_mount:
        command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *script, "mount"]
    else:
        command = [*script, "limit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = errno.ENOSPC if can_mount else errno.EFBIG
    assert done.stdout.split() == [str(expected)] * 8


SHORT_MEMORY = """
import os, resource, sys
from treering import stores
store = stores.get(sys.argv[1])
used = dict(line.split(":", 1) for line in open("/proc/self/status"))["VmData"].split()[0]
resource.setrlimit(resource.RLIMIT_DATA, ((int(used) << 10) + (1 << 20), -1))
try:
    with store.new_file(sys.argv[1] + "/file", overwrite=False) as file:
        print("written")
except OSError as error:
    print(error.errno, os.listdir(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much of a limit is used")
def test_no_memory_for_the_buffer_leaves_no_file(tmp_path: pathlib.Path) -> None:
    script = [sys.executable, "-c", SHORT_MEMORY, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{errno.ENOMEM} []\n", done.stderr
