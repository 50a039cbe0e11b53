"""Backward passes in two halves: equal gradients, and no product computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from planner import runtime  # noqa: E402
from planner.runtime.data import synthetic  # noqa: E402
from planner.runtime.interpreter import run  # noqa: E402
from planner.runtime.model_file import Step, read_model  # noqa: E402
from planner.runtime.operators import Context  # noqa: E402
from planner.runtime.split_backward import WaitingProducts  # noqa: E402
from planner.runtime.stages import stage_program  # noqa: E402
from tests.runtime import cases  # noqa: E402


def flops(run_it: Callable[[], Any]) -> int:
    """FLOPs of the products that a function computes, by torch's own count."""
    with FlopCounterMode(display=False) as counter:
        run_it()
    return int(counter.get_total_flops())


def halves(steps: tuple[Step, ...], values: dict[str, Any], weights: tuple[str, ...], end: str) -> tuple[Any, ...]:
    """Gradients of a scalar end for the input x and the weights, and the FLOPs of the halves."""
    waiting = WaitingProducts()
    loss = run(steps, values, Context(torch.float64, saw=waiting.saw), wanted=(end,))[end].square().sum()
    own, inputs = {name: values[name] for name in weights}, [x for x in [values["x"]] if x.requires_grad]
    of_inputs: list[Any] = []
    of_weights: dict[str, Any] = {}
    seeds = [torch.ones_like(loss)]
    first = flops(lambda: of_inputs.extend(waiting.first_half([loss], seeds, inputs, own)))
    second = flops(lambda: [of_weights.update(x) for x in waiting.second_half(own)])
    return of_inputs, of_weights, first, second


def tensors(*sizes: int) -> list[Any]:
    return [torch.randn(n, n, dtype=torch.float64, requires_grad=True) for n in sizes]


def test_products_of_weights_wait_and_are_computed_once() -> None:
    x, w, v = tensors(4, 4, 4)
    steps = (Step("MatMul", ("x", "w"), ("y",), {}, 13), Step("MatMul", ("y", "v"), ("z",), {}, 13))
    of_inputs, of_weights, first, second = halves(steps, {"x": x, "w": w, "v": v}, ("w", "v"), "z")
    expected = torch.autograd.grad(((x @ w) @ v).square().sum(), (x, w, v))
    assert torch.equal(of_inputs[0], expected[0])
    assert torch.equal(of_weights["w"], expected[1])
    assert torch.equal(of_weights["v"], expected[2])
    assert first == second == 2 * 2 * 4**3  # two products of 4 x 4 matrices each


def test_without_gradients_of_the_input_the_first_half_goes_as_far_as_the_first_product() -> None:
    w, v = tensors(4, 4)
    x = torch.ones(4, 4, dtype=torch.float64)
    steps = (Step("MatMul", ("x", "w"), ("y",), {}, 13), Step("MatMul", ("y", "v"), ("z",), {}, 13))
    _, of_weights, first, second = halves(steps, {"x": x, "w": w, "v": v}, ("w", "v"), "z")
    expected = torch.autograd.grad(((x @ w) @ v).square().sum(), (w, v))
    assert torch.equal(of_weights["w"], expected[0])
    assert torch.equal(of_weights["v"], expected[1])
    assert (first, second) == (2 * 4**3, 2 * 2 * 4**3)


@pytest.mark.parametrize("shared", [("MatMul", "MatMul"), ("MatMul", "Add"), ("Add", "MatMul")])
def test_a_weight_that_is_read_twice_has_the_sum(shared: tuple[str, str]) -> None:
    x, w = tensors(4, 4)
    steps = tuple(
        Step(op, (before, "t"), (after,), {}, 13)
        for op, before, after in zip(shared, ("x", "y"), ("y", "z"), strict=True)
    )
    steps = (Step("Transpose", ("w",), ("t",), {"perm": [1, 0]}, 13), *steps)
    of_inputs, of_weights, _, second = halves(steps, {"x": x, "w": w}, ("w",), "z")
    parts = {"MatMul": lambda a: a @ w.T, "Add": lambda a: a + w.T}
    expected = torch.autograd.grad(parts[shared[1]](parts[shared[0]](x)).square().sum(), (x, w))
    assert torch.allclose(of_inputs[0], expected[0], rtol=1e-14)
    assert torch.allclose(of_weights["w"], expected[1], rtol=1e-14)
    assert second == 0


@pytest.mark.parametrize("name", ["gpt, untied", "gpt", "resnet", "llama"])
def test_a_whole_models_products_are_computed_once(name: str) -> None:
    plan = cases.plan(cases.Case("", name, 1, {}, 2))
    model = read_model(cases.model(name))
    program = stage_program(plan, model, 0)
    values = {n: model.weight(n, torch.float64) for n in (*model.weights, *model.constants)}
    own = {n: values[n].requires_grad_() for n in program.parameters if values[n].is_floating_point()}
    fed = synthetic(plan, model, torch.float64, 0)(0, 0)

    def loss(waiting: WaitingProducts) -> Any:
        context = Context(torch.float64, saw=waiting.saw, fitted=model.fitted)
        found = run(program.steps, {**values, **fed}, context, wanted=program.outputs)
        return sum(y.square().mean() for y in found.values() if y.requires_grad)

    waiting, found = WaitingProducts(), {}
    end = loss(waiting)
    first = flops(lambda: waiting.first_half([end], [torch.ones_like(end)], [], own))
    second = flops(lambda: [found.update(x) for x in waiting.second_half(own)])
    end = loss(WaitingProducts())
    expected = []
    whole = flops(lambda: expected.extend(torch.autograd.grad(end, list(own.values()), allow_unused=True)))
    assert first + second == whole
    assert second > 0.3 * whole
    for n, gradient in zip(own, expected, strict=True):
        assert (found[n] is None) == (gradient is None)
        assert gradient is None or torch.allclose(found[n], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("model", "ranks", "degrees"),
    [
        ("gpt", 2, {"pipeline": 2, "schedule": "zb-v", "recompute": True}),
        ("gpt", 2, {"pipeline": 2, "schedule": "zb-h1", "recompute": True, "recompute_layers": 1}),
        ("llama", 2, {"pipeline": 2, "schedule": "zb-h2", "recompute": True}),
        ("mixtral", 2, {"pipeline": 2, "schedule": "zb-v", "recompute": True}),
        ("gpt, wide", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1", "recompute": True}),
        ("gpt", 4, {"pipeline": 2, "zero": 3, "schedule": "zb-h1", "recompute": True}),
        ("gpt", 4, {"pipeline": 2, "zero": 3, "schedule": "zb-v", "repeats": ("layernorm", "mlp")}),
        ("gpt", 2, {"pipeline": 2, "schedule": "zb-h1", "recompute": True, "offload": ("layer_input",)}),
    ],
)  # fmt: skip
def test_layers_that_are_repeated_for_the_first_half_have_the_whole_models_gradients(
    model: str, ranks: int, degrees: dict[str, Any]
) -> None:
    plan = cases.plan(cases.Case("", model, ranks, degrees, 8))
    assert any(stage.recompute or stage.repeated for stage in plan.stages)
    found = runtime.run(plan, cases.model(model), steps=0, check=True).check
    assert found is not None
    assert found.largest < 1e-11
