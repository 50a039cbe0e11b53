"""One published figure beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure: what it is, as published, ours, and what was assumed."""

    system: str
    what: str
    published: float
    ours: float
    assumed: str = ""

    @property
    def error(self) -> float:
        """(ours - published) / published."""
        return self.ours / self.published - 1
