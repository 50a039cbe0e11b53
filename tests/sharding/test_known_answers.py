"""Published and hand-counted figures of tensor-sharding systems, through public functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner import formulas
from planner.operators import LoopNest, OpCall, loop_nest, spec
from planner.sharding import (
    Mesh,
    Part,
    ReshardStep,
    StateBytes,
    Strategy,
    TensorLayout,
    WeightChoice,
    ideal_mesh,
    parse_layout,
    reshard,
    strategies,
)
from planner.sharding.named_layout import NamedOperation, NamedProgram, NamedTensor, assignments, best_layout
from planner.sharding.searches.tofu import Pass, cut_bytes, cuts_of
from tests.operators.calls import call
from tests.sharding.graphs import zero_choice
from tests.sharding.named_layouts import brute_force_layout


def weight_steps(
    mesh: Mesh, shape: Sequence[int], choice: WeightChoice, used: TensorLayout, gradient: TensorLayout
) -> tuple[ReshardStep, ...]:
    """All changes of layout of a weight in one step of training; it is brought to the operator forward and backward."""
    there = reshard(mesh, shape, 1.0, choice.weight, used) * 2
    back = reshard(mesh, shape, 1.0, gradient, choice.gradient)
    update = reshard(mesh, shape, 1.0, choice.gradient, choice.optimizer)
    return there + back + update + reshard(mesh, shape, 1.0, choice.optimizer, choice.weight)


def _product(m: int, k: int, n: int) -> LoopNest:
    return loop_nest("i k, k j -> i j", [(0, (m, k)), (1, (k, n))], [(0, (m, n))], contraction=True)


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("64 MB each", (4, 4, 4), {"i": 64.0, "k": 96.0, "j": 128.0}),
        ("weight 1024 MB, activations 16 MB", (16, 1024, 1024), {"i": 1024.0, "k": 24.0, "j": 536.0}),
    ],
)
def test_tofu_two_way_product_total_mb(name: str, sizes: tuple[int, int, int], expected: dict[str, float]) -> None:
    """A rests cut by i, B by k, C by i; each strategy's fetches and sums."""
    m, k, n = sizes
    one = Pass("product", (_product(m, k, n),), ("A", "B"), ("C",))
    unit = {"64 MB each": 4.0}.get(name, 1024 / (1024 * 1024))
    rests = [Part(0), Part(0), Part(0)]
    found = {cut.dim: cut_bytes(one, cut, rests, 2, unit) for cut in cuts_of(one, 2, unit)}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("layers", "hidden", "gib"),
    [
        (6, 4096, 8.4375), (6, 6144, 18.84375), (6, 8192, 33.375),
        (8, 4096, 11.4375), (8, 6144, 25.59375), (8, 8192, 45.375),
        (10, 4096, 14.4375), (10, 6144, 32.34375), (10, 8192, 57.375),
    ],
)  # fmt: skip
def test_tofu_memory_of_recurrent_networks(layers: int, hidden: int, gib: float) -> None:
    """Weight, gradient and history of L layers of LSTM, 4 H (inputs + H) weights each, the first with 1024 inputs."""
    whole = WeightChoice((), (), ())
    shapes = [(4 * hidden, (1024 if layer == 0 else hidden) + hidden) for layer in range(layers)]
    total = sum(StateBytes(4, 4, 4).held(shape, whole, ()) for shape in shapes)
    assert total / 2**30 == gib


@pytest.mark.parametrize(
    ("name", "experts", "layers", "expected"),
    [
        ("MoE(2048E,36L)", 2048, 36, 618475290624),
        ("MoE(2048E,12L)", 2048, 12, 206158430208),
        ("MoE(512E,36L)", 512, 36, 154618822656),
        ("MoE(512E,12L)", 512, 12, 51539607552),
        ("MoE(128E,36L)", 128, 36, 38654705664),
        ("MoE(128E,12L)", 128, 12, 12884901888),
    ],
)
def test_gshard_expert_parameters(name: str, experts: int, layers: int, expected: int) -> None:
    assert formulas.gshard_expert_parameters(experts, layers, 1024, 8192) == expected, name


def test_gshard_all_to_all_bytes() -> None:
    """2,048 tokens a device, top 2, bf16, 2,048 experts on as many devices, one group a device."""
    (step,) = reshard(ideal_mesh((2048,)), (2048, 2048, 2, 1024), 2.0, (Part(0),), (Part(1),))
    assert (step.what, step.sent_bytes) == ("all-to-all", 8384512.0)


def _feed_forward(mesh: Mesh, first: Strategy, second: Strategy, x: str, hidden: str, y: str) -> tuple[float, float]:
    """Elements that a rank sends for activations and for weights of two products, forward and backward."""
    b, d, h = 512, 1024, 4096
    shapes = {"x": (b, d), "w1": (d, h), "h": (b, h), "w2": (h, d), "y": (b, d)}
    rest = {"x": x, "h": hidden, "y": y}

    def moved(name: str, before: object, after: object) -> float:
        return sum(s.sent_bytes for s in reshard(mesh, shapes[name], 1.0, before, after))  # type: ignore[arg-type]

    activations = weights = 0.0
    for strategy, (read, weight, write) in ((first, ("x", "w1", "h")), (second, ("h", "w2", "y"))):
        axes = len(mesh.axes)
        activations += moved(write, dict(strategy.writes)[0], parse_layout(rest[write], axes))
        activations += moved(read, dict(strategy.read_gradients)[0], parse_layout(rest[read], axes))
        weights += moved(weight, dict(strategy.read_gradients)[1], dict(strategy.reads)[1])
    return activations, weights


def _named(what: OpCall, mesh: Mesh, splits: tuple[str, ...]) -> Strategy:
    return next(s for s in strategies(what, spec(what), mesh, 1.0) if s.splits == splits)


@pytest.mark.parametrize(
    ("sizes", "batch", "hidden", "act", "weights"),
    [
        ((16,), 0, None, 0.0, 15728640.0),
        ((16,), None, 0, 1966080.0, 0.0),
        ((4, 4), 0, 1, 393216.0, 3145728.0),
        ((2, 8), 0, 1, 917504.0, 1048576.0),
    ],
    ids=["batch->16", "h->16", "4x4", "2x8"],
)
def test_mesh_tensorflow_all_reduces_of_a_feed_forward_layer(
    sizes: tuple[int, ...], batch: int | None, hidden: int | None, act: float, weights: float
) -> None:
    mesh = ideal_mesh(sizes)
    place = {batch: ("m", "m"), hidden: ("n", "k")}
    first = tuple(place[a][0] for a in range(len(sizes)))
    second = tuple(place[a][1] for a in range(len(sizes)))
    rows = "".join("S0" if a == batch else "R" for a in range(len(sizes)))
    inner = "".join("S0" if a == batch else "S1" for a in range(len(sizes)))
    one = _named(call("MatMul", ["x 512 1024", "w 1024 4096"], ["x 512 4096"]), mesh, first)
    two = _named(call("MatMul", ["x 512 4096", "w 4096 1024"], ["x 512 1024"]), mesh, second)
    assert _feed_forward(mesh, one, two, rows, inner, rows) == (act, weights)


PRODUCT = NamedProgram(
    (
        NamedTensor("x", ("a", "b"), (10, 5)),
        NamedTensor("w", ("b", "c"), (5, 20)),
        NamedTensor("y", ("a", "c"), (10, 20)),
    ),
    (NamedOperation(("x", "w"), ("y",)),),
)


@pytest.mark.parametrize(
    ("mesh", "unsplittable", "layout", "peak"),
    [
        ({"m1": 4, "m2": 2}, (), "a:m2;c:m1", 300.0),
        ({"m1": 4, "m2": 2, "m3": 1}, (), "a:m2;b:m3;c:m1", 300.0),
        ({"m1": 4, "m2": 2}, ("a", "c"), "", 1400.0),
    ],
    ids=["layout", "with_m3_1", "unsplittable_ac"],
)
def test_mesh_tensorflow_layouts(mesh: dict[str, int], unsplittable: tuple[str, ...], layout: str, peak: float) -> None:
    answer = best_layout(PRODUCT, mesh, unsplittable=unsplittable)
    assert (str(answer), answer.peak_bytes) == (layout, peak)
    assert str(brute_force_layout(PRODUCT, mesh, unsplittable=unsplittable)) == layout


def test_mesh_tensorflow_assignments_of_3_dims_to_2_axes() -> None:
    assert len(list(assignments(("a", "b", "c"), ("m1", "m2")))) == 13


@pytest.mark.parametrize(
    ("parameters", "ranks", "model_state", "elements"),
    [
        (7_500_000_000, 64, (120e9, 31.40625e9, 16.640625e9, 1.875e9), (15e9, 15e9, 15e9, 22.5e9)),
        (1_500_000_000, 8, (24e9, 8.25e9, 5.625e9, 3e9), (3e9, 3e9, 3e9, 4.5e9)),
    ],
    ids=["7.5B on 64", "1.5B on 8"],
)
def test_zero_state_and_communication(
    parameters: int, ranks: int, model_state: tuple[float, ...], elements: tuple[float, ...]
) -> None:
    """Mixed-precision Adam: 2 bytes of weight, 2 of gradient, 12 of state a parameter."""
    mesh, state = ideal_mesh((ranks,)), StateBytes(2, 2, 12)
    for stage in range(4):
        choice = zero_choice(stage)
        assert state.held((parameters,), choice, mesh.sizes) == model_state[stage]
        steps = weight_steps(mesh, (parameters,), choice, parse_layout("R", 1), parse_layout("P", 1))
        passes = (s.payload_bytes * (2 if s.what == "all-reduce" else 1) for s in steps)  # papers drop (n - 1) / n
        assert sum(passes) == elements[stage]


def test_autoddl_linear_layer_on_64_devices() -> None:
    """b = i = o = 4096: data parallel all-reduces the weight's gradient; in two dimensions each of x, y, w is gathered
    or scattered over rows or columns of an 8 x 8 grid, x and w once more in backward."""
    what = call("MatMul", ["x 4096 4096", "w 4096 4096"], ["x 4096 4096"])
    line, grid = ideal_mesh((64,)), ideal_mesh((8, 8))
    data = _named(what, line, ("m",))
    steps = reshard(line, (4096, 4096), 1.0, dict(data.read_gradients)[1], parse_layout("R", 1))
    assert sum(s.sent_bytes for s in steps) == 33030144.0
    both = _named(what, grid, ("m", "n"))
    rest = parse_layout("S0S1", 2)
    choice = WeightChoice(rest, rest, rest)
    total = 0.0
    for p in (0, 1):
        used, gradient = dict(both.reads)[p], dict(both.read_gradients)[p]
        total += sum(s.sent_bytes for s in weight_steps(grid, (4096, 4096), choice, used, gradient))
    assert dict(both.writes)[0] == rest
    assert total == 11010048.0


@pytest.mark.parametrize(("before", "after", "factor"), [("P", "R", 2.0), ("P", "S0", 1.0), ("S0", "R", 1.0)])
def test_autoddl_collectives_in_units_of_the_payload(before: str, after: str, factor: float) -> None:
    steps = reshard(ideal_mesh((8,)), (64,), 1.0, parse_layout(before, 1), parse_layout(after, 1))
    assert sum(s.sent_bytes for s in steps) == factor * 7 / 8 * 64
