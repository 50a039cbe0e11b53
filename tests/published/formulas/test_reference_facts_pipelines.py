"""Facts of published pipelines at further sizes: each figure a sum worked out by hand, the section beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner import formulas as f
from planner import measure_schedule
from planner.play import Measurement


def played(
    schedule: str, stages: int, micro_batches: int, forward: Any = 1, backward: Any = 2, **more: Any
) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=forward, backward_s=backward, **more)


def split(schedule: str, stages: int, micro_batches: int) -> float:
    return played(schedule, stages, micro_batches, weight_grad_s=1).iteration_s


FACTS: list[tuple[str, str, Callable[[], Any], Any]] = [
    # GPipe: (M + K - 1)(F + B), (K - 1)/(M + K - 1), K M/(M + K - 1), all M kept
    ("GPipe", "K 16, M 64: 79 slots of 3", lambda: f.gpipe_makespan_s(16, 64, 1, 2), 79 * 3),
    ("GPipe", "K 16, M 64, played", lambda: played("gpipe", 16, 64).makespan_s, 79 * 3),
    ("GPipe", "K 2, M 4: 1/5", lambda: f.gpipe_bubble(2, 4), 1 / 5),
    ("GPipe", "one stage never waits", lambda: played("gpipe", 1, 7).bubble, 0),
    ("GPipe", "fewer micro-batches than stages: 7/9", lambda: played("gpipe", 8, 2).bubble, 7 / 9),
    ("GPipe", "M = 4K is below 1/5: 7/39", lambda: f.gpipe_bubble(8, 32), 7 / 39),
    ("GPipe", "K 8, M 4: 8 x 4/11", lambda: f.gpipe_speedup(8, 4), 32 / 11),
    ("GPipe", "remat K 8, M 32: 39 (1+2+1)", lambda: f.gpipe_makespan_s(8, 32, 1, 3), 39 * 4),
    ("GPipe", "remat played", lambda: played("gpipe:recompute=true", 8, 32, recompute_s=1).makespan_s, 39 * 4),
    ("GPipe", "remat keeps N + L/K N/M: 96 + 24/4 96/8", lambda: f.gpipe_activation_bytes(24, 4, 8, 96), 96 + 72),
    ("GPipe", "without remat N L/K", lambda: f.gpipe_activation_bytes(24, 4, 8, 96, recompute=False), 96 * 6),
    # 1F1B
    ("1F1B", "D 16, M 16: 31 x 3", lambda: played("1f1b", 16, 16).makespan_s, 31 * 3),
    ("1F1B", "D 6, M 4 keeps min(M, D - s)", lambda: played("1f1b", 6, 4).held, (4, 4, 4, 3, 2, 1)),
    ("1F1B", "over ideal 3/8, over total 3/11", lambda: f.one_f_one_b_bubble_over_ideal(4, 8), 3 / 8),
    # interleaved
    ("Interleaved", "p 8, m 16, v 2: 16 x 3 + 7 x 3/2", lambda: f.interleaved_makespan_s(8, 16, 1, 2), 58.5),
    ("Interleaved", "played in chunks of half", lambda: played("interleaved", 16, 16, 0.5, 1).makespan_s, 58.5),
    ("Interleaved", "bubble 7/39", lambda: f.interleaved_bubble(8, 16), 7 / 39),
    ("Interleaved", "keeps (14 + 8 + 1)/2 stages", lambda: f.interleaved_in_flight(8, 16)[0], 11.5),
    ("Interleaved", "memory 1 + 7/16 of 1F1B", lambda: f.interleaved_in_flight(8, 16)[0] / 8, 23 / 16),
    ("Interleaved", "chunks 2(p-r-1) + (v-1)p and one", lambda: [2 * k - 1 for k in f.interleaved_in_flight(8, 16)], [
        22, 20, 18, 16, 14, 12, 10, 8]),
    ("Interleaved", "p 4, m 8, v 4: 3/35", lambda: played("interleaved:chunks=4", 16, 8).bubble, 3 / 35),
    ("Interleaved", "v 1 is 1F1B", lambda: f.interleaved_makespan_s(4, 8, 1, 2, chunks=1), 11 * 3),
    # Chimera
    ("Chimera", "D 8, N 8, F = B: 6/22", lambda: f.chimera_bubble(8, 8, 1, 1), 6 / 22),
    ("Chimera", "D 8, N 8, B = 2F: 8 + 2 (8 + 6)", lambda: played("chimera", 8, 8).makespan_s, 36),
    ("Chimera", "D 8, B = 2F: 6/(12 + 6)", lambda: f.chimera_bubble(8, 8), 1 / 3),
    ("Chimera", "D 8, N 24, B = 2F: 72 + 4 x 6", lambda: f.chimera_makespan_s(8, 24, 1, 2), 96),
    ("Chimera", "D 4, N 16, F = B: 32 + 2", lambda: played("chimera", 4, 16, 1, 1).makespan_s, 34),
    ("Chimera", "D 16, f 2, N 16, F = B: 32 + 8 - 2", lambda: f.chimera_makespan_s(16, 16, 1, 1, pairs=2), 38),
    ("Chimera", "D 2 never waits", lambda: played("chimera", 2, 8).bubble, 0),
    ("Chimera", "D 10 keeps 6 to 10", lambda: f.chimera_in_flight(10, 10), (6, 7, 8, 9, 10, 10, 9, 8, 7, 6)),
    ("Chimera", "(1+.5)4 + (2+.5)6 + 3", lambda: f.chimera_iteration_s(4, 4, 1, 2, 0.5, 3), 6 + 15 + 3),
    ("Chimera", "f 4: eight copies", lambda: f.chimera_weight_copies(8, 8, pairs=4), 8),
    ("Chimera", "W 16, f 2: 64 exchange", lambda: 16 * f.chimera_weight_copies(4, 4, pairs=2), 64),
    ("Chimera", "doubled, D 4, N 8: 24 + 2 x 2", lambda: played("chimera:over=double", 4, 8).makespan_s, 28),
    ("Chimera", "BERT-48, D 24: 2 layers and embeddings", lambda: f.largest_stage_parameters(48, 1024, 24), 56975360),
    ("Chimera", "GPT-2, D 64: one layer more", lambda: f.largest_stage_parameters(64, 1280, 64, "gpt"), 85317120),
    # GEMS
    ("GEMS", "D 4, M 16: 15 x 5 + 8", lambda: played("gems", 4, 16, 1, 1).makespan_s, 83),
    ("GEMS", "D 2, M 1: 4", lambda: f.gems_makespan_s(2, 1, 1, 1), 4),
    ("GEMS", "survey, D 16: 15/16.5", lambda: f.gems_survey_bubble(16), 15 / 16.5),
    # BaPipe
    ("BaPipe", "sno N 8, M 16, SR 1/2: 23 x 3 + (22 - 2) 1", lambda: f.bapipe_makespan_s("sno", 8, 16, 1, 2, 0.5), 89),
    ("BaPipe", "sno played", lambda: played("bapipe-sno", 8, 16, receive_s=0.5).makespan_s, 89),
    ("BaPipe", "so N 8, M 16, SR 1/2: 69 + 7", lambda: played("bapipe-so", 8, 16, receive_s=0.5).makespan_s, 76),
    ("BaPipe", "sno N 2, M 8, SR 1/4: 27 + (8 - 4)/2", lambda: f.bapipe_makespan_s("sno", 2, 8, 1, 2, 0.25), 29),
    ("BaPipe", "fbp strict N 4, M 8: 15 x 3", lambda: played("bapipe-fbp", 4, 8).makespan_s, 45),
    ("BaPipe", "fbp published N 4, M 8: 11 x 3", lambda: f.bapipe_makespan_s("fbp", 4, 8, 1, 2, fill_overlap=True), 33),
    ("BaPipe", "so needs 2(N-i)+1", lambda: played("bapipe-so", 5, 16).held, (9, 7, 5, 3, 1)),
    ("BaPipe", "so asks 2(N-i+1)", lambda: f.bapipe_features("so", 5), (10, 8, 6, 4, 2)),
    ("BaPipe", "as asks a/F, fbp 2a/(F+B)", lambda: f.bapipe_bandwidth_byte_per_s("fbp", 12, 1, 3), 6),
    # zero bubble: (p-1)(F+B-W), (p-1)(F+B-2W)
    ("ZeroBubble", "p 6, m 12: 36 + 5", lambda: split("zb-h1", 6, 12), 41),
    ("ZeroBubble", "p 16, m 32: 96 + 15", lambda: split("zb-h1", 16, 32), 111),
    ("ZeroBubble", "p 8, m 24, limit 12", lambda: split("zb-h1:limit=12", 8, 24), 75),
    ("ZeroBubble", "p 6, m 12, no bubble", lambda: split("zb-h2", 6, 12), 36),
    ("ZeroBubble", "zb-v p 6, m 12: 72 half stages", lambda: split("zb-v", 12, 12), 72),
    ("ZeroBubble", "v-half p 16, m 32: 192 + 48 - 7", lambda: split("v-half", 32, 32), 233),
    ("ZeroBubble", "v-min p 16, m 32: 192 + 64 - 5", lambda: split("v-min", 32, 32), 251),
    ("ZeroBubble", "F 2, B 2, W 1, p 4: 3 x 3", lambda: f.zb_h1_idle_s(4, 8, 2, 3, 1), 9),
    ("ZeroBubble", "the same, h2: 3 x 2", lambda: f.zb_h2_idle_s(4, 8, 2, 3, 1), 6),
    ("ZeroBubble", "makespan 27, cost 24", lambda: played("zb-h2", 4, 8, weight_grad_s=1).makespan_s, 27),
    ("ZeroBubble", "p 12 keeps 12, 23, 12, 7, 5", lambda: [
        max(f.schedule_figures(s, 12, 36).in_flight) for s in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")], [
        12, 23, 12, 7, 5]),
    # Hanayo, BPipe, DualPipe, Seq1F1B
    ("Hanayo", "P 4, W 1: 2 (12 + 6)", lambda: played("hanayo", 8, 4).makespan_s, 36),
    ("Hanayo", "P 8, W 2: 2 (48 + 14)", lambda: f.hanayo_makespan_s(8, 8, 4, 8, waves=2), 124),
    ("Hanayo", "P 8, W 2: 14/62", lambda: played("hanayo:waves=2", 32, 8).bubble, 14 / 62),
    ("Hanayo", "P 4, W 1 as Chimera with D 8, M 4 of half stages", lambda: played("chimera", 8, 8).makespan_s, 36),
    ("BPipe", "ceil((p+2)/2) of 5, 6, 7, 16", lambda: [
        max(f.bpipe_in_flight(p, 3 * p)) for p in (5, 6, 7, 16)], [4, 4, 5, 9]),
    ("BPipe", "p 6 played", lambda: max(played("bpipe", 6, 24).held), 4),
    ("DualPipe", "PP 16: 7 (3 + 2 - 3)", lambda: f.dualpipe_bubble_s(16, 3, 2, 1), 14),
    ("DualPipe", "PP 4, F&B 2: 1 (2 + 2 - 3)", lambda: f.dualpipe_bubble_s(4, 2, 2, 1), 1),
    ("DualPipe", "PP 16 keeps 17", lambda: f.dualpipe_in_flight(16, 32)[0], 17),
    ("Seq1F1B", "p 8, m 16, k 2: 7/39", lambda: f.seq1f1b_bubble(8, 16), 7 / 39),
    ("Seq1F1B", "p 4, k 2 keeps (3 - r + 2)/2", lambda: f.seq1f1b_in_flight(4, 8), (2.5, 2, 1.5, 1)),
    ("Seq1F1B", "played", lambda: played("seq1f1b:splits=2", 4, 8).held_micro_batches, (2.5, 2, 1.5, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in FACTS])
def test_fact(call: Callable[[], Any], expected: Any) -> None:
    assert call() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "stages", "weights", "activations"),
    [
        ("gpipe", 4, [1] * 4, [8] * 4),
        ("1f1b", 4, [1] * 4, [4, 3, 2, 1]),
        ("interleaved", 8, [1] * 4, [5.5, 4.5, 3.5, 2.5]),
        ("gems", 4, [2] * 4, [1] * 4),
        ("chimera", 4, [2] * 4, [3, 4, 4, 3]),
        ("chimera:pairs=2", 8, [4] * 8, [7, 8, 8, 7, 7, 8, 8, 7]),
        ("bapipe-so", 4, [1] * 4, [7, 5, 3, 1]),
        ("bapipe-fbp", 4, [1] * 4, [8, 6, 4, 2]),
        ("pipedream", 4, [4, 3, 2, 1], [4, 3, 2, 1]),
        ("pipedream:vertical=true", 4, [4] * 4, [4, 3, 2, 1]),
        ("pipedream-2bw", 4, [2] * 4, [4, 3, 2, 1]),
        ("pipemare", 4, [1] * 4, [8, 6, 4, 2]),
        ("pipelined-backprop", 4, [1] * 4, [7, 5, 3, 1]),
        ("hetpipe:concurrent=4", 4, [4] * 4, [4, 3, 2, 1]),
        ("zb-h2", 4, [1] * 4, [7] * 4),
        ("zb-v", 8, [1] * 4, [4] * 4),
        ("v-half", 8, [1] * 4, [3] * 4),
        ("v-min", 8, [1] * 4, [2] * 4),
        ("bpipe", 8, [1] * 8, [5, 5, 5, 5, 4, 4, 4, 4]),
        ("dualpipe", 4, [2] * 4, [5] * 4),
        ("dualpipe-v", 8, [1] * 4, [4.5] * 4),
        ("seq1f1b:splits=4", 4, [1] * 4, [1.75, 1.5, 1.25, 1]),
    ],
)
def test_memory_of_each_worker(schedule: str, stages: int, weights: list[float], activations: list[float]) -> None:
    """8 micro-batches, in copies of a worker's share of the weights and micro-batches of its share."""
    found = f.schedule_figures(schedule, len(weights), 8)
    assert found.pipeline.stages == stages
    assert list(found.weights) == weights
    assert found.weight_copies == sum(weights) / len(weights)
    assert list(found.in_flight) == activations
