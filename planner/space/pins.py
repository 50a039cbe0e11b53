"""Blocks that the user wants on a certain stage: from what is written down to the numbers of blocks."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence

from planner.errors import JobError
from planner.registry import did_you_mean
from planner.space.types import Job

_PART = re.compile(r"\[\d+/\d+\]$")
_LAYER = re.compile(r"layers?[ ._-]?(\d+)", re.IGNORECASE)


def pinned_blocks(job: Job, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The blocks that a job keeps on stages, with the stage's number (negative ones count from the last).

    What is kept is a block's name, with `*`, `?` and `[]` as in file names, or `layer3`: the fourth of the numbered
    modules that there are most of. Where a module was cut into several blocks all of them are meant.

    Raises:
        JobError: a name that no block has.
    """
    modules = [_PART.sub("", name) for name in names]
    found: dict[tuple[int, int], None] = {}
    for wanted, stage in job.keep:
        blocks = _matching(wanted, modules)
        if not blocks:
            hint = did_you_mean(wanted, list(dict.fromkeys(modules)))
            raise JobError(f"no block is called {wanted!r}, which is to be kept on stage {stage}", hint=hint)
        found.update(dict.fromkeys((b, stage) for b in blocks))
    _agree(tuple(found), modules)
    return tuple(sorted(found))


def _agree(pins: Sequence[tuple[int, int]], modules: Sequence[str]) -> None:
    """Later blocks are never on earlier stages, counting from the same end.

    Raises:
        JobError: two pins that no plan can have.
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
