"""Training by plans: recurrences of stale weights, moves between plans by checkpoint, runs that fail."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402
from tests.runtime import cases, trainings  # noqa: E402

RATE = 0.05


def train(plan: planner.Plan, model: Any, steps: int, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses, and all weights at the end, of a plan that is trained for some steps."""
    data = runtime.synthetic(plan, model, torch.float64)

    def body(rank: int, link: Any) -> Any:
        trainer = runtime.Trainer(
            plan, model, rank, dtype=torch.float64, report=link.at,
            times=steps if plan.schedule.continuous else 1, **{"learning_rate": RATE, **options},
        )  # fmt: skip
        losses: list[float] = []
        while len(losses) < steps:
            losses += trainer.steps(data)
        return losses, {name: x.numpy() for name, x in trainer.weights().items()}

    results = runtime.run_ranks(plan, body)
    return results[0][0], {name: torch.from_numpy(x) for _, held in results for name, x in held.items()}


def _gradient(plan: planner.Plan, model: Any, weights: dict[str, Any], number: int) -> dict[str, Any]:
    """Of the whole model's mean loss on one micro-batch."""
    count = plan.micro_batches.count
    batch = runtime.synthetic(plan, model, torch.float64)(number // count, number % count)
    leaves = {name: x.clone().requires_grad_(True) for name, x in weights.items()}
    found = runtime.run_graph(model, {**leaves, **batch}, torch.float64)
    loss = torch.nn.functional.cross_entropy(
        found[plan.model.outputs[0].name][:, :-1].reshape(-1, 32), batch["input_ids"][:, 1:].reshape(-1)
    )
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize(
    ("schedule", "delay_of_last", "by_iteration"), [("pipedream", 0, False), ("pipedream-2bw", 1, True)]
)
@pytest.mark.parametrize("stages", [2, 4])
def test_stale_weights_follow_the_published_recurrence(
    schedule: str, delay_of_last: int, by_iteration: bool, stages: int
) -> None:
    plan = cases.plan(cases.Case("", "gpt, untied", stages, {"pipeline": stages, "schedule": schedule}, 4))
    model = runtime.read_model(cases.model("gpt, untied"))
    losses, weights = train(plan, model, 3)
    updates = len(losses) if by_iteration else len(losses) * plan.micro_batches.count
    each = plan.micro_batches.count if by_iteration else 1
    start = {p.name: model.weight(p.name, torch.float64) for b in plan.block_table for p in b.parameters}
    stage_of = {p.name: s.index for s in plan.stages for p in plan.stage_parameters(s.index)}
    delay = {s: delay_of_last if by_iteration else stages - 1 - s for s in range(stages)}
    history = [start]
    for update in range(updates):
        read = {name: history[max(0, update - delay[stage_of[name]])][name] for name in start}
        sums = {name: torch.zeros_like(x) for name, x in start.items()}
        for number in range(update * each, (update + 1) * each):
            for name, gradient in _gradient(plan, model, read, number).items():
                sums[name] += gradient / each
        history.append({name: x - RATE * sums[name] for name, x in history[-1].items()})
    assert set(weights) == set(start)
    for name, x in weights.items():
        torch.testing.assert_close(x, history[-1][name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("wave", [2, 3])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_waves_follow_the_published_recurrence(wave: int, distance: int) -> None:
    """Park et al. 2020, section 5: before the last mini-batch of wave c + 1 a virtual worker has the updates of all
    others in wave c - D; of its own it lacks the last Nm - 1."""
    workers, waves, iterations = 2, 2, 3
    schedule = f"hetpipe:concurrent={wave},distance={distance}"
    case = cases.Case("", "gpt, untied", 4, {"pipeline": 2, "schedule": schedule}, workers * waves * wave)
    plan, model = cases.plan(case), runtime.read_model(cases.model("gpt, untied"))
    assert [len(stage.replicas) for stage in plan.stages] == [workers] * 2
    losses, weights = train(plan, model, iterations)
    start = {p.name: model.weight(p.name, torch.float64) for b in plan.block_table for p in b.parameters}
    each = waves * wave * len(losses)
    updates: list[list[dict[str, Any]]] = [[] for _ in range(workers)]
    lacking = [j - max(0, (j + 1) // wave - 1 - distance) * wave for j in range(each)]
    assert max(lacking) == (distance + 1) * wave + wave - 2
    for j in range(each):
        for worker in range(workers):
            own = updates[worker][: max(0, j - (wave - 1))]
            others = [u for other in range(workers) if other != worker for u in updates[other][: j - lacking[j]]]
            read = {name: x + sum(u[name] for u in (*own, *others)) for name, x in start.items()}
            gradient = _gradient(plan, model, read, worker + workers * j)
            updates[worker].append({name: -RATE * x for name, x in gradient.items()})
    for name, x in weights.items():
        final = start[name] + sum(u[name] for worker in updates for u in worker)
        torch.testing.assert_close(x, final, rtol=1e-12, atol=1e-13)
    assert set(weights) == set(start)


MOVES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "gpt, wide": [
        (1, {}),
        (4, {"pipeline": 2, "zero": 1}),
        (4, {"tensor": 2, "zero": 3}),
        (2, {"pipeline": 2, "schedule": "chimera", "zero": 1}),
        (4, {"pipeline": 2, "schedule": "chimera", "zero": 3}),
    ],
    "gpt, wide, 2 samples": [
        (1, {}),
        (4, {"pipeline": 2, "schedule": "interleaved", "zero": 1}),
        (4, {"context": 2, "zero": 3}),
        (4, {"pipeline": 2, "schedule": "zb-v", "zero": 2}),
        (2, {"tensor": 2, "repeats": ("layernorm", "act")}),
    ],
    "mixtral": [
        (1, {}),
        (4, {"expert": 2, "zero": 1}),
        (4, {"context": 2, "pipeline": 2}),
        (4, {"expert": 2, "zero": 3}),
    ],
}
"""By model, ranks and degrees of the plans under which it is trained one after the other."""


def _adam(weights: Any) -> Any:
    return torch.optim.Adam(list(weights), lr=0.01)


@pytest.mark.parametrize("name", MOVES)
def test_training_goes_on_under_another_plan(name: str, tmp_path: Path) -> None:
    model = runtime.read_model(cases.model(name))
    plans = [cases.plan(cases.Case("", name, ranks, degrees, 4)) for ranks, degrees in MOVES[name]]
    samples = plans[0].micro_batches.global_batch
    batch = {"input_ids": torch.randint(30, (samples, 8), generator=torch.Generator().manual_seed(3))}

    def trained(plan: planner.Plan, steps: int, begin: Path | None, end: Path | None) -> Any:
        def body(rank: int, link: Any) -> Any:
            trainer = runtime.Trainer(plan, model, rank, dtype=torch.float64, optimizer=_adam, report=link.at)
            if begin is not None:
                trainer.load(begin)
            losses = [trainer.step(batch) for _ in range(steps)]
            if end is not None:
                trainer.save(end)
            return losses, {name: x.numpy() for name, x in trainer.weights().items()}

        return runtime.run_ranks(plan, body)

    ((expected, weights),) = trained(plans[0], 2 * len(plans), None, None)
    losses: list[float] = []
    for k, plan in enumerate(plans):
        results = trained(plan, 2, tmp_path / str(k - 1) if k else None, tmp_path / str(k))
        losses += results[0][0]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert {name for _, held in results for name in held} == set(weights)
    for _, held in results:
        for name, x in held.items():
            np.testing.assert_allclose(x, weights[name], rtol=1e-9, atol=1e-11)


def _momentum(weights: Any) -> Any:
    return torch.optim.SGD(list(weights), lr=RATE, momentum=0.9)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "pipemare", "hetpipe:concurrent=2,distance=1"])
def test_stale_training_goes_on_from_a_checkpoint(schedule: str, tmp_path: Path) -> None:
    """Each copy of HetPipe has a momentum of its own; rounding differs, since a copy adds its own changes first."""
    ranks = 4 if "hetpipe" in schedule else 2
    plan = cases.plan(cases.Case("", "gpt, untied", ranks, {"pipeline": 2, "schedule": schedule}, 2 * ranks))
    model = runtime.read_model(cases.model("gpt, untied"))
    data = runtime.synthetic(plan, model, torch.float64)

    def trained(calls: int, load: bool, save: bool) -> Any:
        def body(rank: int, link: Any) -> Any:
            trainer = runtime.Trainer(plan, model, rank, dtype=torch.float64, optimizer=_momentum, report=link.at)
            if load:
                trainer.load(tmp_path / "saved")
            losses = [trainer.steps(data) for _ in range(calls)]
            if save:
                trainer.save(tmp_path / "saved")
            return losses, {name: x.numpy() for name, x in trainer.weights().items()}

        return runtime.run_ranks(plan, body)

    expected, before = trained(2, False, False), trained(1, False, True)
    found = trained(1, True, False)
    assert expected[0][0] == [pytest.approx(losses, rel=1e-12) for losses in (*before[0][0], *found[0][0])]
    for (_, whole), (_, held) in zip(expected, found, strict=True):
        for name, x in held.items():
            torch.testing.assert_close(torch.from_numpy(x), torch.from_numpy(whole[name]), rtol=1e-12, atol=1e-13)


def test_there_is_no_checkpoint_inside_a_wave() -> None:
    from planner.runtime.device import TrainingDevice
    from planner.runtime.waves import WaveWeights

    weights = WaveWeights(
        {"w": torch.ones(2)}, device=TrainingDevice(), group=None, zero=0, together=True,
        make=_momentum, stash=2, finish=lambda name, gradient: gradient,
    )  # fmt: skip
    weights.add({"w": torch.ones(2)})
    weights.update()
    with pytest.raises(planner.PlanError, match="no checkpoint inside a wave"):
        weights.state()
    weights.launch(0)
    weights.drain()
    torch.testing.assert_close(weights.state()[0]["w"], torch.full((2,), 1 - RATE))


def test_four_trainings_have_one_loss_curve() -> None:
    found = trainings.curves(12)
    assert len(found) == 4
    assert trainings.apart(found) < 1e-6
    for losses in found.values():
        assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


def test_the_page_has_trainings_that_learn_and_agree() -> None:
    text = trainings.PAGE.read_text().split("<!-- generated: trainings -->")[1].split("<!-- end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]
    assert [row[0] for row in cells] == [*trainings.PLANS, ", then ".join(trainings.MOVED)]
    for row in cells:
        assert float(row[5]) < 0.5 * float(row[1])
        assert float(row[6]) < 1e-6


def _two_stages() -> planner.Plan:
    return cases.plan(cases.Case("", "gpt, untied", 2, {"pipeline": 2}, 4))


def _failing(what: str) -> Any:
    """A rank's body in which rank 1 fails at its third action."""
    plan, model = _two_stages(), runtime.read_model(cases.model("gpt, untied"))
    data = runtime.synthetic(plan, model, torch.float64)

    def body(rank: int, link: Any) -> Any:
        def report(place: int, text: str) -> None:
            link.at(place, text)
            if rank == 1 and place == 2:
                if what == "dies":
                    os.kill(os.getpid(), 9)
                if what == "hangs":
                    time.sleep(600)
                raise MemoryError("no room for the logits")

        trainer = runtime.Trainer(plan, model, rank, dtype=torch.float64, report=report)
        return trainer.step(data)

    return plan, body


def _children() -> set[str]:
    """Processes that this one has started; none where the system does not say."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(listed.read_text().split()) if listed.exists() else set()


@pytest.mark.parametrize(
    ("what", "cause"),
    [("dies", "ended by signal 9"), ("hangs", "no rank went on for 3 s"), ("raises", "no room for the logits")],
)
def test_a_rank_that_fails_ends_the_run_by_name(what: str, cause: str) -> None:
    plan, body = _failing(what)
    begin, before = time.monotonic(), _children()
    with pytest.raises(planner.RunError, match=cause) as error:
        runtime.run_ranks(plan, body, timeout_s=3.0)
    assert time.monotonic() - begin < 30
    assert f"rank 1 at {plan.actions(1)[2]}" in str(error.value)
    states = [Path(f"/proc/{child}/stat") for child in _children() - before]
    assert not [s for s in states if s.exists() and s.read_text().split(")")[1].split()[0] not in "ZX"]


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    plan = _two_stages()
    with pytest.raises(planner.RunError, match=r"loss of micro-batch \d+ is (nan|inf)") as error:
        runtime.run(plan, cases.model("gpt, untied"), steps=60, learning_rate=1e30)
    assert "rank 1 at F1." in str(error.value)


def test_sharded_weights_that_are_corrected_are_refused_before_a_process_starts() -> None:
    degrees = {"pipeline": 2, "data": 2, "schedule": "pipelined-backprop", "zero": 1}
    plan = cases.plan(cases.Case("", "gpt, untied", 4, degrees, 4))
    with pytest.raises(planner.PlanError, match="corrected for delay and sharded"):
        runtime.require_executable(plan)


def test_what_is_not_executed_is_refused_by_name() -> None:
    plan = cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2, "schedule": "chimera:over=halve"}))
    with pytest.raises(planner.PlanError, match="parts of a micro-batch that are not runs of its sequence"):
        runtime.run(plan, cases.model("gpt"))


def test_every_requirement_has_a_word() -> None:
    from planner.plans import Requirement

    assert set(runtime.EXECUTED) == set(Requirement)


def test_the_loss_is_the_output_that_computes_it(tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx.helper")
    onnx = pytest.importorskip("onnx")
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(8, 5, generator=draw)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["logits"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]),
    ]
    tensors = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, 8]), ("logits", [2, 5]), ("loss", []))]
    labels = helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, [2])
    weight = onnx.numpy_helper.from_array(w.numpy(), "w")
    graph = helper.make_graph(nodes, "classes", [tensors[0], labels], tensors[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    job = planner.Job(global_batch=4, precision="fp32", optimizer="sgd", devices=1)
    known, cluster = planner.load_graph(tmp_path / "m.onnx"), planner.load_cluster("dgx-a100")
    plan = planner.predict(known, cluster, job, planner.Degrees(micro_batch=2)).plan
    assert plan.model.loss_output == "loss"
    x, classes = torch.randn(4, 8, generator=draw), torch.tensor([0, 4, 2, 2])
    np.savez(tmp_path / "data.npz", x=x.numpy(), labels=classes.numpy())
    found = runtime.run(plan, tmp_path / "m.onnx", data=tmp_path / "data.npz", check=True)
    expected = torch.nn.functional.cross_entropy(x @ w, classes)
    assert found.losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert found.check is not None
    assert found.check.largest < 1e-12
