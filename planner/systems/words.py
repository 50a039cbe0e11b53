"""A configuration in a few words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from planner.space import Configuration

MOST_RUNS = 8
"""Runs of equal replicas that are shown."""


def words_of(configuration: Configuration) -> str:
    """Stages, replicas, ranks, copies, micro-batches and options."""
    stages, count = configuration.stages, len(configuration.stages)
    replicas, ranks = [s.replicas for s in stages], sorted({s.ranks for s in stages})
    shared = ranks[-1] > 1
    if count == 1 and not shared:
        total = replicas[0] * configuration.copies
        text = f"{total} replicas" if total > 1 else "1 device"
    else:
        text = "1 stage" if count == 1 else f"{count} stages"
        if len(set(replicas)) > 1:
            text += f" of {_runs(replicas)} replicas"
        elif replicas[0] > 1:
            text += f" x {replicas[0]} replicas"
        if shared:
            text += f" of {ranks[0]} ranks" if len(ranks) == 1 else f" of {ranks[0]} to {ranks[-1]} ranks"
        text += f" x {configuration.copies} copies" if configuration.copies > 1 else ""
        text += ", placed stage by stage" if configuration.adjacent else ""
    own = configuration.micro_batches // (replicas[0] if count == 1 else 1)
    text += f", micro-batch {configuration.micro_batch} x {own}"
    again = sum(s.recompute for s in stages)
    way = "recompute whole stages" if configuration.whole_stages else "recompute"
    text += f", {way}" if again == count else f", recompute {again} stages" if again else ""
    return text + (f", ZeRO-{configuration.zero}" if configuration.zero else "")


def _runs(replicas: Sequence[int]) -> str:
    groups = [(value, len(list(same))) for value, same in itertools.groupby(replicas)]
    shown = [str(value) if times == 1 else f"{times}x{value}" for value, times in groups]
    return "-".join(shown if len(shown) <= MOST_RUNS else [*shown[: MOST_RUNS - 2], "..", shown[-1]])
