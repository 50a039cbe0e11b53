"""Runs a plan on this machine: checks gradients, trains, and reports times and memory beside the predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planner.errors import UsageError
from planner.plans import Plan
from planner.plans.step import plan_step
from planner.play import weight_part_s
from planner.processes import scratch
from planner.runtime.data import Data, data_by_name, loss_by_name
from planner.runtime.device import DeviceChoice, TrainingDevice, choose
from planner.runtime.launch import Link, in_process, run_ranks
from planner.runtime.model_file import ModelFile, read_model
from planner.runtime.reference import gradient_error, reference
from planner.runtime.requirements import require_executable
from planner.runtime.sequence_cuts import SequenceCuts
from planner.runtime.stages import stage_program
from planner.runtime.trainer import Trainer, model_of
from planner.sums import float_sum

TOLERANCE = 1e-7
"""Largest error of a gradient in float64 at which it counts as equal, as part of its largest element."""


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Gradients under a plan compared with those of the unpartitioned model, in float64.

    Attributes:
        loss: mean loss of an iteration by the plan.
        expected_loss: by the unpartitioned model.
        errors: (stage, parameter, error) by stage and order of use; a parameter of several stages stands in each.
        computed_whole: operators that the plan divides but every rank of a group computed in full, by first output.
    """

    loss: float
    expected_loss: float
    errors: tuple[tuple[int, str, float], ...]
    computed_whole: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The largest error."""
        return max((error for _, _, error in self.errors), default=0.0)

    @property
    def wrong(self) -> tuple[tuple[int, str, float], ...]:
        """Entries of `errors` above the tolerance."""
        return tuple(entry for entry in self.errors if not entry[2] <= TOLERANCE)


@dataclass(frozen=True, slots=True)
class ActionTime:
    """Measured time of a stage's passes on this machine, beside the plan's prediction for its own hardware.

    Attributes:
        stage: its number.
        kind: "forward", "backward", "update"; "weight gradient" is the part of a split backward that can wait.
        measured_s: median seconds of a rank for one micro-batch (or update), without waiting for others: of its thread
            on a processor, of its stream on a GPU.
        predicted_s: seconds predicted by the plan, without communication inside the stage's group.
    """

    stage: int
    kind: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a rank beside the plan's prediction for its own hardware, without what its runtime reserves.

    Attributes:
        rank: its number.
        measured_bytes: peak growth of the process; on a GPU of what torch's allocator handed out.
        predicted_bytes: weights, gradients, optimizer state, activations and workspace of its stages.
    """

    rank: int
    measured_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of a run.

    Attributes:
        losses: mean loss of each step.
        check: comparison of gradients; None without one.
        times: times of passes, by stage and kind; () on the meta device.
        step_s: wall seconds of each step, of the slowest rank; of all together where the pipeline never drains.
        memory: memory by rank.
        alone: the rank that ran alone with stand-ins for exchanges, so that losses mean nothing; None where all ran.
        device: cpu, cuda or meta, whose losses mean nothing either.
    """

    losses: tuple[float, ...]
    check: GradientCheck | None
    times: tuple[ActionTime, ...]
    step_s: tuple[float, ...]
    memory: tuple[RankMemory, ...] = ()
    alone: int | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class _Training:
    """What the processes of a run are given, spawned ones too."""

    plan: Plan
    model: ModelFile
    data: str | Path
    loss: str
    seed: int
    dtype: str = "float64"
    learning_rate: float = 0.0
    steps: int = 1
    alone: int | None = None

    def feed(self) -> Data:
        """Its micro-batches."""
        return data_by_name(self.data, self.plan, self.model, getattr(torch, self.dtype), self.seed)

    def trainer(self, rank: int, link: Link) -> Trainer:
        """The trainer of a rank."""
        return Trainer(
            self.plan, self.model, rank, learning_rate=self.learning_rate, loss=self.loss,
            dtype=getattr(torch, self.dtype), seed=self.seed, report=link.at,
            times=self.steps if self.plan.schedule.continuous else 1, device=link.device, alone=self.alone is not None,
        )  # fmt: skip


def run(
    plan: Plan,
    model: ModelFile | str | Path | object,
    *,
    steps: int = 1,
    data: str | Path = "synthetic",
    loss: str = "auto",
    learning_rate: float = 0.01,
    check: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    timeout_s: float = 60.0,
    alone: int | None = None,
    device: str = "auto",
    backend: str = "auto",
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> RunReport:
    """Run a plan on this machine, one process a rank.

    Args:
        plan: the plan.
        model: its ONNX file, or the model in memory.
        steps: iterations to train for.
        data: "synthetic", or an .npz file.
        loss: by name (`planner.runtime.data.loss_by_name`).
        learning_rate: of the plan's optimizer.
        check: compare the gradients of a first iteration with those of the whole model, in float64.
        dtype: type of all floating-point work of the training: float32 or float64.
        seed: seed of weights without data, synthetic data and dropout.
        timeout_s: longest time in which no rank begins another action.
        alone: run this rank only, with stand-ins for what other ranks would send, to see its memory and times.
        device: "cpu", "cuda", "meta" (with `alone`: shapes without data), or "auto": GPUs where torch sees one.
        backend: of exchanges: "gloo", "nccl" or "auto" (`device.choose`).
        progress: called with step and loss after each step.

    Raises:
        PlanError: the plan's parts contradict each other, it is for another model, or something in it is not executed;
            no process is started then.
        RunError: a rank failed.
        UsageError: a check is asked for where the pipeline never drains, or of one rank alone; or no stage runs on the
            rank that is to run alone.
    """
    require_executable(plan)
    choice = choose(device, ranks=plan.world_size if alone is None else 1, backend=backend)
    choice = replace(choice, order=plan.hardware.device_order)
    _require_sensible(plan, choice, check=check, alone=alone)
    model_file = model if isinstance(model, ModelFile) else read_model(model, seed=seed)
    model_file = model_of(plan, model_file)
    for stage in plan.stages:
        stage_program(plan, model_file, stage.index)
    if plan.schedule.parts > 1:
        SequenceCuts(plan, model_file)
    gradient_check = _check(_Training(plan, model_file, data, loss, seed), choice, timeout_s) if check else None
    if not steps:
        return RunReport((), gradient_check, (), (), device=choice.kind)
    training = _Training(plan, model_file, data, loss, seed, dtype, learning_rate, steps, alone)
    training.feed()
    told: Callable[[int, str, Any], None] = lambda rank, word, value: progress(*value)  # noqa: E731
    body = partial(_train, training)
    results = run_ranks(plan, body, timeout_s=timeout_s, told=told, alone=alone, device=choice)
    walls = tuple(max(r["walls"][k] for r in results) for k in range(len(results[0]["walls"])))
    times = () if choice.kind == "meta" else _times(plan, {r["rank"]: r["times"] for r in results})
    memory = tuple(RankMemory(r["rank"], r["grown"], held_bytes(plan, r["rank"])) for r in results)
    return RunReport(tuple(results[0]["losses"]), gradient_check, times, walls, memory, alone, choice.kind)


def _require_sensible(plan: Plan, choice: DeviceChoice, *, check: bool, alone: int | None) -> None:
    """Refuse what cannot be compared or run together.

    Raises:
        UsageError: with a remedy.
    """
    if check and plan.schedule.continuous:
        raise UsageError(
            "--check compares the gradients of one iteration, and this pipeline never drains",
            hint="leave it out, or plan with a schedule that drains, such as 1f1b",
        )
    if alone is not None and (check or not plan.stages_of(alone)):
        message = "--check compares all ranks, not one alone" if check else f"no stage runs on rank {alone}"
        raise UsageError(message, hint=f"leave out --check, and name one of the ranks 0 to {plan.world_size - 1}")
    if choice.kind == "meta" and alone is None:
        raise UsageError("tensors without data cannot be exchanged", hint="add --rank fullest --alone")


def _train(training: _Training, rank: int, link: Link) -> dict[str, Any]:
    """Train as one rank; the first one tells the losses."""
    before_bytes, _ = link.device.memory()
    trainer, feed, steps = training.trainer(rank, link), training.feed(), training.steps
    link.device.forget_peak()
    losses: list[float] = []
    walls = []
    while len(losses) < steps:
        begin, before = time.perf_counter(), len(losses)
        losses += trainer.steps(feed)
        walls.append(time.perf_counter() - begin)
        if rank == (training.alone or 0):
            for step in range(before, len(losses)):
                link.tell("step", (step, losses[step]))
    grown = link.device.memory()[1] - before_bytes
    return {"losses": losses, "times": trainer.clock.seconds, "walls": walls, "rank": rank, "grown": grown}


def held_bytes(plan: Plan, rank: int) -> int:
    """Predicted memory of a rank, without what the device's runtime reserves: of several stages, the weights of all,
    the activations that its order keeps at a time, and the largest workspace."""
    stages = plan.stages_of(rank)
    return next((round(w.memory.total - w.memory.reserve) for w in plan_step(plan).workers if w.stages == stages), 0)


def fullest_rank(plan: Plan) -> int:
    """The rank with the largest predicted memory; the first of several."""
    return max(range(plan.world_size), key=lambda rank: (held_bytes(plan, rank), -rank))


def _times(plan: Plan, by_rank: dict[int, dict[str, list[float]]]) -> tuple[ActionTime, ...]:
    action_times = []
    for stage in plan.stages:
        rank_times = [times for rank, times in by_rank.items() if rank in stage.ranks]
        if not rank_times:
            continue
        prediction = plan.predictions.stages[stage.index]
        both_s, forward_s, repeated_s = plan.inside_s(stage.index)  # waiting takes no time of a processor
        for kind, words, predicted in (
            ("forward", ("F",), prediction.forward_s - forward_s),
            ("backward", ("B", "I", "W", "R"), prediction.backward_s - (both_s - forward_s + repeated_s)),
            (
                "weight gradient",
                ("W",),
                weight_part_s(prediction.backward_s, prediction.recompute_s, prediction.weight_grad_s),
            ),
            ("update", ("U",), prediction.update_s - plan.summed_s(stage.index)),
        ):
            if kind == "weight gradient" and not any(f"W{stage.index}" in times for times in rank_times):
                continue
            total, parts = 0.0, 1 if kind == "update" else plan.schedule.parts
            for word in words:
                values = sorted(s for times in rank_times for s in times.get(f"{word}{stage.index}", ()))
                total += parts * values[len(values) // 2] if values else 0.0
            action_times.append(ActionTime(stage.index, kind, total, predicted))
    return tuple(action_times)


def _check(training: _Training, choice: DeviceChoice, timeout_s: float) -> GradientCheck:
    """Compare the gradients of one iteration with those of the unpartitioned model."""
    with scratch("check") as folder:
        path = folder / "reference.pt"
        in_process(partial(_whole_model, training), path, choice)
        results = run_ranks(training.plan, partial(_compare, training, path), timeout_s=timeout_s, device=choice)
    worst: dict[tuple[int, str], float] = {}
    for result in results:
        for stage, name, error in result["errors"]:
            worst[stage, name] = max(worst.get((stage, name), 0.0), error if error == error else float("inf"))
    errors = tuple((stage, name, error) for (stage, name), error in sorted(worst.items(), key=lambda e: e[0][0]))
    computed_whole = sorted({name for result in results for name in result["whole"]})
    return GradientCheck(float_sum(r["loss"] for r in results), results[0]["expected"], errors, tuple(computed_whole))


def _whole_model(training: _Training, device: TrainingDevice) -> dict[str, Any]:
    """Loss and gradients of the unpartitioned model."""
    loss = loss_by_name(training.loss, training.plan)
    found = reference(training.plan, training.model, training.feed(), loss, device, seed=training.seed)
    return {"loss": found.loss, "gradients": dict(found.gradients)}


def _compare(training: _Training, path: Path, rank: int, link: Link) -> dict[str, Any]:
    """Run an iteration as one rank and compare its gradients with those in a file."""
    worker = training.trainer(rank, link).worker
    rank_loss = float_sum(worker.iteration(0, training.feed(), update=False))
    gradients = worker.gradients()
    expected = torch.load(path)
    largest = max((float(x.abs().max()) for x in expected["gradients"].values() if x.numel()), default=0.0)
    errors = [
        (stage, name, gradient_error(x.cpu(), expected["gradients"][name], largest))
        for stage, held in gradients.items()
        for name, x in held.items()
    ]
    computed_whole = sorted({name for s in worker.stages.values() if s.sharded for name in s.sharded.computed_whole})
    return {"loss": rank_loss, "expected": float(expected["loss"]), "errors": errors, "whole": computed_whole}
