"""`shardplan predict`: what exactly one configuration would take."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from . import _options
from ._progress import progress_line
from ._report import say_where, show

_BESIDE = frozenset(
    ("model", "hardware", "nodes", "stack", "changes", "devices", "dims", "costs", "global_batch", "precision",
     "optimizer", "overlap", "headroom", "price", "best", "config", "output", "form")
)  # fmt: skip
"""Options that may stand beside --config."""


@click.command("predict")
@_options.model_argument
@_options.machine_options()
@click.option(
    "--global-batch", "-b", type=click.IntRange(min=1),
    help="Samples per optimizer step. [required unless --config says the number of micro-batches]",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="A configuration or plan file instead of degrees; - is standard input.")
@click.option(
    "--from", "framework", nargs=2, metavar="FRAMEWORK FILE",
    help="Take degrees, batch sizes, number formats and optimizer from a framework's own configuration: megatron (a "
    "file of arguments or launch script), torchtitan (config.toml), deepspeed (ds_config.json). Options beside it win.",
)  # fmt: skip
@click.option("--tp", "tensor", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor parallel ranks.")
@click.option(
    "--cp", "context", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks sharing a sequence."
)
@click.option(
    "--ep", "expert", type=click.IntRange(min=1), default=1, show_default=True,
    help="Expert parallel ranks, which are among the data parallel ones.",
)  # fmt: skip
@click.option("--pp", "pipeline", type=click.IntRange(min=1), default=1, show_default=True, help="Pipeline workers.")
@click.option("--dp", "data", type=click.IntRange(min=1), help="Data parallel copies. [default: as the devices allow]")
@click.option(
    "--interleave", "--vp", "chunks", type=click.IntRange(min=1), default=1, show_default=True,
    help="Chunks a worker holds.",
)  # fmt: skip
@click.option("--micro-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Samples at a time.")
@click.option("--schedule", help="Order of work. [default: 1f1b; interleaved where a worker holds several chunks]")
@click.option("--zero", type=click.IntRange(min=0), default=0, show_default=True, help="ZeRO stage (3 is FSDP).")
@click.option(
    "--exchange", metavar="SCHEME",
    help="How gradients travel between data parallel copies of a whole model: ring, hierarchical, byteps, parallax, .. "
    "(docs/exchange.md). [default: as the ZeRO stage says]",
)  # fmt: skip
@click.option(
    "--recompute", default="never", show_default=True,
    help="What stages run forward again in backward: `never`, `always` (all layers), or modules as in `plan`: "
    "layernorm,moe_act.",
)  # fmt: skip
@click.option("--starts", help="First block of each stage but the first, as 12,24,36. [default: equal layers]")
@click.option(
    "--pipeline-layout", "layout",
    help="Items of each stage as Megatron writes them, 'Et*3|(t*4|)*6t*3L': E embedding, t layer, m further token "
    "predicted, L loss; stage i is chunk i // PP of worker i % PP.",
)  # fmt: skip
@click.option(
    "--first-stage-layers", "first_layers", type=click.IntRange(min=1),
    help="Layers of the first worker, all chunks together. [default: as many as others]",
)  # fmt: skip
@click.option(
    "--last-stage-layers", "last_layers", type=click.IntRange(min=1),
    help="The same of the last worker.",
)  # fmt: skip
@click.option(
    "--precision",
    help="Number formats, as in `plan`. [default: that of the plan file, or the best that the devices have]",
)
@click.option("--optimizer", help="As in `plan`. [default: adam, or that of the plan file]")
@click.option(
    "--overlap", type=click.FloatRange(0, 1), help="Share of backward work that hides exchanges. [default: the stack's]"
)
@_options.headroom_option
@click.option("--best", is_flag=True, help="Also plan the job, and say what the configuration lacks to that plan.")
@_options.dims_option
@_options.costs_option
@_options.price_option
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the configuration as a plan file.")
@_options.format_option("text", "json")
def command(
    model: str,
    price: float | None,
    config: str | None,
    framework: tuple[str, str] | None,
    best: bool,
    output: str | None,
    form: str,
    **options: Any,  # noqa: ANN401
) -> None:
    """Price exactly one configuration of MODEL on a cluster; nothing is searched.

    A configuration that does not fit is priced all the same; what is missing is said, memory by kind and stage, and
    changes that would make it fit with their price. Of a plan file, its configuration, number formats and optimizer
    are taken.

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
    import planner

    with progress_line(form == "json", counted=False, doing="reading the model and pricing the configuration"):
        graph = _options.load_graph(model, options["dims"], options["costs"])
        cluster = _options.load_hardware(options)
        if config:
            _options.refuse_others(click.get_current_context(), _BESIDE, "--config", "say it in the file")
            asked = planner.plans.parse_configuration(
                _options.read_file(config), graph, name=_options.shown_name(config)
            )
        else:
            taken = _taken(framework, options) if framework else {}
            asked = dataclasses.replace(_degrees(options), **taken)
        job = _job(options, asked)
        provenance = planner.default_provenance(model, options["hardware"])
        found = planner.predict(graph, cluster, job, asked, provenance=provenance)
        if price:
            found = dataclasses.replace(found, plan=planner.with_price(found.plan, price))
        lack = _lack(found, graph, cluster, job) if best else None
        fixes = () if found.fits else planner.find_fixes(graph, cluster, job, asked)
    if output:
        planner.write_plan(found.plan, output)
    if form == "json":
        click.echo(json.dumps(_document(found, lack, fixes), indent=2))
        return
    show(planner.report.prediction_report(found, fixes))
    say_where(output)
    if lack:
        click.echo(_lack_words(lack))


def _job(options: dict[str, Any], asked: Any) -> Any:  # noqa: ANN401
    """What is to be trained: as the options say, else as a plan file does; a configuration in full has its own batch.

    Raises:
        click.UsageError: nothing says the global batch.
    """
    import planner

    names = ("precision", "optimizer", "overlap", "devices", "headroom")
    given = {name: options[name] for name in names if options[name] is not None}
    batch = options["global_batch"]
    if isinstance(asked, planner.Plan):
        return dataclasses.replace(asked.options, global_batch=batch or asked.options.global_batch, **given)
    if batch is None and isinstance(asked, planner.Configuration):
        batch = asked.copies * asked.micro_batch * asked.micro_batches
    if batch is None:
        raise click.UsageError("missing option --global-batch")
    return planner.Job(batch, **given)


def _lack(found: Any, graph: Any, cluster: Any, job: Any) -> dict[str, Any]:  # noqa: ANN401
    """The best plan of the job, and what a prediction lacks to it."""
    import planner

    try:
        held = planner.compare_to_best(found, graph, cluster, job)
    except planner.InfeasibleError as error:
        return {"best_s": None, "reason": error.problem.message}
    return {
        "best_s": held.plan.predictions.reached_s,
        "best_bound_s": held.plan.predictions.bound_s,
        "lacks_s": held.lacks_s,
        "ratio": held.ratio,
        "best": planner.plans.configuration_document(held.plan.configuration)["configuration"],
    }


def _lack_words(lack: dict[str, Any]) -> str:
    import planner

    if lack["best_s"] is None:
        return f"best plan: none fits ({lack['reason']})"
    more, ratio, seconds = lack["lacks_s"], lack["ratio"], planner.units.format_seconds
    differs = f"{seconds(abs(more))} {'more' if more > 0 else 'less'}" if more else "as long"
    return f"best plan: {seconds(lack['best_s'])} an iteration; this takes {differs} ({ratio:.3f} times)"


def _taken(framework: tuple[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """Degrees of a framework's configuration that no option names; what else it says of the job goes into `options`."""
    import planner

    name, path = framework
    text = _options.read_file(path).decode(errors="replace")
    read = planner.export.read_job(text, name, _options.shown_name(path))
    for key in ("global_batch", "precision", "optimizer", "overlap"):
        if options[key] is None and getattr(read, key) != "":
            options[key] = getattr(read, key)
    for words in read.ignored:
        click.echo(f"note: not taken over from {_options.shown_name(path)}: {words}", err=True)
    given = set(_options.given(click.get_current_context()))
    named = {"recompute": {"recompute", "repeats"}}
    beside = {field for option in given for field in named.get(option, {option})}
    degrees = {field.name: getattr(read.degrees, field.name) for field in dataclasses.fields(read.degrees)}
    return {key: value for key, value in degrees.items() if key not in beside}


def _degrees(options: dict[str, Any]) -> Any:  # noqa: ANN401
    import planner

    names = ("tensor", "context", "expert", "pipeline", "chunks", "micro_batch", "zero")
    return planner.Degrees(
        **{name: options[name] for name in names},
        data=options["data"] or 0,
        schedule=options["schedule"] or "",
        exchange=options["exchange"] or "",
        recompute=options["recompute"] == "always",
        repeats=_modules(options["recompute"]),
        starts=_starts(options["starts"]),
        layout=options["layout"] or "",
        first_layers=options["first_layers"] or 0,
        last_layers=options["last_layers"] or 0,
    )


def _modules(choice: str) -> tuple[str, ...]:
    """The modules that a choice of recomputation names.

    Raises:
        click.BadParameter: it leaves the choice open, or names none.
    """
    import planner

    modules: tuple[str, ...] = planner.recomputed_modules(choice)
    if not modules and choice not in ("never", "always"):
        raise click.BadParameter(f"{choice!r} is no single choice: never, always or modules", param_hint="--recompute")
    return modules


def _starts(text: str | None) -> tuple[int, ...]:
    """`12,24,36` as numbers, ascending.

    Raises:
        click.BadParameter: something else.
    """
    if not text:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of blocks such as 12,24,36", param_hint="--starts")
    starts = tuple(map(int, parts))
    if list(starts) != sorted(set(starts)) or starts[0] < 1:
        raise click.BadParameter(f"{text!r} is not ascending from 1 on", param_hint="--starts")
    return starts


def _document(found: Any, lack: dict[str, Any] | None, fixes: Any) -> dict[str, Any]:  # noqa: ANN401
    """The prediction as JSON: times, what is missing, the configuration as a file has it, memory of every worker."""
    import planner

    error = found.plan.predictions.measured_error
    return {
        "headline": dataclasses.asdict(found.plan.headline),
        "iteration_s": found.iteration_s,
        "measured_error": error and dataclasses.asdict(error),
        "bound_s": found.plan.predictions.bound_s,
        "fits": found.fits,
        "headroom": found.headroom,
        "fits_with_headroom": found.fits_with_headroom,
        "driver_bytes": found.driver_bytes,
        "problems": list(found.problems),
        "fixes": [dataclasses.asdict(fix) for fix in fixes],
        **planner.plans.configuration_document(found.configuration),
        "workers": [
            {**dataclasses.asdict(worker), "missing_bytes": max(0.0, worker.memory.total - worker.capacity_bytes)}
            for worker in found.workers
        ],
        **(lack or {}),
    }
