"""Where tensors lie: orders run on a device that is not the host, torch's meta device, whose tensors have no data.

An operator that mixes a tensor of the host with one of the meta device raises, so a plan whose orders run through has
all its tensors on its device.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import models  # noqa: E402
import planner  # noqa: E402
from planner import runtime  # noqa: E402
from planner.runtime import device as devices  # noqa: E402
from planner.runtime import interpreter, jobs  # noqa: E402
from planner.runtime.groups import RankGroup  # noqa: E402
from tests.models.graphs import gpt  # noqa: E402
from tests.runtime import cases  # noqa: E402

PLACED = (
    "1f1b, 4 stages", "gpipe, 2 stages", "interleaved, 4 stages", "hanayo, 2 stages", "chimera, 4 stages",
    "dualpipe, 4 stages", "zb-h1, 2 stages", "zb-v, 4 stages", "bpipe, 4 stages", "2 replicas, ZeRO-0",
    "tensor 2, ZeRO-1", "2 stages, 2 replicas, ZeRO-2", "tensor 2, ZeRO-3", "2 stages, recomputed",
    "tensor 2, 2 stages, zb-h1", "tensor 4, way 3", "offloaded", "recomputed, inputs offloaded",
    "experts repeated and offloaded", "llama, 2 parts of a sequence", "4 parts of a sequence, recomputed",
    "stages of 3 and 1 replicas, ZeRO-3", "batch cut, way 7", "mixtral, tensor 2, way 5", "resnet, 2 stages",
    "bert, 2 stages", "t5, tensor 2, way 3", "vit, 2 stages",
)  # fmt: skip
"""Names of cases: schedules, tensor parallelism, ZeRO, recomputation, offload, ties, experts, convolution."""


def _run_on_meta(plan: planner.Plan, model: Any, rank: int, steps: int = 2, **options: Any) -> devices.MetaDevice:
    device = devices.MetaDevice()
    model = runtime.read_model(model)
    with device.used():
        trainer = runtime.Trainer(plan, model, rank, device=device, alone=True, **options)
        device.forget_peak()
        for _ in range(steps):
            trainer.steps(runtime.synthetic(plan, model, torch.float32))
        for stage in trainer.worker.stages.values():
            tensors = [*stage.weights.leaves.values(), *stage.tied.leaves.values(), stage.weights.flat]
            tensors += [x for states in _states(stage) for x in states.values() if getattr(x, "dim", lambda: 0)()]
            assert all(x.is_meta for x in tensors)
            assert not stage.passes
    return device


def _states(stage: Any) -> list[dict[str, Any]]:
    optimizers = [weights.optimizer for weights in (stage.weights, stage.tied) if weights.optimizer]
    return [state for optimizer in optimizers for state in optimizer.state.values()]


@pytest.mark.parametrize("name", PLACED)
def test_all_tensors_of_a_plan_lie_on_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases.CASES if case.name == name)
    if case.batch == 8 and "dualpipe" not in name:  # which needs two micro-batches a stage
        case = dataclasses.replace(case, batch=4)
    plan, brought = cases.plan(case), []
    bring = interpreter.brought

    def observed(x: Any, device: Any) -> Any:
        brought.append(0 if x.is_meta else x.numel())
        return bring(x, device)

    monkeypatch.setattr(interpreter, "brought", observed)
    for rank in {plan.world_size - 1, 0}:
        _run_on_meta(plan, cases.model(case.model), rank)
    assert max(brought) <= devices.HOST_ELEMENTS  # what comes from the host are shapes and single numbers


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "pipemare", "hetpipe:concurrent=2,distance=1"])
def test_stale_weights_lie_on_the_device(schedule: str) -> None:
    ranks = 4 if "hetpipe" in schedule else 2
    plan = cases.plan(cases.Case("", "gpt, untied", ranks, {"pipeline": 2, "schedule": schedule}, 2 * ranks))

    def momentum(weights: Any) -> Any:
        return torch.optim.SGD(list(weights), lr=0.1, momentum=0.9)

    _run_on_meta(plan, cases.model("gpt, untied"), ranks - 1, optimizer=momentum, times=2)


def test_a_tensor_of_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2}, 4))
    monkeypatch.setattr(devices.TrainingDevice, "place", lambda self, x: x)
    monkeypatch.setattr(interpreter, "brought", lambda x, device: x)
    with pytest.raises((planner.ModelError, RuntimeError), match="meta"):
        _run_on_meta(plan, cases.model("gpt"), 0)


def test_offloaded_tensors_leave_the_device() -> None:
    """What a plan says lies in the host's memory is gone from the device at the peak, and comes back."""
    modules = ("core_attn", "attn_proj", "mlp", "layernorm")
    model = models.build_custom(gpt(4, 64, 4, 64, 128), batch=2, seq=128)
    graph, cluster = planner.graph_from_proto(model, name="long"), planner.load_cluster("dgx-a100")
    job = planner.Job(global_batch=2, precision="fp32", optimizer="sgd", devices=1)
    peaks, moved_bytes = [], 0
    for offload in ((), modules):
        plan = planner.predict(graph, cluster, job, planner.Degrees(micro_batch=2, offload=offload)).plan
        peaks.append(_run_on_meta(plan, model, 0).memory()[1])
        moved_bytes = plan.predictions.stages[0].host_bytes
    assert peaks[0] - peaks[1] > 0.85 * moved_bytes > 0  # what is brought back first is there at the peak


def test_bytes_are_counted_as_long_as_a_tensor_lives() -> None:
    device = devices.MetaDevice()
    with device.used():
        x = torch.empty(1000, device="meta")
        y = x[:10].view(2, 5)
        assert device.memory() == (4096, 4096)
        z = torch.ones_like(x)
        del x
        assert device.memory() == (8192, 8192)
        del y, z
        assert device.memory() == (0, 8192)
        device.forget_peak()
        w = torch.empty(128, device="meta")
        device.resize(w, 0)
        assert device.memory() == (0, 512)
        away = device.to_host(w)
        assert away.is_meta
        assert device.memory() == (0, 512)


def test_a_plan_of_any_size_runs_without_data() -> None:
    """13 billion parameters: the weights of rank 3 alone are 13 GB."""
    model = planner.build_bundled("gpt3-13b", batch=1, seq=512)
    graph, cluster = planner.graph_from_proto(model, name="gpt3-13b"), planner.load_cluster("dgx-a100")
    job = planner.Job(global_batch=4, precision="fp32", optimizer="adam", devices=4)
    plan = planner.predict(graph, cluster, job, planner.Degrees(pipeline=4, micro_batch=1)).plan
    found = runtime.run(plan, model, device="meta", alone=3, steps=1)
    weights_bytes = 4 * plan.stages[3].parameters
    assert found.device == "meta"
    assert found.times == ()
    # Weights, gradients, two moments; the gradients of the others are gone when tied weights are updated.
    assert found.memory[0].measured_bytes > 3.8 * weights_bytes > 40e9


def test_devices_are_chosen_by_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = devices.choose
    assert dataclasses.astuple(choose("auto", ranks=2)) == ("cpu", "gloo", 0, ())
    with pytest.raises(planner.UsageError, match="torch sees no GPU"):
        choose("cuda")
    with pytest.raises(planner.UsageError, match="no device 'abacus'"):
        choose("abacus")
    with pytest.raises(planner.UsageError, match="cannot be exchanged"):
        runtime.run(cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2}, 4)), cases.model("gpt"), device="meta")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert dataclasses.astuple(choose("auto", ranks=2)) == ("cuda", "nccl", 2, ())
    assert dataclasses.astuple(choose("cuda", ranks=4)) == ("cuda", "gloo", 2, ())  # two ranks on each
    assert choose("cuda", ranks=2, backend="gloo").backend == "gloo"
    assert [str(choose("cuda", ranks=4).open(k).name) for k in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert choose("cuda", ranks=4).open(1).wire == torch.device("cpu")
    assert choose("cuda", ranks=2).open(1).wire == torch.device("cuda", 1)
    with pytest.raises(planner.UsageError, match="NCCL needs a GPU for each rank: 3 ranks here, 2 GPUs"):
        choose("cuda", ranks=3, backend="nccl")


class _Ticks(devices.TrainingDevice):
    """A device whose time passes by one second at every look, as a GPU's does while a rank waits."""

    counts_waiting = True

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def moment(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_waiting_for_others_is_not_counted() -> None:
    clock = devices.Clock(_Ticks())
    clock.begin("F0")
    with clock.waiting():
        pass
    clock.begin("B0")
    clock.begin("")
    with clock.waiting():
        pass
    clock.begin("F0")
    clock.begin("")
    clock.read()
    assert clock.seconds == {"F0": [2.0, 1.0], "B0": [1.0]}


def test_what_stands_in_for_others_is_not_counted() -> None:
    """Not on a processor either, where time does not pass while a rank waits."""
    device = _Ticks()
    device.counts_waiting = False
    clock = devices.Clock(device)
    alone = RankGroup(None, 2, 1, devices.HOST, clock)
    x, whole = torch.arange(4.0), torch.zeros(8)
    clock.begin("F0")
    assert alone.gather(x).tolist() == [[0, 1, 2, 3]] * 2
    alone.gather_into(whole, x)
    assert whole.tolist() == [0, 1, 2, 3] * 2
    assert alone.scatter_sum(whole).tolist() == [0, 1, 2, 3]
    clock.begin("")
    clock.read()
    assert clock.seconds == {"F0": [7.0 - 3.0]}  # three stand-ins, of one tick each


def test_ranks_can_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: what processes are given can be sent to them, and gradients are the same."""
    plan, model = cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2}, 4)), cases.model("gpt")
    monkeypatch.setattr(devices.DeviceChoice, "start_method", property(lambda self: "spawn"))
    found = runtime.run(plan, model, steps=0, check=True, device="cpu")
    assert found.check is not None
    assert found.check.largest < 1e-12
    body = functools.partial(jobs._train, jobs._Training(plan, runtime.read_model(model), "synthetic", "auto", 0))
    assert pickle.loads(pickle.dumps(body)).args[0].plan == plan
