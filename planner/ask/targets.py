"""Find the fewest devices, or dollars, that reach a target: a step time, or an amount of tokens in some days."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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
"""Limit on the number of devices that is tried, where the profile names no smaller one."""
GAIN = 0.02
"""Fraction of the step time below which the saving of a doubling counts as none."""
VAIN = 2
"""Number of consecutive doublings without a saving after which no more devices are tried."""

PlanOn = Callable[[int], Plan]
"""Gives the best plan on a number of devices.

Raises:
    InfeasibleError, JobError, HardwareError: there is no plan, or the cluster has fewer devices.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A target for the speed of training.

    Attributes:
        words: the target as it was written.
        step_s: longest step time in seconds; 0 for a target in samples or tokens.
        amount: tokens or samples to train.
        unit: "tokens" or "samples"; "" for a step time.
        within_s: seconds in which to train the amount.
    """

    words: str
    step_s: float = 0.0
    amount: float = 0.0
    unit: str = ""
    within_s: float = 0.0

    def most_s(self, global_batch: int, sequence: int) -> float:
        """Longest step time in seconds that reaches the target, for steps of some samples of some tokens.

        Raises:
            UsageError: the target is in tokens and the model has none.
        """
        if not self.unit:
            return self.step_s
        unit_count = sequence if self.unit == "tokens" else 1
        if not unit_count:
            raise UsageError("the model has no tokens", where=self.words, hint="ask for samples=1e9/7d")
        return self.within_s * global_batch * unit_count / self.amount


@dataclass(frozen=True, slots=True)
class TriedSize:
    """The result for one number of devices.

    Attributes:
        devices: number of devices.
        step_s: step time of the best plan; None if nothing fits.
        reaches: true if the step time reaches the target.
        dollars_per_hour: price of the devices at work; 0 if unknown.
        reason: why there is no plan.
    """

    devices: int
    step_s: float | None
    reaches: bool
    dollars_per_hour: float = 0.0
    reason: str = ""

    @property
    def dollars_per_step(self) -> float:
        """US dollars per step; 0 if no price is known."""
        return self.dollars_per_hour * (self.step_s or 0.0) / 3600.0


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The cheapest plan that reaches a target.

    Attributes:
        target: the target.
        most_s: longest step time that reaches it.
        plan: the plan with the fewest devices, or dollars, of those tried.
        tried: results by number of devices, ascending.
    """

    target: Target
    most_s: float
    plan: Plan
    tried: tuple[TriedSize, ...]


def read_target(text: str) -> Target:
    """Read `step=2s`, `tokens=1e12/7d` or `samples=1e9/12h`.

    Raises:
        UsageError: the text is none of these.
    """
    kind, _, value = (part.strip() for part in text.partition("="))
    if kind == "step" and value:
        seconds = parse(value, Dimension.SECONDS)
        if seconds > 0:
            return Target(text, step_s=seconds)
    rate = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*/\s*([0-9.]+)\s*(d|h|min|s|w)", value)
    if kind not in ("tokens", "samples") or not rate or float(rate[1]) <= 0 or float(rate[2]) <= 0:
        raise UsageError(f"{text!r} is no target", hint="write step=2s, tokens=1e12/7d or samples=1e9/12h")
    return Target(text, amount=float(rate[1]), unit=kind, within_s=float(rate[2]) * _SPANS[rate[3]])


def sizes_of(cluster: Cluster, most: int = MOST_DEVICES) -> tuple[int, ...]:
    """Numbers of devices to try: powers of two within a node, then whole nodes."""
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
    least: Literal["devices", "dollars"] = "devices",
) -> TargetAnswer:
    """Find the fewest devices, or dollars, with a plan that reaches a target.

    The number of devices is doubled until the target is reached; bisection of the last interval then finds the fewest,
    assuming that more devices are never slower. For the least dollars, twice that number is tried, too.

    Args:
        target: the target.
        graph: the model.
        cluster: the cluster, at any size.
        global_batch: samples of a step, the same for all sizes.
        plan_on: plans on a number of devices.
        sizes: numbers of devices to choose from, ascending; those of `sizes_of` by default.
        least: what to minimize.

    Raises:
        InfeasibleError: no number of devices reaches the target; the message has the fastest step time.
        UsageError: the target is in tokens and the model has none, or no price is known for a target in dollars.
    """
    prices = profile(graph, cluster.devices[0])
    most_s = target.most_s(global_batch, tokens_per_sample(graph, prices))
    work = prices.executed_total / prices.micro_batch * global_batch
    peak = max(rate for device in cluster.devices for rate in device.matrix_flop_per_s.values())
    fewest = math.ceil(work / most_s / peak)
    sizes = [size for size in sizes or sizes_of(cluster) if size >= fewest]
    if not sizes:
        raise InfeasibleError(f"no number of devices does: at their peak it takes {fewest}", where=target.words)
    plans: dict[int, Plan] = {}
    tried: dict[int, TriedSize] = {}

    def reaches(devices: int) -> bool:
        if devices not in tried:
            tried[devices] = _try(devices, plan_on, most_s, plans)
        return tried[devices].reaches

    below, reached = _gallop(sizes, reaches, tried)
    if reached is None:
        raise _unreachable(target, most_s, list(tried.values()))
    between = [size for size in sizes if below < size < reached]
    reached = [*between, reached][bisect.bisect_left(between, True, key=reaches)]
    if least == "dollars":
        for double in [size for size in sizes if size == 2 * reached]:
            reaches(double)
        reaching = [result for result in tried.values() if result.reaches]
        if not all(result.dollars_per_hour for result in reaching):
            raise UsageError("no price is known", where=cluster.name, hint="give one, with --price 2.5")
        reached = min(reaching, key=lambda result: (result.dollars_per_step, result.devices)).devices
    return TargetAnswer(target, most_s, plans[reached], tuple(tried[size] for size in sorted(tried)))


def _doubled(sizes: Sequence[int]) -> Iterator[int]:
    """The first of some ascending sizes, then repeatedly the largest one that is at most twice the last."""
    remaining = list(sizes)
    while remaining:
        yield remaining[0]
        double = 2 * remaining[0]
        remaining = remaining[max(1, bisect.bisect_right(remaining, double) - 1) :]


def _gallop(
    sizes: Sequence[int], reaches: Callable[[int], bool], tried: dict[int, TriedSize]
) -> tuple[int, int | None]:
    """The largest tried size that misses the target (0 for none), and the first that reaches it (None for none)."""
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


def _try(devices: int, plan_on: PlanOn, most_s: float, plans: dict[int, Plan]) -> TriedSize:
    """The result for a number of devices; its plan is added to `plans`."""
    try:
        plan = plan_on(devices)
    except (InfeasibleError, JobError, HardwareError) as error:
        return TriedSize(devices, None, reaches=False, reason=error.problem.message)
    plans[devices] = plan
    step_s = plan.predictions.reached_s
    price = plan.headline.dollars_per_hour if plan.headline else 0.0
    return TriedSize(devices, step_s, step_s <= most_s, price)


def _unreachable(target: Target, most_s: float, tried: Sequence[TriedSize]) -> InfeasibleError:
    """The error that no number of devices reaches a target."""
    possible = [result for result in tried if result.step_s is not None]
    if not possible:
        return InfeasibleError(f"no number of devices does: {tried[-1].reason}", where=target.words)
    fastest = min(possible, key=lambda result: result.step_s or 0.0)
    last = max(result.devices for result in tried)
    message = (
        f"no number of devices does: {target.words} needs steps of {format_seconds(most_s)}, and the fastest of those "
        f"tried takes {format_seconds(fastest.step_s or 0.0)} on {plural(fastest.devices, 'device')}"
    )
    advice = "more devices were no faster" if fastest.devices < last else f"{last} devices are the most that were tried"
    return InfeasibleError(message, hint=f"{advice}; a larger global batch uses more of them")
