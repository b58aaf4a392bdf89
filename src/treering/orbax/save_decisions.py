"""Save decision policies: at which steps a `CheckpointManager` saves. The names and meanings are those of Orbax."""

import dataclasses
import datetime
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, runtime_checkable

from .preservation import CheckpointInfo


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
