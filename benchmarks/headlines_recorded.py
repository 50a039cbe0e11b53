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

import numpy as np

from planner.api import load_graph
from planner.hardware import Cluster, load_cluster
from planner.space import Job, StageChoice
from planner.space.cuts import balanced, stages_of
from planner.space.pricer import Pricer
from planner.space.subspaces import Limits
from planner.systems import Proposal, System, SystemSetting, decide, get
from planner.systems.bapipe import pipelines
from planner.systems.pipedream import dealt
from planner.systems.runner import JudgedProposal, judge

RECORDED = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt": 32}
"""Samples of the minibatch that a profile's times are for."""


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


def bench_of(
    folder: Path, name: str, cluster: Cluster, minibatch: int, *, parts: tuple[int, ...] = (1,)
) -> SystemSetting:
    """A recorded network on all devices of a cluster, a minibatch each, or parts of one as micro-batches."""
    graph = load_graph(folder / f"{name}.graph.txt", dims={"batch": RECORDED[name]})
    devices = cluster.device_count
    sizes = tuple(minibatch // k for k in parts)
    job = Job(minibatch * devices, precision="fp32", optimizer="momentum", micro_batches=sizes, devices=devices)
    return SystemSetting(Pricer(graph, cluster, job), cluster, job)


def rings() -> System:
    """Data parallelism with rings over all devices."""
    return replace(get("data-parallel"), exchange="ring")


def rings_s(setting: SystemSetting) -> float:
    """Seconds of its step."""
    return decide(setting, rings()).iteration_s


def _judged_s(setting: SystemSetting, proposal: Proposal) -> float:
    """Seconds of a global batch, infinite where the proposal does not fit."""
    judged = judge(setting, proposal)
    return judged.iteration_s if isinstance(judged, JudgedProposal) else math.inf


def two_stages_s(setting: SystemSetting, minibatch: int) -> float:
    """Seconds of as many minibatches as there are devices, under the best cut into all devices but one, and one."""
    most, blocks = setting.devices - 1, setting.blocks
    cuts = ((StageChoice(0, cut, most), StageChoice(cut, blocks, 1)) for cut in range(1, blocks))
    return min(_judged_s(setting, dealt(setting, get("pipedream"), cut, minibatch, "pipedream")) for cut in cuts)


def straight_s(setting: SystemSetting, minibatch: int) -> float:
    """Seconds of as many minibatches as there are devices, in a line of balanced stages without replicas.

    Devices beyond the blocks of the network stay idle, as two did in the released configuration of GNMT-8 on twelve.
    """
    depth = min(setting.devices, setting.blocks)
    marks = balanced(setting.tables(minibatch).stage_s, [np.array(True)] * depth)
    if marks is None:
        return math.inf
    return _judged_s(setting, dealt(setting, get("pipedream"), stages_of(marks), minibatch, "pipedream"))


@dataclass(frozen=True, slots=True)
class Case:
    """A row of PipeDream's table: network, cluster, minibatch of a device, published plan and speed-up."""

    name: str
    text: str
    hardware: str
    nodes: int
    minibatch: int
    plan: str
    published: float

    def bench(self, folder: Path) -> SystemSetting:
        """The recorded network on the published cluster."""
        return bench_of(folder, self.name, load_cluster(self.hardware, nodes=self.nodes, stack="eager"), self.minibatch)

    def planned_s(self, bench: SystemSetting) -> float:
        """Seconds of as many minibatches as there are devices, by the published plan."""
        by_plan = {"15-1": two_stages_s, "straight": straight_s}
        return by_plan[self.plan](bench, self.minibatch) if self.plan in by_plan else rings_s(bench)


CASES = (
    Case("vgg16", "VGG-16, 4 x 4 V100, 10 Gb/s", "ethernet-10g", 4, 64, "15-1", 5.28),
    Case("vgg16", "VGG-16, 2 x 8 V100, 25 Gb/s (recalled)", "p3.16xlarge", 2, 64, "15-1", 2.98),
    Case("alexnet", "AlexNet, 4 x 4 V100, 10 Gb/s", "ethernet-10g", 4, 256, "15-1", 4.92),
    Case("alexnet", "AlexNet, 2 x 8 V100, 25 Gb/s (recalled)", "p3.16xlarge", 2, 256, "15-1", 2.04),
    Case("resnet50", "ResNet-50, 4 x 4 V100, 10 Gb/s", "ethernet-10g", 4, 128, "16 replicas", 1.0),
    Case("gnmt", "GNMT-8, 4 V100 on PCIe (recalled)", "ethernet-10g", 1, 64, "straight", 1.5),
    Case("gnmt", "GNMT-8, 3 x 4 V100, 10 Gb/s (recalled)", "ethernet-10g", 3, 64, "straight", 2.95),
    Case("gnmt", "GNMT-8, 2 x 8 V100, 25 Gb/s", "p3.16xlarge", 2, 64, "16 replicas", 1.0),
)


def pipedream(folder: Path) -> Iterator[Headline]:
    """Speed-up over data parallelism: the published plan played, and the plan that is found."""
    for case in CASES:
        bench = case.bench(folder)
        data_s = rings_s(bench)
        ours = data_s / case.planned_s(bench)
        yield Headline("PipeDream", case.text, case.published, ours, f"the published plan: {case.plan}")
        found = decide(bench, get("pipedream"))
        shape = found.plan.partition(", micro-batch")[0]
        if shape != case.plan:
            ours = data_s / found.iteration_s
            yield Headline("PipeDream", case.text, case.published, ours, f"the plan found here: {shape}")


def bapipe_benches(folder: Path) -> Iterator[tuple[str, str, int, SystemSetting]]:
    """Network, where its four devices stand, minibatch of a device, and the bench. The publication names none."""
    clusters = (("on PCIe", load_cluster("v100-pcie-4")), ("over 25 Gb/s", load_cluster("ethernet-25g", nodes=4)))
    for where, cluster in clusters:
        for name in ("vgg16", "resnet50", "gnmt"):
            for minibatch in (64, 32, 16, 8):
                parts = tuple(k for k in (1, 2, 4, 8, 16) if k <= minibatch)
                yield name, where, minibatch, bench_of(folder, name, cluster, minibatch, parts=parts)


def balanced_pipeline(setting: SystemSetting) -> JudgedProposal:
    """BaPipe's fastest pipeline over all devices, whether data parallelism is faster or not."""
    limits = get("bapipe").limits or Limits()
    every = (judge(setting, Proposal((c,))) for size in setting.sizes for c in pipelines(setting, limits, size))
    return min(
        (judged for judged in every if isinstance(judged, JudgedProposal)), key=lambda judged: judged.iteration_s
    )


def bapipe(folder: Path) -> Iterator[Headline]:
    """BaPipe, which takes data parallelism where that is faster, over data parallelism on four devices."""
    for name, where, minibatch, bench in bapipe_benches(folder):
        if minibatch in (64, 8):
            ratio = rings_s(bench) / balanced_pipeline(bench).iteration_s
            what = f"{name}, 4 devices {where}, {minibatch} samples a device (published: up to 3.2)"
            assumed = f"the pipeline: {ratio:.2f}" + ("; BaPipe takes data parallelism" if ratio < 1 else "")
            yield Headline("BaPipe", what, 3.2, max(1.0, ratio), assumed)


def byteps_benches(folder: Path, machines: int) -> Iterator[tuple[str, float, SystemSetting]]:
    """Network, published gain over rings, and the bench of machines of 8 V100 on 20 Gb/s, 64 samples a device."""
    cluster = load_cluster("p3.16xlarge", nodes=machines)
    inner, outer = cluster.levels
    narrow = replace(cluster, levels=(inner, replace(outer, byte_per_s=2.5e9, device_byte_per_s=2.5e9)))
    for name, published in (("vgg16", 2.0), ("resnet50", 1.44)):
        yield name, published, bench_of(folder, name, narrow, 64)


def byteps(folder: Path) -> Iterator[Headline]:
    """BytePS with as many CPU machines as GPU machines over rings, on 20 Gb/s."""
    for name, published, bench in byteps_benches(folder, 4):
        ours = rings_s(bench) / decide(bench, get("byteps:cpu_machines=n")).iteration_s
        assumed = "4 machines of 8 V100 with NVLink, as many CPU machines; the number is not published with it"
        yield Headline("BytePS", f"{name} over rings, 20 Gb/s TCP", published, ours, assumed)
