"""Activations in the host's memory: what is moved, from which operators, and how it compares with the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import planner

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner import runtime  # noqa: E402
from planner.runtime.device import TrainingDevice  # noqa: E402
from planner.runtime.host import HostMemory, moved, steps_of  # noqa: E402
from planner.runtime.interpreter import run  # noqa: E402
from planner.runtime.model_file import Step, read_model  # noqa: E402
from planner.runtime.operators import Context  # noqa: E402
from planner.runtime.stages import stage_program  # noqa: E402
from tests.runtime import cases  # noqa: E402


def product(name: str, *inputs: str) -> Step:
    return Step("MatMul", inputs, (name,), {}, 13)


def test_kept_tensors_leave_their_buffers_and_gradients_are_the_same() -> None:
    x, w, v = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    steps = (product("y", "x", "w"), product("z", "y", "v"))

    def gradients(keeping: Any, *, overwritten: bool) -> Any:
        context = Context(torch.float64, keeping=keeping)
        found = run(steps, {"x": x, "w": w, "v": v}, context, wanted=("y", "z"))
        if overwritten:
            with torch.no_grad():
                found["y"].zero_()
        return torch.autograd.grad(found["z"].sum(), (x, w, v))

    kept = gradients(HostMemory((), (), TrainingDevice()).keeping, overwritten=False)
    host = HostMemory({"z"}, (w, v), TrainingDevice())
    found = gradients(host.keeping, overwritten=True)  # only the copy has what the backward needs
    assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
    assert host.moved_bytes == 9 * 8  # y, and not the weight
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(HostMemory({"y"}, (w, v), TrainingDevice()).keeping, overwritten=True)


def test_a_moved_tensor_is_a_leaf_of_another_buffer() -> None:
    x = torch.ones(2, requires_grad=True)
    copy = moved(x * 2, TrainingDevice().to_host)
    assert copy.is_leaf
    assert copy.requires_grad
    assert torch.equal(copy, torch.full((2,), 2.0))
    assert moved(torch.ones(2), TrainingDevice().to_host).requires_grad is False


def test_an_operator_that_is_not_listed_goes_with_its_readers() -> None:
    steps = (product("a", "x"), product("b", "a"), product("c", "a"), product("d", "b"), product("e", "d", "c"))
    assert steps_of({"e"}, {"e", "x"}, steps) == {"a", "b", "c", "d", "e"}
    assert steps_of({"e"}, {"c", "e"}, steps) == {"b", "d", "e"}  # a also serves c
    assert steps_of((), {"e"}, steps) == set()


@pytest.mark.parametrize("modules", [("act",), ("qkv_linear",), ("mlp",)])
def test_as_much_is_moved_as_the_plan_says(modules: tuple[str, ...]) -> None:
    plan = cases.plan(cases.Case("", "gpt", 1, {"offload": modules}, 2))
    model = read_model(cases.model("gpt"))
    program = stage_program(plan, model, 0)
    weights = {name: model.weight(name, torch.float32) for name in model.weights}
    for name in filter(model.trained, weights):
        weights[name].requires_grad_(True)
    ids = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in plan.model.inputs}
    host = HostMemory(program.offloaded, weights.values(), TrainingDevice())
    run(program.steps, {**weights, **ids}, Context(torch.float32, keeping=host.keeping), wanted=model.outputs)
    assert host.moved_bytes == plan.predictions.stages[0].host_bytes > 0


def test_a_plan_whose_search_moves_inputs_of_layers_is_coherent_and_runs() -> None:
    """With 195 kB beside the reserve a device has room for 2 samples at a time; for 4 with the inputs in the host."""
    graph, cluster = cases.graph("gpt, 4 samples"), planner.load_cluster("dgx-a100")
    (device,) = cluster.devices
    memory_bytes = device.reserve_bytes + 195_000
    small = dataclasses.replace(device, memory_bytes=memory_bytes, neighbour_bytes=0, host_byte_per_s=1e12)
    machine = dataclasses.replace(cluster, devices=(small,))
    job = planner.Job(16, "fp32", "sgd", devices=2, headroom=0.0, backends=("jax",))
    plan = planner.plan(graph, machine, job)
    assert [stage.offload for stage in plan.stages] == [("layer_input",)]
    assert (plan.micro_batches.size, plan.runs_on) == (4, ("jax",))
    assert planner.check_plan(plan, graph, machine, backends=("jax",)).findings == ()
    found = runtime.run(plan, cases.model("gpt, 4 samples"), steps=0, check=True).check
    assert found is not None
    assert found.largest < 1e-12
