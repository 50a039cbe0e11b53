"""Imports descriptions of machines from other tools: nccl-tests, Calculon, ASTRA-sim (topologies: `topology.py`)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import HardwareError
from planner.hardware.tiers import moved_bytes
from planner.hardware.topology_text import is_topology
from planner.hardware.types import Collective
from planner.hardware.write import ClusterSketch, LinkSketch
from planner.units import Dimension, render

_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+\w+(?:\s+([a-z]\w*))?(?:\s+(-?\d+))?\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s")
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_gather": Collective.ALL_GATHER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
}
"""Collectives by the name of the test, before `_perf`."""


def from_nccl_tests(text: str, *, collective: str = "") -> tuple[Collective, dict[str, Any]]:
    """A measured collective from the output of nccl-tests: `seconds = latency + traffic / bandwidth`.

    Latency and bandwidth are fitted to the out-of-place times by least squares of relative errors.

    Args:
        text: output of a test, with its heading.
        collective: name of the collective, if the text does not name the test: `all_reduce`, `all_gather`, ...

    Returns:
        The collective, and its row for `measured` of a profile.

    Raises:
        HardwareError: the text has no table or no number of ranks, or the collective is not known.
    """
    where = "nccl-tests"
    ranks = len(re.findall(r"^#?\s*Rank\s+\d+\s", text, re.M))
    if ranks < 2:
        raise HardwareError("the lines `# Rank 0 ...` of two ranks and more are missing", where=where, hint="paste all")
    named = collective or next(iter(re.findall(r"(\w+?)_perf", text)), "")
    rows = [match for match in map(_ROW.match, text.splitlines()) if match and int(match[1]) > 0]
    rows = [row for row in rows if float(row[5]) > 0]
    if len(rows) < 2:
        raise HardwareError(f"{len(rows)} rows with sizes and times", where=where, hint="run it from 8 B to 1 GB")
    if named not in _KINDS:
        message = f"which collective {named!r} is, is not known" if named else "the text does not name the collective"
        raise HardwareError(message, where=where, hint=f"say --collective {', '.join(_KINDS)}")
    seconds_of = {int(row[1]): float(row[5]) * 1e-6 for row in rows}
    return _KINDS[named], measured_row(_KINDS[named], ranks, seconds_of)


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


_CALCULON_FORMATS = {"float8": "fp8", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "tf32": "tf32"}


def from_calculon(text: str, *, name: str) -> ClusterSketch:
    """A cluster from a system file of Calculon (Isaev et al. 2023), with its device written out.

    Networks are innermost first; their bandwidth is that of one processor in one direction, in GB/s; the last one joins
    nodes.

    Raises:
        HardwareError: the text is no such file, or a figure is missing.
    """
    where = "Calculon system"
    data = _mapping(json.loads, text, where)
    try:
        matrix, memory, networks = data["matrix"], data["mem1"], data["networks"]
        rates = {_CALCULON_FORMATS.get(k, k): f"{v['tflops']:g} TFLOP/s" for k, v in matrix.items()}
        held = memory["GiB"] if memory["GiB"] > 1e6 else memory["GiB"] * 2**30
        body: dict[str, Any] = {
            "about": f"processor of the Calculon system {name}",
            "memory": render(float(held), Dimension.BYTES),
            "memory_bandwidth": f"{memory['GBps']:g} GB/s",
            "matrix": rates,
            "vector": f"{next(iter(data['vector'].values()))['tflops']:g} TFLOP/s",
        }
        for key, curve, unit in (
            ("matrix_efficiency", next(iter(matrix.values())).get("gflops_efficiency"), "GFLOP"),
            ("memory_efficiency", memory.get("MB_efficiency"), "MB"),
        ):
            if curve:
                body[key] = {"points": _curve(curve, unit), "source": where}
        links, below = [], 1
        for i, n in enumerate(networks):
            size, rate = max(1, int(n["size"]) // below), float(n["bandwidth"]) * 1e9
            links.append(LinkSketch(f"network{i}", rate, 1, size, n["latency"], n["efficiency"], source=where))
            below *= size
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise HardwareError(
            f"{type(error).__name__} {error}", where=where, hint="give a file of its `systems`"
        ) from error
    return _tiers(name, f"{name}-device", links, where, nodes=1, device_types={f"{name}-device": body})


def _curve(points: Any, unit: str) -> dict[str, str]:  # noqa: ANN401
    """An efficiency curve; a value at size 0 is moved to a thousandth of the next size."""
    listed = points.items() if isinstance(points, dict) else points
    pairs = sorted((float(size), float(share)) for size, share in listed)
    if pairs[0][0] == 0:
        after = pairs[1][0] if len(pairs) > 1 else 1.0
        pairs[0] = (after / 1000, pairs[0][1])
    return {f"{size:g} {unit}": f"{share * 100:g}%" for size, share in pairs}


def from_astra(text: str, *, name: str, device: str) -> ClusterSketch:
    """A cluster from a network of ASTRA-sim's analytical backend: YAML, or JSON of older versions.

    Dimensions are innermost first. The bandwidth is of one link and direction in GB/s: a ring has two links a device, a
    full mesh one to each other device, a switch one; latencies are in nanoseconds.

    Raises:
        HardwareError: the text is no such file, or its lists differ in length.
    """
    where = "ASTRA-sim network"
    from ruamel.yaml import YAML

    data = _mapping(YAML(typ="safe").load, text, where)
    try:
        shapes = data.get("topology") or data["topologies-per-dim"]
        counts = data.get("npus_count") or data["units-count"]
        rates = data.get("bandwidth") or data["link-bandwidth"]
        latencies = data.get("latency") or data["link-latency"]
        numbers = data.get("links-count")
        links = [
            _dimension(i, *figures, numbers[i] if numbers else None, where)
            for i, figures in enumerate(zip(shapes, counts, rates, latencies, strict=True))
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "give topology, npus_count, bandwidth and latency, each for every dimension"
        raise HardwareError(f"{type(error).__name__} {error}", where=where, hint=hint) from error
    return _tiers(name, device, links, where, nodes=links[-1].size or 1)


def _dimension(
    index: int, shape: str, count: int, gb_per_s: float, latency_ns: float, links: int | None, where: str
) -> LinkSketch:
    """One dimension of a topology."""
    links_of = {"Ring": 2 if count > 2 else 1, "FullyConnected": count - 1, "Switch": 1}
    if shape not in links_of:
        raise ValueError(f"topology {shape!r} is not one of {', '.join(links_of)}")
    wired = shape != "Switch"
    rate = float(gb_per_s) * 1e9
    peer = rate * (links / links_of[shape] if links else 1) if wired else None
    ports = links or links_of[shape]
    return LinkSketch(f"dim{index + 1}", rate, int(ports), int(count), float(latency_ns) * 1e-9, 1.0, peer, where)


def _tiers(
    name: str,
    device: str,
    links: Sequence[LinkSketch],
    where: str,
    *,
    nodes: int,
    device_types: Mapping[str, Any] | None = None,
) -> ClusterSketch:
    """A cluster whose last tier joins nodes, if there are several tiers; figures are those of one device."""
    *inside, last = links
    about = f"from a file of the kind {where}"
    if not inside:
        return ClusterSketch(name, device, (last,), device_types=device_types or {}, about=about)
    ports = last.ports * math.prod(link.size or 1 for link in inside)
    outer = dataclasses.replace(last, ports=ports, size=None, peer_byte_per_s=None)
    return ClusterSketch(name, device, tuple(inside), (outer,), nodes, device_types or {}, about)


def _mapping(read: Callable[[str], Any], text: str, where: str) -> dict[str, Any]:
    """The mapping that a reader makes of a text.

    Raises:
        HardwareError: the text cannot be read, or is no mapping.
    """
    from ruamel.yaml.error import YAMLError

    try:
        data = read(text)
    except (ValueError, YAMLError) as error:
        message = f"cannot be read: {str(error).splitlines()[0]}"
        raise HardwareError(message, where=where, hint="give the file as it is") from error
    if not isinstance(data, dict):
        raise HardwareError("not a mapping of keys to values", where=where, hint="give the file as it is")
    return data


def kind_of(text: str) -> str:
    """What a text is: "topology", "nccl", "calculon" or "astra"; "" for none of them."""
    patterns = {
        "nccl": r"algbw\s+busbw",
        "calculon": r'"mem1"\s*:',
        "astra": r"\bnpus_count\b|units-count",
    }
    kind = next((kind for kind, pattern in patterns.items() if re.search(pattern, text, re.M)), "")
    return "topology" if not kind and is_topology(text) else kind
