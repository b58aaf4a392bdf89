"""The policies of a `CheckpointManager`: which steps it keeps, and which it saves. Names and meanings are Orbax's.

A preservation policy has `should_preserve(checkpoints, context=…)`, which returns a list of bools. It runs within
`treering.Checkpointer(keep=…)`. So the newest step always stays, whatever a policy says.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, runtime_checkable

from ..keep import Policy, Saved


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A step as policies see it. `time` is that of the commit, in UTC. `metrics` is None if the step has none."""

    step: int
    time: datetime.datetime
    metrics: Any


@dataclasses.dataclass(kw_only=True)
class PreservationContext:
    """Further facts for a policy. There are none."""


class PreservationPolicy(Protocol):
    """Decides which steps stay."""

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext) -> Sequence[bool]:
        """Returns True for each step that stays. `checkpoints` are the steps of the run, ascending."""
        ...


@dataclasses.dataclass
class PreserveAll:
    """Keeps all steps."""

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        return [True] * len(checkpoints)


@dataclasses.dataclass
class LatestN:
    """Keeps the `n` newest steps; None keeps all."""

    n: int | None = None

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        first = 0 if self.n is None else len(checkpoints) - self.n
        return [index >= first for index in range(len(checkpoints))]


@dataclasses.dataclass
class EveryNSeconds:
    """Keeps the first step, and then each that came at least `interval_secs` after the one kept before."""

    interval_secs: float

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        interval = datetime.timedelta(seconds=self.interval_secs)
        return _spaced([one.time for one in checkpoints], interval)


@dataclasses.dataclass
class EveryNSteps:
    """Keeps the multiples of `interval_steps`, or with ``exact_interval=False`` steps with at least that distance.

    `max_to_keep` limits their number to the newest.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        _check_interval(self.interval_steps)
        steps = [one.step for one in checkpoints]
        if self.exact_interval:
            kept = [step % self.interval_steps == 0 for step in steps]
        else:
            kept = _spaced(steps, self.interval_steps)
        return _newest(kept, self.max_to_keep)


@dataclasses.dataclass
class EveryNStepsClosest:
    """Keeps the step closest to each multiple of `interval_steps`, of equally close ones the newer; and the last."""

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        _check_interval(self.interval_steps)
        closest: dict[int, tuple[int, int]] = {}  # by multiple: the distance, and the index of the step
        for index, one in enumerate(checkpoints):
            multiple = round(one.step / self.interval_steps)
            distance = abs(one.step - multiple * self.interval_steps)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = distance, index
        wanted = {index for _, index in closest.values()} | {len(checkpoints) - 1}
        return _newest([index in wanted for index in range(len(checkpoints))], self.max_to_keep)


class CustomSteps:
    """Keeps the given steps."""

    def __init__(self, steps: Sequence[int]):
        self.steps = frozenset(steps)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        return [one.step in self.steps for one in checkpoints]


@dataclasses.dataclass
class LatestDuration:
    """Keeps the steps of the last `duration`, and the newest one if all are older."""

    duration: datetime.timedelta

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        first = datetime.datetime.now(datetime.UTC) - self.duration
        kept = [one.time >= first for one in checkpoints]
        return kept if any(kept) else _newest([True] * len(checkpoints), 1)


@dataclasses.dataclass(kw_only=True)
class BestN:
    """Keeps the `n` best steps, those for which `get_metric_fn` of the metrics is highest; NaN is worst.

    reverse: lower values are better. n: None keeps all steps, and 0 none.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        if self.n is None or 0 < len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        best = {one.step for one in self.ranked(checkpoints)[: self.n]}
        kept_without = self.keep_checkpoints_without_metrics and self.n > 0
        return [kept_without if one.metrics is None else one.step in best for one in checkpoints]

    def ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Returns the steps with metrics, the best first, of equal ones the newer first."""

        def key(one: CheckpointInfo) -> tuple[bool, float, int]:
            value = float(self.get_metric_fn(one.metrics))
            return math.isnan(value), 0.0 if math.isnan(value) else value if self.reverse else -value, -one.step

        return sorted((one for one in checkpoints if one.metrics is not None), key=key)


@dataclasses.dataclass
class AnyPreservationPolicy:
    """Keeps what any of its policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: Any) -> list[bool]:
        decisions = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(row) for row in zip(*decisions, strict=True)] if decisions else [False] * len(checkpoints)


@dataclasses.dataclass(frozen=True)
class _PolicyRule:
    """Applies a preservation policy as a rule of `treering.keep`."""

    policy: PreservationPolicy

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        checkpoints = [info_of(one) for one in saved]
        decided = self.policy.should_preserve(checkpoints, context=PreservationContext())
        return {one.step for one, kept in zip(checkpoints, decided, strict=True) if kept}


def as_keep(policy: PreservationPolicy) -> Policy | None:
    """Returns a preservation policy as one of `treering.keep`; None if it keeps all, so that no manifest is read."""
    return None if _keeps_all(policy) else Policy((_PolicyRule(policy),))


def _keeps_all(policy: PreservationPolicy) -> bool:
    """Returns False for a subclass, because its `should_preserve` may decide otherwise."""
    if type(policy) is AnyPreservationPolicy:
        return any(map(_keeps_all, policy.policies))
    return type(policy) is PreserveAll or (type(policy) in (LatestN, BestN) and getattr(policy, "n", 0) is None)


def info_of(saved: Saved) -> CheckpointInfo:
    """Returns a step of a run as policies of Orbax see it."""
    created = datetime.datetime.fromtimestamp(saved.created, datetime.UTC)
    return CheckpointInfo(saved.step, created, dict(saved.metrics) or None)


def _check_interval(steps: int) -> None:
    if steps <= 0:
        raise ValueError(f"interval_steps={steps!r}: expected a positive number of steps")


def _spaced(values: Sequence[Any], interval: Any) -> list[bool]:
    """Returns True for the first value, and for each that is at least `interval` after the last True one."""
    kept: list[bool] = []
    last = None
    for value in values:
        kept.append(last is None or value - last >= interval)
        last = value if kept[-1] else last
    return kept


def _newest(kept: Sequence[bool], count: int | None) -> list[bool]:
    """Returns the same with only the last `count` True values; None leaves all."""
    wanted = [index for index, one in enumerate(kept) if one]
    wanted = wanted if count is None else wanted[len(wanted) - min(count, len(wanted)) :]
    return [index in wanted for index in range(len(kept))]


@dataclasses.dataclass(kw_only=True)
class DecisionContext:
    """The state of the job, which a policy may use in addition to the steps.

    is_saving_in_progress: True if a save is running. reached_preemption: True if the job is about to be preempted.
    multiprocessing_options: those of the `CheckpointManager`.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether to save a step."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Returns True if the step is to be saved. `previous_steps` are the saved ones, ascending."""
        ...


@dataclasses.dataclass
class FixedIntervalPolicy:
    """Saves the steps that are multiples of `interval`; none if that is 0 or less."""

    interval: int

    def should_save(self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: Any) -> bool:
        return self.interval > 0 and step.step % self.interval == 0


@dataclasses.dataclass
class SpecificStepsPolicy:
    """Saves the given steps."""

    steps: Container[int]

    def should_save(self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: Any) -> bool:
        return step.step in self.steps


@dataclasses.dataclass
class ContinuousCheckpointingPolicy:
    """Saves whenever no save is running and the last was at least `minimum_interval_secs` ago."""

    minimum_interval_secs: int | None = None

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return step.time - previous_steps[-1].time >= datetime.timedelta(seconds=self.minimum_interval_secs)


class PreemptionCheckpointingPolicy:
    """Saves once the job is about to be preempted."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy:
    """Saves the first step of a run."""

    def should_save(self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: Any) -> bool:
        return not previous_steps


@dataclasses.dataclass
class AnySavePolicy:
    """Saves what any of its policies saves."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: Any) -> bool:
        return any(policy.should_save(step, previous_steps, context=context) for policy in self.policies)


@dataclasses.dataclass
class ShouldSaveFnPolicy:
    """Saves a step if the function returns True for it and the latest step, which is None before the first save."""

    should_save_fn: Callable[[int, int | None], bool]

    def should_save(self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: Any) -> bool:
        return bool(self.should_save_fn(step.step, previous_steps[-1].step if previous_steps else None))


# They look only at the number of the step, the number of the latest step, and the preemption, which JAX synchronizes.
# So their decision is the same in every process.
_DECIDE_ALIKE = (FixedIntervalPolicy, SpecificStepsPolicy, InitialSavePolicy, PreemptionCheckpointingPolicy)


def decides_alike(policy: SaveDecisionPolicy) -> bool:
    """Returns True if all processes reach the same decision without asking each other.

    Returns False for a subclass, because its `should_save` may look at anything, such as a clock.
    """
    if type(policy) is AnySavePolicy:
        return all(map(decides_alike, policy.policies))
    return type(policy) in _DECIDE_ALIKE
