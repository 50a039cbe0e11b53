"""A good plan passes; each kind of damage is found by name."""

from __future__ import annotations

import dataclasses
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


# what is done to the plan, the finding, and the stage, rank and tensor that it must name
MUTATIONS: dict[str, tuple[Callable[[Plan], Plan], Fault, dict[str, object]]] = {
    "backward before forward": (
        lambda p: lines(p, 3, lambda a: swapped(a, "F2.0", "B2.0")),
        Fault.ACTION_ORDER,
        {"stage": 2, "rank": 3},
    ),
    "ranks wait for each other": (
        # stage 2 wants micro-batch 5 first, for which stage 1 wants the backward of micro-batch 0 over
        lambda p: lines(p, 3, lambda a: [*a[10:12], *a[:10], *a[12:]]),
        Fault.DEADLOCK,
        {},
    ),
    "action twice": (
        lambda p: lines(p, 2, lambda a: twice(a, "F1.3")),
        Fault.ACTION_TWICE,
        {"stage": 1, "rank": 2},
    ),
    "action missing": (
        lambda p: lines(p, 2, lambda a: without(a, "B1.3")),
        Fault.ACTION_MISSING,
        {"stage": 1, "rank": 2},
    ),
    "update missing": (lambda p: lines(p, 3, lambda a: without(a, "U2")), Fault.ACTION_MISSING, {"rank": 3}),
    "update before synchronisation": (
        lambda p: lines(p, 3, lambda a: swapped(a, "S2", "U2")),
        Fault.ACTION_ORDER,
        {"rank": 3},
    ),
    "synchronisation before the last backward": (
        lambda p: lines(p, 3, lambda a: swapped(a, "S2", "B2.5")),
        Fault.ACTION_ORDER,
        {"rank": 3},
    ),
    "wrong route": (wrong_route, Fault.ACTION_ROUTE, {"stage": 0, "rank": 0}),
    "action of another stage": (
        lambda p: lines(p, 3, lambda a: [Action(ActionKind.FORWARD, 1, 0), *a]),
        Fault.ACTION_ROUTE,
        {"stage": 1, "rank": 3},
    ),
    "unknown micro-batch": (
        lambda p: lines(p, 3, lambda a: [*a, Action(ActionKind.FORWARD, 2, 6)]),
        Fault.ACTION_UNKNOWN,
        {"stage": 2, "rank": 3},
    ),
    "rank without actions": (
        lambda p: dataclasses.replace(p, schedule=dataclasses.replace(p.schedule, orders=p.schedule.orders[:-1])),
        Fault.ACTION_MISSING,
        {"stage": 2, "rank": 3},
    ),
    "actions unreadable": (
        lambda p: dataclasses.replace(
            p,
            schedule=dataclasses.replace(
                p.schedule, orders=(dataclasses.replace(p.schedule.orders[0], actions="F0"), *p.schedule.orders[1:])
            ),
        ),
        Fault.ACTIONS_UNREADABLE,
        {"rank": 0},
    ),
    "undeclared tie": (
        lambda p: dataclasses.replace(p, shared_parameters=()),
        Fault.UNDECLARED_TIE,
        {"tensor": "w_embed"},
    ),
    "tie that is none": (
        lambda p: dataclasses.replace(
            p, shared_parameters=(*p.shared_parameters, dataclasses.replace(p.shared_parameters[0], parameter="w1"))
        ),
        Fault.WRONG_TIE,
        {"tensor": "w1"},
    ),
    "operator moved backwards": (moved_back, Fault.BACKWARD_EDGE, {"stage": 0, "tensor": "m2"}),
    "operator dropped": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "h3"))),
        Fault.OPERATOR_MISSING,
        {"tensor": "m2"},
    ),
    "operator twice": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "m2", "h3", "m1"))),
        Fault.OPERATOR_TWICE,
        {"tensor": "m1"},
    ),
    "operator unknown": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("a2", "m2", "h3", "ghost"))),
        Fault.OPERATOR_UNKNOWN,
        {"stage": 1, "tensor": "ghost"},
    ),
    "operators in no order": (
        lambda p: blocks(p, lambda t: nodes(t, 3, ("h3", "m2", "a2"))),
        Fault.OPERATOR_ORDER,
        {"stage": 1, "tensor": "h3"},
    ),
    "duplicate of an operator with weights": (
        lambda p: dataclasses.replace(
            blocks(p, lambda t: nodes(t, 3, ("m2", "h3"))), duplicated=(*p.duplicated, Duplicated(("a2",), (1,)))
        ),
        Fault.DUPLICATED_PARAMETER,
        {"tensor": "a2"},
    ),
    "mask not computed where it is read": (
        lambda p: dataclasses.replace(p, duplicated=(Duplicated(("mask",), (0, 1)),)),
        Fault.DUPLICATED_INCOMPLETE,
        {"stage": 2, "tensor": "mask"},
    ),
    "boundary missing": (
        lambda p: dataclasses.replace(p, boundaries=p.boundaries[1:]),
        Fault.BOUNDARY_MISSING,
        {"stage": 0, "tensor": "h1"},
    ),
    "boundary that is none": (
        lambda p: dataclasses.replace(p, boundaries=(*p.boundaries, dataclasses.replace(p.boundaries[0], tensor="m2"))),
        Fault.BOUNDARY_UNKNOWN,
        {"tensor": "m2"},
    ),
    "boundary without gradient": (
        lambda p: boundary(p, gradient=False),
        Fault.BOUNDARY_GRADIENT,
        {"stage": 0, "tensor": "h1"},
    ),
    "boundary consumer missing": (
        lambda p: boundary(p, to_stages=(2,)),
        Fault.BOUNDARY_STAGES,
        {"stage": 0, "tensor": "h1"},
    ),
    "boundary of another shape": (
        lambda p: boundary(p, shape=(5,), bytes=20),
        Fault.BOUNDARY_SHAPE,
        {"stage": 0, "tensor": "h1"},
    ),
    "boundary size": (lambda p: boundary(p, bytes=15), Fault.BOUNDARY_SHAPE, {"tensor": "h1"}),
    "boundary backwards": (lambda p: boundary(p, to_stages=(0,)), Fault.BACKWARD_EDGE, {"tensor": "h1"}),
    "rank outside the world": (
        lambda p: stage(p, 2, replicas=((9,),)),
        Fault.RANK_RANGE,
        {"stage": 2, "rank": 9},
    ),
    "rank in two stages": (
        lambda p: stage(p, 2, replicas=((0,),)),
        Fault.RANK_TWICE,
        {"stage": 2, "rank": 0},
    ),
    "replicas that do not divide": (
        lambda p: stage(p, 1, replicas=((2,), (4,), (5,), (6,))),
        Fault.DIVISIBILITY,
        {"stage": 1},
    ),
    "batch that does not add up": (
        lambda p: dataclasses.replace(p, micro_batches=dataclasses.replace(p.micro_batches, size=2)),
        Fault.DIVISIBILITY,
        {},
    ),
    "no expert ranks": (lambda p: configured(p, 1, expert=0), Fault.DIVISIBILITY, {"stage": 1}),
    "more context ranks than a group has": (lambda p: configured(p, 0, context=2), Fault.DIVISIBILITY, {"stage": 0}),
    "gradient scale": (
        lambda p: dataclasses.replace(p, micro_batches=dataclasses.replace(p.micro_batches, gradient_scale=1.0)),
        Fault.DIVISIBILITY,
        {},
    ),
    "stage gap": (lambda p: stage(p, 1, blocks=(3, 4)), Fault.STAGE_RANGE, {"stage": 1}),
    "over memory": (memory, Fault.MEMORY, {"stage": 0, "rank": 0}),
    "more in flight than there is room for": (more_in_flight, Fault.MEMORY, {"stage": 0}),
    "keeps another stage's block": (keeps_a_block_of_another_stage, Fault.STAGE_RANGE, {"stage": 0}),
    "parameter count": (lambda p: stage(p, 0, parameters=7), Fault.PARAMETERS, {"stage": 0}),
    "another model": (
        lambda p: dataclasses.replace(p, model=dataclasses.replace(p.model, fingerprint="0" * 64)),
        Fault.MODEL_FINGERPRINT,
        {},
    ),
    "other hardware": (
        lambda p: dataclasses.replace(p, hardware=dataclasses.replace(p.hardware, fingerprint="0" * 64)),
        Fault.HARDWARE_FINGERPRINT,
        {},
    ),
    "stage inputs": (lambda p: stage(p, 1, inputs=()), Fault.STAGE_TENSORS, {"stage": 1}),
    "loss": (
        lambda p: dataclasses.replace(p, model=dataclasses.replace(p.model, parameters=1)),
        Fault.MODEL,
        {},
    ),
    "flag missing": (lambda p: dataclasses.replace(p, requires=p.requires[1:]), Fault.REQUIRES, {}),
    "throughput": (
        lambda p: dataclasses.replace(p, predictions=dataclasses.replace(p.predictions, samples_per_s=1.0)),
        Fault.PREDICTIONS,
        {},
    ),
    "bound above the answer": (
        lambda p: dataclasses.replace(p, predictions=dataclasses.replace(p.predictions, bound_s=1.0)),
        Fault.PREDICTIONS,
        {},
    ),
}


@pytest.mark.parametrize("chosen", [CHOSEN, decision(copies=2), decision((1,), (0,)), decision(schedule="gpipe")])
def test_a_plan_as_assembled_has_no_finding(chosen: object) -> None:
    plan = make_plan(chosen=chosen)  # type: ignore[arg-type]
    assert validate(plan, language_model(), cluster()) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_is_found_by_name(name: str) -> None:
    change, fault, about = MUTATIONS[name]
    plan = seal(change(make_plan(chosen=CHOSEN)))
    found = [f for f in validate(plan, language_model(), cluster()) if f.fault is fault]
    assert found, name
    assert any(all(getattr(f, key) == value for key, value in about.items()) for f in found), found


def test_an_edited_file_is_found_by_its_digest() -> None:
    plan = make_plan()
    edited = dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, space="all plans"))
    assert [f.fault for f in validate(edited)] == [Fault.DIGEST]


def test_provenance_is_not_part_of_the_digest() -> None:
    plan = make_plan()
    assert validate(dataclasses.replace(plan, provenance=dataclasses.replace(plan.provenance, model="b.onnx"))) == []


def test_a_deadlock_is_told_as_a_cycle() -> None:
    plan = lines(make_plan(), 0, lambda a: swapped(a, "F0.0", "B0.0"))
    (finding,) = [f for f in validate(seal(plan)) if f.fault is Fault.ACTION_ORDER]
    assert finding.message == "rank 0 runs B0.0 before F0.0"
    two = make_plan(chosen=decision((1, 1), (0, 3), micro_batches=2, schedule="gpipe"))
    late = lines(two, 0, lambda a: swapped(a, "F0.1", "B0.0"))
    (finding,) = [f for f in validate(seal(late)) if f.fault is Fault.DEADLOCK]
    assert finding.message == (
        "the schedule deadlocks: rank 0 at B0.0 waits for B1.0; rank 1 at F1.1 waits for F0.1, which never runs"
    )


def test_a_fingerprint_that_differs_is_all_that_is_said_of_the_model() -> None:
    other = dataclasses.replace(make_graph(["y = MatMul(x, w)"]), fingerprint="1" * 64)
    assert [f.fault for f in validate(make_plan(), other)] == [Fault.MODEL_FINGERPRINT]


def test_many_findings_of_a_kind_are_counted() -> None:
    plan = make_plan(language_model(40), decision((1, 1), (0, 20), 42, micro_batches=2))
    empty = blocks(plan, lambda table: [dataclasses.replace(b, nodes=()) for b in table])
    found = [f for f in validate(seal(empty), language_model(40)) if f.fault is Fault.OPERATOR_MISSING]
    assert len(found) == 21
    assert found[-1].message == "and 102 more of this kind"


def test_runs_written_as_templates_are_checked_as_what_they_stand_for() -> None:
    plan = make_plan()
    (run,) = [run for run in plan.blocks if run.repeat > 1]
    short = tuple(BlockRun(3, r.blocks) if r is run else r for r in plan.blocks)
    assert Fault.STAGE_RANGE in {f.fault for f in validate(seal(dataclasses.replace(plan, blocks=short)))}
