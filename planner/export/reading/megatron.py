"""Megatron's arguments, in a file or a launch script."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from planner.errors import UsageError
from planner.export.megatron_formats import format_of, optimizer_of
from planner.export.reading import Beside, FrameworkJob, ModelSizes, Reader, Settings, options_of
from planner.export.reading.options import Kind, Value
from planner.export.reading.shell import read_arguments
from planner.export.reading.splits import layout_of, megatron_layers
from planner.space.named import Degrees
from planner.systems.backends import BACKENDS
from planner.units import format_bytes

OWN_PROGRAMS = frozenset(
    {"", "pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_bert.py", "pretrain_t5.py"}
)
"""Programs of Megatron-LM without options of their own."""

LAUNCHER = frozenset(
    f"--{name.replace('-', mark)}"
    for mark in "-_"
    for name in (
        "duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-addr",
        "local-ranks-filter", "log-dir", "logs-specs", "master-addr", "master-port", "max-restarts", "module",
        "monitor-interval", "nnodes", "no-python", "node-rank", "nproc-per-node", "numa-binding", "rdzv-backend",
        "rdzv-conf", "rdzv-endpoint", "rdzv-id", "redirects", "role", "run-path", "shutdown-timeout",
        "signals-to-handle", "standalone", "start-method", "tee", "virtual-local-rank",
    )
)  # fmt: skip
"""Options of torchrun (torch 2.13, torch/distributed/run.py), none of which Megatron has."""

CUTS = frozenset({"starts", "layout", "first_layers", "last_layers", "chunks"})
"""Fields of `Degrees` that say where stages begin."""

FSDP_ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage of `--data-parallel-sharding-strategy`."""

MOST_LAYERS = 100_000
"""Layers up to which a cut is looked for."""

_MOMENTS = frozenset({"fp32", "bf16"})
"""Types of running means that an optimizer has here."""


def parse(text: str) -> tuple[Mapping[str, Value], bool]:
    """The options of a file of arguments or a launch script, and whether its program has options of its own.

    Raises:
        UsageError: there is none, or the text cannot be read.
    """
    flags = {name for row in options_of("megatron").rows if row.kind is Kind.FLAG for name in row.names}
    found = read_arguments(text, LAUNCHER, flags)
    if not found.values:
        raise UsageError("there is no argument in it", hint="arguments of pretrain_gpt.py, or a script with them")
    unread: dict[str, Value] = dict.fromkeys(found.unread, True)
    for name, value in found.values.items():
        if name in flags and value is not True:
            raise UsageError(f"{name} takes no value, and has {value!r}", hint="take the value out")
    return {**found.values, **unread}, found.program not in OWN_PROGRAMS


def take(settings: Settings, sizes: ModelSizes | None, beside: Beside) -> FrameworkJob:
    """The job of Megatron's arguments.

    Raises:
        UsageError: Megatron refuses the division.
    """
    number = settings.number
    tensor = _beside(beside, "tensor", number("--tensor-model-parallel-size"))
    pipeline = _beside(beside, "pipeline", number("--pipeline-model-parallel-size"))
    dealt = number("--expert-model-parallel-size") * number("--expert-tensor-parallel-size", tensor)
    expert = _beside(beside, "expert", max(1, dealt // tensor))
    modules, unknown = _recomputed(settings)
    block = _is_full(settings) and settings.word("--recompute-method") == "block"
    group = number("--microbatch-group-size-per-virtual-pipeline-stage", 0)
    degrees = Degrees(
        tensor=tensor,
        pipeline=pipeline,
        context=number("--context-parallel-size"),
        expert=expert,
        micro_batch=number("--micro-batch-size", 1),
        schedule=f"interleaved:group={group}" if group else "",
        zero=_zero(settings),
        recompute=_is_full(settings),
        recompute_layers=number("--recompute-num-layers", 1) * block,
        repeats=modules,
        offload=tuple(settings.word("--offload-modules").split()),
        adjacent=not settings.flag("--use-tp-pp-dp-mapping"),
    )
    if not CUTS & beside.keys():
        degrees = dataclasses.replace(degrees, **_cut(settings, sizes, pipeline))
    sequence = settings.flag("--sequence-parallel")
    if expert > 1 and tensor > 1 and not sequence and "tensor" not in beside:
        problem = (
            "experts dealt to ranks beside tensor parallel ranks without --sequence-parallel, which Megatron refuses"
        )
        raise UsageError(problem, hint="add --sequence-parallel")
    words = {name: "" if value is True else settings.word(name) for name, value in settings.values.items()}
    precision, left = format_of(words)
    optimizer = optimizer_of(
        {name: text for name, text in words.items() if name != "--exp-avg-dtype" or text in _MOMENTS}
    )
    return FrameworkJob(
        degrees,
        number("--global-batch-size", 0) or None,
        precision,
        optimizer.replace(":moments=fp32", ""),
        None if settings.flag("--overlap-grad-reduce") else 0.0,
        (*left, *unknown, *_notes(settings, degrees), *_dropout(settings, degrees, sizes)),
        number("--seq-length", 0),
        between=("sequence" if sequence else "replicated") if tensor > 1 else "",
        instances=number("--num-distributed-optimizer-instances"),
        rule=("--global-batch-size", "--micro-batch-size", ""),
    )


def _beside(beside: Beside, field: str, value: int) -> int:
    """A number of the file, or what is said beside it."""
    own = beside.get(field, value)
    return own if isinstance(own, int) else value


def _is_full(settings: Settings) -> bool:
    """Whether whole layers are recomputed."""
    return settings.word("--recompute-granularity") == "full"


def _zero(settings: Settings) -> int:
    """ZeRO stage of the distributed optimizer or of FSDP."""
    if settings.flag("--use-torch-fsdp2"):
        return 2 if settings.flag("--torch-fsdp2-no-reshard-after-forward") else 3
    if settings.flag("--use-megatron-fsdp"):
        return FSDP_ZERO[settings.word("--data-parallel-sharding-strategy")]
    return int(settings.flag("--use-distributed-optimizer"))


def _recomputed(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules that are recomputed alone, and notes on those that have no name here."""
    selective = settings.word("--recompute-granularity") == "selective" or settings.flag("--recompute-activations")
    named = settings.word("--recompute-modules", "core_attn").split() if selective else []
    own = BACKENDS.get("megatron").modules
    notes = [f"--recompute-modules {name}: less memory, slower; kept here" for name in named if name not in own]
    return tuple(name for name in named if name in own), tuple(notes)


def _cut(settings: Settings, sizes: ModelSizes | None, pipeline: int) -> dict[str, Any]:
    """The fields of `Degrees` that say where stages begin.

    Raises:
        UsageError: Megatron refuses the cut.
    """
    number = settings.number
    chunks = number("--num-virtual-stages-per-pipeline-rank", 1)
    pattern = settings.word("--hybrid-layer-pattern", settings.word("--hybrid-override-pattern"))
    main, *further = pattern.split("/")
    own = len(main.replace("|", ""))
    if pattern and sizes and own != sizes.layers:
        problem = f"the layer pattern has {own} layers, MODEL has {sizes.layers}"
        raise UsageError(problem, hint="price the model of this file, or mend it")
    if "|" in main:
        return {"layout": f"E{re.sub('[^|]', 't', main)}{'m' * len(further)}L"}
    if "--pipeline-model-parallel-layout" in settings:
        return {"layout": settings.word("--pipeline-model-parallel-layout")}
    ends = {name: f"--decoder-{name}-pipeline-num-layers" for name in ("first", "last")}
    uneven = {f"{name}_layers": number(option, 0) for name, option in ends.items() if option in settings}
    embedding, loss = (settings.flag(f"--account-for-{name}-in-pipeline-split") for name in ("embedding", "loss"))
    layers = number("--num-layers", number("--encoder-num-layers", sizes.layers if sizes else 0))
    if layers > MOST_LAYERS:
        raise UsageError(f"--num-layers is {layers}", hint=f"give a whole number from 1 to {MOST_LAYERS:,}")
    own = number("--num-layers-per-virtual-pipeline-stage", 0)
    if own and uneven:
        problem = "--num-layers-per-virtual-pipeline-stage beside uneven ends, which Megatron refuses"
        raise UsageError(problem, hint="use --num-virtual-stages-per-pipeline-rank")
    if own and not layers:
        problem = "--num-layers-per-virtual-pipeline-stage without --num-layers"
        raise UsageError(problem, hint="add the number of layers to the file, or use --interleave")
    if own:
        chunks = _chunks(layers + embedding + loss, pipeline, own)
    if chunks > 1 and pipeline == 1:
        raise UsageError(
            f"{chunks} chunks of one worker, which Megatron refuses", hint="use PP 2 or more, or one chunk"
        )
    if uneven:
        return {"chunks": chunks, **uneven}
    if not layers or pipeline == 1 or "--decoder-num-layers" in settings:
        return {"chunks": chunks}
    counts = megatron_layers(layers, pipeline, chunks, embedding=embedding, loss=loss)
    return {"layout": layout_of(counts, sizes.predictors if sizes else 0)} if embedding or loss else {"chunks": chunks}


def _chunks(counted: int, pipeline: int, own: int) -> int:
    """Chunks of a worker that have so many layers each.

    Raises:
        UsageError: the layers of a worker do not come out.
    """
    each, remainder = divmod(counted, pipeline)
    if not remainder and each % own:
        sizes = [str(size) for size in range(1, each + 1) if each % size == 0]
        raise UsageError(
            f"{each} layers of a worker ({counted} over PP {pipeline}) are not divided by the {own} of "
            "--num-layers-per-virtual-pipeline-stage, and Megatron refuses that",
            hint=f"use --num-layers-per-virtual-pipeline-stage {' or '.join(sizes[:4])}, or"
            " --pipeline-model-parallel-layout",
        )
    return 1 if remainder else each // own  # where they do not come out over the workers, that is refused


def _notes(settings: Settings, degrees: Degrees) -> Iterator[str]:
    """Notes on options that are known but not modelled together, and on defaults."""
    several = settings.number("--recompute-num-layers", 1)
    if settings.word("--recompute-method") == "uniform" and several > 1:
        yield f"--recompute-num-layers {several} of uniform: less memory; the first input of each layer is kept"
    if settings.word("--optimizer") not in BACKENDS.get("megatron").optimizers:
        yield f"--optimizer {settings.word('--optimizer')}: other time and memory; no optimizer of that name"
    if settings.flag("--use-precision-aware-optimizer"):
        first, second = (settings.word(f"--exp-avg-{part}dtype") for part in ("", "sq-"))
        priced = first if first in _MOMENTS else "fp32"
        for option, own in (("--exp-avg-dtype", first), ("--exp-avg-sq-dtype", second)):
            if own != priced:
                yield f"{option} {own}: other memory; both running means are priced in {priced}"
    if degrees.zero == 1 and settings.flag("--overlap-grad-reduce") and not settings.flag("--overlap-param-gather"):
        yield "--overlap-param-gather is not set: slower; weights are priced as gathered behind the next step"
    if degrees.expert > 1:
        yield from settings.default_note("--moe-token-dispatcher-type")


def _dropout(settings: Settings, degrees: Degrees, sizes: ModelSizes | None) -> Iterator[str]:
    """What dropout takes that MODEL does not have, with the bytes of its masks.

    Defaults count in a whole launch (with `--hidden-size`), whose model takes them for what it does not say.
    """
    whole = "--hidden-size" in settings
    name = "--hidden-dropout"
    value = settings.word(name)
    if (name in settings or whole) and float(value):
        default = "" if name in settings else " (the default)"
        samples, steps = degrees.micro_batch, settings.number("--seq-length", 0)
        shared = degrees.context * (degrees.tensor if settings.flag("--sequence-parallel") else 1)
        layers, width = (sizes.layers, max(sizes.hidden, default=0)) if sizes else (0, 0)
        masks = 2 * layers * samples * steps * width / shared  # of 1 byte; as many layers are in flight as MODEL has
        held = f", about {format_bytes(masks)} on a rank of the first stage" if masks and not degrees.recompute else ""
        yield f"{name} {value}{default}: more memory, slower; MODEL has no dropout, whose masks are kept{held}"
    if whole:
        yield from settings.default_note("--attention-dropout")


def passes(name: str) -> str:
    """Why a variable without a value is said and not refused; "" for other names."""
    return "a variable that has no value in the file" if name.startswith("$") else ""


def moot(settings: Settings) -> frozenset[str]:
    """Sizes without effect: the width of heads of latent attention, which has widths of its own, and that of dense
    layers where all layers are mixtures with a width of their own.
    """
    names = {"--kv-channels"} if settings.flag("--multi-latent-attention") else set[str]()
    frequency = settings.word("--moe-layer-freq")
    dense = "0" in frequency if not frequency.isdecimal() else int(frequency) != 1
    if "--num-experts" in settings and "--moe-ffn-hidden-size" in settings and not dense:
        names.add("--ffn-hidden-size")
    return frozenset(names)


READER = Reader("megatron", parse, take, passes, moot)
