"""Random instances of the stage problem, small enough to enumerate."""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.hardware import Cluster, Curve, Device, Level
from planner.space import BlockCosts, Job
from planner.space.types import RepeatCosts, Selective, Tie

FLAT = Curve((1.0,), (1.0,))


def device(name: str, memory_bytes: int, reserve_bytes: int = 0) -> Device:
    return Device(name, memory_bytes, reserve_bytes, {"fp32": 1e12, "bf16": 1e12}, FLAT, 1e12, 1e12, FLAT, 0.0)


def cluster(
    sizes: tuple[int, ...],
    bandwidths: tuple[float, ...],
    latency_s: float = 0.0,
    memory_bytes: tuple[int, ...] = (10**12,),
    types: tuple[int, ...] | None = None,
) -> Cluster:
    """Levels innermost first, with the same bandwidth for a device and for a group."""
    levels = tuple(
        Level(f"level {k}", size, rate, rate, latency_s * (k + 1))
        for k, (size, rate) in enumerate(zip(sizes, bandwidths, strict=True))
    )
    count = int(np.prod(sizes)) if sizes else 1
    devices = tuple(device(f"type {t}", m) for t, m in enumerate(memory_bytes))
    return Cluster("test", "0" * 64, devices, np.array(types or (0,) * count, dtype=np.int64), levels)


def chain(
    forward_s: list[float] | np.ndarray,
    *,
    micro_batch: int = 1,
    elements: list[float] | float = 0.0,
    saved: list[float] | float = 0.0,
    checkpoint: list[float] | float = 0.0,
    boundary: list[float] | float = 0.0,
    workspace: list[float] | float = 0.0,
    update_s: list[float] | float = 0.0,
    speeds: tuple[float, ...] = (1.0,),
) -> BlockCosts:
    """Block costs from one number a block; backward takes twice the forward; type t runs `speeds[t]` times as fast."""
    forward = np.asarray(forward_s, dtype=float)
    n = len(forward)

    def each(values: list[float] | float, size: int = n) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, dtype=float), (size,)).copy()

    def table(values: list[float] | float) -> np.ndarray:
        column = each(values)
        return np.array([[column[i : j + 1].sum() if i <= j else 0.0 for j in range(n)] for i in range(n)])

    by_type = np.stack([forward / s for s in speeds])
    crossing = each(boundary, n + 1)
    crossing[0] = crossing[-1] = 0.0
    return BlockCosts(
        micro_batch=micro_batch,
        forward_s=by_type,
        backward_s=2 * by_type,
        update_s=np.stack([each(update_s)] * len(speeds)),
        parameter_elements=each(elements),
        saved_bytes=table(saved),
        checkpoint_bytes=table(checkpoint),
        boundary_bytes=crossing,
        gradient_boundary_bytes=crossing.copy(),
        workspace_bytes=each(workspace),
    )


def random_instance(
    seed: int, *, others: bool = False, zero: tuple[int, ...] = (0, 1)
) -> tuple[BlockCosts, Cluster, Job]:
    """A chain of 2 to 5 blocks on 1 to 6 devices: uneven blocks, levels, device types, memory from ample to hopeless.

    The first and the last block may share weights; with `others` any blocks may.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    sizes = [(1,), (2,), (4,), (6,), (2, 2), (3, 2), (2, 3)][int(rng.integers(7))]
    count = int(np.prod(sizes))
    type_count = int(rng.integers(1, 3))
    types = tuple(sorted(rng.integers(0, type_count, count).tolist())) if rng.random() < 0.5 else (0,) * count
    whole = lambda low, high, size=n: rng.integers(low, high, size).astype(float).tolist()  # noqa: E731
    costs = chain(
        rng.uniform(0.1, 3.0, n) if rng.random() < 0.7 else np.ones(n),
        micro_batch=int(rng.integers(1, 3)),
        elements=whole(0, 50),
        saved=whole(0, 200),
        checkpoint=whole(0, 40),
        boundary=whole(0, 30, n + 1),
        workspace=whole(0, 30),
        update_s=rng.uniform(0, 0.5, n).tolist(),
        speeds=(1.0, float(rng.uniform(0.3, 3.0)))[:type_count],
    )
    gradients = costs.boundary_bytes * (rng.random(n + 1) < 0.8)
    backward = costs.backward_s * rng.uniform(0.5, 1.5, costs.backward_s.shape)
    costs = BlockCosts(
        **{
            **{f: getattr(costs, f) for f in costs.__dataclass_fields__},
            "gradient_boundary_bytes": gradients,
            "backward_s": backward,
            "ties": _ties(rng, costs.parameter_elements, others) if rng.random() < 0.5 else (),
        }
    )
    base = float(rng.choice([300, 800, 2000, 10**6]))
    machine = cluster(
        sizes,
        tuple(float(b) for b in rng.choice([5.0, 30.0, 300.0, 1e6], len(sizes))),
        latency_s=float(rng.choice([0.0, 0.01, 0.3])),
        memory_bytes=tuple(int(base * rng.uniform(0.6, 1.4)) for _ in range(type_count)),
        types=types,
    )
    job = Job(
        schedules=("1f1b", "gpipe"),
        global_batch=costs.micro_batch * int(rng.choice([1, 2, 4, 6, 12])),
        precision=str(rng.choice(["fp32", "bf16"])),
        optimizer=str(rng.choice(["adam", "sgd"])),
        recompute=str(rng.choice(["never", "always", "auto", "auto"])),
        max_stages=int(rng.choice([0, 0, 0, 1, 2, 3])),
        overlap=float(rng.choice([0.0, 0.5, 1.0])),
        zero=zero,
    )
    if rng.random() < 0.5:
        repeated = rng.random(n) < 0.6
        kept = np.where(repeated, 0.0, np.asarray(whole(0, 60)))
        costs = dataclasses.replace(costs, repeated=repeated, kept_bytes=kept)
    return dataclasses.replace(costs, selective=random_modules(seed, costs)), machine, job


def ranged(values: np.ndarray) -> np.ndarray:
    """[n] to [n, n]: sums over i..j."""
    n = len(values)
    return np.array([[values[i : j + 1].sum() for j in range(n)] for i in range(n)])


@dataclasses.dataclass(frozen=True)
class Modules:
    """Prices of repeating the modules `a`, and `a` and `b`, by block; `c` may move to the host.

    Attributes:
        forward: [lists, n] part of a block's forward that is repeated.
        saved: [lists, n] bytes that each block still keeps.
        working: [n] bytes that a block brings back at a time.
        moving: [n] part of what a block still keeps that `c` alone keeps.
        costs: of the chain.
    """

    forward: np.ndarray
    saved: np.ndarray
    working: np.ndarray
    moving: np.ndarray
    costs: BlockCosts

    def present(self, kinds: tuple[str, ...], /) -> tuple[str, ...]:
        return tuple(kind for kind in kinds if kind == "c")

    def price(self, repeats: tuple[str, ...], offload: tuple[str, ...]) -> RepeatCosts:
        plain = np.diagonal(self.costs.saved_bytes), 0.0 * self.working, 0.0 * self.working
        lists = [plain, *((saved, part, self.working) for saved, part in zip(self.saved, self.forward, strict=True))]
        saved, part, working = lists[((), ("a",), ("a", "b")).index(repeats)]
        moved = np.rint(saved * self.moving) if offload else np.zeros_like(saved)
        return RepeatCosts(
            repeats, self.costs.forward_s * part, ranged(saved - moved), working, ranged(moved), moved.copy()
        )


def random_modules(seed: int, costs: BlockCosts) -> Selective | None:
    """For half of the chains that are short enough to enumerate all choices; the head, if any, repeats nothing."""
    rng, n = np.random.default_rng(seed + 10**6), len(costs.parameter_elements)
    if n > 3 or rng.random() < 0.5:
        return None
    parts = np.sort(rng.uniform(0, 1, (2, n)), axis=0)
    freed = np.sort(rng.uniform(0, 1, (2, n)), axis=0)
    if costs.repeated is not None:
        parts, freed = parts * costs.repeated, freed * costs.repeated
    own = np.diagonal(costs.saved_bytes)
    offered = (("a",), ("a", "b")) if n < 3 else (("a",),)
    working, moving = np.rint(own * freed[1] / 2), rng.uniform(0, 1, n)
    modules = Modules(parts, np.rint(own * (1 - freed)), working, moving, costs)
    return Selective(lambda: offered, modules.present, modules.price)


def _ties(rng: np.random.Generator, elements: np.ndarray, others: bool) -> tuple[Tie, ...]:
    """Some blocks share part of their parameters."""
    n = len(elements)
    found = []
    for blocks in ((0, n - 1), *(((0, 1), tuple(range(n)), (n - 2, n - 1)) if others else ())):
        most = int(min(elements[b] for b in blocks) / 3)
        if most and len(set(blocks)) > 1 and blocks not in [tie.blocks for tie in found]:
            found.append(Tie(float(rng.integers(1, most + 1)), blocks))
    return tuple(found)


def kept_on_a_stage(rng: np.random.Generator, blocks: int) -> tuple[str, int]:
    """A block and a stage that it could lie on: there are blocks enough for the stages before it, and behind it."""
    block, stage = int(rng.integers(blocks)), int(rng.integers(-2, 3))
    return f"layer{block}", min(max(stage, block - blocks), block)


def shared_instance(seed: int) -> tuple[BlockCosts, Cluster, Job]:
    """A random instance in which two ranks share every operator, and limits that the user may set."""
    costs, machine, job = random_instance(seed, zero=(0, 1, 2, 3))
    rng = np.random.default_rng(seed + 1)
    n = len(costs.parameter_elements)
    sizes = [(2,), (4,), (6,), (2, 2), (2, 3), (4, 2), (8,), (8, 2)][int(rng.integers(8))]
    machine = cluster(
        sizes,
        tuple(float(b) for b in rng.choice([5.0, 30.0, 300.0, 1e6], len(sizes))),
        latency_s=float(rng.choice([0.0, 0.01, 0.3])),
        memory_bytes=(int(rng.choice([300, 800, 2000, 10**6])),),
        types=(0,) * int(np.prod(sizes)),
    )
    first = {name: getattr(costs, name)[:1] for name in ("forward_s", "backward_s", "update_s")}
    costs = dataclasses.replace(
        costs,
        **first,
        ranks=2,
        sharding=3,
        label="2, sequence",
        names=tuple(f"layer{b}" for b in range(n)),
        step_s=rng.uniform(0, 0.3, n),
        gather_s=rng.uniform(0, 0.3, n + 1) * (costs.boundary_bytes > 0),
        gradient_gather_s=rng.uniform(0, 0.3, n + 1) * (costs.gradient_boundary_bytes > 0),
    )
    chance = rng.random(4)
    return (
        costs,
        machine,
        dataclasses.replace(
            job,
            pipeline_stages=(int(rng.integers(1, 4)), 2)[: 1 + int(rng.integers(2))] if chance[0] < 0.3 else (),
            data_parallel=(1, 2) if chance[1] < 0.2 else (),
            uniform=bool(chance[2] < 0.2),
            keep=(kept_on_a_stage(rng, n),) if chance[3] < 0.4 else (),
        ),
    )
