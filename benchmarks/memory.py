"""Peak memory and fit of runs that were made, against predictions: `python -m benchmarks.memory FOLDER`.

FOLDER holds `single_node_runs.json` and `published_runs.json`. Every published run that the planner can express is
priced as it ran; those of the other file were composed from traces, not made as wholes. Runs that were made must fit,
runs that were reported out of memory must not. Where the source states a peak, it stands beside the prediction, by how
it was measured: an allocator sees tensors alone, nvidia-smi all that is taken from the device. Of the latter every
second row had a part in what was fitted.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import planner
from benchmarks.published import graph_of, job_of, mape, markdown
from benchmarks.runs import SINGLE_NODE, Run, read_runs
from planner.hardware import HEADROOM
from planner.named_shardings import FEWEST_WEIGHTS_MARGIN, ways_to_share
from planner.prediction import driver_bytes, judge, without_limits
from planner.space import WorkerMemory
from planner.space.named import Degrees
from planner.space.pricer import Pricer
from planner.sums import float_sum

GIB = 2**30
MEASURED_BY = ("allocator", "nvidia-smi")
COMPOSED = "vTrain single node"
"""Source of rows that were composed from traces of kernels."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of a run as predicted.

    Attributes:
        run: the run.
        worker: memory of the fullest worker.
    """

    run: Run
    worker: WorkerMemory

    @property
    def peak_bytes(self) -> float:
        """Everything that the run needs: tensors, context, communication buffers."""
        return self.worker.memory.total

    @property
    def capacity_bytes(self) -> float:
        """All memory of the device."""
        return self.worker.capacity_bytes

    @property
    def share(self) -> float:
        """Part of the device that the run needs."""
        return self.peak_bytes / self.capacity_bytes

    @property
    def verdict(self) -> str:
        """The prediction against what the source reports."""
        said = "too large" if self.share > 1 else "fits" if self.share <= 1 - HEADROOM else "within headroom"
        return f"{said}, {'out of memory' if self.run.out_of_memory else 'ran'}"

    @property
    def seen_bytes(self) -> float:
        """What the source's measurement would show: an allocator sees tensors alone, nvidia-smi all."""
        memory = self.worker.memory
        if self.run.memory_by == "allocator":
            return memory.total - memory.reserve
        return driver_bytes(memory, self.run.precision, "adam", planner.load_stack(self.run.stack).allocator_cache)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seen_bytes / self.run.memory_bytes


def fit_of(run: Run) -> Fit:
    """Price the memory of a run as it ran, without pricing its iteration."""
    pricer, job = _pricer(run)
    degrees = Degrees(
        tensor=run.ranks, pipeline=run.stages, data=1, replicas=run.replicas, chunks=run.chunks, zero=run.zero,
        micro_batch=run.micro_batch, schedule=run.schedule, recompute=run.recompute,
    )  # fmt: skip
    ways = list(ways_to_share(pricer, job, degrees))
    weights = [float_sum(float(costs.parameter_elements.sum()) for costs in shelf.values()) for _, shelf in ways]
    ways = [way for way, held in zip(ways, weights, strict=True) if held <= FEWEST_WEIGHTS_MARGIN * min(weights)]
    configuration, shelf = max(
        ways, key=lambda way: float_sum(float(c.checkpoint_bytes[0, -1]) for c in way[1].values())
    )
    workers = judge(pricer, job, configuration, shelf).workers
    return Fit(run, max(workers, key=lambda worker: worker.memory.total))


@functools.lru_cache(maxsize=64)
def _cluster(profile: str, nodes: int) -> planner.Cluster:
    return planner.load_cluster(profile, nodes=nodes)


def _pricer(run: Run) -> tuple[Pricer, planner.Job]:
    if run.machine is None:
        raise ValueError(f"{run.key} has no machine")
    cluster = _cluster(run.machine.profile, run.machine.nodes(run.devices))
    job = without_limits(job_of(run), cluster)
    return Pricer(graph_of(run), cluster, job), job


def _rows(fits: Sequence[Fit]) -> list[list[str]]:
    """A table row for each run with a measured peak, or that did not come out as the source says."""
    return [
        [f.run.key, f.run.source, f.run.shape, f"{f.peak_bytes / GIB:.1f}", f"{f.capacity_bytes / GIB:.1f}", f.verdict,
         f"{f.run.memory_bytes / GIB:.1f}" if f.run.memory_bytes else "-", f.run.memory_by or "-",
         f"{f.seen_bytes / GIB:.1f}" if f.run.memory_bytes else "-", f"{f.ratio:.2f}" if f.run.memory_bytes else "-"]
        for f in fits
    ]  # fmt: skip


def _fit_summary(title: str, fits: Sequence[Fit]) -> list[str]:
    ran, failed = [f for f in fits if not f.run.out_of_memory], [f for f in fits if f.run.out_of_memory]
    rejected = [f for f in ran if f.share > 1]
    tight = sum(1 - HEADROOM < f.share <= 1 for f in ran)
    found = sum(f.share > 1 - HEADROOM for f in failed)
    return [title, str(len(ran)), f"{len(rejected)}", f"{tight}", f"{found} of {len(failed)}" if failed else "-"]


def _error_summary(title: str, fits: Sequence[Fit]) -> list[str]:
    ratios = [f.ratio for f in fits]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return [title, str(len(fits)), f"{mape(ratios):.1%}", f"{np.median(ratios):.2f}", f"{worst:.2f}"]


def report(fits: Sequence[Fit]) -> str:
    """The tables in Markdown: verdicts by source, errors by kind of measurement, rows."""
    sources = dict.fromkeys(f.run.source for f in fits)
    measured = {by: [f for f in fits if f.run.memory_bytes and f.run.memory_by == by] for by in MEASURED_BY}
    seen = measured["nvidia-smi"]
    halves = [("allocator, none fitted", measured["allocator"]), ("nvidia-smi, rows with a part in the fit", seen[::2]),
              ("nvidia-smi, rows without", seen[1::2])]  # fmt: skip
    verdicts = [_fit_summary(name, [f for f in fits if f.run.source == name]) for name in sources]
    shown = [f for f in fits if f.run.memory_bytes or f.run.out_of_memory or f.share > 1]
    head = ["row", "source", "run", "predicted", "capacity", "verdict", "measured", "by", "predicted for it", "ratio"]
    parts = [
        "Runs that were made and runs that were reported out of memory, at full capacity:",
        markdown(["runs", "ran", "of these rejected", "within the headroom", "out of memory: said so"],
               [*verdicts, _fit_summary("all", fits)]),
        "Measured peaks:",
        markdown(["measured by", "rows", "error", "median", "worst"], [_error_summary(*half) for half in halves]),
        "Every run with a measured peak, out of memory or rejected, in GiB:",
        markdown(head, _rows(shown)),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs, price their memory and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder of {SINGLE_NODE} and published_runs.json")
    runs = read_runs(parser.parse_args(arguments).folder)
    sys.stdout.write(report([fit_of(run) for run in runs if not run.memory_obstacle and run.source != COMPOSED]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
