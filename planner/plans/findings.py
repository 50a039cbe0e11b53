"""What a check of a plan found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.errors import Problem

AGAIN = "plan again instead of editing the file"
"""The hint of a finding about a value that was changed."""


class Fault(StrEnum):
    """Kinds of findings, by name."""

    DIGEST = "digest"
    OPTIONS = "options"
    CONFIGURATION = "configuration"
    STAGE_RANGE = "stage_range"
    OPERATOR_TWICE = "operator_twice"
    OPERATOR_MISSING = "operator_missing"
    OPERATOR_UNKNOWN = "operator_unknown"
    OPERATOR_ORDER = "operator_order"
    OPERATOR_COUNT = "operator_count"
    BACKWARD_EDGE = "backward_edge"
    DUPLICATED_PARAMETER = "duplicated_parameter"
    DUPLICATED_INCOMPLETE = "duplicated_incomplete"
    BOUNDARY_MISSING = "boundary_missing"
    BOUNDARY_UNKNOWN = "boundary_unknown"
    BOUNDARY_STAGES = "boundary_stages"
    BOUNDARY_SHAPE = "boundary_shape"
    BOUNDARY_GRADIENT = "boundary_gradient"
    UNDECLARED_TIE = "undeclared_tie"
    WRONG_TIE = "wrong_tie"
    PARAMETERS = "parameters"
    STAGE_TENSORS = "stage_tensors"
    MODEL = "model"
    MODEL_FINGERPRINT = "model_fingerprint"
    HARDWARE_FINGERPRINT = "hardware_fingerprint"
    MICRO_BATCH = "micro_batch"
    DIVISIBILITY = "divisibility"
    RANK_RANGE = "rank_range"
    RANK_TWICE = "rank_twice"
    REPLICAS = "replicas"
    REQUIRES = "requires"
    MEMORY = "memory"
    PREDICTIONS = "predictions"
    PREDICTION_STAGES = "prediction_stages"
    ACTIONS_UNREADABLE = "actions_unreadable"
    ACTION_MISSING = "action_missing"
    ACTION_TWICE = "action_twice"
    ACTION_ROUTE = "action_route"
    ACTION_UNKNOWN = "action_unknown"
    ACTION_ORDER = "action_order"
    WEIGHT_VERSION = "weight_version"
    SCHEDULE_CLAIM = "schedule_claim"
    DEADLOCK = "deadlock"
    SHARDING = "sharding"
    MESH = "mesh"
    SHARDING_BLOCKS = "sharding_blocks"
    SHARDING_NAMES = "sharding_names"
    LAYOUT = "layout"
    LAYOUT_MISSING = "layout_missing"
    SPLIT = "split"
    SPLIT_MISSING = "split_missing"
    COLLECTIVE = "collective"
    COLLECTIVE_MISSING = "collective_missing"
    COLLECTIVE_UNKNOWN = "collective_unknown"
    LINK_LEVEL = "link_level"
    HOLDING = "holding"
    BOUNDARY_LAYOUT = "boundary_layout"
    SHARDING_MEMORY = "sharding_memory"
    SHARDED_STAGE = "sharded_stage"
    NEGATIVE = "negative"
    HARDWARE = "hardware"
    ALTERNATIVES = "alternatives"
    BOUND = "bound"
    UNPRICED = "unpriced"
    DIFFERS = "differs"
    BACKEND = "backend"
    REPRICED = "repriced"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a plan.

    Attributes:
        fault: its kind.
        message: what is wrong, one line, with the names it is about.
        hint: what to do about it.
        stage: the stage it is about, -1 for none.
        rank: the rank it is about, -1 for none.
        tensor: the tensor, operator or parameter it is about, "" for none.
    """

    fault: Fault
    message: str
    hint: str = ""
    stage: int = -1
    rank: int = -1
    tensor: str = ""

    def problem(self, where: str = "") -> Problem:
        """The finding as the command line reports it."""
        return Problem(f"{self.fault}: {self.message}", where, self.hint)


MAX_OF_A_KIND = 20


def limited(findings: list[Finding]) -> list[Finding]:
    """At most `MAX_OF_A_KIND` findings of a kind, and one that says how many more there are."""
    kept: list[Finding] = []
    counts: dict[Fault, int] = {}
    for finding in findings:
        counts[finding.fault] = counts.get(finding.fault, 0) + 1
        if counts[finding.fault] <= MAX_OF_A_KIND:
            kept.append(finding)
    for fault, count in counts.items():
        if count > MAX_OF_A_KIND:
            kept.append(Finding(fault, f"and {count - MAX_OF_A_KIND} more of this kind"))
    return kept
