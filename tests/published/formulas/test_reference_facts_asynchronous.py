"""Facts of pipelines that never drain at further sizes: each figure a sum worked out by hand, the section beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner import UsageError, measure_schedule, partition, schedules
from planner import formulas as f
from planner.play import Measurement
from tests.shared_data import shared_path


def played(schedule: str, stages: int, micro_batches: int, backward: Any = 2, **more: Any) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=1, backward_s=backward, **more)


def kept(replicas: tuple[int, ...], micro_batches: int) -> tuple[int, ...]:
    return schedules.get("pipedream").in_flight(schedules.Pipeline(replicas, micro_batches))


FACTS: list[tuple[str, str, Callable[[], Any], Any]] = [
    # PipeDream
    ("PipeDream", "D 5: 4, 3, 2, 1, 0 updates", lambda: f.pipedream_staleness(5, 8), (4, 3, 2, 1, 0)),
    ("PipeDream", "D 16: (16 + 1)/2 copies", lambda: f.pipedream_weight_copies(16, 16), 8.5),
    ("PipeDream", "D 16 played: versions 16..1", lambda: played("pipedream", 16, 16).weight_versions, range(16, 0, -1)),
    ("PipeDream", "vertical sync: D versions all over", lambda: played("pipedream:vertical=true", 4, 8).weight_versions,
     (4, 4, 4, 4)),
    ("PipeDream", "NOAM of 7-1: ceil(8/7)", lambda: kept((7, 1), 7)[0], 2),
    ("PipeDream", "NOAM of a straight 8", lambda: f.pipedream_in_flight(8, 8)[0], 8),
    ("PipeDream", "NOAM played: 3 of 4 workers first", lambda: played("pipedream", 2, 12, replicas=[3, 1]).held,
     (2, 2, 2, 1)),
    ("PipeDream", "max(10, 2 x 3 x 20/4)/4", lambda: f.pipedream_stage_s(10, 20, 4, 4), 7.5),
    ("PipeDream", "(10 + 4 x 3 x 20/(4 x 4))/4", lambda: f.pipedream_stage_s(10, 20, 4, 4, cost="released"), 6.25),
    ("PipeDream", "one replica has nothing to exchange", lambda: f.pipedream_stage_s(10, 20, 1, 4), 10),
    ("PipeDream", "ceil((5 + 2)/2), released ceil(5/2)", lambda: [
        f.pipedream_stashes(5, 2), f.pipedream_stashes(5, 2, released=True)], [4, 3]),
    ("PipeDream", "last stage: itself, released nothing", lambda: [
        f.pipedream_stashes(0, 3), f.pipedream_stashes(0, 3, released=True)], [1, 0]),
    # PipeDream-2BW
    ("2BW", "m 16, D 4: two versions", lambda: max(played("pipedream-2bw", 4, 16).weight_versions), 2),
    ("2BW", "newest, D 6: 1, 1, 1, 1, 1, 0", lambda: played("pipedream-2bw:uniform=false", 6, 6).staleness,
     (1, 1, 1, 1, 1, 0)),
    ("2BW", "2 16/8 + 8 24/8", lambda: f.pipedream_2bw_stage_bytes(16, 24, 1, 8), 28),
    ("2BW", "2 16/8 + 24/8 + 8 x 1", lambda: f.pipedream_2bw_stage_bytes(16, 24, 1, 8, recompute=True), 15),
    ("2BW", "flush 16/8 + 8 24/8", lambda: f.pipedream_2bw_stage_bytes(16, 24, 1, 8, schedule="flush"), 26),
    ("2BW", "gpipe 16/8 + 32 24/8", lambda: f.pipedream_2bw_stage_bytes(
        16, 24, 1, 8, schedule="gpipe", micro_batches=32), 98),
    ("2BW", "dream 8 16/8 + 24/8 + 8", lambda: f.pipedream_2bw_stage_bytes(
        16, 24, 1, 8, schedule="dream", recompute=True), 27),
    ("2BW", "1.3B: 24 (12 2048^2 + 13 2048)", lambda: 24 * f.transformer_block_parameters(2048), 1208598528),
    # PipeMare
    ("PipeMare", "P 3, N 2: 5/2, 3/2, 1/2", lambda: f.pipemare_delays(3, 2), (2.5, 1.5, 0.5)),
    ("PipeMare", "P 16, N 8 played", lambda: played("pipemare", 16, 8, 1).mean_staleness,
     [(2 * (16 - i) + 1) / 8 for i in range(1, 17)]),
    ("PipeMare", "P 107, N 32: first 213/32", lambda: f.pipemare_delays(107, 32)[0], 6.65625),
    ("PipeMare", "PipeDream keeps P/N more", lambda: sum(f.pipemare_delays(107, 32)) / 107, 107 / 32),
    ("PipeMare", "(32 + 106)/32", lambda: 1 / (1 - f.gpipe_bubble(107, 32)), 4.3125),
    ("PipeMare", "8/(8 + 15)", lambda: 1 - f.gpipe_bubble(16, 8), 8 / 23),
    ("PipeMare", "T1 half way: 0.2/sqrt(4)", lambda: f.pipemare_learning_rate(0.2, 4, 50, 100), 0.1),
    ("PipeMare", "T1 behind K", lambda: f.pipemare_learning_rate(0.2, 4, 300, 100), 0.2),
    ("PipeMare", "T2 tau 2: sqrt(0.135)", lambda: f.pipemare_velocity_decay(2), 0.135**0.5),
    ("PipeMare", "T2 tau 3 less 1", lambda: f.pipemare_velocity_decay(3, 1), 0.135**0.5),
    ("PipeMare", "T3 a quarter at 4/7: 1/(1/4 7/4 + 3/4)", lambda: f.pipemare_throughput(4, 4, 0.25), 1 / 1.1875),
    ("PipeMare", "T1, T2, T3 by stage", lambda: [
        c.forward_delay + c.synchronous_epochs for c in schedules.get("pipemare:synchronous_epochs=10").corrections(
            schedules.Pipeline((1, 1), 4))], [10.75, 10.25]),
    # Pipelined backpropagation and its mitigations
    ("PB", "S 5: 8, 6, 4, 2, 0", lambda: played("pipelined-backprop", 5, 4, 1).staleness, (8, 6, 4, 2, 0)),
    ("PB", "keeps 2(S-s)+1 samples", lambda: f.pipelined_backprop_in_flight(5, 4), (9, 7, 5, 3, 1)),
    ("PB", "N 32, S 16: 32/62", lambda: f.fill_drain_utilisation(16, 32), 32 / 62),
    ("PB", "below 32/64", lambda: f.fill_drain_bound(16, 32), 0.5),
    ("PB", "a = 1/2^3, b = (1 - 1/8)/(1/2)", lambda: f.spike_compensation(0.5, 3), (0.125, 1.75)),
    ("PB", "no momentum: a 0, b 1", lambda: f.spike_compensation(0.0, 2), (0.0, 1.0)),
    ("PB", "m' = 0.81^(1/2)", lambda: f.scaled_optimizer(0.81, 0.2, 4, 2)[0], 0.9),
    ("PB", "eta' = 0.2 x 0.1 x 2/(0.19 x 4)", lambda: f.scaled_optimizer(0.81, 0.2, 4, 2)[1], 0.04 / 0.76),
    ("PB", "same batch, same optimiser", lambda: f.scaled_optimizer(0.9, 0.1, 64, 64), (0.9, 0.1)),
    ("SpecTrain", "N 8 forward", lambda: f.spectrain_horizons(8)[0], (7, 6, 6, 5, 5, 4, 4, 3)),
    ("SpecTrain", "N 8 backward", lambda: f.spectrain_horizons(8)[1], (0, 0, 1, 1, 2, 2, 3, 3)),
    ("SpecTrain", "in the schedule", lambda: [
        c.forward_horizon for c in schedules.get("pipelined-backprop:mitigation=spectrain").corrections(
            schedules.Pipeline((1,) * 3, 3))], [2, 1, 1]),
    ("PipeOptim", "D 4: D - rank - 1", lambda: f.pipedream_staleness(4, 8), (3, 2, 1, 0)),
    # HetPipe
    ("HetPipe", "Nm 3, D 2: 3 x 3 + 2 - 1", lambda: f.wsp_staleness(3, 2).overall, 10),
    ("HetPipe", "Nm 1, D 4: 5 + 0 - 1", lambda: f.wsp_staleness(1, 4).overall, 4),
    ("HetPipe", "k - q + 1", lambda: f.hetpipe_in_flight(5, 5), (5, 4, 3, 2, 1)),
    ("HetPipe", "wave of 6 s, exchange of 4: D 0 waits", lambda: f.wsp_period_s(6, 4, 0), 10),
    ("HetPipe", "speeds 2, 1 of work 6, 3", lambda: f.hetpipe_partition([3, 3, 3], [1, 2])[0], 3),
    ("HetPipe", "with transfers: max(4, 4 + 2 x 1/2)", lambda: f.hetpipe_partition(
        [4, 4], [1, 1], [1, 0], 2.0)[0], 5),
]  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in FACTS])
def test_fact(call: Callable[[], Any], expected: Any) -> None:
    found = call()
    assert (list(found) if isinstance(expected, range) else found) == pytest.approx(
        list(expected) if isinstance(expected, range) else expected, rel=1e-9, abs=1e-12
    )


def test_gnmt_straight_over_data_parallel() -> None:
    """BaPipe's stand-in: GNMT's profile on 4 GPUs at 12.5 GB/s, a straight pipeline 3.457, data parallelism 1.299."""
    profile = shared_path("instances/pipedream/gnmt.graph.txt")
    plan = partition(profile, machines=4, bandwidth="12.5GB/s")
    alone_s = partition(profile, machines=1, bandwidth="12.5GB/s").objective.value
    (parallel_s,) = (t.value for t in plan.trivial if t.name == "data-parallel")
    assert [part.replicas for part in plan.parts] == [1, 1, 1, 1]
    assert alone_s / plan.objective.value == pytest.approx(3.457, abs=5e-4)
    assert alone_s / parallel_s == pytest.approx(1.299, abs=5e-4)
    assert parallel_s / plan.objective.value == pytest.approx(2.66, abs=5e-3)


@pytest.mark.parametrize(
    ("devices", "policy", "size", "workers"),
    [
        ("VVVVRRRRGGGGQQQQ", "NP", None, ["VVVV", "RRRR", "GGGG", "QQQQ"]),
        ("VVVVRRRRGGGGQQQQ", "ED", None, ["VRGQ"] * 4),
        ("VVVVRRRRGGGGQQQQ", "HD", None, ["VVQQ", "VVQQ", "RRGG", "RRGG"]),
        ("VVVVQQ", "ED", None, ["VVQ", "VVQ"]),
        ("VVRRQQ", "HD", 2, ["VQ", "VQ", "RR"]),
        ("VVVVQQQQ", "NP", 2, ["VV", "VV", "QQ", "QQ"]),
    ],
)
def test_hetpipes_virtual_workers(devices: str, policy: str, size: int | None, workers: list[str]) -> None:
    pool = {kind: devices.count(kind) for kind in dict.fromkeys(devices)}
    assert ["".join(w) for w in f.hetpipe_allocation(pool, policy, size)] == workers


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: f.pipedream_stage_s(1, 1, 2, 1, cost="publshed"), "did you mean 'published'"),
        (lambda: f.pipedream_2bw_stage_bytes(1, 1, 1, 2, schedule="gpip"), "did you mean 'gpipe'"),
        (lambda: f.pipedream_2bw_stage_bytes(1, 1, 1, 2, schedule="gpipe"), "micro_batches is 0"),
        (lambda: f.pipemare_delays(0, 4), "stages is 0"),
        (lambda: f.hetpipe_allocation({"V": 4, "Q": 2}, "HD"), "not as many V as Q"),
        (lambda: f.hetpipe_allocation({"V": 4}, "XD"), "unknown policy"),
        (lambda: f.hetpipe_partition([1, 2], [0, 1]), "slowest_speed is 0"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        call()
