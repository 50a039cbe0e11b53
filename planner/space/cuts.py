"""Cuts of a chain into stages: balanced cuts, blocks pinned to stages, tables over stages; and divisors of a batch."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from planner.costs.precision import Precision
from planner.errors import JobError
from planner.registry import did_you_mean
from planner.space.blocks import range_sums
from planner.space.ranges import Ranges, framed
from planner.space.types import BlockCosts, Job, StageChoice
from planner.units import plural


def balanced(stage_s: np.ndarray | Sequence[np.ndarray], fits: Sequence[np.ndarray]) -> tuple[int, ...] | None:
    """Boundaries 0, ..., n of the cut whose slowest stage is fastest; None when no cut fits.

    Args:
        stage_s: [n + 1, n + 1] time of blocks i..j-1, infinite where that is no stage; by stage where it differs.
        fits: by stage, bool [n + 1, n + 1], whether the run may be that stage.

    Ties go to the earliest cut. O(stages n^2).
    """
    tables = [stage_s] * len(fits) if isinstance(stage_s, np.ndarray) else stage_s
    n = len(tables[0]) - 1
    if len(fits) > n:
        return None
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    best_starts: list[np.ndarray] = []
    for allowed, seconds in zip(fits, tables, strict=True):
        options = np.maximum(best[:, None], np.where(allowed, seconds, np.inf))
        best_starts.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    boundaries = [n]
    for source in reversed(best_starts):
        boundaries.append(int(source[boundaries[-1]]))
    return tuple(reversed(boundaries))


def least_need(needed: Sequence[np.ndarray], real: np.ndarray) -> float:
    """Smallest need of the fullest stage over all cuts into as many stages; infinite when there is no cut."""
    boundaries = balanced(needed, [real] * len(needed))
    if boundaries is None:
        return math.inf
    return max(float(table[a, b]) for table, (a, b) in zip(needed, itertools.pairwise(boundaries), strict=True))


def mean_work_s(costs: BlockCosts) -> np.ndarray:
    """[n + 1, n + 1] forward and backward of blocks i..j-1 on a device of mean speed; zero for i >= j."""
    return framed(range_sums((costs.forward_s + costs.backward_s).mean(axis=0)))


_PART = re.compile(r"\[\d+/\d+\]$")
_LAYER = re.compile(r"layers?[ ._-]?(\d+)", re.IGNORECASE)


def stage_starts(costs: BlockCosts, job: Job) -> np.ndarray:
    """bool [n + 1], whether a stage may begin at block p (n: the end): only at a layer's start, if layers are whole."""
    allowed = np.ones(len(costs.parameter_elements) + 1, bool)
    if job.structure.whole_layers and costs.layer_starts is not None:
        allowed[:-1] = costs.layer_starts == np.arange(len(costs.layer_starts))
    return allowed


def pinned_blocks(job: Job, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The blocks that a job pins to stages, with the stage's number (negative ones count from the last).

    A pin names a block, with `*`, `?` and `[]` as in file names, or is `layer3`: the fourth module of the longest
    numbered list of modules. Where a module was cut into several blocks, all of them are pinned.

    Raises:
        JobError: a name that no block has, or a stage with more stages before it (or behind it) than blocks.
    """
    modules = [_PART.sub("", name) for name in names]
    pins: dict[tuple[int, int], None] = {}
    for wanted, stage in job.keep:
        blocks = _matching(wanted, modules)
        if not blocks:
            hint = did_you_mean(wanted, list(dict.fromkeys(modules)))
            raise JobError(f"no block is called {wanted!r}, which is to be kept on stage {stage}", hint=hint)
        stages, there = (stage, blocks[0]) if stage >= 0 else (-stage - 1, len(names) - 1 - blocks[-1])
        if stages > there:
            side, nearest = ("before", there) if stage >= 0 else ("behind", -there - 1)
            said = f"{plural(stages, 'stage')} {side} it would share {plural(there, 'block')}"
            raise JobError(f"{wanted!r} cannot be on stage {stage}: {said}", hint=f"keep it on stage {nearest}, say")
        pins.update(dict.fromkeys((b, stage) for b in blocks))
    _check_order(tuple(pins), modules)
    return tuple(sorted(pins))


def _check_order(pins: Sequence[tuple[int, int]], modules: Sequence[str]) -> None:
    """Refuse pins that put a later block on an earlier stage, counting from the same end.

    Raises:
        JobError: names the two pins.
    """
    for one, first in pins:
        for other, second in pins:
            if (first < 0) == (second < 0) and (one <= other and first > second):
                raise JobError(
                    f"{modules[one]!r} cannot be on stage {first} and {modules[other]!r} on stage {second}",
                    hint="stages are in the order of the model's blocks",
                )


def _matching(wanted: str, modules: Sequence[str]) -> list[int]:
    blocks = [b for b, name in enumerate(modules) if name == wanted or fnmatch.fnmatchcase(name, wanted)]
    layer = _LAYER.fullmatch(wanted)
    if blocks or not layer:
        return blocks
    parents = Counter(name.rpartition(".")[0] for name in dict.fromkeys(modules) if name.rpartition(".")[2].isdigit())
    if not parents:
        return []
    most = max(parents, key=lambda parent: (parents[parent], parent))
    return [b for b, name in enumerate(modules) if name == f"{most}.{int(layer[1])}"]


class StageTables:
    """Costs of stages of blocks i..j-1 at one micro-batch size, float64 [n + 1, n + 1]; meaningful for i < j.

    Args:
        costs: of the chain's blocks.
        precision: number formats.
        state_bytes: optimizer state of a parameter.

    Attributes:
        costs, precision, state_bytes: as given.
        real: bool, whether i < j.
        stage_s: forward and backward seconds on a device of mean speed; infinite for i >= j.
        elements: trainable elements, tied ones counted once.
        saved_bytes: activation bytes of a micro-batch in flight.
        workspace_bytes: largest workspace of a block.
    """

    def __init__(self, costs: BlockCosts, precision: Precision, state_bytes: float) -> None:
        self.costs, self.precision, self.state_bytes = costs, precision, state_bytes
        ranges = Ranges(costs)
        count = len(costs.parameter_elements) + 1
        self.real = np.arange(count)[:, None] < np.arange(count)[None, :]
        self.stage_s = np.where(self.real, mean_work_s(costs), np.inf)
        self.elements, self.saved_bytes, self.workspace_bytes = (
            framed(table) for table in (ranges.elements, ranges.saved_bytes, ranges.workspace_bytes)
        )

    def needed_bytes(self, in_flight: float, versions: int = 1) -> np.ndarray:
        """Bytes that a device of a stage needs, without the runtime's reserve.

        Args:
            in_flight: number of micro-batches whose activations it keeps.
            versions: number of weight versions.
        """
        chosen = self.precision
        state = (chosen.held_weight_bytes * versions + chosen.held_gradient_bytes + self.state_bytes) * self.elements
        return np.asarray(state + self.workspace_bytes + in_flight * self.saved_bytes)


def stages_of(boundaries: Iterable[int], replicas: int = 1) -> tuple[StageChoice, ...]:
    """Stages between boundaries."""
    return tuple(StageChoice(a, b, replicas) for a, b in itertools.pairwise(boundaries))


MOST_SAMPLES = 10**12
"""Largest global batch; its divisors are found in about a tenth of a second."""


def check_samples(batch: int) -> None:
    """Refuse a batch that is too large.

    Raises:
        JobError: there are more than `MOST_SAMPLES`.
    """
    if batch > MOST_SAMPLES:
        raise JobError(
            f"a global batch of {batch} samples; {MOST_SAMPLES:,} are the most that can be dealt out",
            hint="use a smaller global batch",
        )


def divisors(batch: int, most: int | None = None) -> tuple[int, ...]:
    """All divisors of a number of samples, at least one, ascending; those up to `most` where it is given.

    O(sqrt(batch)), or O(most) where that is less.

    Raises:
        JobError: there are more than `MOST_SAMPLES`.
    """
    check_samples(batch)
    root = math.isqrt(batch)
    if most is not None and most <= root:
        return tuple(d for d in range(1, most + 1) if batch % d == 0)
    small = [d for d in range(1, root + 1) if batch % d == 0]
    found = (*small, *(batch // d for d in reversed(small) if d * d != batch))
    return found if most is None else tuple(d for d in found if d <= most)
