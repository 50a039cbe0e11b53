"""Writes plans as configurations of training frameworks, and reads such configurations; one module a framework.

>>> from planner import export
>>> export.names()
('deepspeed', 'galvatron', 'jax', 'megatron', 'onnx', 'torch', 'torchtitan', 'transformers')
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError, Problem, UsageError
from planner.escaping import markdown, markdown_prose, prose_name
from planner.export.reading import Beside, FrameworkJob, Options, Reader, options_of, read
from planner.foreign_files import Door
from planner.graph import Graph
from planner.importers.onnx_graph.read import read_model
from planner.plans import Plan, require_inputs
from planner.registry import Registry
from planner.systems.backends import BACKENDS, Backend
from planner.systems.backends.needs import lacks
from planner.units import plural

if TYPE_CHECKING:
    import onnx


PAGE = "EXPORT.md"
"""Name of the page that lists how each part of the plan was written."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A feature that a plan needs and a framework cannot express, and a hint how to plan without it."""

    need: str
    hint: str


@dataclass(frozen=True, slots=True)
class Export:
    """A plan in a framework's own files.

    Attributes:
        files: text (of a model, bytes) by file name; `EXPORT.md` is one of them.
        mapped: by part of the plan that the files express, the text that was written for it.
        left_out: the parts that they do not express, one sentence each.
        order: the plan's rank of each rank of the framework; empty for frameworks that are not started rank by rank.
        hosts: how launchers place the ranks, one sentence each.

    The sentences are Markdown (`planner.escaping.markdown_prose`): names in them are written by `prose_name`.
    """

    files: Mapping[str, str | bytes]
    mapped: Mapping[str, str]
    left_out: tuple[str, ...]
    order: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


__all__ = [
    "Beside", "Export", "Exporter", "FrameworkJob", "Gap", "Options", "Reader", "export", "lacking", "names",
    "options_of", "planned_for", "read_job", "readable", "register",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exporter:
    """A framework that plans can be exported to.

    Attributes:
        backend: limits of the framework on plans; its key is the exporter's name in options.
        missing: gives the features of a plan within these limits that the files still cannot express.
        write: writes the files of a plan that misses no feature.
        start: how to use the files, in one or two sentences.
        plan_for: value of `shardplan plan --for`, with further options, that makes plans within these limits; "" for
            the exporter's name.
        reader: reads the framework's configuration; None where it cannot be read.
        files_of_model: writes further files from the plan, its model and the model's ONNX; None where there are none.
    """

    backend: Backend
    missing: Callable[[Plan], Iterable[Gap]]
    write: Callable[[Plan], Export]
    start: str
    plan_for: str = ""
    reader: Reader | None = None
    files_of_model: Callable[[Plan, Graph, onnx.ModelProto], Mapping[str, bytes]] | None = None


EXPORTERS: Registry[Exporter] = Registry(__name__, "export format")
"""All exporters by name; a module of this package registers its own."""


def register(exporter: Exporter) -> None:
    """Add an exporter under the key of its framework."""
    EXPORTERS.register(exporter.backend.key, exporter)


def names() -> tuple[str, ...]:
    """Names of all exporters, sorted."""
    return EXPORTERS.names()


def readable() -> tuple[str, ...]:
    """Names of the frameworks whose configuration can be read, sorted."""
    return tuple(name for name, exporter in EXPORTERS.items() if exporter.reader)


def read_job(
    text: str | bytes, name: str, where: str = "", *, graph: Graph | None = None, beside: Beside | None = None
) -> FrameworkJob:
    """Read a job from a framework's configuration: the inverse of `export`.

    Args:
        text: Megatron's arguments, torchtitan's TOML or DeepSpeed's JSON.
        name: name of the framework.
        where: name of the text in errors (a file name).
        graph: the model that it is to train, with whose sizes those of the text are compared.
        beside: what is said beside the text and wins, by field of `Degrees`, `global_batch`, `precision`, `optimizer`.
            The text is then read as if it left that open; the values themselves are still the caller's to set.

    Raises:
        UsageError: no framework of that name can be read, an option is unknown, out of range or contradicts the model,
            or one that decides the division cannot be taken over; `problems` names every option.
    """
    reader = EXPORTERS.get(name).reader if name in readable() else None
    if reader is None:
        raise UsageError(f"configurations of {name} cannot be read", hint=f"use {' or '.join(readable())}")
    try:
        content = Door("", UsageError, f"give a configuration of {name}").text(text)
        return read(reader, content, graph, beside or {})
    except UsageError as error:
        place = where + error.problem.where
        problems = [replace(problem, where=where + problem.where) for problem in error.problems]
        raise UsageError(error.problem.message, where=place, hint=error.problem.hint, problems=problems) from error


def planned_for(plan: Plan, name: str) -> str:
    """Value of `shardplan plan --for`, with further options, that makes plans of a model for an exporter.

    That is the exporter's own (`Exporter.plan_for`), or where this takes decoders alone and the model is none, that of
    a framework all of whose plans the exporter takes; "" where the exporter takes no such model.

    Raises:
        UsageError: no exporter has that name.
    """
    exporter, inputs = EXPORTERS.get(name), [(spec.shape, spec.dtype) for spec in plan.model.inputs]
    words = exporter.plan_for or name
    if not BACKENDS.get(words.partition(" ")[0]).unlike_decoders(plan.block_names, inputs):
        return words
    if exporter.backend.decoders:
        return ""
    limits = [own for _, own in BACKENDS.items() if own.can <= exporter.backend.can and not own.decoders]
    return max(limits, key=lambda own: len(own.zero)).key


def lacking(plan: Plan, name: str, graph: Graph | None = None) -> tuple[Gap, ...]:
    """Features that a plan needs and a framework cannot express; empty where the plan can be exported.

    Args:
        plan: the plan.
        name: name of the exporter.
        graph: the plan's model; without it, the check that ranks divide the attention heads is left out.

    Raises:
        UsageError: no exporter has that name.
    """
    exporter, words = EXPORTERS.get(name), planned_for(plan, name)
    others = [other for other, each in EXPORTERS.items() if not each.backend.decoders]
    hint = f"`shardplan plan --for {words}` does without" if words else f"use `--to` {' or '.join(others)}"
    beyond_limits = [Gap(need, hint) for need in lacks(plan, exporter.backend, graph)]
    return tuple(beyond_limits or exporter.missing(plan))


def export(
    plan: Plan, name: str, graph: Graph | None = None, model: str | Path | onnx.ModelProto | None = None
) -> Export:
    """Write a plan in the files of a framework, with a page that lists how each part was written.

    Args:
        plan: the plan.
        name: name of the exporter.
        graph: the plan's model, for checks that the plan file alone does not allow.
        model: the model as ONNX, or its path, for exporters that write the model itself.

    Raises:
        UsageError: no exporter has that name, it needs the model, or the graph is not the plan's model.
        ModelError: the model cannot be read.
        PlanError: the framework cannot express the plan; `problems` names every reason with its remedy.
    """
    exporter = EXPORTERS.get(name)
    require_inputs(plan, graph)
    missing = lacking(plan, name, graph)
    if missing:
        problems = [Problem(f"{exporter.backend.title} lacks {feature.need}", hint=feature.hint) for feature in missing]
        raise PlanError(problems[0].message, hint=problems[0].hint, problems=problems)
    written, files = exporter.write(plan), dict[str, bytes]()
    if exporter.files_of_model is not None:
        if graph is None or model is None:
            raise UsageError(f"{exporter.backend.title} is the model itself with annotations", hint="add --model FILE")
        proto = read_model(Path(model)) if isinstance(model, (str, Path)) else model
        files |= exporter.files_of_model(plan, graph, proto)
    placed = _host_files(plan, written.order)
    complete = replace(
        written,
        files={**files, **_with_device_order(plan, written), **placed},
        left_out=(*written.left_out, *_never_written(plan)),
        hosts=(*(_host_lines(plan, written.order) if placed else ()), *_device_lines(plan, written.order)),
    )
    return replace(complete, files={**complete.files, PAGE: _page(plan, exporter, complete)})


def _never_written(plan: Plan) -> Iterator[str]:
    """Parts of a plan that no framework has a setting for."""
    stack = prose_name(plan.hardware.stack or "unnamed")
    yield (
        f"The predicted iteration of {plan.predictions.iteration_s:.6g} s: times, memory and the overlap of exchanges "
        f"with computation that the prediction assumes (stack {stack}) are no settings."
    )
    if plan.duplicated:
        yield (
            f"{plural(sum(len(entry.nodes) for entry in plan.duplicated), 'operator')} without parameters that several "
            "stages compute for themselves: the model's own code has to do the same."
        )


def _page(plan: Plan, exporter: Exporter, written: Export) -> str:
    """The page that lists how each part of the plan was written, as Markdown."""
    lines = [
        f"# {markdown(f'{plan.model.name} for {exporter.backend.title}')}",
        "",
        markdown(
            f"Plan {plan.digest[:12]}: {plan.model.name} on {plan.hardware.name}, global batch "
            f"{plan.micro_batches.global_batch}, {plan.options.precision}, {plan.options.optimizer}."
        ),
        "",
        markdown_prose(exporter.start),
        "",
        "| file | |",
        "|---|---|",
        *(f"| `{name}` | {_size(content)} |" for name, content in written.files.items()),
        "",
        "## Mapped",
        "",
        "| the plan | written as |",
        "|---|---|",
        *(f"| {' | '.join(markdown_prose(text, in_table=True) for text in row)} |" for row in written.mapped.items()),
        "",
        *(("## Machines", "", *(f"- {markdown_prose(text)}" for text in written.hosts), "") if written.hosts else ()),
        "## Not mapped",
        "",
        *(f"- {markdown_prose(text)}" for text in written.left_out),
        "",
    ]
    return "\n".join(lines)


def _size(content: str | bytes) -> str:
    """Length of a file, in lines or bytes."""
    return plural(len(content), "byte") if isinstance(content, bytes) else plural(len(content.splitlines()), "line")


def _host_files(plan: Plan, order: Sequence[int]) -> Mapping[str, str]:
    """Files for launchers by name; none where one machine runs the ranks in the plan's order.

    `hosts.csv` has for each rank of the framework the plan's rank, the machine and the device on it; `slurm.hosts` a
    machine a rank (`SLURM_HOSTFILE`); `hostfile` a machine a line with its slots (OpenMPI, DeepSpeed), where every
    machine's ranks follow each other.

    Args:
        plan: the plan.
        order: the plan's rank of each rank of the framework.
    """
    per, straight = plan.hardware.machine_devices, tuple(order) == tuple(range(len(order)))
    if straight and len(order) <= per:
        return {}
    nodes = [rank // per for rank in order]
    rows = [f"{at},{rank},node{rank // per},{plan.hardware.device_of(rank)}" for at, rank in enumerate(order)]
    files = {
        "hosts.csv": "\n".join(["rank,plan_rank,machine,device", *rows]) + "\n",
        "slurm.hosts": "".join(f"node{node}\n" for node in nodes),
    }
    runs = _machine_runs(nodes)
    if len(runs) == len(set(nodes)):
        files["hostfile"] = "".join(f"node{node} slots={count}\n" for node, count in runs)
    return files


def _machine_runs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal machines: (machine, length)."""
    return [(node, sum(1 for _ in run)) for node, run in itertools.groupby(nodes)]


def _host_lines(plan: Plan, order: Sequence[int]) -> Iterator[str]:
    """How to start the ranks where the plan assumed them, one sentence a launcher."""
    per, below = plan.hardware.machine_devices, 1
    near = []
    for level in plan.hardware.levels:
        below *= level.size
        if per < below and level.size > 1:
            near.append(f"{below // per} in a row share {prose_name(level.name)}")
    shared = f" ({', '.join(near)})" if near else ""
    yield f"`node0`, `node1` .. stand for the machines by their places in the network{shared}."
    yield f"Slurm: `SLURM_HOSTFILE=slurm.hosts srun --distribution=arbitrary --ntasks-per-node {per}`."
    nodes = [node for node, _ in _machine_runs([rank // per for rank in order])]
    if len(nodes) > len(set(nodes)):
        yield (
            "torchrun and host files cannot place these ranks, since those of a machine do not follow each other: "
            "use Slurm, or rank by rank what `hosts.csv` says."
        )
        return
    yield "OpenMPI, DeepSpeed: `--hostfile hostfile`."
    named = ", ".join(f"`node{node}`" for node in nodes[:4]) + " .." * (len(nodes) > 4)
    yield f"torchrun: `NODE_RANK` 0, 1 .. on {named}."


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _devices_in_order(plan: Plan, order: Sequence[int]) -> list[list[int]]:
    """By machine, its devices in the order of the framework's ranks; nothing where they are in their own order."""
    ranks, per = order or range(plan.world_size), plan.hardware.machine_devices
    machines = dict.fromkeys(rank // per for rank in ranks)
    own = [[plan.hardware.device_of(rank) for rank in ranks if rank // per == machine] for machine in machines]
    return own if any(devices != sorted(devices) for devices in own) else []


def _device_lines(plan: Plan, order: Sequence[int]) -> Iterator[str]:
    """A sentence on the order of a machine's devices, where it is not that of its ranks."""
    own = _devices_in_order(plan, order)
    if own and all(devices == own[0] for devices in own):
        visible = ",".join(map(str, own[0]))
        yield f"Devices of a machine are not in the order of its ranks: set `{_VISIBLE}={visible}`, as `launch.sh`."
    elif own:
        yield f"Devices of a machine are not in the order of its ranks: set `{_VISIBLE}` as `hosts.csv` has them."


def _with_device_order(plan: Plan, written: Export) -> Mapping[str, str | bytes]:
    """The files, with a `launch.sh` that shows each process the devices in the order of the ranks."""
    own, script = _devices_in_order(plan, written.order), written.files.get("launch.sh")
    if not isinstance(script, str) or not own or any(devices != own[0] for devices in own):
        return written.files
    visible = f'export {_VISIBLE}="${{{_VISIBLE}:-{",".join(map(str, own[0]))}}}"'
    return {**written.files, "launch.sh": script.replace("set -euo pipefail\n", f"set -euo pipefail\n{visible}\n", 1)}
