"""Which machine and device each rank of a framework runs on, in the files of launchers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from planner.plans import Plan


def host_files(plan: Plan, order: Sequence[int]) -> Mapping[str, str]:
    """Files for launchers by name; none where one machine runs the ranks in the plan's order.

    `hosts.csv` has for each rank of the framework the plan's rank, the machine and the device on it; `slurm.hosts` a
    machine a rank (`SLURM_HOSTFILE`); `hostfile` a machine a line with its slots (OpenMPI, DeepSpeed), where every
    machine's ranks follow each other.

    Args:
        plan: the plan.
        order: the plan's rank of each rank of the framework.
    """
    per, straight = plan.hardware.machine_devices, tuple(order) == tuple(range(len(order)))
    if straight and len(order) <= per:
        return {}
    nodes = [rank // per for rank in order]
    rows = [f"{at},{rank},node{rank // per},{rank % per}" for at, rank in enumerate(order)]
    files = {
        "hosts.csv": "\n".join(["rank,plan_rank,machine,device", *rows]) + "\n",
        "slurm.hosts": "".join(f"node{node}\n" for node in nodes),
    }
    runs = _runs(nodes)
    if len(runs) == len(set(nodes)):
        files["hostfile"] = "".join(f"node{node} slots={count}\n" for node, count in runs)
    return files


def _runs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal machines: (machine, length)."""
    return [(node, sum(1 for _ in run)) for node, run in itertools.groupby(nodes)]


def host_lines(plan: Plan, order: Sequence[int]) -> Iterator[str]:
    """How to start the ranks where the plan assumed them, one sentence a launcher."""
    per, below = plan.hardware.machine_devices, 1
    near = []
    for level in plan.hardware.levels:
        below *= level.size
        if per < below and level.size > 1:
            near.append(f"{below // per} in a row share {level.name}")
    shared = f" ({', '.join(near)})" if near else ""
    yield f"`node0`, `node1` .. stand for the machines by their places in the network{shared}."
    yield f"Slurm: `SLURM_HOSTFILE=slurm.hosts srun --distribution=arbitrary --ntasks-per-node {per}`."
    nodes = [node for node, _ in _runs([rank // per for rank in order])]
    if len(nodes) > len(set(nodes)):
        yield (
            "torchrun and host files cannot place these ranks, since those of a machine do not follow each other: "
            "use Slurm, or rank by rank what `hosts.csv` says."
        )
        return
    yield "OpenMPI, DeepSpeed: `--hostfile hostfile`."
    own = [[rank % per for rank in order if rank // per == node] for node in nodes]
    named = ", ".join(f"`node{node}`" for node in nodes[:4]) + " .." * (len(nodes) > 4)
    yield f"torchrun: `NODE_RANK` 0, 1 .. on {named}."
    if any(devices != sorted(devices) for devices in own):
        alike = all(devices == own[0] for devices in own)
        visible = f"`CUDA_VISIBLE_DEVICES={','.join(map(str, own[0]))}`" if alike else "`CUDA_VISIBLE_DEVICES`"
        yield f"Devices of a machine are not in the order of its ranks: set {visible} as `hosts.csv` has them."
