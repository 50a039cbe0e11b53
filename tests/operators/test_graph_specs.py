"""Which tensors need gradients, and the descriptions of whole graphs."""

from __future__ import annotations

from planner.operators import graph_specs, needs_gradient
from tests.operators.calls import graph, node


def test_only_what_comes_after_a_trainable_weight_needs_a_gradient() -> None:
    g = graph(
        {
            "image": "i 2 4", "scale": "c 4", "scaled": "x 2 4", "frozen": "w 4 4", "features": "x 2 4",
            "weight": "w 4 3", "logits": "x 2 3", "mask": "x:bool 2 3", "best": "x:int64 2",
        },
        [
            node("Mul", "image scale", "scaled"),
            node("MatMul", "scaled frozen", "features"),
            node("MatMul", "features weight", "logits"),
            node("IsNaN", "logits", "mask"),
            node("ArgMax", "logits", "best", axis=1, keepdims=0),
        ],
        frozen=["frozen"],
    )  # fmt: skip
    assert needs_gradient(g) == {"weight", "logits"}
    scale, frozen, head, *_ = graph_specs(g)
    assert scale.backward.byte_count == frozen.backward.byte_count == 0
    assert (frozen.input_grad_matrix_flops, frozen.weight_grad_matrix_flops) == (0, 0)
    assert (head.input_grad_matrix_flops, head.weight_grad_matrix_flops) == (0, 2 * 2 * 4 * 3)
    assert [s.source for s in head.saved] == ["input"]


def test_gradients_stop_at_ports_that_have_none() -> None:
    g = graph(
        {
            "ids": "i:int64 2", "table": "w 9 4", "rows": "x 2 4", "steps": "x 2 4",
            "out": "x 2 4", "w": "w 4", "y": "x 2 4",
        },
        [
            node("Gather", "table ids", "rows"),
            node("Floor", "rows", "steps"),
            node("Mul", "steps steps", "out"),
            node("Mul", "out w", "y"),
        ],
    )  # fmt: skip
    assert needs_gradient(g) == {"table", "rows", "w", "y"}


def test_fake_quantisation_passes_gradients_straight_through() -> None:
    g = graph(
        {
            "x": "i 2 4", "w": "w 4 4", "h": "x 2 4", "s": "c", "q": "x:int8 2 4",
            "d": "x 2 4", "v": "w 4 4", "y": "x 2 4",
        },
        [
            node("MatMul", "x w", "h"),
            node("QuantizeLinear", "h s", "q"),
            node("DequantizeLinear", "q s", "d"),
            node("MatMul", "d v", "y"),
        ],
    )  # fmt: skip
    assert needs_gradient(g) == {"w", "h", "q", "d", "v", "y"}
    assert graph_specs(g)[3].input_grad_matrix_flops == 2 * 2 * 4 * 4


def test_equal_calls_are_described_once() -> None:
    g = graph(
        {"x": "i 2 4", "w0": "w 4 4", "a": "x 2 4", "w1": "w 4 4", "b": "x 2 4", "w2": "w 4 4", "c": "x 2 4"},
        [node("MatMul", "x w0", "a"), node("MatMul", "a w1", "b"), node("MatMul", "b w2", "c")],
    )
    first, second, third = graph_specs(g)
    assert second is third
    assert first.input_grad_matrix_flops == 0
    assert second.input_grad_matrix_flops == 64


def test_a_repeated_node_costs_all_its_runs() -> None:
    tensors = {"x": "i 2 4", "w": "w 4 4", "a": "x 2 4"}
    (once,) = graph_specs(graph(tensors, [node("MatMul", "x w", "a")]))
    (thrice,) = graph_specs(graph(tensors, [node("MatMul", "x w", "a", repeat=3)]))
    assert thrice.matrix_flops == 3 * once.matrix_flops
    assert thrice.weight_grad_matrix_flops == 3 * once.weight_grad_matrix_flops
    assert thrice.forward.byte_count == 3 * once.forward.byte_count
    assert thrice.kernels == 3
    assert thrice.saved == once.saved


def test_gradients_of_a_shared_result_are_summed() -> None:
    g = graph(
        {"x": "i 2 4", "w": "w 4 4", "a": "x 2 4", "r": "x 2 4", "y": "x 2 4"},
        [node("MatMul", "x w", "a"), node("Relu", "a", "r"), node("Add", "a r", "y")],
    )
    product = graph_specs(g)[0]
    # weight gradient: 8 + 8 in, 16 out; the two gradients of a: 8 + 8 in, 8 out
    assert product.backward.byte_count == 4 * 32 + 4 * 24
    assert product.backward_kernels == 2
    assert product.backward_vector_flops == 8
