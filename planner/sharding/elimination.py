"""Exact minimum of a sum of small tables: one variable after another is minimised out, as dynamic programs do.

A chain of operators gives tables over two variables and this is the chain's dynamic program; a graph of small treewidth
costs no more than its widest table. The order is greedy: next the variable whose elimination makes the smallest table.
"""

from __future__ import annotations

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


def table_entries(sizes: Sequence[int], factors: Sequence[Factor]) -> int:
    """Entries of the widest table that elimination makes, without making it; O(variables ** 2)."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for f in factors:
        for v in f.variables:
            near[v] |= set(f.variables) - {v}
    widest = 1
    while near:
        v, entries = _cheapest(near, sizes)
        widest = max(widest, entries)
        _join(near, v)
    return widest


def _cheapest(near: dict[int, set[int]], sizes: Sequence[int], keep: int | None = None) -> tuple[int, int]:
    def entries(v: int) -> int:
        return sizes[v] * math.prod(sizes[n] for n in near[v])

    best = min((v for v in near if v != keep), key=lambda v: (entries(v), v))
    return best, entries(best)


def _join(near: dict[int, set[int]], v: int) -> None:
    around = near.pop(v)
    for n in around:
        near[n] = (near[n] | around) - {n, v}


class _Elimination:
    """Tables left while variables are minimised out."""

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor]) -> None:
        self.sizes, self.constant = sizes, 0.0
        self.near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        self.tables: dict[int, Factor] = dict(enumerate(f for f in factors if f.variables))
        self.of: dict[int, set[int]] = {v: set() for v in self.near}
        for i, f in self.tables.items():
            for v in f.variables:
                self.near[v] |= set(f.variables) - {v}
                self.of[v].add(i)
        self.constant = sum(float(f.table) for f in factors if not f.variables)
        self.done: list[tuple[int, tuple[int, ...], np.ndarray]] = []

    def run(self, limit: int, keep: int | None = None) -> bool:
        """Minimise out all variables but one; false when a table would be too large."""
        while len(self.near) > (keep is not None):
            v, entries = _cheapest(self.near, self.sizes, keep)
            if entries > limit:
                return False
            others = tuple(sorted(self.near[v]))
            _join(self.near, v)
            numbers = sorted(self.of.pop(v))
            mine = [self.tables.pop(i) for i in numbers]
            for u in others:
                self.of[u] -= set(numbers)
            total = _sum(mine, (*others, v), self.sizes)
            self.done.append((v, others, total.argmin(axis=-1)))
            self._add(Factor(others, total.min(axis=-1)), numbers)
        return True

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


def value(factors: Sequence[Factor], chosen: Sequence[int]) -> float:
    """The sum of all factors at one choice of each variable."""
    return float(sum(f.table[tuple(chosen[v] for v in f.variables)] for f in factors))
