"""Annotations: which tensors are meant, how they spread, where they contradict each other, and mixtures of experts."""

from __future__ import annotations

import pytest

from planner.errors import InfeasibleError, UsageError
from planner.graph import Graph
from planner.sharding import (
    Setting,
    TensorChoice,
    ideal_mesh,
    layout_text,
)
from planner.sharding.problem import rest_of
from planner.sharding.searches import ShardingAnswer, get
from planner.sharding.searches.gshard import propagate, resolve
from tests.operators.calls import graph, node
from tests.sharding.graphs import attention_block, products, setting


def _spread(what: Graph, sizes: tuple[int, ...], annotations: dict[str, str]) -> dict[str, str]:
    one = setting(what, sizes, annotations=annotations)
    return {n: layout_text(x) for n, x in propagate(one, resolve(one)).items()}


def _rests(answer: ShardingAnswer) -> dict[str, str]:
    return {n: layout_text(rest_of(c).value) for n, c in answer.decision.items() if not n.startswith("op:")}


def test_a_batch_annotation_spreads_to_all_activations_and_no_weight() -> None:
    found = _spread(products([8, 16, 8], relu=True), (4,), {"x": "S0"})
    assert found == {"x": "S0", "w0": "R", "h0": "S0", "r0": "S0", "w1": "R", "h1": "S0"}


def test_a_column_annotation_becomes_the_row_cut_of_the_next_weight() -> None:
    found = _spread(products([8, 16, 8], relu=True), (4,), {"w0": "S1"})
    assert found == {"x": "R", "w0": "S1", "h0": "S1", "r0": "S1", "w1": "S0", "h1": "R"}


def test_it_spreads_backward_too() -> None:
    found = _spread(products([8, 16, 8], relu=True), (4,), {"r0": "S1"})
    assert (found["h0"], found["w0"], found["w1"], found["h1"]) == ("S1", "S1", "S0", "R")


def test_two_annotations_make_megatrons_layout_of_a_block() -> None:
    found = _spread(attention_block(), (4,), {"wq": "S1", "wu": "S1"})
    assert {n: found[n] for n in ("wq", "wk", "wv", "wo", "wu", "wd")} == {
        "wq": "S1", "wk": "S1", "wv": "S1", "wo": "S0", "wu": "S1", "wd": "S0",
    }  # fmt: skip
    assert (found["q2"], found["a"], found["u"], found["s1"]) == ("S1", "S1", "S2", "R")


def test_axes_spread_apart_from_each_other() -> None:
    found = _spread(products([8, 16, 8]), (2, 4), {"x": "S0?", "w0": "?S1"})
    assert found == {"x": "S0R", "w0": "RS1", "h0": "S0S1", "w1": "RS0", "h1": "S0R"}


def test_a_contradiction_names_both_annotations_and_the_operator() -> None:
    one = setting(products([8, 16, 8]), (4,), annotations={"x": "S0", "w0": "S1"})
    with pytest.raises(InfeasibleError, match=r"'x: S0' and 'w0: S1' meet at h0 \(MatMul\)"):
        get("gshard-propagate")(one)
    answer = get("gshard")(one)
    assert answer.verdict.violations == []
    assert (_rests(answer)["x"], _rests(answer)["w0"]) == ("S0", "S1")
    assert answer.verdict.communication, "the layout is changed between them"


def test_two_wishes_for_one_tensor() -> None:
    block = attention_block()
    with pytest.raises(UsageError, match=r"'w\[qk\]: S1' and 'w\[kv\]: S0' ask for two layouts of wk"):
        resolve(setting(block, (4,), annotations={"w[qk]": "S1", "w[kv]": "S0"}))
    exact = resolve(setting(block, (4,), annotations={"w[qkv]": "S1", "wk": "R"}))
    assert {n: a.origin for n, a in exact.items()} == {"wq": "w[qkv]: S1", "wk": "wk: R", "wv": "w[qkv]: S1"}


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"wz": "S1"}, "no tensor is called 'wz'.*did you mean"),
        ({"wq": "S1R"}, "no layout on 1 mesh axes"),
        ({"wq": "S7"}, "no dimension 7"),
        ({"x": "S0"}, "does not divide by 3"),
    ],
)
def test_wishes_that_cannot_be(annotations: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(setting(attention_block(), (3,), annotations=annotations))


@pytest.mark.parametrize("annotations", [{"x": "S0"}, {"w[qkvu]": "S1"}, {"x": "S1", "wu": "S1"}])
def test_completion_is_never_slower_than_propagation_and_never_faster_than_free_choice(
    annotations: dict[str, str],
) -> None:
    one = setting(attention_block(), (4,), 50.0, annotations=annotations)
    free, complete = get("gshard")(setting(attention_block(), (4,), 50.0)).verdict.seconds, get("gshard")(one)
    assert complete.verdict.violations == []
    assert free <= complete.verdict.seconds * (1 + 1e-9)
    for name, text in _rests(complete).items():
        if name in annotations:
            assert text == annotations[name]
    try:
        spread = get("gshard-propagate")(one)
    except InfeasibleError:
        return
    assert spread.verdict.violations == []
    assert complete.verdict.seconds <= spread.verdict.seconds * (1 + 1e-9)


def mixture(groups: int = 8, tokens: int = 16, width: int = 8, experts: int = 4, hidden: int = 32) -> Graph:
    """GShard's layer: one-hot products dispatch tokens to experts and combine what those make."""
    places = 2 * tokens // experts
    sizes = {
        "x0": f"x {groups} {tokens} {width}", "g": f"w {width}", "x": f"x {groups} {tokens} {width}",
        "mask": f"i:float32 {groups} {experts * places} {tokens}",
        "back": f"i:float32 {groups} {tokens} {experts * places}",
        "sent": f"x {groups} {experts * places} {width}", "apart": f"x {groups} {experts} {places} {width}",
        "turned": f"x {experts} {groups} {places} {width}", "rows": f"x {experts} {groups * places} {width}",
        "w1": f"w {experts} {width} {hidden}", "h": f"x {experts} {groups * places} {hidden}",
        "r": f"x {experts} {groups * places} {hidden}", "w2": f"w {experts} {hidden} {width}",
        "o": f"x {experts} {groups * places} {width}", "o1": f"x {experts} {groups} {places} {width}",
        "o2": f"x {groups} {experts} {places} {width}", "o3": f"x {groups} {experts * places} {width}",
        "y": f"x {groups} {tokens} {width}", "s4": "c:int64 4", "s3": "c:int64 3",
    }  # fmt: skip
    nodes = [
        node("Mul", "x0 g", "x"),
        node("MatMul", "mask x", "sent"),
        node("Reshape", "sent s4", "apart"),
        node("Transpose", "apart", "turned", perm=(1, 0, 2, 3)),
        node("Reshape", "turned s3", "rows"),
        node("MatMul", "rows w1", "h"),
        node("Relu", "h", "r"),
        node("MatMul", "r w2", "o"),
        node("Reshape", "o s4", "o1"),
        node("Transpose", "o1", "o2", perm=(1, 0, 2, 3)),
        node("Reshape", "o2 s3", "o3"),
        node("MatMul", "back o3", "y"),
    ]
    return graph(sizes, nodes)


def test_dispatch_and_combine_are_all_to_alls() -> None:
    """Groups cut for the tokens, experts cut for the weights, each rank sends 3/4 of 8 x 4 x 8 x 8 / 4 elements."""
    one = setting(mixture(), (4,), 100.0, annotations={"x": "S0", "y": "S0", "w1": "S0", "w2": "S0"})
    answer = get("gshard")(one)
    moves = [(c.phase, s.what, s.sent_bytes) for c in answer.verdict.communication for s in c.steps
             if c.phase != "step" and "all-to-all" in s.what]  # fmt: skip
    local = 8 * 4 * 8 * 8 / 4 * 2 * 3 / 4
    assert sorted(moves) == [("backward", "all-to-all", local)] * 2 + [("forward", "all-to-all", local)] * 2
    assert answer.verdict.violations == []


def test_the_search_itself_finds_expert_parallelism_where_weights_are_large() -> None:
    one = setting(mixture(tokens=8, width=512, hidden=2048), (4,), 1e9)
    answer = get("gshard")(one)
    rests = _rests(answer)
    assert (rests["w1"], rests["w2"]) == ("S0", "S0")
    assert isinstance(answer.decision["x"], TensorChoice)


def test_an_annotated_network_input_is_read_as_written() -> None:
    tensors = {"ids": "i:int64 8 16", "w": "w 64 8", "e": "x 8 16 8", "v": "w 8 8", "y": "x 8 16 8"}
    what = graph(tensors, [node("Gather", "w ids", "e"), node("MatMul", "e v", "y")])
    one: Setting = setting(what, ideal_mesh((4,)), 10.0, annotations={"ids": "S0"})
    for name in ("gshard", "gshard-propagate"):
        assert layout_text(rest_of(get(name)(one).decision["e"]).value) == "S0"
    impossible = setting(what, ideal_mesh((4,)), 10.0, annotations={"ids": "P"})
    with pytest.raises(InfeasibleError, match="cannot read it so"):
        get("gshard")(impossible)
