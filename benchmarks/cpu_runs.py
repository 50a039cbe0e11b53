"""Times of runs on this machine's processor against predictions with costs measured here.

    python -m benchmarks.cpu_runs            # prints the table
    python -m benchmarks.cpu_runs --write    # and writes it into docs/accuracy.md
    python -m benchmarks.cpu_runs --together # runs all ranks of a plan at once

Each model is written as a file, its operators are measured within whole passes (`shardplan profile --measure --device
cpu`), and links among processes by gloo (`shardplan hardware init --measure --ranks 4`). Then every plan of `PLANS` is
predicted with these figures and run: thread CPU times of its stages on this machine, played in the plan's orders with
exchanges as predicted, are an iteration as it would be with a core for each rank. One rank of each stage runs at a
time, with stand-ins for what the others send, as operators were measured; run together, ranks slow each other down,
since they share the machine's memory and cores. Nothing is fitted. Leave the machine alone meanwhile.
Takes less than ten minutes on two cores.

With ZeRO 2 and 3, what passes wait for is the difference from the same plan with ZeRO 0.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import planner

MODELS = {
    "gpt": ("gpt2", 4, "--layers 4 --hidden 256 --heads 4 --vocab 2048 --seq 128"),
    "llama": ("llama3-8b", 4, "--layers 4 --hidden 256 --heads 4 --kv-heads 2 --ffn 688 --vocab 2048 --seq 128"),
    "bert": ("bert-large", 4, "--layers 4 --hidden 256 --heads 4 --vocab 2048 --seq 128"),
    "resnet50": ("resnet50", 2, ""),
}
"""By name: the bundled model, samples of a micro-batch, other sizes."""

PLANS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gpt", 1, {"pipeline": 2}),
    ("gpt", 2, {"tensor": 2}),
    ("gpt", 2, {"pipeline": 4}),
    ("llama", 3, {"pipeline": 4}),
    ("gpt", 3, {"pipeline": 2, "data": 2}),
    ("llama", 6, {"pipeline": 4, "schedule": "zb-h1"}),
    ("gpt", 3, {"data": 2, "zero": 1}),
    ("gpt", 6, {"pipeline": 2, "schedule": "gpipe"}),
    ("gpt", 8, {"pipeline": 2, "chunks": 2}),
    ("gpt", 10, {"pipeline": 2, "schedule": "zb-h1"}),
    ("bert", 8, {"pipeline": 4}),
    ("gpt", 8, {"pipeline": 1}),
    ("llama", 9, {"pipeline": 1}),
    ("bert", 8, {"pipeline": 2}),
    ("llama", 24, {"pipeline": 2}),
    ("llama", 16, {"data": 2, "zero": 3}),
    ("gpt", 20, {"data": 2, "zero": 2}),
    ("gpt", 32, {"pipeline": 2, "recompute": True}),
    ("resnet50", 4, {"pipeline": 1}),
    ("resnet50", 8, {"pipeline": 2}),
)
"""Model, micro-batches of a copy, degrees. Iterations take a tenth of a second to several seconds, so far
apart that runs differ by more than their noise."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
STEPS, PASSES = 6, 24
"""Least iterations of each run, and micro-batches; a stage's time is the median of all its passes."""
NOISE = 0.06
"""Part by which two runs may differ and be equal, as in the tables of docs/accuracy.md."""


def shardplan(*words: str) -> None:
    """Run a command of the installed program."""
    subprocess.run([str(Path(sys.executable).with_name("shardplan")), *words], check=True, capture_output=True)


def measured_model(folder: Path, name: str) -> planner.Graph:
    """Write a model, measure its operators, and read it with their costs."""
    base, batch, sizes = MODELS[name]
    model, costs = folder / f"{name}.onnx", folder / f"{name}.costs.json"
    shardplan("models", "build", base, *sizes.split(), "--batch", str(batch), "-o", str(model))
    shardplan("profile", str(model), "--measure", "--device", "cpu", "-o", str(costs))
    return planner.costs.with_costs(planner.load_graph(str(model)), costs.read_text(), costs.name)


def words_of(degrees: dict[str, Any]) -> str:
    """Degrees in a row of the table."""
    return ", ".join(f"{name} {'' if value is True else value}".strip() for name, value in degrees.items())


def rank_correlation(pairs: list[tuple[float, float]], noise: float) -> float:
    """Kendall's tau of predicted and measured seconds, over pairs of plans whose measured times differ by more."""
    apart = [
        (a[0] - b[0]) * (a[1] - b[1])
        for a, b in itertools.combinations(pairs, 2)
        if abs(a[1] - b[1]) > noise * min(a[1], b[1])
    ]
    return statistics.fmean((x > 0) - (x < 0) for x in apart)


def predicted(graph: planner.Graph, cluster: planner.Cluster, count: int, degrees: dict[str, Any]) -> planner.Plan:
    """The plan of these degrees, for so many micro-batches of each copy at the model's own size."""
    asked = planner.Degrees(micro_batch=graph.batch, **{"data": 1, **degrees})
    job = planner.Job(count * graph.batch * asked.data, precision="fp32")
    return planner.predict(graph, cluster, job, asked).plan


def waits_s(plan: planner.Plan, unsharded: planner.Plan) -> list[tuple[float, float]]:
    """By stage, seconds of passes that wait for weights and gradients, beside the same plan with ZeRO 0.

    Raises:
        planner.PlanError: the other plan cuts the model elsewhere.
    """
    if [stage.blocks for stage in plan.stages] != [stage.blocks for stage in unsharded.stages]:
        raise planner.PlanError("cut elsewhere without ZeRO", where=plan.model.name, hint="compare another plan")
    pairs = zip(plan.predictions.stages, unsharded.predictions.stages, strict=True)
    return [(own.forward_s - other.forward_s, own.backward_s - other.backward_s) for own, other in pairs]


def times_here(plan: planner.Plan, model: Path, *, together: bool) -> list[Any]:
    """Times of all stages on this machine: of one rank of each stage at a time, or of all ranks together."""
    steps = max(STEPS, -(-PASSES * plan.copies // plan.micro_batches.count))
    if together:
        return list(planner.runtime.run(plan, model, steps=steps).times)
    ranks = dict.fromkeys(stage.replicas[0][0] for stage in plan.stages)
    return [t for rank in ranks for t in planner.runtime.run(plan, model, steps=steps, alone=rank).times]


def write(lines: list[str]) -> None:
    """Put the table and the line below it in the place of those on the page.

    Raises:
        planner.OutputError: the page has no such table, or several.
    """
    text, count = re.subn(
        r"\| model \| micro-batches \| plan \|.*?\n\n.*?\n", lambda _: "\n".join(lines) + "\n",
        PAGE.read_text(encoding="utf-8"), flags=re.DOTALL,
    )  # fmt: skip
    if count != 1:
        raise planner.OutputError(f"{count} tables of runs on a processor", where=str(PAGE), hint="keep one")
    PAGE.write_text(text, encoding="utf-8")


def main() -> int:
    """Print a row for each plan, mean error and rank correlation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/accuracy.md")
    parser.add_argument("--together", action="store_true", help="run all ranks of a plan at once")
    asked = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    graphs: dict[str, planner.Graph] = {}
    lines = ["| model | micro-batches | plan | predicted | here | predicted / here |"]
    lines.append("| --- | --: | --- | --: | --: | --: |")
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shardplan("hardware", "init", "--measure", "--ranks", "4", "-o", str(folder / "machine.yaml"))
        cluster = planner.load_cluster(str(folder / "machine.yaml"))
        for model, count, degrees in PLANS:
            if model not in graphs:
                graphs[model] = measured_model(folder, model)
            plan = predicted(graphs[model], cluster, count, degrees)
            unsharded = predicted(graphs[model], cluster, count, {**degrees, "zero": 0})
            times = times_here(plan, folder / f"{model}.onnx", together=asked.together)
            here_s = planner.report.measured_timeline(plan, times, waits_s(plan, unsharded)).step_s
            predicted_s = planner.simulate.simulate(plan).step_s
            pairs.append((predicted_s, here_s))
            figures = f"{1e3 * predicted_s:.0f} ms | {1e3 * here_s:.0f} ms | {predicted_s / here_s:.3f}"
            lines.append(f"| {model} | {count} | {words_of(degrees)} | {figures} |")
            print(lines[-1], flush=True)
    error = statistics.fmean(abs(p / m - 1) for p, m in pairs)
    lines += [
        "",
        f"{len(pairs)} plans: mean error {error:.1%}; Kendall's tau {rank_correlation(pairs, 0.0):.2f} of all pairs, "
        f"{rank_correlation(pairs, NOISE):.2f} of those whose times differ by more than {NOISE:.0%}.",
    ]
    print("\n".join(lines[-2:]))
    if asked.write:
        write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
