"""`shardplan run`: run a plan on this machine, and check its gradients against the unsplit model."""

from __future__ import annotations

import json
from typing import Any

import click

import planner

from . import _options
from ._options import beside, choice, file_to_write, flag, format_option
from ._report import say, say_document, show

DIFFERENT = 10
"""Exit code if gradients differ from the unsplit model's, or a rank failed."""


@_options.command("run")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@click.option(
    "--model",
    "-m",
    type=_options.MODEL,
    help="The plan's ONNX file or bundled model. [default: the one that the plan names]",
)
@click.option("--steps", type=click.IntRange(min=0), default=1, show_default=True, help="Iterations to train for.")
@click.option(
    "--data",
    type=_options.FileText("data"),
    default="synthetic",
    show_default=True,
    help="Training data: `synthetic`, or an .npz file with one array per model input (and `labels`), samples first.",
)
@choice(
    "--loss",
    of=("auto", "graph", "next-token", "labels", "squares"),
    help="Loss on the outputs: the graph's own, cross entropy of the next token or of `labels`, or distance from "
    "fixed pseudo-random targets. auto: the first of graph, next-token and squares that fits the model.",
)
@click.option("--learning-rate", type=click.FloatRange(min=0), default=0.01, show_default=True, help="Learning rate.")
@flag("--check", help="First compare the gradients of an iteration with those of the unsplit model, in float64.")
@flag(
    "--measure",
    help="Also show measured times and memory of ranks beside the predicted ones, and the iteration time that follows "
    "from them. Runs at least 3 steps.",
)
@file_to_write(
    "--trace",
    "trace_file",
    help="Also write a trace of an iteration with the measured times, in the format of `simulate --trace`, so that the "
    "two can be compared. Implies --measure.",
)
@click.option("--rank", help="With --alone: the rank to run, by number, or `fullest`.")
@flag("--alone", help="Run only the rank of --rank, with substitutes for received data, to see its memory and time.")
@choice("--dtype", of=("float32", "float64"), help="Data type of all floating-point work.")
@choice(
    "--device",
    of=("auto", "cpu", "cuda", "meta"),
    help="Where ranks compute. auto: on GPUs where torch sees one, in turn where there are fewer than ranks, else on "
    "the CPU. meta: tensors without data, with --alone, to see that a plan of any size runs and what a rank holds.",
)
@choice(
    "--backend",
    of=("auto", "gloo", "nccl"),
    help="What exchanges go over. auto: NCCL where each rank has a GPU of its own, else gloo.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of weights without data, synthetic data and dropout."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Abort the run if no rank starts an action for this long.",
)
@format_option("text", "json")
def command(given: _options.Options) -> int:
    """Run PLAN on this machine, with a process per rank that communicates by torch.distributed.

    Each rank executes the operators of its stages in the plan's order. Weights are those of the ONNX file; for bundled
    models they are random, determined by name and --seed. A plan that the runtime cannot execute is refused before a
    process starts. Exits with 10 if gradients differ or a rank fails.

    \b
    Examples:
      shardplan run model.plan.json --model model.onnx --check
      shardplan run model.plan.json --model model.onnx --steps 20 --data samples.npz
      shardplan run model.plan.json --model model.onnx --measure --trace run.trace.json
      shardplan run model.plan.json --model model.onnx --rank fullest --alone
    """
    if given.trace_file and given.alone:
        raise click.UsageError("--trace is of an iteration of all ranks: leave out --alone")
    measure = given.measure or given.trace_file is not None
    plan = planner.read_plan(given.plan_file)
    shown = given.form == "text" and not given.alone
    result = planner.runtime.run(
        plan,
        model_of_plan(plan, given.model or beside(given.plan_file, plan.provenance.model)),
        steps=max(given.steps, 3) if measure else given.steps,
        alone=_alone(plan, given.rank, alone=given.alone),
        progress=(lambda step, value: click.echo(f"step {step + 1}: loss {value:.6g}")) if shown else _silent,
        **{name: getattr(given, name) for name in _OF_RUNS},
    )
    if given.trace_file:
        timeline = planner.report.measured_timeline(plan, result.times)
        planner.files.write_whole(given.trace_file, planner.trace_json(timeline))
    if given.form == "json":
        say_document(json.dumps(planner.report.run_document(result), indent=2) + "\n")
    else:
        show(planner.report.run_report(plan, result, measured=measure or given.alone))
        if given.trace_file:
            say(f"wrote trace to {given.trace_file}")
    return DIFFERENT if result.check is not None and result.check.wrong else 0


_OF_RUNS = ("data", "loss", "learning_rate", "check", "dtype", "device", "backend", "seed", "timeout_s")
"""Options that a run takes as they are."""


def _alone(plan: planner.Plan, rank: str | None, *, alone: bool) -> int | None:
    """The rank that runs alone; None for all.

    Raises:
        click.UsageError: only one of the two options is given.
        click.BadParameter: the rank is neither a number nor `fullest`.
    """
    if alone != (rank is not None):
        raise click.UsageError("--rank and --alone must be given together, such as --rank fullest --alone")
    if rank is None or rank == "fullest":
        return None if rank is None else int(planner.runtime.fullest_rank(plan))
    if not rank.isdecimal():
        raise click.BadParameter(f"{rank!r} is no rank: give its number, or fullest", param_hint="--rank")
    return int(rank)


def _silent(step: int, loss: float) -> None:
    """Prints nothing: the JSON document has the losses."""


def model_of_plan(plan: planner.Plan, model: str | None) -> Any:  # noqa: ANN401
    """The model to run: the path of a file, or a bundled model built at the plan's micro-batch."""
    name = model or plan.provenance.model
    if name in planner.bundled_names():
        inputs = [spec.shape for spec in plan.model.inputs]
        seq = next((shape[1] for shape in inputs if len(shape) == 2), None)
        return planner.build_bundled(name, batch=plan.micro_batches.size, seq=seq)
    if not name:
        raise planner.UsageError("the plan does not name its model", hint="add --model FILE")
    return name
