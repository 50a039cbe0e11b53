"""Pipelined backpropagation: an update after every sample, never drained."""

from planner.space.subspaces import Limits
from planner.systems import Semantics, System, register
from planner.systems.proposals import by_search

register(
    System(
        key="pipelined-backprop",
        title="Pipelined Backpropagation",
        cut="one stage per device",
        solver=by_search,
        semantics=Semantics.ASYNC,
        staleness="2(S-s) updates forward at stage s (1..S), 0 backward",
        chooses="as many stages as devices, one sample at a time, optimizer scaled to that",
        source="Kosson et al., MLSys 2021; Chen et al. 2018 (SpecTrain)",
        limits=Limits(
            schedules=("pipelined-backprop",), fewest_stages=2, stage_a_device=True, micro_batches=(1,), copies=False
        ),
        backend={
            "weight_versions": "1, and a predicted copy while it is used",
            "update": "after every sample",
            "spike_compensation": "w <- w - eta (a v + b g), a = m^D, b = (1 - m^D)/(1 - m)",
            "weight_prediction": "forward with w - eta T v, T = D (SpecTrain: both passes)",
            "optimizer": "m' = m^(N'/N), eta' = eta (1 - m') N' / ((1 - m) N)",
        },
        open=(
            "a micro-batch of one sample, as published; the table's iteration is a global batch of "
            "them, and as many updates",
            "no replication: devices beyond the number of blocks stay idle",
            "the predicted copy is charged as one more copy of the weights",
        ),
    ),
)
