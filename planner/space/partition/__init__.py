"""Published partition problems, one file each: a frozen dataclass of numbers with a judge of any decision."""

from __future__ import annotations

from planner.space.partition.chain import ChainDecision, ChainStages, Pipeline
from planner.space.partition.chain_schedules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    BaPipeSchedule,
    TwoBWSchedule,
    bapipe,
    features_in_flight,
    hetpipe,
    in_flight,
    pipeline_s,
    stage_kept,
    twobw,
    uniform_links,
)
from planner.space.partition.iteration import (
    IterationDecision,
    IterationProblem,
    LayerChoice,
    LayerDecision,
    MeshStage,
    boundary_levels,
)
from planner.space.partition.latency import LatencyDecision, LatencyProblem, latency_problem
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem, max_load_problem
from planner.space.partition.pipedream import PipeDreamProblem, PlacedPipelineProblem, PlacedStage, ReplicatedStage
from planner.space.partition.pipedream_terms import (
    BoundaryBytes,
    CutJudge,
    Frontiers,
    Layers,
    Memory,
    StageCost,
    StashRule,
    chain_layers,
    priced_layers,
    recorded_layers,
)
from planner.space.partition.piper import PiperDecision, PiperProblem, PiperStage, piper_problem, stage_figures
from planner.space.partition.verdict import PartitionProblem, Verdict

__all__ = [
    "ASYNCHRONOUS",
    "SYNCHRONOUS",
    "BaPipeSchedule",
    "BoundaryBytes",
    "ChainDecision",
    "ChainStages",
    "CutJudge",
    "Frontiers",
    "IterationDecision",
    "IterationProblem",
    "LatencyDecision",
    "LatencyProblem",
    "LayerChoice",
    "LayerDecision",
    "Layers",
    "MaxLoadDecision",
    "MaxLoadProblem",
    "Memory",
    "MeshStage",
    "PartitionProblem",
    "PipeDreamProblem",
    "Pipeline",
    "PiperDecision",
    "PiperProblem",
    "PiperStage",
    "PlacedPipelineProblem",
    "PlacedStage",
    "ReplicatedStage",
    "StageCost",
    "StashRule",
    "TwoBWSchedule",
    "Verdict",
    "bapipe",
    "boundary_levels",
    "chain_layers",
    "features_in_flight",
    "hetpipe",
    "in_flight",
    "latency_problem",
    "max_load_problem",
    "pipeline_s",
    "piper_problem",
    "priced_layers",
    "recorded_layers",
    "stage_figures",
    "stage_kept",
    "twobw",
    "uniform_links",
]
