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
    from planner.published.formulas.pipelines import *  # noqa: F403
    from planner.published.formulas.sharding import *  # noqa: F403
    from planner.published.formulas.stages import *  # noqa: F403
    from planner.schedules.pipelined_backprop import *  # noqa: F403

_MODULES = (
    "planner.published.formulas.pipelines",
    "planner.schedules.pipelined_backprop",
    "planner.published.formulas.stages",
    "planner.exchange.formulas",
    "planner.published.formulas.sharding",
)


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
    from planner.published.formulas.pipelines import schedule_formulas

    return {**schedule_formulas(), **written()}


def names(begin: str = "") -> tuple[str, ...]:
    """Sorted names of all formulas that begin with a text."""
    return tuple(sorted(name for name in _formulas() if name.startswith(begin)))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("_") or name not in _formulas():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {_hint(name)}")
    return _formulas()[name]


def __dir__() -> list[str]:
    return ["names", "written", *names()]


def _hint(name: str) -> str:
    """The names of the same system, else the closest names."""
    system = name.split("_")[0]
    related = names(f"{system}_")
    return f"known of {system}: {', '.join(related)}" if related else did_you_mean(name, _formulas())
