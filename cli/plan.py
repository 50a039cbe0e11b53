"""`shardplan plan`: plan a model on a cluster."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import click

import planner

from . import _inputs, _options
from ._partition import OWN, partition_options, plan_partition, planned_as_partition
from ._report import Draw, best_so_far, progress_line, say_document, say_where, show

_sizes = functools.partial(click.option, type=_options.NUMBERS)
"""An option of allowed sizes: `8` or `1,2,4`."""


@_options.command("plan")
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
    type=_options.FilePath("orders", exists=True, dir_okay=False),
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
def command(given: _options.Options) -> None:
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
    if planned_as_partition(given.model):
        plan_partition(given)
        return
    if not given.hardware:
        raise click.UsageError("Missing option '--hardware' / '-H'.", click.get_current_context())
    if given.least and not given.target:
        raise click.UsageError(
            "--least says what --target minimizes: add --target step=2s, say, and --price where the profile has none"
        )
    given = _options.Options(**{name: value for name, value in vars(given).items() if name not in OWN})
    orders = [(given.schedule_file, _options.read_file(given.schedule_file))] if given.schedule_file else []
    provenance = _inputs.provenance_of(given, *orders)
    with progress_line(given.quiet or given.form == "json", counted=True, doing="reading the model") as draw:
        graph = _options.load_graph(given)
        cluster = _options.load_hardware(given)
        answer = None
        try:
            if given.target:
                answer = _for_target(graph, cluster, provenance, given, draw)
                plan = answer.plan
            else:
                plan = _planned(graph, cluster, provenance, given, draw)
        except planner.InfeasibleError as error:
            if given.form == "json":
                refusal = planner.plans.infeasible_answer(error, graph.fingerprint, cluster.fingerprint, provenance)
                say_document(planner.plans.dump_answer(refusal))
            raise
    if given.price:
        plan = planner.with_price(plan, given.price)
    if given.output:
        planner.write_plan(plan, given.output)
    if given.form == "json":
        say_document(planner.dump_plan(plan))
    elif not given.quiet:
        remark = "" if given.precision else planner.costs.precision_remark(plan.options.precision, cluster.devices)
        if answer is None:
            show(planner.plan_report(plan, batch_given=given.global_batch is not None, remark=remark))
        else:
            show(planner.report.target_report(dataclasses.replace(answer, plan=plan), remark=remark))
        say_where(given.output)


def _for_target(graph: Any, largest: Any, provenance: Any, given: _options.Options, draw: Draw | None) -> Any:  # noqa: ANN401
    """The plan that reaches a target with the fewest devices or dollars, and the sizes that were tried.

    Raises:
        click.UsageError: no global batch is given, whose default would differ with the number of devices.
    """
    if given.global_batch is None:
        raise click.UsageError("--target needs --global-batch, the same for all numbers of devices")
    if given.devices is not None:
        raise click.UsageError("--target searches the number of devices: give their maximum by --nodes, not --devices")

    def plan_on(devices: int) -> Any:  # noqa: ANN401
        cluster = _options.load_hardware(given, nodes=None, devices=devices)
        per_node = cluster.node_size or 1
        sized = dataclasses.replace(provenance, nodes=f"{cluster.device_count // per_node}x{per_node}")
        plan = _planned(graph, cluster, sized, given, draw)
        return planner.with_price(plan, given.price) if given.price else plan

    target = planner.ask.read_target(given.target)
    sizes = planner.ask.sizes_of(largest, largest.device_count) if given.nodes else ()
    least = {} if given.least is None else {"least": given.least}
    return planner.least_devices(target, graph, largest, given.global_batch, plan_on, sizes=sizes, **least)


def _planned(graph: Any, cluster: Any, provenance: Any, given: _options.Options, draw: Draw | None) -> Any:  # noqa: ANN401
    """The plan of the joint search, or of a published system."""
    job = _options.job_of(
        given,
        cluster.device_count,
        micro_batches=tuple(sorted(set(given.micro_batches))),
        fused_attention=given.attention == "fused",
        dropout=not given.no_dropout,
        **({"recompute": f"layers:{given.recompute_layers}"} if given.recompute_layers else {}),
    )
    arguments = {"strict_ops": given.strict_ops, "provenance": provenance}
    orders = given.schedule_file
    if given.system and (orders or given.schedules):
        raise click.UsageError("--system chooses its own schedule: leave out --schedule and --schedule-file")
    if orders and given.schedules:
        raise click.UsageError("--schedule-file has the schedule: leave out --schedule")

    def show_progress(done: int, total: int, incumbent_s: float, bound_s: float) -> None:
        if draw:
            best = best_so_far(incumbent_s * 1e3, bound_s * 1e3, "ms")
            draw(doing="searching", completed=done, total=total, found=best)

    if draw:
        devices = planner.units.plural(cluster.device_count, "device")
        draw(doing=f"pricing operators on {devices}", completed=0, total=None)
    if given.system and given.system != "auto":
        return planner.plan_system(given.system, graph, cluster, job, **arguments)
    return planner.plan(graph, cluster, job, orders=orders, progress=show_progress if draw else None, **arguments)
