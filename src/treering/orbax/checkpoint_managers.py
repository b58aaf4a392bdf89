"""The namespace `checkpoint_managers` of Orbax: the policies of a `CheckpointManager`."""

from .preservation import (
    AnyPreservationPolicy,
    BestN,
    CheckpointInfo,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationContext,
    PreservationPolicy,
    PreserveAll,
)
from .save_decisions import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)

PolicyCheckpointInfo = CheckpointInfo

__all__ = [
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]
