"""Published closed forms and small exact problems of every system, by name.

A name begins with its system (`gpipe_bubble`, `byteps_shares`, `zero_state_bytes`) and says what it gives; the unit is
its last word where there is one. docs/formulas.md lists all of them. What has no closed form is simulated:
`planner.measure_schedule("zb-v", 8, 16, forward_s=1, backward_s=2, weight_grad_s=1)`.

A formula is a public function of one of the modules below. Those of schedules follow from what each schedule says of
itself: `gpipe_bubble` is `bubble` of `schedule_figures("gpipe", ...)`.

>>> from planner import formulas
>>> formulas.gpipe_makespan_s(workers=4, micro_batches=8, forward_s=1, backward_s=2)
33.0
>>> formulas.names("seq1f1b_b")
('seq1f1b_bubble', 'seq1f1b_bubble_over_ideal')
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from planner.registry import did_you_mean

if TYPE_CHECKING:
    from planner.exchange.formulas import *  # noqa: F403
    from planner.exchange.partitions import *  # noqa: F403
    from planner.formulas.asynchronous import *  # noqa: F403
    from planner.formulas.mesh_tensorflow import *  # noqa: F403
    from planner.formulas.partitions import *  # noqa: F403
    from planner.formulas.pipelines import *  # noqa: F403
    from planner.formulas.stages import *  # noqa: F403
    from planner.formulas.traffic import *  # noqa: F403
    from planner.schedules.pipelined_backprop import *  # noqa: F403

_MODULES = (
    "planner.formulas.pipelines",
    "planner.formulas.asynchronous",
    "planner.schedules.pipelined_backprop",
    "planner.formulas.stages",
    "planner.formulas.partitions",
    "planner.exchange.formulas",
    "planner.exchange.partitions",
    "planner.formulas.traffic",
    "planner.formulas.mesh_tensorflow",
)

_REPLACED = {
    "pipeline_makespan_s": "gpipe_makespan_s",
    "pipeline_bubble": "gpipe_bubble",
    "pipeline_bubble_over_ideal": "gpipe_bubble_over_ideal",
    "pipeline_memory": "schedule_figures(schedule, workers, micro_batches)",
    "interleaved_warm_up": "interleaved_in_flight, less one chunk",
    "interleaved_memory_factor": "interleaved_in_flight(p, m, chunks=v)[0] / p",
    "seq1f1b_warm_up": "seq1f1b_in_flight, less one sub-sequence",
    "chimera_sync_ranks": "copies * chimera_weight_copies(p, m, pairs=f)",
    "hanayo_makespan": "hanayo_makespan_s",
    "zero_bubble_bubble_s": "zb_h1_idle_s, zb_h2_idle_s, zb_v_idle_s",
    "zero_bubble_in_flight": "zb_h1_in_flight, zb_h2_in_flight, zb_v_in_flight, v_half_in_flight, v_min_in_flight",
    "zero_bubble_v_makespan": "zb_v_makespan_s, v_half_makespan_s, v_min_makespan_s",
    "pipedream_mean_weight_copies": "pipedream_weight_copies",
    "pipedream_noam": "pipedream_in_flight(p, m)[0]",
    "pipedream_stage_bytes": "pipedream_in_flight, times the bytes of weights and activations",
    "pipedream_transfer_s": "2 * boundary_bytes / byte_per_s",
    "pipemare_stashed_copies": "sum(pipemare_delays(p, m)) / p",
    "pipemare_flushed_utilisation": "1 - gpipe_bubble(p, m)",
    "pipelined_backprop_delays": "pipelined_backprop_staleness",
    "weight_prediction_horizon": "pipelined_backprop_staleness",
    "pipeoptim_horizons": "pipedream_staleness",
    "all_gather_bytes": "reduce_scatter_bytes",
    "all_to_all_bytes": "reduce_scatter_bytes",
    "byteps_bound": "byteps_speedup(n, n)",
    "speedup": "rate / baseline",
    "core_years": "cores * days / 365.25",
    "bapipe_weight_bytes": "2 * weight_bytes",
}
"""Names of earlier versions, and what says the same now."""


@lru_cache(maxsize=1)
def written() -> dict[str, Callable[..., Any]]:
    """Formulas with a text of their own, by name, in the order of their modules."""
    found: dict[str, Callable[..., Any]] = {}
    for name in _MODULES:
        own = vars(importlib.import_module(name))
        found |= {n: f for n, f in own.items() if inspect.isfunction(f) and f.__module__ == name and n[0] != "_"}
    del found["schedule_formulas"]
    return found


@lru_cache(maxsize=1)
def _formulas() -> dict[str, Callable[..., Any]]:
    from planner.formulas.pipelines import schedule_formulas

    return {**schedule_formulas(), **written()}


def names(begin: str = "") -> tuple[str, ...]:
    """Names of all formulas that begin so, sorted."""
    return tuple(sorted(name for name in _formulas() if name.startswith(begin)))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("_") or name not in _formulas():
        raise AttributeError(f"module 'planner.formulas' has no attribute {name!r}; {_hint(name)}")
    return _formulas()[name]


def __dir__() -> list[str]:
    return ["names", "written", *names()]


def _hint(name: str) -> str:
    """What replaces a name of an earlier version, the names of the same system, or the closest ones."""
    if name in _REPLACED:
        return f"use {_REPLACED[name]}"
    system = name.split("_")[0]
    own = names(f"{system}_")
    return f"known of {system}: {', '.join(own)}" if own else did_you_mean(name, _formulas())
