"""Plans of every schedule: written, read back, checked, and played with the time that the schedule itself takes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plans import Area, Plan, RankOrder, diff, dumps, encode, loads, seal, validate
from planner.play import Conditions, Transfers, measure_schedule
from planner.schedules import Action, ActivationUnit, Pipeline, get
from planner.simulate import simulate
from planner.space import Configuration, StageChoice
from tests.plans.sample import language_model, make_plan
from tests.schedules.shapes import served

GIB = 2**30
FORWARD_S, BACKWARD_S, RECEIVE_S = 0.001, 0.0024, 0.0001


def plan_of(name: str, pipeline: Pipeline, copies: int = 1, *, sync_s: float = 0.0, capacity_gib: int = 640) -> Plan:
    """A plan of a toy model, one block a stage: 1 GiB of weights, 1/4 GiB a micro-batch."""
    chosen, stages = get(name), pipeline.stages
    graph = language_model(max(1, stages - 2))
    blocks = max(stages, 3)
    stops = [*range(1, stages), blocks]
    starts = [0, *stops[:-1]]
    choices = tuple(StageChoice(a, b, r) for a, b, r in zip(starts, stops, pipeline.replicas, strict=True))
    decision = Configuration(choices, copies, 1, pipeline.micro_batches, name)
    plan = make_plan(graph, decision, devices=copies * sum(pipeline.replicas), alternatives=())
    kept, versions = chosen.in_flight(pipeline), chosen.weight_versions(pipeline)
    terms = tuple(
        dataclasses.replace(
            stage,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
            recompute_s=0.0,
            receive_s=RECEIVE_S if at else 0.0,
            return_s=RECEIVE_S if at else 0.0,
            sync_s=sync_s,
            exposed_sync_s=sync_s,
            update_s=0.0,
            in_flight=kept[at],
            unit_bytes=GIB // 4 // plan.schedule.parts,
            memory=dataclasses.replace(
                stage.memory,
                weights_bytes=GIB * versions[at],
                gradients_bytes=0,
                optimizer_bytes=0,
                activations_bytes=kept[at] * GIB // 4 // plan.schedule.parts,
                workspace_bytes=0,
                reserve_bytes=0,
            ),
            capacity_bytes=capacity_gib * GIB,
        )
        for at, stage in enumerate(plan.predictions.stages)
    )
    return seal(dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=terms)))


@settings(deadline=None, max_examples=80)
@given(served(), st.sampled_from([1, 1, 2]))
def test_a_plan_of_any_schedule_is_read_back_and_has_nothing_wrong(case: tuple[str, Pipeline], copies: int) -> None:
    plan = plan_of(*case, copies)
    text = dumps(plan)
    assert loads(text) == plan
    assert dumps(loads(text)) == text
    assert validate(plan) == []


@settings(deadline=None, max_examples=60)
@given(served(), st.sampled_from([1, 1, 2]), st.sampled_from(list(Transfers)))
def test_a_plan_plays_as_its_schedule_does(case: tuple[str, Pipeline], copies: int, transfers: Transfers) -> None:
    name, pipeline = case
    if "recompute" in name:
        return  # in a plan the backward's time has the repeated forward in it
    found = simulate(plan_of(name, pipeline, copies), transfers=transfers)
    alone = measure_schedule(
        name,
        pipeline.stages,
        pipeline.micro_batches,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        receive_s=RECEIVE_S,
        evict_s=0.0025 if "bpipe" in name else 0.0,
        replicas=pipeline.replicas,
        conditions=Conditions(transfers=transfers),
    )
    if "bpipe" not in name:  # there the moves take a time that depends on the links
        assert found.step_s == pytest.approx(alone.iteration_s)
        waits_s = sum(alone.worker_idle_s) / len(alone.worker_idle_s) if pipeline.stages > 1 else 0.0
        assert found.bubble_fraction == pytest.approx(waits_s / alone.iteration_s, abs=1e-6)
    assert found.copies == copies
    assert sum(len(lane.ranks) for lane in found.lanes) == copies * alone.workers


@settings(deadline=None, max_examples=40)
@given(served().filter(lambda case: not get(case[0]).weight_policy.synchronous), st.integers(1, 4))
def test_what_goes_on_for_ever_is_what_the_schedule_does(case: tuple[str, Pipeline], times: int) -> None:
    name, pipeline = case
    plan = plan_of(name, pipeline)
    work = get(name).work(pipeline, plan.schedule.iterations + times - 1)
    written = [lane for rank in range(len(work.lanes)) for lane in plan.lanes(rank, times)]
    assert written == list(work.lanes)


def test_memory_of_a_plan_counts_versions_of_the_weights() -> None:
    """PipeDream, 3 stages: 3, 2 and 1 versions and micro-batches."""
    found = simulate(plan_of("pipedream", Pipeline((1,) * 3, 6)))
    assert [lane.memory.peak_bytes / GIB for lane in found.lanes] == [3.75, 2.5, 1.25]
    assert [lane.in_flight for lane in found.lanes] == [3, 2, 1]


def test_copies_of_a_pipeline_that_never_drains_exchange_before_each_update() -> None:
    plan = plan_of("pipedream-2bw", Pipeline((1, 1), 2), 2)
    assert " ".join(map(str, plan.actions(1)[:8])) == "F1.0@0 B1.0@0 F1.2@0 B1.2@0 S1.0 U1.0 F1.4@0 B1.4@0"
    assert plan.schedule.averaged == ()
    assert plan_of("pipedream", Pipeline((2, 1), 4)).schedule.averaged == (2, 1)


def changed(plan: Plan, rank: int, line: str) -> Plan:
    """The plan with another line for one rank."""
    orders = tuple(dataclasses.replace(o, actions=line) if o.ranks == (rank,) else o for o in plan.schedule.orders)
    return seal(dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders)))


def faults(plan: Plan) -> str:
    """What is wrong with a plan, in a line."""
    return "; ".join(finding.message for finding in validate(plan))


def test_a_version_that_is_not_held_is_found() -> None:
    plan = plan_of("pipedream", Pipeline((1, 1), 4))
    line = plan.schedule.orders[0].actions
    late = line.replace("F0.0-1@0", "F0.0@0 F0.1@2")
    assert "reads version 2 of the weights of stage 0, which is not made yet" in faults(changed(plan, 0, late))


def test_a_deadlock_of_directions_shows_the_cycle() -> None:
    """Chimera on two workers: both begin with the second stage of a direction that nobody has begun."""
    plan = plan_of("chimera", Pipeline((1, 1), 2))
    first = changed(plan, 0, "F1.1 F0.0 B1.1 B0.0 S0 S1 U0 U1")
    both = changed(first, 1, "F1.0 F0.1 B1.0 B0.1 S0 S1 U0 U1")
    assert "rank 0 at F1.1 waits for F0.1; rank 1 at F1.0 waits for F0.0" in faults(both)


def test_memory_along_the_order_is_checked() -> None:
    plan = plan_of("zb-v", Pipeline((1,) * 4, 8), capacity_gib=2)
    assert "rank 1 holds 2.25 GiB of 2 GiB when F1.0 runs" in faults(plan)


@pytest.mark.parametrize(
    "name", ["pipedream", "pipedream:vertical=true", "pipedream-2bw", "pipemare", "pipelined-backprop", "hetpipe"]
)
def test_a_tie_between_stages_that_never_drain_is_given_up_by_name(name: str) -> None:
    """The first and the last stage hold the embedding; no order exchanges its gradient, and the plan says so."""
    plan = plan_of(name, Pipeline((1,) * 4, 4))
    (shared,) = plan.shared_parameters
    assert (shared.parameter, shared.stages, shared.reduction) == ("w_embed", (0, 3), "none")
    assert "separate_copies" in plan.requires
    assert "tied_parameters" not in plan.requires
    assert [n.where for n in plan.notes if n.code == "tie-given-up"] == ["w_embed"]
    assert not any(c.of == "tied gradients" for s in plan.predictions.stages for c in s.collectives)
    assert validate(plan, language_model(2)) == []
    summed = dataclasses.replace(plan, shared_parameters=(dataclasses.replace(shared, reduction="sum"),))
    assert '\'w_embed\': shared_parameters[0].reduction: "sum" in the file, "none" worked out anew' in faults(
        seal(summed)
    )


def test_a_tie_is_kept_where_the_pipeline_drains() -> None:
    plan = plan_of("bpipe", Pipeline((1,) * 4, 4))
    assert [shared.reduction for shared in plan.shared_parameters] == ["sum"]
    assert "separate_copies" not in plan.requires


def capped(plan: Plan, rank: int, capacity_bytes: int) -> Plan:
    """The plan with less memory on the device of one stage's rank."""
    stages = list(plan.predictions.stages)
    stages[rank] = dataclasses.replace(stages[rank], capacity_bytes=capacity_bytes)
    return seal(dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=tuple(stages))))


def test_what_others_evict_counts_at_the_receiver() -> None:
    """BPipe, 4 stages: rank 3 keeps 1 of its own and 1 of rank 0's, 1 GiB of weights and 1/4 GiB each: 1.5 GiB."""
    plan = plan_of("bpipe", Pipeline((1,) * 4, 8))
    assert faults(capped(plan, 3, GIB * 3 // 2)) == ""
    message = faults(capped(plan, 3, GIB * 3 // 2 - 9))
    assert message.startswith("rank 3 holds 1.5 GiB of 1.5 GiB when F3.0 runs, 256 MiB of it evicted from other ranks")


@pytest.mark.parametrize(
    ("rank", "line", "message"),
    [
        (0, "F0.0 SA0.0 F0.1 B0.0-1 S0 U0", "rank 0: SA0.0: stage 1 never receives it"),
        (1, "RA1.0 F1.0 B1.0 F1.1 B1.1 S1 U1", "rank 1: RA1.0: stage 0 never sends it"),
        (1, "F1.0 SA1.0 B1.0 F1.1 B1.1 S1 U1", "rank 1: SA1.0: no stage receives it"),
    ],
)
def test_a_send_without_its_receive_is_found(rank: int, line: str, message: str) -> None:
    plan = changed(plan_of("1f1b", Pipeline((1, 1), 2)), rank, line)
    assert message in faults(plan)
    with pytest.raises(PlanError, match=message.partition(": ")[2]):
        simulate(plan)


@pytest.mark.parametrize(
    ("place", "message"),
    [(">-3", "evicts to rank -3"), (">-1", "evicts to rank -1"), (">+0", ">+0"), (">+9", ">+9")],
)
def test_an_eviction_to_nobody_is_found(place: str, message: str) -> None:
    plan = plan_of("bpipe", Pipeline((1,) * 4, 8))
    line = plan.schedule.orders[0].actions
    assert ">+3" in line
    assert message in faults(changed(plan, 0, line.replace(">+3", place)))


def test_a_part_that_comes_too_early_is_found() -> None:
    plan = plan_of("seq1f1b", Pipeline((1,), 1))
    assert plan.actions(0)[:4] == tuple(
        Action(a.kind, 0, 0, part=p) for a, p in zip(plan.actions(0)[:4], (0, 1, 1, 0), strict=True)
    )
    line = encode([*plan.actions(0)[:2][::-1], *plan.actions(0)[2:]])
    assert "does not come after the forward of the part before" in faults(changed(plan, 0, line))


@pytest.mark.parametrize(
    ("name", "stages", "workers"), [("interleaved", 4, 2), ("zb-v", 4, 2), ("hanayo", 4, 2), ("chimera", 4, 4)]
)
def test_ranks_that_run_several_stages(name: str, stages: int, workers: int) -> None:
    plan = plan_of(name, Pipeline((1,) * stages, 4), 2)
    assert plan.world_size == 2 * workers
    assert "multi_stage_rank" in plan.requires
    assert get(name).activation_unit in (ActivationUnit.CHUNK, ActivationUnit.MICRO_BATCH)
    assert {plan.route(0, m) for m in range(8)} <= set(range(len(plan.stages[0].replicas)))


def test_corrections_stand_in_the_plan() -> None:
    """PipeMare, P = 2 and N = 4: tau = 3/4 and 1/4; P = 4 and N = 1: tau = 7, 5, 3 and 1."""
    plan = plan_of("pipemare", Pipeline((1, 1), 4))
    assert [c.forward_delay for c in plan.schedule.corrections] == [0.75, 0.25]
    assert [c.learning_rate_factor for c in plan.schedule.corrections] == [1.0, 1.0]
    slow = plan_of("pipemare:annealing_steps=100", Pipeline((1,) * 4, 1)).schedule.corrections
    assert [c.learning_rate_factor for c in slow] == pytest.approx([1 / 7, 1 / 5, 1 / 3, 1])
    assert [c.annealing_steps for c in slow] == [100] * 4
    predicted = plan_of("pipelined-backprop:mitigation=lwp", Pipeline((1, 1), 4)).schedule
    assert [c.forward_horizon for c in predicted.corrections] == [2, 0]
    assert predicted.optimizer is not None
    assert predicted.optimizer.momentum == pytest.approx(0.9**0.25)


def test_orders_of_a_thousand_ranks_stay_small() -> None:
    """16 workers of 4 chunks, 64 copies, 512 micro-batches each: 4 million actions."""
    plan = plan_of("interleaved:chunks=4", Pipeline((1,) * 64, 512), 64)
    assert plan.world_size == 1024
    written = dumps(plan)
    assert sum(len(order.actions) for order in plan.schedule.orders) < 10_000
    assert loads(written).lanes(1023)[0] == plan.lanes(1023)[0]


def test_an_exchange_that_is_waited_for_before_it_is_launched_is_found() -> None:
    plan = plan_of("chimera", Pipeline((1,) * 4, 4))
    line = plan.schedule.orders[-1].actions
    assert line.endswith("G3 B0.2-3 S0 S3 U0 U3")
    wrong = changed(plan, 3, line.replace("G3 B0.2-3 S0 S3", "S3 B0.2-3 S0 G3"))
    assert "waits for" in faults(wrong)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("pipedream", "staleness", (2, 0, 0), "schedule.staleness[1]: 0 in the file, 1 worked out anew"),
        ("pipedream", "staleness", (), "schedule.staleness: nothing in the file, [2, 1, 0] worked out anew"),
        ("pipedream", "averaged", (), "schedule.averaged: nothing in the file, [1, 1, 1] worked out anew"),
        ("pipedream-2bw", "averaged", (1, 1, 1), "schedule.averaged: [1, 1, 1] in the file, nothing worked out anew"),
        ("pipedream", "versions", (), "schedule.versions: nothing in the file, [3, 2, 1] worked out anew"),
        ("pipedream", "weight_policy", "2bw", 'schedule.weight_policy: "2bw" in the file, "stash" worked out anew'),
        ("pipemare", "weight_policy", "stash", 'schedule.weight_policy: "stash" in the file, "newest" worked out anew'),
        ("pipemare", "corrections", (), "schedule.corrections: nothing in the file, 3 entries worked out anew"),
        ("pipedream", "clock_distance", 1, "schedule.clock_distance: 1 in the file, nothing worked out anew"),
        ("1f1b", "staleness", (1, 1, 0), "schedule.staleness: [1, 1, 0] in the file, nothing worked out anew"),
    ],
)
def test_what_a_plan_says_of_its_orders_is_what_they_do(name: str, field: str, value: object, message: str) -> None:
    plan = plan_of(name, Pipeline((1,) * 3, 6))
    assert faults(plan) == ""
    plan = dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, **{field: value}))  # type: ignore[arg-type]
    found = [f.message for f in validate(seal(plan))]
    assert any(message in text for text in found)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("iterations", 0, "orders of 0 iterations"),
        ("parts", 0, "0 parts of a micro-batch"),
        ("versions", (1, 2, 3), "versions are given for 3 stages, the plan has 2"),
        ("limits", (0, 1), "limits are below 1"),
        ("weight_policy", "never", "'never' is no weight policy"),
        ("streaming", True, "streaming is said of ranks that do not run their lanes side by side"),
        ("causal", True, "said to be causal, but it has one"),
        ("side_by_side", True, "said to run side by side, but some rank has one"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(field: str, value: object, message: str) -> None:
    plan = plan_of("pipedream", Pipeline((1, 1), 4))
    plan = seal(dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, **{field: value})))  # type: ignore[arg-type]
    assert message in faults(plan)
    with pytest.raises(PlanError, match=message):
        simulate(plan)


def test_differences_between_schedules_are_told() -> None:
    old, new = plan_of("1f1b", Pipeline((1, 1), 4)), plan_of("pipemare", Pipeline((1, 1), 4))
    told = {change.path: change.new for change in diff(old, new) if change.area is Area.SCHEDULE}
    assert told["weight_policy",] == "newest"
    assert "correction forward_delay: 0.75" in str(told["stage 0",])
    assert told["staleness",] == (1, 1)


def test_damage_in_any_copy_is_found() -> None:
    """Copies that do the same on their own micro-batches are checked once; one that does not is looked at."""
    plan = plan_of("1f1b", Pipeline((1, 1), 4), 3)
    first, second = plan.schedule.orders
    twice = dataclasses.replace(first, first=(0, 1, 1))
    assert "schedule.orders.rank 4.first: 1 in the file, 2 worked out anew" in faults(with_orders(plan, twice, second))
    fewer = dataclasses.replace(first, ranks=(0, 2), first=(0, 1))
    assert "schedule.orders.rank 4: nothing in the file" in faults(with_orders(plan, fewer, second))
    other = dataclasses.replace(first, ranks=(4,), first=(2,), actions="B0.0 F0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 S0 U0")
    late = with_orders(plan, fewer, other, second)
    assert 'schedule.orders.rank 4.actions: "B0.0 F0.0' in faults(late)


def with_orders(plan: Plan, *orders: RankOrder) -> Plan:
    return seal(dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders)))


@pytest.mark.parametrize(("stages", "pairs"), [(4, 2), (6, 3), (8, 4)])
def test_ranks_meet_where_stages_share_weights(stages: int, pairs: int) -> None:
    """One micro-batch fewer than stages: a rank has stages 1, 2, 3, another 0, 1, 2, and 0 and 3 share weights."""
    plan = plan_of(f"chimera:pairs={pairs}", Pipeline((1,) * stages, stages - 1))
    assert [p.stages for p in plan.shared_parameters] == [(0, stages - 1)]
    last = f"S{stages - 1}"
    for order in plan.schedule.orders:
        exchanges = [word for word in order.actions.split() if word.startswith("S")]
        assert exchanges == sorted(exchanges, key=lambda word: (word not in ("S0", last), int(word[1:])))
    assert validate(plan) == []


def test_ranks_that_meet_in_the_order_of_their_stages_wait_for_ever() -> None:
    plan = plan_of("chimera:pairs=2", Pipeline((1,) * 4, 3))
    orders = tuple(
        dataclasses.replace(o, actions=o.actions.replace("S3 S1 S2", "S1 S2 S3")) for o in plan.schedule.orders
    )
    assert orders != plan.schedule.orders
    stuck = seal(dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders)))
    assert "the schedule deadlocks" in faults(stuck)
