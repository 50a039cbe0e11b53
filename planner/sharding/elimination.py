"""Exact minimum of a sum of small tables, by variable elimination (dynamic programming).

A chain of operators gives tables over two variables, and elimination is the dynamic program of the chain; a graph of
small treewidth costs no more than its widest table. The order is greedy: next the variable whose elimination makes the
smallest table.

`least_within` finds the least time within a memory limit by prices on memory (Lagrangian relaxation): one elimination
gives the best choices at many prices. Each price gives a bound (its total, less the price of the limit), and each price
that is high enough a choice that fits. The interval between the highest price that is too low and the lowest that is
high enough is refined step by step. Equal layers all change their choice at the same price; in the end, prices that
rise a little from the first variable to the last let them change one after the other.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import InfeasibleError
from planner.sums import float_sum

DEFAULT_LIMIT = 40_000_000
"""Largest table, in entries, that elimination may make."""


@dataclass(frozen=True)
class Factor:
    """A table of costs over some variables, inf where a combination is forbidden.

    Attributes:
        variables: indices of the variables, ascending.
        table: float64, one dimension a variable, in the same order.
    """

    variables: tuple[int, ...]
    table: np.ndarray


def factor(variables: Sequence[int], table: np.ndarray) -> Factor:
    """A factor with its variables in ascending order; of a variable that is given twice, the diagonal of the table."""
    letters = [chr(97 + sorted(set(variables)).index(v)) for v in variables]
    unique = sorted(set(variables))
    text = "".join(letters) + "->" + "".join(chr(97 + i) for i in range(len(unique)))
    return Factor(tuple(unique), np.einsum(text, table) if len(unique) < len(variables) else
                  np.transpose(table, np.argsort(np.asarray(variables), kind="stable")))  # fmt: skip


def _shape(own: tuple[int, ...], variables: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a table over some of more variables, of these sizes; 1 for those that it does not have."""
    return shape if own == variables else tuple([n if v in own else 1 for v, n in zip(variables, shape, strict=True)])


def _total(tables: Iterable[tuple[np.ndarray, tuple[int, ...]]], shape: tuple[int, ...]) -> np.ndarray:
    """The sum of tables, each with its shape among others, as one table of a shape."""
    total = None
    for table, own in tables:
        if total is None:
            total = np.empty(shape)
            total[...] = table.reshape(own)
        else:
            total += table.reshape(own)
    return np.zeros(shape) if total is None else total


def _narrowed(f: Factor) -> Factor:
    """A factor without the variables that have one choice, which would only add dimensions to tables."""
    if 1 not in f.table.shape:
        return f
    return Factor(tuple(v for v, n in zip(f.variables, f.table.shape, strict=True) if n > 1), np.squeeze(f.table))


_Next = tuple[int, int, tuple[int, ...]]
"""A variable to eliminate, the entries of its table and its neighbours."""


def _ordered(
    sizes: Sequence[int], tables: Iterable[tuple[int, ...]], keep: Sequence[int], *, left: bool = False
) -> Iterator[_Next]:
    """The variables but some, next the one whose elimination makes the smallest table; ties to the lower index.

    The table counts with the variable, or as what is left of it without (`left`). The sizes of tables are kept in a
    heap; outdated entries are dropped when they come up. O(log variables) a change.
    """
    kept, near = frozenset(keep), {v: set[int]() for v in range(len(sizes))}
    for variables in tables:
        for v in variables:
            near[v].update(variables)
            near[v].discard(v)

    def entries_of(v: int) -> int:
        return (1 if left else sizes[v]) * math.prod(sizes[n] for n in near[v])

    entries = {v: entries_of(v) for v in near.keys() - kept}
    heap = [(n, v) for v, n in entries.items()]
    heapq.heapify(heap)
    while heap:
        count, v = heapq.heappop(heap)
        if v not in near or entries[v] != count:
            continue
        around = near.pop(v)
        for n in around - kept:
            near[n] |= around
            near[n] -= {n, v}
        for n in around - kept:
            entries[n] = entries_of(n)
            heapq.heappush(heap, (entries[n], n))
        yield v, count * (sizes[v] if left else 1), tuple(sorted(around))


Variables = tuple[tuple[int, ...], ...]
"""By table, its variables."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The elimination of one variable.

    Attributes:
        variable: which one.
        entries: of the table of its sums.
        others: the variables that its tables have beside it.
        tables: numbers of its tables; the first becomes that of what is left of them.
        axis: of the variable in the table of sums.
        shape: of the table of sums.
        wide: shape of each of its tables among the variables of the sum.
        kind: a number, equal for steps with equal axes and shapes.
        choice: the smallest integer type for a choice of the variable.
    """

    variable: int
    entries: int
    others: tuple[int, ...]
    tables: tuple[int, ...]
    axis: int
    shape: tuple[int, ...]
    wide: tuple[tuple[int, ...], ...]
    kind: int
    choice: np.dtype[Any]


WIDE = 100_000
"""Entries of the widest table from which another order of elimination is tried."""


@functools.lru_cache(maxsize=32)
def _order(sizes: tuple[int, ...], tables: Variables, keep: tuple[int, ...]) -> tuple[_Next, ...]:
    """The order in which all variables but some are eliminated; found once for problems of one shape.

    Variables that hang together closely, as those of a scan and its gates, need far smaller tables if what is left
    counts; others need larger ones.
    """
    order = tuple(_ordered(sizes, tables, keep))
    if _widest(order) < WIDE:
        return order
    return min(order, tuple(_ordered(sizes, tables, keep, left=True)), key=_widest)


def _widest(order: Iterable[_Next]) -> int:
    """Entries of the largest table that an order makes."""
    return max((entries for _, entries, _ in order), default=1)


@functools.lru_cache(maxsize=16)
def _steps(sizes: tuple[int, ...], tables: Variables, keep: tuple[int, ...]) -> tuple[_Step, ...]:
    """What eliminates all variables but some; found once for problems with tables over the same variables."""
    tables_of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for i, own in enumerate(tables):
        for v in own:
            tables_of[v].add(i)
    variables, kinds, steps = dict(enumerate(tables)), dict[object, int](), list[_Step]()
    for v, entries, others in _order(sizes, tuple([own for own in tables if len(own) > 1]), keep):
        numbers = tuple(sorted(tables_of.pop(v)))
        together = tuple(sorted((v, *others)))
        shape, axis = tuple([sizes[u] for u in together]), together.index(v)
        wide = tuple([_shape(variables.pop(i), together, shape) for i in numbers])
        for u in others:
            tables_of[u].difference_update(numbers)
            if numbers:
                tables_of[u].add(numbers[0])
        if numbers:
            variables[numbers[0]] = others
        kind = kinds.setdefault((axis, shape, wide), len(kinds))
        steps.append(_Step(v, entries, others, numbers, axis, shape, wide, kind, np.min_scalar_type(sizes[v])))
    return tuple(steps)


def table_entries(sizes: Sequence[int], linked: Iterable[Sequence[int]], keep: Sequence[int] = ()) -> int:
    """Entries of the widest table that elimination of all variables but `keep` makes, without making it.

    Args:
        sizes: choices of each variable.
        linked: by table, its variables, ascending.
        keep: the variables that stay.
    """
    narrowed = (tuple([v for v in variables if sizes[v] > 1]) for variables in linked)
    tables = tuple([own for own in narrowed if len(own) > 1])
    return _widest(_order(tuple(sizes), tables, tuple(keep)))


@dataclass(frozen=True)
class Minima:
    """The least sums of all factors for each choice of some variables.

    Attributes:
        totals: float64, one dimension a variable; inf where nothing is legal.
    """

    totals: np.ndarray
    _count: int
    _kept: tuple[int, ...]
    _eliminated: list[tuple[int, tuple[int, ...], np.ndarray]]

    def choices(self, at: Sequence[int]) -> tuple[int, ...]:
        """The choice of every variable that reaches the least sum under one choice of each kept variable."""
        return tuple(self.choices_of(np.asarray([at], dtype=np.int64))[0].tolist())

    def choices_of(self, at: np.ndarray) -> np.ndarray:
        """[rows, variables] `choices` for many rows of choices of the kept variables, int64 [rows, kept variables]."""
        choices = np.zeros((self._count, len(at)), dtype=np.int64)
        choices[list(self._kept)] = at.T
        for v, others, best in reversed(self._eliminated):
            choices[v] = best[tuple(choices[u] for u in others)]
        return choices.T


def minima(
    sizes: Sequence[int], factors: Sequence[Factor], keep: Sequence[int], limit: int = DEFAULT_LIMIT
) -> Minima | None:
    """The least sum of all factors under each choice of some variables.

    One elimination serves all of them: a variable that stands for a price gives the best choices at every price. Equal
    tables over equal variables, as in layers that repeat, are minimised once.

    Args:
        sizes: choices of each variable.
        factors: tables.
        keep: the variables that stay, ascending.
        limit: largest table allowed, in entries.

    Returns:
        The least sums; None when a table would exceed the limit.
    """
    narrowed = [_narrowed(f) for f in factors]
    tables = dict(enumerate(f for f in narrowed if f.variables))
    constant = float_sum(float(f.table) for f in narrowed if not f.variables)
    seen: dict[tuple[int, ...], tuple[list[np.ndarray], np.ndarray, np.ndarray]] = {}
    eliminated: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for step in _steps(tuple(sizes), tuple([f.variables for f in tables.values()]), tuple(keep)):
        if step.entries > limit:
            return None
        own = [tables.pop(i).table for i in step.tables]
        key = (step.kind, *map(id, own))
        if key not in seen:
            total = _total(zip(own, step.wide, strict=True), step.shape)
            best = total.argmin(axis=step.axis).astype(step.choice)
            seen[key] = own, np.minimum.reduce(total, axis=step.axis), best
        _, least, best = seen[key]
        eliminated.append((step.variable, step.others, best))
        if not step.others:
            constant += float(least)
        elif own:
            tables[step.tables[0]] = Factor(step.others, least)
    kept, shape = tuple(keep), tuple([sizes[v] for v in keep])
    totals = _total([(f.table, _shape(f.variables, kept, shape)) for f in tables.values()], shape)
    return Minima(totals + constant, len(sizes), kept, eliminated)


def too_wide(limit: int = DEFAULT_LIMIT) -> InfeasibleError:
    """The error for an elimination that needs a table of more entries than the limit."""
    return InfeasibleError(
        f"operators hang together too closely: elimination needs a table of over {limit} entries",
        hint="use fewer mesh axes, or shard a block instead of the whole model",
    )


def minimise(
    sizes: Sequence[int], factors: Sequence[Factor], limit: int = DEFAULT_LIMIT
) -> tuple[float, tuple[int, ...]]:
    """The least sum of all factors and the choice of each variable that reaches it; ties go to the lower index.

    Args:
        sizes: choices of each variable.
        factors: tables; a variable without one takes its first choice.
        limit: largest table allowed, in entries.

    Raises:
        InfeasibleError: a table would be larger than the limit, or every combination is forbidden.
    """
    least = minima(sizes, factors, (), limit)
    if least is None:
        raise too_wide(limit)
    if not math.isfinite(least.totals):
        raise InfeasibleError("no combination of layouts is legal", hint="allow more splits or padding")
    return float(least.totals), least.choices(())


def value(factors: Sequence[Factor], choices: Sequence[int]) -> float:
    """The sum of all factors at one choice of each variable."""
    return float(float_sum(f.table[tuple(choices[v] for v in f.variables)] for f in factors))


ROUNDS = 3
"""Number of refinements of the interval of prices."""
STEPS = 9
"""Prices that each refinement tries."""
FIRST_POWERS = range(-8, 9)
"""Exponents k of the first prices: 4**k times the least time over the memory limit."""
TILT = 0.02
"""Fraction by which a tilted price rises from the first variable to the last."""
TILTED_ROUNDS = 2
"""Number of refinements of the interval of tilted prices."""
CLOSE = 1e-6
"""Relative gap at which a choice counts as optimal."""


@dataclass
class LimitedSolution:
    """The fastest choice within a memory limit that a search over prices of memory found so far, and the best bound.

    Attributes:
        sizes: choices of each variable.
        times: tables of seconds.
        held: tables of bytes, at most one for the same variables.
        limit: memory limit in bytes.
        seconds: seconds of the choice; inf where none fits.
        choices: choice of each variable; empty where none fits.
        bound_s: lower bound on the seconds of any choice that fits.
    """

    sizes: tuple[int, ...]
    times: Sequence[Factor]
    held: Sequence[Factor]
    limit: float
    seconds: float = math.inf
    choices: tuple[int, ...] = ()
    bound_s: float = 0.0

    def closed(self, close: float = CLOSE) -> bool:
        """Whether the choice is optimal to a relative gap."""
        return self.seconds <= self.bound_s * (1 + close)

    def _factors(self, prices: np.ndarray, tilt: float) -> list[Factor]:
        """Tables of time and priced memory over the variables and the price; equal variables share an array."""
        count, arrays = max(1, len(self.sizes)), dict[tuple[int, int, float], np.ndarray]()
        memory = {f.variables: f for f in self.held}
        factors = [f for f in self.times if f.variables not in memory]
        time_of = {f.variables: f for f in self.times if f.variables in memory}
        for variables, kept in memory.items():
            rise = 1 + tilt * (variables[0] / count - 0.5) if variables else 1.0
            time = time_of.get(variables)
            key = (id(kept.table), 0 if time is None else id(time.table), rise)
            if key not in arrays:
                arrays[key] = kept.table[..., None] * (rise * prices) + (0.0 if time is None else time.table[..., None])
            factors.append(Factor((*variables, len(self.sizes)), arrays[key]))
        return factors

    def try_prices(self, prices: Sequence[float], tilt: float = 0.0) -> tuple[float, float]:
        """Try ascending prices; return the last that is too low (else 0) and the first that is high enough (else inf).

        Raises:
            InfeasibleError: elimination would need too large a table even for one price.
        """
        least = None
        for part in (len(prices), 1):
            least = minima((*self.sizes, part), self._factors(np.asarray(prices[:part]), tilt), (len(self.sizes),))
            if least is not None:
                break
        if least is None:
            raise too_wide()
        if part < len(prices):
            ends = [self.try_prices((price,), tilt) for price in prices]
            return max(low for low, _ in ends), min(high for _, high in ends)
        if not tilt:
            bounds = least.totals - np.asarray(prices) * self.limit
            self.bound_s = max(self.bound_s, float(bounds.max()))
        low, high = -1, len(prices)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(least.choices((middle,))[:-1]) else (middle, high)
        return (prices[low] if low >= 0 else 0.0), (prices[high] if high < len(prices) else math.inf)

    def _fits(self, choices: tuple[int, ...]) -> bool:
        """Whether a choice fits; it is remembered if it is the fastest so far."""
        if value(self.held, choices) > self.limit:
            return False
        seconds = value(self.times, choices)
        if seconds < self.seconds:
            self.seconds, self.choices = seconds, choices
        return True


def least_within(
    sizes: Sequence[int], times: Sequence[Factor], held: Sequence[Factor], limit: float, close: float = CLOSE
) -> LimitedSolution:
    """The fastest choice within a memory limit that prices find, and a bound.

    Args:
        sizes: choices of each variable.
        times: tables of seconds.
        held: tables of bytes, at most one for the same variables.
        limit: memory limit in bytes.
        close: relative gap at which the search ends.

    Raises:
        InfeasibleError: a table of elimination would be too large, or no combination of choices is legal.

    Complexity: at most `ROUNDS + TILTED_ROUNDS + 3` eliminations with a variable of some ten prices.
    """
    prices = LimitedSolution(tuple(sizes), times, held, limit)
    prices.try_prices((0.0,))
    if not math.isfinite(prices.bound_s):
        raise InfeasibleError("no combination of layouts is legal", hint="allow more splits or padding")
    if prices.choices:
        return prices
    unit = max(prices.bound_s, 1e-12) / limit
    low, high = prices.try_prices([unit * 4.0**k for k in FIRST_POWERS])
    if not math.isfinite(high):
        low, high = prices.try_prices([unit * 4.0 ** (FIRST_POWERS[-1] + 2 * k) for k in range(1, 12)])
    for _ in range(ROUNDS):
        if not math.isfinite(high) or prices.closed(close) or high - low < 1e-9 * high:
            return prices
        steps = np.linspace(low, high, STEPS + 2)[1:-1].tolist()
        below, above = prices.try_prices(steps)
        low, high = max(low, below), min(high, above)
    below, above = high * (1 - TILT), high * (1 + TILT)
    for _ in range(TILTED_ROUNDS):
        if prices.closed(close) or not math.isfinite(above):
            break
        low, high = prices.try_prices(np.linspace(below, above, STEPS + 2)[1:-1].tolist(), TILT)
        below, above = max(low, below), min(high, above)
    return prices
