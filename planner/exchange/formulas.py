"""Published closed forms of gradient exchange: bytes, shares and seconds on equal machines without start-up times.

The schemes of this package are priced on the actual ports, and tested to be equal to these formulas where a fabric is
as simple as in the papers. n: GPU machines (or ranks), k: CPU machines, M: bytes, B: bytes/s of a machine's port, each
direction (full duplex).

Parallax's search for the number of partitions of a sparse variable, by samples of the iteration time, is here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import UsageError, positive, whole
from planner.exchange.recipe import PayloadBytes, kept_bytes, recipe_of, sent_bytes
from planner.exchange.types import Staleness
from planner.hardware import Collective, moved_bytes


def reduce_scatter_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes a rank sends (and receives) in a reduce-scatter or an all-gather: (n-1)/n M, the least possible.

    >>> formulas.reduce_scatter_bytes(64, 8)
    56.0

    Source: Patarasuk and Yuan, JPDC 2009.
    """
    whole(ranks=ranks)
    return moved_bytes(Collective.REDUCE_SCATTER, payload_bytes, ranks)


def all_reduce_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes a rank sends (and receives) in a ring all-reduce: a scatter and a gather, 2(n-1)/n M.

    >>> formulas.all_reduce_bytes(64, 8)
    112.0
    """
    whole(ranks=ranks)
    return moved_bytes(Collective.ALL_REDUCE, payload_bytes, ranks)


def in_network_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes a rank sends (and receives) when switches add: M, however many ranks (0 for one).

    >>> formulas.in_network_bytes(64, 8)
    64

    Source: Graham et al., SHARP, COMHPC 2016.
    """
    whole(ranks=ranks)
    return payload_bytes if ranks > 1 else 0.0


def separate_server_s(payload_bytes: float, machines: int, servers: int, byte_per_s: float) -> float:
    """Seconds with k servers on machines of their own: max(M/B, nM/(kB)), pushes and pulls at the same time.

    >>> formulas.separate_server_s(100, machines=8, servers=2, byte_per_s=10)
    40.0

    Source: Jiang et al., BytePS, OSDI 2020, section 2.
    """
    whole(machines=machines)
    whole(servers=servers)
    positive(byte_per_s=byte_per_s)
    return max(1.0, machines / servers) * payload_bytes / byte_per_s


def ring_all_reduce_s(payload_bytes: float, ranks: int, byte_per_s: float) -> float:
    """Seconds of a ring all-reduce: 2(n-1)M/(nB).

    >>> formulas.ring_all_reduce_s(100, 8, byte_per_s=10)
    17.5
    """
    positive(byte_per_s=byte_per_s)
    return all_reduce_bytes(payload_bytes, ranks) / byte_per_s


def byteps_shares(gpu_machines: int, cpu_machines: int, cpu_bandwidth: float = 1.0) -> tuple[float, float]:
    """Shares of a CPU and of a GPU machine in the sums that keep all ports busy to the end.

    A CPU machine sums 2(n-1)/(n^2+kn-2k), a GPU machine (n-k)/(n^2+kn-2k) (Jiang et al., OSDI 2020; k <= n).
    With CPU machines of c times a GPU machine's bandwidth, equal times at both, n x/c = 1 + (n-2)(1 - kx)/n, give
    x = 2(n-1)c/(n^2+(n-2)kc); beyond kx = 1 the GPU machines sum nothing.

    >>> formulas.byteps_shares(8, 1)
    (0.2, 0.1)

    Raises:
        UsageError: no GPU machine, a negative count, a bandwidth that is not above 0.
    """
    n, k, c = gpu_machines, cpu_machines, cpu_bandwidth
    whole(gpu_machines=n)
    whole(0, cpu_machines=k)
    if not c > 0:
        raise UsageError(f"CPU machines with {c} times the bandwidth", hint="use a ratio above 0")
    if k == 0 or n == 1:
        return 0.0, 1 / n
    cpu = 1 / k if math.isinf(c) else min(1 / k, 2 * (n - 1) * c / (n * n + (n - 2) * k * c))
    return cpu, max(0.0, (1 - k * cpu) / n)


def byteps_s(payload_bytes: float, gpu_machines: int, cpu_machines: int, byte_per_s: float) -> float:
    """Seconds of BytePS with the best shares: 2n(n-1)M/((n^2+kn-2k)B), from a ring's at k=0 to M/B at k=n.

    >>> formulas.byteps_s(100, gpu_machines=8, cpu_machines=4, byte_per_s=10)
    12.727272727272727

    Source: Jiang et al., OSDI 2020. More CPU machines than GPU machines help no further.
    """
    n = gpu_machines
    whole(gpu_machines=n)
    whole(0, cpu_machines=cpu_machines)
    positive(byte_per_s=byte_per_s)
    k = min(cpu_machines, n)
    if n == 1:
        return 0.0
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k) * payload_bytes / byte_per_s


def pcie_uplink_bytes(payload_bytes: float, switches: int, gpus_per_switch: int, cpu_assisted: bool = True) -> float:
    """Bytes through the busiest way between a PCIe switch and the host, each direction, to sum inside one machine.

    CPU-assisted: scatter under each switch, then the host sums one copy a switch: M. A ring over all g GPUs passes
    every switch's way once each direction: 2(g-1)/g M. Nothing when a single GPU is all there is.

    >>> [formulas.pcie_uplink_bytes(1, 2, 4, cpu_assisted=c) for c in (False, True)]
    [1.75, 1]
    """
    whole(switches=switches)
    whole(gpus_per_switch=gpus_per_switch)
    if cpu_assisted:
        return payload_bytes
    return all_reduce_bytes(payload_bytes, switches * gpus_per_switch) if switches > 1 else 0.0


def round_robin_loads(sizes: Sequence[float], servers: int) -> tuple[float, ...]:
    """Bytes on each server when whole variables are dealt in turn.

    >>> max(formulas.round_robin_loads([100, 1, 1, 1, 50, 1, 1, 1], 4))
    150.0
    """
    whole(servers=servers)
    return tuple(math.fsum(sizes[s::servers]) for s in range(servers))


def balanced_loads(sizes: Sequence[float], servers: int) -> tuple[float, ...]:
    """Bytes on each server when fusion buffers are cut in equal shards (Thangakrishnan et al., Herring, SC 2020).

    >>> formulas.balanced_loads([100, 1, 1, 1, 50, 1, 1, 1], 4)
    (39.0, 39.0, 39.0, 39.0)
    """
    whole(servers=servers)
    return (math.fsum(sizes) / servers,) * servers


def herring_s(payload_bytes: float, machines: int, byte_per_s: float, efficiency: float = 1.0) -> float:
    """Seconds of Herring between n machines: 2(n-1)/n M/(eta B); eta is what its transport reaches of the port.

    >>> formulas.herring_s(1360e6, machines=8, byte_per_s=12.5e9)
    0.1904
    """
    whole(machines=machines)
    positive(byte_per_s=byte_per_s)
    positive(efficiency=efficiency)
    return all_reduce_bytes(payload_bytes, machines) / (efficiency * byte_per_s)


@dataclass(frozen=True, slots=True)
class ParallaxTransfer:
    """Bytes that the busiest machine sends and receives together, by kind of variable and exchange."""

    dense_servers: float
    dense_all_reduce: float
    sparse_servers: float
    sparse_gather: float


def parallax_transfer(variable_bytes: float, touched: float, machines: int, variables: int = 0) -> ParallaxTransfer:
    """Transfer per machine, in and out, for N machines and variables of w bytes of which alpha is touched.

    One variable (`variables` 0), on the machine that hosts it: 2w(N-1) dense by servers, 4w(N-1)/N by all-reduce,
    2 alpha w(N-1) sparse by servers and by all-gather. m variables evenly placed: 4wm(N-1)/N, the same by all-reduce,
    4 alpha wm(N-1)/N and 2 alpha wm(N-1).

    >>> formulas.parallax_transfer(100, touched=0.5, machines=8, variables=4)
    ParallaxTransfer(dense_servers=1400.0, dense_all_reduce=1400.0, sparse_servers=700.0, sparse_gather=2800.0)

    Source: Kim et al., Parallax, EuroSys 2019, table 3.
    """
    whole(machines=machines)
    whole(0, variables=variables)
    w, others = variable_bytes, machines - 1
    if variables == 0:
        return ParallaxTransfer(2 * w * others, 2 * all_reduce_bytes(w, machines), *(2 * touched * w * others,) * 2)
    even = 2 * all_reduce_bytes(w * variables, machines)
    return ParallaxTransfer(even, even, touched * even, 2 * touched * w * variables * others)


def zero_state_bytes(
    parameters: float, ranks: int, stage: int, weight: float = 2, gradient: float = 2, optimizer: float = 12
) -> float:
    """Bytes of model state a rank keeps: 16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N for stages 0 to 3.

    The defaults are mixed-precision Adam: 2 bytes of weight, 2 of gradient, 12 of optimizer state a parameter.

    >>> [formulas.zero_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]

    Source: Rajbhandari et al., ZeRO, SC 2020, figure 1.

    Raises:
        UsageError: a stage other than 0 to 3, or no rank.
    """
    whole(ranks=ranks)
    sizes = PayloadBytes(gradient, weight)
    kept = kept_bytes(recipe_of(stage), sizes, optimizer, lambda group: 1 if group is None else ranks, parameters)
    return float(kept.weights + kept.gradients + kept.optimizer)


def zero_elements(parameters: float, stage: int, ranks: int | None = None) -> float:
    """Elements a rank sends in a step of one micro-batch: 2 P for stages 0 to 2, 3 P for stage 3.

    With `ranks`, times (n-1)/n, of which the published figures are the limit: stage 0 is a reduce-scatter and an
    all-gather, stages 1 and 2 the same, stage 3 gathers the weights in the forward and again in the backward
    (`planner.exchange.recipe_of`).

    >>> [formulas.zero_elements(7.5e9, stage) / 1e9 for stage in range(4)]
    [15.0, 15.0, 15.0, 22.5]

    Source: Rajbhandari et al., ZeRO, SC 2020, section 7.
    """
    sent = sent_bytes(recipe_of(stage), PayloadBytes(1.0, 1.0), lambda _: 2 if ranks is None else ranks, parameters)
    return 2 * sent if ranks is None else sent  # two ranks send half of what the limit is


def wsp_staleness(concurrent: int, clock_distance: int) -> Staleness:
    """Staleness of wave synchronous parallelism: s_local = Nm - 1, s_global = (D+1)(s_local+1) + s_local - 1.

    Args:
        concurrent: mini-batches in a virtual worker's pipeline, Nm, which are a wave.
        clock_distance: waves that a worker may be ahead of the slowest, D.

    >>> formulas.wsp_staleness(concurrent=4, clock_distance=0)
    Staleness(local=3, overall=6)

    Source: Park et al., HetPipe, USENIX ATC 2020, section 5.
    """
    whole(concurrent=concurrent)
    whole(0, clock_distance=clock_distance)
    local = concurrent - 1
    return Staleness(local, (clock_distance + 1) * (local + 1) + local - 1)


def wsp_period_s(wave_s: float, exchange_s: float, clock_distance: int) -> float:
    """Seconds from wave to wave in the steady state: max(w, x, (w + x)/(D + 1)).

    A worker's waves follow one another (w), its pushes too (x), and wave c may end no sooner than a wave's time after
    the weights with wave c-1-D have come: the longest cycle of these three waits, so D = 0 exposes the whole exchange.

    >>> formulas.wsp_period_s(wave_s=6, exchange_s=4, clock_distance=0), formulas.wsp_period_s(6, 4, 1)
    (10.0, 6)
    """
    whole(0, clock_distance=clock_distance)
    return max(wave_s, exchange_s, (wave_s + exchange_s) / (clock_distance + 1))


@dataclass(frozen=True, slots=True)
class PartitionFit:
    """`t(P) = c + b/P + a(P - 1)`: fixed time, work divided by the partitions, and overhead of each further partition.

    Attributes:
        fixed_s: c.
        shared_s: b.
        overhead_s: a.
        best: the partition count to use.
        best_s: its time, fitted (or the sample's own where there was no fit).
    """

    fixed_s: float
    shared_s: float
    overhead_s: float
    best: int
    best_s: float

    def seconds(self, partitions: int) -> float:
        """The fitted time of a partition count."""
        return self.fixed_s + self.shared_s / partitions + self.overhead_s * (partitions - 1)


def fit_partitions(samples: Mapping[int, float]) -> PartitionFit:
    """Least squares through samples of the iteration time, and the best integer within the sampled range.

    With fewer than three samples the best of them is taken. O(samples + range). After Parallax (Kim et al., EuroSys
    2019, section 3.2).

    >>> formulas.fit_partitions({p: 1 + 64 / p + 0.25 * (p - 1) for p in (2, 4, 8, 16, 32)}).best
    16

    Args:
        samples: seconds by partition count, at least one.

    Raises:
        UsageError: no sample, a count below 1, or a time that is not finite.
    """
    if not samples or min(samples) < 1 or not all(math.isfinite(t) for t in samples.values()):
        raise UsageError("partition counts need samples of finite seconds", hint="measure at one count or more")
    counts = np.asarray(sorted(samples), dtype=np.float64)
    times = np.asarray([samples[int(p)] for p in counts])
    if len(counts) < 3:
        best = int(np.argmin(times))
        return PartitionFit(float(times[best]), 0.0, 0.0, int(counts[best]), float(times[best]))
    terms = np.stack([np.ones_like(counts), 1 / counts, counts - 1], axis=1)
    fixed, shared, overhead = (float(x) for x in np.linalg.lstsq(terms, times, rcond=None)[0])
    candidates = np.arange(int(counts[0]), int(counts[-1]) + 1)
    fitted = fixed + shared / candidates + overhead * (candidates - 1)
    best = int(np.argmin(fitted))
    return PartitionFit(fixed, shared, overhead, int(candidates[best]), float(fitted[best]))


def best_partitions(shared_s: float, overhead_s: float) -> float:
    """The real-valued optimum of the fitted time, sqrt(b/a); inf when partitions cost nothing.

    >>> formulas.best_partitions(64, 0.25)
    16.0
    """
    if shared_s < 0 or overhead_s < 0:
        raise UsageError("partition times must not be negative", hint="use the terms of a fit that has an optimum")
    return math.sqrt(shared_s / overhead_s) if overhead_s > 0 else math.inf


def whole_partitions(shared_s: float, overhead_s: float, most: int = 1 << 20) -> int:
    """The partition count of the least time among 1..most: a neighbour of sqrt(b/a); the fewer of two equal ones.

    >>> formulas.whole_partitions(64, 0.25), formulas.whole_partitions(30, 0.3), formulas.whole_partitions(64, 0.25, 8)
    (16, 10, 8)

    Raises:
        UsageError: a negative term, or no partition allowed.
    """
    if most < 1:
        raise UsageError(f"at most {most} partitions", hint="allow 1 or more")
    ideal = min(best_partitions(shared_s, overhead_s), float(most))
    near = {min(most, max(1, math.floor(ideal) + step)) for step in (0, 1)}
    return min(near, key=lambda count: (shared_s / count + overhead_s * count, count))


def search_partitions(measure: Callable[[int], float], start: int, most: int = 1 << 20) -> PartitionFit:
    """Sample P, 2P, 4P, ... while the time falls, then P/2, P/4, ... while it falls, and fit.

    >>> formulas.search_partitions(lambda p: 2 + 30 / p + 0.3 * (p - 1), start=4).best
    10

    Args:
        measure: seconds of an iteration with that many partitions; called once a count.
        start: first count, usually the number of machines.
        most: largest count to try.

    Raises:
        UsageError: a start below 1.
    """
    if start < 1:
        raise UsageError(f"a search that starts at {start} partitions", hint="start at 1 or more")
    samples = {start: measure(start)}
    for factor in (2.0, 0.5):
        last, count = samples[start], int(start * factor)
        while 1 <= count <= most:
            samples[count] = measure(count)
            if samples[count] >= last:
                break
            last, count = samples[count], int(count * factor)
    return fit_partitions(samples)
