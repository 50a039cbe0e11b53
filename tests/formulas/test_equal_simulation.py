"""Closed forms equal to the simulation of their schedules over ranges of workers and micro-batches, edges included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from planner import Conditions, Measurement, UsageError, formulas, measure_schedule

WORKERS = (1, 2, 3, 4, 5, 8)


def played(schedule: str, stages: int, micro_batches: int, f: float = 1, b: float = 2, **more: Any) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=f, backward_s=b, **more)


def near(found: float | Sequence[float], expected: float | Sequence[float]) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-12, abs=1e-12))


@pytest.mark.parametrize("p", WORKERS)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 16])
def test_pipelines_that_fill_and_drain(p: int, m: int) -> None:
    gpipe, plain = played("gpipe", p, m), played("1f1b", p, m)
    again = played("gpipe:recompute=true", p, m, recompute_s=0.5)
    assert near(formulas.gpipe_makespan_s(p, m, 1, 2), gpipe.makespan_s)
    assert near(formulas.gpipe_makespan_s(p, m, 1, 2, recompute_s=0.5), again.makespan_s)
    assert near(formulas.gpipe_bubble(p, m), gpipe.bubble)
    assert formulas.gpipe_in_flight(p, m) == gpipe.held
    assert near(formulas.pipeline_bubble_over_ideal(p, m), plain.bubble_over_ideal)
    assert formulas.one_f_one_b_in_flight(p, m) == plain.held
    assert formulas.dapple_in_flight(p, m, 2) == played("dapple:most=2", p, m).held
    assert max(played("bpipe", p, m).held) == min(m, formulas.bpipe_in_flight(p))


@pytest.mark.parametrize("p", WORKERS)
@pytest.mark.parametrize("m", [1, 2, 7, 16])
def test_two_directions(p: int, m: int) -> None:
    gems = played("gems", p, m, 1, 1)
    assert (formulas.gems_makespan_s(p, m), formulas.gems_bubble(p, m)) == pytest.approx((gems.makespan_s, gems.bubble))


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 3.0])
def test_chimera(depth: int, b: float) -> None:
    for pairs in (f for f in (1, 2, 3, 4) if depth // 2 % f == 0):
        for n in (*range(1, depth + 1), 2 * depth, 3 * depth):
            found = played(f"chimera:pairs={pairs}", depth, n, 1, b)
            assert near(formulas.chimera_makespan_s(depth, n, 1, b, pairs), found.makespan_s)
            assert near(formulas.chimera_bubble(depth, n, b, pairs), found.bubble)
            if n >= depth:
                assert formulas.chimera_in_flight(depth, pairs) == found.held


@pytest.mark.parametrize("schedule", ["as", "sno", "so", "fbp"])
def test_bapipe(schedule: str) -> None:
    transfer = 0.25 if schedule in ("sno", "so") else 0.0
    for p in WORKERS:
        for m in (1, 2, 3, 5, 16):
            found = played(f"bapipe-{schedule}", p, m, receive_s=transfer)
            assert near(formulas.bapipe_makespan_s(schedule, p, m, 1, 2, transfer), found.makespan_s)
            assert formulas.bapipe_features(schedule, p, m) == found.held


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved(v: int) -> None:
    for p in WORKERS:
        for m in (p, 2 * p, 4 * p):
            found = played(f"interleaved:chunks={v}", p * v, m, 1 / v, 2 / v)
            assert near(formulas.interleaved_makespan_s(p, m, v, 1, 2), found.makespan_s)
            assert near(formulas.interleaved_bubble(p, m, v), found.bubble)
            assert near(formulas.interleaved_in_flight(p, m, v), found.held_micro_batches)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_seq1f1b(k: int) -> None:
    for p in WORKERS:
        for m in (1, 2, 3, 16):
            found = played(f"seq1f1b:splits={k}", p, m)
            assert near(formulas.seq1f1b_bubble(p, m, k), found.bubble)
            assert near(formulas.seq1f1b_in_flight(p, m, k), found.held_micro_batches)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo(waves: int) -> None:
    for p in WORKERS:
        found = played(f"hanayo:waves={waves}", 2 * p * waves, p)
        assert near(formulas.hanayo_makespan(p, waves), found.makespan_s)
        assert near(formulas.hanayo_bubble(p, waves), found.bubble)


@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1.5, 1), (3, 2, 2), (2, 3, 1)])
def test_zero_bubble_for_any_parts(parts: tuple[float, float, float]) -> None:
    """W no longer than F and B."""
    f, b, w = parts
    for p in (1, 2, 4, 6, 8):
        m = 2 * p + 3
        for schedule in ("zb-h1", "zb-h2"):
            found = played(schedule, p, m, f, b + w, weight_grad_s=w)
            assert near(found.iteration_s - m * (f + b + w), formulas.zero_bubble_bubble_s(schedule, p, f, b, w))
            assert max(found.held) == formulas.zero_bubble_in_flight(schedule, p)


@pytest.mark.parametrize("p", [3, 4, 5, 6, 8, 12, 16])
def test_two_chunks_in_a_v(p: int) -> None:
    for schedule, first in (("zb-v", 2 * p), ("v-half", p), ("v-min", p)):
        for m in (first, first + 3, 3 * p):
            found = played(schedule, 2 * p, m, weight_grad_s=1)
            assert found.iteration_s == formulas.zero_bubble_v_makespan(schedule, p, m)
            assert max(found.held_micro_batches) <= formulas.zero_bubble_in_flight(schedule, p)


@pytest.mark.parametrize("parts", [(1, 2, 1), (2, 4, 2), (1, 1.5, 0.5), (2, 3, 1), (3, 5, 2)])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_dualpipe(parts: tuple[float, float, float], overlap: float) -> None:
    """The input gradient B - W as long as the forward, the weight gradient no longer; else it waits elsewhere."""
    f, b, w = parts
    pair = f + b - overlap * min(f, b)
    for p in (2, 4, 8, 12):
        for m in (2 * p, 2 * p + 4):
            found = played("dualpipe", p, m, f, b, weight_grad_s=w, conditions=Conditions(pair_overlap=overlap))
            assert max(found.worker_idle_s) == pytest.approx(formulas.dualpipe_bubble_s(p, pair, b, w))
            assert set(found.held) == {formulas.dualpipe_in_flight(p)}


@pytest.mark.parametrize("p", WORKERS)
def test_pipelines_that_never_drain(p: int) -> None:
    dream, back = played("pipedream", p, max(p, 4)), played("pipelined-backprop", p, 4, 1, 1)
    assert formulas.pipedream_staleness(p) == dream.staleness
    assert formulas.pipedream_weight_versions(p) == dream.weight_versions
    assert formulas.pipelined_backprop_delays(p) == back.staleness
    assert formulas.pipelined_backprop_in_flight(p) == back.held
    for m in (p, p + 3):
        both, newest = played("pipedream-2bw", p, m), played("pipedream-2bw:uniform=false", p, m)
        assert formulas.pipedream_2bw_staleness(p) == both.staleness
        assert formulas.pipedream_2bw_weight_versions(p) == both.weight_versions
        assert formulas.pipedream_2bw_staleness(p, uniform=False) == newest.staleness
    for n in (1, 2, 7):
        assert near(formulas.pipemare_delays(p, n), played("pipemare", p, n, 1, 1).mean_staleness)
    for wave in (1, 2, p, p + 2):
        found = played(f"hetpipe:concurrent={wave}", p, 2 * wave)
        assert found.staleness == (formulas.hetpipe_staleness(wave, 0).local,) * p
        assert formulas.hetpipe_in_flight(p, wave) == found.held


def test_where_the_forms_do_not_hold_they_refuse() -> None:
    with pytest.raises(UsageError, match="make units of 4"):
        formulas.chimera_makespan_s(4, 6, 1, 2)
    with pytest.raises(UsageError, match="not a multiple"):
        formulas.interleaved_makespan_s(4, 6, 2, 1, 2)
    with pytest.raises(UsageError, match="F = B = W"):
        formulas.zero_bubble_bubble_s("zb-v", 4, 1, 2, 1)
    with pytest.raises(UsageError, match="micro_batches is 7"):
        formulas.zero_bubble_v_makespan("zb-v", 4, 7)
    with pytest.raises(UsageError, match="did you mean 'zb-h2' or 'zb-h1'"):
        formulas.zero_bubble_bubble_s("zb-h3", 4, 1, 1, 1)
