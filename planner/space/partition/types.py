"""What every partition problem has: a judge that recomputes objective and violations of any decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from planner.space.types import Violation

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of a decision.

    Attributes:
        objective: what the problem minimises, in its own unit (`PartitionProblem.unit`); infinite when malformed.
        violations: limits that the decision breaks, empty when it is feasible.
        parts: what the objective is the largest or the sum of, by part (device, stage), for people.
    """

    objective: float
    violations: tuple[Violation, ...] = ()
    parts: tuple[float, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations


class PartitionProblem(Protocol):
    """A problem of some family: a frozen dataclass of numbers, with a judge that shares no code with any solver."""

    @property
    def unit(self) -> str:
        """Unit of the objective, such as "ms" or "s"."""
        ...

    def judge(self, decision: Any) -> Verdict:  # noqa: ANN401
        """Recompute objective and violations of a decision from the problem's numbers alone."""
        ...

    def trivial(self) -> tuple[tuple[str, Any], ...]:
        """Plans that anybody would try first (one device, even split, data parallel), by name, feasible or not."""
        ...
