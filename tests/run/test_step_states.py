"""Compares runs on several disks with a model, after jobs on any of the disks that are killed at any change."""

import contextlib
import functools
import itertools
import logging
import os
import pathlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treering as tr
from lockstep import Lockstep, LockstepCall, current_process
from sampling import SEED, STRIDE, sample_points
from treering import stores
from treering._processes import assignment, coordinator
from treering._run.plain_run import PlainRun
from treering._run.retention import Retention
from treering._run.run_layout import RunLayout
from treering._run.step_catalog import StepCatalog
from treering._run.tiers import host_group, step_states
from treering._run.tiers.journal import Claim, Generations, JournalContents
from treering._run.tiers.local_tier import LocalTier
from treering._run.tiers.tiered_run import TieredRun
from treering._save import write
from treering._save.job import prepare
from treering._save.target import SaveOptions, encode_info, target_of
from treering._threads.pool import ThreadPool
from treering.formats.treering import host_files
from treering.keep import Policy
from treering.stores.lease_registry import LeaseLostError
from treering.stores.posix import Disk
from treering.testing._doubles import QuickDisk, SteppedDisk


class Killed(BaseException):
    """Ends a process like SIGKILL: no error handling of the library stops it."""


class MortalDisk(SteppedDisk):
    """A disk at whose change number `at` a process is killed, or with `all` all processes of the job."""

    def __init__(self, at: int, kills_all: bool):
        super().__init__()
        self._at, self._kills_all = at, kills_all
        self.dead: set[int | None] = set()
        self._open_fds: set[int] = set()

    def step(self, number: int, name: str, operation: Any, args: tuple[Any, ...]) -> Any:
        process = current_process()
        if number == self._at:
            self.dead |= {None, *range(9)} if self._kills_all or process is None else {process}
        self.check()
        found = operation(*args)
        if name in ("create", "open_shared"):
            self._open_fds.add(found)
        return found

    def open(self, path: str) -> int:
        self._open_fds.add(fd := super().open(path))
        return fd

    def open_dir(self, path: str) -> int:
        self._open_fds.add(fd := super().open_dir(path))
        return fd

    def close(self, fd: int) -> None:
        if fd in self._open_fds:  # otherwise `end` has closed it
            self._open_fds.remove(fd)
            super().close(fd)

    def end(self) -> None:
        """Closes all files, as the system does when processes end."""
        self._at = 0
        self.dead.clear()
        for fd in list(self._open_fds):
            self.close(fd)

    def check(self) -> None:
        if current_process() in self.dead:
            raise Killed


class _NoExchange:
    """Stands for `Exchange`, which reads files of other hosts."""

    def __init__(self, local: LocalTier, *_: Any):
        self._store = local.store

    def find(self, name: str) -> None:
        return None

    def view(self, name: str, held: Any) -> Any:
        return self._store


class JobModel:
    """What one job knows: `must` maps its steps to versions, `may` has versions that a killed change left in doubt."""

    def __init__(self, number: int, disks: frozenset[str], world: "World"):
        self.number, self.disks, self.epoch = number, disks, world.epoch
        self.bases = set(world.writers)  # the jobs that may have changed the remote tier last when this one began
        self.must: dict[int, str] = {}
        self.may: set[str] = set()
        self.tried = self.claimed = False  # True if the claim was attempted, and if it succeeded on all disks
        self.dropped: set[str] = set()


class World:
    """Disks, a remote tier, and the model of both. Versions of steps are the identities of their manifests."""

    keep: Policy | None = None  # of remote steps

    def __init__(self, root: str, seed: str):
        self.root, self.random = root, random.Random(seed)
        self.remote = f"{root}/remote"
        self.names = "abcd"[: self.random.randint(2, 4)]
        self.copies = self.random.choice((1, 1, 2))  # disks that have each array file
        self.lives = dict.fromkeys(self.names, 0)  # how often each disk was emptied
        self.jobs: list[JobModel] = []
        self.epoch, self.epoch_is_open = 0, True  # changes when the remote tier loses its generations
        self.writers = {0}  # the numbers of the jobs that may have changed the remote tier last
        self.files: dict[str, dict[str, set[str]]] = {}  # by version, its files, and the disks that have got each
        self.known: dict[str, set[str]] = {}  # the versions of which a disk had the manifest after some job
        self.unwanted: set[str] = set()  # versions that a call was to delete or to replace
        self.uploaded: dict[str, int] = {}  # versions that must be remote, and their steps
        self.log: list[str] = []

    def path(self, disk: str) -> str:
        return f"{self.root}/{disk}"

    def life(self, disk: str) -> str:
        return f"{disk}{self.lives[disk]}"

    # The files

    def manifests(self, place: str) -> dict[int, str]:
        found = {}
        for folder in pathlib.Path(place).glob("step-*"):
            if identity := host_files.identity(stores.get(place), str(folder)):
                found[int(folder.name[5:])] = identity
        return found

    def look(self, job: JobModel) -> None:
        """Learns of new versions and of uploads."""
        store = stores.get(self.root)
        for disk in (*self.names, "remote"):
            for step, identity in self.manifests(self.path(disk)).items():
                life = self.life(disk) if disk != "remote" else disk
                self.known.setdefault(life, set()).add(identity)
                if identity not in self.files:
                    listed = host_files.listed_files(store, f"{self.path(disk)}/step-{step:08}")
                    assert listed is not None
                    self.files[identity] = {file.name: set() for file in listed}
                    for name, holders in self.files[identity].items():
                        holders |= {self.life(one) for one in self.names if self.is_on(one, name)}
                    if identity not in job.must.values():
                        job.may.add(identity)
        there = self.manifests(self.remote)
        for identity, step in self.uploaded.items():
            # An upload may replace a version that was overwritten before.
            assert there.get(step) == identity or identity in self.unwanted, f"step {step} left the remote tier"
        for step, identity in there.items():
            names = self.files[identity]
            if all(os.path.exists(f"{self.remote}/step-{step:08}/{name}") for name in names):
                self.uploaded[identity] = step

    def is_on(self, disk: str, name: str) -> bool:
        return next(pathlib.Path(self.path(disk)).rglob(name), None) is not None

    def check_files(self) -> None:
        """No file of a version is gone that no call has deleted or replaced."""
        for identity, files in self.files.items():
            if identity in self.unwanted or identity in self.uploaded:
                continue
            for name, holders in files.items():
                for disk in self.names:
                    # A part without a manifest is what a save leaves that was killed before or after its commit. If
                    # its step has left the run, later jobs cannot tell which, and remove it.
                    if self.life(disk) in holders and identity in self.known.get(self.life(disk), ()):
                        assert self.is_on(disk, name), f"{identity}: {name} is gone from disk {disk}"

    # What a job must see

    def candidates(self, disks: frozenset[str]) -> Iterator[JobModel | None]:
        """Yields the jobs that may be the last one, as disks can know it; None if only the remote tier counts."""
        newer = [one for one in self.jobs if one.epoch == self.epoch]
        for job in reversed(self.jobs):
            if not (job.tried and job.disks & disks):
                continue
            confirming = {job.number, *job.bases}
            if job.epoch != self.epoch:
                if not self.epoch_is_open or any(one.claimed for one in newer):
                    continue
                is_sure = False  # Nothing orders the jobs of several series.
            else:
                if not confirming & self.writers:
                    continue
                is_sure = self.writers <= {job.number} or (self.writers == job.bases and len(job.bases) == 1)
            yield job
            if is_sure and job.claimed:
                return
        yield None

    def is_complete(self, identity: str, disks: frozenset[str]) -> bool:
        return identity in self.uploaded or all(holders & disks for holders in self.files[identity].values())

    def problem(self, job: JobModel | None, listed: dict[int, str], disks: frozenset[str]) -> str:
        """Returns what is wrong with the steps that a job lists, if `job` was the last one; "" if nothing is."""
        allowed = {*self.uploaded, *(job.must.values() if job else ()), *(job.may if job else ())}
        if strange := {step: one for step, one in listed.items() if one not in allowed}:
            return f"came back: {strange}"
        must = dict(job.must) if job else {}
        if job:
            later = [one for one in self.jobs if one.number > job.number]
            must = {step: one for step, one in must.items() if not any(one in other.dropped for other in later)}
        for identity, step in self.uploaded.items():
            if identity not in self.unwanted:
                must.setdefault(step, identity)
        lost = {
            step: one
            for step, one in must.items()
            if listed.get(step) != one
            and self.is_complete(one, disks & job.disks if job else disks)
            and not (job and listed.get(step) in {*job.must.values(), *job.may})
        }
        return f"lost: {lost}" if lost else ""

    def check(self, listed: dict[int, str], disks: frozenset[str]) -> None:
        problems = {one and one.number: self.problem(one, listed, disks) for one in self.candidates(disks)}
        assert "" in problems.values(), f"listed {listed}: {problems}"

    # Jobs

    def job(self, disks: str, plan: list[str], kill_at: int, kills_all: bool) -> "RunningJob":
        lives = frozenset(map(self.life, disks))
        model = JobModel(len(self.jobs) + 1, lives, self)
        self.log.append(f"job {model.number} on {disks}: {plan}, killed at {kill_at}{' all' if kills_all else ''}")
        disk = MortalDisk(kill_at, kills_all)
        stores.register(stores.Filesystem(disk))
        job = RunningJob(self, model, disks, plan, disk)
        try:
            job.run()
        finally:
            disk.end()
            stores.register(stores.Filesystem(QuickDisk()))
        self.log.append(f"  saw {job.listed}, has {model.must}, in doubt {model.may}")
        if model.tried:
            self.jobs.append(model)
        self.look(model)
        self.check_files()
        return job

    def lose_generations(self) -> None:
        pathlib.Path(f"{self.remote}/generations.json").unlink(missing_ok=True)
        self.epoch += 1
        self.epoch_is_open, self.writers = not self.manifests(self.remote), {0}

    def empty(self, disk: str) -> None:
        shutil.rmtree(self.path(disk), ignore_errors=True)
        self.lives[disk] += 1

    def disturb(self) -> None:
        """Does to disks, clocks and the remote tier what may happen between jobs."""
        event = self.random.choice(["", "", "", "", "clock", "clock", "empty disk", "empty remote", "no generations"])
        if event == "empty disk":
            disk = self.random.choice(self.names)
            self.empty(disk)
            event += f" {disk}"
        elif event in ("empty remote", "no generations") and os.path.exists(f"{self.remote}/generations.json"):
            if event == "empty remote":
                shutil.rmtree(self.remote)
                self.uploaded.clear()
            self.lose_generations()
        elif event == "clock":
            for path in pathlib.Path(self.root).rglob("*"):
                when = 1.8e9 + self.random.uniform(-3e8, 3e8)
                os.utime(path, (when, when), follow_symlinks=False)
        self.log.append(event)


def tiered_run(world: World, disk: str) -> TieredRun:
    """Returns the run with one disk, as a process of a job sees it."""

    def plain(root: str) -> PlainRun:
        return PlainRun(StepCatalog(stores.get(root), root, RunLayout()), lambda: False)

    run = TieredRun(plain(world.path(disk)), plain(world.remote), world.keep, None, lambda error: None, 5.0, 1)
    run._uploader.begin = lambda: None  # type: ignore[method-assign] # uploads run when the plan says so
    return run


class RunningJob:
    """One job of the real classes, and what the model learns from it."""

    def __init__(self, world: World, model: JobModel, disks: str, plan: list[str], disk: MortalDisk):
        self.world, self.model, self.plan, self.disk = world, model, plan, disk
        self.steps = Lockstep(len(disks))
        self.seed = world.random.random()
        self.listed: dict[int, str] | None = None
        self.runs = [tiered_run(world, one) for one in disks]

    def run(self) -> None:
        with mock.patch.object(coordinator, "begin_call", self.steps.begin_call):
            self.steps.run(self._process)
        for error in self.steps.errors.values():
            if not (self.disk.dead or isinstance(error, Killed)):
                raise error

    def _process(self, index: int) -> None:
        run, choices = self.runs[index], random.Random(self.seed)
        call = self.steps.begin_call()
        run.discover_hosts(call)
        if index == 0:
            self.listed = self._list(run)
            self.world.check(self.listed, self.model.disks)
            self.model.must = dict(self.listed)
        for what in self.plan:
            self.disk.check()
            getattr(self, f"_{what}")(index, run, self.steps.begin_call(), choices)
        self.disk.check()

    def _list(self, run: TieredRun) -> dict[int, str]:
        store = stores.get(self.world.root)
        found = {step: host_files.identity(store, path) for step, path in run.all_steps().items()}
        return {step: one for step, one in found.items() if self._is_complete(step, one)}

    def _is_complete(self, step: int, identity: str) -> bool:
        """Returns True if the files of a step are on disks of this job, or remote."""
        store, name = stores.get(self.world.root), f"step-{step:08}"
        places = [f"{one}/{name}" for one in (*(run.local.root for run in self.runs), self.world.remote)]
        listed = next(
            host_files.listed_files(store, one) for one in places if host_files.identity(store, one) == identity
        )
        return all(any(os.path.exists(f"{one}/{file.name}") for one in places) for file in listed or ())

    def _begin(self) -> None:
        """The model notes that the job is about to change something."""
        if not self.model.tried:
            self.model.tried = True
            for job in self.world.jobs:
                self.model.dropped |= {*job.must.values(), *job.may} - {*self.model.must.values()}

    def _writes(self) -> None:
        self.world.writers.add(self.model.number)

    def _wrote(self) -> None:
        self.world.writers = {self.model.number}

    def _drop(self, steps: list[int]) -> None:
        """Some versions are about to leave the run."""
        for step in steps:
            identity = self.model.must.pop(step)
            self.model.may.add(identity)
            self.model.dropped.add(identity)
            self.world.uploaded.pop(identity, None)

    def _save(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        step = call.broadcast(lambda: max(self._list(run), default=0) + choices.choice((1, 1, 2)))
        self._save_step(index, run, call, step, "error")

    def _overwrite(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        step = call.broadcast(lambda: choices.choice(sorted(self.model.must) or [0]))
        if step:
            if index == 0:
                self.world.unwanted.add(self.model.must[step])
            self._save_step(index, run, call, step, "overwrite")

    def _back(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        step = call.broadcast(lambda: choices.choice(sorted(self.model.must) or [0]))
        if step:
            run.back_to = step
            self._save_step(index, run, call, step + 1, "error")
            run.back_to = None

    def _save_step(self, index: int, run: TieredRun, call: LockstepCall, step: int, on_exists: str) -> None:
        back = run.back_to
        if index == 0:
            self._begin()
            if back is not None:
                self._writes()
                self._drop([one for one in self.model.must if one > back])
            elif on_exists == "overwrite":
                self._drop([step])

        def reserve() -> Any:
            return run.reserve_step(step, on_exists, ()), run.host_changes and run.host_changes.orders()

        (path, overwrite), orders = call.broadcast(reserve)
        if run.host_changes:
            path = run.host_changes.prepare(path, orders, run.back_to)
        hosts = tuple(range(call.count)) if run.host_changes else None
        options = SaveOptions(
            "treering", overwrite, (), None, None, True, False, {}, hosts=hosts, copies=self.world.copies
        )
        tree = {"abcd"[n]: np.full(8, 10 * step + n) for n in range(4)}
        plan = prepare(target_of(call, path, encode_info(step, None, None), options), tree)
        if index == 0:
            run.acquire_for_save()
            Retention(run, None).before_write()
        plan.caller.run()
        with contextlib.closing(ThreadPool(1)) as pool:
            write.write(plan, pool)

        def on_commit() -> None:
            run.on_commit(step, lambda step: None)
            new = host_files.identity(stores.get(path), path)
            old = [one for one in self.model.may if one not in self.world.files or one in self.world.unwanted]
            self.model.may.difference_update(old)
            self.model.must[step] = new
            self.model.claimed = True
            if back is not None:
                self.model.may.clear()
                self._wrote()

        call.broadcast(on_commit)

    def _delete(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        step = call.broadcast(lambda: choices.choice(sorted(self.model.must) or [0]))
        if not step:
            return

        def delete() -> None:
            nonlocal is_remote
            is_remote = step in self.world.manifests(self.world.remote)
            self._begin()
            if is_remote:
                self._writes()
            self.world.unwanted.add(self.model.must[step])
            self._drop([step])
            run.delete(step)

        is_remote = False
        call.broadcast(delete)
        if run.host_group:
            run.host_group.delete(step)
        self._end_change(index, self.steps.begin_call(), wrote=is_remote)

    def _rewind(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        step = call.broadcast(lambda: choices.choice(sorted(self.model.must) or [0]))
        if not step:
            return

        def rewind() -> None:
            self._begin()
            self._writes()
            self._drop([one for one in self.model.must if one > step])
            run.rewind(step)

        call.broadcast(rewind)
        if run.host_group:
            run.host_group.archive_after(step)
        self._end_change(index, self.steps.begin_call(), wrote=True)

    def _forget(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        """Removes the journals while the job runs."""
        pathlib.Path(run.local.root, "journal.json").unlink()

    def _end_change(self, index: int, call: LockstepCall, *, wrote: bool) -> None:
        call.broadcast(lambda: None)
        if index == 0:
            self.model.may.clear()
            if wrote:
                self._wrote()

    def _upload(self, index: int, run: TieredRun, call: LockstepCall, choices: random.Random) -> None:
        """Uploads all steps, as after a save. Does nothing before the job has claimed the run."""
        if not call.broadcast(lambda: run.claimed):
            return
        if index == 0:
            self._writes()
        group = run.host_group
        if index:
            assert group
            group.follow("uploading", 5.0, lambda nbytes, look: None)
        elif group:
            run._uploader._upload_all(functools.partial(group.round, "uploading", 5.0))
        else:
            run._uploader._upload_all()
        if index == 0 and not self.disk.dead:
            assert run._uploader.error is None and not run.to_upload(), run._uploader.error


@contextlib.contextmanager
def worlds(seed: str) -> Iterator[World]:
    place = tempfile.mkdtemp()
    world = World(place, seed)
    with (
        mock.patch.object(host_group, "Exchange", _NoExchange),
        mock.patch.object(assignment, "_MIN_CUT_BYTES", 8),
    ):
        try:
            yield world
        except BaseException:
            print("\n".join(world.log))
            raise
        finally:
            stores.register(stores.Filesystem(Disk()))
            shutil.rmtree(place)


# Without uploads, steps with second copies are only on the disks, which must then be enough.
_CHANGES = ["save", "save", "save", "overwrite", "back", "delete", "rewind", "upload", "upload"]


def _try(seed: str, jobs: int) -> None:
    with worlds(seed) as world:
        for _ in range(jobs):
            disks = world.random.sample(world.names, world.random.randint(1, len(world.names)))
            changes = _CHANGES if world.copies == 1 else _CHANGES[:-2]
            plan = world.random.choices(changes, k=world.random.choice((0, 1, 2, 3, 4)))
            kill_at = world.random.choice((0, world.random.randint(1, 30), world.random.randint(1, 150)))
            world.job("".join(disks), plan, kill_at, world.random.random() < 0.7)
            world.disturb()
        world.job(world.names, [], 0, False)


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("treering"), "disabled", True)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("number", range(3))
def test_jobs_on_any_disks_killed_anywhere(number: int) -> None:
    """Nothing committed is lost, and no abandoned, deleted or replaced step comes back."""
    for n in range(4 if STRIDE > 1 else 100):
        _try(f"{SEED if STRIDE == 1 else 0} {number} {n}", 6)  # The rare sequences are left to `make thorough`.


def _changes(disks: str, *plans: list[str], copies: int = 1) -> int:
    """Returns the number of changes that the last of some jobs makes."""
    with worlds("count") as world:
        world.names, world.copies = "abc", copies
        jobs = [world.job(disks, plan, 0, True) for plan in plans]
    return jobs[-1].disk.count


@pytest.mark.long
@pytest.mark.parametrize("change", ["delete", "rewind"])
def test_change_cut_short_deletes_no_part_of_a_step(change: str) -> None:
    """A step that is still on the disk of process 0 keeps its files on the other disks."""
    plans = [["save", "save", "save"], [change]]
    for at in sample_points(range(1, _changes("ab", *plans) + 1)):
        with worlds("cut") as world:
            world.names, world.copies, world.keep = "ab", 1, tr.keep.last(1)
            world.job("ab", plans[0], 0, True)
            world.job("ab", plans[1], at, True)
            world.job("ab", ["save", "upload"], 0, True)
            assert world.manifests(world.path("a")) == world.manifests(world.path("b")), f"killed at {at}"


@pytest.mark.slow
def test_replacement_cut_short_leaves_a_step() -> None:
    """Also without the disk of process 0: the two others have all files of the old or of the new version."""
    plans = [["save"], ["overwrite"]]
    for at in sample_points(range(1, _changes("abc", *plans, copies=2) + 1)):
        disks, kills_all = ("cb", "bc", "cab")[at % 3], at % 2 == 0
        with worlds("replaced") as world:
            world.names, world.copies = "abc", 2
            world.job("abc", plans[0], 0, True)
            world.job("abc", plans[1], at, kills_all)
            (step,) = world.jobs[0].must
            assert list(world.job(disks, [], 0, True).listed or ()) == [step], f"killed at {at}"


LOST = "generations are lost"
EMPTY = "empty"


@pytest.mark.parametrize(
    "events",
    [
        # The last job cannot know how many jobs claimed the run before, and neither can its successor.
        [("ab", ["save"]), ("a", ["save"]), LOST, ("b", ["save"]), ("ba", [])],
        [("ab", ["save", "upload"]), ("b", ["save"]), LOST, ("a", ["save", "upload"]), ("ab", []), ("b", [])],
        # The journals are removed while a job runs.
        [("ab", ["save", "forget", "save"]), ("b", [])],
        # A disk that was away has a step that was deleted.
        [("a", ["save", "save", "upload"]), ("b", ["delete"]), ("a", [])],
        # A disk of an abandoned branch has a step with the number of the deleted one.
        [("cb", ["save"]), ("d", ["save"]), ("bdc", ["delete"])],
        # A disk has a part of an incomplete version of the deleted step, which only the remote tier has.
        [("ab", ["save", "upload"]), ("ab", ["overwrite"]), ("b", EMPTY), ("ba", ["delete"])],
    ],
)
def test_known_sequences(events: list[Any]) -> None:
    with worlds("known") as world:
        world.names, world.copies = "abcd", 2 if "forget" in str(events) else 1
        for event in events:
            if event == LOST:
                world.lose_generations()
                continue
            disks, plan = event
            if plan == EMPTY:
                world.empty(disks)
            else:
                world.job(disks, plan, 0, True)


def test_a_new_disk_says_which_steps_are_of_the_run() -> None:
    """The last job has left only a disk without files of the step. One that was away has all files."""
    with worlds("known") as world:
        world.names, world.copies = "abcd", 2
        world.job("db", ["save"], 0, True)
        world.job("cad", ["save"], 0, True)
        world.empty("c")
        world.empty("d")
        job = world.job("ab", [], 0, True)
        assert job.listed is not None and job.listed.keys() == {1}


def test_parts_stay_while_the_only_manifest_cannot_be_read() -> None:
    """A disk has array files alone, because its process was killed. The disk with the manifest fails for one job."""
    with worlds("unreadable") as world:
        world.names, world.copies = "ab", 1
        world.job("ab", ["save", "save"], 0, True)
        path, other = (min(pathlib.Path(world.path(disk)).glob("step-*/treering.json")) for disk in "ab")
        other.unlink()
        data = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(data[:-1])
        with mock.patch.object(world, "check"):  # No job can know that step now.
            world.job("ab", ["save", "upload"], 0, True)
        path.write_bytes(data)
        world.check_files()


@pytest.mark.parametrize("disk", "ab")
def test_damaged_manifest_is_taken_from_another_disk(disk: str) -> None:
    """A changed byte on one disk does not make the step look replaced."""
    with worlds("damaged") as world:
        world.names, world.copies = "ab", 1
        world.job("ab", ["save", "save"], 0, True)
        path = next(pathlib.Path(world.path(disk)).glob("step-*/treering.json"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
        world.job("ab", ["save", "upload"], 0, True)
        assert world.manifests(world.path("a")) == world.manifests(world.path("b"))


def test_a_job_that_has_lost_the_run_marks_nothing() -> None:
    """A job that stood still while another one claimed the run does not make its own disk the newest one."""
    with worlds("lost") as world:
        world.names = "ab"
        world.job("a", ["save"], 0, True)
        first = tiered_run(world, "a")
        first.acquire_run()
        first.remote.release()  # a lease that has expired
        world.job("b", ["save"], 0, True)
        with pytest.raises(LeaseLostError, match="another job has written this run"):
            first.rewind(0)
        assert world.manifests(world.path("b"))
        world.job("ab", [], 0, True)


@pytest.mark.long
@pytest.mark.whole
@given(st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_merge_does_not_depend_on_the_order(data: st.DataObject) -> None:
    """Nor on how often a disk is merged. A step that a present heir has retired is never listed. Nothing is listed if
    the remote tier has steps, but no file of generations."""
    base, heirs = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([("a", "b"), ("a",), ()]))
    claim = st.builds(
        Claim, st.integers(1, 4), st.just(base), st.just(("a", "b")), st.just(heirs), st.sampled_from("xy")
    )
    steps = st.dictionaries(st.sampled_from(["step-1", "step-2"]), st.sampled_from(["", "i", "j"]))
    retired = st.dictionaries(st.sampled_from("ij"), st.sampled_from(["archived", "deleted"]))
    journals = [JournalContents("run", name, tuple(data.draw(st.lists(claim))), data.draw(retired)) for name in "abc"]
    disks = [step_states.DiskReport(one, data.draw(steps)) for one in journals]
    generations = data.draw(st.none() | st.builds(Generations, st.sampled_from("xy"), st.just(5), st.integers(0, 3)))
    remote, is_empty = data.draw(steps), generations is None and data.draw(st.booleans())

    def merged(order: Sequence[int]) -> tuple[Any, ...]:
        there = {n: disks[one] for n, one in enumerate(order)}
        found = step_states.merge(there, generations, remote.get, is_empty=is_empty)
        heirs = {order[one] for one in found.heirs}
        assert is_empty or generations or not heirs, "nothing says that the remote steps are of these disks"
        for name, (identity, _) in found.steps.items():
            records = [disks[one] for one in heirs if identity in disks[one].journal.retired]
            assert not [one for one in records if one.manifests.get(name) != identity]
        listed = {name: identity for name, (identity, _) in found.steps.items()}
        return heirs, found.lost_first, found.retired, listed

    for order in itertools.permutations(range(3)):
        assert merged(order) == merged((0, 1, 2))
