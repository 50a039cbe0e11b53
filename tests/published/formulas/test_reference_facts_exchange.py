"""Facts of gradient exchange at further sizes: each figure a sum worked out by hand, the section beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner import UsageError
from planner import formulas as f

FACTS: list[tuple[str, str, Callable[[], Any], Any]] = [
    # traps 8: a ring and servers on the same machines move the same
    ("traps", "2 x 7/8 x 16 both ways", lambda: f.all_reduce_bytes(16, 8), 28),
    ("collectives", "a scatter and a gather", lambda: f.reduce_scatter_bytes(6, 3) + f.reduce_scatter_bytes(6, 3), 8),
    ("collectives", "one rank sends nothing", lambda: f.all_reduce_bytes(16, 1), 0),
    ("collectives", "switches add: M", lambda: (f.in_network_bytes(5, 64), f.in_network_bytes(5, 1)), (5, 0)),
    ("collectives", "all-to-all 3/4 of 8", lambda: f.reduce_scatter_bytes(8, 4), 6),
    # BytePS: 2n(n-1)/(n^2+kn-2k)
    ("BytePS", "n 4, k 2: 24/(16 + 8 - 4)", lambda: f.byteps_s(1, 4, 2, 1), 1.2),
    ("BytePS", "CPU machines 2 2 3/20", lambda: f.byteps_cpu_share(4, 2), 0.6),
    ("BytePS", "GPU machines (4-2)/20", lambda: f.byteps_shares(4, 2)[1], 0.1),
    ("BytePS", "shares add up to 1", lambda: f.byteps_cpu_share(16, 5) + 16 * f.byteps_shares(16, 5)[1], 1),
    ("BytePS", "over all-reduce 1.5/1.2", lambda: f.byteps_speedup(4, 2), 1.25),
    ("BytePS", "over 2 servers 2/1.2", lambda: f.byteps_speedup(4, 2, over="servers"), 5 / 3),
    ("BytePS", "n 16, k 16: M/B", lambda: f.byteps_s(100, 16, 16, 10), 10),
    ("BytePS", "more than n do no more", lambda: f.byteps_s(100, 16, 20, 10), 10),
    ("BytePS", "bound 2 x 255/256", lambda: f.byteps_speedup(256, 256), 510 / 256),
    ("BytePS", "k 0 is a ring", lambda: f.byteps_s(8, 8, 0, 1), 14),
    ("BytePS", "one machine exchanges nothing", lambda: f.byteps_s(8, 1, 1, 1), 0),
    ("BytePS", "max(M/B, n M/(k B)) = 8/3 x 6/2", lambda: f.separate_server_s(6, 8, 3, 2), 8),
    ("BytePS", "PCIe ring over 2 x 2: 2 x 3/4", lambda: f.pcie_uplink_bytes(4, 2, 2, cpu_assisted=False), 6),
    ("BytePS", "PCIe with the host: M", lambda: f.pcie_uplink_bytes(4, 2, 2), 4),
    # Herring
    ("Herring", "dealt in turn to 3: 9 + 4, 8 + 1, 2", lambda: f.round_robin_loads([9, 8, 2, 4, 1], 3), (13, 9, 2)),
    ("Herring", "in equal shards 24/3", lambda: f.balanced_loads([9, 8, 2, 4, 1], 3), (8, 8, 8)),
    ("Herring", "2 x 3/4 x 40/(0.8 x 5)", lambda: f.herring_s(40, 4, 5, efficiency=0.8), 15),
    ("Herring", "twice the efficiency, half the time", lambda: f.herring_s(1, 8, 1, 0.5) / f.herring_s(1, 8, 1), 2),
    # Parallax: 2w(N-1), 4w(N-1)/N, 2 alpha w(N-1)
    ("Parallax", "dense w 10, N 4: servers 60", lambda: f.parallax_transfer(10, 0.1, 4).dense_servers, 60),
    ("Parallax", "all-reduce 4 x 10 x 3/4", lambda: f.parallax_transfer(10, 0.1, 4).dense_all_reduce, 30),
    ("Parallax", "sparse 0.2 x 10 x 3", lambda: f.parallax_transfer(10, 0.1, 4).sparse_servers, 6),
    ("Parallax", "gathered alike", lambda: f.parallax_transfer(10, 0.1, 4).sparse_gather, 6),
    ("Parallax", "3 variables: 4 x 30 x 3/4", lambda: f.parallax_transfer(10, 0.1, 4, 3).dense_servers, 90),
    ("Parallax", "3 sparse: 0.4 x 30 x 3/4", lambda: f.parallax_transfer(10, 0.1, 4, 3).sparse_servers, 9),
    ("Parallax", "3 gathered: 0.2 x 30 x 3", lambda: f.parallax_transfer(10, 0.1, 4, 3).sparse_gather, 18),
    ("Parallax", "b 100, a 1/4: 20", lambda: f.best_partitions(100, 0.25), 20),
    ("Parallax", "b 60, a 1: 60/8 + 8 < 60/7 + 7", lambda: f.whole_partitions(60, 1), 8),
    ("Parallax", "b 56, a 1: 7 as good as 8, the fewer", lambda: f.whole_partitions(56, 1), 7),
    ("Parallax", "partitions that cost nothing, 64 allowed", lambda: f.whole_partitions(5, 0, 64), 64),
    ("Parallax", "nothing to share", lambda: f.whole_partitions(0, 1), 1),
    ("Parallax", "fit of c 2, b 48, a 3: 4 of 2..8", lambda: f.fit_partitions(
        {p: 2 + 48 / p + 3 * (p - 1) for p in (2, 4, 8)}).best, 4),
    ("Parallax", "two samples: the better one", lambda: f.fit_partitions({2: 5.0, 4: 6.0}).best, 2),
    # ZeRO
    ("ZeRO", "P 1e9, N 16: 4 + 12/16", lambda: f.zero_state_bytes(1e9, 16, 1), 4.75e9),
    ("ZeRO", "2 + 14/16", lambda: f.zero_state_bytes(1e9, 16, 2), 2.875e9),
    ("ZeRO", "16/16", lambda: f.zero_state_bytes(1e9, 16, 3), 1e9),
    ("ZeRO", "fp32 Adam: 4 + 4 + 8", lambda: f.zero_state_bytes(10, 4, 0, 4, 4, 8), 160),
    ("ZeRO", "fp32 SGD with momentum, stage 1 of 4: 4 + 4 + 4/4", lambda: f.zero_state_bytes(10, 4, 1, 4, 4, 4), 90),
    ("ZeRO", "2, 2, 2, 3 times", lambda: [f.zero_elements(5, s) for s in range(4)], [10, 10, 10, 15]),
    ("ZeRO", "with (n-1)/n: 3 x 3/4 x 8", lambda: f.zero_elements(8, 3, ranks=4), 18),
    ("ZeRO", "one rank keeps all", lambda: f.zero_state_bytes(1, 1, 3), 16),
]  # fmt: skip


@pytest.mark.parametrize(("call", "expected"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in FACTS])
def test_fact(call: Callable[[], Any], expected: Any) -> None:
    assert call() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: f.byteps_speedup(4, 2, over="ring"), "all-reduce or servers"),
        (lambda: f.byteps_speedup(4, 0, over="servers"), "servers is 0"),
        (lambda: f.zero_state_bytes(1, 2, 4), "no ZeRO stage 4"),
        (lambda: f.whole_partitions(1, 1, 0), "allow 1 or more"),
        (lambda: f.herring_s(1, 0, 1), "machines is 0"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        call()
