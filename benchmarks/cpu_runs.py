"""Times of runs on this machine's processor against predictions with costs measured here.

    python -m benchmarks.cpu_runs

Each model is written as a file, its operators are measured within whole passes (`shardplan profile --measure --device
cpu`), and links among processes by gloo (`shardplan hardware init --measure --ranks 4`). Then every plan of `PLANS` is
predicted with these figures and run: thread CPU times of its stages on this machine, played in the plan's orders with
exchanges as predicted, are an iteration as it would be with a core for each rank. Nothing is fitted. Leave the machine
alone meanwhile: processes that share its memory slow each other down. Takes about ten minutes on two cores.

Not among the plans: ZeRO 2 and 3, whose exchanges inside passes a plan does not state apart; and split backward passes,
which the runtime computes by going through a stage twice.
"""

from __future__ import annotations

import itertools
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
    ("gpt", 8, {"pipeline": 1}),
    ("gpt", 8, {"pipeline": 2}),
    ("gpt", 8, {"pipeline": 4}),
    ("gpt", 8, {"pipeline": 2, "data": 2}),
    ("gpt", 8, {"pipeline": 2, "schedule": "gpipe"}),
    ("gpt", 8, {"pipeline": 2, "recompute": True}),
    ("gpt", 8, {"pipeline": 2, "chunks": 2}),
    ("gpt", 8, {"data": 2, "zero": 1}),
    ("gpt", 8, {"tensor": 2}),
    ("gpt", 16, {"data": 4}),
    ("llama", 8, {"pipeline": 1}),
    ("llama", 8, {"pipeline": 2}),
    ("llama", 8, {"pipeline": 4}),
    ("llama", 4, {"pipeline": 2}),
    ("llama", 8, {"pipeline": 2, "recompute": True}),
    ("resnet50", 4, {"pipeline": 1}),
    ("resnet50", 8, {"pipeline": 2}),
    ("resnet50", 4, {"data": 2}),
    ("bert", 8, {"pipeline": 2}),
    ("bert", 8, {"pipeline": 4}),
)
"""Model, micro-batches of a copy, degrees."""

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


def main() -> int:
    """Print a row for each plan, mean error and rank correlation."""
    pairs: list[tuple[float, float]] = []
    graphs: dict[str, planner.Graph] = {}
    print(
        "| model | micro-batches | plan | predicted | here | predicted / here |\n| --- | --: | --- | --: | --: | --: |"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shardplan("hardware", "init", "--measure", "--ranks", "4", "-o", str(folder / "machine.yaml"))
        cluster = planner.load_cluster(str(folder / "machine.yaml"))
        for model, count, degrees in PLANS:
            if model not in graphs:
                graphs[model] = measured_model(folder, model)
            size = MODELS[model][1]
            asked = planner.Degrees(micro_batch=size, **{"data": 1, **degrees})
            job = planner.Job(count * size * asked.data, precision="fp32")
            plan = planner.predict(graphs[model], cluster, job, asked).plan
            report = planner.runtime.run(plan, folder / f"{model}.onnx", steps=4)
            predicted_s, here_s = (
                planner.simulate.simulate(plan).step_s,
                planner.report.measured_iteration_s(plan, report),
            )
            pairs.append((predicted_s, here_s))
            figures = f"{1e3 * predicted_s:.0f} ms | {1e3 * here_s:.0f} ms | {predicted_s / here_s:.3f}"
            print(f"| {model} | {count} | {words_of(degrees)} | {figures} |", flush=True)
    error = statistics.fmean(abs(p / m - 1) for p, m in pairs)
    print(
        f"\n{len(pairs)} plans: mean error {error:.1%}; Kendall's tau {rank_correlation(pairs, 0.0):.2f}, "
        f"of pairs whose times differ by more than {NOISE:.0%} {rank_correlation(pairs, NOISE):.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
