"""Headline figures from layer times that were recorded on a V100 (PipeDream's profiles) and the published clusters.

Every system is played as `shardplan compare` plays it: exchanges through the ports of the hardware profile behind the
backward, pipelines in their steady pace, transfers on the links that they take. Minibatches are those of the publication
(64 a device for VGG-16 and GNMT, 128 for ResNet-50, 256 for AlexNet). Data parallelism is what these publications compared
with: rings over all devices in buckets, as NCCL had them then.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.headline import Headline
from planner.api import Pricer, load_graph
from planner.hardware import Cluster, load_cluster
from planner.simulate import Transfers
from planner.space.types import Job, StageChoice
from planner.systems import Point, get
from planner.systems._bench import Bench
from planner.systems._exchanged import by_exchange
from planner.systems._play import play
from planner.systems._published import _bapipe_at, by_pipedream

RECORDED = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt": 32}
"""Samples of the minibatch that a profile's times are for."""


def bench_of(folder: Path, name: str, cluster: Cluster, minibatch: int, *, parts: tuple[int, ...] = (1,)) -> Bench:
    """A recorded network on all devices of a cluster, a minibatch each, or parts of one as micro-batches."""
    graph = load_graph(folder / f"{name}.graph.txt", dims={"batch": RECORDED[name]})
    devices = cluster.device_count
    sizes = tuple(minibatch // k for k in parts)
    job = Job(minibatch * devices, precision="fp32", optimizer="momentum", micro_batches=sizes, devices=devices)
    return Bench(Pricer(graph, cluster, job), cluster, job)


def rings_s(bench: Bench) -> float:
    """Seconds a step of data parallelism with rings over all devices."""
    return by_exchange(bench, replace(get("data-parallel"), sync="ring")).iteration_s


def two_stages_s(bench: Bench, minibatch: int) -> float:
    """Seconds of as many minibatches as there are devices, under the best cut into all devices but one, and one."""
    times = []
    for cut in range(1, bench.blocks):
        stages = (StageChoice(0, cut, bench.devices - 1), StageChoice(cut, bench.blocks, 1))
        point = Point(stages, 1, minibatch, bench.devices, "pipedream", played=8 * (bench.devices - 1))
        played = play(bench, point, Transfers.OVERLAPPED)
        times.append(played.iteration_s if played.feasible else math.inf)
    return min(times)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    text: str
    hardware: str
    nodes: int
    minibatch: int
    published: float


CASES = (
    _Case("vgg16", "VGG-16, 4 x 4 V100, 10 Gb/s (15-1)", "ethernet-10g", 4, 64, 5.28),
    _Case("vgg16", "VGG-16, 2 x 8 V100, 25 Gb/s (15-1, recalled)", "p3.16xlarge", 2, 64, 2.98),
    _Case("alexnet", "AlexNet, 4 x 4 V100, 10 Gb/s (15-1)", "ethernet-10g", 4, 256, 4.92),
    _Case("alexnet", "AlexNet, 2 x 8 V100, 25 Gb/s (15-1, recalled)", "p3.16xlarge", 2, 256, 2.04),
    _Case("resnet50", "ResNet-50, 4 x 4 V100, 10 Gb/s (16)", "ethernet-10g", 4, 128, 1.0),
    _Case("gnmt", "GNMT-8, 4 V100 on PCIe (straight, recalled)", "ethernet-10g", 1, 64, 1.5),
    _Case("gnmt", "GNMT-8, 3 x 4 V100, 10 Gb/s (straight, recalled)", "ethernet-10g", 3, 64, 2.95),
    _Case("gnmt", "GNMT-8, 2 x 8 V100, 25 Gb/s (16)", "p3.16xlarge", 2, 64, 1.0),
)


def pipedream(folder: Path) -> Iterator[Headline]:
    """Speed-up over data parallelism: the published plan where it is 15-1, and the plan that is found."""
    for case in CASES:
        bench = bench_of(folder, case.name, load_cluster(case.hardware, nodes=case.nodes), case.minibatch)
        data_s = rings_s(bench)
        if "15-1" in case.text:
            ours = data_s / two_stages_s(bench, case.minibatch)
            yield Headline("PipeDream", case.text, case.published, ours, "15-1, its best cut")
        found = by_pipedream(bench, get("pipedream"))
        shape = found.plan.partition(", micro-batch")[0]
        yield Headline("PipeDream", case.text, case.published, data_s / found.iteration_s, f"plan found: {shape}")


def bapipe(folder: Path) -> Iterator[Headline]:
    """Balanced pipeline over data parallelism on four devices."""
    clusters = (("on PCIe", load_cluster("v100-pcie-4")), ("over 25 Gb/s", load_cluster("ethernet-25g", nodes=4)))
    for where, cluster in clusters:
        for name in ("vgg16", "resnet50", "gnmt"):
            bench = bench_of(folder, name, cluster, 64, parts=(1, 2, 4, 8, 16))
            data_s = by_exchange(bench, get("data-parallel")).iteration_s
            played = [p for size in bench.sizes for p in _bapipe_at(bench, size, math.inf) if p.feasible]
            ours = data_s / min(p.iteration_s for p in played)
            assumed = "pipeline alone; BaPipe itself takes data parallelism where that is faster"
            yield Headline("BaPipe", f"{name}, 4 devices {where} (published: up to 3.2)", 3.2, ours, assumed)


def byteps(folder: Path) -> Iterator[Headline]:
    """BytePS with as many CPU machines as GPU machines over rings, on 20 Gb/s."""
    cluster = load_cluster("p3.16xlarge", nodes=4)
    inner, outer = cluster.levels
    narrow = replace(cluster, levels=(inner, replace(outer, byte_per_s=2.5e9, device_byte_per_s=2.5e9)))
    for name, text, published in (("vgg16", "VGG-16", 2.0), ("resnet50", "ResNet-50", 1.44)):
        bench = bench_of(folder, name, narrow, 64)
        ours = rings_s(bench) / by_exchange(bench, get("byteps:cpu_machines=n")).iteration_s
        assumed = "4 machines of 8 V100 with NVLink, as many CPU machines; the number is not published with it"
        yield Headline("BytePS", f"{text} over rings, 20 Gb/s TCP", published, ours, assumed)
