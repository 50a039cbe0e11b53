"""HetPipe: pipelines over groups of unlike devices (virtual workers), updates in waves, bounded staleness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.errors import InfeasibleError
from planner.exchange import PortTraffic, fabric_of
from planner.exchange.fabric import spread_traffic
from planner.exchange.formulas import wsp_staleness
from planner.plans.words import words_of
from planner.solvers.cluster_chains.stages import Workers, allocations, dealt, kinds, virtual_worker_cut
from planner.solvers.layouts import uneven_share
from planner.space import Configuration, lay_workers
from planner.space.cuts import stages_of
from planner.space.subspaces import Limits
from planner.systems import System, register
from planner.systems.types import Proposal, SystemSetting

MOST_CONCURRENT = 16
"""Maximum of concurrent mini-batches in a virtual worker; twice its devices is a second limit."""

UNLIKE = "each kind of virtual worker has a cut of its own, a plan file one cut for all virtual workers"


def propose(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """For each allocation and mini-batch size, propose cuts with as many concurrent mini-batches as fit."""
    costs, policy_option = setting.costs(setting.sizes[0]), system.options.get("policy", "")
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1).tolist()
    policies = allocations(setting.cluster, setting.devices, work_s)
    if policy_option and policy_option not in policies:
        known = ", ".join(policies) or "none"
        raise InfeasibleError(f"allocation policy {policy_option} does not come out on this pool (possible: {known})")
    any_fits = False
    allowed = {name: workers for name, workers in policies.items() if name == policy_option or not policy_option}
    for policy, workers in allowed.items():
        for size in setting.sizes:
            for proposal in _of_allocation(setting, system, policy, workers, size):
                any_fits = True
                yield proposal
    if not any_fits:
        raise InfeasibleError(_crowded(setting, list(allowed.values())))


def _of_allocation(
    setting: SystemSetting, system: System, policy: str, workers: Workers, size: int
) -> Iterator[Proposal]:
    """Cuts with the most concurrent mini-batches that fit: one for each kind of virtual worker, and one for all."""
    for by_kind in (True, False) if len(kinds(setting.cluster, workers)) > 1 else (False,):
        for concurrent, mini_batches in _waves(setting, workers, size):
            wave = _Wave(setting, system, workers, size, concurrent, mini_batches)
            cuts = wave.cuts_by_kind() if by_kind else [(configuration,) for configuration in wave.fitting(workers)]
            if cuts:
                yield from (wave.proposal(policy, parts) for parts in cuts)
                break


class _Wave:
    """Virtual workers with a number of concurrent mini-batches, and of mini-batches that each runs in an iteration."""

    def __init__(
        self, setting: SystemSetting, system: System, workers: Workers, size: int, concurrent: int, mini_batches: int
    ) -> None:
        self.setting, self.workers, self.concurrent, self.mini_batches = setting, workers, concurrent, mini_batches
        (name,), transfers = system.schedules, (system.limits or Limits()).transfers
        self._base = Configuration((), 1, size, mini_batches, f"{name}:concurrent={concurrent}", transfers=transfers)
        cuts = (
            virtual_worker_cut(setting.tables(size), setting.cluster, same_kind[0], concurrent)
            for same_kind in kinds(setting.cluster, workers)
        )
        self._cuts = [cut for cut in cuts if cut is not None]

    def cuts_by_kind(self) -> list[tuple[Configuration, ...]]:
        """The fastest cut for each kind of virtual worker; empty if no cut fits one of the kinds."""
        evaluate = self.setting.evaluate
        fitting = [self.fitting(same_kind) for same_kind in kinds(self.setting.cluster, self.workers)]
        if not all(fitting):
            return []
        return [tuple(min(cuts, key=lambda c: (evaluate(c).iteration_s, len(c.stages))) for cuts in fitting)]

    def proposal(self, policy: str, parts: tuple[Configuration, ...]) -> Proposal:
        """The proposal of these virtual workers with the cut of each kind, or one cut for all."""
        count, local = len(self.workers), self.concurrent - 1
        overall = wsp_staleness(self.concurrent, 0).overall if count > 1 else local
        words = f"{count} virtual worker{'s' if count > 1 else ''} ({policy}), Nm {self.concurrent}"
        shape = words_of(parts[0])
        if len(parts) > 1:
            slowest = max(parts, key=lambda part: self.setting.evaluate(part).iteration_s)
            shape = f"PP {len(slowest.stages)}, cut by kind, micro-batch {self._base.micro_batch} x {self.mini_batches}"
        delays = f"own updates: up to {local}" + (f"; of others: up to {overall}" if overall > local else "")
        return Proposal(
            parts,
            words=f"{words}, {shape}",
            notes=(words,),
            tells={"allocation": words, "clock_distance": "0", "delays": delays},
            staleness=overall,
            exchange=_pushed(self.setting, parts) * (self.mini_batches / self.concurrent) if len(parts) > 1 else None,
            unwritten=UNLIKE if len(parts) > 1 else "",
        )

    def fitting(self, workers: Workers) -> list[Configuration]:
        """Configurations that fit, one for each cut, in which all these virtual workers have that cut."""
        configurations = []
        costs, copies = self.setting.costs(self._base.micro_batch), len(workers)
        for cut in self._cuts:
            if len(cut[1]) <= min(map(len, workers)):
                devices = dealt(costs, self.setting.cluster, workers, cut)
                configurations.append(replace(self._base, stages=stages_of(cut[0]), copies=copies, devices=devices))
        return [configuration for configuration in configurations if self.setting.fits(configuration)]


def _waves(setting: SystemSetting, workers: Workers, size: int) -> Iterator[tuple[int, int]]:
    """Pairs (concurrent mini-batches, mini-batches of an iteration) of a virtual worker, the most concurrent first."""
    count, remainder = divmod(setting.job.global_batch, size * max(1, len(workers)))
    most = min(MOST_CONCURRENT, 2 * max(map(len, workers), default=0))
    if not remainder:
        yield from ((concurrent, count) for concurrent in range(min(count, most), 0, -1) if count % concurrent == 0)


def _pushed(setting: SystemSetting, parts: Sequence[Configuration]) -> PortTraffic:
    """Traffic of the pushes and pulls of one wave."""
    gradient_bytes: dict[int, float] = {}
    for part in parts:
        workers = lay_workers(part, schedules.get(part.schedule))
        for stage, terms in enumerate(setting.evaluate(part).stages):
            gradient_bytes.update(dict.fromkeys(workers.groups(stage).ravel().tolist(), terms.memory.gradients))
    fabric = fabric_of(setting.cluster, sorted(gradient_bytes))
    return spread_traffic(fabric, np.array([gradient_bytes[rank] for rank in fabric.ranks]))


def _crowded(setting: SystemSetting, policies: Sequence[Workers]) -> str:
    """Why no proposal fits: the batch does not divide, or a virtual worker lacks memory for the stashed wave."""
    if not any(True for workers in policies for size in setting.sizes for _ in _waves(setting, workers, size)):
        return "a virtual worker needs two devices, and the batch must divide among virtual workers"
    narrowest = min(len(devices) for workers in policies for devices in workers)
    why = uneven_share(setting.model_states_bytes, setting.cluster, narrowest)
    return f"no stages fit in a virtual worker with a stashed wave{': ' if why else ''}{why}"


register(
    System(
        key="hetpipe",
        title="HetPipe",
        solver=propose,
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
        tunable={"policy": ""},
    ),
)
