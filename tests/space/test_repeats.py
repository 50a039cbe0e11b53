"""Selective recomputation: what stages keep and repeat when modules of their layers run forward again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

import planner
from planner import Pricer
from planner.costs import profile
from planner.hardware import with_headroom
from planner.operators.modules import MODULE_KINDS, module_nodes
from planner.plans import dumps, loads
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate
from tests.shared_data import shared_path

LAYERS = 12
TOKENS, WIDTH, HEADS = 1024, 768, 12
STREAM = 2 * TOKENS * WIDTH
"""Bytes of the residual stream in bf16: Megatron's 2 s b h."""
STATISTICS = 2 * 4 * TOKENS
"""Bytes of mean and deviation of each row of a LayerNorm."""
ROWS = 4 * TOKENS * HEADS
"""Bytes of the log-sum-exp of each row of fused attention."""

KEPT = {
    # both norms' inputs and results, queries, keys, values, attention's result, 4 + 4 of the MLP
    (): 2 * (1 + 1) + 3 + 1 + 4 + 4,
    ("layernorm",): 2 * 1 + 3 + 1 + 4 + 4,
    ("act",): 2 * (1 + 1) + 3 + 1 + 4,
    ("Gelu:*",): 2 * (1 + 1) + 3 + 1 + 4,
    ("mlp",): 2 * (1 + 1) + 3 + 1,
    ("layernorm", "act"): 2 * 1 + 3 + 1 + 4,
    ("layernorm", "mlp"): 2 * 1 + 3 + 1,
    ("core_attn",): 2 * (1 + 1) + 3 + 1 + 4 + 4,
}
"""Residual streams that a layer of GPT keeps, nothing dropped out, where it repeats modules."""


def pricer(name: str, *, seq: int = TOKENS, **options: object) -> Pricer:
    job = Job(global_batch=8, precision="bf16", **options)  # type: ignore[arg-type]
    return Pricer(planner.load_graph(name, dims={"seq": seq}), planner.load_cluster("dgx-a100"), job)


@pytest.fixture(scope="module")
def gpt() -> Pricer:
    return pricer("gpt3-125m", dropout=False)


def saved(costs: BlockCosts, repeats: tuple[str, ...]) -> np.ndarray:
    if not repeats:
        return costs.saved_bytes
    assert costs.selective is not None
    return costs.selective(repeats).saved_bytes


def layer(costs: BlockCosts, number: int) -> tuple[int, int]:
    """First and last block of a layer."""
    own = [b for b, name in enumerate(costs.names) if f".h.{number}[" in f"{name}["]
    return own[0], own[-1]


@pytest.mark.parametrize("repeats", KEPT, ids="+".join)
def test_a_layer_keeps_what_its_modules_do_not_make_again(gpt: Pricer, repeats: tuple[str, ...]) -> None:
    costs, streams = gpt.costs(1), KEPT[repeats]
    first, last = layer(costs, 5)
    beside = (0 if "layernorm" in repeats else 2 * STATISTICS) + (0 if "core_attn" in repeats else ROWS)
    assert saved(costs, repeats)[first, last] == streams * STREAM + beside
    # a layer's first norm reads what the layer before made: two layers keep twice as much
    assert saved(costs, repeats)[first, layer(costs, 6)[1]] == 2 * (streams * STREAM + beside)


@pytest.mark.parametrize(("repeats", "operators"), [
    (("layernorm",), {"LayerNormalization": 24}), (("act",), {"Gelu": 12}), (("core_attn",), {"Attention": 12}),
    (("mlp",), {"Gelu": 12, "MatMul": 24}), (("mlp", "act"), {"Gelu": 12, "MatMul": 24}),
])  # fmt: skip
def test_the_time_is_that_of_the_operators(gpt: Pricer, repeats: tuple[str, ...], operators: dict[str, int]) -> None:
    """The last norm is part of the head, which is never repeated."""
    graph, costs = gpt.graph_at(1), gpt.costs(1)
    own = profile(graph, gpt.cluster.devices[0], precision="bf16", dropout=False)
    last = [i for i, node in enumerate(graph.nodes) if node.module.startswith("transformer.h.11.")][-1]
    within_mlp = {i for i, node in enumerate(graph.nodes) if ".mlp" in node.module}
    expected_s, count = 0.0, dict.fromkeys(operators, 0)
    for i, node in enumerate(graph.nodes[: last + 1]):
        if node.op in operators and (node.op != "MatMul" or i in within_mlp):
            expected_s += own.forward_s[i]
            count[node.op] += 1
    assert count == operators
    assert costs.selective is not None
    assert costs.selective(repeats).repeat_s.sum() == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_korthikanti_et_al_2022_table_2(fused: bool) -> None:
    """A layer keeps s b h (34 + 5 a s / h) bytes, and 34 s b h where the attention core is repeated; rows' statistics
    of norms and attention, which the formula leaves out, are less than 0.1 s b h."""
    costs = pricer("gpt3-125m", fused_attention=fused, assume_dropout=True).costs(1)
    first, last = layer(costs, 5)
    unit = TOKENS * WIDTH
    scores = 0 if fused else 5 * HEADS * TOKENS / WIDTH
    assert costs.saved_bytes[first, last] / unit == pytest.approx(34 + scores, abs=0.1)
    assert saved(costs, ("core_attn",))[first, last] / unit == pytest.approx(34, abs=0.1)


def test_lists_that_a_search_tries_free_more_and_take_longer(gpt: Pricer) -> None:
    for own in (gpt, pricer("llama2-7b"), pricer("deepseek-v3", seq=256)):
        costs = own.costs(1)
        assert costs.selective is not None
        kept, took = [float(costs.saved_bytes[0, -1])], [0.0]
        for repeats in costs.selective.offered:
            prices = costs.selective(repeats)
            kept.append(float(prices.saved_bytes[0, -1]))
            took.append(float(prices.repeat_s.sum()))
            assert (prices.saved_bytes <= costs.saved_bytes).all()
            assert (prices.repeat_s <= costs.forward_s).all()
        assert len(kept) > 2
        assert kept == sorted(kept, reverse=True)
        assert took == sorted(took)


def test_the_lists_of_a_model_with_latent_attention_and_experts() -> None:
    costs = pricer("deepseek-v3", seq=256).costs(1)
    assert costs.selective is not None
    assert set(costs.selective.offered[-1]) == {"layernorm", "moe_act", "mla_up_proj"}
    at = costs.names.index("model.layers.20[2/2]")
    experts, tokens, width = 8, 256, 2048  # experts that a token is sent to, and the width of each
    rows = -(-tokens * experts // 256) * 256  # each expert has room for as many tokens
    freed = costs.saved_bytes[at, at] - saved(costs, ("moe_act",))[at, at]
    assert freed == 2 * rows * width  # the product of the halves in bf16; no kernel keeps what Swish made of one


@pytest.mark.parametrize(("name", "kinds"), [
    ("llama2_7b_opset23", {"mlp"}),
    ("gpt2_124m_metadata", {"mlp"}),
    ("mixtral_8x7b_batched", {"moe", "moe_act", "expert_fc1"}),
    ("families/deepseek_v3.dynamo", {"mla_up_proj", "mlp", "moe", "moe_act", "shared_experts", "expert_fc1"}),
])  # fmt: skip
def test_modules_are_found_in_exports(name: str, kinds: set[str]) -> None:
    graph = planner.load_graph(shared_path(f"onnx/{name}.onnx"))
    everywhere = {"layernorm", "act", "core_attn", "attn_norm", "qkv_linear", "attn_proj", "mlp_norm"}
    assert {kind for kind in MODULE_KINDS if module_nodes(graph, kind)} == kinds | everywhere


@pytest.mark.parametrize(("choice", "message"), [
    ("moe_act", "the model has no moe_act to recompute or offload"),
    ("layrnorm", "nothing to recompute or offload is called 'layrnorm'"),
    ("layernorm,*.nothing.*", "nothing to recompute or offload is called '\\*.nothing.\\*'"),
])  # fmt: skip
def test_what_the_model_lacks_is_said_by_name(choice: str, message: str) -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 64}), planner.load_cluster("dgx-a100")
    with pytest.raises(planner.JobError, match=message):
        planner.plan(graph, cluster, Job(global_batch=8, recompute=choice))
    degrees = planner.Degrees(repeats=planner.recomputed_modules(choice))
    with pytest.raises(planner.JobError, match=message):
        planner.predict(graph, cluster, Job(global_batch=8), degrees)


def one_stage(repeats: tuple[str, ...], blocks: int, *, recompute: bool = False) -> Configuration:
    return Configuration((StageChoice(0, blocks, 1, recompute, repeats=repeats),), 8, 1, 1, "1f1b")


def test_the_judge_counts_time_and_bytes(gpt: Pricer) -> None:
    costs, cluster = gpt.costs(1), with_headroom(gpt.cluster, 0.05)
    job = Job(global_batch=8, precision="bf16", dropout=False)
    blocks = len(costs.names)
    terms = {
        repeats: evaluate(costs, cluster, job, one_stage(repeats, blocks)).stages[0] for repeats in KEPT
    }  # fmt: skip
    plain = terms[()]
    for repeats, own in terms.items():
        assert costs.selective is not None
        again_s = float(costs.selective(repeats).repeat_s.sum()) if repeats else 0.0
        assert own.recompute_s == pytest.approx(again_s)
        assert own.backward_s == pytest.approx(plain.backward_s + again_s)
        assert own.unit_bytes == saved(costs, repeats)[0, -1]
    # one MLP at a time is brought back, after the head has freed what it keeps
    head = float(costs.kept_bytes.sum()) if costs.kept_bytes is not None else 0.0
    working = terms[("mlp",)].memory.activations - terms[("mlp",)].unit_bytes
    assert working == max(0.0, 8 * STREAM - head)


def test_all_layers_and_some_modules_are_not_said_at_once(gpt: Pricer) -> None:
    costs = gpt.costs(1)
    both = one_stage(("act",), len(costs.names), recompute=True)
    verdict = evaluate(costs, gpt.cluster, Job(global_batch=8, precision="bf16"), both)
    assert [violation.kind for violation in verdict.violations] == ["option"]
    assert "repeats all layers, and act with them" in verdict.violations[0].message


@pytest.mark.parametrize("choice", ["never", "always", "layers", "layernorm,act"])
def test_a_job_allows_its_choice_alone(gpt: Pricer, choice: str) -> None:
    costs, job = gpt.costs(1), Job(global_batch=8, precision="bf16", recompute=choice)
    allowed = {"never": {(False, ())}, "always": {(True, ())}, "layers": {(False, ()), (True, ())}}.get(
        choice, {(False, ("layernorm", "act"))}
    )
    for recompute, repeats in itertools.product((False, True), ((), ("act",), ("layernorm", "act"))):
        if not (recompute and repeats):
            stages = one_stage(repeats, len(costs.names), recompute=recompute)
            verdict = evaluate(costs, gpt.cluster, job, stages)
            assert any("--recompute" in v.message for v in verdict.violations) == ((recompute, repeats) not in allowed)


def test_what_runs_again_on_several_ranks_communicates_again() -> None:
    """Two ranks that cut the sequence between blocks: a norm's result is gathered once more for the products that read
    it whole, and the result of an MLP is scattered once more."""
    own = pricer("gpt3-125m", dropout=False)
    cut = [costs for costs in own.shardings_of(1, 2) if "sequence" in costs.label]
    costs = min(cut, key=lambda each: float(each.parameter_elements.sum()))
    graph, shares, b = own.graph_at(1), own.profiles(1)[0].at(0.5)[0], layer(costs, 5)[1]
    (known, _), nodes = own.entry(1, costs.sharding), own.chain.blocks[b].nodes
    point = known.inner.blocks[b].named(known.costs.points[b])
    moved_s = {c.tensor: c.seconds for c in point.communication if c.phase == "forward"}
    gathered_s = sum(moved_s[name] for i in nodes if "Norm" in graph.nodes[i].op for name in graph.nodes[i].outputs)
    scattered_s = sum(moved_s.values()) - gathered_s
    assert min(gathered_s, scattered_s) > 0
    assert costs.selective is not None
    norm_s, mlp_s = (costs.selective((name,)).repeat_s[0, b] for name in ("layernorm", "mlp"))
    assert norm_s == pytest.approx(sum(shares[i] for i in nodes if "Norm" in graph.nodes[i].op) + gathered_s)
    work_s = sum(shares[i] for i in nodes if graph.nodes[i].op in ("MatMul", "Gelu"))
    assert mlp_s == pytest.approx(work_s + scattered_s)
    freed = costs.saved_bytes[b, b] - costs.selective(("mlp",)).saved_bytes[b, b]
    assert freed == 2 * 4 * STREAM / 2


def edited(change: Callable[[StageChoice], StageChoice], plan: planner.Plan) -> planner.Plan:
    stages = tuple(change(stage) for stage in plan.configuration.stages)
    return dataclasses.replace(plan, configuration=dataclasses.replace(plan.configuration, stages=stages))


def test_a_plan_file_names_the_modules_and_is_checked_by_them() -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100")
    plan = planner.plan(graph, cluster, Job(global_batch=8, recompute="layernorm,act"))
    assert {stage.repeats for stage in plan.stages} == {("layernorm", "act")}
    assert not any(stage.recompute for stage in plan.stages)
    again = loads(dumps(plan))
    assert again == plan
    assert planner.check_plan(again, graph, cluster).findings == ()
    assert "recompute layernorm+act" in str(planner.report.explanation_report(planner.plans.explain_plan(plan)))
    lighter = edited(lambda stage: dataclasses.replace(stage, repeats=()), again)
    assert planner.check_plan(lighter, graph, cluster).findings
