"""Imports what nccl-tests say of a machine; which tool wrote a text (topologies: `topology.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import HardwareError
from planner.hardware.tiers import moved_bytes
from planner.hardware.topology_text import is_topology
from planner.hardware.types import Collective
from planner.units import Dimension, render

_COUNT, _DECIMAL = r"\d{1,18}", r"\d{1,15}(?:\.\d{1,15})?"
_ROW = re.compile(
    rf"^\s*({_COUNT})\s+({_COUNT})\s+\w+(?:\s+([a-z]\w*))?(?:\s+(-?{_COUNT}))?"
    rf"\s+({_DECIMAL})\s+({_DECIMAL})\s+({_DECIMAL})\s",
    re.ASCII,
)
_ROW_BEGINS = re.compile(r"^\s*\d+\s+\d+\s+[a-z]")
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_gather": Collective.ALL_GATHER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
}
"""Collectives by the name of the test, before `_perf`."""


def from_nccl_tests(text: str, *, collective: str = "", where: str = "nccl-tests") -> tuple[Collective, dict[str, Any]]:
    """A measured collective from the output of nccl-tests: `seconds = latency + traffic / bandwidth`.

    Latency and bandwidth are fitted to the out-of-place times by least squares of relative errors.

    Args:
        text: output of a test, with its heading.
        collective: name of the collective, if the text does not name the test: `all_reduce`, `all_gather`, ...
        where: name of the text in errors (a file name).

    Returns:
        The collective, and its row for `measured` of a profile.

    Raises:
        HardwareError: the text has no table, a row that cannot be read, or not the line of each rank, or the collective
            is not known.
    """
    ranks = _ranks(text, where)
    named = collective or next(iter(re.findall(r"(\w+?)_perf", text)), "")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        row = _ROW.match(line)
        if row is None and _ROW_BEGINS.match(line):
            hint = "give the table as nccl-tests printed it"
            raise HardwareError("a row of the table that cannot be read", where=f"{where}:{number}", hint=hint)
        rows += [row] if row and int(row[1]) > 0 and float(row[5]) > 0 else []
    if len(rows) < 2:
        raise HardwareError(f"{len(rows)} rows with sizes and times", where=where, hint="run it from 8 B to 1 GB")
    if named not in _KINDS:
        message = f"which collective {named!r} is, is not known" if named else "the text does not name the collective"
        raise HardwareError(message, where=where, hint=f"say --collective {', '.join(_KINDS)}")
    seconds_of = {int(row[1]): float(row[5]) * 1e-6 for row in rows}
    return _KINDS[named], measured_row(_KINDS[named], ranks, seconds_of)


def _ranks(text: str, where: str) -> int:
    """Number of ranks that the lines `# Rank 0 ..` list.

    Raises:
        HardwareError: there are less than two, or one is missing.
    """
    numbers = {int(number) for number in re.findall(r"^#?\s*Rank\s+(\d{1,9})\s", text, re.M | re.ASCII)}
    if len(numbers) < 2:
        raise HardwareError("the lines `# Rank 0 ...` of two ranks and more are missing", where=where, hint="paste all")
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers):
        raise HardwareError(f"the line of rank {missing} is missing", where=where, hint="paste all")
    return len(numbers)


def measured_row(kind: Collective, ranks: int, seconds_of: Mapping[int, float]) -> dict[str, Any]:
    """A row for `measured` of a profile: `seconds = latency + traffic / bandwidth`; least squares of relative errors.

    Args:
        kind: the collective.
        ranks: number of ranks.
        seconds_of: by payload in bytes (that all ranks hold together, as nccl-tests count it), the seconds.

    Raises:
        HardwareError: times do not grow with sizes.
    """
    traffic = [moved_bytes(kind, float(size), ranks) for size in seconds_of]
    latency_s, byte_per_s = fitted_line(traffic, list(seconds_of.values()))
    return {
        "ranks": ranks,
        "latency": render(latency_s, Dimension.SECONDS, 3),
        "bandwidth": render(byte_per_s, Dimension.BYTE_RATE, 4),
    }


def fitted_line(traffic: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth with the least squared relative errors; the latency is at least half the shortest time.

    Raises:
        HardwareError: times do not grow with sizes.
    """
    fitted = len(set(traffic)) > 1
    slope, start = np.polyfit(traffic, seconds, 1, w=[1 / s for s in seconds]) if fitted else (0.0, 0.0)
    if slope <= 0:
        raise HardwareError("times do not grow with sizes", where="measured times", hint="measure 8 B to 1 GB")
    return max(float(start), min(seconds) / 2), 1 / float(slope)


def kind_of(text: str) -> str:
    """What a text is: "topology", "nccl", "calculon" or "astra"; "" for none of them."""
    patterns = {
        "nccl": r"algbw\s+busbw",
        "calculon": r'"mem1"\s*:',
        "astra": r"\bnpus_count\b|units-count",
    }
    kind = next((kind for kind, pattern in patterns.items() if re.search(pattern, text, re.M)), "")
    return "topology" if not kind and is_topology(text) else kind
