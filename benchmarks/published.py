"""Measured iterations against predictions of exactly the same configurations: `python -m benchmarks.published FOLDER`.

FOLDER holds `single_node_runs.json` and `published_runs.json`. Each run is built as a graph at its sizes, cut as it was
cut, and predicted; nothing is searched. Beside each prediction stands the trivial model
"hardware FLOPs at a constant half of the peak", which a cost model has to beat.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import models
import planner
from benchmarks.classes import COMPOSED, cell_rows, class_rows, measured_errors, ranking_rows, write_errors
from benchmarks.runs import SINGLE_NODE, Run, read_runs

BASELINE_SHARE = 0.5
VOCAB_PART = 128
"""Megatron-LM pads the vocabulary to a multiple of so many words on each rank."""

NOT_SPLIT = (
    "*:b0",
    "*:d0",
    "*:f0",
    "MatMul:m",
    "LayerNormalization:*",
    "transformer.add:*",
    "*.c_proj.add:*",
    "*.mlp.add:*",
    "transformer.h.[0-9].add:*",
    "transformer.h.[0-9][0-9].add:*",
    "transformer.h.[0-9][0-9][0-9].add:*",
)
"""What Megatron-LM of 2021 does not split: batch and sequence anywhere; norms, biases, sums on the residual stream."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner says of a run.

    Attributes:
        run: the run.
        seconds: simulated iteration.
        closed_form_s: the judge's closed form.
        baseline_s: hardware FLOPs at half of the peak.
    """

    run: Run
    seconds: float
    closed_form_s: float
    baseline_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.run.seconds


def predict(run: Run) -> Prediction:
    """Price a run as it ran, stage by stage."""
    if run.machine is None:
        raise ValueError(f"{run.key} has no machine")
    cluster = planner.load_cluster(run.machine.profile, nodes=run.machine.nodes(run.devices), stack=run.stack)
    degrees = planner.Degrees(
        tensor=run.ranks,
        pipeline=run.stages,
        data=1,
        replicas=run.replicas,
        micro_batch=run.micro_batch,
        schedule=run.schedule,
        zero=run.zero,
        recompute=run.recompute,
    )
    found = planner.predict(graph_of(run), cluster, job_of(run), degrees, fewest_weights=True)
    return Prediction(
        run=run,
        seconds=found.iteration_s,
        closed_form_s=found.plan.predictions.iteration_s,
        baseline_s=_hardware_flops(run) / run.devices / (BASELINE_SHARE * _peak(run, cluster)),
    )


def job_of(run: Run) -> planner.Job:
    """What a run trained."""
    return planner.Job(
        global_batch=run.global_batch,
        precision=run.precision,
        fused_attention=run.fused_attention,
        assume_dropout=run.dropout,
        forbid=NOT_SPLIT if run.ranks > 1 else (),
    )


def graph_of(run: Run) -> planner.Graph:
    """The model of a run, its vocabulary padded."""
    part = run.ranks * VOCAB_PART
    vocab = run.vocab if run.ranks == 1 else -(-run.vocab // part) * part
    return _built(run.layers, run.hidden, run.heads, vocab, run.ffn, run.micro_batch, run.seq)


@functools.lru_cache(maxsize=64)
def _built(layers: int, hidden: int, heads: int, vocab: int, ffn: int, batch: int, seq: int) -> planner.Graph:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_inner": ffn}
    size = models.size_of(model_type="gpt2", n_positions=seq, **sizes)
    return planner.graph_from_proto(models.build_custom(size, batch=batch, seq=seq), name="run")


def _hardware_flops(run: Run) -> float:
    """Matrix work of an iteration, recomputation of the layers included (Narayanan et al. 2021, equation 3)."""
    tokens = run.global_batch * run.seq
    layer = 2 * (4 * run.hidden**2 + 2 * run.hidden * run.ffn) + 4 * run.seq * run.hidden
    return tokens * (run.layers * layer * (4 if run.recompute else 3) + 3 * 2 * run.hidden * run.vocab)


def _peak(run: Run, cluster: planner.Cluster) -> float:
    peaks = cluster.devices[0].matrix_flop_per_s
    return peaks.get(run.precision, peaks.get("fp16", 0.0))


def mape(ratios: Sequence[float]) -> float:
    """Mean absolute error, relative to the measurement."""
    return float(np.mean(np.abs(np.asarray(ratios) - 1)))


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau: (pairs in the same order - pairs in opposite order) / pairs."""
    x, y = np.sign(np.subtract.outer(a, a)), np.sign(np.subtract.outer(b, b))
    pairs = len(x) * (len(x) - 1)
    return float((x * y).sum() / pairs) if pairs else float("nan")


def _summary(title: str, chosen: Sequence[Prediction]) -> list[str]:
    ratios = [p.ratio for p in chosen]
    base = [p.baseline_s / p.run.seconds for p in chosen]
    measured = [p.run.seconds for p in chosen]
    taus = [kendall_tau(said, measured) for said in ([p.seconds for p in chosen], [p.baseline_s for p in chosen])]
    return [
        title,
        str(len(chosen)),
        f"{mape(ratios):.1%}",
        f"{np.median(ratios):.2f}",
        f"{max(abs(r - 1) for r in ratios):.0%}",
        f"{taus[0]:.2f}" if len(chosen) > 1 else "-",
        f"{mape(base):.0%}",
        f"{np.median(base):.2f}",
        f"{taus[1]:.2f}" if len(chosen) > 1 else "-",
    ]


def tables(exact: Sequence[Prediction], runs: Sequence[Run], *, every_row: bool) -> str:
    """The tables in Markdown: by source, class, cell and job, what could not be priced; on request each row."""
    head = ["runs", "rows", "error", "median", "worst", "tau", "50% of peak: error", "median", "tau"]
    by_source = _grouped(exact, _group)
    real = [p for p in exact if p.run.source != COMPOSED]
    parts = [
        "Priced exactly as they ran:",
        markdown(head, [_summary(title, group) for title, group in [*by_source, ("all measured as wholes", real)]]),
        "By class of job, as `plan` and `predict` say it; the interval holds 80 % of measured over predicted:",
        markdown(["class", "runs", "error", "not fitted", "error", "interval"], class_rows(exact)),
        "Composed runs by cell:",
        markdown(["ranks", "hidden", "micro-batch", "rows", "error", "predicted / composed"], cell_rows(exact)),
        "Ranking inside a job, pairs whose measured times differ by more than their noise:",
        markdown(["source", "jobs", "mean loss of our choice", "worst", "noise", "pairs", "tau"], ranking_rows(exact)),
    ]
    parts += ["Not priced:", markdown(["reason", "rows"], _obstacles(runs))]
    if every_row:
        parts += ["Every row:", markdown(*_rows(exact))]
    return "\n\n".join(parts) + "\n"


def _group(p: Prediction) -> str:
    kind = f", ZeRO-{p.run.zero}" if p.run.sharded else ", tensor parallel" if p.run.ranks > 1 else ""
    where = f" on {p.run.machine.profile}" if p.run.sharded and p.run.machine else ""
    return p.run.source + kind + where


def _grouped(
    predictions: Sequence[Prediction], name: Callable[[Prediction], str]
) -> list[tuple[str, list[Prediction]]]:
    groups: dict[str, list[Prediction]] = {}
    for p in predictions:
        groups.setdefault(name(p), []).append(p)
    return list(groups.items())


def _obstacles(runs: Sequence[Run]) -> list[list[str]]:
    counts = Counter(r.obstacle for r in runs if r.obstacle)
    return [[reason, str(count)] for reason, count in counts.most_common()]


def _rows(predictions: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [p.run.key, p.run.source, p.run.shape, f"{p.run.seconds:.3f} s", f"{p.seconds:.3f} s", f"{p.ratio:.2f}",
         f"{p.baseline_s / p.run.seconds:.2f}"]
        for p in predictions
    ]  # fmt: skip
    return ["row", "source", "run", "measured", "predicted", "ratio", "50% of peak"], rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs, price them and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder of {SINGLE_NODE} and published_runs.json")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--errors", type=Path, help="write the errors by class of job here, as the program reads them")
    given = parser.parse_args(arguments)
    runs = read_runs(given.folder)
    exact = [predict(run) for run in runs if not run.obstacle]
    sys.stdout.write(tables(exact, runs, every_row=given.rows))
    if given.errors:
        write_errors(given.errors, measured_errors(exact))
    return 0


if __name__ == "__main__":
    sys.exit(main())
