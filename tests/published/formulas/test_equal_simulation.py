"""What schedules say of themselves equal to their simulation over ranges of workers and micro-batches, with edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from planner import PlanError, UsageError, formulas, measure_schedule
from planner.play import Conditions, Measurement
from planner.schedules import ActivationUnit, evaluate, get, names

WORKERS = (1, 2, 3, 4, 6, 8)
VARIANTS = (
    "gpipe:recompute=false", "dapple:most=2", "bapipe-fbp:fill_overlap=true", "interleaved:chunks=1",
    "interleaved:chunks=3", "chimera:pairs=2", "chimera:pairs=3", "chimera:over=double", "chimera:over=halve",
    "seq1f1b:splits=1", "seq1f1b:splits=4",
    "hanayo:waves=2", "hanayo:waves=3", "hetpipe:concurrent=1", "hetpipe:concurrent=3,distance=1",
    "pipedream:vertical=true", "pipelined-backprop:mitigation=lwp",
)  # fmt: skip
PARTS = ((1, 2, 1), (2, 3, 1), (1, 3, 1))
"""Forward, whole backward, its weight gradient."""

LENT = ("bpipe",)
"""Schedules whose workers also keep what others evict to them, beside their own."""


def played(schedule: str, stages: int, micro_batches: int, f: float = 1, b: float = 2, **more: Any) -> Measurement:
    return measure_schedule(schedule, stages, micro_batches, forward_s=f, backward_s=b, **more)


def near(found: float | Sequence[float], expected: float | Sequence[float]) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-12, abs=1e-12))


def cases(schedule: str) -> Iterator[tuple[formulas.ScheduleFigures, int, Measurement]]:
    """Figures, workers and measurement, for all pipelines of the grid that the schedule can serve."""
    for p in WORKERS:
        counts = sorted({1, p, p + 3, 2 * p, 2 * p + 4})
        for m, (f, b, w) in (*((m, PARTS[0]) for m in counts), *((counts[-1], parts) for parts in PARTS[1:])):
            try:
                found = formulas.schedule_figures(schedule, p, m, f, b, w)
            except PlanError:
                continue
            times, stages = found.times, found.pipeline.stages
            yield found, p, played(schedule, stages, m, times["F"], times["B"], weight_grad_s=times["W"])


@pytest.mark.parametrize("schedule", [*names(), *VARIANTS])
def test_facts_of_a_schedule(schedule: str) -> None:
    """Idle time where the closed form holds, what workers keep, versions, staleness."""
    tried = exact = 0
    for found, p, played_ in cases(schedule):
        tried += 1
        facts, terms = found.schedule.facts, found.schedule.terms(found.pipeline)
        try:
            assert near(found.makespan_s, played_.iteration_s)
            assert near(found.bubble, played_.bubble)
            exact += 1
        except UsageError:
            assert facts.idle_holds
        assert near(found.in_flight, played_.held_micro_batches)
        kept = [evaluate(facts.kept, {**terms, "i": i}) for i in range(p)]
        if facts.kept_bound:
            assert all(held <= most for held, most in zip(played_.held, kept, strict=True))
        elif found.schedule.drains and found.schedule.key not in LENT:
            assert tuple(kept) == played_.held
        assert found.weight_versions == played_.weight_versions
        assert found.staleness == (played_.staleness if played_.cycle else (0,) * found.pipeline.stages)
    assert tried >= 7
    assert exact >= 3


@pytest.mark.parametrize("schedule", ["chimera", "zb-h1", "zb-h2", "v-half", "v-min", "zb-v", "hanayo"])
def test_bounds_of_what_is_kept_are_reached(schedule: str) -> None:
    found = formulas.schedule_figures(schedule, 8, 24)
    kept = [evaluate(found.schedule.facts.kept, {**found.schedule.terms(found.pipeline), "i": i}) for i in range(8)]
    assert max(found.schedule.held(found.pipeline)) in (max(kept), max(kept) - 8 * (schedule == "hanayo"))


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 12])
def test_chimera_keeps(depth: int) -> None:
    for pairs in (f for f in (1, 2, 3, 4) if depth // 2 % f == 0):
        schedule = get(f"chimera:pairs={pairs}")
        for n in (depth, 2 * depth, 3 * depth):
            found = formulas.schedule_figures(schedule.name, depth, n)
            terms = schedule.terms(found.pipeline)
            kept = tuple(evaluate(schedule.facts.kept, {**terms, "i": w}) for w in range(depth))
            assert kept == schedule.held(found.pipeline)


@pytest.mark.parametrize("schedule", ["as", "sno", "so", "fbp"])
def test_bapipe(schedule: str) -> None:
    transfer = 0.25 if schedule in ("sno", "so") else 0.0
    for p in WORKERS:
        for m in (1, 2, 3, 5, 16):
            found = played(f"bapipe-{schedule}", p, m, receive_s=transfer)
            assert near(formulas.bapipe_makespan_s(schedule, p, m, 1, 2, transfer), found.makespan_s)
            assert formulas.bapipe_features(schedule, p, m) == found.held


@pytest.mark.parametrize("p", [3, 4, 5, 6, 8, 12, 16])
def test_two_chunks_in_a_v(p: int) -> None:
    for schedule, first in (("zb-v", 2 * p), ("v-half", p), ("v-min", p)):
        for m in (first, first + 3, 3 * p):
            found = played(schedule, 2 * p, m, weight_grad_s=1)
            assert found.iteration_s == formulas.schedule_figures(schedule, p, m, 2, 4).makespan_s


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


@pytest.mark.parametrize("p", WORKERS)
def test_mean_staleness_of_pipemare(p: int) -> None:
    for n in (1, 2, 7):
        assert near(formulas.pipemare_delays(p, n), played("pipemare", p, n, 1, 1).mean_staleness)
    for wave in (1, 2, p, p + 2):
        found = played(f"hetpipe:concurrent={wave}", p, 2 * wave)
        assert found.staleness == (formulas.wsp_staleness(wave, 0).local,) * p


def test_where_the_forms_do_not_hold_they_refuse() -> None:
    with pytest.raises(UsageError, match=r"chimera holds for .* F<=B, \(m<=p or m mod p=0\)"):
        formulas.chimera_makespan_s(4, 6, 1, 2)
    with pytest.raises(PlanError, match="do not make groups of 4"):
        formulas.interleaved_makespan_s(4, 6, 1, 2)
    with pytest.raises(UsageError, match="F=W, B=2W, m>=2p"):
        formulas.zb_v_idle_s(4, 8, 1, 3, 1)
    with pytest.raises(UsageError, match="m>=2p") as refused:
        formulas.zb_v_makespan_s(4, 7, weight_grad_s=1)
    assert "planner.measure_schedule('zb-v'" in refused.value.problem.hint
    with pytest.raises(UsageError, match="did you mean 'zb-h2' or 'zb-h1'"):
        formulas.schedule_figures("zb-h3", 4, 1)
    with pytest.raises(UsageError, match="no option 'pair'"):
        formulas.chimera_bubble(4, 4, pair=2)
    with pytest.raises(UsageError, match="workers is 0"):
        formulas.gpipe_bubble(0, 4)


def test_expressions_read_what_they_say_and_nothing_else() -> None:
    assert evaluate("max(3*p-(4 if p % 2 else 7), 0)*F", {"p": 5, "F": 2}) == 22
    assert evaluate("(k or p)-1 if m < p and k == 0 else ceil(m/2)+floor(m/2)", {"k": 0, "p": 4, "m": 3}) == 3
    assert evaluate("(k or p)-1 if m < p and k == 0 else ceil(m/2)+floor(m/2)", {"k": 2, "p": 4, "m": 3}) == 3
    with pytest.raises(PlanError, match="'q' has no value in 'p-q'"):
        evaluate("p-q", {"p": 4})
    for text in ("p.real", "open(p)", "[p]", "p**2", "'p'", "min(p, key=p)"):
        with pytest.raises(PlanError, match="cannot read"):
            evaluate(text, {"p": 4})


def test_units_are_those_of_the_schedule() -> None:
    assert get("interleaved").activation_unit is ActivationUnit.CHUNK
    assert formulas.interleaved_in_flight(4, 8) == (5.5, 4.5, 3.5, 2.5)
