"""A sharded plan passes; each kind of damage to its shardings is found by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import planner
from planner import Job, load_cluster, load_graph
from planner.check import check_plan
from planner.plans import BlockSeries, Fault, Holding, Plan, ShardedBlock, StageCollective, seal, validate
from planner.plans.shard_sections import with_inside
from tests.plans.sharded_sample import Sample, language, mixture

Change = Callable[[Plan], Plan]
GELU = "transformer.h.0.mlp.gelu"
UP, DOWN = "transformer.h.0.mlp.c_fc.matmul", "transformer.h.0.mlp.c_proj.matmul"
UP_WEIGHT = "transformer.h.0.mlp.c_fc.weight"
ROWS = Holding("rows", UP_WEIGHT, 0, ("tensor",), 768, 96)


def entry_with(plan: Plan, operator: str) -> int:
    """Number of the entry that splits an operator."""
    (sharding,) = plan.shardings
    return next(i for i, e in enumerate(sharding.blocks) if any(o.operator == operator for o in e.operators))


def sharding(plan: Plan, **fields: Any) -> Plan:
    return dataclasses.replace(plan, shardings=(dataclasses.replace(plan.shardings[0], **fields),))


def entry(plan: Plan, change: Callable[[ShardedBlock], ShardedBlock], operator: str = GELU) -> Plan:
    at, blocks = entry_with(plan, operator), list(plan.shardings[0].blocks)
    blocks[at] = change(blocks[at])
    return sharding(plan, blocks=tuple(blocks))


def items(name: str, key: str, of: str, /, **fields: Any) -> Change:
    """Changes those of an entry's operators, tensors or collectives that have a name."""

    def change(block: ShardedBlock) -> ShardedBlock:
        own = getattr(block, name)
        assert any(getattr(item, key) == of for item in own)
        changed = tuple(dataclasses.replace(i, **fields) if getattr(i, key) == of else i for i in own)
        return dataclasses.replace(block, **{name: changed})

    return lambda plan: entry(plan, change)


def without(name: str, key: str, value: str) -> Change:
    def change(block: ShardedBlock) -> ShardedBlock:
        return dataclasses.replace(
            block, **{name: tuple(item for item in getattr(block, name) if getattr(item, key) != value)}
        )

    return lambda plan: entry(plan, change)


def more(name: str, pick: Callable[[Any], Any]) -> Change:
    """Adds a changed copy of the first of an entry's items."""

    def change(block: ShardedBlock) -> ShardedBlock:
        own = getattr(block, name)
        return dataclasses.replace(block, **{name: (*own, pick(own[0]))})

    return lambda plan: entry(plan, change)


def first_collective(**fields: Any) -> Change:
    """Changes the first collective of the forward pass."""

    def change(block: ShardedBlock) -> ShardedBlock:
        own = list(block.collectives)
        at = next(i for i, c in enumerate(own) if c.phase == "forward")
        new = {k: f(getattr(own[at], k)) if callable(f) else f for k, f in fields.items()}
        own[at] = dataclasses.replace(own[at], **new)
        return dataclasses.replace(block, collectives=tuple(own))

    return lambda plan: entry(plan, change)


def no_forward_collective(plan: Plan) -> Plan:
    def change(block: ShardedBlock) -> ShardedBlock:
        gone = next(c for c in block.collectives if c.phase == "forward")
        return dataclasses.replace(block, collectives=tuple(c for c in block.collectives if c is not gone))

    return entry(plan, change)


def figures(**factors: float) -> Change:
    def change(block: ShardedBlock) -> ShardedBlock:
        new = {name: getattr(block.figures, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(block, figures=dataclasses.replace(block.figures, **new))

    return lambda plan: entry(plan, change)


def series(change: Callable[[tuple[BlockSeries, ...]], tuple[BlockSeries, ...]]) -> Change:
    return lambda plan: entry(plan, lambda block: dataclasses.replace(block, of=change(block.of)))


def stage(at: int, **fields: Any) -> Change:
    def change(plan: Plan) -> Plan:
        stages = list(plan.stages)
        stages[at] = dataclasses.replace(stages[at], **fields)
        return dataclasses.replace(plan, stages=tuple(stages))

    return change


def boundary(**fields: Any) -> Change:
    return lambda plan: dataclasses.replace(plan, boundaries=(dataclasses.replace(plan.boundaries[0], **fields),))


def inside(plan: Plan) -> Plan:
    terms = plan.predictions.stages
    first = dataclasses.replace(terms[0], inside_s=terms[0].inside_s * 2)
    return dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=(first, *terms[1:])))


def next_layer(name: str) -> str:
    return name.replace("{0+1i}", "{1+1i}")


def room(plan: Plan) -> Plan:
    terms = plan.predictions.stages
    first = dataclasses.replace(terms[0], unit_bytes=terms[0].unit_bytes // 2)
    return dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=(first, *terms[1:])))


def gradients(plan: Plan) -> Plan:
    terms = plan.predictions.stages
    more = (*terms[0].collectives, StageCollective("all_reduce", "gradients", 1, 2, 8))
    first = dataclasses.replace(terms[0], collectives=more)
    return dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=(first, *terms[1:])))


def longer(of: tuple[BlockSeries, ...]) -> tuple[BlockSeries, ...]:
    return (*of[:-1], dataclasses.replace(of[-1], count=of[-1].count + 1))


MUTATIONS: dict[str, tuple[Change, Fault, str]] = {
    "stage names no sharding": (stage(0, sharding="gone"), Fault.STRUCTURE, ""),
    "sharding that nobody uses": (
        lambda p: dataclasses.replace(p, shardings=(*p.shardings, dataclasses.replace(p.shardings[0], name="more"))),
        Fault.STRUCTURE,
        "",
    ),
    "sharding twice": (lambda p: dataclasses.replace(p, shardings=p.shardings * 2), Fault.STRUCTURE, ""),
    "group without a sharding": (stage(0, sharding="", rank_parameters=0), Fault.STRUCTURE, ""),
    "group of seven": (stage(0, replicas=(tuple(range(7)),)), Fault.STRUCTURE, ""),
    "mesh of four": (
        lambda p: sharding(p, axes=(dataclasses.replace(p.shardings[0].axes[0], size=4),)), Fault.STRUCTURE, "",
    ),
    "mesh without axes": (lambda p: sharding(p, axes=()), Fault.STRUCTURE, ""),
    "block left out": (series(lambda of: of[1:]), Fault.STRUCTURE, ""),
    "block of another model": (series(longer), Fault.STRUCTURE, ""),
    "block in two entries": (
        lambda p: sharding(p, blocks=(*p.shardings[0].blocks, p.shardings[0].blocks[0])), Fault.STRUCTURE, "",
    ),
    "names missing": (
        series(lambda of: (dataclasses.replace(of[0], names=()), *of[1:])), Fault.SHARDINGS, "",
    ),
    "names of another layer": (
        series(lambda of: tuple(dataclasses.replace(s, names=tuple(map(next_layer, s.names))) for s in of)),
        Fault.SHARDINGS,
        "",
    ),
    "operator twice": (more("operators", lambda o: o), Fault.SHARDINGS, ""),
    "tensor of another block": (
        more("tensors", lambda t: dataclasses.replace(t, tensor="transformer.h.0.attn.split")),
        Fault.SHARDINGS,
        "",
    ),
    "layout that is none": (items("tensors", "tensor", GELU, value="Q"), Fault.SHARDINGS, GELU),
    "layout of two axes": (items("tensors", "tensor", GELU, value="S2R"), Fault.SHARDINGS, GELU),
    "no such dimension": (items("tensors", "tensor", GELU, value="S3"), Fault.SHARDINGS, GELU),
    "cut that does not divide": (items("tensors", "tensor", GELU, value="S0"), Fault.SHARDINGS, GELU),
    "weight without its optimizer": (items("tensors", "tensor", UP_WEIGHT, optimizer=""), Fault.SHARDINGS, UP_WEIGHT),
    "activation with an optimizer": (items("tensors", "tensor", GELU, optimizer="R"), Fault.SHARDINGS, GELU),
    "weight from another parameter": (
        items("tensors", "tensor", UP_WEIGHT, parameters=("transformer.h.0.mlp.c_fc.bias",)),
        Fault.SHARDINGS,
        UP_WEIGHT,
    ),
    "operator without a split": (without("operators", "operator", UP), Fault.SHARDINGS, UP),
    "split of another dimension": (items("operators", "operator", UP, splits=("k",)), Fault.SHARDINGS, UP),
    "split on two axes": (items("operators", "operator", UP, splits=("n", "")), Fault.SHARDINGS, UP),
    "result not summed": (items("operators", "operator", DOWN, writes=("R",)), Fault.SHARDINGS, DOWN),
    "less work than a share": (items("operators", "operator", UP, share=0.1), Fault.SHARDINGS, UP),
    "tensor without a layout": (without("tensors", "tensor", GELU), Fault.SHARDINGS, GELU),
    "collective left out": (no_forward_collective, Fault.SHARDINGS, ""),
    "collective of another kind": (first_collective(kind="send"), Fault.DIFFERS, ""),
    "collective along no axis": (first_collective(axes=("data",)), Fault.SHARDINGS, ""),
    "collective twice": (more("collectives", lambda c: c), Fault.DIFFERS, ""),
    "smaller payload": (first_collective(payload_bytes=lambda x: x / 2), Fault.DIFFERS, ""),
    "more times": (first_collective(times=lambda x: x + 1), Fault.DIFFERS, ""),
    "fewer bytes sent": (first_collective(sent_bytes=lambda x: x / 2), Fault.DIFFERS, ""),
    "faster collective": (first_collective(seconds=lambda x: x / 2), Fault.DIFFERS, ""),
    "other links": (first_collective(level="elsewhere"), Fault.DIFFERS, ""),
    "group across nodes": (stage(1, replicas=(tuple(range(4, 12)),)), Fault.STRUCTURE, ""),
    "group of scattered ranks": (stage(1, replicas=((8, 10, 9, 11, 12, 13, 14, 15),)), Fault.STRUCTURE, ""),
    "faster forward": (figures(forward_s=0.5), Fault.DIFFERS, ""),
    "faster backward": (figures(backward_s=0.5), Fault.DIFFERS, ""),
    "slower update": (
        lambda p: entry(p, lambda b: dataclasses.replace(b, figures=dataclasses.replace(b.figures, step_s=1.0))),
        Fault.DIFFERS,
        "",
    ),
    "less communication": (figures(communication_s=0.5), Fault.DIFFERS, ""),
    "fewer bytes": (figures(sent_bytes=0.5), Fault.DIFFERS, ""),
    "fewer parameters": (figures(parameters=0.5), Fault.DIFFERS, ""),
    "less kept": (figures(saved_bytes=0.5), Fault.DIFFERS, ""),
    "smaller inputs": (figures(checkpoint_bytes=0.5), Fault.DIFFERS, ""),
    "less workspace": (figures(workspace_bytes=0.5), Fault.DIFFERS, ""),
    "less room for what is kept": (room, Fault.DIFFERS, ""),
    "stage that holds less": (stage(0, rank_parameters=7), Fault.DIFFERS, ""),
    "stage that holds less than its weights": (stage(0, rank_parameters=7), Fault.FIGURES, ""),
    "stage's communication": (inside, Fault.FIGURES, ""),
    "stage's gradients": (gradients, Fault.FIGURES, ""),
    "stage's sums": (figures(forward_s=2.0), Fault.FIGURES, ""),
    "other treatment of boundaries": (lambda p: sharding(p, boundaries=("replicated",)), Fault.SHARDINGS, ""),
    "treatment missing": (lambda p: sharding(p, boundaries=()), Fault.STRUCTURE, ""),
    "input of a block elsewhere": (
        items("tensors", "tensor", "transformer.h.0.add", value="R"), Fault.SHARDINGS, "transformer.h.0.add",
    ),
    "boundary sent otherwise": (boundary(layout="R"), Fault.DIFFERS, ""),
    "boundary received otherwise": (boundary(received=("S2",)), Fault.DIFFERS, ""),
    "boundary received by too many": (boundary(received=("S1", "S1")), Fault.DIFFERS, ""),
    "boundary of fewer bytes": (boundary(rank_bytes=1), Fault.DIFFERS, ""),
    "rows that are not dealt": (
        lambda p: entry(p, lambda b: dataclasses.replace(b, holdings=(ROWS,))), Fault.SHARDINGS, UP_WEIGHT,
    ),
    "flag missing": (lambda p: dataclasses.replace(p, requires=p.requires[:-2]), Fault.DIFFERS, ""),
}  # fmt: skip


@pytest.mark.parametrize("sample", [language, mixture])
def test_a_sharded_plan_as_assembled_has_no_finding(sample: Callable[[], Sample]) -> None:
    found = sample()
    assert check_plan(found.plan, found.graph, found.cluster).findings == ()
    assert validate(found.plan, found.graph) == []
    assert validate(found.plan) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_to_a_sharding_is_found_by_name(name: str) -> None:
    change, fault, about = MUTATIONS[name]
    sample = language()
    changed = change(sample.plan)
    assert changed != sample.plan
    found = check_plan(seal(changed), sample.graph, sample.cluster).findings
    assert any(f.fault is fault and (not about or f.tensor == about) for f in found), found


def test_experts_dealt_otherwise_are_found() -> None:
    sample = mixture()

    def without_holdings(block: ShardedBlock) -> ShardedBlock:
        return dataclasses.replace(block, holdings=block.holdings[:1])

    plan = sharding(sample.plan, blocks=tuple(map(without_holdings, sample.plan.shardings[0].blocks)))
    assert {f.fault for f in validate(seal(plan), sample.graph, sample.cluster)} == {Fault.SHARDINGS}


def test_without_the_cluster_missing_communication_is_found_all_the_same() -> None:
    sample = language()
    found = validate(seal(no_forward_collective(sample.plan)), sample.graph)
    assert [f.fault for f in found] == [Fault.SHARDINGS]
    assert validate(seal(first_collective(kind="send")(sample.plan)), sample.graph) == []


def test_bytes_inside_groups_are_the_sum_of_the_figures_of_nine_digits_in_the_file() -> None:
    """A block of 1,657,012,224 bytes has 1,657,012,220 in the file."""
    sample = language()
    configuration, predictions = sample.plan.configuration, sample.plan.predictions
    sent_bytes = np.full_like(sample.entry.costs.sent_bytes, 1_657_012_224)
    entry = dataclasses.replace(sample.entry, costs=dataclasses.replace(sample.entry.costs, sent_bytes=sent_bytes))
    used = {stage.sharding: (entry, "") for stage in configuration.stages}
    said = [terms.inside_bytes for terms in with_inside(predictions, configuration, used).stages]
    assert said == [(stage.stop - stage.start) * 1_657_012_220 for stage in configuration.stages]


def test_bytes_of_tied_weights_are_those_of_all_elements_also_where_ranks_share_them() -> None:
    """The 50,257 x 768 elements of the table have gradients of two bytes."""
    sample = language()
    tied = sample.plan.shared_parameters[0]
    assert tied.bytes == 50_257 * 768 * 2
    shares = (dataclasses.replace(tied, bytes=tied.bytes // 2), *sample.plan.shared_parameters[1:])
    found = validate(seal(dataclasses.replace(sample.plan, shared_parameters=shares)))
    assert [(f.fault, f.tensor) for f in found] == [(Fault.DIFFERS, "transformer.wte.weight")]


def test_weights_that_context_parallel_ranks_shard_have_no_copies_in_the_check_either() -> None:
    """Two ranks share the weights of fp8, a byte an element; their copies are made when the weights are gathered."""
    job = Job(
        global_batch=16, precision="fp8", zero=(3,), devices=2, tensor_parallel=(1,), context_parallel=(2,),
        pipeline_stages=(1,), data_parallel=(1,),
    )  # fmt: skip
    plan = planner.plan(load_graph("gpt2"), load_cluster("dgx-h100"), job)
    assert plan.predictions.stages[0].memory.weights_bytes == 124_439_808 // 2
    assert check_plan(plan).findings == ()
