"""docs/formulas.md: formulas show their signatures and docstrings, schedules what they say of themselves."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.schedules_page import idle_cell, kept_cell
from planner import formulas
from planner.published.formulas.pipelines import FIGURES, FUNCTION_NAMES
from planner.schedules import SCHEDULES, get

_HEAD = f"""\
# Formulas

What the published systems cost, keep and decide, as functions with plain numbers in and out. They are in
`planner.published.formulas`, and everything here can be had after

```pycon
>>> import planner
>>> from planner import formulas

```

A name begins with its system and ends with its unit where it has one (`_s` seconds, `_bytes`); times may be in any unit
if all are. `formulas.names("chimera")` lists the names of a system, `help(formulas.chimera_bubble)` explains one, a
misspelt name is answered with the nearest. Wrong arguments raise `planner.UsageError` (a schedule that cannot serve a
pipeline `planner.PlanError`) and say what to do.

Every schedule has the same figures, {", ".join(f"`{figure}`" for figure in FIGURES)},
each by the name of the schedule (`gpipe_bubble(4, 8)`, `one_f_one_b_in_flight(4, 8)`,
`chimera_makespan_s(8, 8, 1, 2, pairs=2)`), or all of them by `schedule_figures`. They follow from what the schedule
says of itself: p workers, i = 0..p-1 a worker, m micro-batches; F, B and W the forward, the whole backward and its
weight gradient of one stage (where a worker has several: of each). The bubble is idle / (work + idle), (p-1)/(m+p-1)
where (p-1)(F+B) is idle. Where a closed form does not hold it refuses and names the simulation.

Formulas hold for equal stages. `planner.measure_schedule` plays any schedule with times by stage, transfers and
exchanges ([all schedules](schedules.md)); where formula and simulation differ, the simulation counts. Prices on real
clusters are in [exchange](exchange.md) and [systems](systems.md). This page is made from the code, and all its
examples are run as tests.
"""

SIMULATED = {
    "GPipe": """
        >>> found = planner.measure_schedule("gpipe", 4, 8, forward_s=1, backward_s=2)
        >>> found.makespan_s, round(found.bubble, 4), found.held
        (33.0, 0.2727, (8, 8, 8, 8))
        >>> planner.measure_schedule("gpipe:recompute=true", 4, 8, forward_s=1, backward_s=2, recompute_s=1).makespan_s
        44.0
    """,
    "1F1B with a flush": """
        >>> planner.measure_schedule("1f1b", 4, 8, forward_s=1, backward_s=2).held
        (4, 3, 2, 1)
    """,
    "Interleaved 1F1B": """
        >>> found = planner.measure_schedule("interleaved:chunks=2", 4 * 2, 8, forward_s=0.5, backward_s=1.0)
        >>> found.makespan_s, found.bubble_over_ideal, found.held_micro_batches
        (28.5, 0.1875, (5.5, 4.5, 3.5, 2.5))
    """,
    "Chimera": """
        >>> found = planner.measure_schedule("chimera:pairs=2", 8, 8, forward_s=1, backward_s=2)
        >>> found.makespan_s, found.held
        (28.0, (7, 8, 8, 7, 7, 8, 8, 7))
        >>> planner.measure_schedule("chimera:over=double", 4, 8, forward_s=1, backward_s=2).makespan_s
        28.0
        >>> planner.bundled_info("bert-48").parameters
        669790012
    """,
    "GEMS": """
        >>> planner.measure_schedule("gems", 4, 8, forward_s=1, backward_s=1).makespan_s
        43.0
    """,
    "BaPipe": """
        >>> planner.measure_schedule("bapipe-so", 4, 8, forward_s=1, backward_s=2, receive_s=0.25).makespan_s
        34.5
        >>> planner.measure_schedule("bapipe-fbp", 3, 6, forward_s=1, backward_s=2).held
        (6, 4, 2)
    """,
    "PipeDream": """
        >>> found = planner.measure_schedule("pipedream", 4, 4, forward_s=1, backward_s=2)
        >>> found.staleness, found.weight_versions
        ((3, 2, 1, 0), (4, 3, 2, 1))
    """,
    "PipeDream-2BW": """
        >>> found = planner.measure_schedule("pipedream-2bw:uniform=false", 4, 8, forward_s=1, backward_s=2)
        >>> found.staleness, max(found.weight_versions)
        ((1, 1, 1, 0), 2)
    """,
    "PipeMare": """
        >>> planner.measure_schedule("pipemare", 4, 4, forward_s=1, backward_s=1).mean_staleness
        (1.75, 1.25, 0.75, 0.25)
    """,
    "Pipelined Backpropagation": """
        >>> planner.measure_schedule("pipelined-backprop", 4, 4, forward_s=1, backward_s=1).staleness
        (6, 4, 2, 0)
    """,
    "HetPipe": """
        >>> found = planner.measure_schedule("hetpipe:concurrent=4", 2, 8, forward_s=1, backward_s=2, replicas=2)
        >>> found.staleness, found.weight_versions
        ((3, 3), (4, 4))
    """,
    "DAPPLE": """
        >>> planner.measure_schedule("dapple", 4, 8, forward_s=[2, 1, 1, 1], backward_s=[4, 2, 2, 2]).makespan_s
        51.0
        >>> planner.measure_schedule("dapple", 4, 8, forward_s=1, backward_s=2, sync_s=5).makespan_s
        38.0
    """,
    "Zero bubble": """
        >>> whole = dict(forward_s=1, backward_s=2, weight_grad_s=1)
        >>> [planner.measure_schedule(s, 4, 8, **whole).iteration_s for s in ("zb-h1", "zb-h1:limit=6", "zb-h2")]
        [27.0, 25.0, 24.0]
        >>> [planner.measure_schedule(s, 2 * 4, 8, **whole).iteration_s for s in ("zb-v", "v-half", "v-min")]
        [48.0, 53.0, 59.0]
    """,
    "Hanayo": """
        >>> planner.measure_schedule("hanayo:waves=2", 4 * 4, 4, forward_s=1, backward_s=2).makespan_s
        60.0
    """,
    "BPipe": """
        >>> planner.measure_schedule("bpipe", 8, 32, forward_s=1, backward_s=2).held
        (5, 5, 5, 5, 4, 4, 4, 4)
    """,
    "DualPipe": """
        >>> half = planner.play.Conditions(pair_overlap=1.0)
        >>> times = {"forward_s": 1, "backward_s": 2, "weight_grad_s": 1}
        >>> found = planner.measure_schedule("dualpipe", 8, 20, **times, conditions=half)
        >>> found.makespan_s, found.worker_idle_s
        (52.0, (1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 2.0, 1.0))
    """,
    "Seq1F1B": """
        >>> found = planner.measure_schedule("seq1f1b:splits=4", 4, 8, forward_s=1, backward_s=2)
        >>> round(found.bubble, 6), found.held_micro_batches
        (0.085714, (1.75, 1.5, 1.25, 1.0))
    """,
}
"""By system, what a simulation or another function of the front door shows."""


GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Every schedule": ((), ("schedule_figures",)),
    "GPipe": (("gpipe",), ("gpipe_",)),
    "1F1B with a flush": (("1f1b",), ()),
    "Interleaved 1F1B": (("interleaved",), ()),
    "Chimera": (("chimera",), ("chimera_",)),
    "GEMS": (("gems",), ("gems_",)),
    "BaPipe": (("bapipe-as", "bapipe-sno", "bapipe-so", "bapipe-fbp"), ("bapipe_",)),
    "PipeDream": (("pipedream",), ("pipedream_",)),
    "PipeDream-2BW": (("pipedream-2bw",), ("pipedream_2bw_",)),
    "PipeMare": (("pipemare",), ("pipemare_",)),
    "Pipelined Backpropagation": (
        ("pipelined-backprop",), ("fill_drain_", "spike_", "scaled_", "spectrain_"),
    ),
    "HetPipe": (("hetpipe",), ("hetpipe_", "wsp_")),
    "DAPPLE": (("dapple",), ("dapple_",)),
    "Zero bubble": (("zb-h1", "zb-h2", "zb-v", "v-half", "v-min"), ()),
    "Hanayo": (("hanayo",), ()),
    "BPipe": (("bpipe",), ()),
    "DualPipe": (("dualpipe", "dualpipe-v"), ("dualpipe_",)),
    "Seq1F1B": (("seq1f1b",), ("seq1f1b_",)),
    "Tofu": ((), ("tofu_",)),
    "GShard": ((), ("gshard_",)),
    "Mesh-TensorFlow": ((), ("mesh_tensorflow_", "named_program")),
    "Collectives": (
        (),
        (
            "all_reduce_", "reduce_scatter_", "in_network_", "ring_", "separate_server_",
        ),
    ),
    "BytePS": ((), ("byteps_", "pcie_")),
    "Herring": ((), ("herring_", "round_robin_", "balanced_")),
    "Parallax": ((), ("parallax_", "best_part", "whole_part", "fit_part", "search_part")),
    "Alpa": ((), ("alpa_",)),
    "ZeRO and FSDP": ((), ("zero_",)),
    "AutoDDL and tensor parallelism": ((), ("autoddl_",)),
    "Piper": ((), ("piper_", "contiguous_")),
    "Acyclic partition of a DAG (Archer et al.)": ((), ("max_load_",)),
    "Sizes of models": ((), ("transformer_", "largest_")),
}  # fmt: skip
"""By system, its schedules and what the names of its other formulas begin with."""


def formulas_page() -> str:
    """Markdown of docs/formulas.md."""
    return "\n".join([_HEAD, *_index(), "", *_sections()])


def members(system: str) -> list[str]:
    """Names of a system's written formulas: those of no longer beginning that is another's."""
    begins = {begin: group for group, (_, own) in GROUPS.items() for begin in own}
    return [
        name
        for name in formulas.written()
        if begins.get(max((b for b in begins if name.startswith(b)), key=len, default="")) == system
    ]


def schedules_of(system: str) -> tuple[str, ...]:
    """Names of a system's schedules; those of none stand under what all have."""
    named = {schedule for own, _ in GROUPS.values() for schedule in own}
    rest = tuple(name for name in SCHEDULES.names() if name not in named)
    return GROUPS[system][0] + (rest if system == "Every schedule" else ())


def _index() -> Iterator[str]:
    """A table of all systems with the names of their formulas."""
    yield "| system | schedules | formulas |"
    yield "|---|---|---|"
    for system in GROUPS:
        own, played = (", ".join(f"`{name}`" for name in found) for found in (members(system), schedules_of(system)))
        anchor = re.sub(r"[^a-z0-9 -]", "", system.lower()).replace(" ", "-")
        yield f"| [{system}](#{anchor}) | {played} | {own} |"


def _sections() -> Iterator[str]:
    for system in GROUPS:
        yield f"## {system}\n"
        yield from map(_facts, schedules_of(system))
        for name in members(system):
            yield _entry(name, getattr(formulas, name))
        if system in SIMULATED:
            yield "Played, or counted on a graph:\n"
            yield f"```pycon\n{textwrap.dedent(SIMULATED[system]).strip()}\n\n```\n"


def _facts(schedule: str) -> str:
    """What a schedule says of itself, and the names of its formulas."""
    begin = FUNCTION_NAMES.get(schedule, schedule.replace("-", "_"))
    idle, kept = idle_cell(get(schedule)), kept_cell(get(schedule))
    return (
        f"**`{begin}_*(workers, micro_batches, forward_s=1.0, backward_s=2.0, weight_grad_s=None, **options)`** "
        f"`{schedule}`: idle {idle}; keeps {kept} ([all schedules](schedules.md)).\n"
    )


def _entry(name: str, function: Callable[..., Any]) -> str:
    """The call, what it gives in the first paragraph of its docstring, and its examples."""
    text = inspect.getdoc(function) or ""
    paragraphs = text.split("\n\n")
    examples = "\n".join(p for p in paragraphs if p.startswith(">>>"))
    return f"**`{name}{_arguments(function)}`** {' '.join(paragraphs[0].split())}\n\n```pycon\n{examples}\n\n```\n"


def _arguments(function: Callable[..., Any]) -> str:
    """Names of the arguments, with their defaults."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
