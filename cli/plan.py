"""`shardplan plan`: plan a model on a cluster."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import click

import planner

from . import _options
from ._partition import OWN, partition_options, plan_partition, planned_as_partition
from ._report import Draw, best_so_far, progress_line, say_where, show

_sizes = functools.partial(click.option, type=_options.NUMBERS)
"""An option of allowed sizes: `8` or `1,2,4`."""


@click.command("plan")
@_options.model_argument
@_options.machine_options(required=False)
@_options.batch_option
@_options.count(
    "--micro-batch", "micro_batches", multiple=True, help="Allow only this micro-batch size; repeatable. [default: any]"
)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    help="Allow only this schedule (`interleaved`, `chimera:pairs=2`, `pipedream-2bw`, ..); repeatable. "
    "[default: 1f1b, gpipe, and interleaved where pipelines of these have bubbles]",
)
@click.option(
    "--schedule-file",
    type=click.Path(exists=True, dir_okay=False),
    help="Use the orders of work in this file, and search the best stages for them.",
)
@click.option(
    "--system",
    shell_complete=_options.complete("systems"),
    help="Choose by the rules of this published system instead: gpipe, pipedream, chimera, ..",
)
@_options.for_option(
    "Make a plan that this training framework can run: megatron, torchtitan, deepspeed, .. (docs/backends.md), or any "
    "for no limits; of several (repeatable), one must be able to. [default: megatron, torchtitan and deepspeed]"
)
@click.option(
    "--precision",
    help="Number formats: bf16, fp16, fp32, tf32, fp8, fp8-cs, fp8-blockwise, mxfp8, nvfp4, bf16-fp32grad, "
    "bf16-deepspeed, bf16-pure; with options as mxfp8:grads=fp32,last=4. [default: the first of bf16, fp16 and fp32 "
    "that all devices support]",
)
@_options.optimizer_option
@click.option(
    "--recompute",
    default="auto",
    show_default=True,
    help="Activation recomputation: `never`, `always` (all layers), `layers` (all layers or none, chosen per stage), "
    "`auto` (also single modules), or these modules: layernorm,act,moe_act,mla_up_proj,core_attn,mlp,shared_experts,"
    "moe, or patterns of operators such as `Gelu:*` and `*.mlp.*`.",
)
@_options.count(
    "--recompute-layers",
    help="Recompute the first so many layers of every stage and keep the others. [default: as --recompute]",
)
@click.option(
    "--zero",
    "zero",
    multiple=True,
    type=click.IntRange(0, 3),
    help="Allow only this ZeRO stage (3 is FSDP); repeatable. [default: all]",
)
@_sizes("--tp", "tensor_parallel", help="Allow only these tensor-parallel sizes: ranks that share every operator.")
@_sizes(
    "--cp",
    "context_parallel",
    help="Allow only these context-parallel sizes: ranks that share the sequence. [default: any for sequences of "
    "32,768 and more, else 1]",
)
@_sizes(
    "--ep",
    "expert_parallel",
    help="Allow only these expert-parallel sizes. [default: any for mixtures of experts, else 1]",
)
@_sizes("--pp", "pipeline_stages", help="Allow only these numbers of pipeline stages.")
@_sizes("--dp", "data_parallel", help="Allow only these data-parallel sizes: replicas of every stage.")
@click.option(
    "--mesh",
    "meshes",
    type=_options.MESHES,
    help="Share operators on these device meshes only: ranks by axis, such as 8 or 2x8.",
)
@click.option(
    "--keep", multiple=True, type=_options.KEPT, help="Place a block on this stage (-1: the last); repeatable."
)
@click.option(
    "--forbid",
    multiple=True,
    metavar="OPERATOR:DIM",
    help="Exclude a split of operators by dimension, such as MatMul:k or layers.0.attn*:n; repeatable.",
)
@_options.flag("--uniform", help="Use the same number of replicas for all stages, as most frameworks require.")
@_options.count("--max-stages", help="Use at most this many pipeline stages.")
@_options.overlap_option
@_options.headroom_option
@_options.attention_option
@_options.flag("--no-dropout", help="Do not count memory of dropout masks.")
@_options.flag(
    "--assume-dropout", help="Count dropout masks where transformers usually have them, even if the graph has none."
)
@_options.strict_option
@_options.dims_option
@_options.costs_option
@_options.price_option
@click.option(
    "--target", metavar="WHAT",
    help="Find the fewest devices that reach step=2s, tokens=1e12/7d or samples=1e9/12h; needs --global-batch. --nodes "
    "is then the maximum.",
)  # fmt: skip
@click.option(
    "--least", type=click.Choice(["devices", "dollars"]), help="What to minimize with --target. [default: devices]",
)  # fmt: skip
@_options.file_to_write("--output", "-o", help="Write the plan file here.")
@_options.choice(
    "--format",
    "form",
    of=("text", "json"),
    help="Output format: a summary, or the plan as JSON (if none fits, a document that says so).",
)
@_options.flag("--quiet", "-q", help="Print no progress and no summary.")
@partition_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    form: str,
    output: str | None,
    quiet: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Plan how to train MODEL (an ONNX file, a Hugging Face config.json or a bundled model's name) on a cluster.

    MODEL may also be an instance of a published partition problem: an operator graph, a Piper instance or, with
    --objective or --machines, a PipeDream profile. Such files contain their own costs.

    \b
    Examples:
      shardplan plan model.onnx --hardware dgx-a100 --global-batch 512 -o model.plan.json
      shardplan plan llama3-70b --hardware dgx-h100 --nodes 8
      shardplan plan llama3-70b --hardware dgx-h100 --nodes 8 --tp 8 --pp 2,4 --uniform --keep "layer0 on stage 0"
      shardplan plan model.onnx -H cluster.yaml -b 256 --dim seq=2048 --schedule 1f1b --format json
      shardplan plan gpt2 --hardware dgx-a100 --schedule chimera:pairs=2
      shardplan plan llama3-70b --hardware dgx-h100 --nodes 8 --for megatron
      shardplan plan llama3-8b --hardware dgx-h100 --nodes 8 --set network.bandwidth=200Gbit/s --price 2.5
      shardplan plan llama3-8b --hardware dgx-h100 --global-batch 1024 --target tokens=1e12/14d
      shardplan plan gpt2 --hardware dgx-a100 --system pipedream-2bw -o 2bw.plan.json
      shardplan plan gnmt_training.json --non-contiguous --time-limit 60s
      shardplan plan vgg16.graph.txt --machines 4x2 --bandwidth 10GB/s,1.25GB/s
    """
    if planned_as_partition(ctx, model):
        plan_partition(model, form, output, quiet, options)
        return
    if not options["hardware"]:
        raise click.UsageError("Missing option '--hardware' / '-H'.", ctx)
    if options["least"] and not options["target"]:
        raise click.UsageError("--least says what --target minimizes: add --target")
    options = {name: value for name, value in options.items() if name not in OWN}
    provenance = planner.default_provenance(model, options["hardware"])
    with progress_line(quiet or form == "json", counted=True, doing="reading the model") as draw:
        graph = _options.load_graph(model, options["dims"], options["costs"])
        cluster = _options.load_hardware(options)
        answer = None
        try:
            if options["target"]:
                answer = _for_target(graph, cluster, provenance, options, draw)
                plan = answer.plan
            else:
                plan = _planned(graph, cluster, provenance, options, draw)
        except planner.InfeasibleError as error:
            if form == "json":
                refusal = planner.plans.infeasible_answer(error, graph.fingerprint, cluster.fingerprint, provenance)
                click.echo(planner.plans.dump_answer(refusal), nl=False)
            raise
    if options["price"]:
        plan = planner.with_price(plan, options["price"])
    if output:
        planner.write_plan(plan, output)
    if form == "json":
        click.echo(planner.dump_plan(plan), nl=False)
    elif not quiet:
        remark = "" if options["precision"] else planner.costs.precision_remark(plan.options.precision, cluster.devices)
        if answer is None:
            show(planner.plan_report(plan, batch_given=options["global_batch"] is not None, remark=remark))
        else:
            show(planner.report.target_report(dataclasses.replace(answer, plan=plan), remark=remark))
        say_where(output)


def _for_target(
    graph: Any,  # noqa: ANN401
    largest: Any,  # noqa: ANN401
    provenance: Any,  # noqa: ANN401
    options: dict[str, Any],
    draw: Draw | None,
) -> Any:  # noqa: ANN401
    """The plan that reaches a target with the fewest devices or dollars, and the sizes that were tried.

    Raises:
        click.UsageError: no global batch is given, whose default would differ with the number of devices.
    """
    if options["global_batch"] is None:
        raise click.UsageError("--target needs --global-batch, the same for all numbers of devices")
    if options["devices"] is not None:
        raise click.UsageError("--target searches the number of devices: give their maximum by --nodes, not --devices")

    def plan_on(devices: int) -> Any:  # noqa: ANN401
        cluster = _options.load_hardware(options, nodes=None, devices=devices)
        plan = _planned(graph, cluster, provenance, options, draw)
        return planner.with_price(plan, options["price"]) if options["price"] else plan

    sizes = planner.ask.sizes_of(largest, largest.device_count) if options["nodes"] else ()
    return planner.least_devices(
        planner.ask.read_target(options["target"]), graph, largest, options["global_batch"], plan_on,
        sizes=sizes, least=options["least"] or "devices",
    )  # fmt: skip


def _planned(
    graph: Any,  # noqa: ANN401
    cluster: Any,  # noqa: ANN401
    provenance: Any,  # noqa: ANN401
    options: dict[str, Any],
    draw: Draw | None,
) -> Any:  # noqa: ANN401
    """The plan of the joint search, or of a published system."""
    job = _options.job_of(
        options,
        cluster.device_count,
        micro_batches=tuple(sorted(set(options["micro_batches"]))),
        fused_attention=options["attention"] == "fused",
        dropout=not options["no_dropout"],
        **({"recompute": f"layers:{options['recompute_layers']}"} if options["recompute_layers"] else {}),
    )
    arguments = {"strict_ops": options["strict_ops"], "provenance": provenance}
    orders = options["schedule_file"]
    if options["system"] and (orders or options["schedules"]):
        raise click.UsageError("--system chooses its own schedule: leave out --schedule and --schedule-file")
    if orders and options["schedules"]:
        raise click.UsageError("--schedule-file has the schedule: leave out --schedule")

    def show_progress(done: int, total: int, incumbent_s: float, bound_s: float) -> None:
        if draw:
            best = best_so_far(incumbent_s * 1e3, bound_s * 1e3, "ms")
            draw(doing="searching", completed=done, total=total, found=best)

    if draw:
        draw(
            doing=f"pricing operators on {planner.units.plural(cluster.device_count, 'device')}",
            completed=0,
            total=None,
        )
    if options["system"] and options["system"] != "auto":
        return planner.plan_system(options["system"], graph, cluster, job, **arguments)
    return planner.plan(graph, cluster, job, orders=orders, progress=show_progress if draw else None, **arguments)
