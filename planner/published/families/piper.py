"""Piper instances: the objectives `time-per-sample` and `iteration-time`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlanError, UsageError
from planner.graph import numbered_line
from planner.published.families import FAMILIES, Family, Instance, Objective
from planner.published.families._iteration import iteration_objective, piper_iteration
from planner.published.options import PartitionOptions, check_devices
from planner.published.plan_file import ChoiceRun, Part
from planner.published.problems import (
    IterationProblem,
    PartitionVerdict,
    PiperDecision,
    PiperProblem,
    PiperStage,
    piper_problem,
)
from planner.published.readers.piper import PiperFile, read_piper, sniff_piper


def _read(path: Path) -> Instance:
    file = read_piper(path)
    return Instance(
        "piper",
        path.stem,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        file,
        tuple(node.id for node in file.nodes),
        len(file.edges),
        tuple(note.message for note in file.notes),
    )


def _settle(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    file: PiperFile = instance.content
    return options.filled(
        devices=file.devices, memory_bytes=file.memory_bytes, bandwidth_byte_per_s=(file.bandwidth_bytes_per_s,),
        batch=file.batch,
    )  # fmt: skip


def _problem(instance: Instance, options: PartitionOptions) -> PiperProblem:
    rates = options.bandwidth_byte_per_s or ()
    if len(rates) != 1:
        raise UsageError("Piper's devices have one bandwidth", where="--bandwidth", hint="give one figure")
    problem = piper_problem(
        instance.content, devices=options.devices, memory_bytes=options.memory_bytes, batch=options.batch
    )
    return dataclasses.replace(problem, bandwidth_bytes_per_s=rates[0])


def _encode(
    instance: Instance, problem: PiperProblem, decision: PiperDecision, verdict: PartitionVerdict
) -> tuple[Part, ...]:
    return tuple(
        Part(
            "stage",
            instance.ranges(stage.nodes),
            value,
            kept_bytes,
            devices=stage.data * stage.tensor,
            replicas=stage.data,
            tensor=stage.tensor,
            choices=_choice_runs(instance, problem, stage),
        )
        for stage, value, kept_bytes in zip(decision, verdict.parts, verdict.kept_bytes, strict=True)
    )


def _choice_runs(instance: Instance, problem: PiperProblem, stage: PiperStage) -> tuple[ChoiceRun, ...]:
    by_choice: dict[tuple[int, str], list[int]] = {}
    for node, choice in zip(stage.nodes, stage.choices, strict=True):
        index = int(problem.options(node, stage.tensor)[choice])
        name = problem.choice_names[index] if problem.choice_names else ""
        by_choice.setdefault((choice, name), []).append(node)
    return tuple(ChoiceRun(*key, instance.ranges(nodes)) for key, nodes in sorted(by_choice.items()))


def _decode(instance: Instance, problem: PiperProblem, parts: Sequence[Part]) -> PiperDecision:
    stages = []
    for number, part in enumerate(parts):
        nodes = instance.positions(part.nodes)
        choice_of = {i: run.choice for run in part.choices for i in instance.positions(run.nodes)}
        if sorted(choice_of) != list(nodes):
            raise PlanError(f"the choices of stage {number} are not those of its nodes", where=instance.name)
        stages.append(PiperStage(nodes, part.tensor, part.replicas, tuple(choice_of[i] for i in nodes)))
    return tuple(stages)


TIME_PER_SAMPLE = Objective(
    name="time-per-sample",
    unit="s",
    options=frozenset({"devices", "memory_bytes", "bandwidth_byte_per_s", "batch"}),
    settle=_settle,
    problem=_problem,
    encode=_encode,
    decode=_decode,
)


def _settle_iteration(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    return _settle(instance, options).filled(idle=True)


def _iteration(instance: Instance, options: PartitionOptions) -> IterationProblem:
    problem = _problem(instance, options)
    check_devices(problem.devices, "--devices")
    return piper_iteration(problem, options)


def _order(instance: Instance) -> list[int]:
    place = {number: i for i, number in enumerate(instance.ids)}
    return numbered_line(len(place), [(place[u], place[v]) for u, v, _ in instance.content.edges])


ITERATION_TIME = iteration_objective(
    frozenset({"devices", "memory_bytes", "bandwidth_byte_per_s", "batch", "idle"}),
    _settle_iteration,
    _iteration,
    _order,
)

FAMILIES.register("piper", Family("Piper instance (TMPC JSON)", sniff_piper, _read, (TIME_PER_SAMPLE, ITERATION_TIME)))
