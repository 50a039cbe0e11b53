"""Closed forms of the literature equal to the simulation over ranges of stages and micro-batches, or the difference."""

from __future__ import annotations

import pytest

from planner import formulas
from planner.play import Conditions, Measurement, measure_schedule

STAGES = (1, 2, 3, 4, 6, 8)


def equal(schedule: str, stages: int, micro_batches: int, backward: float = 2.0, scale: float = 1.0) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=scale, backward_s=backward * scale)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "dapple", "bapipe-as", "bapipe-so", "bpipe", "dapple:policy_of=b"]
)
@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
def test_bubble_of_pipelines_that_drain(schedule: str, backward: float) -> None:
    for p in STAGES:
        for m in (1, p, 2 * p + 1, 4 * p):
            if m >= 1:
                assert equal(schedule, p, m, backward).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved(chunks: int) -> None:
    for p in (2, 3, 4, 8):
        for groups in (1, 2, 4):
            found = equal(f"interleaved:chunks={chunks}", p * chunks, p * groups)
            assert found.bubble == pytest.approx((p - 1) / (chunks * p * groups + p - 1))
            assert found.bubble_over_ideal == pytest.approx((p - 1) / (chunks * p * groups))
            if groups > 1:  # with one group the last worker has fewer micro-batches than its warm-up
                assert found.held_micro_batches[0] / p == pytest.approx(1 + (p - 1) / (p * chunks))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_seq1f1b(splits: int) -> None:
    for p in STAGES:
        for m in (2, p, 3 * p):
            found = equal(f"seq1f1b:splits={splits}", p, m)
            assert found.bubble == pytest.approx((p - 1) / (splits * m + p - 1))


def test_chimera_of_one_unit() -> None:
    for depth in (2, 4, 6, 8, 12):
        for pairs in (f for f in (1, 2, 3, 4) if depth // 2 % f == 0):
            found = equal(f"chimera:pairs={pairs}", depth, depth, backward=1)
            idle = depth / pairs - 2
            assert found.bubble == pytest.approx(idle / (2 * depth + idle))
        assert equal("chimera", depth, depth).bubble == pytest.approx((depth - 2) / (1.5 * depth + depth - 2))


def test_chimera_of_several_units() -> None:
    """B = 2F: each joint of two units leaves a bubble, so the form for one unit, (D-2)/(3N/2+D-2), is too low."""
    for depth in (4, 6, 8):
        for units in (1, 2, 3, 5):
            n = units * depth
            assert equal("chimera", depth, n, 1).makespan_s == 2 * n + depth - 2
            assert equal("chimera", depth, n).makespan_s == 3 * n + (units + 1) * (depth - 2)


def test_chimera_doubled() -> None:
    """Forwards of two: the joints cost nothing, and the bubble at the ends is twice that of one unit with F = B."""
    for depth in (2, 4, 6, 8, 12):
        for units in (1, 2, 3):
            n = 2 * units * depth
            found = equal("chimera:over=double", depth, n)
            assert found.makespan_s == 3 * n + 2 * (depth - 2)
            assert max(found.held) == 2 * depth


def test_chimera_halved() -> None:
    """Backwards of half a micro-batch, N = K D: the joints cost nothing, and the bubble is that of one unit."""
    for depth in (2, 4, 6, 8, 12):
        for units in (1, 2, 3):
            n = units * depth
            assert equal("chimera:over=halve", depth, n).makespan_s == 3 * n + depth - 2


def test_chimera_keeps_between_half_and_all() -> None:
    for depth in (4, 6, 8, 10):
        found = equal("chimera", depth, 2 * depth)
        assert list(found.held) == [min(depth, depth // 2 + 1 + min(w, depth - 1 - w)) for w in range(depth)]


def test_gems() -> None:
    for p in (2, 3, 4, 8):
        for m in (1, 2, 7, 16):
            assert equal("gems", p, m, 1).makespan_s == (m - 1) * (p + 1) + 2 * p


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_of_one_round(waves: int) -> None:
    for p in (1, 2, 3, 4, 6, 8):
        found = equal(f"hanayo:waves={waves}", 2 * p * waves, p)
        assert found.bubble == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))


@pytest.mark.parametrize("transfer", [0.25, 0.5])
def test_bapipe_with_transfers(transfer: float) -> None:
    for n in (2, 3, 4, 8):
        for m in range(4, 33, 7):
            times = {"forward_s": 1.0, "backward_s": 2.0, "receive_s": transfer}
            waiting = measure_schedule("bapipe-sno", n, m, **times)  # type: ignore[arg-type]
            overlapped = measure_schedule("bapipe-so", n, m, **times)  # type: ignore[arg-type]
            assert waiting.makespan_s == pytest.approx(formulas.bapipe_makespan_s("sno", n, m, 1, 2, transfer))
            assert overlapped.makespan_s == pytest.approx(formulas.bapipe_makespan_s("so", n, m, 1, 2, transfer))


def test_bapipe_forward_and_backward_side_by_side() -> None:
    for p in (1, 2, 3, 5):
        for m in (1, 4, 9):
            strict, streamed = equal("bapipe-fbp", p, m), equal("bapipe-fbp:fill_overlap=true", p, m)
            assert strict.makespan_s == pytest.approx((m + 2 * p - 1) * 3)
            assert streamed.makespan_s == pytest.approx((m + p - 1) * 3)


def test_zero_bubble_costs() -> None:
    """F = B = W: (p-1)(F+B-W) above the ideal with p micro-batches, nothing with 2p - 1 or in a V."""
    for p in (2, 3, 4, 6, 8):
        for m in (2 * p, 3 * p + 1):
            for schedule, stages, above, kept in (("zb-h1", p, p - 1, p), ("zb-h2", p, 0, 2 * p - 1)):
                found = measure_schedule(schedule, stages, m, forward_s=1, backward_s=2, weight_grad_s=1)
                assert found.iteration_s == 3 * m + above
                assert max(found.held) == kept
            folded = measure_schedule("zb-v", 2 * p, m, forward_s=1, backward_s=2, weight_grad_s=1)
            assert folded.iteration_s == 6 * m
            assert max(folded.held) == 2 * p


def test_zero_bubble_with_few_micro_batches_has_a_bubble() -> None:
    """Fewer than 2p - 1 micro-batches cannot fill the way there and back."""
    found = measure_schedule("zb-h2", 8, 8, forward_s=1, backward_s=2, weight_grad_s=1)
    assert found.iteration_s > 24


def test_memory_of_half_and_least() -> None:
    """floor((p+2)/2) and floor((p+4)/3) stages' worth; V-half costs 3p - 7 above the ideal for an even p from 4 on."""
    for p in range(2, 10):
        half = measure_schedule("v-half", 2 * p, 3 * p, forward_s=1, backward_s=2, weight_grad_s=1)
        least = measure_schedule("v-min", 2 * p, 3 * p, forward_s=1, backward_s=2, weight_grad_s=1)
        assert max(half.held_micro_batches) <= (p + 2) // 2
        assert max(least.held_micro_batches) <= (p + 4) // 3
        if p % 2 == 0 and p >= 4:
            assert half.iteration_s == 18 * p + 3 * p - 7
        assert half.iteration_s <= least.iteration_s


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_dualpipe_bubble(overlap: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W): every worker's for F&B = F + B, the worst one's when pairs overlap."""
    pair = 3 - overlap
    for p in (2, 4, 6, 8, 12):
        for m in (2 * p, 2 * p + 6):
            found = measure_schedule(
                "dualpipe",
                p,
                m,
                forward_s=1,
                backward_s=2,
                weight_grad_s=1,
                conditions=Conditions(pair_overlap=overlap),
            )
            assert max(found.worker_idle_s) == pytest.approx(formulas.dualpipe_bubble_s(p, pair, 2, 1))
            if not overlap:
                assert min(found.worker_idle_s) == pytest.approx(max(found.worker_idle_s))
            assert found.held == (p + 1,) * p


def test_dualpipe_v_is_half_of_dualpipe() -> None:
    for workers in (1, 2, 3, 4, 6):
        for m in (2 * workers, 5 * workers):
            found = measure_schedule("dualpipe-v", 2 * workers, m, forward_s=1, backward_s=2, weight_grad_s=1)
            assert max(found.worker_idle_s) == pytest.approx(formulas.dualpipe_bubble_s(2 * workers, 3, 2, 1))
            assert set(found.held) == {2 * workers + 1}


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream:vertical=true", "pipedream-2bw", "pipemare", "hetpipe"])
def test_no_bubble_without_a_flush(schedule: str) -> None:
    for p in STAGES:
        found = equal(schedule, p, 2 * p)
        assert found.bubble == pytest.approx(0, abs=1e-9)
        assert found.cycle >= 1


def test_recomputation() -> None:
    """After the gradient: (m+p-1)(2F+B). Early: all but the last stage repeat a forward while they wait, p-1 less."""
    for p in (2, 4, 8):
        for m in (1, 8):
            late, early = equal("gpipe:recompute=true", p, m), equal("gpipe:recompute=true,early=true", p, m)
            assert late.makespan_s == pytest.approx((m + p - 1) * 4)
            assert early.makespan_s == pytest.approx((m + p - 1) * 4 - (p - 1))
