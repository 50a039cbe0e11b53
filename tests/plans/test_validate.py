"""A good plan passes; each kind of damage is found by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from planner.plans import Block, BlockRun, Duplicated, Fault, Plan, compress, decode, encode, seal, validate
from planner.schedules import Action, ActionKind
from tests.graph import make_graph
from tests.plans.sample import cluster, decision, language_model, make_plan

CHOSEN = decision((2, 1, 1), (0, 2, 4), micro_batches=6)


def lines(plan: Plan, rank: int, change: Callable[[list[Action]], list[Action]]) -> Plan:
    """The plan with the actions of one rank's line changed."""
    orders = tuple(
        dataclasses.replace(o, actions=encode(change(list(decode(o.actions))))) if rank in o.ranks else o
        for o in plan.schedule.orders
    )
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders))


def stage(plan: Plan, index: int, **changes: object) -> Plan:
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, stages=tuple(stages))


def configured(plan: Plan, index: int, **changes: object) -> Plan:
    """The plan with a stage of its configuration changed."""
    stages = list(plan.configuration.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, configuration=dataclasses.replace(plan.configuration, stages=tuple(stages)))


def boundary(plan: Plan, **changes: object) -> Plan:
    first, *rest = plan.boundaries
    return dataclasses.replace(plan, boundaries=(dataclasses.replace(first, **changes), *rest))  # type: ignore[arg-type]


def blocks(plan: Plan, change: Callable[[list[Block]], list[Block]]) -> Plan:
    return dataclasses.replace(plan, blocks=compress(change(list(plan.block_table))))


def nodes(table: list[Block], at: int, names: tuple[str, ...]) -> list[Block]:
    table[at] = dataclasses.replace(table[at], nodes=names)
    return table


def swapped(actions: list[Action], one: str, other: str) -> list[Action]:
    texts = [str(a) for a in actions]
    i, j = texts.index(one), texts.index(other)
    actions[i], actions[j] = actions[j], actions[i]
    return actions


def without(actions: list[Action], text: str) -> list[Action]:
    return [a for a in actions if str(a) != text]


def twice(actions: list[Action], text: str) -> list[Action]:
    return [b for a in actions for b in ([a, a] if str(a) == text else [a])]


def memory(plan: Plan) -> Plan:
    first, *rest = plan.predictions.stages
    full = dataclasses.replace(first, memory=dataclasses.replace(first.memory, activations_bytes=2**40))
    predictions = dataclasses.replace(plan.predictions, stages=(full, *rest))
    return dataclasses.replace(plan, predictions=predictions)


def more_in_flight(plan: Plan) -> Plan:
    first, *rest = plan.predictions.stages
    predictions = dataclasses.replace(plan.predictions, stages=(dataclasses.replace(first, in_flight=3), *rest))
    return dataclasses.replace(plan, predictions=predictions)


def keeps_a_block_of_another_stage(plan: Plan) -> Plan:
    first, *rest = plan.stages
    return dataclasses.replace(plan, stages=(dataclasses.replace(first, recompute=True, kept_blocks=(4,)), *rest))


def wrong_route(plan: Plan) -> Plan:
    orders = tuple(dataclasses.replace(o, first=o.first[::-1]) for o in plan.schedule.orders)
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders))


def moved_back(plan: Plan) -> Plan:
    """`h3`, made in stage 1, is put into stage 0."""

    def change(table: list[Block]) -> list[Block]:
        table = nodes(table, 3, ("a2", "m2"))
        return nodes(table, 0, ("h0", "h3"))

    return blocks(plan, change)


# what is done to the plan, and the kind and words of a finding
MUTATIONS: dict[str, tuple[Callable[[Plan], Plan], Fault, str]] = {
    "backward before forward": (
        lambda p: lines(p, 3, lambda a: swapped(a, "F2.0", "B2.0")),
        Fault.ORDERS,
        "rank 3: B2.0 does not come after its forward",
    ),
    "ranks wait for each other": (
        # stage 2 wants micro-batch 5 first, for which stage 1 wants the backward of micro-batch 0 over
        lambda p: lines(p, 3, lambda a: [*a[10:12], *a[:10], *a[12:]]),
        Fault.ORDERS,
        "the schedule deadlocks: rank 2 at B1.0 waits for B2.0; rank 3 at F2.5 waits for F1.5",
    ),
    "action twice": (
        lambda p: lines(p, 2, lambda a: twice(a, "F1.3")),
        Fault.ORDERS,
        "rank 2: F1.3 is scheduled more than once",
    ),
    "action missing": (
        lambda p: lines(p, 2, lambda a: without(a, "B1.3")),
        Fault.ORDERS,
        "schedule.orders.rank 2.actions: ",
    ),
    "update missing": (
        lambda p: lines(p, 3, lambda a: without(a, "U2")),
        Fault.ORDERS,
        '"(F2.0 B2.0)*6 S2" in the file, "(F2.0 B2.0)*6 S2 U2" worked out anew',
    ),
    "update before synchronisation": (
        lambda p: lines(p, 3, lambda a: swapped(a, "S2", "U2")),
        Fault.ORDERS,
        '"(F2.0 B2.0)*6 U2 S2" in the file, "(F2.0 B2.0)*6 S2 U2" worked out anew',
    ),
    "synchronisation before the last backward": (
        lambda p: lines(p, 3, lambda a: swapped(a, "S2", "B2.5")),
        Fault.ORDERS,
        "rank 3 at S0 waits for S0 of rank 1",
    ),
    "wrong route": (wrong_route, Fault.ORDERS, "schedule.orders.rank 0.first: 1 in the file, 0 worked out anew"),
    "action of another stage": (
        lambda p: lines(p, 3, lambda a: [Action(ActionKind.FORWARD, 1, 0), *a]),
        Fault.ORDERS,
        "rank 3: F1.0 is scheduled more than once",
    ),
    "unknown micro-batch": (
        lambda p: lines(p, 3, lambda a: [*a, Action(ActionKind.FORWARD, 2, 6)]),
        Fault.ORDERS,
        "rank 3: F2.6 needs the forward of the stage before, which no worker runs",
    ),
    "rank without actions": (
        lambda p: dataclasses.replace(p, schedule=dataclasses.replace(p.schedule, orders=p.schedule.orders[:-1])),
        Fault.ORDERS,
        "schedule.orders.rank 3: nothing in the file",
    ),
    "actions unreadable": (
        lambda p: dataclasses.replace(
            p,
            schedule=dataclasses.replace(
                p.schedule, orders=(dataclasses.replace(p.schedule.orders[0], actions="F0"), *p.schedule.orders[1:])
            ),
        ),
        Fault.ORDERS,
        "cannot read action 'F0'",
    ),
    "undeclared tie": (
        lambda p: dataclasses.replace(p, shared_parameters=()),
        Fault.DIFFERS,
        "shared_parameters.w_embed: nothing in the file",
    ),
    "tie that is none": (
        lambda p: dataclasses.replace(
            p, shared_parameters=(*p.shared_parameters, dataclasses.replace(p.shared_parameters[0], parameter="w1"))
        ),
        Fault.DIFFERS,
        "shared_parameters.w1: {",
    ),
    "operator moved backwards": (
        moved_back,
        Fault.DIFFERS,
        'blocks.embed.nodes: ["h3"] in the file, nothing worked out anew',
    ),
    "operator dropped": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "h3"))),
        Fault.DIFFERS,
        'blocks.layers.2.nodes: nothing in the file, ["m2"] worked out anew',
    ),
    "operator twice": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "m2", "h3", "m1"))),
        Fault.STRUCTURE,
        "operator 'm1' is listed 2 times",
    ),
    "operator unknown": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "m2", "h3", "ghost"))),
        Fault.DIFFERS,
        'blocks.layers.2.nodes: ["ghost"] in the file, nothing worked out anew',
    ),
    "operators in no order": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("h3", "m2", "a2"))),
        Fault.DIFFERS,
        'blocks.layers.2.nodes[0]: "h3" in the file, "a2" worked out anew',
    ),
    "duplicate of an operator with weights": (
        lambda p: dataclasses.replace(
            blocks(p, lambda t: nodes(t, 3, ("m2", "h3"))), duplicated=(*p.duplicated, Duplicated(("a2",), (1,)))
        ),
        Fault.DIFFERS,
        'blocks.layers.2.nodes: nothing in the file, ["a2"] worked out anew',
    ),
    "mask not computed where it is read": (
        lambda p: dataclasses.replace(p, duplicated=(Duplicated(("mask",), (0, 1)),)),
        Fault.DIFFERS,
        "duplicated[0].stages: [0, 1] in the file, [0, 1, 2] worked out anew",
    ),
    "boundary missing": (
        lambda p: dataclasses.replace(p, boundaries=p.boundaries[1:]),
        Fault.DIFFERS,
        "'h1': boundaries.h1: nothing in the file",
    ),
    "boundary that is none": (
        lambda p: dataclasses.replace(p, boundaries=(*p.boundaries, dataclasses.replace(p.boundaries[0], tensor="m2"))),
        Fault.DIFFERS,
        "'m2': boundaries.m2: {",
    ),
    "boundary without gradient": (
        lambda p: boundary(p, gradient=False),
        Fault.DIFFERS,
        "'h1': boundaries[0].gradient: false in the file, true worked out anew",
    ),
    "boundary consumer missing": (
        lambda p: boundary(p, to_stages=(2,)),
        Fault.DIFFERS,
        "'h1': boundaries[0].to_stages[0]: 2 in the file, 1 worked out anew",
    ),
    "boundary of another shape": (
        lambda p: boundary(p, shape=(5,), bytes=20),
        Fault.DIFFERS,
        "'h1': boundaries[0].shape[0]: 5 in the file, 4 worked out anew",
    ),
    "boundary size": (
        lambda p: boundary(p, bytes=15),
        Fault.DIFFERS,
        "'h1': boundaries[0].bytes: 15 B (15) in the file, 16 B (16) worked out anew",
    ),
    "boundary backwards": (
        lambda p: boundary(p, to_stages=(0,)),
        Fault.STRUCTURE,
        "'h1' goes from stage 0 to [0] of 3 stages",
    ),
    "rank outside the world": (
        lambda p: stage(p, 2, replicas=((9,),)),
        Fault.STRUCTURE,
        "stages[2].replicas[0][0]: 9 in the file, 3 worked out anew",
    ),
    "rank in two stages": (
        lambda p: stage(p, 2, replicas=((0,),)),
        Fault.STRUCTURE,
        "stages[2].replicas[0][0]: 0 in the file, 3 worked out anew",
    ),
    "replicas that do not divide": (
        lambda p: stage(p, 1, replicas=((2,), (4,), (5,), (6,))),
        Fault.STRUCTURE,
        "stages[1].replicas: [[2], [4], [5], [6]] in the file, [[2]] worked out anew",
    ),
    "batch that does not add up": (
        lambda p: dataclasses.replace(p, micro_batches=dataclasses.replace(p.micro_batches, size=2)),
        Fault.STRUCTURE,
        "configuration has 6 micro-batches of 1 in 1 copies, micro_batches is 6 of 2",
    ),
    "no expert ranks": (
        lambda p: configured(p, 1, expert=0),
        Fault.STRUCTURE,
        "configuration.stages[1] has replicas 1, ranks 1, context 1, expert 0",
    ),
    "more context ranks than a group has": (
        lambda p: configured(p, 0, context=2),
        Fault.STRUCTURE,
        "configuration.stages[0] has replicas 2, ranks 1, context 2",
    ),
    "gradient scale": (
        lambda p: dataclasses.replace(p, micro_batches=dataclasses.replace(p.micro_batches, gradient_scale=1.0)),
        Fault.STRUCTURE,
        "micro_batches.gradient_scale: 1.0 in the file",
    ),
    "stage gap": (
        lambda p: stage(p, 1, blocks=(3, 4)),
        Fault.STRUCTURE,
        "stage 1 is blocks [3, 4], expected to start at 2",
    ),
    "over memory": (memory, Fault.MEMORY, "stage 0 needs 1101927546880 bytes a device"),
    "more in flight than there is room for": (
        more_in_flight,
        Fault.MEMORY,
        "stage 0 keeps 3 x 402653184 bytes of activations",
    ),
    "keeps another stage's block": (
        keeps_a_block_of_another_stage,
        Fault.STRUCTURE,
        "stage 0 keeps blocks [4] of [0, 2]",
    ),
    "parameter count": (
        lambda p: stage(p, 0, parameters=7),
        Fault.STRUCTURE,
        "stages[0].parameters: 7 in the file, 8 worked out anew",
    ),
    "another model": (
        lambda p: dataclasses.replace(p, model=dataclasses.replace(p.model, fingerprint="0" * 64)),
        Fault.MODEL,
        "the plan is for another version of toy (fingerprint 000000000000, ",
    ),
    "other hardware": (
        lambda p: dataclasses.replace(p, hardware=dataclasses.replace(p.hardware, fingerprint="0" * 64)),
        Fault.HARDWARE,
        "the plan is for another profile of toy-box (fingerprint 000000000000, ",
    ),
    "stage inputs": (
        lambda p: stage(p, 1, inputs=()),
        Fault.DIFFERS,
        'stages[1].inputs: nothing in the file, ["x"] worked out anew',
    ),
    "loss": (
        lambda p: dataclasses.replace(p, model=dataclasses.replace(p.model, parameters=1)),
        Fault.DIFFERS,
        "model.parameters: 1 in the file, 20 worked out anew",
    ),
    "flag missing": (
        lambda p: dataclasses.replace(p, requires=p.requires[1:]),
        Fault.DIFFERS,
        'requires: nothing in the file, ["pipeline"] worked out anew',
    ),
    "throughput": (
        lambda p: dataclasses.replace(p, predictions=dataclasses.replace(p.predictions, samples_per_s=1.0)),
        Fault.FIGURES,
        "predictions.samples_per_s: 1.0 in the file, 12.0 worked out anew",
    ),
}


@pytest.mark.parametrize("chosen", [CHOSEN, decision(copies=2), decision((1,), (0,)), decision(schedule="gpipe")])
def test_a_plan_as_assembled_has_no_finding(chosen: object) -> None:
    plan = make_plan(chosen=chosen)  # type: ignore[arg-type]
    assert validate(plan, language_model(), cluster()) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_is_found_by_name(name: str) -> None:
    change, fault, words = MUTATIONS[name]
    found = validate(seal(change(make_plan(chosen=CHOSEN))), language_model(), cluster())
    assert any(f.fault is fault and words in f.message for f in found), found


def test_an_edited_file_is_found_by_its_digest() -> None:
    plan = make_plan()
    edited = dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, space="all plans"))
    assert [f.fault for f in validate(edited)] == [Fault.DIGEST]


def test_provenance_is_not_part_of_the_digest() -> None:
    plan = make_plan()
    assert validate(dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, model="b.onnx"))) == []


def test_a_deadlock_is_told_as_a_cycle() -> None:
    two = make_plan(chosen=decision((1, 1), (0, 3), micro_batches=2, schedule="gpipe"))
    late = lines(two, 0, lambda a: swapped(a, "F0.1", "B0.0"))
    assert (
        "the schedule deadlocks: rank 0 at B0.0 waits for B1.0; rank 1 at F1.1 waits for F0.1, which never runs"
    ) in [f.message for f in validate(seal(late))]


def test_a_finding_names_stage_rank_and_tensor() -> None:
    plan = make_plan(chosen=CHOSEN)
    found = validate(seal(lines(plan, 3, lambda a: without(a, "U2"))))
    assert {(f.stage, f.rank) for f in found} == {(2, 3)}
    found = validate(seal(boundary(plan, gradient=False)), language_model())
    assert [(f.stage, f.tensor) for f in found] == [(0, "h1")]


def test_a_fingerprint_that_differs_is_all_that_is_said_of_the_model() -> None:
    other = dataclasses.replace(make_graph(["y = MatMul(x, w)"]), fingerprint="1" * 64)
    assert [f.fault for f in validate(make_plan(), other)] == [Fault.MODEL]


def test_many_findings_of_a_kind_are_counted() -> None:
    plan = make_plan(language_model(40), decision((1, 1), (0, 20), 42, micro_batches=2))
    empty = blocks(plan, lambda table: [dataclasses.replace(b, nodes=()) for b in table])
    found = [f for f in validate(seal(empty), language_model(40)) if f.fault is Fault.DIFFERS]
    assert len(found) == 21
    assert re.fullmatch("and [0-9]+ more of this kind", found[-1].message)


def test_runs_written_as_templates_are_checked_as_what_they_stand_for() -> None:
    plan = make_plan()
    (run,) = [run for run in plan.blocks if run.repeat > 1]
    short = tuple(BlockRun(3, r.blocks) if r is run else r for r in plan.blocks)
    assert Fault.STRUCTURE in {f.fault for f in validate(seal(dataclasses.replace(plan, blocks=short)))}
