"""What can be decided and at what price, and an independent judge.

BlockCosts, Cluster, Job --formulate--> StageProblem --a solver--> Decision --evaluate--> Evaluation
"""

from __future__ import annotations

from planner.space.evaluate import evaluate
from planner.space.formulate import Formulator, formulate
from planner.space.layout import slice_width, stage_groups, stage_ranks
from planner.space.problem import StageProblem
from planner.space.timing import simulate_decision
from planner.space.types import (
    BlockCosts,
    Candidate,
    Certificate,
    Decision,
    Evaluation,
    Job,
    MemoryBytes,
    StageChoice,
    StageTerms,
    Violation,
)

__all__ = [
    "BlockCosts",
    "Candidate",
    "Certificate",
    "Decision",
    "Evaluation",
    "Formulator",
    "Job",
    "MemoryBytes",
    "StageChoice",
    "StageProblem",
    "StageTerms",
    "Violation",
    "evaluate",
    "formulate",
    "simulate_decision",
    "slice_width",
    "stage_groups",
    "stage_ranks",
]
