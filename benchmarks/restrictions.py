"""The default search against searches with one more restriction: `python -m benchmarks.restrictions [JOB ...]`.

What a restricted search finds lies in the default's space, too, so the default should not be slower. Each job is
planned as it is, once with each schedule of its space alone, and once with each number of TP ranks and of stages that
the default did not take. The table lists every job with its restrictions and those whose plan is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import planner
from benchmarks.published import markdown
from planner import schedules

WIDTHS, DEPTHS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
"""Numbers of TP ranks and of workers of a pipeline that are tried as restrictions."""
SAME = 1e-6
"""Relative difference below which two times count as equal."""
HEAD = ["job", "default", "CPU s", "restrictions", "without a plan", "faster than the default"]

JOBS = {
    "gpt2-xl, 1 dgx-a100, 512": ("gpt2-xl", "dgx-a100", 1, 512),
    "bert-large, 1 dgx-a100, 256": ("bert-large", "dgx-a100", 1, 256),
    "gpt3-6.7b, 4 dgx-a100, 256": ("gpt3-6.7b", "dgx-a100", 4, 256),
    "llama2-7b, 2 dgx-h100, 256": ("llama2-7b", "dgx-h100", 2, 256),
    "llama3-8b, 1 dgx-h100, 128": ("llama3-8b", "dgx-h100", 1, 128),
    "llama3-70b, 8 dgx-h100, 128": ("llama3-70b", "dgx-h100", 8, 128),
    "llama3-70b, 8 dgx-h100, 256": ("llama3-70b", "dgx-h100", 8, 256),
    "mixtral-8x7b, 4 dgx-h100, 256": ("mixtral-8x7b", "dgx-h100", 4, 256),
    "gpt3-175b, 128 dgx-a100, 1536": ("gpt3-175b", "dgx-a100", 128, 1536),
    "llama3.1-405b, 2048 dgx-h100, 2048": ("llama3.1-405b", "dgx-h100", 2048, 2048),
}
"""Model, cluster, nodes and global batch by name."""

Search = Callable[[planner.Job], planner.Plan]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job's default plan beside plans of restricted searches.

    Attributes:
        seconds: an iteration of the default plan.
        restricted_s: an iteration of each restricted search's plan, by the restriction; infinite where it has none.
    """

    seconds: float
    restricted_s: dict[str, float]

    @property
    def faster(self) -> dict[str, float]:
        """The restricted searches whose plan is faster than the default's."""
        return {name: s for name, s in self.restricted_s.items() if s < self.seconds * (1 - SAME)}


def restrictions(job: planner.Job, found: planner.Plan) -> Iterator[tuple[str, planner.Job]]:
    """The job with one more restriction, by its name: each schedule alone, other numbers of TP ranks and of stages."""
    changes: list[tuple[str, dict[str, Any]]] = []
    changes += [(f"--schedule {name}", {"schedules": (name,)}) for name in job.schedules if len(job.schedules) > 1]
    first, schedule = found.configuration.stages[0], schedules.get(found.configuration.schedule)
    width = first.ranks // (first.context * first.expert)
    depth = len(found.configuration.stages) // schedule.chunks_per_worker
    changes += [(f"--tp {ranks}", {"tensor_parallel": (ranks,)}) for ranks in WIDTHS if ranks != width]
    changes += [(f"--pp {workers}", {"pipeline_stages": (workers,)}) for workers in DEPTHS if workers != depth]
    return ((name, dataclasses.replace(job, **change)) for name, change in changes)


def compare(search: Search, job: planner.Job) -> Comparison:
    """Plan a job as it is and with each restriction."""
    found, restricted_s = search(job), dict[str, float]()
    for name, restricted in restrictions(job, found):
        try:
            restricted_s[name] = search(restricted).predictions.reached_s
        except (planner.InfeasibleError, planner.JobError):
            restricted_s[name] = math.inf
    return Comparison(found.predictions.reached_s, restricted_s)


def _row(name: str) -> list[str]:
    """A job of `JOBS` as a row of the table."""
    model, cluster_name, nodes, batch = JOBS[name]
    graph, cluster = planner.load_graph(model), planner.load_cluster(cluster_name, nodes=nodes)
    took_s: list[float] = []

    def search(job: planner.Job) -> planner.Plan:
        before_s = time.process_time()
        try:
            return planner.plan(graph, cluster, job)
        finally:
            took_s.append(time.process_time() - before_s)

    compared = compare(search, planner.Job(batch))
    times = compared.restricted_s.values()
    faster = [f"{limit}: {s:.4g} s ({1 - s / compared.seconds:.2%})" for limit, s in compared.faster.items()]
    return [
        name,
        f"{compared.seconds:.4g} s",
        f"{took_s[0]:.1f}",
        str(len(times)),
        str(sum(math.isinf(seconds) for seconds in times)),
        "; ".join(faster) or "none",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, one row for each job whose name contains one of the texts given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", help="parts of names of jobs; all without")
    texts = parser.parse_args(arguments).jobs
    chosen = [name for name in JOBS if not texts or any(text in name for text in texts)]
    sys.stdout.write(markdown(HEAD, [_row(name) for name in chosen]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
