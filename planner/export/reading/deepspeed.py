"""DeepSpeed's JSON; stages and experts of its own layers are in the program, not in the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.errors import UsageError
from planner.export.reading import Beside, FrameworkJob, ModelSizes, Reader, Settings, options_of
from planner.export.reading.options import Value, flat
from planner.foreign_files import Door
from planner.space.named import Degrees
from planner.units import format_bytes

OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lamb": "Lamb"}
"""`optimizer.type` by our name."""

MOST_ZERO = 3
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
"""Keys of `zero_optimization` about buffers, in elements."""

_REMEDIES = {
    "train_micro_batch_size_per_gpu": ("micro_batch", "--micro-batch"),
    "train_batch_size": ("global_batch", "-b"),
    "gradient_accumulation_steps": ("global_batch", "-b"),
    "zero_optimization.stage": ("zero", "--zero"),
    "tensor_parallel.autotp_size": ("tensor", "--tp"),
    "expert_parallel.autoep_size": ("expert", "--ep"),
    "sequence_parallel_size": ("context", "--cp"),
    "optimizer.type": ("optimizer", "--optimizer"),
    "bf16.enabled": ("precision", "--precision"),
    "bfloat16.enabled": ("precision", "--precision"),
    "fp16.enabled": ("precision", "--precision"),
}
"""Keys that decide the job, with what is said beside the file in their place, and the option for it."""


def parse(text: str) -> tuple[Mapping[str, Value], bool]:
    """The keys of a JSON file; none of them are the user's own.

    Raises:
        UsageError: the text is no JSON object that can be read.
    """
    document = Door("", UsageError, "give DeepSpeed's ds_config.json").json_object(text)
    return dict(flat(document, options_of("deepspeed"))), False


def take(settings: Settings, sizes: ModelSizes | None, beside: Beside) -> FrameworkJob:
    """The job of DeepSpeed's keys.

    Raises:
        UsageError: a key that decides the job is left to the program ("auto") and not said beside the file.
    """
    _refuse_auto(settings, beside)
    number = settings.number
    zero = number("zero_optimization.stage")
    if zero > MOST_ZERO:
        raise UsageError(f"zero_optimization.stage is {zero}", hint=f"give 0 to {MOST_ZERO}")
    micro = number("train_micro_batch_size_per_gpu", 0)
    batch, accumulated = number("train_batch_size", 0), number("gradient_accumulation_steps", 0)
    if not batch and not micro and "global_batch" not in beside and "micro_batch" not in beside:
        problem = "neither train_batch_size nor train_micro_batch_size_per_gpu is in it, and DeepSpeed refuses that"
        raise UsageError(problem, hint="add one of them, or give -b and --micro-batch")
    tensor = max(1, number("tensor_parallel.autotp_size"), number("tensor_parallel.tp.tp_size"))
    dealt = settings.flag("expert_parallel.enabled")
    shards = number("zero_optimization.mics_shard_size")
    said = "micro_batch" in beside
    replaced = said or "global_batch" in beside
    settled = (batch or "global_batch" in beside) and (micro or said)  # the third follows
    degrees = Degrees(
        tensor=tensor,
        context=number("sequence_parallel_size"),
        expert=number("expert_parallel.autoep_size") if dealt else 1,
        micro_batch=micro or 1,
        zero=zero,
        shard_over=shards if shards > 1 and zero == MOST_ZERO else 0,
        recompute=number("pipeline.activation_checkpoint_interval") == 1,
    )
    optimizer = settings.word("optimizer.type").lower()
    names = {title.lower(): name for name, title in OPTIMIZERS.items()}
    off = "zero_optimization.overlap_comm" in settings and not settings.flag("zero_optimization.overlap_comm")
    return FrameworkJob(
        degrees,
        batch or None,
        _precision(settings, zero),
        names.get(optimizer, ""),
        0.0 if off else None,
        tuple(_notes(settings, optimizer if optimizer not in names else "")),
        between="replicated" if tensor > 1 else "",
        accumulated=0 if replaced and settled else accumulated,
        micro_open=not micro and not said,
        rule=("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    )


def _refuse_auto(settings: Settings, beside: Beside) -> None:
    """Refuse keys that are left to the program and decide the job, unless they are said beside the file.

    Raises:
        UsageError: there are such keys; the message names the first.
    """
    narrow = [name for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled") if settings.flag(name)]
    for name, (field, option) in _REMEDIES.items():
        decided = field == "precision" and bool(narrow)
        follows = name == "gradient_accumulation_steps"  # from the two others
        if settings.is_auto(name) and field not in beside and not decided and not follows:
            raise UsageError(f"{name} is 'auto': the program says it", hint=f"add {option}")


def _precision(settings: Settings, zero: int) -> str:
    """Our name of the number formats."""
    if settings.flag("bf16.enabled") or settings.flag("bfloat16.enabled"):
        wide = "bf16-deepspeed" if zero == 1 else "bf16-fp32grad"
        return wide if settings.word("data_types.grad_accum_dtype") == "fp32" else "bf16"
    return "fp16" if settings.flag("fp16.enabled") else "fp32"


def _notes(settings: Settings, unknown_optimizer: str) -> Iterator[str]:
    """Notes on keys that are read whose values are known but not modelled."""
    if unknown_optimizer:
        yield f"optimizer.type {unknown_optimizer}: other time and memory; no optimizer of that name"
    shards = settings.number("zero_optimization.mics_shard_size")
    if shards > 1 and settings.number("zero_optimization.stage") != MOST_ZERO:
        yield f"zero_optimization.mics_shard_size {shards}: about as fast; MiCS is of ZeRO-3"
    narrow = any(settings.flag(f"{name}.enabled") for name in ("bf16", "bfloat16", "fp16"))
    for key in BUCKETS:
        name = f"zero_optimization.{key}"
        size, usual = settings.number(name), int(settings.table.by_name[name].default)
        if name in settings and size > usual and settings.number("zero_optimization.stage"):
            held = format_bytes(size * (2 if narrow else 4))
            twice = " and twice that with overlap_comm" if key == BUCKETS[0] else ""
            yield f"{name} {size}: more memory; a buffer of up to {held}{twice} is not priced"
        elif name in settings and size < usual / 10 and settings.number("zero_optimization.stage"):
            yield f"{name} {size}: slower; exchanges in smaller pieces"
    interval = settings.number("pipeline.activation_checkpoint_interval")
    if interval > 1:
        yield f"pipeline.activation_checkpoint_interval {interval}: less memory, slower; nothing is recomputed here"
    if "pipeline.stages" in settings:
        yield f"pipeline.stages {settings.word('pipeline.stages')}: other stages; say them with --pp"
    if settings.number("expert_parallel.expert_tensor_parallel_size") > 1:
        yield "expert_parallel.expert_tensor_parallel_size: other time and memory; experts are priced whole on a rank"


def passes(name: str) -> str:
    """Why an unknown key outside of tables is said and not refused; tables forbid others than their own."""
    return "" if "." in name else "unknown to DeepSpeed, which passes over it"


READER = Reader("deepspeed", parse, take, passes)
