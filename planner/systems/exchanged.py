"""Data parallelism whose gradients travel by a scheme of `planner.exchange`: BytePS, Herring, Parallax."""

from __future__ import annotations

from collections.abc import Iterator

from planner.space import Configuration, StageChoice
from planner.systems.setting import Setting
from planner.systems.types import Proposal, System


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """Each micro-batch size on as many devices as share the batch."""
    for configuration in data_parallel(setting, system.scheme):
        yield Proposal((configuration,))


def data_parallel(setting: Setting, scheme: str) -> Iterator[Configuration]:
    """Every device the whole model, gradients exchanged by a scheme, by micro-batch size, the largest first."""
    for size in reversed(setting.sizes):
        parts, rest = divmod(setting.job.global_batch, size)
        if not rest:
            replicas = max(r for r in range(1, setting.devices + 1) if parts % r == 0)
            whole = (StageChoice(0, setting.blocks, 1),)
            yield Configuration(whole, replicas, size, parts // replicas, "1f1b", exchange=scheme)
