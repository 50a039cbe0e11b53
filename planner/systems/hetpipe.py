"""HetPipe: virtual workers of unlike devices, waves of mini-batches, bounded distance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.errors import InfeasibleError
from planner.exchange import Traffic, fabric_of
from planner.exchange.fabric import spread_traffic
from planner.exchange.formulas import wsp_staleness
from planner.plans.words import words_of
from planner.solvers.layouts import uneven_share
from planner.solvers.partition.cluster_chains import Workers, allocations, dealt, kinds, own_cut
from planner.space import Configuration, lay_workers
from planner.space.cuts import stages_of
from planner.space.subspaces import Limits
from planner.systems import Semantics, System, register
from planner.systems.types import Proposal, Setting

MOST_CONCURRENT = 16
"""Mini-batches in a virtual worker's pipeline at the most, and never more than twice its devices."""

UNLIKE = "each kind of virtual worker has a cut of its own, a plan file one cut for all virtual workers"


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """By allocation and size of mini-batches, the cuts with the most concurrent mini-batches with which one fits."""
    costs, wanted = setting.costs(setting.sizes[0]), system.options.get("policy", "")
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1).tolist()
    policies = allocations(setting.cluster, setting.devices, work_s)
    if wanted and wanted not in policies:
        known = ", ".join(policies) or "none"
        raise InfeasibleError(f"allocation policy {wanted} does not come out on this pool (possible: {known})")
    found = False
    chosen = {name: own for name, own in policies.items() if name == wanted or not wanted}
    for policy, workers in chosen.items():
        for size in setting.sizes:
            for own in _of_waves(setting, system, policy, workers, size):
                found |= bool(own)
                yield from own
    if not found:
        raise InfeasibleError(_crowded(setting, list(chosen.values())))


def _of_waves(
    setting: Setting, system: System, policy: str, workers: Workers, size: int
) -> Iterator[Sequence[Proposal]]:
    """Cuts with the most concurrent mini-batches: where kinds are unlike, one for each of them; and one cut for all."""
    for alone in (True, False) if len(kinds(setting.cluster, workers)) > 1 else (False,):
        for concurrent, each in _waves(setting, workers, size):
            wave = _Wave(setting, system, workers, size, concurrent, each)
            parts = wave.by_kind() if alone else wave.alike()
            if parts:
                yield [wave.proposal(policy, own) for own in parts]
                break


class _Wave:
    """Virtual workers with so many concurrent mini-batches of a size, and so many each in an iteration."""

    def __init__(
        self, setting: Setting, system: System, workers: Workers, size: int, concurrent: int, each: int
    ) -> None:
        self.setting, self.workers, self.concurrent, self.each = setting, workers, concurrent, each
        (name,), transfers = system.schedules, (system.limits or Limits()).transfers
        self._base = Configuration((), 1, size, each, f"{name}:concurrent={concurrent}", transfers=transfers)
        found = (
            own_cut(setting.tables(size), setting.cluster, alike[0], concurrent)
            for alike in kinds(setting.cluster, workers)
        )
        self._cuts = [cut for cut in found if cut is not None]

    def alike(self) -> list[tuple[Configuration, ...]]:
        """One cut for all virtual workers, that of any kind, where it fits."""
        return [(configuration,) for configuration in self._fitting(self.workers)]

    def by_kind(self) -> list[tuple[Configuration, ...]]:
        """The fastest cut of each kind; none where one kind has no cut that fits."""
        evaluate = self.setting.evaluate
        fitting = [self._fitting(alike) for alike in kinds(self.setting.cluster, self.workers)]
        if not all(fitting):
            return []
        return [tuple(min(own, key=lambda c: (evaluate(c).iteration_s, len(c.stages))) for own in fitting)]

    def proposal(self, policy: str, parts: tuple[Configuration, ...]) -> Proposal:
        """What is judged of these virtual workers, and what is told of them."""
        count, local = len(self.workers), self.concurrent - 1
        overall = wsp_staleness(self.concurrent, 0).overall if count > 1 else local
        words = f"{count} virtual worker{'s' if count > 1 else ''} ({policy}), Nm {self.concurrent}"
        shape = words_of(parts[0])
        if len(parts) > 1:
            slowest = max(parts, key=lambda part: self.setting.evaluate(part).iteration_s)
            shape = f"PP {len(slowest.stages)}, cut by kind, micro-batch {self._base.micro_batch} x {self.each}"
        delays = f"own updates: up to {local}" + (f"; of others: up to {overall}" if overall > local else "")
        return Proposal(
            parts,
            words=f"{words}, {shape}",
            notes=(words,),
            tells={"allocation": words, "clock_distance": "0", "delays": delays},
            staleness=overall,
            exchange=_pushed(self.setting, parts) * (self.each / self.concurrent) if len(parts) > 1 else None,
            unwritten=UNLIKE if len(parts) > 1 else "",
        )

    def _fitting(self, workers: Workers) -> list[Configuration]:
        """Configurations of virtual workers that are cut alike, the devices of one after those of another."""
        found = []
        costs, cluster = self.setting.costs(self._base.micro_batch), self.setting.cluster
        for cut in self._cuts:
            if len(cut[1]) <= min(len(own) for own in workers):
                devices = dealt(costs, cluster, workers, cut)
                found.append(replace(self._base, stages=stages_of(cut[0]), copies=len(workers), devices=devices))
        return [configuration for configuration in found if self.setting.fits(configuration)]


def _waves(setting: Setting, workers: Workers, size: int) -> Iterator[tuple[int, int]]:
    """(concurrent mini-batches, mini-batches of an iteration) of a virtual worker, the most concurrent first."""
    each, rest = divmod(setting.job.global_batch, size * max(1, len(workers)))
    most = min(MOST_CONCURRENT, 2 * max((len(own) for own in workers), default=0))
    if not rest and each:
        yield from ((concurrent, each) for concurrent in range(min(each, most), 0, -1) if each % concurrent == 0)


def _pushed(setting: Setting, parts: Sequence[Configuration]) -> Traffic:
    """One wave's pushes and pulls."""
    held: dict[int, float] = {}
    for part in parts:
        workers = lay_workers(part, schedules.get(part.schedule))
        for stage, terms in enumerate(setting.evaluate(part).stages):
            held.update(dict.fromkeys(workers.groups(stage).ravel().tolist(), terms.memory.gradients))
    fabric = fabric_of(setting.cluster, sorted(held))
    return spread_traffic(fabric, np.array([held[rank] for rank in fabric.ranks]))


def _crowded(setting: Setting, policies: Sequence[Workers]) -> str:
    """Why no virtual worker can hold the model: not even cut evenly, or the stashed wave."""
    if not any(True for workers in policies for size in setting.sizes for _ in _waves(setting, workers, size)):
        return "a virtual worker needs two devices, and the batch must divide among virtual workers"
    narrowest = min(len(own) for workers in policies for own in workers)
    why = uneven_share(setting.states_bytes, setting.cluster, narrowest)
    return f"no stages fit in a virtual worker with a stashed wave{': ' if why else ''}{why}"


register(
    System(
        key="hetpipe",
        title="HetPipe",
        cut=(
            "virtual workers of one node each (NP), of the same share of every type (ED), or of a fast and "
            "a slow type each (HD); order of devices and cuts within one chosen together"
        ),
        solver=propose,
        semantics=Semantics.ASYNC,
        staleness="s_local = Nm - 1 own updates; s_global = (D+1)(s_local+1) + s_local - 1 of others",
        chooses=(
            "the allocation policy, the order of unlike devices and the cuts with the fastest slowest "
            "stage, the largest number Nm of concurrent mini-batches that fits"
        ),
        source="Park et al., USENIX ATC 2020",
        limits=Limits(schedules=("hetpipe",)),
        exchange="wsp",
        backend={
            "weight_versions": (
                "Nm per stage; a mini-batch uses the version that its virtual worker had when it entered"
            ),
            "update": "local after each mini-batch; one aggregated push per wave of Nm",
            "clock_distance": "D = 0: no virtual worker runs ahead of the slowest by a wave",
            "server_placement": (
                "a stage's shard on the nodes that hold the stage where all virtual workers are cut alike, else"
                " evenly on all nodes"
            ),
        },
        open=(
            "clock distance 0; larger distances do not change the pace of steady virtual workers",
            "the hybrid policy (HD) joins the fastest type with the slowest and so on inwards, by the time of the"
            " whole model, where virtual workers of a node's size come out; hetpipe:policy=HD asks for one",
            "all virtual workers work at the pace of the slowest",
            "pushes and pulls run beside the work: the slower of the two counts",
            "a plan file has one cut for all virtual workers: where unlike ones are fastest with cuts of their own,"
            " the best with one cut is written, and the file says what that costs",
        ),
        tunable={"policy": ""},
    ),
)
