"""What no order of work of a priced pipeline can be faster than."""

from __future__ import annotations

import numpy as np

from planner.play import Transfers
from planner.systems._price import Figures


def least_s(figures: Figures, micro_batches: int, transfers: Transfers, *, drains: bool) -> float:
    """A bound on the time of the global batch; O(stages * holders).

    A worker computes its share of every micro-batch of its stages, and has both transfers over the boundary before its
    stage where they stop it. Where the pipeline drains and each stage has its own worker, the first micro-batch has
    come through all stages before, and the last one goes back through them while the worker exchanges its gradients.

    Args:
        figures: prices of the stages.
        micro_batches: of one pipeline and iteration.
        transfers: what a transfer between stages occupies.
        drains: whether the iteration is a makespan, not a pace.
    """
    alone = all(len(own) == 1 for own in figures.holders)
    each_s = figures.forward_s + figures.backward_s
    wait_s = np.zeros_like(each_s)
    if alone and transfers is Transfers.BLOCKING:
        wait_s = figures.receive_s + figures.return_s
    load_s = np.zeros(1 + max(worker for own in figures.holders for worker in own))
    for stage, own in enumerate(figures.holders):
        load_s[list(own)] += micro_batches * float(each_s[stage] + wait_s[stage]) / len(own)
    if not (alone and drains):
        return float(load_s.max())
    filled_s = np.cumsum(figures.forward_s) - figures.forward_s
    drained_s = np.cumsum(figures.backward_s) - figures.backward_s
    return float((filled_s + load_s + np.maximum(drained_s, figures.sync_s)).max())
