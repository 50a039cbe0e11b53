"""The least time within a limit of memory, by prices on memory: one elimination gives the best choices at many prices.

Each price gives a bound (its total, less what the limit costs at that price), and each price high enough a choice that
fits. The range of prices between the last that is too low and the first that is high enough is cut into finer and finer
steps. What equal layers all do alike, no price tells apart: last, prices that differ a little from the first variable
to the last let layers change their minds one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import InfeasibleError
from planner.sharding.elimination import Factor, minima, too_wide, value

ROUNDS = 3
"""How often the range of prices is cut into finer steps."""
STEPS = 9
"""Prices in each of those rounds."""
FIRST_POWERS = range(-8, 9)
"""Powers of four, times the time by the limit, that are tried first."""
TILT = 0.02
"""Fraction by which a tilted price rises from the first to the last variable."""
TILTED_ROUNDS = 2
"""How often the range of tilted prices is cut."""
CLOSE = 1e-6
"""Relative gap at which a choice counts as optimal."""


@dataclass
class Within:
    """The best choice that fits, and the best bound, with the price that gave it.

    Attributes:
        seconds: of the choice; inf where none fits.
        chosen: choice of each variable, empty where none fits.
        bound_s: no choice that fits takes less.
        price: seconds a byte.
    """

    seconds: float = math.inf
    chosen: tuple[int, ...] = ()
    bound_s: float = 0.0
    price: float = 0.0

    def closed(self, close: float = CLOSE) -> bool:
        """Whether the choice is the best, but for a fraction."""
        return self.seconds <= self.bound_s * (1 + close)


@dataclass
class _Prices:
    """A problem of two costs, time and memory."""

    sizes: tuple[int, ...]
    times: Sequence[Factor]
    held: Sequence[Factor]
    limit: float
    best: Within = field(default_factory=Within)

    def _factors(self, prices: np.ndarray, tilt: float) -> list[Factor]:
        """Time and priced memory over the variables and the price; tables of alike variables are one array."""
        count, known = max(1, len(self.sizes)), dict[tuple[int, int, float], np.ndarray]()
        memory = {f.variables: f for f in self.held}
        found = [f for f in self.times if f.variables not in memory]
        joined = {f.variables: f for f in self.times if f.variables in memory}
        for variables, kept in memory.items():
            rise = 1 + tilt * (variables[0] / count - 0.5) if variables else 1.0
            time = joined.get(variables)
            key = (id(kept.table), 0 if time is None else id(time.table), rise)
            if key not in known:
                known[key] = kept.table[..., None] * (rise * prices) + (0.0 if time is None else time.table[..., None])
            found.append(Factor((*variables, len(self.sizes)), known[key]))
        return found

    def look(self, prices: Sequence[float], tilt: float = 0.0) -> tuple[float, float]:
        """Try ascending prices; the last that is too low (0 where none is) and the first that is high enough (or inf).

        Raises:
            InfeasibleError: elimination would need too large a table even for one price.
        """
        found = None
        for part in (len(prices), 1):
            found = minima((*self.sizes, part), self._factors(np.asarray(prices[:part]), tilt), (len(self.sizes),))
            if found is not None:
                break
        if found is None:
            raise too_wide()
        if part < len(prices):
            ends = [self.look((price,), tilt) for price in prices]
            return max(low for low, _ in ends), min(high for _, high in ends)
        if not tilt:
            bounds = found.totals - np.asarray(prices) * self.limit
            if bounds.max() > self.best.bound_s:
                self.best.bound_s, self.best.price = float(bounds.max()), float(prices[int(bounds.argmax())])
        low, high = -1, len(prices)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(found.choices((middle,))[:-1]) else (middle, high)
        return (prices[low] if low >= 0 else 0.0), (prices[high] if high < len(prices) else math.inf)

    def _fits(self, chosen: tuple[int, ...]) -> bool:
        """Whether a choice fits; it is remembered if it is the fastest so far that does."""
        if value(self.held, chosen) > self.limit:
            return False
        seconds = value(self.times, chosen)
        if seconds < self.best.seconds:
            self.best.seconds, self.best.chosen = seconds, chosen
        return True


def least_within(
    sizes: Sequence[int], times: Sequence[Factor], held: Sequence[Factor], limit: float, close: float = CLOSE
) -> Within:
    """The fastest choice found that fits, and a bound.

    Args:
        sizes: choices of each variable.
        times: tables of seconds.
        held: tables of bytes, at most one for the same variables.
        limit: bytes.
        close: relative gap at which the search ends.

    Returns:
        The choice, `chosen` empty where none was found.

    Raises:
        InfeasibleError: a table of elimination would be too large, or no combination of choices is legal.

    Complexity: at most `ROUNDS + TILTED_ROUNDS + 3` eliminations with a variable of some ten prices.
    """
    prices = _Prices(tuple(sizes), times, held, limit)
    prices.look((0.0,))
    if not math.isfinite(prices.best.bound_s):
        raise InfeasibleError("no combination of layouts is legal", hint="allow more splits or padding")
    if prices.best.chosen:
        return prices.best
    unit = max(prices.best.bound_s, 1e-12) / limit
    low, high = prices.look([unit * 4.0**k for k in FIRST_POWERS])
    if not math.isfinite(high):
        low, high = prices.look([unit * 4.0 ** (FIRST_POWERS[-1] + 2 * k) for k in range(1, 12)])
    for _ in range(ROUNDS):
        if not math.isfinite(high) or prices.best.closed(close) or high - low < 1e-9 * high:
            return prices.best
        steps = np.linspace(low, high, STEPS + 2)[1:-1].tolist()
        below, above = prices.look(steps)
        low, high = max(low, below), min(high, above)
    below, above = high * (1 - TILT), high * (1 + TILT)
    for _ in range(TILTED_ROUNDS):
        if prices.best.closed(close) or not math.isfinite(above):
            break
        low, high = prices.look(np.linspace(below, above, STEPS + 2)[1:-1].tolist(), TILT)
        below, above = max(low, below), min(high, above)
    return prices.best
