"""Measures operators inside whole training passes on this machine's processor, as a rank runs them.

An operator run alone finds its operands in a cache, pays for calls that a pass makes once, and leaves out what lies
between operators. So the passes of the whole model are run on one thread, and every moment of them is counted with one
operator: forward, the time until its result is there; backward, the time from the gradient of its result until the
next gradient, which holds the sum of gradients where a tensor has several readers or a weight several micro-batches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from planner.costs.measured import Seconds
from planner.plans import Plan
from planner.runtime.data import loss_by_name, synthetic
from planner.runtime.interpreter import run
from planner.runtime.launch import Link, run_ranks
from planner.runtime.model_file import ModelFile, read_model
from planner.runtime.operators import Context
from planner.runtime.stages import stage_program
from planner.runtime.trainer import model_of

PASSES = 7
"""Forward and backward passes that are measured, after a first one that is not."""

_LONGEST_PASS_S = 600.0

LOSS = ""
"""Name under which the loss is counted."""


def measure_passes(plan: Plan, model: object, *, passes: int = PASSES, seed: int = 0) -> dict[str, Seconds]:
    """Median thread CPU seconds of each operator within whole passes of a model in fp32, by its results' names.

    The operators are those of the model file, in the order in which they run; the loss comes last (`LOSS`). They run in
    a process of their own, as a rank does.

    Args:
        plan: a plan of the model on one rank with the micro-batch that is measured; says inputs, outputs and loss.
        model: the model file, or the model in memory.
        passes: how many passes to measure.
        seed: of weights without data, and of the inputs.

    Raises:
        PlanError: the plan is of another model.
        ModelError: an operator has no torch rule, or cannot be computed.
        RunError: the process failed.
    """
    model_file = model_of(plan, read_model(model, seed=seed))
    measure = partial(_measure, plan, model_file, passes, seed)
    (found,) = run_ranks(plan, measure, timeout_s=_LONGEST_PASS_S, alone=0)
    return dict(found)


def _measure(plan: Plan, model_file: ModelFile, passes: int, seed: int, _: int, link: Link) -> dict[str, Seconds]:
    """As `measure_passes`, in the process of a rank."""
    outputs, program = [spec.name for spec in plan.model.outputs], stage_program(plan, model_file, 0)
    steps = program.steps
    names = {n for step in steps for n in step.inputs if n in model_file.weights or n in model_file.constants}
    weights = {name: model_file.weight(name, torch.float32) for name in sorted(names)}
    leaves = [w.requires_grad_() for name, w in weights.items() if model_file.trained(name) and w.is_floating_point()]
    data, loss = synthetic(plan, model_file, torch.float32, seed), loss_by_name("auto", plan)
    clock = _Clock()
    for number in range(passes + 1):
        link.at(number, "")
        batch = data(0, number)
        given = {**weights, **{name: batch[name] for name in model_file.inputs if name in batch}}

        def observed(name: str, value: torch.Tensor) -> torch.Tensor:
            value = model_file.fitted(name, value)
            clock.forward_until(name)
            if value.requires_grad:
                value.register_hook(lambda gradient: clock.backward_from(name))
            return value

        clock.begin(counted=number > 0)
        context = Context(torch.float32, seed, number, adds_in_place=True, fitted=observed)
        results = run(program.kernels, given, context, wanted=outputs)
        clock.backward(loss(results, batch), leaves)
    return {
        name: (clock.median(clock.forward_s, name), clock.median(clock.backward_s, name))
        for name in (*(name for step in steps for name in step.outputs if name), LOSS)
    }


class _Clock:
    """Counts every moment of passes with one operator."""

    def __init__(self) -> None:
        self.forward_s: dict[str, list[float]] = defaultdict(list)
        self.backward_s: dict[str, list[float]] = defaultdict(list)
        self._counted, self._since_s, self._word = False, 0.0, LOSS

    def begin(self, *, counted: bool) -> None:
        """Begin a pass."""
        self._counted, self._since_s = counted, time.thread_time()

    def forward_until(self, name: str) -> None:
        """A result is there."""
        self._count(self.forward_s, name)

    def backward(self, loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """The outputs are there, and with them the loss: run the backward pass."""
        self._count(self.forward_s, LOSS)
        self._word = LOSS
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=leaves)
        self._count(self.backward_s, self._word)

    def backward_from(self, name: str) -> None:
        """The gradient of a result is there."""
        self._count(self.backward_s, self._word)
        self._word = name

    def _count(self, seconds: dict[str, list[float]], name: str) -> None:
        now_s = time.thread_time()
        if self._counted:
            seconds[name].append(now_s - self._since_s)
        self._since_s = now_s

    @staticmethod
    def median(seconds: Mapping[str, list[float]], name: str) -> float:
        """Median seconds of a name; 0 where nothing was counted with it."""
        return float(np.median(seconds[name])) if seconds.get(name) else 0.0
