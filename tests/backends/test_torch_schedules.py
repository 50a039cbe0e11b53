"""torch's own pipeline runtime takes the orders that are exported to it: it checks them and plays their transfers."""

from __future__ import annotations

import csv
import io

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.pipelining import schedules as pipelining

from planner import export
from planner.export.torch import TORCH
from tests.export.plans import plan

WORKERS = 4


@pytest.mark.parametrize("name", TORCH.schedules)
def test_torch_checks_and_plays_an_exported_order(name: str) -> None:
    chunks = 2 if name in ("interleaved", "hanayo", "zb-v", "v-half", "v-min", "dualpipe-v") else 1
    found = plan("llama3-8b", pipeline=WORKERS, chunks=chunks, schedule=name, micro_batch=2)
    text = export.export(found, "torch").files["schedule.csv"]
    rows = list(csv.reader(io.StringIO(text)))
    orders = dict(enumerate(map(_order, rows)))
    stages, count = len(found.stages), found.micro_batches.count // len(found.stages[0].replicas)
    ranks = pipelining._validate_schedule(orders, WORKERS, stages, count)
    workers = list(dict.fromkeys(stage.replicas for stage in found.stages))
    assert ranks == {stage.index: workers.index(stage.replicas) for stage in found.stages}
    with_transfers = pipelining._add_send_recv(orders, ranks.__getitem__, stages)
    assert sum(map(len, with_transfers.values())) > sum(map(len, orders.values()))
    pipelining._simulate_comms_compute(with_transfers, ranks.__getitem__, stages)


def _order(row: list[str]) -> list[pipelining._Action]:
    """The actions of a row, two that run together one after the other: torch plays no pairs."""
    actions = map(pipelining._Action.from_str, row)
    return [part for action in actions for part in action.sub_actions or (action,)]


def test_torch_refuses_an_order_that_is_wrong() -> None:
    rows = {0: [pipelining._Action.from_str(cell) for cell in ("0B0", "0F0")]}
    with pytest.raises(AssertionError, match="without first running Forward"):
        pipelining._validate_schedule(rows, 1, 1, 1)
