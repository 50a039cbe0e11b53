"""How many devices reach a target: a time of a step, or so many tokens in so many days."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.costs import profile
from planner.errors import HardwareError, InfeasibleError, JobError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan
from planner.plans.figures import tokens_per_sample
from planner.units import Dimension, format_seconds, parse, plural

DAY_S = 86400.0
_SPANS = {"d": DAY_S, "h": 3600.0, "min": 60.0, "s": 1.0, "w": 7 * DAY_S}
MOST_DEVICES = 16384
"""Devices that are tried at the most, where the profile names no smaller number."""
GAIN = 0.02
"""A doubling of the devices that saves less than this part of a step saves nothing."""
MASKED = 2
"""Times its peak that a device may seem to do, since attention leaves out the half of its work that a mask hides."""
VAIN = 2
"""Doublings in a row that save nothing, after which no more devices are tried."""

PlanOn = Callable[[int], Plan]
"""The best plan on so many devices.

Raises:
    InfeasibleError, JobError, HardwareError: there is none, or there are not so many.
"""


class Least(StrEnum):
    """What there should be little of."""

    DEVICES = "devices"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        words: as it was written.
        step_s: most seconds of a step; 0 where samples or tokens are asked for.
        amount: tokens or samples to be trained.
        unit: "tokens" or "samples"; "" for a time of a step.
        within_s: seconds in which to train them.
    """

    words: str
    step_s: float = 0.0
    amount: float = 0.0
    unit: str = ""
    within_s: float = 0.0

    def most_s(self, global_batch: int, sequence: int) -> float:
        """Most seconds of a step of so many samples of so many tokens that reaches the target.

        Raises:
            UsageError: tokens are asked for of a model that has none.
        """
        if not self.unit:
            return self.step_s
        each = sequence if self.unit == "tokens" else 1
        if not each:
            raise UsageError("the model has no tokens", where=self.words, hint="ask for samples=1e9/7d")
        return self.within_s * global_batch * each / self.amount


@dataclass(frozen=True, slots=True)
class Tried:
    """One number of devices.

    Attributes:
        devices: how many.
        step_s: of the best plan; None where nothing fits.
        reaches: whether that is short enough.
        dollars_per_hour: of the devices at work; 0 where no price is known.
        reason: why there is no plan.
    """

    devices: int
    step_s: float | None
    reaches: bool
    dollars_per_hour: float = 0.0
    reason: str = ""

    @property
    def dollars_per_step(self) -> float:
        """Price of a step; 0 where no price is known."""
        return self.dollars_per_hour * (self.step_s or 0.0) / 3600.0


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The plan that reaches a target with the least.

    Attributes:
        target: what was asked for.
        most_s: the longest step that reaches it.
        plan: on as few devices, or for as few dollars, as of those tried.
        tried: numbers of devices, ascending.
    """

    target: Target
    most_s: float
    plan: Plan
    tried: tuple[Tried, ...]


def read_target(text: str) -> Target:
    """`step=2s`, `tokens=1e12/7d` or `samples=1e9/12h`.

    Raises:
        UsageError: something else.
    """
    kind, _, value = (part.strip() for part in text.partition("="))
    if kind == "step" and value:
        seconds = parse(value, Dimension.SECONDS)
        if seconds > 0:
            return Target(text, step_s=seconds)
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*/\s*([0-9.]+)\s*(d|h|min|s|w)", value)
    if kind not in ("tokens", "samples") or not found or float(found[1]) <= 0 or float(found[2]) <= 0:
        raise UsageError(f"{text!r} is no target", hint="write step=2s, tokens=1e12/7d or samples=1e9/12h")
    return Target(text, amount=float(found[1]), unit=kind, within_s=float(found[2]) * _SPANS[found[3]])


def sizes_of(cluster: Cluster, most: int = MOST_DEVICES) -> tuple[int, ...]:
    """Numbers of devices that are worth a try: powers of two within a node, then whole nodes."""
    node = max(1, cluster.node_size)
    within = [2**k for k in range(node.bit_length()) if 2**k < node]
    return (*within, *range(node, max(node, most) + 1, node))


def least_devices(
    target: Target,
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    plan_on: PlanOn,
    *,
    sizes: Sequence[int] = (),
    least: Least = Least.DEVICES,
) -> TargetAnswer:
    """The least devices whose best plan reaches a target.

    The number is doubled until the target is reached, and the last gap is halved until the least is found, as if more
    devices were never slower. For the least dollars, twice the devices are tried, too.

    Args:
        target: what to reach.
        graph: the model.
        cluster: the machine at any size.
        global_batch: samples of a step, the same for all.
        plan_on: plans on a number of devices.
        sizes: numbers of devices to choose from, ascending; else those of `sizes_of`.
        least: what there should be little of.

    Raises:
        InfeasibleError: no number does; says what the fastest takes.
        UsageError: tokens are asked for of a model without, or dollars where no price is known.
    """
    prices = profile(graph, cluster.devices[0])
    most_s = target.most_s(global_batch, tokens_per_sample(graph, prices))
    work = float(prices.forward_flops.sum() + prices.backward_flops.sum()) / prices.micro_batch * global_batch
    peak = max(rate for device in cluster.devices for rate in device.matrix_flop_per_s.values())
    fewest = math.ceil(work / most_s / peak / MASKED)
    sizes = [size for size in sizes or sizes_of(cluster) if size >= fewest]
    if not sizes:
        raise InfeasibleError(f"no number of devices does: at their peak it takes {fewest}", where=target.words)
    plans: dict[int, Plan] = {}
    tried: dict[int, Tried] = {}

    def reaches(devices: int) -> bool:
        if devices not in tried:
            tried[devices] = _try(devices, plan_on, most_s, plans)
        return tried[devices].reaches

    below, reached = _gallop(sizes, reaches, tried)
    if reached is None:
        raise _unreachable(target, most_s, list(tried.values()))
    between = [size for size in sizes if below < size < reached]
    while between:
        middle = between[len(between) // 2]
        if reaches(middle):
            reached = middle
        else:
            below = middle
        between = [size for size in between if below < size < reached]
    if least is Least.DOLLARS:
        for more in [size for size in sizes if size == 2 * reached]:
            reaches(more)
        enough = [each for each in tried.values() if each.reaches]
        if not all(each.dollars_per_hour for each in enough):
            raise UsageError("no price is known", where=cluster.name, hint="give one, with --price 2.5")
        reached = min(enough, key=lambda each: (each.dollars_per_step, each.devices)).devices
    return TargetAnswer(target, most_s, plans[reached], tuple(tried[size] for size in sorted(tried)))


def _doubled(sizes: Sequence[int]) -> Iterator[int]:
    """The first of some ascending sizes, then always the largest that is at most twice the one before."""
    left = list(sizes)
    while left:
        yield left[0]
        double = 2 * left[0]
        left = left[max(1, bisect.bisect_right(left, double) - 1) :]


def _gallop(sizes: Sequence[int], reaches: Callable[[int], bool], tried: dict[int, Tried]) -> tuple[int, int | None]:
    """The last size that does not reach the target (0 for none), and the first that does; None where none does."""
    below, vain, fastest = 0, 0, float("inf")
    for size in _doubled(sizes):
        if reaches(size):
            return below, size
        below, step_s = size, tried[size].step_s
        if step_s is not None:
            vain = vain + 1 if step_s > fastest * (1 - GAIN) else 0
            fastest = min(fastest, step_s)
        elif fastest < float("inf"):
            vain += 1
        if vain >= VAIN:
            break
    return below, None


def _try(devices: int, plan_on: PlanOn, most_s: float, plans: dict[int, Plan]) -> Tried:
    """The best plan on so many devices, which goes to `plans`."""
    try:
        plan = plan_on(devices)
    except (InfeasibleError, JobError, HardwareError) as error:
        return Tried(devices, None, reaches=False, reason=error.problem.message)
    plans[devices] = plan
    step_s = plan.predictions.reached_s
    price = plan.headline.dollars_per_hour if plan.headline else 0.0
    return Tried(devices, step_s, step_s <= most_s, price)


def _unreachable(target: Target, most_s: float, tried: Sequence[Tried]) -> InfeasibleError:
    """Why no number of devices reaches a target."""
    possible = [each for each in tried if each.step_s is not None]
    if not possible:
        return InfeasibleError(f"no number of devices does: {tried[-1].reason}", where=target.words)
    best = min(possible, key=lambda each: each.step_s or 0.0)
    last = max(each.devices for each in tried)
    message = (
        f"no number of devices does: {target.words} needs steps of {format_seconds(most_s)}, and the fastest of those "
        f"tried takes {format_seconds(best.step_s or 0.0)} on {plural(best.devices, 'device')}"
    )
    rest = "more devices were no faster" if best.devices < last else f"{last} devices are the most that were tried"
    return InfeasibleError(message, hint=f"{rest}; a larger global batch uses more of them")
