"""The cheapest way for each tensor, and from a graph to what is exchanged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.exchange import Servers, Step, Variable, choose, fabric_of, get
from planner.hardware import load_cluster
from tests.exchange import wires as w

SYNCHRONOUS = ("ring", "tree", "ps-colocated", "byteps", "parallax")


def test_small_by_tree_and_large_by_ring() -> None:
    """16 ranks, 1 s a message, 1 byte/s: a tree takes 8 + 2M, a ring 30 + 15/8 M; equal at 176 bytes."""
    fabric = fabric_of(w.cluster_of(16, latency_s=1.0))
    step = Step((Variable("small", 100.0, 1.0), Variable("large", 10000.0, 2.0)), 2.0)
    found = choose(fabric, step, ("ring:bucket_bytes=0", "tree:bucket_bytes=0"), bucket_bytes=0)
    assert found.methods == {"small": "tree:bucket_bytes=0", "large": "ring:bucket_bytes=0"}
    # 208 s from 1 s on, then 18780 s: 209 + 18780, less the backward of 2 s
    assert found.exposed_s == pytest.approx(209 + 18780 - 2)


def test_tensors_below_a_bucket_are_priced_as_a_part_of_one() -> None:
    """One of 100 bytes in buckets of 10000: 1/100 of a ring's 30 + 18750 s, not of a tree's 8 + 20000."""
    fabric = fabric_of(w.cluster_of(16, latency_s=1.0))
    found = choose(fabric, Step((Variable("small", 100.0),)), ("ring", "tree"), bucket_bytes=1e4)
    # laid in time it travels alone, by which the tree still wins
    assert found.scheme == "tree"
    many = Step(tuple(Variable(f"v{i}", 100.0) for i in range(100)))
    found = choose(fabric, many, ("ring:bucket_bytes=10000", "tree:bucket_bytes=10000"), bucket_bytes=1e4)
    assert found.scheme == "ring:bucket_bytes=10000"


def test_sparse_by_servers_and_dense_by_all_reduce() -> None:
    """On 8 ranks a machine the ring inside is cheap; an embedding of which 1% is touched goes to servers."""
    fabric = fabric_of(load_cluster("p3.16xlarge", nodes=8), servers=Servers(2))
    step = Step((Variable("w", 1e8), Variable("emb", 1e9, sparse=True, touched=0.01)))
    found = choose(fabric, step, ("all-reduce", "ps-colocated", "ps-separate"))
    assert found.scheme == "ps-colocated"
    assert found.exposed_s < get("all-reduce").price(fabric, step).exposed_s


def test_what_a_profile_does_not_promise_is_not_taken() -> None:
    fabric = fabric_of(load_cluster("dgx-a100", nodes=4))
    step = Step((Variable("w", 1e9),))
    assert "in-network" not in choose(fabric, step).scheme
    assert choose(fabric, step, ("ring", "in-network")).scheme == "in-network"


def test_schemes_that_cannot_run_are_named() -> None:
    fabric = fabric_of(w.cluster_of(2, 2), [0, 1, 2])
    found = choose(fabric, Step((Variable("w", 8.0),)), ("ring", "hierarchical"))
    assert found.scheme == "ring"
    assert any(note.startswith("not hierarchical: ") for note in found.notes)
    with pytest.raises(UsageError, match="no allowed scheme"):
        choose(fabric, Step((Variable("w", 8.0),)), ("hierarchical", "ps-separate"))


def test_stale_weights_are_no_choice() -> None:
    with pytest.raises(UsageError, match="stale"):
        choose(fabric_of(w.cluster_of(2)), Step((Variable("w", 8.0),), micro_batches=2), ("ring", "wsp"))


def test_nothing_to_exchange() -> None:
    assert choose(fabric_of(w.cluster_of(2)), Step(())).exposed_s == 0
    assert choose(fabric_of(w.cluster_of(2)), Step((Variable("w", 0.0),))).seconds == 0


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.floats(1, 1e4), st.booleans(), st.floats(0.01, 1), st.floats(0, 9)), min_size=1, max_size=5),
    st.floats(0, 3),
)
def test_never_worse_than_any_allowed(
    machines: int, raw: list[tuple[float, bool, float, float]], latency_s: float
) -> None:
    fabric = fabric_of(w.cluster_of(machines, 2, inside=8.0, latency_s=latency_s))
    step = Step(tuple(Variable(f"v{i}", *(b, r, s, t)) for i, (b, s, t, r) in enumerate(raw)), 9.0, 4.0)
    found = choose(fabric, step, SYNCHRONOUS, bucket_bytes=100)
    for name in SYNCHRONOUS:
        assert found.exposed_s <= get(name).price(fabric, step).exposed_s
    assert set(found.methods) == {v.name for v in step.variables}
