"""Why not another choice, and what makes a configuration fit: figures are those of `predict`."""

from __future__ import annotations

import functools
import math

import pytest

import planner
from planner import Degrees, Job, UsageError

BATCH = 64


@functools.cache
def model() -> planner.Graph:
    graph: planner.Graph = planner.load_graph("gpt2-xl", dims={"seq": 1024})
    return graph


@functools.cache
def machine() -> planner.Cluster:
    cluster: planner.Cluster = planner.load_cluster("p3.16xlarge")
    return cluster


@functools.cache
def best() -> planner.Plan:
    plan: planner.Plan = planner.plan(model(), machine(), Job(BATCH, precision="fp16", backends=("any",)))
    return plan


@pytest.fixture(scope="module")
def answer() -> planner.ask.WhyNot:
    found: planner.ask.WhyNot = planner.explain_why_not(
        best(), model(), machine(), "tp=8,zero=0,recompute=never,micro-batch=1"
    )
    return found


def test_a_choice_is_priced_as_predict_prices_it(answer: planner.ask.WhyNot) -> None:
    same = planner.predict(model(), machine(), Job(BATCH, precision="fp16"), Degrees(tensor=8))
    assert answer.iteration_s == same.iteration_s
    assert answer.plan_s == best().predictions.reached_s
    assert answer.iteration_s >= answer.plan_s * (1 - 1e-9)
    assert answer.tried == 1
    assert answer.headline is not None
    assert answer.headline.devices == {"v100-sxm2-16gb": 8}


def test_the_parts_add_up_to_both_steps_and_memories(answer: planner.ask.WhyNot) -> None:
    own = sum(part.own for part in answer.times)
    assert own == pytest.approx(best().predictions.iteration_s, rel=1e-6)
    stages = best().predictions.stages
    assert sum(part.own for part in answer.memory) == max(stage.memory.total_bytes for stage in stages)
    text = planner.report_to_text(planner.report.why_not_report(answer))
    assert "tp=8,zero=0,recompute=never,micro-batch=1 is slower: " in text
    assert "communication inside a group" in text


def test_what_is_left_open_is_as_suits_it_best() -> None:
    found = planner.explain_why_not(best(), model(), machine(), "tp=8")
    narrow = planner.explain_why_not(best(), model(), machine(), "tp=8,zero=0,recompute=never,micro-batch=1")
    assert found.tried == 5 * 2 * 3  # micro-batches, ZeRO stages, ways to recompute
    assert found.iteration_s <= narrow.iteration_s


def test_a_choice_that_does_not_fit_says_what_a_device_lacks() -> None:
    found = planner.explain_why_not(best(), model(), machine(), "pp=1,zero=0")
    assert found.problems
    missing = sum(part.other for part in found.memory) - found.capacity_bytes
    assert missing > 0
    verdict = planner.report_to_text(planner.report.why_not_report(found)).split("\n\n")[1]
    assert verdict.startswith("pp=1,zero=0 does not fit: a device lacks ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tq=4", "did you mean 'tp'"),
        ("tp", "'tp' is no choice"),
        ("tp=x", "'x' is no number for tp"),
        ("tp=0", "'0' is no number for tp"),
        ("zero=4", "'4' is no number for zero"),
        ("tp=2,tp=4", "'tp=4' is no choice"),
    ],
)
def test_what_is_no_choice_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        planner.explain_why_not(best(), model(), machine(), text)
    assert said in str(error.value)


def test_a_choice_that_makes_no_sense_says_why() -> None:
    with pytest.raises(planner.JobError, match="needs 16 ranks"):
        planner.explain_why_not(best(), model(), machine(), "tp=16")


@functools.cache
def too_large() -> tuple[planner.ask.Fix, ...]:
    found: tuple[planner.ask.Fix, ...] = planner.find_fixes(model(), machine(), Job(BATCH, precision="fp16"), Degrees())
    return found


def test_each_fix_is_what_predict_says_of_it() -> None:
    job, words = Job(BATCH, precision="fp16"), {
        "ZeRO-3": Degrees(zero=3), "ZeRO-2": Degrees(zero=2), "TP 8": Degrees(tensor=8),
        "ZeRO-1, recompute all layers": Degrees(zero=1, recompute=True),
        "ZeRO-2, recompute core_attn": Degrees(zero=2, repeats=("core_attn",)), "TP 2": Degrees(tensor=2),
    }  # fmt: skip
    base = planner.predict(model(), machine(), job, Degrees())
    assert not base.fits
    checked = 0
    for fix in too_large():
        if fix.words in words:
            checked += 1
            own = planner.predict(model(), machine(), job, words[fix.words])
            assert fix.fits == own.fits
            assert fix.bytes == pytest.approx(own.fullest.memory.total - base.fullest.memory.total)
            assert fix.time == pytest.approx(own.iteration_s / base.iteration_s - 1, abs=1e-3)
    assert checked


def test_fixes_of_a_configuration_in_full_are_what_predict_says_of_them() -> None:
    job = Job(BATCH, precision="fp16")
    base = planner.predict(model(), machine(), job, Degrees())
    found = {fix.words: fix for fix in planner.find_fixes(model(), machine(), job, base.configuration)}
    again = Degrees(zero=1, recompute=True)
    expected = {"recompute all layers": Degrees(recompute=True), "ZeRO-1, recompute all layers": again}
    assert found.keys() & expected.keys()
    assert not any(word in words for words in found for word in ("TP", "PP", "CP"))
    for words in found.keys() & expected.keys():
        own = planner.predict(model(), machine(), job, expected[words])
        assert found[words].fits == own.fits
        assert found[words].bytes == pytest.approx(own.fullest.memory.total - base.fullest.memory.total)
        assert found[words].time == pytest.approx(own.iteration_s / base.iteration_s - 1, abs=1e-3)


def test_fixes_that_fit_stand_first_by_the_time_they_take() -> None:
    found = too_large()
    assert found
    assert [fix.fits for fix in found] == sorted((fix.fits for fix in found), reverse=True)
    times = [fix.time for fix in found if fix.fits]
    assert times == sorted(times)
    assert all(fix.bytes < 0 and math.isfinite(fix.time) for fix in found)
    assert all((fix.missing_bytes > 0) != fix.fits for fix in found)


def test_the_report_of_what_does_not_fit_has_memory_by_kind_and_the_fixes() -> None:
    base = planner.predict(model(), machine(), Job(BATCH, precision="fp16"), Degrees())
    text = planner.report_to_text(planner.report.prediction_report(base, too_large()))
    assert "Memory of a device\n" in text
    assert "What would make it fit, and its price\n" in text
    assert text.count(" fits\n") == sum(fix.fits for fix in too_large())
