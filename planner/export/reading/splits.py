"""How frameworks cut layers into stages, and the cut as a pipeline layout."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import UsageError
from planner.units import plural


def layout_of(counts: Sequence[int], predictors: int = 0) -> str:
    """Layers of each stage as a layout (`planner.space.named`), predictors of further tokens in the last stage."""
    parts = ["t" * count for count in counts]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{'m' * predictors}L"
    return "|".join(parts)


def megatron_layers(layers: int, pipeline: int, chunks: int, *, embedding: bool, loss: bool) -> tuple[int, ...]:
    """Layers of each stage as Megatron cuts them: equal ones, embedding and loss counting as a layer where asked.

    (`get_num_layers_to_build` of megatron/core/transformer/transformer_block.py)

    Args:
        layers: of the model.
        pipeline: workers of the pipeline.
        chunks: stages of each worker.
        embedding, loss: whether they count (`--account-for-embedding-in-pipeline-split`, `--account-for-loss-..`).

    Raises:
        UsageError: the layers do not come out, which Megatron refuses; says what it takes.
    """
    counted = layers + embedding + loss
    each, remainder = divmod(counted, pipeline)
    what = plural(layers, "layer")
    ends = [word for word, counts in (("embedding", embedding), ("loss", loss)) if counts]
    if ends:
        what = f"{what} and {' and '.join(ends)}, {counted} in all,"
    if remainder:
        message = f"{what} are not divided by PP {pipeline}, and Megatron refuses that"
        raise UsageError(message, hint=_other_workers(counted, pipeline, chunks, ends))
    if each % chunks:
        message = f"{each} layers of a worker ({what} over PP {pipeline}) are not divided by {chunks} chunks"
        raise UsageError(f"{message}, and Megatron refuses that", hint=_other_chunks(each))
    counts = [each // chunks] * (pipeline * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def _other_workers(layers: int, pipeline: int, chunks: int, ends: Sequence[str]) -> str:
    """What Megatron takes instead of layers that workers do not divide."""
    per = -(-layers // pipeline)
    per += -per % chunks
    first = layers - per * (pipeline - 1)
    ways = []
    if not ends and first > 0 and first % chunks == 0:
        ways.append(f"--decoder-first-pipeline-num-layers {first} or --decoder-last-pipeline-num-layers {first}")
    fitting = [size for size in range(2, layers + 1) if layers % (size * chunks) == 0]
    near = sorted(sorted(fitting, key=lambda size: abs(size - pipeline))[:2])
    ways += [f"PP {' or '.join(map(str, near))}"] if near else []
    return f"use {', '.join([*ways, '--pipeline-model-parallel-layout'])}"


def _other_chunks(each: int) -> str:
    """What Megatron takes instead of chunks that do not divide the layers of a worker."""
    sizes = [size for size in range(1, each + 1) if each % size == 0]
    return (
        f"use --num-layers-per-virtual-pipeline-stage {' or '.join(map(str, sizes[:4]))}, "
        "or --pipeline-model-parallel-layout"
    )


def titan_layers(layers: int, stages: int, before: int, behind: int) -> tuple[int, ...]:
    """Layers of each stage as torchtitan deals them: the input counts as `before` layers, the output as `behind`.

    (`generate_llm_fqn_per_model_part` of torchtitan/distributed/pipeline_parallel.py)

    Raises:
        UsageError: a stage would be empty, or an end counts more than a stage has, which torchtitan refuses.
    """
    each, further = divmod(layers + before + behind, stages)
    if stages > 1 and (each < 1 or max(before, behind) > each):
        raise UsageError(
            f"{plural(layers, 'layer')} with ends that count as {before} and {behind} make {each} a stage of {stages}, "
            "and torchtitan refuses that",
            hint="use fewer stages, or parallelism.module_fqns_per_model_part",
        )
    counts = [each + (stage < further) for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= behind
    return tuple(counts)
