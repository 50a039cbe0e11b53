"""Pipelined backpropagation: an update after every sample, never drained."""

from planner.space.subspaces import Limits
from planner.systems import Semantics, System, register
from planner.systems.proposals import by_search

register(
    System(
        key="pipelined-backprop",
        title="Pipelined Backpropagation",
        solver=by_search,
        semantics=Semantics.ASYNC,
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
    ),
)
