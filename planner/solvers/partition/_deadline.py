"""The clock of a solver: one deadline that all of its phases watch."""

from __future__ import annotations

import math
import time


class OutOfTime(Exception):  # noqa: N818 - a signal between the phases of a solver, never seen by users
    """The deadline has passed. A solver that raised it returns the best plan and bound it has by then."""


class Deadline:
    """A moment on the wall clock.

    Phases that hold nothing worth keeping call `check`; those that do look at `passed` and end by themselves. Either
    is called often enough that a phase overruns by some hundredths of a second on graphs of thousands of nodes.
    """

    __slots__ = ("_at",)

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that remain; negative when it has passed."""
        return self._at - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether no time remains."""
        return self.left_s <= 0

    def check(self) -> None:
        """Go on only while time remains.

        Raises:
            OutOfTime: the deadline has passed.
        """
        if self.passed:
            raise OutOfTime

    def within(self, limit_s: float) -> Deadline:
        """The earlier of this deadline and `limit_s` seconds from now."""
        return Deadline(min(limit_s, self.left_s))


NEVER = Deadline(math.inf)
"""A deadline that does not pass."""
