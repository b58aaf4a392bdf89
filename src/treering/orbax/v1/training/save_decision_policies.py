"""Save decision policies: at which steps a `Checkpointer` saves."""

from ...save_decisions import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)

__all__ = [
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "DecisionContext",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "PreemptionCheckpointingPolicy",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]
