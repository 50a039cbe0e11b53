"""What can be decided and at what price, and an independent judge.

BlockCosts, Cluster, Job --formulate--> StageProblem --a solver--> Configuration --evaluate--> Evaluation
"""

from __future__ import annotations

from planner.space.configuration import Configuration
from planner.space.evaluate import Timed, evaluate
from planner.space.formulate import Formulator
from planner.space.problem import StageProblem
from planner.space.timing import Timing, play_terms, played_s
from planner.space.types import (
    BlockCosts,
    Candidate,
    Certificate,
    Evaluation,
    InnerReplicas,
    Job,
    MemoryBytes,
    StageChoice,
    StageTerms,
    Violation,
    WorkerMemory,
)
from planner.space.workers import Workers, lay_workers

__all__ = [
    "BlockCosts",
    "Candidate",
    "Certificate",
    "Configuration",
    "Evaluation",
    "Formulator",
    "InnerReplicas",
    "Job",
    "MemoryBytes",
    "StageChoice",
    "StageProblem",
    "StageTerms",
    "Timed",
    "Timing",
    "Violation",
    "WorkerMemory",
    "Workers",
    "evaluate",
    "lay_workers",
    "play_terms",
    "played_s",
]
