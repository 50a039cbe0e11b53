"""`shardplan predict`: time and memory of one configuration; `shardplan calibrate`: a software stack fitted to measured
iterations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import click

import planner

from . import _inputs, _options
from ._report import progress_line, say, say_document, say_where, show

_degree = functools.partial(click.option, type=click.IntRange(min=1), default=1, show_default=True)
"""An option of one number, 1 by default."""


@_options.command("predict")
@_options.model_argument
@_options.machine_options()
@_options.count(
    "--global-batch",
    "-b",
    help="Samples per optimizer step. [required unless --config gives the number of micro-batches]",
)
@click.option(
    "--config",
    type=_options.FileText("configuration"),
    metavar="FILE",
    help="Take the configuration from this configuration or plan file; - is standard input.",
)
@click.option(
    "--from", "framework", type=(str, _options.FileText("framework")), metavar="FRAMEWORK FILE",
    help="Take degrees, batch sizes, number formats and optimizer from a framework's configuration: megatron (a file "
    "of arguments or launch script), torchtitan (config.toml), deepspeed (ds_config.json). Other options override it.",
)  # fmt: skip
@_options.for_option(
    "Share operators as this training framework's layers do (megatron, torchtitan, ..). [default: the fastest way]"
)
@_degree("--tp", "tensor", help="Tensor-parallel size.")
@_degree("--cp", "context", help="Context-parallel size.")
@_degree("--ep", "expert", help="Expert-parallel size; these ranks are part of data parallelism.")
@_degree("--pp", "pipeline", help="Pipeline-parallel size.")
@_options.count("--dp", "data", help="Data-parallel size. [default: as the devices allow]")
@_degree("--interleave", "--vp", "chunks", help="Pipeline stages (chunks) per worker.")
@_degree("--micro-batch", help="Samples per micro-batch.")
@click.option("--schedule", help="Pipeline schedule. [default: 1f1b; interleaved with several chunks per worker]")
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage (3 is FSDP).")
@click.option(
    "--shard-over", type=click.IntRange(min=2), metavar="RANKS",
    help="Neighbouring data-parallel ranks over which the ZeRO stage shards, so that each group of them holds all "
    "state (HSDP). [default: all]",
)  # fmt: skip
@click.option(
    "--exchange", metavar="SCHEME",
    help="Gradient exchange among data-parallel replicas of a whole model: ring, hierarchical, byteps, parallax, .. "
    "(docs/exchange.md). [default: that of the ZeRO stage]",
)  # fmt: skip
@click.option(
    "--recompute", default="never", show_default=True,
    help="Activation recomputation: `never`, `always` (all layers), or modules as in `plan`: layernorm,moe_act.",
)  # fmt: skip
@_options.count(
    "--recompute-layers",
    help="Recompute the first so many layers of each stage (chunk) and keep the others. [default: as --recompute]",
)
@click.option(
    "--offload", metavar="MODULES",
    help="Modules whose kept activations lie in the host's memory until their backward: core_attn,expert_fc1; or "
    "`layer_input`, with `--recompute always`. [default: none]",
)  # fmt: skip
@click.option(
    "--starts",
    type=_options.NUMBERS,
    help="First block of the second and each further stage, such as 12,24,36. [default: equal layers]",
)  # fmt: skip
@click.option(
    "--pipeline-layout", "layout",
    help="Layers of each stage in Megatron's notation, 'Et*3|(t*4|)*6t*3L': E embedding, t layer, m multi-token "
    "prediction, L loss; stage i is chunk i // PP of worker i % PP.",
)  # fmt: skip
@_options.count(
    "--first-stage-layers",
    "first_layers",
    help="Layers of the first worker, over all its chunks. [default: as many as the others]",
)
@_options.count("--last-stage-layers", "last_layers", help="Layers of the last worker, likewise.")
@click.option(
    "--precision",
    help="Number formats, as in `plan`. [default: those of the plan file, else the best that the devices support]",
)
@click.option("--optimizer", help="Optimizer, as in `plan`. [default: that of the plan file, else adam]")
@_options.overlap_option
@_options.headroom_option
@_options.flag("--best", help="Also search the best plan, and compare the configuration with it.")
@_options.dims_option
@_options.costs_option
@_options.price_option
@_options.file_to_write("--output", "-o", help="Write the configuration as a plan file.")
@_options.format_option("text", "json")
def command(given: _options.Options) -> None:
    """Price exactly one configuration of MODEL on a cluster; nothing is searched.

    A configuration that does not fit is priced, too, with the memory that is missing, by kind and stage, and the
    changes that would make it fit. From a plan file, the configuration, number formats and optimizer are used.

    \b
    Examples:
      shardplan predict llama3-70b -H dgx-h100 --nodes 8 -b 256 --tp 8 --pp 8
      shardplan predict llama3-70b -H dgx-h100 --nodes 8 -b 256 --tp 8 --pp 4 --interleave 5 --zero 1
      shardplan predict llama3.1-405b -H dgx-h100 --nodes 64 -b 512 --tp 8 --pp 8 --pipeline-layout "Et|(tt|)*62tL"
      shardplan predict gpt2 -H dgx-a100 -b 64 --pp 4 --schedule zb-h1 --recompute always --format json
      shardplan predict bert-large -H ethernet-25g -b 64 --exchange byteps:cpu_machines=2
      shardplan predict gpt2 -H dgx-h100 --config gpt2.plan.json --best
      shardplan predict llama3-8b -H dgx-h100 --from megatron arguments.txt
    """
    with progress_line(given.form == "json", counted=False, doing="reading the model and pricing the configuration"):
        graph = _options.load_graph(given)
        cluster = _options.load_hardware(given)
        if given.config:
            in_file = {"framework", "backends", *(field.name for field in dataclasses.fields(planner.Degrees))}
            _options.refuse_others(vars(given).keys() - in_file, "--config", "say it in the file")
            configuration = planner.plans.parse_configuration(
                _options.read_file(given.config), graph, name=_options.shown_name(given.config)
            )
        else:
            framework_degrees, sequence = _framework_degrees(given, graph, cluster) if given.framework else ({}, 0)
            configuration = dataclasses.replace(_degrees(given), **framework_degrees)
        job = _job(given, configuration)
        read = [
            path for path in (given.config, given.framework and given.framework[1]) if path and os.path.isfile(path)
        ]
        provenance = _inputs.provenance_of(given, *((path, _options.read_file(path)) for path in read))
        prediction = planner.predict(
            graph, cluster, job, configuration, fewest_weights=given.framework is not None, provenance=provenance
        )
        if given.price:
            prediction = dataclasses.replace(prediction, plan=planner.with_price(prediction.plan, given.price))
        best_comparison = _compared_to_best(prediction, graph, cluster, job) if given.best else None
        fixes = () if prediction.fits else planner.find_fixes(graph, cluster, job, configuration)
    priced = prediction.plan.headline.sequence if prediction.plan.headline else 0
    if given.framework and sequence and priced not in (0, sequence):
        words = f"{_options.shown_name(given.framework[1])} trains sequences of {sequence}, and {priced} is priced"
        say(f"note: {words}: --dim seq={sequence} prices those", err=True)
    if given.output:
        planner.write_plan(prediction.plan, given.output)
    if given.form == "json":
        say_document(json.dumps(_document(prediction, best_comparison, fixes), indent=2) + "\n")
        return
    show(planner.report.prediction_report(prediction, fixes))
    say_where(given.output)
    if best_comparison:
        say(_best_words(best_comparison))


def _job(given: _options.Options, configuration: Any) -> Any:  # noqa: ANN401
    """The job of the options, or of a plan file; a full configuration determines the global batch.

    Raises:
        click.UsageError: the global batch is not given.
    """
    names = ("precision", "optimizer", "overlap", "devices", "headroom", "backends", "structure")
    fields = {name: getattr(given, name) for name in names if getattr(given, name, None) is not None}
    batch = given.global_batch
    if isinstance(configuration, planner.Plan):
        return dataclasses.replace(
            configuration.options, global_batch=batch or configuration.options.global_batch, **fields
        )
    if batch is None and isinstance(configuration, planner.Configuration):
        batch = configuration.copies * configuration.micro_batch * configuration.micro_batches
    if batch is None:
        raise click.UsageError("missing option --global-batch")
    return planner.Job(batch, **fields)


def _compared_to_best(prediction: Any, graph: Any, cluster: Any, job: Any) -> dict[str, Any]:  # noqa: ANN401
    """The best plan of the job, and the difference of the prediction to it."""
    try:
        best, lacks_s, ratio = planner.compare_to_best(prediction, graph, cluster, job)
    except planner.InfeasibleError as error:
        return {"best_s": None, "reason": error.problem.message}
    return {
        "best_s": best.predictions.reached_s,
        "best_bound_s": best.predictions.bound_s,
        "lacks_s": lacks_s,
        "ratio": ratio,
        "best": planner.plans.configuration_document(best.configuration)["configuration"],
    }


def _best_words(comparison: dict[str, Any]) -> str:
    if comparison["best_s"] is None:
        return f"best plan: none fits ({comparison['reason']})"
    difference_s, ratio, seconds = comparison["lacks_s"], comparison["ratio"], planner.units.format_seconds
    word = "more" if difference_s > 0 else "less"
    difference = f"{seconds(abs(difference_s))} {word}" if planner.units.is_visible(ratio - 1, 1) else "as long"
    return f"best plan: {seconds(comparison['best_s'])} an iteration; this takes {difference} ({ratio:.3f} times)"


def _framework_degrees(given: _options.Options, graph: Any, cluster: Any) -> tuple[dict[str, Any], int]:  # noqa: ANN401
    """Degrees of a framework's configuration that no option overrides, and its sequence; the rest goes to `given`."""
    name, path = given.framework
    text = _options.read_file(path, f"name a configuration of {name}")
    where, degrees_said = _options.shown_name(path), _degrees(given)
    beside = {field: getattr(degrees_said, field, getattr(given, field, None)) for field in _said_beside()}
    job = planner.export.read_job(text, name, where, graph=graph, beside=beside)
    degrees = {field.name: getattr(job.degrees, field.name) for field in dataclasses.fields(job.degrees)}
    kept = {key: value for key, value in degrees.items() if key not in beside}
    job = dataclasses.replace(job, degrees=dataclasses.replace(degrees_said, **kept))
    if given.global_batch is not None:
        job = dataclasses.replace(job, global_batch=given.global_batch)
    job = job.on(given.devices or cluster.device_count)
    for key in ("global_batch", "precision", "optimizer", "overlap"):
        if getattr(given, key) is None and getattr(job, key) != "":
            setattr(given, key, getattr(job, key))
    given.backends, given.structure = (name,), job.structure
    for words in job.ignored:
        say(f"note: ignored in {where}: {words}", err=True)
    return {field.name: getattr(job.degrees, field.name) for field in dataclasses.fields(job.degrees)}, job.sequence


def _said_beside() -> set[str]:
    """What the command line says in place of a framework's file: fields of degrees and of the job."""
    again, cuts = {"recompute", "repeats", "recompute_layers"}, {"starts", "layout", "first_layers", "last_layers"}
    fields_of_option = {
        "recompute": again, "recompute_layers": again, **dict.fromkeys(cuts, cuts), "chunks": {*cuts, "chunks"},
    }  # fmt: skip
    return {field for name in _options.on_command_line() for field in fields_of_option.get(name, {name})}


def _degrees(given: _options.Options) -> Any:  # noqa: ANN401
    names = {field.name for field in dataclasses.fields(planner.Degrees)}
    degrees = {name: value for name, value in vars(given).items() if name in names and value}
    again = given.recompute == "always" or (given.recompute_layers or 0) > 0
    degrees |= {"recompute": again, "repeats": _modules(given.recompute)}
    degrees["offload"] = planner.recomputed_modules(given.offload or "")
    return planner.Degrees(**degrees)


def _modules(choice: str) -> tuple[str, ...]:
    """The modules of `--recompute`.

    Raises:
        click.BadParameter: the text is neither never, always nor modules.
    """
    modules: tuple[str, ...] = planner.recomputed_modules(choice)
    if not modules and choice not in ("never", "always"):
        raise click.BadParameter(f"{choice!r} is no single choice: never, always or modules", param_hint="--recompute")
    return modules


def _document(prediction: Any, best_comparison: dict[str, Any] | None, fixes: Any) -> dict[str, Any]:  # noqa: ANN401
    """The prediction as JSON: times, problems, fixes, the configuration, memory of every worker."""
    error = prediction.plan.predictions.measured_error
    return {
        "headline": dataclasses.asdict(prediction.plan.headline),
        "iteration_s": prediction.iteration_s,
        "measured_error": error and dataclasses.asdict(error),
        "bound_s": prediction.plan.predictions.bound_s,
        **{name: getattr(prediction, name) for name in ("fits", "headroom", "fits_with_headroom", "driver_bytes")},
        "problems": list(prediction.problems),
        "fixes": [dataclasses.asdict(fix) for fix in fixes],
        **planner.plans.configuration_document(prediction.configuration),
        "workers": [
            {**dataclasses.asdict(worker), "missing_bytes": max(0.0, worker.memory.total - worker.capacity_bytes)}
            for worker in prediction.workers
        ],
        **(best_comparison or {}),
    }


@_options.command("calibrate")
@_options.model_argument
@_options.machine_options()
@click.option(
    "--runs",
    type=_options.FileText("runs"),
    required=True,
    metavar="FILE",
    help="CSV of measured runs; - is standard input.",
)
@_options.precision_option
@_options.optimizer_option
@_options.dims_option
@_options.file_to_write("--output", "-o", help="Write the fitted stack (YAML) here.")
@_options.format_option("text", "json")
def calibrate(given: _options.Options) -> None:
    """Fit a software stack to measured iteration times of MODEL on a cluster, from 5 to 20 runs.

    FILE has a header line and a line per run. Columns are the options of `predict` (tp, pp, dp, interleave,
    micro_batch, schedule, zero, recompute), global_batch, seconds (per iteration) and optionally memory_gib. The result
    is a stack file for the option --stack of other commands.

    \b
    Example of FILE:
      tp,pp,dp,micro_batch,zero,global_batch,seconds,memory_gib
      1,1,8,4,1,64,0.412,31.2
      2,2,2,2,0,64,0.498,17.9
      8,1,1,8,0,64,0.530,9.1

    \b
    Examples:
      shardplan calibrate gpt2-xl -H dgx-a100 --runs runs.csv -o ours.yaml
      shardplan plan gpt2-xl -H dgx-a100 --stack ours.yaml
    """
    content = _options.read_file(given.runs, "name a CSV file of measured runs")
    measured = planner.calibration.parse_runs(content, _options.shown_name(given.runs))
    graph = _options.load_graph(given)
    base = planner.load_stack(given.stack)
    job = _options.job_of(given, 1, global_batch=1)

    def cluster_of(own: Any) -> Any:  # noqa: ANN401
        return _options.load_hardware(given, stack=own)

    with progress_line(given.form == "json", counted=True, doing="fitting") as draw:

        def show_progress(done: int, total: int) -> None:
            if draw:
                draw(completed=done, total=total, found="clusters priced")

        calibration = planner.calibrate(graph, cluster_of, base, job, measured, progress=show_progress)
    errors = {name: calibration.error(name) for name in ("before_s", "after_s", "left_out_s")}
    show(
        planner.report.calibration_report(calibration),
        {**dataclasses.asdict(calibration), "errors": errors},
        given.form,
    )
    if given.output:
        name = Path(given.output).stem
        text = planner.calibration.calibrated_stack(calibration, name, graph.name, given.hardware)
        planner.files.write_whole(given.output, text)
        if given.form == "text":
            click.echo()
            say(f"stack written to {given.output}; use it in other commands with --stack {given.output}")
    elif given.form == "text":
        click.echo("\nnothing written; add -o FILE to write the stack")
