"""Plans in words: layouts of every operator and tensor, collectives that add up to what the judge counts."""

from __future__ import annotations

import pytest

from planner.hardware import Collective, load_cluster
from planner.sharding import CollectiveUse, Strategy, WeightChoice, collective_uses, layout_text, mesh_on
from planner.sharding.searches import get
from tests.sharding.graphs import attention_block, products, setting


def test_a_product_cut_by_columns_and_rows_by_hand() -> None:
    forbidden = ("h0:m", "h0:k", "h1:m", "h1:n")
    one = setting(products([8, 32, 8], batch=4), (2,), 1e6, forbidden=forbidden, sharded_states=False)
    answer = get("gshard")(one)
    uses = collective_uses(one, answer.decision, answer.verdict.communication)
    texts = {n: str(c) for n, c in answer.decision.items() if isinstance(c, Strategy)}
    assert texts == {"op:h0": "[n] R, S1 -> S1", "op:h1": "[k] S1, S0 -> P"}
    weight = answer.decision["w0"]
    assert isinstance(weight, WeightChoice)
    assert [layout_text(layout) for layout in weight.layouts] == ["S1", "S1", "S1"]
    (use,) = [c for c in uses if c.subject == "h1"]
    assert use.phase == "forward"
    assert use.axes == ("axis0",)
    assert use.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    assert use.payload_bytes == 4 * 8 * 2


@pytest.mark.parametrize("forbidden", [(), ("Attention:[!r]*",)])
def test_collectives_add_up(forbidden: tuple[str, ...]) -> None:
    cluster = load_cluster("dgx-a100")
    mesh = mesh_on(cluster, {"data": 2, "context": 4})
    one = setting(attention_block(steps=64), mesh, 1e-2, micro_batches=4, forbidden=forbidden)
    answer = get("gshard")(one)
    uses = collective_uses(one, answer.decision, answer.verdict.communication)
    verdict = answer.verdict
    assert sum(c.sent_bytes for c in uses) == pytest.approx(verdict.sent_bytes)
    assert sum(c.seconds for c in uses) == pytest.approx(verdict.reshard_s + verdict.exchange_s)
    rings = [c for c in uses if c.reason == "ring"]
    assert all(isinstance(c, CollectiveUse) and c.axes == ("context",) and c.times == 3 for c in rings)
    assert bool(rings) == bool(forbidden)
