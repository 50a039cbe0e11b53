"""A judge that knows docs/plan.md alone comes to the simulated time and the micro-batches in flight of every plan."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import planner
from planner import schedules
from planner.plans import Plan, dumps
from planner.play import Transfers
from tests.check.plans import KINDS, planned
from tests.judge import judge

OPTIONS = ("chimera:over=double", "bapipe-fbp:fill_overlap=true", "pipedream:vertical=true", "gpipe:recompute=true",
           "pipedream-2bw:uniform=false")  # fmt: skip
PLACES = (("gnmt-8", "v100-pcie-4", 64, "blocking"), ("gpt2", "dgx-1v", 32, "overlapped"))


def agrees(plan: Plan) -> None:
    """The judge's figures are the file's."""
    seconds, in_flight = judge.judged(dumps(plan))
    assert seconds == pytest.approx(plan.predictions.simulated_iteration_s, rel=1e-6)
    assert in_flight == [terms.in_flight for terms in plan.predictions.stages]


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_agrees_on_a_plan_of_every_kind(kind: str) -> None:
    agrees(planned(kind))


@pytest.mark.parametrize("place", PLACES, ids=[place[1] for place in PLACES])
@pytest.mark.parametrize("schedule", [*schedules.names(), *OPTIONS])
def test_the_judge_agrees_on_every_schedule(schedule: str, place: tuple[str, str, int, str]) -> None:
    model, hardware, batch, transfers = place
    job = planner.Job(
        global_batch=batch,
        precision="fp16",
        schedules=(schedule,),
        transfers=Transfers(transfers),
        tensor_parallel=(1,),
        zero=(0,),
        backends=("any",),
    )
    graph, cluster = planner.load_graph(model), planner.load_cluster(hardware)
    agrees(planner.plan(graph, cluster, job))


def test_the_judge_uses_nothing_of_the_program() -> None:
    tree = ast.parse(Path(judge.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "re", "collections", "typing"}
