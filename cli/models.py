"""`shardplan models`: list the bundled models, and build models as ONNX files; `shardplan profile`: estimate or measure
a model's time and memory on one device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import planner

from . import _options
from ._options import Options, count, dims_option, format_option, parse_dims
from ._report import say, say_progress, show

_onnx_output = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="ONNX file to write."
)


@click.group("models")
def command() -> None:
    """List and build bundled models.

    \b
    Examples:
      shardplan models list --family llama
      shardplan models build llama3-70b -o llama3-70b.onnx --seq 4096
      shardplan models build --family llama --layers 40 --hidden 5120 --heads 40 --ffn 13824 --vocab 32000 -o mine.onnx
    """


@_options.command("list", command)
@click.option("--family", metavar="NAME", help="List only this family, with the options of its builders.")
@format_option("table", "json")
def list_models(given: Options) -> None:
    """List the bundled models: name, family, parameters, layers, default sequence length, source.

    With --family, also list the size options of `models build`.

    \b
    Examples:
      shardplan models list --family moe
      shardplan models list --format json
    """
    family, types = given.family, planner.bundled.bundled_options()
    models = [planner.bundled_info(name) for name in planner.bundled_names()]
    families = {*(info.family for info in models), *(listed for listed, _ in types.values())}
    if family is not None and family not in families:
        raise planner.UsageError(
            f"no family of models is called {family!r}", hint=planner.registry.did_you_mean(family, families)
        )
    models = [info for info in models if family in (None, info.family)]
    show(planner.report.models_report(models), form=given.form)
    if family is None or given.form != "table":
        return
    for model_type, (listed, options) in types.items():
        if listed == family:
            click.echo(f"\noptions of {model_type}: {' '.join(f'--{name}' for name in options)}")


@_options.command("build", command, context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.option("--family", metavar="NAME", help="Build a model of this family or model_type with your own sizes.")
@_onnx_output
@count("--batch", default=1, show_default=True, help="Samples in one forward pass.")
@count("--seq", help="Sequence length. [default: the model's]")
@click.argument("sizes", nargs=-1, type=click.UNPROCESSED, metavar="[--SIZE VALUE]...")
def build_model(given: Options) -> None:
    """Write a model as an ONNX file with graph and shapes, but without weight data.

    NAME is a bundled model; further options change its sizes (`--layers 16`), see `models list --family`. With --family
    you give all sizes.

    \b
    Examples:
      shardplan models build megatron-1t -o megatron-1t.onnx --batch 2 --seq 2048
      shardplan models build llama3-8b --layers 16 -o half.onnx
      shardplan models build --family llama --layers 40 --hidden 5120 --heads 40 --ffn 13824 --vocab 32000 -o mine.onnx
    """
    name, family, sizes = given.name, given.family, given.sizes
    batch, seq, output = given.batch, given.seq, given.output
    if family is not None and name is not None:
        sizes, name = (name, *sizes), None
    if (base := family or name) is None:
        raise planner.UsageError(
            "no model is named", hint="give the NAME of a bundled model, or --family and its sizes"
        )
    choices = _choices(sizes)
    notes: tuple[str, ...] = ()
    if family is None and not choices:
        info = planner.bundled_info(base)
        model = planner.build_bundled(base, batch=batch, seq=seq)
        length = "" if info.seq is None else f", sequence {seq or info.seq}"
    else:
        config = planner.bundled.bundled_config(base, choices)
        model, notes = planner.build_configured(config, name=output.stem, batch=batch, seq=seq)
        length = "" if seq is None else f", sequence {seq}"
    data = model.SerializeToString(deterministic=True)
    planner.files.write_whole(output, data)
    say(f"wrote {output}: {base}, batch {batch}{length}, {len(data) / 1e3:,.0f} kB without weights")
    for note in notes:
        say(f"note: {note}")


@_options.command("rebatch", command)
@click.argument("model", metavar="MODEL", type=_options.FilePath("model", dir_okay=False))
@count("--batch", required=True, help="Samples in one forward pass.")
@_onnx_output
@dims_option
def rebatch_model(given: Options) -> None:
    """Convert an ONNX file that was exported at a fixed batch to another batch.

    Constants that contain the batch (targets of Reshape and Expand) get the values that plans for that micro-batch list
    in `model.rebatch`. The new file must be in the same folder if weights are stored in files beside the model.

    \b
    Examples:
      shardplan models rebatch model.onnx --batch 4 -o model-4.onnx
      shardplan models rebatch model.onnx --batch 4 --dim seq=128 -o model-4.onnx
    """
    model, batch, output = given.model, given.batch, given.output
    rebatched = planner.importers.rebatched_file(model, batch, dims=parse_dims(given.dims))
    if rebatched.external and output.resolve().parent != Path(model).resolve().parent:
        raise planner.UsageError(
            f"the weights in {rebatched.external[0]} lie beside {model}, not beside {output}",
            hint="write the file into the same folder",
        )
    planner.files.write_whole(output, rebatched.model.SerializeToString(deterministic=True))
    say(f"wrote {output}: batch {batch}, {planner.units.plural(rebatched.operands, 'operand')} with other values")
    if rebatched.repeated:
        shown = ", ".join(rebatched.repeated[:3]) + (", ..." if len(rebatched.repeated) > 3 else "")
        constants = planner.units.plural(len(rebatched.repeated), "constant")
        say(f"note: the first entry is taken for all samples in {constants}: {shown}")


def _choices(words: Sequence[str]) -> dict[str, str]:
    """Read `--layers 40 --hidden=5120` into values by option.

    Raises:
        UsageError: a word is no option, or an option has no value.
    """
    choices, remaining = {}, list(words)
    while remaining:
        word = remaining.pop(0)
        option, joined, value = word.partition("=")
        if not option.startswith("--"):
            raise planner.UsageError(f"{word!r} is not an option", hint="sizes are given as --layers 40")
        if not joined and (not remaining or remaining[0].startswith("--")):
            raise planner.UsageError(f"{option} lacks its value", hint=f"give {option} VALUE")
        choices[option.removeprefix("--")] = value if joined else remaining.pop(0)
    return choices


_ANY = frozenset({"model", "dims", "micro_batch", "form", "top", "output"})
_KEPT = frozenset({"attention", "no_dropout"})
DEFAULT_TOP = 12
_ANY_CLUSTER = "dgx-a100"
_PARTS = (2, 4)
"""Parts of the micro-batch that are measured beside it."""
_COUNT, _STEPS = 4, 3
"""Micro-batches and iterations of the runs that say what whole passes take."""


@_options.command("profile")
@_options.model_argument
@click.option(
    "--device",
    "-d",
    type=_options.HARDWARE,
    help="Device (`shardplan hardware list --devices`), such as h100-sxm-80gb; with --measure, cuda or cpu.",
)
@click.option("--precision", help="Training precision, as in `plan`. [default: the best that the device supports]")
@_options.dims_option
@_options.count("--micro-batch", help="Samples per micro-batch. [default: the model's]")
@_options.flag(
    "--measure",
    help="Measure operators on this machine instead: each alone, by onnxruntime or (--device cuda) by torch; or, with "
    "--device cpu, within whole training passes by torch on one thread, as `run` runs them.",
)
@click.option(
    "--cache", type=_options.FilePath("measurements", file_okay=False), help="Folder that caches measurements."
)
@_options.stack_option
@_options.attention_option
@_options.flag("--no-dropout", help="Ignore dropout nodes.")
@_options.flag("--assume-dropout", help="Count dropout masks where transformers usually have them.")
@_options.format_option("table", "json", "csv")
@_options.count("--top", default=DEFAULT_TOP, show_default=True, help="Rows of each table.")
@_options.strict_option
@_options.file_to_write("--output", "-o", help="Write the times of all operators, for `--costs`.")
def profile(given: Options) -> None:
    """Estimate time and memory of MODEL on one device: totals, costliest layers and operators, coverage.

    MODEL is an ONNX file, a Hugging Face config.json or a bundled model's name.

    `--format csv` lists every node; `json` has the complete report.

    \b
    Examples:
      shardplan profile model.onnx --device h100-sxm-80gb
      shardplan profile llama3-8b --device a100-sxm-80gb --dim seq=4096 --micro-batch 2
      shardplan profile model.onnx --measure --format json
      shardplan profile model.onnx --measure --device cuda --precision bf16 -o measured.json
      shardplan profile model.onnx --measure -o measured.json
      shardplan plan model.onnx -H pool.yaml -b 64 --costs measured.json
    """
    graph = _options.load_graph(given)
    priced = _price(graph, given)
    if given.output:
        text = json.dumps(planner.costs.costs_document(graph, priced), indent=1) + "\n"
        planner.files.write_whole(given.output, text)
        say(f"costs written to {given.output}; use them with --costs {given.output}", err=True)
    shorter = {"top"} if given.form != "table" else set()
    _options.refuse_others(vars(given).keys() - shorter, f"--format {given.form}, which has all rows")
    report = planner.report.profile_report(graph, priced, most_rows=given.top, remark=_remark(priced.precision, given))
    show(report, planner.cost_report(graph, priced).document() if given.form == "json" else None, given.form)


def _price(graph: Any, given: Options) -> Any:  # noqa: ANN401
    """Costs from the source that the options select; options of other sources are refused."""
    attention = {"fused_attention": given.attention == "fused", "dropout": not given.no_dropout}
    if given.measure:
        measure_options = {"device", "precision"} if given.device else set()
        _options.refuse_others(
            {*_ANY, *_KEPT, *measure_options, "measure", "cache"},
            "--measure, which runs the file's operators as they are",
        )
        if given.device == "cpu":
            _options.refuse_others({*_ANY, *_KEPT, "measure", "device", "dims"}, "--measure --device cpu")
            return _within_passes(graph, given.model, given.micro_batch or graph.batch, **attention)
        runner = None
        if given.device:
            runner = planner.runtime.TorchRunner(given.device, given.precision or "bf16")
        cache = Path(given.cache) if given.cache else None
        return planner.costs.measure(
            graph,
            runner=runner,
            micro_batch=given.micro_batch,
            cache_folder=cache,
            progress=say_progress,
            **attention,
        )
    if planner.costs.is_priced(graph):
        _options.refuse_others(_ANY, "a model that carries measured times of its own")
        return planner.costs.imported_profile(graph, micro_batch=given.micro_batch)
    if not given.device:
        raise planner.UsageError("no device to price for", hint="give --device NAME, or --measure")
    _options.refuse_others(vars(given).keys() - {"cache"}, "prices by the roofline: it is for --measure")
    return planner.profile(
        graph,
        planner.load_device(given.device, stack=given.stack),
        precision=given.precision or "",
        micro_batch=given.micro_batch,
        assume_dropout=given.assume_dropout,
        strict_ops=given.strict_ops,
        **attention,
    )


def _within_passes(graph: Any, model: str, micro_batch: int, **attention: bool) -> Any:  # noqa: ANN401
    """Times of operators within whole passes in torch on this machine's processor, of smaller micro-batches, too."""
    smaller = []
    for size in sorted({micro_batch // parts for parts in _PARTS} - {0, micro_batch}):
        try:
            smaller.append(_at_size(graph, model, size, **attention))
        except planner.ModelError:  # the file is fixed at its batch
            break
    return replace(_at_size(graph, model, micro_batch, **attention), smaller=tuple(smaller))


def _at_size(graph: Any, model: str, micro_batch: int, **attention: bool) -> Any:  # noqa: ANN401
    """Times at one size of the micro-batch."""
    from .run import model_of_plan

    def plan_of(schedule: str) -> planner.Plan:
        """A plan of one rank: it says inputs, outputs and loss; where it would train does not matter."""
        job = planner.Job(_COUNT * micro_batch, precision="fp32", optimizer="adam", devices=1)
        degrees = planner.Degrees(micro_batch=micro_batch, schedule=schedule)
        return planner.predict(graph, planner.load_cluster(_ANY_CLUSTER), job, degrees).plan

    def rank_s(plan: planner.Plan) -> dict[str, float]:
        run = planner.runtime.run(plan, file, steps=_STEPS, alone=0, device="cpu")
        return {each.kind: each.measured_s for each in run.times}

    whole, split = plan_of(""), plan_of("zb-h1")
    file = model_of_plan(whole, model)
    seconds, whole_s, split_s = planner.runtime.measure_passes(whole, file), rank_s(whole), rank_s(split)
    rank = whole_s["forward"], whole_s["backward"], split_s.get("weight gradient")
    graph, machine = planner.rebatch(graph, micro_batch), planner.hardware.machine_name()
    found = planner.costs.passes_profile(graph, seconds, machine=machine, rank=rank, **attention)
    moved_bytes = planner.costs.update_bytes("adam", planner.costs.precision("fp32")) * whole.model.parameters
    return replace(found, update_byte_per_s=moved_bytes / whole_s["update"] if whole_s["update"] else 0.0)


def _remark(precision: str, given: Options) -> str:
    """Why the precision was chosen; "" if the user gave it."""
    if given.precision or given.measure or not given.device:
        return ""
    return planner.costs.precision_remark(precision, [planner.load_device(given.device, stack=given.stack)])
