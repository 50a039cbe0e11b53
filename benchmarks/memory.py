"""Peak memory and fit of runs that were made, against predictions: `python -m benchmarks.memory FOLDER`.

FOLDER holds `single_node_runs.json` and `published_runs.json`. Every run that the planner can express is priced as it
ran. Runs that were made must fit; runs that were reported out of memory must not. Where the source states a peak, it
stands beside the prediction, by how it was measured: an allocator sees tensors alone, nvidia-smi all that is taken from
the device. Rows of even number in a class had a part in what was fitted, rows of odd number had none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import models
import planner
from benchmarks.published import NOT_SPLIT, VOCAB_PART
from benchmarks.runs import Run
from models.gpt import GPTSize
from planner.prediction import FEW, judge, ways_to_share, without_limits
from planner.space.named import Degrees
from planner.space.pricer import Pricer

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of a run as predicted.

    Attributes:
        run: the run.
        worker: memory of the fullest worker.
    """

    run: Run
    worker: planner.space.WorkerMemory


def fit_of(run: Run) -> Fit:
    """Price the memory of a run as it ran, without pricing its iteration."""
    pricer, job = _pricer(run)
    degrees = Degrees(
        tensor=run.ranks, pipeline=run.stages, data=1, replicas=run.replicas, chunks=run.chunks, zero=run.zero,
        micro_batch=run.micro_batch, schedule=run.schedule, recompute=run.recompute,
    )  # fmt: skip
    ways = list(ways_to_share(pricer, job, degrees))
    weights = [sum(float(costs.parameter_elements.sum()) for costs in shelf.values()) for _, shelf in ways]
    ways = [way for way, held in zip(ways, weights, strict=True) if held <= FEW * min(weights)]
    configuration, shelf = max(ways, key=lambda way: sum(float(c.checkpoint_bytes[0, -1]) for c in way[1].values()))
    workers = judge(pricer, job, configuration, shelf).workers
    return Fit(run, max(workers, key=lambda worker: worker.memory.total))


@functools.lru_cache(maxsize=64)
def _graph(size: GPTSize, batch: int, seq: int) -> planner.Graph:
    return planner.graph_from_proto(models.build_custom(size, batch=batch, seq=seq), name="run")


@functools.lru_cache(maxsize=64)
def _cluster(profile: str, nodes: int) -> planner.Cluster:
    return planner.load_cluster(profile, nodes=nodes)


def _pricer(run: Run) -> tuple[Pricer, planner.Job]:
    if run.machine is None:
        raise ValueError(f"{run.key} has no machine")
    part = run.ranks * VOCAB_PART
    vocab = run.vocab if run.ranks == 1 else -(-run.vocab // part) * part
    graph = _graph(GPTSize(run.layers, run.hidden, run.heads, vocab, run.seq, ffn=run.ffn), run.micro_batch, run.seq)
    cluster = _cluster(run.machine.profile, run.machine.nodes(run.devices))
    job = planner.Job(
        global_batch=run.global_batch,
        precision=run.precision,
        fused_attention=run.fused_attention,
        assume_dropout=run.dropout,
        forbid=NOT_SPLIT if run.ranks > 1 else (),
    )
    job = without_limits(job, cluster)
    return Pricer(graph, cluster, job), job
