"""Systems that cut every operator instead of the model's length: Tofu, Mesh-TensorFlow, GShard."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.errors import InfeasibleError, UsageError
from planner.solvers.layouts import Laid, Layouts, LayoutTask, lay_operators, slowest_type, tried_meshes
from planner.space import Configuration, StageChoice
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.types import System
from planner.units import format_bytes

WIDEST_JOIN = 8
"""Tensors that one operator may join where a search needs an almost linear graph."""


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """The layouts of the system's own search on each mesh with the largest micro-batches, fastest first."""
    layouts = system.layouts
    if layouts is None:
        raise UsageError(f"{system.title} says no way to cut operators", hint="give the system its layouts")
    task = task_of(setting)
    if obstacle := _obstacle(setting, layouts, tried_meshes(task, layouts)[-1]):
        raise InfeasibleError(obstacle)
    laid = list(lay_operators(task, layouts))
    for each in sorted((each for each in laid if each.fits), key=lambda each: (each.iteration_s, each.micro_batch)):
        slow = slowest_type(task, math.prod(each.mesh), each.micro_batch)
        costs = setting.prices.whole(each.micro_batch, each.mesh, each.answer.decision, slow)
        stage = StageChoice(0, setting.blocks, 1, ranks=costs.ranks, sharding=costs.sharding)
        count = setting.job.global_batch // each.micro_batch
        configuration = Configuration((stage,), 1, each.micro_batch, count, "1f1b")
        shape = " x ".join(map(str, each.mesh))
        unlike = bool(setting.cluster.device_types[: math.prod(each.mesh)].any())
        yield Proposal(
            (configuration,),
            words=f"every operator on a mesh of {shape}, micro-batch {each.micro_batch} x {count}",
            notes=("communication is not overlapped", "unlike devices share the operators: no plan file")[: 1 + unlike],
            unwritten=f"{system.title} shares every operator among unlike devices: its row has no plan file" * unlike,
        )
        if setting.fits(configuration):
            return
    raise InfeasibleError(_why(laid))


def task_of(setting: Setting) -> LayoutTask:
    """What layouts are looked for."""
    only = setting.fixed or bool(setting.job.micro_batches)
    where = setting.prices, setting.cluster, setting.job, setting.devices
    return LayoutTask(*where, setting.sizes, only, setting.states_bytes)


def _obstacle(setting: Setting, layouts: Layouts, largest: tuple[int, ...]) -> str:
    """Why no layout need be looked for on meshes up to the largest; empty where some may fit."""
    graph = setting.prices.chain.graph
    joins = [sum(name in graph.producer for name in node.inputs if name) for node in graph.nodes]
    widest = max(range(len(joins)), key=joins.__getitem__)
    if layouts.chain and joins[widest] > WIDEST_JOIN:
        name = graph.nodes[widest].name or graph.nodes[widest].key
        return (
            f"the coarsened graph is no chain: {name} joins {joins[widest]} tensors, "
            "and dynamic programming over their cuts does not apply"
        )
    if largest == (1,) and layouts.one_node:
        return "operators are cut over the devices of a node, and there is one"
    return setting.exceeded(math.prod(largest), "does not fit: ")


def _why(laid: list[Laid]) -> str:
    """What the layouts that come nearest to fitting need."""
    least = min(laid, key=lambda each: each.needed_bytes)
    shape, states = " x ".join(map(str, least.mesh)), least.answer.verdict.weight_bytes
    return (
        f"does not fit: a device needs {format_bytes(least.needed_bytes)} of {format_bytes(least.room_bytes)},"
        f" {format_bytes(states)} of it weights, gradients and optimizer state"
        f" (mesh of {shape}, micro-batch {least.micro_batch})"
    )


SOLVERS.register("sharded", propose)
