"""Training frameworks: what each takes, plans within their limits, what a plan needs that they lack."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import models
import planner
from planner.graph import Graph
from planner.importers import graph_from_proto
from planner.plans import Fault, Plan, Requirement
from planner.plans.readings import is_decoder, kinds_of_layers
from planner.sharding import attention_heads
from planner.solvers import outer, search
from planner.space import Job
from planner.space.pricer import Pricer
from planner.space.types import Structure
from planner.systems import BACKENDS, backend_names, usual_backends
from planner.systems.backends import distinct, structure_of, within_limits
from planner.systems.backends.needs import lacks
from tests.joint.enumeration import best_s, judged
from tests.joint.test_models import MACHINES, four, gpt, shelves
from tests.models import graphs

JOB = Job(global_batch=4, micro_batches=(1, 2), schedules=("1f1b",), precision="bf16")

# orders of work, ZeRO of one stage, ZeRO of several, ranks of a group, pipelines, groups
LIMITS: Mapping[str, tuple[set[str], set[int], set[int], str, bool, bool]] = {
    "megatron": ({"1f1b", "interleaved"}, {0, 1}, {0, 1}, "heads", True, True),
    "torchtitan": (
        {"1f1b", "gpipe", "interleaved", "zb-v", "dualpipe-v"}, {0, 2, 3}, {0, 1}, "key-value heads", True, True
    ),
    "deepspeed": ({"1f1b"}, {0, 1, 2, 3}, {0, 1}, "key-value heads", True, True),
    "deepspeed-zero3": (set(), {3}, {3}, "", False, False),
    "fsdp": (set(), {2, 3}, {2, 3}, "", False, False),
    "jax": (set(), {0, 1, 2, 3}, {0, 1, 2, 3}, "", False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", backend_names())
def test_what_each_framework_takes(name: str) -> None:
    backend = BACKENDS.get(name)
    piped = backend.structure.zero_in_pipelines or backend.zero
    found = (
        set(backend.schedules), set(backend.zero), set(piped), backend.structure.head_groups,
        backend.pipelines, backend.groups,
    )  # fmt: skip
    assert found == LIMITS[name]
    assert backend.structure.equal_replicas


@pytest.mark.parametrize("name", backend_names())
def test_every_ability_has_a_source(name: str) -> None:
    backend = BACKENDS.get(name)
    said = {f.name for f in dataclasses.fields(Structure) if getattr(backend.structure, f.name) != f.default}
    assert {"schedules", "zero", *said} <= backend.sources.keys()
    assert all(len(source) > 10 for source in backend.sources.values())


def test_plans_are_made_for_three_frameworks_where_nobody_says_for_what() -> None:
    assert usual_backends() == ("deepspeed", "megatron", "torchtitan")
    kinds = ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear")
    assert structure_of([BACKENDS.get(name) for name in usual_backends()]) == Structure(
        True, True, True, ("tensor", "expert", "context"), True, "heads", (0, 1),
        offloads=kinds, offload_zero=(0, 1),  # of Megatron alone
    )  # fmt: skip


def test_what_may_lie_in_the_host_is_what_frameworks_move_there() -> None:
    anything = within_limits(Job(8), ()).structure
    assert {"layer_input", "core_attn"} <= set(anything.offloads)
    assert not anything.offload_zero
    assert within_limits(Job(8), (BACKENDS.get("jax"),)).structure.offloads == ("layer_input",)
    assert within_limits(Job(8), (BACKENDS.get("torchtitan"),)).structure.offloads == ()


@functools.cache
def gpt2() -> Graph:
    """GPT-2 of 512 tokens."""
    return planner.load_graph("gpt2", dims={"seq": 512})


@functools.cache
def planned_in_pairs(name: str) -> Plan:
    """GPT-2 for a framework: pairs of ranks share the operators of one stage."""
    job = Job(64, backends=(name,), tensor_parallel=(2,), pipeline_stages=(1,), zero=(0,))
    return planner.plan(gpt2(), planner.load_cluster("dgx-h100"), job)


@pytest.mark.parametrize(
    ("name", "lies"),
    [
        ("deepspeed", {"replicated"}),
        ("megatron", {"replicated", "sequence"}),
        ("torchtitan", {"replicated", "sequence"}),
    ],
)
def test_tensors_between_layers_lie_as_a_framework_has_them(name: str, lies: set[str]) -> None:
    limited, sequence = planned_in_pairs(name), planned_in_pairs("megatron")
    assert {boundary for own in limited.shardings for boundary in own.boundaries} <= lies
    assert name in limited.runs_on
    assert {boundary for own in sequence.shardings for boundary in own.boundaries} == {"sequence"}
    said = {words for words in lacks(sequence, BACKENDS.get(name), gpt2()) if "precision" not in words}
    assert said == ({"tensors between layers cut by the sequence"} if "sequence" not in lies else set())


@functools.cache
def deep() -> Graph:
    """Four layers."""
    return graph_from_proto(models.build_custom(graphs.gpt(4, 64, 4, 128, 16), batch=1, seq=16), name="tiny")


def planned(*names: str, **limits: Any) -> Plan:
    return planner.plan(deep(), four(1e9, 10**8), dataclasses.replace(JOB, backends=names, **limits))


@functools.cache
def planned_on(machine: str, name: str, precision: str = "") -> Plan:
    """A GPT of one layer on one of the machines, for a framework or for any."""
    job = Job(global_batch=4, micro_batches=(1, 2), precision=precision, backends=(name,))
    return planner.plan(gpt(), four(*MACHINES[machine]), job)


@pytest.mark.parametrize("name", backend_names())
@pytest.mark.parametrize("machine", MACHINES)
def test_a_plan_for_a_framework_is_taken_by_it_and_no_faster_than_any(name: str, machine: str) -> None:
    devices = four(*MACHINES[machine])
    try:
        plan = planned_on(machine, name)
    except planner.InfeasibleError:
        assert machine == "scarce"
        return
    free = planned_on(machine, "any", plan.options.precision)
    assert plan.runs_on == (name,)
    assert plan.options.backends == (name,)
    assert planner.check_plan(plan, gpt(), devices, backends=(name,)).findings == ()
    assert plan.predictions.bound_s <= plan.predictions.reached_s
    assert free.predictions.bound_s <= plan.predictions.reached_s * (1 + 1e-9)
    assert plan.free_choice is not None
    assert plan.free_choice.bound_s == pytest.approx(free.predictions.bound_s, rel=1e-8)


@pytest.mark.parametrize("machine", [name for name in MACHINES if name != "scarce"])
def test_a_plan_where_nobody_says_for_what_is_as_fast_as_for_each_framework_and_proven_for_all(machine: str) -> None:
    each = [planned_on(machine, name) for name in usual_backends()]
    job = Job(global_batch=4, micro_batches=(1, 2))
    plan = planner.plan(gpt(), four(*MACHINES[machine]), job)
    assert plan.runs_on
    assert plan.predictions.reached_s <= min(other.predictions.reached_s for other in each) * 1.005
    assert plan.predictions.bound_s <= min(other.predictions.reached_s for other in each) * (1 + 1e-9)
    assert plan.predictions.bound_s >= min(other.predictions.bound_s for other in each) * (1 - 1e-9)


def test_a_framework_whose_plans_others_take_needs_no_search() -> None:
    usual = [BACKENDS.get(name) for name in usual_backends()]

    def needed(count: int, job: Job) -> list[str]:
        return [backend.key for backend in distinct(usual[:count], job)]

    assert needed(3, Job(8, precision="fp32")) == ["megatron", "torchtitan"]  # all of DeepSpeed's are theirs
    assert needed(2, Job(8, precision="bf16")) == ["deepspeed", "megatron"]  # ZeRO-2 without pipelines
    assert needed(1, Job(8, precision="bf16")) == ["deepspeed"]
    assert needed(2, Job(8, precision="bf16", optimizer="sgd")) == ["deepspeed", "megatron"]  # ZeRO shards Adam alone


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("embed", "layers.0", "layers.1[1/2]", "layers.1[2/2]", "layers.2", "layers.3", "norm"), ("layers.",)),
        (("embed", "layers.0", "layers.1", "mtp.layers.0", "head"), ("layers.",)),  # predicts one more token
        (("embed", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "head"), ("encoder.", "decoder.")),
        (("conv", "layer1.0", "layer2.0", "layer2.1", "fc"), ("layer1.", "layer2.")),
        (("conv", "fc"), ()),
    ],
)
def test_a_decoder_has_layers_of_one_kind_and_perhaps_predictors(
    names: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    assert kinds_of_layers(names) == kinds
    assert is_decoder(names) == (len(kinds) == 1)


OWN = "bf16-fp32grad"
"""In which torchtitan trains."""


@functools.cache
def llama() -> Graph:
    """Two layers whose weights are not tied."""
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    return graph_from_proto(models.build_config(config, seq=16)[0], name="llama")


@pytest.mark.parametrize(
    ("precision", "taken"),
    [("bf16", False), ("bf16-fp32grad", True), ("bf16:grads=fp32", True), ("fp16:grads=fp32", False), ("fp16", False)],
)
def test_a_precision_by_another_name_is_the_same(precision: str, *, taken: bool) -> None:
    assert BACKENDS.get("torchtitan").trains_in(precision) == taken


def test_a_framework_alone_is_planned_in_its_own_precision() -> None:
    devices = planner.load_cluster("dgx-h100")
    alone = Job(64, schedules=("gpipe",), pipeline_stages=(2,))  # neither Megatron nor DeepSpeed has GPipe's order
    for job in (Job(64, backends=("torchtitan",)), alone):
        plan = planner.plan(llama(), devices, job)
        assert plan.runs_on == ("torchtitan",)
        assert plan.options.precision == OWN
        assert planner.check_plan(plan, graph=llama(), cluster=devices).findings == ()


def test_a_framework_of_another_precision_has_the_plan_where_it_is_faster_in_its_own() -> None:
    """Fully sharded ranks that pass keys around hold a long sequence without recomputation: Megatron repeats layers."""
    graph, devices = planner.load_graph("llama3.1-8b", dims={"seq": 65536}), planner.load_cluster("dgx-h100")
    job = Job(8, pipeline_stages=(1,), micro_batches=(1,), schedules=("1f1b",), tensor_parallel=(1, 2))
    plan = planner.plan(graph, devices, job)
    assert (plan.runs_on, plan.options.precision) == (("torchtitan",), OWN)
    given = planner.plan(graph, devices, dataclasses.replace(job, precision=OWN))
    assert planner.dump_plan(given) == planner.dump_plan(plan)
    others = planner.plan(graph, devices, dataclasses.replace(job, precision="bf16"))
    assert "torchtitan" not in others.runs_on
    assert plan.predictions.reached_s < others.predictions.reached_s


def test_frameworks_are_compared_each_in_its_own_precision() -> None:
    devices, names = planner.load_cluster("dgx-h100"), ("megatron", "torchtitan")
    for given, own in (("", OWN), (OWN, OWN)):
        job = Job(64, precision=given)
        found = planner.compare_systems(Pricer(llama(), devices, job), devices, job, systems=names)
        plans, refused = planner.systems.plans_of(found)
        assert not refused
        assert plans["torchtitan"].options.precision == own
        assert plans["megatron"].options.precision == (given or "bf16")
        assert [note for note in found.notes if OWN in note] == ([f"torchtitan: in {OWN}, as it trains"] * (not given))
        alone = planner.plan(llama(), devices, Job(64, backends=("torchtitan",)))
        assert plans["torchtitan"].predictions.reached_s == pytest.approx(alone.predictions.reached_s, rel=0.006)


def test_frameworks_of_decoders_are_not_asked_about_other_models() -> None:
    resnet50, devices = planner.load_graph("resnet50"), planner.load_cluster("dgx-h100")
    assert planner.plan(resnet50, devices, Job(64, precision="bf16")).runs_on == ("deepspeed",)
    with pytest.raises(planner.JobError, match=r"Megatron trains decoders.*layer"):
        planner.plan(resnet50, devices, Job(64, precision="bf16", backends=("megatron",)))


STRUCTURES = {
    "equal replicas": Structure(equal_replicas=True),
    "alike": Structure(alike=True),
    "whole layers": Structure(whole_layers=True),
    "all": Structure(equal_replicas=True, alike=True, whole_layers=True, axes=("tensor",), powers_of_two=True),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("recompute", ["never", "auto"])
def test_the_search_within_limits_equals_enumeration(structure: str, recompute: str) -> None:
    job = dataclasses.replace(
        JOB, micro_batches=(1,), recompute=recompute, zero=(1,), structure=STRUCTURES[structure], backends=("megatron",)
    )
    devices = four(*MACHINES["scarce"])
    pricer = Pricer(gpt(), devices, job)
    answer = search(pricer.costs, devices, job, shardings=pricer)
    expected = best_s(judged(shelves(Pricer(gpt(), devices, job), job.micro_batches), devices, job))
    assert answer.best.evaluation.iteration_s == pytest.approx(expected, rel=1e-9)
    assert answer.certificate.bound_s <= expected * (1 + 1e-9)


def pipeline() -> Plan:
    """Two stages of two replicas, ZeRO-1."""
    limits = {"pipeline_stages": (2,), "data_parallel": (2,), "tensor_parallel": (1,), "zero": (1,)}
    return planned("megatron", **limits)


def grouped() -> Plan:
    """Two stages whose operators two ranks share as Megatron's do."""
    limits = {"pipeline_stages": (2,), "tensor_parallel": (2,), "micro_batches": (2,)}
    return planned("megatron", **limits)


def with_stage(plan: Plan, index: int, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)
    return dataclasses.replace(plan, stages=tuple(stages))


def lacking(plan: Plan, *names: str) -> list[str]:
    found = planner.check_plan(plan, backends=names).findings
    return [finding.message for finding in found if finding.fault == Fault.BACKEND]


def test_what_a_framework_lacks_is_said_by_name() -> None:
    plan = pipeline()
    assert lacking(plan, "megatron", "deepspeed") == []
    assert lacking(plan, "torchtitan") == [
        "torchtitan lacks tied parameters", "torchtitan lacks the precision bf16"
    ]  # fmt: skip
    assert lacking(plan, "fsdp") == ["FSDP lacks a pipeline of stages", "FSDP lacks ZeRO-1"]
    unequal = with_stage(plan, 0, replicas=plan.stages[0].replicas[:1])
    assert lacking(unequal, "megatron") == ["Megatron lacks unequal replicas (1 to 2)"]
    again = with_stage(plan, 1, recompute=True)
    assert lacking(again, "megatron") == ["Megatron lacks recomputation in some stages (1 of 2), or of unlike modules"]
    torn = next(b for b, block in enumerate(plan.block_table) if "[2/" in block.name)
    cut = with_stage(plan, 1, blocks=(torn, plan.stages[1].blocks[1]))
    assert lacking(cut, "megatron") == ["Megatron lacks layers divided between stages (before stage 1)"]
    fully = dataclasses.replace(plan, configuration=dataclasses.replace(plan.configuration, zero=3))
    assert lacking(fully, "deepspeed") == ["DeepSpeed lacks ZeRO-3 in a pipeline"]
    assert "torchtitan lacks ZeRO-3 in a pipeline" in lacking(fully, "torchtitan")
    orders = dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, name="gpipe"))
    assert lacking(orders, "megatron") == ["Megatron lacks the schedule gpipe"]
    asynchronous = dataclasses.replace(plan, requires=(*plan.requires, Requirement.ASYNC_WEIGHTS))
    assert lacking(asynchronous, "jax")[1:] == ["JAX lacks weights that are updated while the pipeline runs"]


def test_what_ranks_of_a_group_do_otherwise_is_said_by_name() -> None:
    plan = grouped()
    (sharding,) = plan.shardings
    assert [axis.size for axis in sharding.axes] == [2]
    assert lacking(plan, "megatron") == []
    dealt = dataclasses.replace(sharding, boundaries=("batch",))
    assert lacking(dataclasses.replace(plan, shardings=(dealt,)), "megatron") == [
        "Megatron lacks samples dealt to the ranks of a group"
    ]
    whole = [
        dataclasses.replace(
            entry,
            tensors=tuple(
                dataclasses.replace(place, value="R") if "fc" in place.tensor and place.optimizer else place
                for place in entry.tensors
            ),
        )
        for entry in sharding.blocks
    ]
    found = lacking(
        dataclasses.replace(plan, shardings=(dataclasses.replace(sharding, blocks=tuple(whole)),)), "megatron"
    )
    assert len(found) == 1
    assert found[0].startswith("Megatron lacks weights of products whole on all ranks of a group (")
    other = with_stage(plan, 1, sharding="another")
    assert "Megatron lacks operators shared unlike in different stages (2 ways)" in lacking(other, "megatron")


def test_more_ranks_than_heads_need_the_model() -> None:
    assert attention_heads(deep()) == (4, 4)
    assert attention_heads(planner.load_graph("llama3-8b", dims={"seq": 128})) == (32, 8)
    # 32 heads with 2 of keys and values; 64 heads of its scans in 8 groups, of which every rank has whole ones
    assert attention_heads(planner.load_graph("nemotron-3-nano", dims={"seq": 128})) == (8, 2)


@functools.cache
def few_keys() -> Graph:
    """Two layers of eight heads, of which two have keys and values of their own."""
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "kv-heads": 2, "ffn": 128, "vocab": 128}
    config = models.changed("llama", {name: str(size) for name, size in sizes.items()})
    return graph_from_proto(models.build_config(config, seq=16)[0], name="few-keys")


def test_ranks_beyond_the_key_value_heads_share_them_as_megatron_does() -> None:
    job = dataclasses.replace(JOB, tensor_parallel=(4,), backends=("megatron",))
    plan = planner.plan(few_keys(), four(1e11, 10**9), job)
    (sharding,) = plan.shardings
    assert [axis.size for axis in sharding.axes] == [2, 2]
    assert plan.runs_on == ("megatron",)
    split = {o.operator: o.splits for entry in sharding.blocks for o in entry.operators}
    assert {splits for name, splits in split.items() if name.endswith("attention")} == {("g", "r")}
    places = {p.tensor: p.value for entry in sharding.blocks for p in entry.tensors if p.optimizer}
    assert {v for name, v in places.items() if ".q_proj" in name or ".k_proj" in name or ".v_proj" in name} == {"S1S1"}
    assert {v for name, v in places.items() if ".o_proj" in name} == {"S0S0"}
    assert lacking(plan, "megatron") == []


def test_ranks_along_one_axis_beyond_the_key_value_heads_are_no_tensor_parallel_layers() -> None:
    plan = planner.plan(few_keys(), four(1e11, 10**9), dataclasses.replace(JOB, meshes=((4,),), backends=("any",)))
    assert "4 ranks along one axis for 2 key-value heads" in lacks(plan, BACKENDS.get("megatron"), few_keys())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backends": ("megatron",), "schedules": ("chimera",)}, "Megatron has no schedule chimera (use 1f1b or"),
        ({"backends": ("fsdp",), "schedules": ("1f1b", "gpipe")}, "FSDP has no schedule 1f1b or gpipe (leave it out"),
        ({"backends": ("megatron",), "zero": (3,)}, "Megatron has no ZeRO stage 3 (use 0 or 1, or plan --for another"),
        (
            {"backends": ("deepspeed",), "zero": (3,), "pipeline_stages": (2,)},
            "DeepSpeed has ZeRO 0 or 1 in a pipeline",
        ),
        ({"backends": ("fsdp",), "pipeline_stages": (2,), "schedules": JOB.schedules}, "FSDP has no"),
        ({"backends": ("fsdp",), "tensor_parallel": (2,)}, "FSDP shares no operator among ranks (use --tp 1"),
        ({"backends": ("fsdp",), "expert_parallel": (2,)}, "FSDP shares no operator among ranks (use --ep 1"),
        ({"backends": ("fsdp",), "context_parallel": (2,)}, "FSDP shares no operator among ranks (use --cp 1"),
        ({"backends": ("torchtitan",), "precision": "", "tensor_parallel": (8,)}, "8 ranks for 4 of them (use --tp 4"),
        ({"backends": ("megatron",), "tensor_parallel": (3,)}, "3 ranks for 4 of them (use --tp 2"),
        ({"backends": ("torchtitan",), "precision": "bf16-pure"}, "torchtitan has no precision bf16-pure (use"),
        ({"backends": ("torchtitan",)}, "torchtitan has no precision bf16 (use --precision bf16-fp32grad or fp32, or"),
        ({"backends": ("deepspeed",), "optimizer": "adafactor"}, "DeepSpeed has no optimizer adafactor (use"),
        ({"backends": ("megatron",), "optimizer": "sgd", "zero": (1,)}, "Megatron has no ZeRO stage 1 (use 0, or"),
        (
            {"backends": ("torchtitan",), "precision": "", "zero": (1,), "pipeline_stages": (1,)},
            "torchtitan has ZeRO 0 or 2 or 3 in one stage",
        ),
        ({"backends": ("megatron", "any")}, "a plan for any is for no framework by name"),
    ],
)
def test_what_a_framework_cannot_do_is_refused_with_the_remedy(options: dict[str, Any], words: str) -> None:
    job = dataclasses.replace(Job(global_batch=4, precision="bf16"), **options)
    with pytest.raises(planner.JobError) as raised:
        planner.plan(deep(), four(1e9, 10**8), job)
    assert words in str(raised.value)


def test_an_unknown_framework_is_answered_with_the_nearest() -> None:
    with pytest.raises(planner.UsageError, match="did you mean 'megatron'"):
        planned("megatrn")


def test_what_no_usual_framework_does_gives_the_free_choice_and_says_so() -> None:
    plan = planned(schedules=("chimera",))
    assert plan.schedule.name.startswith("chimera")
    assert plan.runs_on == ()
    assert plan.free_choice is not None
    assert "has no schedule chimera" in plan.free_choice.reason
    assert plan.options.backends == ()


@pytest.mark.parametrize("byte_per_s", [1e8, 1e9, 1e13])
def test_of_plans_about_as_fast_the_simplest_is_taken(byte_per_s: float) -> None:
    plan = planner.plan(gpt(), four(byte_per_s, 10**9), JOB)
    played = [(plan.compared_s(other)[1], other) for other in plan.alternatives if not other.infeasible]
    fastest_s = min([plan.predictions.reached_s, *(seconds for seconds, _ in played if seconds)])
    assert plan.predictions.reached_s <= fastest_s * 1.005
    stages = plan.configuration.stages
    own = (len(stages), stages[0].ranks, stages[0].recompute, plan.configuration.zero, plan.copies)
    for seconds, other in played:
        if seconds and seconds <= fastest_s * 1.005:
            ranks = max(other.ranks, default=1)
            assert own <= (len(other.starts), ranks, bool(other.recompute), other.zero, other.copies)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_free_choice_of_few_priced_shardings_is_bounded_for_all(
    machine: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "MAX_PRICED_BESIDE", most)
    free = planned_on(machine, "any")
    plan = planner.plan(gpt(), four(*MACHINES[machine]), dataclasses.replace(free.options, backends=()))
    if not plan.runs_on:  # none of them takes any plan that fits
        assert machine == "scarce"
        return
    choice = plan.free_choice
    assert choice is not None
    assert choice.iteration_s is not None
    assert choice.bound_s is not None
    assert choice.bound_s <= free.predictions.reached_s * (1 + 1e-8)
    assert free.predictions.reached_s <= choice.iteration_s * (1 + 1e-8) <= plan.predictions.reached_s * (1 + 2e-8)


def test_a_plan_says_what_it_runs_on_and_reads_back_so(tmp_path: Path) -> None:
    plan = planned()
    assert set(plan.runs_on) <= set(usual_backends())
    assert plan.runs_on
    planner.write_plan(plan, tmp_path / "x.json")
    assert planner.read_plan(tmp_path / "x.json") == plan
    text = planner.report_to_text(planner.plan_report(plan))
    assert plan.runs_on == ("deepspeed", "megatron")
    assert "runs as it is on deepspeed and megatron" in text
    assert "free choice (`--for any`): " in text
    report = planner.check_plan(plan, deep(), four(1e9, 10**8), search_s=60)
    assert report.findings == ()
    claimed = dataclasses.replace(plan, runs_on=("torchtitan", "fsdp"))
    assert planner.check_plan(claimed, deep(), four(1e9, 10**8)).findings


NEW = """
from planner.space.types import Structure
from planner.systems.backends import REPLICAS, Backend, register

register(Backend("newcomer", "Newcomer", REPLICAS, (), (0,), Structure(equal_replicas=True, alike=True),
    sources={"schedules": "none, see its manual", "zero": "none, see its manual",
             "equal_replicas": "its manual, page 1", "alike": "its manual, page 2"}))
"""
SCRIPT = """
import sys
import planner.systems.backends as backends
backends.__path__.append(sys.argv[1])
from benchmarks.backends_page import generated
from cli.main import main
assert "Newcomer" in generated()
for line in (
    "plan gpt3-125m --dim seq=128 -H dgx-a100 -b 8 -q --for newcomer -o new.json",
    "check new.json --for newcomer",
    "compare gpt3-125m --dim seq=128 -H dgx-a100 -b 8 --systems newcomer",
):
    try:
        main(line.split())
    except SystemExit as done:
        assert not done.code, (line, done.code)
"""


def test_a_framework_of_a_new_file_is_planned_for_checked_compared_and_documented(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "newcomer.py").write_text(NEW)
    root = Path(planner.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "new")],
        capture_output=True, text=True, cwd=tmp_path, check=False, env={"PYTHONPATH": str(root), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "taken as it is by newcomer" in done.stdout
    assert "newcomer" in done.stdout.partition("Ranked")[2]
    assert planner.read_plan(tmp_path / "new.json").runs_on == ("newcomer",)


def test_the_comparison_prices_each_limit() -> None:
    devices, job = four(1e9, 10**8), dataclasses.replace(JOB, micro_batches=(1,))
    pricer = Pricer(gpt(), devices, job)
    found = planner.compare_systems(pricer, devices, job, systems=("megatron",), freed=("megatron",))
    (row,) = found.rows
    assert row.feasible
    first_s, *lifted_s = found.limit_costs.values()
    assert first_s == pytest.approx(row.iteration_s, rel=1e-9)
    assert found.limit_costs.keys() >= {"unequal replicas", "layers divided between stages"}
    assert all((seconds or 0.0) <= row.iteration_s * (1 + 1e-9) for seconds in lifted_s)
    assert "What the limits of training frameworks cost" in planner.report_to_text(planner.comparison_report(found))
