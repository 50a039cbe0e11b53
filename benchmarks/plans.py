"""Plans many models on one cluster and prints a table: how long each step takes and what comes out.

    python benchmarks/plans.py --hardware dgx-a100 model1.onnx model2.onnx gpt2 llama2-7b@8 ...

A model is an ONNX file or a bundled name; `@N` plans it on N nodes, `,batch=2,seq=64` behind it sizes its dimensions.
Each model is planned in a process of its own, so that times include all imports and memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = ("model", "nodes", "priced", "import s", "plan s", "whole s", "MB", "samples/s", "stages", "gap", "note")
SMALL_STATE: dict[str, Any] = {"precision": "bf16-pure", "optimizer": "sgd"}


def measure(model: str, hardware: str, nodes: int | None, dims: dict[str, int], global_batch: int) -> dict[str, object]:
    """Plan one model in this process; seconds, figures of the plan, or why there is none."""
    begin = time.perf_counter()
    import planner

    graph = planner.load_graph(model, dims=dims)
    read = time.perf_counter()
    cluster = planner.load_cluster(hardware, nodes=nodes)
    row: dict[str, object] = {
        "model": Path(model).stem,
        "nodes": graph.report.total_nodes,
        "import s": read - begin,
    }
    plan, note = None, ""
    choices: tuple[dict[str, Any], ...] = ({}, SMALL_STATE)
    for memory in choices:
        try:
            plan = planner.plan(graph, cluster, planner.Job(global_batch=global_batch, backends=("any",), **memory))
        except planner.InfeasibleError as error:
            note = f"with bf16 and adam: {error}"[:160]
            continue
        break
    row["plan s"] = time.perf_counter() - read
    row["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if plan is None:
        return row | {"note": note}
    if note:
        note = f"{plan.options.precision}, {plan.options.optimizer}; {note}"
    coverage, figures = plan.coverage, plan.predictions
    return row | {
        "priced": f"{coverage.by_rule}/{coverage.by_fallback}",
        "samples/s": global_batch / (figures.simulated_iteration_s or figures.iteration_s),
        "stages": "-".join(str(len(s.replicas)) for s in plan.stages),
        "gap": f"{figures.gap:.2%}",
        "note": note,
    }


def main() -> None:
    """Measure every model in a process of its own and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--hardware", default="dgx-a100")
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, *sizes = arguments.models[0].split(",")
        name, _, nodes = name.partition("@")
        dims = {key: int(value) for key, value in (size.split("=") for size in sizes)}
        row = measure(name, arguments.hardware, int(nodes) if nodes else None, dims, arguments.global_batch)
        print(json.dumps(row))
        return
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for model in arguments.models:
        begin = time.perf_counter()
        command = [sys.executable, __file__, "--one", "--hardware", arguments.hardware]
        command += ["--global-batch", str(arguments.global_batch), model]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {model} | failed: {done.stderr.strip().splitlines()[-1][:200]} |")
            continue
        row = json.loads(done.stdout) | {"whole s": time.perf_counter() - begin}
        print("| " + " | ".join(_text(row.get(column, "")) for column in COLUMNS) + " |", flush=True)


def _text(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
