"""Exact minimum of a sum of small tables: one variable after another is minimised out, as dynamic programs do.

A chain of operators gives tables over two variables and this is the chain's dynamic program; a graph of small treewidth
costs no more than its widest table. The order is greedy: next the variable whose elimination makes the smallest table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError

DEFAULT_LIMIT = 40_000_000
"""Largest table, in entries, that elimination may make."""


@dataclass(frozen=True)
class Factor:
    """A table of costs over some variables, inf where a combination is forbidden.

    Attributes:
        variables: which, ascending.
        table: float64, one dimension a variable, in the same order.
    """

    variables: tuple[int, ...]
    table: np.ndarray


def factor(variables: Sequence[int], table: np.ndarray) -> Factor:
    """A factor with its variables brought into ascending order; a variable given twice is read on its diagonal."""
    letters = [chr(97 + sorted(set(variables)).index(v)) for v in variables]
    unique = sorted(set(variables))
    text = "".join(letters) + "->" + "".join(chr(97 + i) for i in range(len(unique)))
    return Factor(tuple(unique), np.einsum(text, table) if len(unique) < len(variables) else
                  np.transpose(table, np.argsort(np.asarray(variables), kind="stable")))  # fmt: skip


def _sum(factors: Sequence[Factor], variables: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """The sum of factors as one table over the variables, in any order of those."""
    total = np.zeros([sizes[v] for v in variables])
    for f in factors:
        order = sorted(range(len(f.variables)), key=lambda i: variables.index(f.variables[i]))
        here = [f.variables[i] for i in order]
        total += f.table.transpose(order).reshape([sizes[v] if v in here else 1 for v in variables])
    return total


class _Order:
    """Which variable to eliminate next: the one whose elimination makes the smallest table; ties to the lower index.

    Sizes of tables are kept in a heap, those out of date dropped when they come up: O(log variables) a change.
    """

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor], keep: int | None = None) -> None:
        self.sizes, self.keep = sizes, keep
        self.near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        for f in factors:
            for v in f.variables:
                self.near[v] |= set(f.variables) - {v}
        self.entries = {v: self._entries(v) for v in self.near}
        self.heap = [(n, v) for v, n in self.entries.items() if v != keep]
        heapq.heapify(self.heap)

    def _entries(self, v: int) -> int:
        return self.sizes[v] * math.prod(self.sizes[n] for n in self.near[v])

    def pop(self) -> tuple[int, int, tuple[int, ...]] | None:
        """The next variable, the entries of its table and its neighbours; None when none is left."""
        while self.heap:
            entries, v = heapq.heappop(self.heap)
            if v not in self.near or self.entries[v] != entries:
                continue
            around = self.near.pop(v)
            for n in around:
                self.near[n] = (self.near[n] | around) - {n, v}
            for n in around:
                self.entries[n] = self._entries(n)
                if n != self.keep:
                    heapq.heappush(self.heap, (self.entries[n], n))
            return v, entries, tuple(sorted(around))
        return None


def table_entries(sizes: Sequence[int], factors: Sequence[Factor]) -> int:
    """Entries of the widest table that elimination makes, without making it."""
    order, widest = _Order(sizes, factors), 1
    while (found := order.pop()) is not None:
        widest = max(widest, found[1])
    return widest


class _Elimination:
    """Tables left while variables are minimised out."""

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor]) -> None:
        self.sizes, self.factors = sizes, factors
        self.tables: dict[int, Factor] = dict(enumerate(f for f in factors if f.variables))
        self.of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        for i, f in self.tables.items():
            for v in f.variables:
                self.of[v].add(i)
        self.constant = sum(float(f.table) for f in factors if not f.variables)
        self.done: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        self._seen: dict[tuple[tuple[int, tuple[int, ...]], ...], tuple[list[Factor], np.ndarray, np.ndarray]] = {}

    def run(self, limit: int, keep: int | None = None) -> bool:
        """Minimise out all variables but one; false when a table would be too large."""
        order = _Order(self.sizes, self.factors, keep)
        while (found := order.pop()) is not None:
            v, entries, others = found
            if entries > limit:
                return False
            numbers = sorted(self.of.pop(v))
            mine = [self.tables.pop(i) for i in numbers]
            for u in others:
                self.of[u] -= set(numbers)
            best, least = self._minimum(mine, (*others, v))
            self.done.append((v, others, best))
            self._add(Factor(others, least), numbers)
        return True

    def _minimum(self, mine: list[Factor], variables: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Best choices of the last variable and what they come to.

        Where the same tables hang together in the same way, as in layers that repeat, the answer is that of before.
        """
        place = {u: k for k, u in enumerate(variables)}
        alike = tuple((id(f.table), tuple(place[u] for u in f.variables)) for f in mine)
        if alike not in self._seen:
            total = _sum(mine, variables, self.sizes)
            self._seen[alike] = mine, total.argmin(axis=-1), total.min(axis=-1)
        _, best, least = self._seen[alike]
        return best, least

    def _add(self, made: Factor, numbers: Sequence[int]) -> None:
        if not made.variables:
            self.constant += float(made.table)
            return
        name = numbers[0]
        self.tables[name] = made
        for u in made.variables:
            self.of[u].add(name)


def minimise(
    sizes: Sequence[int], factors: Sequence[Factor], limit: int = DEFAULT_LIMIT
) -> tuple[float, tuple[int, ...]] | None:
    """The least sum of all factors and the choice of each variable that reaches it; ties go to the lower index.

    Args:
        sizes: choices of each variable.
        factors: tables; a variable without one takes its first choice.
        limit: most entries of a table.

    Returns:
        Value and choices, or None when a table would be larger than the limit.

    Raises:
        InfeasibleError: every combination is forbidden.
    """
    left = _Elimination(sizes, factors)
    if not left.run(limit):
        return None
    if not math.isfinite(left.constant):
        raise InfeasibleError("no combination of layouts is legal", hint="allow more splits or padding")
    chosen = [0] * len(sizes)
    for v, others, best in reversed(left.done):
        chosen[v] = int(best[tuple(chosen[o] for o in others)])
    return left.constant, tuple(chosen)


def marginals(
    sizes: Sequence[int], factors: Sequence[Factor], variable: int, limit: int = DEFAULT_LIMIT
) -> np.ndarray | None:
    """For each choice of a variable the least sum of all factors under it; None when a table would be too large."""
    left = _Elimination(sizes, factors)
    if not left.run(limit, keep=variable):
        return None
    return _sum(list(left.tables.values()), (variable,), sizes) + left.constant


def minimise_along(
    sizes: Sequence[int], factors: Sequence[Factor], variable: int, limit: int = DEFAULT_LIMIT
) -> list[tuple[float, tuple[int, ...]]] | None:
    """For each choice of a variable the least sum of all factors under it, and the choice of every variable.

    One elimination serves them all: a variable that stands for a price gives the best choices at every price.

    Args:
        sizes: choices of each variable.
        factors: tables.
        variable: which variable.
        limit: most entries of a table.

    Returns:
        A value (inf where nothing is legal) and choices for each choice of the variable; None when a table would be
        larger than the limit.
    """
    left = _Elimination(sizes, factors)
    if not left.run(limit, keep=variable):
        return None
    totals = _sum(list(left.tables.values()), (variable,), sizes) + left.constant
    found = []
    for c, total in enumerate(totals):
        chosen = [0] * len(sizes)
        chosen[variable] = c
        for v, others, best in reversed(left.done):
            chosen[v] = int(best[tuple(chosen[o] for o in others)])
        found.append((float(total), tuple(chosen)))
    return found


def value(factors: Sequence[Factor], chosen: Sequence[int]) -> float:
    """The sum of all factors at one choice of each variable."""
    return float(sum(f.table[tuple(chosen[v] for v in f.variables)] for f in factors))
