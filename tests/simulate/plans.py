"""Small plans with written-out figures: 1 ms forward, 2 ms backward, 2 ms of synchronisation, 0.5 ms of update."""

from __future__ import annotations

import dataclasses

from planner.plans import Plan
from planner.schedules import Pipeline, get
from tests.plans.sample import decision, make_plan

GIB = 2**30


def toy_plan(
    replicas: tuple[int, ...] = (1, 1, 1),
    starts: tuple[int, ...] = (0, 2, 4),
    *,
    copies: int = 1,
    micro_batches: int = 6,
    schedule: str = "1f1b",
    forward_s: tuple[float, ...] | None = None,
    backward_s: tuple[float, ...] | None = None,
    recompute_s: float = 0.0,
    receive_s: float = 0.0,
    capacity_gib: int = 16,
) -> Plan:
    """A plan of the toy model whose stages take and keep the given figures: 2 GiB fixed, 1/4 GiB a micro-batch."""
    replicas = replicas[: len(starts)]
    plan = make_plan(chosen=decision(replicas, starts, copies=copies, micro_batches=micro_batches, schedule=schedule))
    in_flight = get(schedule).in_flight(Pipeline(replicas, micro_batches))
    stages = []
    for at, stage in enumerate(plan.predictions.stages):
        memory = dataclasses.replace(
            stage.memory,
            weights_bytes=GIB // 2,
            gradients_bytes=GIB // 4,
            optimizer_bytes=GIB // 4,
            activations_bytes=in_flight[at] * GIB // 4,
            workspace_bytes=GIB // 8,
            reserve_bytes=GIB,
        )
        stages.append(
            dataclasses.replace(
                stage,
                forward_s=forward_s[at] if forward_s else 0.001,
                backward_s=backward_s[at] if backward_s else 0.002,
                recompute_s=recompute_s,
                receive_s=receive_s if at else 0.0,
                return_s=receive_s if at else 0.0,
                sync_s=0.002,
                exposed_sync_s=0.002,
                update_s=0.0005,
                in_flight=in_flight[at],
                unit_bytes=GIB // 4,
                memory=memory,
                capacity_bytes=capacity_gib * GIB,
            )
        )
    return dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=tuple(stages)))
