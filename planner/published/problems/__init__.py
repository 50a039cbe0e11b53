"""Published partition problems, one file each: a frozen dataclass of numbers with a judge of any decision.

Those that the systems PipeDream, BaPipe and HetPipe state as well stand in `planner.solvers.cluster_chains`.
"""

from __future__ import annotations

from planner.published.problems.iteration import IterationDecision as IterationDecision
from planner.published.problems.iteration import IterationProblem as IterationProblem
from planner.published.problems.iteration import MeshStage as MeshStage
from planner.published.problems.iteration import boundary_levels as boundary_levels
from planner.published.problems.latency import LatencyDecision as LatencyDecision
from planner.published.problems.latency import LatencyProblem as LatencyProblem
from planner.published.problems.latency import latency_problem as latency_problem
from planner.published.problems.layerwise import LayerChoice as LayerChoice
from planner.published.problems.layerwise import LayerDecision as LayerDecision
from planner.published.problems.max_load import MaxLoadDecision as MaxLoadDecision
from planner.published.problems.max_load import MaxLoadProblem as MaxLoadProblem
from planner.published.problems.max_load import OperatorPlacement as OperatorPlacement
from planner.published.problems.max_load import max_load_problem as max_load_problem
from planner.published.problems.pipedream_layers import priced_layers as priced_layers
from planner.published.problems.pipedream_layers import recorded_layers as recorded_layers
from planner.published.problems.piper import PiperDecision as PiperDecision
from planner.published.problems.piper import PiperProblem as PiperProblem
from planner.published.problems.piper import PiperStage as PiperStage
from planner.published.problems.piper import piper_problem as piper_problem
from planner.published.problems.piper import stage_figures as stage_figures
from planner.published.problems.placed import PlacedPipelineProblem as PlacedPipelineProblem
from planner.published.problems.placed import PlacedStage as PlacedStage
from planner.solvers.cluster_chains.chain import ChainDecision as ChainDecision
from planner.solvers.cluster_chains.chain import ChainPipeline as ChainPipeline
from planner.solvers.cluster_chains.chain import ChainStages as ChainStages
from planner.solvers.cluster_chains.chain_schedules import SYNCHRONOUS as SYNCHRONOUS
from planner.solvers.cluster_chains.chain_schedules import BaPipeSchedule as BaPipeSchedule
from planner.solvers.cluster_chains.chain_schedules import bapipe as bapipe
from planner.solvers.cluster_chains.chain_schedules import features_in_flight as features_in_flight
from planner.solvers.cluster_chains.chain_schedules import hetpipe as hetpipe
from planner.solvers.cluster_chains.chain_schedules import in_flight as in_flight
from planner.solvers.cluster_chains.chain_schedules import pipeline_s as pipeline_s
from planner.solvers.cluster_chains.chain_schedules import uniform_links as uniform_links
from planner.solvers.cluster_chains.pipedream import PipeDreamProblem as PipeDreamProblem
from planner.solvers.cluster_chains.pipedream import ReplicatedPipeline as ReplicatedPipeline
from planner.solvers.cluster_chains.pipedream import ReplicatedStage as ReplicatedStage
from planner.solvers.cluster_chains.pipedream_terms import LayerDag as LayerDag
from planner.solvers.cluster_chains.pipedream_terms import Memory as Memory
from planner.solvers.cluster_chains.pipedream_terms import Released as Released
from planner.solvers.cluster_chains.pipedream_terms import chain_layers as chain_layers
from planner.solvers.cluster_chains.verdict import PartitionProblem as PartitionProblem
from planner.solvers.cluster_chains.verdict import PartitionVerdict as PartitionVerdict
