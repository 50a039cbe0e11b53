"""torchtitan's TOML files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import UsageError
from planner.export.reading import Beside, FrameworkJob, ModelSizes, Reader, Settings, options_of
from planner.export.reading.options import Value, flat
from planner.export.reading.sizes import flavor_notes
from planner.export.reading.splits import layout_of, titan_layers
from planner.foreign_files import Door
from planner.registry import did_you_mean
from planner.space.named import Degrees

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Classes of `torch.distributed.pipelining` by the plan's schedule."""

SINGLE = frozenset({"1F1B", "GPipe"})
"""Of these, those with one stage a rank; the others have two by default."""

TYPES = {"bf16-fp32grad": ("bfloat16", "float32"), "fp32": ("float32", "float32")}
"""Types of weights in the passes, and of gradients while they are reduced, by precision."""

OPTIMIZERS = {"adamw": "adamw", "adam": "adam"}
"""Our names of `optimizer.name`, in small letters."""

_OWN = ("job.custom_config_module", "experimental.custom_args_module")
"""Keys that name a module with options of the user's own."""

_CUTS = frozenset({"starts", "layout", "first_layers", "last_layers", "chunks"})
"""Fields of `Degrees` that say where stages begin."""


def parse(text: str) -> tuple[Mapping[str, Value], bool]:
    """The keys of a TOML file, and whether it names a module with keys of the user's own.

    Raises:
        UsageError: the text is no TOML that can be read.
    """
    tables = Door("", UsageError, "give torchtitan's config.toml").toml(text)
    given = dict(flat(tables, options_of("torchtitan")))
    return given, any(given.get(name) for name in _OWN)


def take(settings: Settings, sizes: ModelSizes | None, beside: Beside) -> FrameworkJob:
    """The job of torchtitan's keys.

    Raises:
        UsageError: they leave open how many ranks hold the shards of a group (HSDP), a schedule has no name here, or
            torchtitan refuses the stages.
    """
    number = settings.number
    tensor, context, expert = (
        number(f"parallelism.{kind}_parallel_degree") for kind in ("tensor", "context", "expert")
    )
    own = beside.get("pipeline")
    pipeline = own if isinstance(own, int) else number("parallelism.pipeline_parallel_degree")
    groups, shards = (number(f"parallelism.data_parallel_{name}_degree") for name in ("replicate", "shard"))
    if shards < 1 and shards != -1:
        hint = "give 1 or more, or -1 for all ranks that are left"
        raise UsageError(f"parallelism.data_parallel_shard_degree is {shards}", hint=hint)
    sharded = shards != 1 or context > 1
    if sharded and groups != 1 and shards < 2:
        raise UsageError(
            "how many ranks hold the shards of a group (HSDP) is left open",
            hint="give data_parallel_shard_degree as a number",
        )
    piped = pipeline > 1
    zero = 1 if piped else 2 if settings.word("parallelism.fsdp_reshard_after_forward") == "never" else 3
    local, micro = number("training.local_batch_size"), number("parallelism.pipeline_parallel_microbatch_size")
    if piped and local % micro and "micro_batch" not in beside:
        problem = f"micro-batches of {micro} do not divide training.local_batch_size {local}, which torchtitan refuses"
        raise UsageError(problem, hint="change parallelism.pipeline_parallel_microbatch_size, or use --micro-batch")
    schedule = _schedule_of(settings) if piped and "schedule" not in beside else ""
    chunks, layout = _cut(settings, sizes, pipeline) if piped and not _CUTS & beside.keys() else (1, "")
    stages = layout.count("|") + 1 if layout else pipeline * chunks
    recomputed = _recomputed_layers(settings, (sizes.layers if sizes else 0) / stages)
    degrees = Degrees(
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        context=context,
        expert=max(1, expert * number("parallelism.expert_tensor_parallel_degree") // tensor),
        micro_batch=micro if piped else local,
        schedule=schedule,
        zero=zero if sharded else 0,
        shard_over=shards if sharded and groups > 1 else 0,
        recompute=settings.word("activation_checkpoint.mode") == "full" or recomputed > 0,
        recompute_layers=recomputed,
        layout=layout,
    )
    types = tuple(settings.word(f"training.mixed_precision_{what}") for what in ("param", "reduce"))
    batch = number("training.global_batch_size")
    if batch < 1 and batch != -1:
        raise UsageError(
            f"training.global_batch_size is {batch}", hint="give 1 or more, or -1 for one local batch a rank"
        )
    return FrameworkJob(
        degrees,
        batch if batch > 0 else None,
        next((name for name, kinds in TYPES.items() if kinds == types), ""),
        OPTIMIZERS.get(settings.word("optimizer.name").lower(), ""),
        ignored=(*_notes(settings, types, recomputed, piped=piped, sharded=sharded), *flavor_notes(settings)),
        sequence=number("training.seq_len") if "training.seq_len" in settings else 0,
        between="sequence" if tensor > 1 else "",
        accumulated=0 if batch > 0 else max(1, local // micro) if piped else 1,
        data=groups * shards if shards > 0 else 0,
        drained=local if piped else 0,
        rule=("training.global_batch_size", "micro-batch", "micro-batches of a local batch"),
    )


def _recomputed_layers(settings: Settings, layers: float) -> int:
    """Layers of a stage that are recomputed where every n-th one is; 0 for none, or where all or no layers are.

    Args:
        settings: of the file.
        layers: of a stage, on average; 0 where that is not known.

    Raises:
        UsageError: the option is neither a number nor `op`.
    """
    every = settings.word("activation_checkpoint.selective_ac_option")
    if settings.word("activation_checkpoint.mode") != "selective" or every == "op":
        return 0
    if not every.isdecimal():
        problem = f"activation_checkpoint.selective_ac_option is {every!r}"
        raise UsageError(problem, hint="write a whole number in quotes, or op")
    return round(layers / max(1, int(every)))


def _notes(settings: Settings, types: Sequence[str], recomputed: int, *, piped: bool, sharded: bool) -> Iterator[str]:
    """Notes on keys that are read whose values are known but not modelled."""
    if tuple(types) not in TYPES.values():
        yield f"training.mixed_precision of {' and '.join(types)}: other time and memory; no precision has them"
    if settings.word("optimizer.name").lower() not in OPTIMIZERS:
        yield f"optimizer.name {settings.word('optimizer.name')}: other time and memory; no optimizer of that name"
    mode = settings.word("activation_checkpoint.mode")
    if mode == "selective":
        every = settings.word("activation_checkpoint.selective_ac_option")
        what = "products alone are kept" if every == "op" else f"every {every}. layer is recomputed"
        if recomputed:
            yield f"activation_checkpoint.mode selective: about as fast; {what}, here the first {recomputed} of a stage"
        else:
            yield f"activation_checkpoint.mode selective: less memory, slower; {what}, none here (--recompute-layers)"
    elif mode not in ("full", "none"):
        yield f"activation_checkpoint.mode {mode}: less memory, slower; nothing is computed again here"
    if settings.word("parallelism.fsdp_reshard_after_forward") == "always" and piped and sharded:
        yield (
            "parallelism.fsdp_reshard_after_forward always: about as fast; stages keep weights gathered once they have "
            "run backward"
        )


def _schedule_of(settings: Settings) -> str:
    """Our name for torchtitan's schedule.

    Raises:
        UsageError: there is none.
    """
    title = settings.word("parallelism.pipeline_parallel_schedule")
    names = {title: name for name, title in SCHEDULES.items()}
    if title not in names:
        raise UsageError(f"the schedule {title} has no name here", hint=did_you_mean(title, names))
    return names[title]


def _cut(settings: Settings, sizes: ModelSizes | None, pipeline: int) -> tuple[int, str]:
    """Chunks of a worker, and the stages as a layout; "" where the model's number of layers is not known.

    Raises:
        UsageError: torchtitan refuses the stages.
    """
    named = settings.values.get("parallelism.module_fqns_per_model_part")
    layers = sizes.layers if sizes else 0
    if named:
        if not isinstance(named, list) or not all(isinstance(part, list) for part in named):
            problem = "parallelism.module_fqns_per_model_part is no list of lists"
            raise UsageError(problem, hint="give the names of the modules of each stage")
        parts = [[str(name) for name in part] for part in named if isinstance(part, list)]
        return 1, "|".join(map(_items, parts))
    points = settings.values.get("parallelism.pipeline_parallel_split_points")
    if isinstance(points, list) and points:
        starts = [int(digits) for point in points if (digits := str(point).rpartition(".")[2]).isdecimal()]
        bounds = [0, *starts, layers]
        if len(starts) != len(points) or sorted(set(bounds)) != bounds:
            problem = f"parallelism.pipeline_parallel_split_points are {points}"
            raise UsageError(problem, hint=f"give layers in order, as layers.4, below the {layers} of the model")
        return 1, layout_of([stop - start for start, stop in itertools.pairwise(bounds)])
    ends = [settings.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")]
    single = settings.word("parallelism.pipeline_parallel_schedule") in SINGLE
    stages = pipeline * (1 if single else 2)
    key = "parallelism.pipeline_parallel_layers_per_stage"
    if key in settings and layers:
        stages = math.ceil((layers + sum(ends)) / settings.number(key))
        each, remainder = divmod(stages, pipeline)
        if remainder or (each == 1) != single:
            wanted = "one stage" if single else "two stages or more"
            raise UsageError(
                f"{key} {settings.number(key)} makes {stages} stages of {layers} layers on {pipeline} workers, and "
                f"torchtitan refuses others than {wanted} a worker",
                hint=f"use {math.ceil((layers + sum(ends)) / (pipeline * (1 if single else 2)))} there",
            )
    if not layers:
        return max(1, stages // pipeline), ""
    return 1, layout_of(titan_layers(layers, stages, *ends))


def _items(modules: Sequence[str]) -> str:
    """The modules of a stage as items of a layout: E the embedding, t a layer, L the output; norms go with the next."""
    letters = {"tok_embeddings": "E", "output": "L"}
    return "".join("t" if name.startswith("layers.") else letters.get(name, "") for name in modules)


READER = Reader("torchtitan", parse, take)
