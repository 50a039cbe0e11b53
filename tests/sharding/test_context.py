"""Context parallelism: steps cut everywhere, attention by a ring, against Megatron's sequence parallelism."""

from __future__ import annotations

import pytest

from planner.errors import InfeasibleError, UsageError
from planner.graph import Graph
from planner.hardware import load_cluster
from planner.sharding import Setting, Strategy, TensorChoice, layout_text, mesh_on
from planner.sharding.searches import get
from planner.sharding.searches.context import CausalOrder, busiest_share
from tests.operators.calls import graph, node
from tests.sharding.graphs import attention_block, products, setting


def _long(steps: int, width: int = 1024, heads: int = 16) -> Graph:
    return attention_block(batch=1, steps=steps, width=width, heads=heads, inner=4 * width)


def _written_out(batch: int = 2, steps: int = 16, width: int = 8) -> Graph:
    """Attention as two products and a softmax."""
    full, scores = f"x {batch} {steps} {width}", f"x {batch} {steps} {steps}"
    tensors = {"x": full, "wq": f"w {width} {width}", "wk": f"w {width} {width}", "q": full, "k": full,
               "t": f"x {batch} {width} {steps}", "s": scores, "p": scores, "y": full}  # fmt: skip
    nodes = [
        node("MatMul", "x wq", "q"),
        node("MatMul", "x wk", "k"),
        node("Transpose", "k", "t", perm=(0, 2, 1)),
        node("MatMul", "q t", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p k", "y"),
    ]
    return graph(tensors, nodes)


def test_every_activation_is_cut_along_its_steps_and_no_weight_is() -> None:
    one = setting(attention_block(), (4,), 50.0, sharded_states=False)
    answer = get("context")(one)
    assert answer.verdict.violations == []
    rests = {n: layout_text(c.value) for n, c in answer.decision.items() if isinstance(c, TensorChoice)}
    assert {rests[n] for n in ("x", "n1", "q0", "q1", "s1", "u", "d", "y")} == {"S1"}
    assert {rests[n] for n in ("q2", "k2", "v2", "a")} == {"S2"}
    operators = {n: s.splits for n, s in answer.decision.items() if isinstance(s, Strategy)}
    assert operators["op:a"] in (("ring",), ("s",))
    weights = [s for c in answer.verdict.communication for s in c.steps if c.tensor.startswith("w")]
    assert {s.what for s in weights} <= {"all-reduce"}


@pytest.mark.parametrize(("name", "splits"), [("context", {("ring",), ("s",)}), ("context-ring", {("ring",)})])
def test_keys_and_values_go_around_and_the_weights_gradients_are_summed(name: str, splits: set[tuple[str]]) -> None:
    """16,384 steps of width 1,024 on 8 ranks: 7 hops of two pieces of 2,048 steps forward, of four backward.

    Gathering both in either pass and scattering both gradients sends the same.
    """
    cluster = load_cluster("dgx-a100")
    one = setting(_long(16384), mesh_on(cluster, {"context": 8}), 1e-3, sharded_states=False)
    answer = get(name)(one)
    moved = 7 * (2 + 4) * 2048 * 1024 * 2
    weights = 2 * 7 / 8 * (4 * 1024**2 + 2 * 1024 * 4096 + 4 * 1024) * 2
    assert answer.verdict.violations == []
    assert answer.verdict.sent_bytes == pytest.approx(weights + moved)
    attention = answer.decision["op:a"]
    assert isinstance(attention, Strategy)
    assert attention.splits in splits


@pytest.mark.parametrize(("steps", "faster"), [(2048, "megatron"), (131072, "context")])
def test_long_sequences_want_context_parallelism_and_short_ones_megatrons(steps: int, faster: str) -> None:
    """Megatron moves 8 times the activations of a layer, context parallelism keys and values and its weights."""
    cluster = load_cluster("dgx-a100")
    work = 1e-6 * steps / 2048
    what = _long(steps, 4096, 32)
    by_name = {
        name: get(name)(setting(what, mesh_on(cluster, {"context": 8}), work, tied={"y": "x"}, sharded_states=False))
        for name in ("context", "megatron")
    }
    assert all(a.verdict.violations == [] for a in by_name.values())
    assert min(by_name, key=lambda n: by_name[n].verdict.seconds) == faster


def test_attention_written_out_gathers_keys_and_keeps_the_queries_cut() -> None:
    one = setting(_written_out(), (4,), 50.0, sharded_states=False)
    answer = get("context")(one)
    assert answer.verdict.violations == []
    rests = {n: layout_text(c.value) for n, c in answer.decision.items() if isinstance(c, TensorChoice)}
    assert (rests["s"], rests["p"], rests["y"]) == ("S1", "S1", "S1")
    gathers = [c.tensor for c in answer.verdict.communication if c.phase == "forward"]
    assert set(gathers) & {"k", "t"}


def test_the_axis_called_context_is_the_one() -> None:
    cluster = load_cluster("dgx-a100")
    one = setting(attention_block(), mesh_on(cluster, {"context": 2, "tensor": 4}), 1e-3)
    answer = get("context")(one)
    rest = answer.decision["n1"]
    assert isinstance(rest, TensorChoice)
    assert layout_text(rest.value).startswith("S1")
    assert get("ilp")(one).verdict.seconds <= answer.verdict.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "contiguous", "paired"), [(1, 0.5, 0.5), (2, 0.375, 0.25), (4, 0.21875, 0.125), (8, 0.1171875, 0.0625)]
)
def test_causal_rings(ranks: int, contiguous: float, paired: float) -> None:
    assert busiest_share(ranks, CausalOrder.CONTIGUOUS) == contiguous
    assert busiest_share(ranks, CausalOrder.PAIRED) == paired


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_equal_counting_blocks_hop_by_hop(ranks: int) -> None:
    """A score matrix of 2n x 2n quarters: at each hop the slowest rank counts; diagonal quarters are half."""
    held = {
        CausalOrder.CONTIGUOUS: [(2 * r, 2 * r + 1) for r in range(ranks)],
        CausalOrder.PAIRED: [(r, 2 * ranks - 1 - r) for r in range(ranks)],
    }
    for order, chunks in held.items():
        total = 0.0
        for hop in range(ranks):
            total += max(
                sum(1.0 if q > k else 0.5 * (q == k) for q in chunks[r] for k in chunks[(r - hop) % ranks])
                for r in range(ranks)
            )
        assert busiest_share(ranks, order) == pytest.approx(total / (2 * ranks) ** 2)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="ring of 0"):
        busiest_share(0, CausalOrder.PAIRED)
    with pytest.raises(InfeasibleError, match="no activation has a dimension of steps"):
        get("context")(setting(products([8, 8]), (2,)))
    one: Setting = setting(attention_block(), (4,))
    with pytest.raises(InfeasibleError, match="fits 10 B a device"):
        get("context")(one, memory_bytes=10.0)
