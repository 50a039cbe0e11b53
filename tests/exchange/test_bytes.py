"""Bytes of formulas and of priced schemes against exchanges played element by element over counted wires."""

from __future__ import annotations

import numpy as np
import pytest

from planner.exchange import Fabric, Servers, Step, Variable, fabric_of, formulas, get
from tests.exchange import wires as w


def _step(size: float, **options: object) -> Step:
    return Step((Variable("w", float(size), **options),))  # type: ignore[arg-type]


def _assert_machines(fabric: Fabric, scheme: str, step: Step, played: w.Wires) -> None:
    out_bytes, in_bytes = get(scheme).plan_messages(fabric, step).traffic.machine_bytes()
    endpoints = range(fabric.endpoints)
    assert out_bytes.tolist() == pytest.approx([played.machine_out[e] for e in endpoints])
    assert in_bytes.tolist() == pytest.approx([played.machine_in[e] for e in endpoints])


def _assert_ranks(fabric: Fabric, scheme: str, step: Step, played: w.Wires) -> None:
    """The innermost level's ports are the ranks' own."""
    traffic = get(scheme).plan_messages(fabric, step).traffic
    ports = [i for i, p in enumerate(fabric.ports) if p.level == 0]
    assert traffic.out_bytes[ports].tolist() == pytest.approx([played.rank_out[r] for r in fabric.ranks])
    assert traffic.in_bytes[ports].tolist() == pytest.approx([played.rank_in[r] for r in fabric.ranks])


@pytest.mark.parametrize("machines", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
class TestAllReduce:
    """Bytes of a ring, two trees and a hierarchy on n machines of g ranks, and that they sum."""

    def _play(self, machines: int, ranks: int) -> tuple[w.Wires, list[list[int]], dict[int, np.ndarray], np.ndarray]:
        count, size = machines * ranks, 2 * machines * ranks * ranks
        data = w.gradients(count, size)
        groups = [list(range(i * ranks, (i + 1) * ranks)) for i in range(machines)]
        return w.Wires([r // ranks for r in range(count)]), groups, dict(enumerate(data)), np.sum(data, axis=0)

    def test_ring(self, machines: int, ranks: int) -> None:
        played, groups, held, total = self._play(machines, ranks)
        everyone = [r for g in groups for r in g]
        w.ring_all_reduce(played, everyone, held)
        assert all((held[r] == total).all() for r in everyone)
        fabric = fabric_of(w.cluster_of(machines, ranks))
        _assert_machines(fabric, "ring", _step(total.size), played)
        if ranks > 1:
            _assert_ranks(fabric, "ring", _step(total.size), played)
        if ranks == 1:
            assert played.machine_out[0] == pytest.approx(formulas.all_reduce_bytes(total.size, machines))

    def test_tree(self, machines: int, ranks: int) -> None:
        """Inside each machine, then between its first (last) ranks, as the levels have it."""
        played, groups, held, total = self._play(machines, ranks)
        half = total.size // 2
        for part, side in ((slice(0, half), 0), (slice(half, total.size), -1)):
            mine = {r: held[r][part].copy() for r in held}
            for g in groups:
                self._up(played, g if side == 0 else g[::-1], mine)
            leaders = [g[side] for g in groups]
            order = leaders if side == 0 else leaders[::-1]
            self._up(played, order, mine)
            self._down(played, order, mine)
            for g in groups:
                self._down(played, g if side == 0 else g[::-1], mine)
            for r in held:
                held[r][part] = mine[r]
        assert all((x == total).all() for x in held.values())
        fabric = fabric_of(w.cluster_of(machines, ranks))
        _assert_machines(fabric, "tree", _step(total.size), played)
        if ranks > 1:
            _assert_ranks(fabric, "tree", _step(total.size), played)
        sent = sum(played.machine_out.values()) + sum(played.rank_out.values())
        assert sent == pytest.approx(2 * (machines * ranks - 1) * total.size)
        assert max(played.machine_out.values(), default=0.0) <= 2 * total.size

    def _up(self, played: w.Wires, order: list[int], held: dict[int, np.ndarray]) -> None:
        for i in range(len(order) - 1, 0, -1):
            parent = order[(i - 1) // 2]
            held[parent] = held[parent] + played.send(order[i], parent, held[order[i]])

    def _down(self, played: w.Wires, order: list[int], held: dict[int, np.ndarray]) -> None:
        for i in range(1, len(order)):
            held[order[i]] = played.send(order[(i - 1) // 2], order[i], held[order[(i - 1) // 2]])

    def test_hierarchical(self, machines: int, ranks: int) -> None:
        played, groups, held, total = self._play(machines, ranks)
        w.hierarchical_all_reduce(played, groups, held)
        assert all((x == total).all() for x in held.values())
        fabric = fabric_of(w.cluster_of(machines, ranks))
        _assert_machines(fabric, "hierarchical", _step(total.size), played)
        if ranks > 1:
            _assert_ranks(fabric, "hierarchical", _step(total.size), played)

    def test_servers_fed_by_shards(self, machines: int, ranks: int) -> None:
        """Equal shards: scatter inside, each rank's shard in equal parts to all machines, gather inside.

        Between machines these are the bytes of one ring over machines, which is trap number one: no factor of two.
        """
        played, groups, held, total = self._play(machines, ranks)
        own: dict[int, int] = {}
        for g in groups:
            own.update(w.ring_scatter(played, g, held))
        size = total.size // ranks
        for i in range(ranks):
            column = [g[i] for g in groups]
            at = slice(own[column[0]] * size, (own[column[0]] + 1) * size)
            shard = {r: held[r][at] for r in column}
            holder = np.arange(size) * machines // size
            w.by_servers(played, column, holder, shard, dict(enumerate(column)))
            for r in column:
                held[r][at] = shard[r]
        for g in groups:
            w.ring_gather(played, g, held, own)
        assert all((x == total).all() for x in held.values())
        fabric = fabric_of(w.cluster_of(machines, ranks))
        for scheme in ("ps-colocated", "herring", "byteps:inside=scatter", "wsp"):
            _assert_machines(fabric, scheme, _step(total.size), played)
            if ranks > 1:
                _assert_ranks(fabric, scheme, _step(total.size), played)
        ring = w.Wires(list(range(machines)))
        flat = dict(enumerate(w.gradients(machines, total.size)))
        w.ring_all_reduce(ring, list(range(machines)), flat)
        everywhere = range(machines)
        assert [played.machine_out[m] for m in everywhere] == pytest.approx([ring.machine_out[m] for m in everywhere])
        for scheme in ("ring", "ps-colocated"):
            flat_fabric = fabric_of(w.cluster_of(machines))
            _assert_machines(flat_fabric, scheme, _step(total.size), ring)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("inside", [False, True])
def test_sharded_model_state(count: int, inside: bool) -> None:
    """ZeRO-1 and 2 scatter and gather once, ZeRO-3 gathers twice; over one ring, in one machine or between machines."""
    fabric = fabric_of(w.cluster_of(1, count) if inside else w.cluster_of(count))
    size, everyone = 2 * count, list(range(count))
    data = w.gradients(count, size)
    held, total = dict(enumerate(data)), np.sum(data, axis=0)
    played = w.Wires([0] * count if inside else everyone)
    own = w.ring_scatter(played, everyone, held)
    w.ring_gather(played, everyone, held, own)
    compare = _assert_ranks if inside and count > 1 else _assert_machines
    for scheme in ("zero1", "zero2"):
        compare(fabric, scheme, _step(size), played)
    w.ring_gather(played, everyone, held, own)
    assert all((x == total).all() for x in held.values())
    compare(fabric, "zero3", _step(size), played)
    sent = max([*played.machine_out.values(), *played.rank_out.values()], default=0.0)
    assert sent == pytest.approx(formulas.zero_elements(size, 3, count))


@pytest.mark.parametrize("machines", range(2, 9))
def test_byteps(machines: int) -> None:
    """Every k: shares cut into whole elements, all ports carry the same bytes both ways where that is claimed."""
    n = machines
    for k in range(n + 1):
        unit = n * n + k * n - 2 * k
        counts = [n - k] * n + [2 * (n - 1)] * k
        holder = np.repeat(np.arange(n + k), counts)
        assert holder.size == unit
        data = w.gradients(n, unit)
        held, total = dict(enumerate(data)), np.sum(data, axis=0)
        played = w.Wires(list(range(n + k)))
        w.by_servers(played, list(range(n)), holder, held, {s: s for s in range(n + k)})
        assert all((x == total).all() for x in held.values())
        fabric = fabric_of(w.cluster_of(n), servers=Servers(k, sum_byte_per_s=np.inf))
        _assert_machines(fabric, "byteps", _step(unit), played)
        busiest = max([*played.machine_out.values(), *played.machine_in.values()])
        assert busiest == pytest.approx(formulas.byteps_s(unit, n, k, 1.0))
        assert {played.machine_in[e] for e in range(n + k)} == {busiest}


@pytest.mark.parametrize("machines", [1, 2, 5])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_separate_servers(machines: int, servers: int) -> None:
    size = 6
    holder = np.arange(size) % servers
    played = w.Wires(list(range(machines + servers)))
    held = dict(enumerate(w.gradients(machines, size)))
    w.by_servers(played, list(range(machines)), holder, held, {s: machines + s for s in range(servers)})
    fabric = fabric_of(w.cluster_of(machines + 1), range(machines), servers=Servers(servers))
    _assert_machines(fabric, "ps-separate", _step(size), played)
    busiest = max([*played.machine_out.values(), *played.machine_in.values()])
    assert busiest == pytest.approx(formulas.separate_server_s(size, machines, servers, 1.0))


def test_whole_variables_dealt_in_turn_load_one_machine() -> None:
    """100,1,1,1,50,1,1,1 on 4 machines: server 0 takes 150 from 3 others, and pushes the other 6 itself."""
    sizes = [100, 1, 1, 1, 50, 1, 1, 1]
    step = Step(tuple(Variable(f"v{i}", float(s)) for i, s in enumerate(sizes)))
    holder = np.repeat([0, 1, 2, 3, 0, 1, 2, 3], sizes)
    played = w.Wires([0, 1, 2, 3])
    held = dict(enumerate(w.gradients(4, 156)))
    w.by_servers(played, [0, 1, 2, 3], holder, held, {s: s for s in range(4)})
    fabric = fabric_of(w.cluster_of(4))
    _assert_machines(fabric, "ps-colocated:placement=round-robin", step, played)
    assert played.machine_in[0] == 150 * 3 + 6
    found = get("ps-colocated:placement=greedy").price(fabric, step)
    assert found.traffic.machine_bytes()[1].max() == 100 * 3 + 56
    assert found.memory.server_optimizer == pytest.approx(100 / 156)


@pytest.mark.parametrize("machines", [2, 3, 4, 8])
@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_parallax_table(machines: int, part: float) -> None:
    """Each machine touches a quarter, half or all of the rows, evenly over the pieces."""
    n, rows, width = machines, 8 * machines, 3
    size = rows * width
    touched = {m: np.arange(rows)[np.arange(rows) // n % 8 < 8 * part] for m in range(n)}
    alpha = len(touched[0]) / rows
    gathered = w.Wires(list(range(n)))
    w.sparse_by_gather(gathered, touched, width)
    one = w.Wires(list(range(n)))
    w.sparse_by_servers(one, touched, np.zeros(rows, dtype=int), width, {0: 0})
    even = w.Wires(list(range(n)))
    w.sparse_by_servers(even, touched, np.arange(rows) % n, width, {s: s for s in range(n)})
    table = formulas.parallax_transfer(size, alpha, n)
    assert gathered.machine_in[0] + gathered.machine_out[0] == pytest.approx(table.sparse_gather)
    assert one.machine_in[0] + one.machine_out[0] == pytest.approx(table.sparse_servers)
    table = formulas.parallax_transfer(size, alpha, n, 1)
    assert even.machine_in[0] + even.machine_out[0] == pytest.approx(table.sparse_servers)
    fabric = fabric_of(w.cluster_of(n))
    step = _step(size, sparse=True, touched=alpha)
    _assert_machines(fabric, "parallax:dense_from=2", step, even)
    _assert_machines(fabric, "parallax:dense_from=2,partitions=1", step, one)


def test_parallax_with_all_rows_touched_is_an_all_reduce() -> None:
    fabric = fabric_of(w.cluster_of(4))
    step = Step((Variable("e", 64.0, sparse=True), Variable("d", 64.0)))
    found = get("parallax").price(fabric, step)
    assert "ps" not in found.methods.values()
    table = formulas.parallax_transfer(64, 1.0, 4, 2)
    out_bytes, in_bytes = get("ring").price(fabric, step).traffic.machine_bytes()
    assert out_bytes[0] + in_bytes[0] == pytest.approx(table.dense_all_reduce)


@pytest.mark.parametrize(("switches", "gpus"), [(2, 2), (2, 4), (4, 2)])
def test_pcie_uplinks(switches: int, gpus: int) -> None:
    """Scatter under each switch, each GPU's shard up to the host, and back: one copy a switch each direction."""
    from planner.hardware import Cluster, Level

    flat = w.cluster_of(1)
    levels = (Level("pcie-switch", gpus, 1.0, 1.0, 0.0), Level("host", switches, 1.0, 1.0, 0.0))
    cluster = Cluster("pcie", "f", flat.devices, np.zeros(switches * gpus, dtype=np.int64), levels, switches * gpus)
    fabric = fabric_of(cluster)
    size = 8 * gpus
    played = w.Wires([0] * (switches * gpus))
    held = dict(enumerate(w.gradients(switches * gpus, size)))
    up = 0
    for s in range(switches):
        group = list(range(s * gpus, (s + 1) * gpus))
        w.ring_scatter(played, group, held)
        up = sum(size // gpus for _ in group)
    uplinks = [i for i, p in enumerate(fabric.ports) if p.level == 1]
    traffic = get("byteps").price(fabric, _step(size)).traffic
    assert traffic.out_bytes[uplinks].tolist() == [up] * switches == traffic.in_bytes[uplinks].tolist()
    assert up == formulas.pcie_uplink_bytes(size, switches, gpus)
    ring = get("ring").price(fabric, _step(size)).traffic
    expected = formulas.pcie_uplink_bytes(size, switches, gpus, cpu_assisted=False)
    assert ring.out_bytes[uplinks].tolist() == pytest.approx([expected] * switches)
    devices = [i for i, p in enumerate(fabric.ports) if p.level == 0]
    scattered_and_copied = played.rank_out[0] + size / gpus
    # and the gather after the host, which sends as much as the scatter
    assert traffic.out_bytes[devices].tolist() == [scattered_and_copied + played.rank_out[0]] * len(devices)


def test_in_network_moves_one_copy() -> None:
    fabric = fabric_of(w.cluster_of(4, 2))
    found = get("in-network").price(fabric, _step(100.0)).traffic
    assert found.machine_bytes()[0].tolist() == [100.0] * 4 == found.machine_bytes()[1].tolist()
    assert found.by_level()[0].out_bytes == pytest.approx(100.0)  # a scatter and a gather of two
    whole = get("in-network:inside=true").price(fabric, _step(100.0)).traffic
    assert whole.by_level()[0].out_bytes == formulas.in_network_bytes(100.0, 8)


def test_leaf_and_spine_count_what_leaves_each() -> None:
    """8 machines, 4 a leaf: a machine sends 7/8 out twice (push and answer), a leaf's 4 machines half of all."""
    from planner.hardware import Cluster, Level

    flat = w.cluster_of(1)
    levels = (Level("leaf", 4, 1.0, 1.0, 0.0), Level("spine", 2, 4.0, 1.0, 0.0))
    cluster = Cluster("tree", "f", flat.devices, np.zeros(8, dtype=np.int64), levels, 1)
    fabric = fabric_of(cluster)
    leaf, spine = get("ps-colocated").price(fabric, _step(80.0)).traffic.by_level()
    assert leaf.out_bytes == pytest.approx(2 * 70)
    # each of 4 machines pushes to 4 shards of 10 across, and answers 4 machines across with its 10
    assert spine.out_bytes == pytest.approx(4 * 40 + 4 * 4 * 10)
    ring = get("ring").price(fabric, _step(80.0)).traffic.by_level()
    assert [level.out_bytes for level in ring] == pytest.approx([140, 140])


def test_servers_hang_on_the_level_that_joins_the_group() -> None:
    fabric = fabric_of(w.cluster_of(3, 2), ranks=[0, 1], servers=Servers(2))
    found = get("ps-separate").price(fabric, _step(10.0))
    assert found.traffic.machine_bytes()[0].tolist() == [10.0, 5.0, 5.0]
    assert [level.level for level in found.traffic.by_level()] == ["bus", "net"]


def test_ranks_in_one_machine_need_no_network() -> None:
    fabric = fabric_of(w.cluster_of(3, 4), ranks=[4, 5, 6, 7])
    for scheme in ("ps-colocated", "herring", "byteps", "hierarchical"):
        found = get(scheme).price(fabric, _step(12.0))
        assert found.traffic.machine_bytes()[0].tolist() == [0.0]
        assert found.seconds > 0


def test_accumulation_in_shards_moves_more() -> None:
    """3 micro-batches on 4 ranks of 8 bytes: ZeRO-1 2, ZeRO-2 1 + 3, ZeRO-3 3 * 3 rounds of 6 bytes."""
    fabric = fabric_of(w.cluster_of(4))
    step = Step((Variable("w", 8.0),), micro_batches=3)
    sent = {z: get(z).plan_messages(fabric, step).traffic.machine_bytes()[0][0] for z in ("zero1", "zero2", "zero3")}
    assert sent == {"zero1": 12.0, "zero2": 24.0, "zero3": 54.0}
