"""Plans in words: layouts of every operator and tensor, collectives that add up to what the judge counts."""

from __future__ import annotations

import pytest

from planner.hardware import Collective, load_cluster
from planner.sharding import CollectiveUse, OperatorLayout, RestingLayout, describe, mesh_on
from planner.sharding.searches import get
from tests.sharding.graphs import attention_block, products, setting


def test_a_product_cut_by_columns_and_rows_by_hand() -> None:
    one = setting(products([8, 32, 8], batch=4), (2,), 1e6, annotations={"w0": "S1", "w1": "S0"}, sharded_states=False)
    answer = get("gshard")(one)
    found = describe(one, answer.decision, answer.verdict.communication)
    assert found.operators == (
        OperatorLayout("h0", ("n",), ((0, "R"), (1, "S1")), ((0, "S1"),)),
        OperatorLayout("h1", ("k",), ((0, "S1"), (1, "S0")), ((0, "P"),)),
    )
    assert RestingLayout("w0", "S1", "S1", "S1") in found.tensors
    (use,) = [c for c in found.collectives if c.subject == "h1"]
    assert use.phase == "forward"
    assert use.axes == ("axis0",)
    assert use.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    assert use.payload_bytes == 4 * 8 * 2


@pytest.mark.parametrize("forbidden", [(), ("Attention:[!r]*",)])
def test_collectives_add_up(forbidden: tuple[str, ...]) -> None:
    cluster = load_cluster("dgx-a100")
    mesh = mesh_on(cluster, {"data": 2, "context": 4})
    one = setting(attention_block(steps=64), mesh, 1e-2, micro_batches=4, forbidden=forbidden)
    answer = get("ilp")(one)
    found = describe(one, answer.decision, answer.verdict.communication)
    verdict = answer.verdict
    assert sum(c.sent_bytes for c in found.collectives) == pytest.approx(verdict.sent_bytes)
    assert sum(c.seconds for c in found.collectives) == pytest.approx(verdict.reshard_s + verdict.exchange_s)
    assert len(found.operators) + len(found.tensors) == len(answer.decision)
    rings = [c for c in found.collectives if c.reason == "ring"]
    assert all(isinstance(c, CollectiveUse) and c.axes == ("context",) and c.times == 3 for c in rings)
    assert bool(rings) == bool(forbidden)
