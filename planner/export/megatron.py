"""Megatron-LM: arguments of `pretrain_gpt.py`, the stages as a pipeline layout.

The layout counts items (`E` the embedding, `t` a decoder layer, `L` logits and loss), stages divided by `|`; stage i is
chunk i // p of pipeline rank i % p (`core/transformer/pipeline_parallel_layer_layout.py`). Hybrids, whose layers are
one mixer each, are those of `pretrain_hybrid.py`: their stages stand in the pattern of their layers, without embedding
and loss (`core/models/hybrid/hybrid_layer_allocation.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from planner.costs.precision import precision as precision_of
from planner.escaping import markdown_code, shell
from planner.export import Export, Exporter, Gap, readings, register
from planner.export.layers import hybrid_symbols, mixtures
from planner.export.megatron_formats import BF16_GRADIENTS, FORMATS, MOMENTUM, NARROW_WEIGHTS, WIDE_SUMS
from planner.export.reading.megatron import READER
from planner.plans import Plan, Requirement
from planner.plans.readings import block_items, item_starts, layer_name, layers, predictors
from planner.systems.backends import BACKENDS
from planner.units import plural

WIDE_BYTES = 4
"""Of a gradient in float32."""

HYBRID_SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"


def layout(plan: Plan) -> str:
    """The stages as a pipeline layout, `Ettt|tttt|ttmL`: m predicts further tokens."""
    kinds = {**dict.fromkeys(layers(plan), "t"), **dict.fromkeys(predictors(plan), "m")}
    names, heads = [layer_name(block) for block in plan.block_table], item_starts(plan)
    ends = ["" if item == "t" else item for item in block_items(plan)]  # what lies between layers goes with these
    written = [kinds.get(name, end) for name, end in zip(names, ends, strict=True)]
    stages = ("".join(written[at] for at in range(*stage.blocks) if at in heads) for stage in plan.stages)
    return "|".join(stages)


def hybrid_pattern(plan: Plan) -> str:
    """The layers of a hybrid by stage, `MEM*|EME/*E`: behind `/` a predictor of further tokens; "" for other models."""
    if not (symbols := hybrid_symbols(plan)):
        return ""
    further = predictors(plan)
    own = iter([symbol for layer, symbol in symbols.items() if layer not in further])
    stages = layout(plan).replace("m", "").strip("EL").split("|")
    main = "|".join("".join(next(own) for _ in stage) for stage in stages)
    return "/".join([main, *(symbols[layer] for layer in further)])


def _missing_features(plan: Plan) -> Iterator[Gap]:
    degrees, length, further = readings.degrees(plan), readings.sequence_length(plan), predictors(plan)
    stages = layout(plan).split("|")
    with_further = [index for index, stage in enumerate(stages) if "m" in stage]
    first = len(stages) - 1 if hybrid_pattern(plan) else (degrees.chunks - 1) * degrees.pipeline
    if with_further and (len(with_further) > 1 or with_further[0] < first):
        where = f"predictors of further tokens in {plural(len(with_further), 'stage')}, or before stage {first}"
        yield Gap(where, "`shardplan plan --pp` with fewer stages")
    if further and readings.recomputes(plan) and _recomputed_at_once(plan) > 1:
        yield Gap("stages recomputed as a whole beside predictors of further tokens", "`shardplan plan --for megatron`")
    if _group(plan) > degrees.accumulated:
        larger = f"groups of {_group(plan)} micro-batches, more than the {degrees.accumulated} of a replica"
        yield Gap(larger, "`shardplan plan --for megatron`")
    chosen, each = precision_of(plan.options.precision), (len(layers(plan)) - len(further)) // degrees.pipeline
    if max(chosen.first, chosen.last) > each:
        wide = f"{max(chosen.first, chosen.last)} wider layers at an end, more than the {each} a worker has on average"
        yield Gap(wide, "`shardplan plan --pp` with fewer stages, or `--precision` with fewer wider layers")
    if "attn_proj" in plan.stages[0].offload and "core_attn" not in plan.stages[0].offload:
        yield Gap(
            "attn_proj in the host's memory without core_attn", "`shardplan predict --offload core_attn,attn_proj`"
        )
    if not readings.is_loop(plan):
        yield Gap("stages that are not dealt to the workers in turn", "`shardplan plan --for megatron`")
    if degrees.context > 1 and length % (2 * degrees.context):
        steps = f"{length} steps for {degrees.context} context parallel ranks, which take two pieces each"
        yield Gap(steps, f"`--dim seq=` with a multiple of {2 * degrees.context}")
    if _moments(plan) and not plan.configuration.zero and degrees.data * degrees.context > 1:
        yield Gap(f"{_moments(plan)[0]} without the distributed optimizer", "`shardplan plan --zero 1`")


def _arguments(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Pairs of a part of the plan and its arguments."""
    degrees = readings.degrees(plan)
    wanted = readings.cuts_sequence(plan) or bool(mixtures(plan))  # Megatron refuses groups with experts without it
    parallel = ["--sequence-parallel"] if degrees.tensor > 1 and wanted else []
    yield f"tensor parallel {degrees.tensor}", (f"--tensor-model-parallel-size {degrees.tensor}", *parallel)
    if degrees.context > 1:
        way = "p2p" if Requirement.RING_ATTENTION in plan.requires else "all_gather"
        sizes = f"--context-parallel-size {degrees.context}", f"--cp-comm-type {way}"
        yield f"context parallel {degrees.context}", sizes
    if degrees.expert > 1:
        dealt = (
            f"--expert-model-parallel-size {degrees.expert}",
            f"--expert-tensor-parallel-size {degrees.expert_tensor}",
            "--moe-token-dispatcher-type alltoall",
        )
        yield f"expert parallel {degrees.expert}", dealt
    yield f"data parallel {degrees.data}", ()
    stages = f"{plural(len(plan.stages), 'stage')} on {plural(degrees.pipeline, 'worker')}"
    yield stages, tuple(_pipeline(plan, degrees))
    batch = f"--micro-batch-size {degrees.micro_batch}", f"--global-batch-size {plan.micro_batches.global_batch}"
    yield f"{degrees.accumulated} x {plural(degrees.micro_batch, 'sample')} a data parallel rank", batch
    yield f"ZeRO-{plan.configuration.zero}", tuple(_zero(plan, degrees))
    if readings.recomputes(plan) or plan.stages[0].repeats:
        yield "recomputation", tuple(_recompute(plan))
    if offload := plan.stages[0].offload:
        yield "offload", ("--fine-grained-activation-offloading", f"--offload-modules {shell(*offload)}")
    yield f"precision {plan.options.precision}", tuple(_precision(plan))
    yield "the model's layers and steps", tuple(_model(plan))


def _pipeline(plan: Plan, degrees: readings.PlanDegrees) -> Iterator[str]:
    yield f"--pipeline-model-parallel-size {degrees.pipeline}"
    if len(plan.stages) > 1 and not hybrid_symbols(plan):
        yield f'--pipeline-model-parallel-layout "{layout(plan)}"'
    if degrees.chunks > 1 and _group(plan):
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {_group(plan)}"
    inside = readings.rank_order(plan, readings.PIPELINE_INSIDE)
    if degrees.expert == 1 and readings.rank_order(plan) != inside == tuple(range(degrees.ranks)):
        yield "--use-tp-pp-dp-mapping"


def _group(plan: Plan) -> int:
    """Option `group` of the interleaved schedule: micro-batches of a group, 0 for as many as workers."""
    return int(plan.schedule.name.partition("group=")[2].partition(",")[0] or 0)


def _zero(plan: Plan, degrees: readings.PlanDegrees) -> Iterator[str]:
    ranks = degrees.data * degrees.context
    sharded = plan.configuration.zero > 0
    if sharded or (ranks == 1 and (_narrow_weights(plan) or _moments(plan))):  # which it wants, also of one rank
        yield "--use-distributed-optimizer"
    if plan.configuration.shard_over:
        yield f"--num-distributed-optimizer-instances {len(plan.stages[0].replicas) // plan.configuration.shard_over}"
    if ranks > 1 and plan.options.overlap:
        yield "--overlap-grad-reduce"
        if sharded:
            yield "--overlap-param-gather"


def _recompute(plan: Plan) -> Iterator[str]:
    modules = plan.stages[0].repeats
    if readings.recomputes(plan):
        some = plan.configuration.stages[0].layers
        yield "--recompute-granularity full"
        yield f"--recompute-method {'block' if some else 'uniform'}"
        yield f"--recompute-num-layers {some or _recomputed_at_once(plan)}"
    elif modules:
        yield "--recompute-granularity selective"
        yield f"--recompute-modules {shell(*modules)}"


def _recomputed_at_once(plan: Plan) -> int:
    """Layers of which the first input alone is kept; Megatron takes as many as a stage has, of those with fewer all."""
    counts = [part.count("t") for part in layout(plan).split("|")]
    return max(counts) if plan.configuration.whole_stages else 1


def _precision(plan: Plan) -> Iterator[str]:
    kinds, chosen = FORMATS[readings.precision_base(plan)], precision_of(plan.options.precision)
    yield from kinds
    yield from _narrow_weights(plan)
    if "--bf16" in kinds and chosen.gradient_bytes < WIDE_BYTES:
        yield BF16_GRADIENTS
        if chosen.held_gradient_bytes >= WIDE_BYTES:
            yield WIDE_SUMS
    elif "--fp16" in kinds and chosen.gradient_bytes >= WIDE_BYTES:
        yield "--accumulate-allreduce-grads-in-fp32"
    if chosen.first or chosen.last:
        yield "--first-last-layers-bf16"
        yield f"--num-layers-at-start-in-bf16 {chosen.first}"
        yield f"--num-layers-at-end-in-bf16 {chosen.last}"
    optimizer = plan.options.optimizer.partition(":")[0]
    if optimizer in MOMENTUM:
        yield "--optimizer sgd"
        yield f"--sgd-momentum {MOMENTUM[optimizer]}"
    else:
        yield "--optimizer adam"
        yield from _moments(plan)


def _narrow_weights(plan: Plan) -> tuple[str, ...]:
    """Arguments that keep no weights in bf16, where the precision does without."""
    alone = "weights=bf16" not in plan.options.precision
    return NARROW_WEIGHTS.get(readings.precision_base(plan), ()) if alone else ()


def _moments(plan: Plan) -> tuple[str, ...]:
    """Arguments about narrower running means of Adam."""
    if not (moments := plan.options.optimizer.partition(":moments=")[2]):
        return ()
    kind = shell(moments)
    return "--use-precision-aware-optimizer", f"--exp-avg-dtype {kind}", f"--exp-avg-sq-dtype {kind}"


def _model(plan: Plan) -> Iterator[str]:
    further, experts = predictors(plan), mixtures(plan)
    own = [layer for layer in layers(plan) if layer not in further]
    if pattern := hybrid_pattern(plan):
        yield f'--hybrid-layer-pattern "{pattern}"'
        yield HYBRID_SPEC
    else:
        yield f"--num-layers {len(own)}"
        if further:
            yield f"--mtp-num-layers {len(further)}"
        if experts and any(layer not in experts for layer in own):
            yield f'--moe-layer-freq "{_frequency([int(layer in experts) for layer in own])}"'
    length = readings.sequence_length(plan)
    if length:
        yield f"--seq-length {length}"
        yield f"--max-position-embeddings {length}"
    if not readings.is_tied(plan):
        yield "--untie-embeddings-and-output-weights"
    if experts:
        yield f"--num-experts {max(experts.values())}"
    if {"moe_act", "expert_fc1"} & {*plan.stages[0].repeats, *plan.stages[0].offload}:
        yield "--moe-grouped-gemm"


def _frequency(mixed: Sequence[int]) -> str:
    """Which layers are mixtures, as Megatron writes it: `([0]*1+[1]*26)*1`."""
    count = len(mixed)
    period = next(n for n in range(1, count + 1) if count % n == 0 and list(mixed) == list(mixed[:n]) * (count // n))
    runs = "+".join(f"[{kind}]*{sum(1 for _ in run)}" for kind, run in itertools.groupby(mixed[:period]))
    return f"({runs})*{count // period}"


def _left_out(plan: Plan) -> Iterator[str]:
    yield (
        "Widths, heads and vocabulary of the model, its positions, norms, activations and routers: `MODEL_ARGS`. "
        "Weights are those of Megatron's own module; names in the plan are those of the model file."
    )
    if head := readings.matrices(plan, "L")[:-1]:
        yield (
            f"Products behind the layers beside the logits ({readings.some_in_prose(head)}), unlike in "
            "`pretrain_gpt.py`: set `PROGRAM` to a program whose model has them, as `pretrain_bert.py` of Megatron "
            "Core up to 0.17."
        )
    yield "Fused kernels, CUDA graphs and the way of attention: Megatron's defaults."
    if readings.degrees(plan).expert > 1 and readings.degrees(plan).tensor > 1 and not readings.cuts_sequence(plan):
        yield "Tensors between layers whole on all ranks of a group: Megatron cuts them by the sequence beside experts."
    if tables := [
        module for module in dict(readings.module_styles(plan)) if module in readings.matrices(plan, "E")[1:]
    ]:
        yield (
            f"Tables of positions or kinds of tokens cut over a group ({readings.some_in_prose(tables)}): Megatron "
            "keeps them whole, and has no exchange behind them."
        )
    yield from readings.other_times(plan, "Megatron")


def _write(plan: Plan) -> Export:
    parts = list(_arguments(plan))
    arguments = list(itertools.chain.from_iterable(written for _, written in parts))
    inside = "--use-tp-pp-dp-mapping" in arguments
    order = readings.rank_order(plan, readings.PIPELINE_INSIDE if inside else readings.GRID)
    before = (
        "# MODEL_ARGS: arguments of the model itself, as --hidden-size, --num-attention-heads and --vocab-size;",
        "# DATA_ARGS: data, tokenizer, learning rate, --train-iters; PROGRAM: the program, where not the usual one.",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        *(["export NVTE_CPU_OFFLOAD_V1=1"] if plan.stages[0].offload else []),
        'read -r -a model_arguments <<< "${MODEL_ARGS:?}"',
        'read -r -a data_arguments <<< "${DATA_ARGS:?}"',
    )
    own = ('"${model_arguments[@]}"', '"${data_arguments[@]}"')
    usual = "pretrain_hybrid.py" if hybrid_symbols(plan) else "pretrain_gpt.py"
    program = "?" if readings.matrices(plan, "L")[:-1] else f"-{usual}"
    script = readings.launch(plan, f'"${{PROGRAM:{program}}}"', (*arguments, *own), before)
    mapped = {
        part: markdown_code(" ".join(written)) if written else "follows from the number of ranks"
        for part, written in parts
    }
    left_out = list(_left_out(plan))
    files = {"launch.sh": script, "arguments.txt": "\n".join(arguments) + "\n"}
    return Export(files, mapped, tuple(left_out), order)


register(
    Exporter(
        backend=BACKENDS.get("megatron"),
        missing=_missing_features,
        write=_write,
        start="Run `launch.sh` in Megatron-LM's folder on every machine, with `MODEL_ARGS` and `DATA_ARGS` set "
        "(`arguments.txt` has the arguments alone).",
        reader=READER,
    )
)
