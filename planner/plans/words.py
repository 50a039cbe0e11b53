"""Short texts for people: ranges of modules, configurations in a line, rounded numbers."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from planner.errors import UsageError
from planner.schedules import get
from planner.space.limits import EXCLUDED
from planner.space.types import Configuration, StageChoice
from planner.units import plural

PART = re.compile(r"^(.*)\[([0-9]+)/([0-9]+)\]$")
"""Matches the name of a part of a block: its base, its number and the number of parts."""
_NUMBERED = re.compile(r"^(.*?)([0-9]+)$")


def module_ranges(names: Sequence[str]) -> tuple[str, ...]:
    """Block names as ranges: `layers.0[1/2]`, `layers.0[2/2]`, `layers.1` become `layers.0-1`."""
    bases: list[str] = []
    for base, group in itertools.groupby(names, key=_base):
        bases.append(_merged_parts(base, list(group)))
    merged: list[tuple[str, int, int]] = []
    for name in bases:
        match = _NUMBERED.match(name)
        prefix, number = (match[1], int(match[2])) if match and str(int(match[2])) == match[2] else (name, -1)
        if merged and number >= 0 and merged[-1][0] == prefix and merged[-1][2] + 1 == number:
            merged[-1] = (prefix, merged[-1][1], number)
        else:
            merged.append((prefix, number, number))
    return tuple(p if a < 0 else f"{p}{a}" if a == b else f"{p}{a}-{b}" for p, a, b in merged)


def _base(name: str) -> str:
    match = PART.match(name)
    return match[1] if match else name


def _merged_parts(base: str, group: list[str]) -> str:
    """`base` if the group has all of its parts, else `base[first-last/count]`."""
    parts = [match for match in map(PART.match, group) if match]
    if not parts or len(parts) == int(parts[0][3]):
        return base
    first, last = parts[0][2], parts[-1][2]
    return f"{base}[{first}/{parts[0][3]}]" if first == last else f"{base}[{first}-{last}/{parts[0][3]}]"


def module_list(names: Sequence[str]) -> str:
    """A list of modules, `embed, layers.0, ..., head`: long lists without their middle."""
    return ", ".join(names if len(names) <= 4 else (names[0], names[1], "...", names[-1]))


def why_not(infeasible: Sequence[str]) -> str:
    """Why a plan was rejected, for a table cell: the options that exclude it, or "does not fit"."""
    if all(reason.startswith(EXCLUDED) for reason in infeasible):
        return ", ".join((infeasible[0], *(reason.removeprefix(EXCLUDED) for reason in infeasible[1:])))
    return "does not fit"


def summary(decision: Configuration) -> str:
    """A decision in a line: `4 stages x 2 replicas x 8 ranks, 2 copies, micro-batch 4 x 16, 1f1b, ZeRO-1`."""
    replicas = [s.replicas for s in decision.stages]
    shape = plural(len(replicas), "stage") + ("" if set(replicas) == {1} else f" x {one_or_all(replicas)} replicas")
    widths = [s.ranks for s in decision.stages]
    if max(widths, default=1) > 1:
        shape += f" x {one_or_all(widths)} ranks"
    parts = [shape]
    if decision.copies > 1:
        parts.append(plural(decision.copies, "copy"))
    parts.append(f"micro-batch {decision.micro_batch} x {decision.micro_batches}")
    parts.append(decision.schedule)
    parts += keeping_words(decision.stages)
    if decision.zero:
        parts.append(zero_words(decision))
    return ", ".join(parts)


def zero_words(configuration: Configuration) -> str:
    """`ZeRO-3`, or `ZeRO-3 over 8 replicas` where that is a part of them."""
    over = f" over {configuration.shard_over} replicas" if configuration.shard_over else ""
    return f"ZeRO-{configuration.zero}{over}"


def keeping_words(stages: Sequence[StageChoice]) -> list[str]:
    """What stages recompute and offload: `recompute in 2 stages`, `offload core_attn`; nothing where none does."""
    counts = Counter(word for stage in stages for word in stage_keeping(stage))
    stage_count = len(stages)
    return [
        word if count == stage_count else f"{word} in {plural(count, 'stage')}"
        for word, count in sorted(counts.items())
    ]


def stage_keeping(stage: StageChoice) -> list[str]:
    """What one stage recomputes and offloads: `recompute 4 layers`, `recompute layernorm+act`, `offload core_attn`.

    `recompute` alone stands for all layers.
    """
    some = f" {plural(stage.layers, 'layer')}" if stage.layers else ""
    words = (
        [f"recompute{some}"] if stage.recompute else [f"recompute {'+'.join(stage.repeats)}"] if stage.repeats else []
    )
    return [*words, *([f"offload {'+'.join(stage.offload)}"] if stage.offload else [])]


def one_or_all(values: Sequence[int]) -> str:
    """One number where all values are equal, else a list of them."""
    return str(values[0]) if len(set(values)) == 1 else short_list(values)


def short_list(values: Sequence[int]) -> str:
    """Numbers as `2-1-1`; long lists without their middle."""
    texts = [str(v) for v in values]
    return "-".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]])


def significant(value: float, digits: int = 9) -> float:
    """A float rounded to significant digits, so that plan files do not differ by summation noise."""
    return float(f"{value:.{digits}g}")


def degree_words(configuration: Configuration, experts: int = 1) -> str:
    """The degrees of parallelism, `DP 8 x TP 4 x PP 2`: CP and EP only where they are above 1, EP being among DP.

    DP counts all replicas of a stage, one number a stage where they differ; PP counts the workers of a pipeline.

    Args:
        configuration: the configuration.
        experts: ranks that hold different experts, where tensor parallel ranks do (`planner.plans.readings`): only
            shardings say that. EP is that, or the configuration's own if that is more.
    """
    stages = configuration.stages
    chunks = chunks_of(configuration.schedule)
    by_stage = {
        "DP": [configuration.copies * s.replicas * s.expert for s in stages],
        "TP": [s.ranks // (s.context * s.expert) for s in stages],
        "PP": [max(1, len(stages) // chunks)],
        "CP": [s.context for s in stages],
    }
    parts = [
        f"{name} {values[0] if len(set(values)) == 1 else _runs(values)}"
        for name, values in by_stage.items()
        if name != "CP" or max(values) > 1
    ]
    experts = max(experts, *(s.expert for s in stages))
    expert_words = f", EP {experts}" if experts > 1 else ""
    return " x ".join(parts) + expert_words + (f", {chunks} chunks a worker" if chunks > 1 else "")


def chunks_of(schedule: str) -> int:
    """Stages per worker in a schedule; 1 for a schedule that is not registered."""
    try:
        return get(schedule).chunks_per_worker
    except UsageError:
        return 1


def words_of(configuration: Configuration, schedule: str = "", experts: int = 1) -> str:
    """A configuration as people say it: `DP 8 x TP 1 x PP 2, micro-batch 64 x 16, ZeRO-1`.

    Args:
        configuration: the configuration. The number behind its micro-batch counts those of a replica in a step, or of a
            pipeline where stages have different numbers of replicas.
        schedule: name of the schedule to add; "" for none.
        experts: ranks that hold different experts, as of `degree_words`.
    """
    stages = configuration.stages
    text = degree_words(configuration, experts) + (", placed stage by stage" if configuration.adjacent else "")
    micro_batches = configuration.micro_batches // (stages[0].replicas if len({s.replicas for s in stages}) == 1 else 1)
    text += f", micro-batch {configuration.micro_batch} x {micro_batches}" + (f", {schedule}" if schedule else "")
    whole = configuration.whole_stages and all(s.recompute for s in stages)
    words = keeping_words(stages)
    text += "".join(f", {'recompute whole stages' if whole and word == 'recompute' else word}" for word in words)
    return text + (f", {zero_words(configuration)}" if configuration.zero else "")


def _runs(values: Sequence[int]) -> str:
    """Numbers as `2-1-1`; with many stages, runs of equal numbers as `14-12x1`."""
    if len(values) <= 8:
        return "-".join(map(str, values))
    groups = [(value, len(list(same))) for value, same in itertools.groupby(values)]
    shown = [str(value) if times == 1 else f"{times}x{value}" for value, times in groups]
    return "-".join(shown if len(shown) <= 8 else [*shown[:6], "..", shown[-1]])
