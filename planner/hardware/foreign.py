"""Imports what tools on a machine say of it: `nvidia-smi topo -m`, nccl-tests; which tool wrote a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import HardwareError
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.hardware.write import ClusterSketch, LinkSketch
from planner.units import Dimension, render

NVLINK_BYTE_PER_S: Mapping[str, float] = {
    "p100": 20e9, "v100": 25e9, "a100": 25e9, "a800": 25e9, "h100": 25e9, "h200": 25e9, "h800": 25e9, "b200": 50e9,
    "b300": 50e9, "gb200": 50e9, "gb300": 50e9,
}  # fmt: skip
"""Bandwidth of one NVLink in one direction, by generation of device (NVIDIA's data sheets)."""

PCIE_BYTE_PER_S = 32e9
"""Assumed PCIe bandwidth of a device in one direction: generation 4 with 16 lanes."""

_PCIE = re.compile(r"^(PIX|PXB|PHB|NODE|SYS)$")
_SMI = "nvidia-smi topo -m"


def from_topology(text: str, *, name: str, device: str) -> ClusterSketch:
    """A node from the output of `nvidia-smi topo -m`.

    GPUs joined by NVLinks are a tier; groups of these are joined over PCIe. If some pairs of a group have no NVLink of
    their own, the group is a mesh with the bandwidth of single wires. Network cards are left out, as the matrix does
    not say their speed.

    Args:
        text: the matrix, with or without its legend.
        name: of the cluster.
        device: name of the device, from which the speed of its NVLinks follows.

    Raises:
        HardwareError: the text has no matrix of GPUs, or the groups differ in size.
    """
    links = _matrix(text)
    count = len(links)
    groups = _groups(links)
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        raise HardwareError(f"NVLinks join groups of {sizes} GPUs", where=_SMI, hint="describe the node with --inside")
    inside: list[LinkSketch] = []
    if sizes[0] > 1:
        inside.append(_nvlink(links, groups, device))
    if len(groups) > 1:
        inside.append(LinkSketch("pcie", PCIE_BYTE_PER_S, size=len(groups), source=_SMI))
    about = f"{count} GPUs as {_SMI} shows them"
    return ClusterSketch(name, device, tuple(inside), about=about)


def _matrix(text: str) -> list[list[int]]:
    """Number of NVLinks between each pair of GPUs, 0 for PCIe.

    Raises:
        HardwareError: the text has no square matrix.
    """
    rows: list[list[str]] = []
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and not (len(words) > 1 and re.fullmatch(r"GPU\d+", words[1])):
            rows.append(words[1:])
    count = len(rows)
    if count < 2 or any(len(row) < count or row[i] != "X" for i, row in enumerate(rows)):
        raise HardwareError(f"no matrix of GPUs in the {count} lines of GPUs", where=_SMI, hint="paste all of it")
    links = []
    for row in rows:
        cells = [re.fullmatch(r"NV(\d+)", cell) for cell in row[:count]]
        for cell, match in zip(row, cells, strict=False):
            if match is None and cell != "X" and not _PCIE.match(cell):
                raise HardwareError(f"{cell!r} is no link between GPUs", where=_SMI, hint="paste the matrix as it is")
        links.append([int(match[1]) if match else 0 for match in cells])
    if any(links[i][j] != links[j][i] for i in range(count) for j in range(i)):
        raise HardwareError("the matrix is not symmetric", where=_SMI, hint="paste all of it")
    return links


def _groups(links: Sequence[Sequence[int]]) -> list[set[int]]:
    """Connected components of GPUs over NVLinks."""
    import networkx

    return [set(group) for group in networkx.connected_components(networkx.from_numpy_array(np.asarray(links)))]


def _nvlink(links: Sequence[Sequence[int]], groups: Sequence[set[int]], device: str) -> LinkSketch:
    """The tier of NVLinks: all links of a GPU behind a switch, or a mesh where pairs have their own wires."""
    link_rate = next((rate for kind, rate in NVLINK_BYTE_PER_S.items() if kind in device.lower()), 25e9)
    size = len(groups[0])
    pairs = [links[i][j] for group in groups for i in group for j in group if i != j]
    wired = min(pairs) == 0 or len(set(pairs)) > 1
    count = min(sum(row) for row in links) if wired else pairs[0]
    peer = link_rate * min(n for n in pairs if n) if wired else None
    return LinkSketch("nvlink", link_rate, count, size, peer_byte_per_s=peer, source=f"{_SMI}, NV{count} a GPU")


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
    """Which tool wrote a text: "topology", "nccl", "calculon" or "astra"; "" for none of them."""
    patterns = {
        "nccl": r"algbw\s+busbw",
        "topology": r"^\S*GPU0\S*\s+X\b",
        "calculon": r'"mem1"\s*:',
        "astra": r"\bnpus_count\b|units-count",
    }
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, text, re.M)), "")
