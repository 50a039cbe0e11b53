"""Time and memory of ranks on a GPU against the plans that they run.

    python -m benchmarks.gpu_runs [--device cuda|meta] [--dtype float32] [--hardware NAME]

Each plan of `PLANS` is made for the hardware named and run in two ways. Its ranks run together, all of them on the
GPUs that torch sees (gloo where they share one): the step, and the most that torch's allocator handed out on any rank.
Then each stage's first rank runs alone with stand-ins for exchanges: what its forward and backward take, since ranks
that share a GPU slow each other down. `--device meta` counts the bytes of the same tensors without a GPU, one rank
after the other, and takes no times. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import models
import planner
from benchmarks.cpu_runs import words_of

MODELS: dict[str, tuple[str, int, int | None]] = {
    "gpt2": ("gpt2", 2, 1024),
    "llama": ("llama3.2-1b", 1, 1024),
    "resnet50": ("resnet50", 16, None),
    "mixtral": ("", 1, 512),
}
"""By name: the bundled model, samples of a micro-batch, positions of a sequence."""

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Models that are not bundled at a size that a GPU holds, in keys of `config.json`."""

PLANS: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (model, degrees)
    for model in MODELS
    for degrees in (
        {"pipeline": 1}, {"pipeline": 1, "recompute": True}, {"pipeline": 2}, {"pipeline": 4}, {"data": 2},
        {"data": 2, "zero": 1}, {"data": 2, "zero": 2}, {"data": 2, "zero": 3}, {"tensor": 2},
    )
)  # fmt: skip
"""Model and degrees."""

COUNT = 4
"""Micro-batches of a copy."""


def _memory_row(plan: planner.Plan, model: Any, options: dict[str, Any]) -> tuple[float, float, float]:  # noqa: ANN401
    """Largest memory of a rank, the plan's for it, and seconds of a step of all ranks together (nan without data)."""
    if options["device"] == "meta":
        runs = [planner.runtime.run(plan, model, steps=2, alone=rank, **options) for rank in range(plan.world_size)]
        memory, step_s = [run.memory[0] for run in runs], float("nan")
    else:
        run = planner.runtime.run(plan, model, steps=3, timeout_s=600, **options)
        memory, step_s = list(run.memory), run.step_s[-1]
    fullest = max(memory, key=lambda m: m.measured_bytes)
    return fullest.measured_bytes, fullest.predicted_bytes, step_s


def _time_cells(plan: planner.Plan, model: Any, options: dict[str, Any]) -> str:  # noqa: ANN401
    """Forward and backward of the first stage's rank alone, in ms: here and predicted."""
    if options["device"] == "meta":
        return "- | -"
    rank = plan.stages[0].ranks[0]
    run = planner.runtime.run(plan, model, steps=4, alone=rank, timeout_s=600, **options)
    here, predicted = (
        " + ".join(f"{1e3 * getattr(t, field):.1f}" for t in run.times if t.stage == 0 and t.kind != "update")
        for field in ("measured_s", "predicted_s")
    )
    return f"{here} ms | {predicted} ms"


def main(argv: list[str] | None = None) -> int:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "meta"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--hardware", default="dgx-h100", help="profile that plans are made for [dgx-h100]")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, by commas")
    given = parser.parse_args(argv)
    options = {"device": given.device, "dtype": given.dtype}
    cluster = planner.load_cluster(given.hardware)
    print("| model | plan | memory here | planned | here / planned | stage 0 here | predicted | step of all ranks |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for name in given.models.split(","):
        bundled, size, seq = MODELS[name]
        if name in SIZES:
            model = models.build_custom(models.size_of(**SIZES[name]), batch=size, seq=seq or 0)
        else:
            model = models.build(bundled, batch=size, seq=seq)
        graph = planner.graph_from_proto(model, name=name)
        for degrees in (degrees for of, degrees in PLANS if of == name):
            asked = planner.Degrees(micro_batch=size, **{"data": 1, **degrees})
            job = planner.Job(COUNT * size * asked.data, precision="fp32", optimizer="adam")
            plan = planner.predict(graph, cluster, job, asked).plan
            here, planned, step_s = _memory_row(plan, model, options)
            cells = f"{here / 2**20:.0f} MiB | {planned / 2**20:.0f} MiB | {here / planned:.3f}"
            times = f"{_time_cells(plan, model, options)} | {'-' if step_s != step_s else f'{1e3 * step_s:.0f} ms'}"
            print(f"| {name} | {words_of(degrees)} | {cells} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
