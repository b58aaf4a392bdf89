"""Decides which steps on the disks of a job belong to its run. All functions are pure.

The heirs are the disks whose steps belong to the run although the remote tier may lack them: the disks of the last job
that claimed the run, unless another job has changed the remote tier since. A disk that is not an heir has steps of an
abandoned branch, or copies of remote steps.

The journals and manifests of the disks are merged by union, so their order does not matter, and a job that was killed
at any moment leaves disks that a later job merges in the same way.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from .journal import Claim, Generations, JournalContents


class DiskReport(NamedTuple):
    """The report of one disk when a job begins: its journal, and the manifests in its folders of steps.

    manifests: by the name of the folder, the identity of the manifest there, or "" for a folder with arrays alone.
    unreadable: the names of the folders whose manifest cannot be read.
    """

    journal: JournalContents
    manifests: Mapping[str, str]
    unreadable: Collection[str] = ()


class Verdict(NamedTuple):
    """The steps of a run.

    heirs: the disks whose steps belong to the run, the disk of the process 0 of their job first.
    lost_first: True if the disk of that process 0 is not here.
    steps: by name, the identity of the step that belongs to the run, and a disk that has its manifest.
    retired: the identities of all other steps on the disks, and why they do not belong to the run.
    """

    heirs: tuple[int, ...]
    lost_first: bool
    steps: dict[str, tuple[str, int]]
    retired: dict[str, str]


def last_claim(disks: Mapping[int, DiskReport], generations: Generations | None, *, is_empty: bool) -> Claim | None:
    """Returns the newest claim after which no other job has changed the remote tier. Returns None if there is none.

    generations: None if the remote tier has no file of generations. Then all claims are valid if `is_empty`, else none.
    is_empty: True if the remote tier has no steps and no file of generations.
    """
    claims = [claim for disk in disks.values() for claim in disk.journal.claims]
    if generations is None:
        confirmed = claims if is_empty else []
    else:
        own = [one for one in claims if one.series == generations.series]
        # `written_by` is the job that changed the remote tier last. That is the job of the claim, or still the one that
        # had changed it last when the job claimed the run (`base`).
        confirmed = [one for one in own if generations.written_by in (one.generation, one.base)]
    return max(confirmed, key=lambda claim: claim.job, default=None)


def heirs_of(disks: Mapping[int, DiskReport], claim: Claim | None, *, is_new: bool) -> tuple[int, ...]:
    """Returns the disks whose steps belong to the run: those that the job of the last claim used.

    A disk that the job was going to use may lack the claim, because the job was killed. It counts if its steps belonged
    to the run before, unless it is an old copy of a disk that has the claim.

    is_new: True for a run that no job has claimed and that has no remote steps. Then all disks count.
    """
    if claim is None:
        return tuple(sorted(disks)) if is_new and not any(one.journal.claims for one in disks.values()) else ()
    claimed = {n: one.journal.disk for n, one in disks.items() if any(c.job == claim.job for c in one.journal.claims)}
    others = set(claim.heirs).difference(claimed.values())
    found = [index for index, one in disks.items() if index in claimed or one.journal.disk in others]
    # The disk of the process 0 of that job comes first. The names order the rest, because the numbers of the processes
    # may differ from job to job.
    names = {index: disks[index].journal.disk for index in found}
    return tuple(sorted(found, key=lambda index: (names[index] != claim.disks[0], names[index], index)))


def _why_retired(name: str, identity: str, heirs: Sequence[DiskReport]) -> str:
    """Returns "archived" or "deleted" if an heir has recorded that a step left the run, and has removed it; else ""."""
    # A disk with both the manifest and the record was killed before it removed the step, or a save failed that was to
    # replace it. A manifest that cannot be read now may be this one.
    found = [
        one.journal.retired[identity]
        for one in heirs
        if identity in one.journal.retired and one.manifests.get(name) != identity and name not in one.unreadable
    ]
    if "archived" in found:
        return "archived"  # Where the heirs differ, nothing is lost in this way.
    return min(found, default="")


def merge(
    disks: Mapping[int, DiskReport],
    generations: Generations | None,
    remote_identity: Callable[[str], str | None],
    *,
    is_empty: bool,
) -> Verdict:
    """Returns the steps of the run that the disks have.

    disks: by the process that reads the disk.
    remote_identity: returns the identity of the remote step with a name, or None if there is none. A step with the same
        identity on a disk that is not an heir is a copy of it, and can be read.
    """
    claim = last_claim(disks, generations, is_empty=is_empty)
    heirs = heirs_of(disks, claim, is_new=is_empty)
    lost_first = claim is not None and bool(heirs) and disks[heirs[0]].journal.disk != claim.disks[0]
    recorded = {
        identity: why
        for disk in disks.values()
        for name, identity in disk.manifests.items()
        if identity and (why := _why_retired(name, identity, [disks[index] for index in heirs]))
    }
    steps: dict[str, tuple[str, int]] = {}
    for index in heirs:
        borrowed = disks[index].journal.borrowed
        for name, identity in disks[index].manifests.items():
            if identity and identity not in recorded and identity not in borrowed:
                steps.setdefault(name, (identity, index))
    retired: dict[str, str] = {}
    for index, disk in disks.items():
        for name, identity in disk.manifests.items():
            if not identity or steps.get(name, ("",))[0] == identity:
                continue
            # A copy of a remote step belongs to the run on any disk, unless an heir has another step with its name.
            if identity not in recorded and name not in steps and remote_identity(name) == identity:
                steps[name] = identity, index
            else:
                retired[identity] = recorded.get(identity, "archived")
    return Verdict(heirs, lost_first, steps, retired)
