"""Published closed forms and small exact problems of all systems, by name.

A name is the system, the quantity and its unit if it has one (`gpipe_bubble`, `byteps_shares`, `zero_state_bytes`).
docs/formulas.md lists all of them. A schedule without a closed form is simulated:
`planner.measure_schedule("zb-v", 8, 16, forward_s=1, backward_s=2, weight_grad_s=1)`.

A formula is a public function of one of the modules below. Formulas of schedules are computed from the facts that each
schedule registers: `gpipe_bubble` is `bubble` of `schedule_figures("gpipe", ...)`.

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
    from planner.formulas.pipelines import *  # noqa: F403
    from planner.formulas.sharding import *  # noqa: F403
    from planner.formulas.stages import *  # noqa: F403
    from planner.schedules.pipelined_backprop import *  # noqa: F403

_MODULES = (
    "planner.formulas.pipelines",
    "planner.schedules.pipelined_backprop",
    "planner.formulas.stages",
    "planner.exchange.formulas",
    "planner.formulas.sharding",
)

_REPLACED = {
    "recompute_overhead": "F / (F + B)",
    "chimera_critical_passes": "N and N + D - 2",
    "pipemare_gain": "1 / (1 - gpipe_bubble(p, m))",
    "pipemare_memory_factor": "(n + 1) / n for n buffers",
    "pipemare_velocity": "gamma * velocity + (1 - gamma) * (new_weight - old_weight)",
    "pipemare_backward_weight": "weight - (tau_forward - tau_backward) * velocity",
    "predicted_weight": "weight - learning_rate * horizon * velocity",
    "hetpipe_clock_may_advance": "clock - slowest_clock <= distance",
    "pipedream_2bw_time_s": "max(compute + transfers, all-reduce / m) over the stages",
    "piper_in_flight": "ceil(sum(replicas[i:]) / replicas[i])",
    "tree_all_reduce_bytes": "ranks * all_reduce_bytes",
    "touched_by": "1 - (1 - touched) ** workers",
    "sharded_server_bytes": "all_reduce_bytes",
    "zero_parts": "zero_state_bytes(1, ranks, stage, 1, 0, 0) and its like",
    "tofu_total_bytes": "sum(parts**i * step for i, step in enumerate(steps))",
    "tofu_recursion_is_optimal": "parts**i * step, which must not fall from step to step",
    "gshard_all_to_all_growth": "sqrt(devices / from_devices)",
    "tensor_parallel_layer_elements": "4 * all_reduce_bytes(batch * sequence * hidden, ranks)",
    "rabenseifner_s": "2 * log2(ranks) * latency_s + ring_all_reduce_s",
    "bert_parameters": 'planner.bundled_info("bert-48").parameters and its like',
    "gpt_parameters": 'planner.bundled_info("gpt2").parameters and its like',
    "bert_embedding_parameters": "(30522 + 512 + 2 + 2) * hidden",
    "gpt_embedding_parameters": "(50257 + 1024) * hidden",
}
"""By name of an earlier version: the expression that replaces it."""


@lru_cache(maxsize=1)
def written() -> dict[str, Callable[..., Any]]:
    """Formulas that are written as functions, by name, in the order of their modules."""
    functions: dict[str, Callable[..., Any]] = {}
    for name in _MODULES:
        members = vars(importlib.import_module(name))
        functions |= {
            n: f for n, f in members.items() if inspect.isfunction(f) and f.__module__ == name and n[0] != "_"
        }
    del functions["schedule_formulas"]
    return functions


@lru_cache(maxsize=1)
def _formulas() -> dict[str, Callable[..., Any]]:
    from planner.formulas.pipelines import schedule_formulas

    return {**schedule_formulas(), **written()}


def names(begin: str = "") -> tuple[str, ...]:
    """Sorted names of all formulas that begin with a text."""
    return tuple(sorted(name for name in _formulas() if name.startswith(begin)))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("_") or name not in _formulas():
        raise AttributeError(f"module 'planner.formulas' has no attribute {name!r}; {_hint(name)}")
    return _formulas()[name]


def __dir__() -> list[str]:
    return ["names", "written", *names()]


def _hint(name: str) -> str:
    """The replacement of a name of an earlier version, else the names of the same system, else the closest names."""
    if name in _REPLACED:
        return f"use {_REPLACED[name]}"
    system = name.split("_")[0]
    related = names(f"{system}_")
    return f"known of {system}: {', '.join(related)}" if related else did_you_mean(name, _formulas())
