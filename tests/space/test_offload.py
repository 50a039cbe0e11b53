"""Activations in the host's memory: what moves there, what it takes, and which limits hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import Pricer
from planner.plans import dumps, loads
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate
from planner.space.types import StageTerms
from tests.space.test_repeats import ROWS, STATISTICS, STREAM, edited, layer, pricer

JOB = Job(global_batch=8, precision="bf16", dropout=False, overlap=0.5)
HOST = 23e9
"""Bytes a second between an A100 and its host: three quarters of PCIe 4 x16."""

MOVED = {
    # residual streams of a layer of GPT, and bytes beside them, that modules alone keep
    ("core_attn",): (3, ROWS),  # queries, keys, values; the projection keeps the result, too
    ("attn_proj",): (0, 0),
    ("core_attn", "attn_proj"): (4, ROWS),
    ("attn_norm",): (1, STATISTICS),
    ("layernorm",): (2, 2 * STATISTICS),
    ("qkv_linear",): (1, 0),
    ("act",): (4, 0),
    ("mlp",): (1 + 4 + 4, 0),
    ("Gelu",): (4, 0),
}


@pytest.fixture(scope="module")
def gpt() -> Pricer:
    return pricer("gpt3-125m", dropout=False)


def one_stage(costs: BlockCosts, **choice: Any) -> Configuration:
    return Configuration((StageChoice(0, len(costs.names), 1, **choice),), 8, 1, 1, "1f1b")


def terms(gpt: Pricer, **choice: Any) -> StageTerms:
    costs = gpt.costs(1)
    verdict = evaluate(costs, gpt.cluster, JOB, one_stage(costs, **choice))
    assert not verdict.violations
    return verdict.stages[0]


@pytest.mark.parametrize("modules", MOVED, ids="+".join)
def test_what_only_the_modules_keep_moves(gpt: Pricer, modules: tuple[str, ...]) -> None:
    costs, (streams, beside) = gpt.costs(1), MOVED[modules]
    assert costs.selective is not None
    prices, (first, last) = costs.selective((), modules), layer(costs, 5)
    moved = streams * STREAM + beside
    assert prices.moved_bytes[first, last] == moved
    assert prices.moved_bytes[first, layer(costs, 6)[1]] == 2 * moved
    assert (prices.moved_bytes + prices.saved_bytes == costs.saved_bytes).all()
    assert not prices.repeat_s.any()


@pytest.mark.parametrize(("repeats", "offload", "moved"), [
    (("layernorm",), ("qkv_linear",), 0),  # the norm's result is made again
    (("layernorm",), ("layernorm",), 2 * STREAM),  # its operand is kept, the statistics are not
    (("act",), ("mlp",), (1 + 4) * STREAM),
    (("mlp",), ("mlp",), STREAM),  # what an MLP reads is kept to repeat it
])  # fmt: skip
def test_what_is_repeated_does_not_move(
    gpt: Pricer, repeats: tuple[str, ...], offload: tuple[str, ...], moved: int
) -> None:
    costs = gpt.costs(1)
    assert costs.selective is not None
    first, last = layer(costs, 5)
    plain, own = costs.selective(repeats), costs.selective(repeats, offload)
    assert own.moved_bytes[first, last] == moved
    assert (own.moved_bytes + own.saved_bytes == plain.saved_bytes).all()
    assert (own.repeat_s == plain.repeat_s).all()


def test_the_way_to_the_host_hides_behind_half_of_a_pass(gpt: Pricer) -> None:
    plain = terms(gpt)
    some, many = (
        terms(gpt, offload=("qkv_linear",)),
        terms(gpt, offload=("qkv_linear", "core_attn", "attn_proj", "mlp")),
    )
    assert some.host_bytes == 12 * STREAM
    assert many.host_bytes == 12 * ((1 + 4 + 9) * STREAM + ROWS)
    for own in (some, many):
        assert own.move_s == pytest.approx(own.host_bytes / HOST)
        for name in ("forward_s", "backward_s"):
            work_s = getattr(plain, name)
            assert getattr(own, name) == pytest.approx(work_s + max(0.0, own.move_s - 0.5 * work_s))
    assert some.move_s < 0.5 * plain.forward_s < many.move_s


def test_two_blocks_at_a_time_are_on_the_device(gpt: Pricer) -> None:
    plain, own = terms(gpt), terms(gpt, offload=("mlp",))
    assert own.unit_bytes == plain.unit_bytes - own.host_bytes
    assert own.memory.activations == own.unit_bytes + 2 * 9 * STREAM


def test_a_stage_that_repeats_its_layers_moves_their_inputs(gpt: Pricer) -> None:
    plain, own = terms(gpt, recompute=True), terms(gpt, recompute=True, offload=("layer_input",))
    inputs = float(gpt.costs(1).checkpoint_bytes[0, -1])
    assert inputs > 12 * STREAM
    assert own.host_bytes == inputs == plain.unit_bytes - own.unit_bytes
    assert own.recompute_s == plain.recompute_s
    assert plain.memory.activations - own.memory.activations == inputs - 2 * STREAM


@pytest.mark.parametrize(("choice", "said"), [
    ({"recompute": True, "offload": ("mlp",)}, "recomputes all layers and keeps only their inputs"),
    ({"offload": ("layer_input",)}, "keeps more than layer_input"),
])  # fmt: skip
def test_what_is_not_kept_cannot_move(gpt: Pricer, choice: dict[str, Any], said: str) -> None:
    costs = gpt.costs(1)
    verdict = evaluate(costs, gpt.cluster, JOB, one_stage(costs, **choice))
    assert [violation.kind for violation in verdict.violations] == ["option"]
    assert said in verdict.violations[0].message


def test_the_hosts_memory_is_a_limit_where_it_is_stated(gpt: Pricer) -> None:
    costs = gpt.costs(1)
    choice = one_stage(costs, offload=("mlp",))
    needed = 8 * 12 * 9 * STREAM  # 8 devices of a node
    for available, kinds in ((0, []), (needed, []), (needed - 2**20, ["host"])):
        cluster = dataclasses.replace(gpt.cluster, host_memory_bytes=float(available))
        verdict = evaluate(costs, cluster, JOB, choice)
        assert [violation.kind for violation in verdict.violations] == kinds
    assert verdict.violations[0].needed == needed
    assert "node 0 keeps 1.27 GiB" in verdict.violations[0].message


def test_link_and_memory_of_the_host_come_from_the_profile(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "cluster: own\ndevices: small\nhost_memory: 512 GB\n"
        "device_types:\n  small:\n    memory: 16 GB\n    memory_bandwidth: 900 GB/s\n"
        "    matrix: {fp16: 100 TFLOP/s}\n    vector: 10 TFLOP/s\n"
        "    host_link: {value: 64 GB/s, direction: bidirectional}\n"
    )
    cluster = planner.load_cluster(own)
    assert (cluster.host_memory_bytes, cluster.devices[0].host_byte_per_s) == (512e9, 32e9)
    own.write_text(own.read_text().partition("    host_link")[0].replace("host_memory: 512 GB\n", ""))
    silent = planner.load_cluster(own)
    assert (silent.host_memory_bytes, silent.devices[0].host_byte_per_s) == (0, 24e9)
    assert silent.fingerprint == cluster.fingerprint  # plans that move nothing do not depend on it


def test_ranks_of_a_group_move_their_parts() -> None:
    own = pricer("gpt3-125m", dropout=False)
    costs = min(own.shardings_of(1, 2), key=lambda each: float(each.parameter_elements.sum()))
    assert costs.selective is not None
    prices = costs.selective((), ("core_attn", "act"))
    first, last = layer(costs, 5)
    assert prices.moved_bytes[first, last] == ((3 + 4) * STREAM + ROWS) / 2
    assert (prices.moved_bytes + prices.saved_bytes)[first, last] == costs.saved_bytes[first, last]


@pytest.mark.parametrize(("modules", "width"), [(("expert_fc1",), 4096), (("moe_act",), 2 * 14336)])
def test_experts_move_their_rows(modules: tuple[str, ...], width: int) -> None:
    """256 tokens go to 2 of 8 experts each: 512 rows, and as many on each of 8 ranks with samples of their own."""
    own = pricer("mixtral-8x7b", seq=256, dropout=False)
    for costs in (own.costs(1), own.shardings_of(8, 1, 1, 8)[0]):
        assert costs.selective is not None
        first = costs.names.index("model.layers.5[1/2]")
        assert costs.selective((), modules).moved_bytes[first, first + 1] == 512 * width * 2


def test_a_plan_file_says_what_moves_and_is_checked_by_it() -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100")
    degrees = planner.Degrees(pipeline=2, offload=("core_attn", "mlp"))
    plan = planner.predict(graph, cluster, Job(global_batch=8), degrees).plan
    assert plan.minor == 8  # since it exposes copies
    assert "offload" in plan.requires
    assert len(plan.stages[0].offloaded) == 6 * (1 + 5)  # attention; two products with biases, and Gelu
    assert plan.stages[0].offloaded[0].startswith("transformer.h.0.attn")
    again = loads(dumps(plan))
    assert again == plan
    assert planner.check_plan(again, graph, cluster).findings == ()
    text = str(planner.report.explanation_report(planner.plans.explain_plan(plan)))
    assert "offload core_attn+mlp" in text
    assert "what core_attn, mlp keep lies in the host's memory" in text
    kept = edited(lambda stage: dataclasses.replace(stage, offload=()), again)
    assert planner.check_plan(kept, graph, cluster).findings
    slower = dataclasses.replace(cluster.devices[0], host_byte_per_s=1e9)
    other = dataclasses.replace(cluster, devices=(slower,))
    assert any("move_s" in str(finding) for finding in planner.check_plan(again, graph, other).findings)


def test_many_predictions_are_those_of_one() -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100")
    asked = [planner.Degrees(pipeline=2, offload=modules) for modules in ((), ("core_attn", "mlp"), ("mpl",))]
    found = planner.predict_many(graph, cluster, Job(global_batch=8), asked)
    for number in (0, 1):
        one = planner.predict(graph, cluster, Job(global_batch=8), asked[number])
        assert found.peak_bytes[number] == pytest.approx(one.fullest.memory.total)
    assert found.peak_bytes[1] < found.peak_bytes[0]
    assert "nothing to recompute or offload is called 'mpl'" in found.reasons[2]


def test_plans_with_what_lies_in_the_host_have_the_groups_asked_for() -> None:
    graph = planner.load_graph("llama3-8b", dims={"seq": 16_384})
    job = Job(global_batch=16, tensor_parallel=(8,), backends=("megatron",))
    plan = planner.plan(graph, planner.load_cluster("dgx-a100"), job)
    assert {stage.ranks for stage in plan.configuration.stages} == {8}
