"""The default search is not slower than the same search with one more restriction."""

from __future__ import annotations

import planner
from benchmarks.restrictions import Comparison, compare


def test_no_restricted_search_beats_the_default() -> None:
    graph, cluster = planner.load_graph("gpt2"), planner.load_cluster("dgx-a100")
    compared = compare(lambda job: planner.plan(graph, cluster, job), planner.Job(512, devices=4))
    assert {"--schedule interleaved", "--tp 2", "--pp 2"} <= compared.restricted_s.keys()
    assert compared.faster == {}


def test_faster_plans_of_restricted_searches_are_named() -> None:
    assert Comparison(2.0, {"--tp 2": 1.5, "--pp 2": 2.0, "--pp 4": 3.0}).faster == {"--tp 2": 1.5}
