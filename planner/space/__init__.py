"""What can be decided and at what price, and an independent judge.

BlockCosts, Cluster, Job --formulate--> StageProblem --a solver--> Configuration --evaluate--> Evaluation
"""

from __future__ import annotations

from planner.space.configuration import Configuration as Configuration
from planner.space.evaluate import Timed as Timed
from planner.space.evaluate import evaluate as evaluate
from planner.space.formulate import Formulator as Formulator
from planner.space.problem import StageProblem as StageProblem
from planner.space.timing import play_terms as play_terms
from planner.space.timing import played_s as played_s
from planner.space.types import BlockCosts as BlockCosts
from planner.space.types import Candidate as Candidate
from planner.space.types import Certificate as Certificate
from planner.space.types import Evaluation as Evaluation
from planner.space.types import InnerReplicas as InnerReplicas
from planner.space.types import Job as Job
from planner.space.types import MemoryBytes as MemoryBytes
from planner.space.types import StageChoice as StageChoice
from planner.space.types import StageTerms as StageTerms
from planner.space.types import Violation as Violation
from planner.space.types import WorkerMemory as WorkerMemory
from planner.space.workers import Workers as Workers
from planner.space.workers import lay_workers as lay_workers
