"""Judge data parallelism by an exchange scheme (`planner.exchange`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes
from planner.errors import HardwareError, JobError, UsageError
from planner.exchange import Exchange, Scheme, Step, fabric_of, get
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S
from planner.hardware.types import Cluster
from planner.space.configuration import Configuration
from planner.space.jobs import precision_of
from planner.space.types import BlockCosts, Job, StageTerms, Violation
from planner.sums import float_sum

HOST_WAY_BYTE_PER_S = 12.8e9
"""From a device to its host's memory and back, each way: PCIe 3 x16 at 80 %. An estimate: profiles do not say it."""

HOST_ACCESS_BYTE_PER_S = 3 * HOST_SUM_BYTE_PER_S
"""Of a host's memory: a sum is three accesses."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemeExchange:
    """The exchange of a configuration's scheme, and its costs.

    Attributes:
        scheme: the scheme.
        step: the variables of one optimizer step.
        exchange: its price through the ports of the cluster.
        host_s: seconds of host work for rows on servers, beside the network; nothing hides them.
    """

    scheme: Scheme
    step: Step
    exchange: Exchange
    host_s: float


def exchange_of(costs: BlockCosts, cluster: Cluster, job: Job, configuration: Configuration) -> SchemeExchange:
    """Price the exchange of a configuration of one stage by its scheme.

    Args:
        costs: of the chain, whose `steps` are known.
        cluster: the machine.
        job: precision and optimizer.
        configuration: one stage, any replicas and copies, in line from the first device.

    Raises:
        UsageError: no scheme has the name, an option makes no sense, or the cluster cannot run it.
        HardwareError: servers on a cluster without a network.
        JobError: the configuration has several stages, shares operators, or has a ZeRO stage beside its scheme.
    """
    steps, reason = costs.steps, _obstacle(configuration)
    if reason or steps is None:
        message = reason or f"what the exchange scheme {configuration.exchange} sends is not known from these costs"
        raise JobError(message, hint="exchange by the recipe of the ZeRO stage")
    (stage,) = configuration.stages
    replicas, node = configuration.copies * stage.replicas, cluster.node_size or 1
    count = configuration.micro_batches // stage.replicas
    types = np.unique(cluster.device_types[:replicas]).tolist()
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    slow = max(types, key=lambda t: float(work_s[t]))
    together = min(replicas, node)
    step = steps(slow, count, count * together)
    scheme = get(configuration.exchange)
    exchange = scheme.price(fabric_of(cluster, range(replicas), scheme.added_servers(-(-replicas // node))), step)
    chosen = precision_of(job, cluster)
    return SchemeExchange(scheme, step, exchange, _host_s(step, exchange, chosen, job.optimizer, together))


def _obstacle(configuration: Configuration) -> str:
    """Why no scheme can serve a configuration; empty if one may."""
    scheme = configuration.exchange
    if len(configuration.stages) > 1:
        return f"the exchange scheme {scheme} serves one stage of the whole model, not {len(configuration.stages)}"
    if configuration.stages[0].ranks > 1:
        return f"the exchange scheme {scheme} serves whole operators, not ones that ranks share"
    if configuration.zero:
        return f"the exchange scheme {scheme} and ZeRO-{configuration.zero} both say how gradients travel"
    if configuration.devices or configuration.slice_devices:
        return f"the exchange scheme {scheme} serves devices in line"
    return ""


def _host_s(step: Step, exchange: Exchange, number_formats: Precision, optimizer: str, ranks: int) -> float:
    """Seconds of host work for rows on servers: copies to the devices, sums and updates in host memory.

    Nothing hides them: rows are looked up before the forward, and their gradients are complete after the backward.
    Partitions are spread evenly, so the servers of a machine handle as many rows as its ranks touch.
    """
    served = exchange.placements if exchange.memory.server_optimizer else {}
    served_variables = [v for v in step.variables if v.sparse and v.name in served]
    moved_bytes = float_sum(v.touched * (v.gradient_bytes + v.pulled_bytes) for v in served_variables)
    elements = float_sum(v.touched * v.gradient_bytes for v in served_variables) / number_formats.gradient_bytes
    state_bytes = optimizer_state_bytes(optimizer, number_formats)
    updated_bytes = elements * (2 * state_bytes + number_formats.gradient_bytes + number_formats.held_weight_bytes)
    return (
        moved_bytes / ranks / HOST_WAY_BYTE_PER_S
        + moved_bytes / HOST_SUM_BYTE_PER_S
        + updated_bytes / HOST_ACCESS_BYTE_PER_S
    )


def judged_exchange(
    costs: BlockCosts, cluster: Cluster, job: Job, configuration: Configuration
) -> tuple[SchemeExchange | None, tuple[Violation, ...]]:
    """The exchange by a configuration's scheme, None where it names none, or why the scheme cannot serve it."""
    if not configuration.exchange:
        return None, ()
    try:
        return exchange_of(costs, cluster, job, configuration), ()
    except (UsageError, HardwareError, JobError) as error:
        return None, (Violation("option", 0, str(error)),)


def with_scheme(terms: StageTerms, priced: SchemeExchange) -> StageTerms:
    """The terms of a stage without ZeRO, with its gradients exchanged by a scheme."""
    exchange, memory, kept = priced.exchange, terms.memory, priced.exchange.memory
    exposed_s = exchange.exposed_s + priced.host_s
    return dataclasses.replace(
        terms,
        sync_s=max(exchange.seconds, exposed_s),
        exposed_sync_s=exposed_s,
        update_s=terms.update_s * kept.optimizer,
        memory=dataclasses.replace(
            memory,
            weights=memory.weights * kept.weights,
            gradients=memory.gradients * kept.gradients,
            optimizer=memory.optimizer * kept.optimizer,
            workspace=memory.workspace + kept.transient_bytes,
        ),
    )
