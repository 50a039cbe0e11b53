"""What the headlines that were played are made of, and what a published figure would ask for.

`python -m benchmarks.headlines_parts FOLDER` (FOLDER: PipeDream's published profiles) prints the tables. For each row of
PipeDream: a minibatch's work on one device, the ring alone, the step of data parallelism with what of the ring is not
hidden, and a round of the published plan, which is as many minibatches as there are devices. Were the round right, the
published speed-up asks for a step of `published * round`, and its ring for a rate; were the step right, for a round of
`step / published`.
"""  # noqa: E501

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.headlines_recorded import (
    CASES,
    Case,
    balanced_pipeline,
    bapipe_benches,
    byteps_benches,
    rings,
    rings_s,
)
from planner.exchange import Exchange
from planner.space.terms import elements_of
from planner.systems import System, SystemSetting, get
from planner.systems.proposals import data_parallel
from planner.systems.runner import idle_shares


@dataclass(frozen=True, slots=True)
class Parts:
    """One row, in seconds.

    Attributes:
        devices: of the cluster.
        ring_bytes: that a device sends for an all-reduce of all gradients.
        work_s: a minibatch, forward, backward and update, on one device.
        ring_s: the exchange alone.
        exposed_s: what of it the backward does not hide.
        step_s: data parallelism.
        round_s: as many minibatches as there are devices, by the published plan.
        published: the speed-up.
    """

    devices: int
    ring_bytes: float
    work_s: float
    ring_s: float
    exposed_s: float
    step_s: float
    round_s: float
    published: float

    @property
    def asked_s(self) -> float:
        """The step of data parallelism at which the speed-up would be the published one."""
        return self.published * self.round_s

    @property
    def asked_byte_per_s(self) -> float:
        """The ring's rate in such a step, as much of it hidden as now."""
        return self.ring_bytes / (self.ring_s + self.asked_s - self.step_s)

    @property
    def rate(self) -> float:
        """The ring's rate now."""
        return self.ring_bytes / self.ring_s


def _exchanged(bench: SystemSetting, system: System, minibatch: int) -> tuple[Exchange, float]:
    """The exchange of data parallelism with minibatches of a size, and seconds of its step."""
    configuration = next(c for c in data_parallel(bench, system.scheme) if c.micro_batch == minibatch)
    return bench.exchange(configuration).exchange, bench.evaluate(configuration).iteration_s


def _data_parallel(bench: SystemSetting, minibatch: int) -> tuple[float, float, float, float, float]:
    """Bytes of a ring, work, ring alone, exposed, step."""
    exchange, step_s = _exchanged(bench, rings(), minibatch)
    costs = bench.costs(minibatch)
    gradients = elements_of(costs, range(bench.blocks))[0] * bench.precision.gradient_bytes
    sent = 2 * (bench.devices - 1) / bench.devices * gradients
    return sent, step_s - exchange.exposed_s, exchange.seconds, exchange.exposed_s, step_s


def parts_of(case: Case, folder: Path) -> Parts:
    """The parts of one row of PipeDream's table."""
    bench = case.bench(folder)
    return Parts(bench.devices, *_data_parallel(bench, case.minibatch), case.planned_s(bench), case.published)


def pipedream(folder: Path) -> Iterator[str]:
    """PipeDream's rows."""
    yield "| PipeDream | work | ring alone | DP step (not hidden) | round of the plan | ours | published | asks for a step of | ring at GB/s, ours | or a round of |"  # noqa: E501
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case in CASES:
        p = parts_of(case, folder)
        cells = [
            f"{case.text}: {case.plan}",
            _ms(p.work_s),
            _ms(p.ring_s),
            f"{_ms(p.step_s)} ({_ms(p.exposed_s)})",
            _ms(p.round_s),
            f"{p.step_s / p.round_s:.2f}",
            f"{p.published:.2f}",
            _ms(p.asked_s),
            f"{p.asked_byte_per_s / 1e9:.2f}, {p.rate / 1e9:.2f}",
            _ms(p.step_s / p.published),
        ]
        yield f"| {' | '.join(cells)} |"


def bapipe(folder: Path) -> Iterator[str]:
    """BaPipe's pipelines and data parallelism by minibatch."""
    yield "| BaPipe, 4 V100 | samples a device | work | ring alone | DP step | pipeline (bubble, micro-batch) | pipeline over DP | at most |"  # noqa: E501
    yield "|---|---|---|---|---|---|---|---|"
    for name, where, minibatch, bench in bapipe_benches(folder):
        _, work_s, ring_s, _, step_s = _data_parallel(bench, minibatch)
        found = balanced_pipeline(bench)
        cells = [
            f"{name} {where}",
            str(minibatch),
            _ms(work_s),
            _ms(ring_s),
            _ms(step_s),
            f"{_ms(found.iteration_s)} ({idle_shares(found)[0]:.0%}, {found.proposal.parts[0].micro_batch})",
            f"{step_s / found.iteration_s:.2f}",
            f"{step_s / work_s:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def byteps(folder: Path) -> Iterator[str]:
    """BytePS's gain by the number of machines."""
    yield "| BytePS, 20 Gb/s, as many CPU machines | work | ring alone | DP step | exchange alone | step | ours | published | asks for a ring at GB/s, ours |"  # noqa: E501
    yield "|---|---|---|---|---|---|---|---|---|"
    for machines in (2, 4, 8):
        for name, published, bench in byteps_benches(folder, machines):
            sent, work_s, ring_s, _, step_s = _data_parallel(bench, 64)
            served, served_s = _exchanged(bench, get("byteps:cpu_machines=n"), 64)
            asked = sent / (ring_s + published * served_s - step_s)
            cells = [
                f"{name}, {machines} machines of 8 V100",
                *map(_ms, (work_s, ring_s, step_s, served.seconds, served_s)),
                f"{rings_s(bench) / served_s:.2f}",
                f"{published:.2f}",
                f"{asked / 1e9:.2f}, {sent / ring_s / 1e9:.2f}",
            ]
            yield f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def tables(folder: Path) -> str:
    """Markdown: the three tables."""
    return "\n\n".join("\n".join(part(folder)) for part in (pipedream, bapipe, byteps))


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of PipeDream's profiles")
    print(tables(parser.parse_args().folder))


if __name__ == "__main__":
    main()
