"""The search over stages of any schedule: as good as enumeration of cuts, copies, ways, recomputation and ZeRO."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner import schedules
from planner.errors import InfeasibleError, JobError
from planner.hardware import Cluster
from planner.play import Transfers
from planner.schedules import Pipeline
from planner.solvers import search
from planner.space import BlockCosts, Configuration, Evaluation, Job, StageChoice, Timed, evaluate, play_terms
from planner.space.terms import TermCache
from tests.joint.instances import Ways, random_joint

SEEDS = st.integers(0, 10**6)
NAMES = st.sampled_from(
    ["interleaved", "zb-h1", "zb-v", "v-half", "v-min", "hanayo", "chimera", "dapple", "bapipe-sno", "gems", "seq1f1b",
     "pipedream-2bw", "pipemare", "pipelined-backprop"]
)  # fmt: skip


def configurations(ways: list[BlockCosts], devices: int, job: Job) -> Iterator[Configuration]:
    """Every configuration of pipelines of two workers and more, from the description of the space alone."""
    first, (name,) = ways[0], job.schedules
    blocks, batches, groups = (
        len(first.parameter_elements),
        job.global_batch // first.micro_batch,
        devices // first.ranks,
    )
    again = {"never": (False,), "always": (True,), "auto": (False, True)}[job.recompute]
    for copies, workers in itertools.product(range(1, groups + 1), range(2, groups + 1)):
        if batches % copies or copies * workers > groups:
            continue
        count = batches // copies
        for schedule in schedules.get(name).variants(workers, count, recompute=job.recompute != "never"):
            for stages in schedule.stage_counts(workers):
                if stages > (job.max_stages or blocks) or schedule.supports(Pipeline((1,) * stages, count)):
                    continue
                for cuts in itertools.combinations(range(1, blocks), stages - 1):
                    ranges = list(itertools.pairwise((0, *cuts, blocks)))
                    for taken in itertools.product(itertools.product(again, [w.sharding for w in ways]), repeat=stages):
                        choices = tuple(
                            StageChoice(a, b, 1, flag, first.ranks, number)
                            for (a, b), (flag, number) in zip(ranges, taken, strict=True)
                        )
                        for zero, adjacent in itertools.product(job.zero, (False, True)):
                            yield Configuration(
                                choices, copies, first.micro_batch, count, schedule.name, zero,
                                adjacent=adjacent, transfers=job.transfers,
                            )  # fmt: skip


def enumerated_s(ways: Ways, cluster: Cluster, job: Job) -> float:
    """The least time of all that fit when they are played; infinite when none does."""
    found = math.inf
    for shelf in ways.shelves.values():
        by_label, cache = dict[str, list[BlockCosts]](), TermCache()
        for costs in shelf.values():
            by_label.setdefault(costs.label, []).append(costs)
        for own in by_label.values():
            for configuration in configurations(own, cluster.device_count, job):
                verdict = evaluate(shelf, cluster, job, configuration, timed=Timed.PLAYED, cache=cache)
                if verdict.feasible:
                    found = min(found, verdict.iteration_s)
    return found


def played_s(configuration: Configuration, verdict: Evaluation) -> float:
    """The time of a judged configuration when it is played."""
    return play_terms(configuration, schedules.get(configuration.schedule), verdict.stages).iteration_s


@settings(max_examples=40, deadline=None)
@given(SEEDS, NAMES, st.sampled_from(list(Transfers)))
@example(175802, "chimera", Transfers.BLOCKING)  # exchanges that are launched hide behind the work
@example(649932, "interleaved", Transfers.BLOCKING)  # one stage shares its operators in another way
@example(2373, "v-min", Transfers.BLOCKING)  # more than a thousand cuts and choices of four blocks
def test_search_equals_enumeration(seed: int, name: str, transfers: Transfers) -> None:
    ways, cluster, job = random_joint(seed)
    job = dataclasses.replace(job, schedules=(name,), transfers=transfers)
    expected = enumerated_s(ways, cluster, job)
    try:
        answer = search(ways.costs, cluster, job, shardings=ways, simulated_s=played_s)
    except (InfeasibleError, JobError):
        assert expected == math.inf
        return
    assert answer.best.simulated_s == pytest.approx(expected, rel=1e-9)
    assert answer.certificate.bound_s <= expected * (1 + 1e-9)
