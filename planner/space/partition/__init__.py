"""Published partition problems, one file each: a frozen dataclass of numbers with a judge of any decision."""

from __future__ import annotations

from planner.space.partition.chain import ChainDecision as ChainDecision
from planner.space.partition.chain import ChainPipeline as ChainPipeline
from planner.space.partition.chain import ChainStages as ChainStages
from planner.space.partition.chain_schedules import SYNCHRONOUS as SYNCHRONOUS
from planner.space.partition.chain_schedules import BaPipeSchedule as BaPipeSchedule
from planner.space.partition.chain_schedules import bapipe as bapipe
from planner.space.partition.chain_schedules import features_in_flight as features_in_flight
from planner.space.partition.chain_schedules import hetpipe as hetpipe
from planner.space.partition.chain_schedules import in_flight as in_flight
from planner.space.partition.chain_schedules import pipeline_s as pipeline_s
from planner.space.partition.chain_schedules import uniform_links as uniform_links
from planner.space.partition.iteration import IterationDecision as IterationDecision
from planner.space.partition.iteration import IterationProblem as IterationProblem
from planner.space.partition.iteration import MeshStage as MeshStage
from planner.space.partition.iteration import boundary_levels as boundary_levels
from planner.space.partition.latency import LatencyDecision as LatencyDecision
from planner.space.partition.latency import LatencyProblem as LatencyProblem
from planner.space.partition.latency import latency_problem as latency_problem
from planner.space.partition.layerwise import LayerChoice as LayerChoice
from planner.space.partition.layerwise import LayerDecision as LayerDecision
from planner.space.partition.max_load import MaxLoadDecision as MaxLoadDecision
from planner.space.partition.max_load import MaxLoadProblem as MaxLoadProblem
from planner.space.partition.max_load import OperatorPlacement as OperatorPlacement
from planner.space.partition.max_load import max_load_problem as max_load_problem
from planner.space.partition.pipedream import PipeDreamProblem as PipeDreamProblem
from planner.space.partition.pipedream import PlacedPipelineProblem as PlacedPipelineProblem
from planner.space.partition.pipedream import PlacedStage as PlacedStage
from planner.space.partition.pipedream import ReplicatedPipeline as ReplicatedPipeline
from planner.space.partition.pipedream import ReplicatedStage as ReplicatedStage
from planner.space.partition.pipedream_terms import LayerDag as LayerDag
from planner.space.partition.pipedream_terms import Memory as Memory
from planner.space.partition.pipedream_terms import Released as Released
from planner.space.partition.pipedream_terms import chain_layers as chain_layers
from planner.space.partition.pipedream_terms import priced_layers as priced_layers
from planner.space.partition.pipedream_terms import recorded_layers as recorded_layers
from planner.space.partition.piper import PiperDecision as PiperDecision
from planner.space.partition.piper import PiperProblem as PiperProblem
from planner.space.partition.piper import PiperStage as PiperStage
from planner.space.partition.piper import piper_problem as piper_problem
from planner.space.partition.piper import stage_figures as stage_figures
from planner.space.partition.verdict import PartitionProblem as PartitionProblem
from planner.space.partition.verdict import PartitionVerdict as PartitionVerdict
