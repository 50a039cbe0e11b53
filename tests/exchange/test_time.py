"""Seconds: closed forms on flat fabrics, overlap by hand, WSP's waits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import JobError, UsageError
from planner.exchange import SCHEMES, Exchange, Fabric, Servers, Step, Variable, fabric_of, formulas, get, names
from planner.exchange.scheme import Leg, Message, Scheme, fuse, pack, play
from planner.hardware import Collective, collective_s, load_cluster
from tests.exchange import wires as w

FLUID = "partition_bytes=1e-9"


def _step(*sizes: float, backward_s: float = 0.0) -> Step:
    return Step(tuple(Variable(f"v{i}", float(s)) for i, s in enumerate(sizes)), backward_s)


def _fabric(machines: int, k: int = 0, port: float = 4.0) -> Fabric:
    cluster = w.cluster_of(machines + 1, port=port)
    return fabric_of(cluster, range(machines), Servers(k, sum_byte_per_s=math.inf))


@pytest.mark.parametrize("machines", range(2, 9))
def test_flat_times_are_the_published_ones(machines: int) -> None:
    """One tensor, pushed and pulled in pieces small enough not to matter."""
    payload, rate = 1000.0, 4.0
    step = _step(payload)
    ring_s = formulas.ring_all_reduce_s(payload, machines, rate)
    assert get("ring").price(_fabric(machines), step).seconds == pytest.approx(ring_s)
    assert get(f"ps-colocated:{FLUID}").price(_fabric(machines), step).seconds == pytest.approx(ring_s)
    herring_s = formulas.herring_s(payload, machines, rate, 0.5)
    assert get(f"herring:{FLUID},efficiency=0.5,buffer_bytes=1e9").price(
        _fabric(machines), step
    ).seconds == pytest.approx(herring_s)
    for k in range(1, machines + 3):
        fabric = _fabric(machines, k)
        byteps_s = formulas.byteps_s(payload, machines, k, rate)
        assert get(f"byteps:{FLUID}").price(fabric, step).seconds == pytest.approx(byteps_s)
        servers_s = formulas.separate_server_s(payload, machines, k, rate)
        assert get(f"ps-separate:{FLUID}").price(fabric, step).seconds == pytest.approx(servers_s)
    assert get("in-network").price(_fabric(machines), step).seconds == pytest.approx(payload / rate)


def test_a_partition_that_must_arrive_first_adds_its_time() -> None:
    """4 machines and servers, 100 bytes at 4 bytes/s: 25 s, and a piece of 20 bytes more before pulls begin: 5 s."""
    found = get("ps-separate:partition_bytes=20").price(_fabric(4, 4), _step(100.0))
    assert found.seconds == pytest.approx(30.0)
    assert get("ps-separate:partition_bytes=1e9").price(_fabric(4, 4), _step(100.0)).seconds == pytest.approx(50.0)


def test_whole_variables_wait_for_the_fullest_server() -> None:
    """156 bytes on 4 machines in turn: machine 0 takes in 150 from 3 and pulls 6: 456; equal shards 2*3/4*156 = 234."""
    step = _step(100, 1, 1, 1, 50, 1, 1, 1)
    fabric = _fabric(4, port=1.0)
    turn = get(f"ps-colocated:placement=round-robin,{FLUID}").price(fabric, step)
    assert turn.seconds == pytest.approx(456, rel=0.02)
    assert get(f"ps-colocated:{FLUID}").price(fabric, step).seconds == pytest.approx(234)
    assert get(f"herring:{FLUID}").price(fabric, step).seconds == pytest.approx(234)


def test_slow_summation_is_the_limit() -> None:
    """2 machines, 100 bytes: each takes 50 in to sum at 1 byte/s though the port has 4."""
    found = get(f"ps-colocated:{FLUID},sum_byte_per_s=1").price(_fabric(2), _step(100.0))
    assert found.seconds == pytest.approx(50 + 12.5)


@pytest.mark.parametrize("name", ["ring", "tree", "hierarchical", "all-reduce"])
@pytest.mark.parametrize("profile", ["dgx-a100", "p3.16xlarge", "ethernet-10g", "superpod-h100"])
def test_all_reduce_is_never_below_the_hardware_models(name: str, profile: str) -> None:
    cluster = load_cluster(profile, nodes=4)
    fabric = fabric_of(cluster)
    least = collective_s(cluster, Collective.ALL_REDUCE, fabric.ranks, 1e9)
    found = get(f"{name}:bucket_bytes=1e12").price(fabric, _step(1e9))
    assert found.seconds >= least * (1 - 1e-12)
    if name == "all-reduce":
        assert found.seconds == pytest.approx(least)


@pytest.mark.parametrize("profile", ["dgx-a100", "p3.16xlarge", "ethernet-10g", "superpod-h100", "tpu-v4-pod"])
def test_no_all_reduce_beats_its_own_busiest_port(profile: str) -> None:
    """Counted bytes over achievable port rates, a bound that shares nothing with the hardware's formulas.

    Measured collectives are left out: they may exceed one nominal link, being fits to what a library reached.
    """
    from planner.exchange.collective_schemes import unmeasured

    fabric = fabric_of(unmeasured(load_cluster(profile, nodes=4)))
    for name in ("ring", "tree", "hierarchical", "in-network"):
        if get(name).supports(fabric):
            continue
        found = get(f"{name}:bucket_bytes=1e12").price(fabric, _step(1e9))
        assert found.seconds >= found.traffic.busy_s().max() * (1 - 1e-9), name


class TestOverlap:
    """Buckets on one link of 2 ranks at 1 byte/s: an all-reduce takes as many seconds as the bucket has bytes."""

    def _price(self, variables: tuple[Variable, ...], bucket_bytes: float, backward_s: float = 10.0) -> Exchange:
        fabric = fabric_of(w.cluster_of(2))
        return get(f"ring:bucket_bytes={bucket_bytes}").price(fabric, Step(variables, backward_s))

    def test_by_hand(self) -> None:
        """Ready at 2, 4, 10 with 3, 5, 2 bytes: sent 2-5, 5-10, 10-12."""
        variables = (Variable("c", 2, 10), Variable("a", 3, 2), Variable("b", 5, 4))
        found = self._price(variables, 0)
        assert [(message.variables, end_s) for message, end_s in found.transfers] == [
            (("a",), 5),
            (("b",), 10),
            (("c",), 12),
        ]
        assert (found.seconds, found.exposed_s) == (10, 2)

    def test_buckets_wait_for_their_last(self) -> None:
        """a and b together from 4 to 12, c from 12 to 14."""
        variables = (Variable("a", 3, 2), Variable("b", 5, 4), Variable("c", 2, 10))
        assert self._price(variables, 8).exposed_s == 4
        assert self._price(variables, 100).exposed_s == 10

    def test_no_ready_time_means_no_overlap(self) -> None:
        found = self._price((Variable("a", 3), Variable("b", 5)), 0)
        assert found.exposed_s == found.seconds == 8

    def test_hidden_entirely(self) -> None:
        assert self._price((Variable("a", 3, 2),), 0).exposed_s == 0

    def test_accumulated_gradients_travel_once(self) -> None:
        step = Step((Variable("a", 3, 2),), 10, micro_batches=8)
        found = get("ring").price(fabric_of(w.cluster_of(2)), step)
        assert (found.seconds, found.exposed_s) == (3, 0)
        assert found.traffic.machine_bytes()[0].tolist() == [3, 3]


def test_gradients_pack_whole_and_fuse_in_parts() -> None:
    step = Step((Variable("a", 6, 1), Variable("b", 6, 2), Variable("c", 6, 3)), 3)
    assert [(b.variables, b.gradient_bytes, b.ready_s) for b in pack(step, 10)] == [(("a", "b"), 12, 2), (("c",), 6, 3)]
    assert [(b.variables, b.gradient_bytes, b.ready_s) for b in fuse(step, 8)] == [
        (("a", "b"), 8, 2),
        (("b", "c"), 8, 3),
        (("c",), 2, 3),
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 20)), min_size=1, max_size=12),
    st.floats(0, 60),
)
def test_one_link_is_served_in_order_of_arrival(gradients: list[tuple[float, float]], bucket: float) -> None:
    """Against the recurrence end = max(end, ready) + bytes, and between two bounds for the exposed time."""
    variables = tuple(Variable(f"v{i}", size, ready) for i, (size, ready) in enumerate(gradients))
    step = Step(variables, 20)
    found = get(f"ring:bucket_bytes={bucket}").price(fabric_of(w.cluster_of(2)), step)
    end = 0.0
    for b in pack(step, bucket):
        end = max(end, b.ready_s) + b.gradient_bytes
    assert found.exposed_s == pytest.approx(max(0.0, end - 20))
    assert max(0.0, found.seconds - 20) - 1e-9 <= found.exposed_s <= found.seconds + 1e-9


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_port_is_overbooked(raw: list[tuple[float, list[list[float]]]], chunk: float) -> None:
    messages = [
        Message((f"m{i}",), "x", 1.0, ready, tuple(Leg(np.asarray(p)) for p in phases), chunk)
        for i, (ready, phases) in enumerate(raw)
    ]
    ends_s = play(messages, 2)
    last_s = max(ends_s)
    per_port = np.sum([p.busy_s for m in messages for p in m.legs], axis=0)
    assert last_s >= per_port.max() - 1e-9
    for m, end_s in zip(messages, ends_s, strict=True):
        assert end_s >= m.ready_s + max(p.busy_s.max() for p in m.legs) - 1e-9
    in_turn = max(m.ready_s for m in messages) + sum(p.busy_s.max() for m in messages for p in m.legs)
    assert last_s <= in_turn + 1e-9


def test_phases_in_chunks_by_hand() -> None:
    """Two legs of 4 s and 2 s on ports of their own, a quarter first: the second ends a quarter of itself after."""
    legs = (Leg(np.asarray([4.0, 0, 0, 0])), Leg(np.asarray([0, 2.0, 0, 0]), latency_s=1.0))
    assert play([Message(("m",), "x", 1, 0.0, legs, 0.25)], 2)[0] == 5.5
    assert play([Message(("m",), "x", 1, 0.0, legs, 1.0)], 2)[0] == 7.0


class TestWSP:
    """Waves of virtual workers."""

    @staticmethod
    def _play(wave_s: float, exchange_s: float, distance: int, waves: int = 400) -> float:
        """Wave by wave: a wave may end a wave's time after the one before, and after the weights it must have seen."""
        ended: list[float] = []
        pulled: list[float] = []
        for c in range(waves):
            start = max(ended[-1] if ended else 0.0, pulled[c - 1 - distance] if c > distance else 0.0)
            ended.append(start + wave_s)
            pulled.append(max(ended[-1], pulled[-1] if pulled else 0.0) + exchange_s)
        return (ended[-1] - ended[waves // 2 - 1]) / (waves - waves // 2)

    @pytest.mark.parametrize("distance", range(5))
    @pytest.mark.parametrize("exchange_s", [0.0, 0.5, 1.0, 2.0, 7.0])
    def test_period_equals_the_play(self, exchange_s: float, distance: int) -> None:
        """Within one exchange over 200 waves, as the play may stop anywhere in a period of several waves."""
        played = self._play(1.0, exchange_s, distance)
        want = formulas.wsp_period_s(1.0, exchange_s, distance)
        assert played == pytest.approx(want, abs=(1 + exchange_s) / 200)

    def test_price(self) -> None:
        """2 machines, 8 bytes, 8 s an exchange; a wave of 4 mini-batches of 3 s: D=0 exposes 8 s, D=1 nothing."""
        step = Step((Variable("a", 8.0),), backward_s=2.0, forward_s=1.0, micro_batches=4)
        fabric = fabric_of(w.cluster_of(2))
        none = get(f"wsp:{FLUID}").price(fabric, step)
        assert none.exposed_s == pytest.approx(8, abs=1e-6)
        assert (none.staleness.local, none.staleness.overall) == (3, 6)
        one = get(f"wsp:{FLUID},clock_distance=1").price(fabric, step)
        assert one.exposed_s == pytest.approx(0)
        assert one.staleness.overall == 2 * 4 + 3 - 1

    def test_local_servers_cross_nothing(self) -> None:
        """A stage whose replicas share a machine: with servers spread over 4 machines, 3/4 must cross, else none."""
        fabric = fabric_of(w.cluster_of(4, 2), [2, 3])
        step = Step((Variable("a", 8.0),))
        assert get("wsp:placement=local").price(fabric, step).traffic.machine_bytes()[0].sum() == 0
        spread = get("wsp").price(fabric, step).traffic.machine_bytes()[0]
        assert spread.tolist() == [6.0, 2.0, 2.0, 2.0]


def test_every_scheme_answers_for_every_cluster_it_supports() -> None:
    """Finite, not negative, the same twice, every variable by some method; exposed no more than everything at once."""
    variables = tuple(Variable(f"v{i}", 3e6 * (i + 1), 0.01 * (i + 1)) for i in range(6))
    step = Step((*variables, Variable("e", 4e8, 0.1, sparse=True, touched=0.01)), 0.1, 0.05)
    for profile in ("dgx-a100", "ethernet-25g", "v100-pcie-4", "mixed-pool", "tpu-v3-pod", "gb200-nvl72"):
        cluster = load_cluster(profile)
        for ranks in (range(cluster.device_count), [0], range(min(3, cluster.device_count))):
            fabric = fabric_of(cluster, ranks)
            for name, scheme in SCHEMES.items():
                if scheme.supports(fabric):
                    with pytest.raises(UsageError):
                        scheme.price(fabric, step)
                    continue
                found = scheme.price(fabric, step)
                assert 0 <= found.exposed_s < math.inf, (profile, name)
                assert math.isfinite(found.seconds)
                assert set(found.methods) == {v.name for v in step.variables}
                assert (found.traffic.out_bytes >= 0).all()
                assert found.exposed_s == scheme.price(fabric, step).exposed_s
                if len(fabric.ranks) == 1 and not found.traffic.out_bytes.any():
                    assert found.seconds == 0, (profile, name)


def test_traffic_out_equals_traffic_in() -> None:
    """What leaves the ports of a level enters others of it, wherever endpoints alone send and receive."""
    step = Step((Variable("a", 1e6), Variable("e", 1e8, sparse=True, touched=0.5)))
    fabric = fabric_of(load_cluster("superpod-h100", nodes=8), servers=Servers(3))
    for name in names():
        traffic = get(name).plan_messages(fabric, step).traffic
        assert traffic.out_bytes.sum() == pytest.approx(traffic.in_bytes.sum()), name


def test_memory_of_the_schemes() -> None:
    fabric = fabric_of(w.cluster_of(4))
    step = Step((Variable("a", 30.0), Variable("e", 10.0, sparse=True, touched=0.5)))
    factors = {n: get(n).memory(fabric, step) for n in ("ring", "zero1", "zero2", "zero3", "parallax")}
    kept = {n: (m.weights, m.gradients, m.optimizer) for n, m in factors.items()}
    assert kept == {
        "ring": (1, 1, 1),
        "zero1": (1, 1, 0.25),
        "zero2": (1, 0.25, 0.25),
        "zero3": (0.25, 0.25, 0.25),
        "parallax": (0.75, 0.75, 0.75),
    }
    assert factors["parallax"].transient_bytes == 10.0  # half of the rows pulled, and as many bytes of gradients
    assert factors["parallax"].server_optimizer == pytest.approx(10 / 40 / 4)


def test_sharded_memory_is_the_published_one() -> None:
    """Factors times 2, 2 and 12 bytes a parameter are ZeRO's figures: 7.5B on 64 ranks, in GB."""
    fabric = fabric_of(w.cluster_of(64))
    step = Step((Variable("w", 2 * 7.5e9),))
    for name, gigabytes in (("zero1", 31.40625), ("zero2", 16.640625), ("zero3", 1.875)):
        m = get(name).memory(fabric, step)
        assert 7.5 * (2 * m.weights + 2 * m.gradients + 12 * m.optimizer) == pytest.approx(gigabytes, rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: get("rong"), UsageError),
        (lambda: get("ring:bucket=3"), UsageError),
        (lambda: get("ring:bucket_bytes=many"), UsageError),
        (lambda: get("ps-colocated:placement=best"), UsageError),
        (lambda: get("ring:bucket_bytes=-1").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("ring:efficiency=0").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("herring:buffer_bytes=0").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("parallax:partitions=-2").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("zero3").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("wsp:clock_distance=-1").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("ps-separate").price(_fabric(2), _step(1)), UsageError),
        (lambda: get("ps-separate:sum_byte_per_s=1e9").price(_fabric(2, 2), _step(1)), UsageError),
        (lambda: get("hierarchical").price(fabric_of(w.cluster_of(2, 2), [0, 1, 2]), _step(1)), UsageError),
        (lambda: get("in-network").price(fabric_of(load_cluster("tpu-v3-pod")), _step(1)), UsageError),
        (lambda: Variable("a", -1), JobError),
        (lambda: Variable("a", 1, touched=0), JobError),
        (lambda: Step((Variable("a", 1), Variable("a", 1))), JobError),
        (lambda: Step((Variable("a", 1, ready_s=2),), 1), JobError),
        (lambda: Step((), micro_batches=0), JobError),
        (lambda: fabric_of(w.cluster_of(2), [0, 0]), JobError),
        (lambda: fabric_of(w.cluster_of(2), [2]), JobError),
        (lambda: Servers(-1), JobError),
    ],
)
def test_refuses(wrong: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong()  # type: ignore[operator]


def test_names_carry_options() -> None:
    assert get("herring:buffer_bytes=4e6,efficiency=0.5").name == "herring:buffer_bytes=4000000,efficiency=0.5"
    assert get(get("byteps:inside=pcie").name) == get("byteps:inside=pcie")
    assert dataclasses.is_dataclass(get("ring"))


def test_a_scheme_without_messages_cannot_be_made() -> None:
    class Silent(Scheme):
        key = "silent"

    with pytest.raises(TypeError, match="plan_messages"):
        Silent()  # type: ignore[abstract]
