"""Corrections for stale weights: training follows the published recurrences, written out for a chain of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402
from tests.runtime.test_training import train  # noqa: E402

WIDTH, BATCH, MOMENTUM, RATE = 4, 4, 0.9, 0.05
Array = np.ndarray[Any, np.dtype[np.float64]]


def chain(stages: int) -> onnx.ModelProto:
    """y = x W_0 W_1 ..., one product a stage."""
    random = np.random.default_rng(7)
    weights = [
        numpy_helper.from_array((np.eye(WIDTH) + 0.3 * random.normal(size=(WIDTH, WIDTH))).astype(np.float32), f"w{s}")
        for s in range(stages)
    ]
    nodes = [helper.make_node("MatMul", [f"a{s}", f"w{s}"], [f"a{s + 1}"], name=f"/l{s}/MatMul") for s in range(stages)]
    ends = [helper.make_tensor_value_info(f"a{k}", onnx.TensorProto.FLOAT, [1, WIDTH]) for k in (0, stages)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@dataclass(frozen=True)
class Rule:
    """A published system for S stages and updates of N micro-batches.

    Attributes:
        each: N.
        read: updates before a forward of micro-batch n at stage s.
        forward, backward: from (s, weights, velocity, drift, learning rate) the weights that a pass reads.
        step: from (s, velocity, gradient) what is taken off, times the learning rate.
        decay: gamma of T2 by stage.
        rate: of stage s at update k.
        momentum: of the optimizer.
    """

    each: int
    read: Callable[[int, int], int]
    rate: Callable[[int, int], float]
    momentum: float
    forward: Callable[[int, Array, Array, Array, float], Array] = lambda s, w, v, d, rate: w
    backward: Callable[[int, Array, Array, Array, float], Array] = lambda s, w, v, d, rate: w
    step: Callable[[int, Array, Array], Array] = lambda s, v, g: v
    decay: Callable[[int], float] = lambda s: 0.0


def pipemare(stages: int, annealed: int) -> Rule:
    """T1 and T2 of Yang et al. 2021, section 3: tau_i = (2 (P - i) + 1) / N, i = 1..P; a rate is never raised."""
    tau = [(2 * (stages - 1 - s) + 1) / BATCH for s in range(stages)]
    power = (lambda k: 1 - min(k / annealed, 1)) if annealed else (lambda k: 1.0)
    return Rule(
        each=BATCH,
        read=lambda n, s: max(0, n - 2 * (stages - 1 - s) - 1) // BATCH,
        rate=lambda s, k: RATE * min(1.0, tau[s] ** -power(k)),
        momentum=MOMENTUM,
        backward=lambda s, w, v, d, rate: w - tau[s] * d,
        decay=lambda s: 0.135 ** (1 / tau[s]),
    )


def pipelined_backprop(stages: int, mitigation: str, usual: float = MOMENTUM) -> Rule:
    """Kosson et al. 2021: updates of one sample, D_s = 2 (S - s), s = 1..S; SpecTrain of Chen et al. 2018."""
    momentum = usual ** (1 / BATCH)
    rate = RATE * (1 - momentum) / ((1 - usual) * BATCH)
    delay = [2 * (stages - 1 - s) for s in range(stages)]
    ahead, behind = [0] * stages, [0] * stages
    if "lwp" in mitigation:
        ahead = delay
    if mitigation == "spectrain":
        ahead, behind = [s // 2 + stages - s - 1 for s in range(stages)], [s // 2 for s in range(stages)]
    sc = "sc" in mitigation
    a = [momentum**d if sc else 1.0 for d in delay]
    b = [(1 - momentum**d) / (1 - momentum) if sc else 0.0 for d in delay]
    return Rule(
        each=1,
        read=lambda n, s: max(0, n - delay[s]),
        rate=lambda s, k: rate,
        momentum=momentum,
        forward=lambda s, w, v, d, rate: w - rate * ahead[s] * v,
        backward=lambda s, w, v, d, rate: w - rate * behind[s] * v,
        step=lambda s, v, g: a[s] * v + b[s] * g,
    )


def expected(rule: Rule, weights: list[Array], inputs: list[Array]) -> list[Array]:
    """Weights after all updates: of each stage weights, velocity and drift after every update are kept."""
    history = [[(w, np.zeros_like(w), np.zeros_like(w))] for w in weights]
    sums = [np.zeros_like(w) for w in weights]
    for n, x in enumerate(inputs):
        activations = [x]
        for s, kept in enumerate(history):
            k = min(rule.read(n, s), len(kept) - 1)
            activations.append(activations[-1] @ rule.forward(s, *kept[k], rule.rate(s, k)))
        back = activations[-1] - 1.0
        for s in reversed(range(len(weights))):
            k = len(history[s]) - 1
            sums[s] = sums[s] + activations[s].T @ back / rule.each
            back = back @ rule.backward(s, *history[s][-1], rule.rate(s, k)).T
        if (n + 1) % rule.each == 0:
            for s, kept in enumerate(history):
                w, v, d = kept[-1]
                v = rule.momentum * v + sums[s]
                new = w - rule.rate(s, len(kept) - 1) * rule.step(s, v, sums[s])
                gamma = rule.decay(s)
                kept.append((new, v, gamma * d + (1 - gamma) * (new - w)))
                sums[s] = np.zeros_like(w)
    return [kept[-1][0] for kept in history]


def _distance(outputs: Any, batch: Any) -> Any:
    """Half the squared distance of the last activations from ones."""
    found = list(outputs.values())
    return 0.5 * ((found[0] - 1.0) ** 2).sum() if found else None


MITIGATIONS = ("none", "lwp", "sc", "lwp+sc", "spectrain")


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "optimizer", "rule"),
    [
        ("pipemare", "momentum", lambda stages: pipemare(stages, 0)),
        ("pipemare:annealing_steps=3", "momentum", lambda stages: pipemare(stages, 3)),
        ("pipelined-backprop", "sgd", lambda stages: pipelined_backprop(stages, "none", usual=0.0)),
        *(
            (f"pipelined-backprop:mitigation={m}", "momentum", lambda stages, m=m: pipelined_backprop(stages, m))
            for m in MITIGATIONS
        ),
    ],
)
def test_corrected_weights_follow_the_published_recurrence(
    schedule: str, optimizer: str, rule: Callable[[int], Rule], stages: int
) -> None:
    proto = chain(stages)
    job = planner.Job(BATCH, precision="fp32", optimizer=optimizer, devices=stages)
    asked = planner.Degrees(pipeline=stages, schedule=schedule)
    graph = planner.graph_from_proto(proto, name="chain")
    plan = planner.predict(graph, planner.load_cluster("dgx-a100"), job, asked).plan
    model = runtime.read_model(proto)
    losses, weights = train(plan, model, 4, loss=_distance, learning_rate=RATE)
    data = runtime.synthetic(plan, model, torch.float64)
    inputs = [data(n // BATCH, n % BATCH)["a0"].numpy() for n in range(len(losses) * BATCH)]
    start = [numpy_helper.to_array(w).astype(np.float64) for w in proto.graph.initializer]
    wanted = expected(rule(stages), start, inputs)
    for s, right in enumerate(wanted):
        np.testing.assert_allclose(weights[f"w{s}"].numpy(), right, rtol=1e-11, atol=1e-12)
        assert np.abs(right - start[s]).max() > 1e-4


def test_predicted_weights_need_velocities() -> None:
    proto = chain(2)
    job = planner.Job(BATCH, precision="fp32", optimizer="adam", devices=2)
    asked = planner.Degrees(pipeline=2, schedule="pipelined-backprop:mitigation=lwp")
    plan = planner.predict(planner.graph_from_proto(proto, name="chain"), planner.load_cluster("dgx-a100"), job, asked)
    with pytest.raises(planner.PlanError, match="predicted by their velocity"):
        train(plan.plan, runtime.read_model(proto), 1, loss=_distance)


def _halves(plan: planner.Plan, model: Any, folder: Path | None, second_rate: float = RATE) -> dict[str, Any]:
    """Weights after twice two iterations, the second half by another trainer where there is a folder between them."""
    data = runtime.synthetic(plan, model, torch.float64)

    def body(rank: int, link: Any) -> Any:
        def trainer() -> Any:
            return runtime.Trainer(
                plan, model, rank, learning_rate=RATE, loss=_distance, dtype=torch.float64, report=link.at, times=2
            )

        own = trainer()
        own.steps(data)
        if folder is not None:
            own.save(folder)
            own = trainer()
            own.load(folder)
        for stage in own.worker.stages.values():
            for group in stage.weights.optimizer.param_groups:
                group["lr"] = second_rate
        own.steps(data)
        return {name: x.numpy() for name, x in own.weights().items()}

    return {name: x for held in runtime.run_ranks(plan, body) for name, x in held.items()}


@pytest.mark.parametrize("schedule", ["pipemare:annealing_steps=9", "pipelined-backprop:mitigation=lwp+sc"])
def test_corrections_go_on_from_a_checkpoint(schedule: str, tmp_path: Path) -> None:
    proto = chain(2)
    job = planner.Job(BATCH, precision="fp32", optimizer="momentum", devices=2)
    graph = planner.graph_from_proto(proto, name="chain")
    asked = planner.Degrees(pipeline=2, schedule=schedule)
    plan = planner.predict(graph, planner.load_cluster("dgx-a100"), job, asked).plan
    model = runtime.read_model(proto)
    whole, parted = _halves(plan, model, None), _halves(plan, model, tmp_path)
    for name, weights in whole.items():
        np.testing.assert_allclose(parted[name], weights, rtol=1e-12, atol=1e-13)
    slower = _halves(plan, model, None, second_rate=RATE / 2)  # as a schedule of the user's own sets it
    assert all(np.abs(slower[name] - weights).max() > 1e-5 for name, weights in whole.items())
