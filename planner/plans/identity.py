"""Whether a model and a cluster are those that a plan was made for, and if not, in what they differ.

Options are compared before the things themselves: a plan that was made with `--dim seq=1024` is for the same model at
another length, and the remedy is the option, not another plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from planner.costs.imported import OWN_COSTS
from planner.costs.precision import precision
from planner.errors import ShardplanError, UsageError
from planner.graph import Graph, build_chain
from planner.hardware.types import Cluster, with_headroom
from planner.plans.assemble import block_table
from planner.plans.findings import Fault, Finding, differences
from planner.plans.model import ModelSection
from planner.plans.model_changes import ModelChanges, ModelView, model_changes
from planner.plans.records import HardwareSection
from planner.plans.sections import hardware_section, model_section
from planner.plans.types import Plan
from planner.units import plural

_AGAIN_MODEL, _AGAIN_HARDWARE = "plan again for this model", "plan again for this hardware"
_TOLD = 3


def other_model(plan: Plan, graph: Graph, *, costs: bool = True) -> Finding | None:
    """How a model, at any batch, differs from the one that a plan was made for; None if it is that one.

    Args:
        plan: the plan.
        graph: the model.
        costs: false if it is no difference that one of them has seconds of operators from a file.
    """
    if plan.model.fingerprint == graph.fingerprint:
        return None
    name = plan.model.name
    asked, given = (any(note.code == OWN_COSTS for note in notes) for notes in (plan.notes, graph.report.notes))
    if costs and asked is not given:
        words = "with seconds of operators from a file" if asked else "without seconds of operators from a file"
        hint = f"add --costs {plan.provenance.costs or 'FILE'}" if asked else "leave out --costs"
        return _model(f"{name} {words} (--costs), and {graph.name} is given otherwise", hint)
    changes = changed_model(plan, graph)
    if changes is None:
        return _model(f"{name}, not {graph.name}", _AGAIN_MODEL)
    if changes.sizes and not changes.content:
        dims = "".join(f" --dim {dim}" for dim in _dims(plan))
        words = f"{name} at other sizes{f' (made with{dims})' if dims else ''}: {'; '.join(changes.phrases)}"
        return _model(words, f"add{dims}" if dims else "set them by --dim")
    if graph.name != name and not changes.match.pairs:
        return _model(f"{name}, not {graph.name}", _AGAIN_MODEL)
    if not (changes.content or changes.names):
        detail = "other seconds of operators (--costs)" if asked else changes.phrases[0]
        return _model(f"{_another('version', plan.model, graph)}: {detail}", _AGAIN_MODEL)
    now = "as it was" if graph.name == name else f"not {graph.name}"
    return _model(f"{name}, {now}: {'; '.join(changes.phrases)}", _AGAIN_MODEL)


def _model(words: str, hint: str) -> Finding:
    hint = hint if hint.endswith(_AGAIN_MODEL) else f"{hint}, or {_AGAIN_MODEL}"
    return Finding(Fault.MODEL, f"the plan is for {words}", hint)


def changed_model(plan: Plan, graph: Graph) -> ModelChanges | None:
    """What differs between the plan's model and the graph; None if the graph cannot be brought into a plan's form."""
    try:
        section = model_section(dataclasses.replace(graph, source=None), precision(plan.options.precision))
        blocks = block_table(build_chain(graph))
    except ShardplanError:
        return None
    first = graph.tensors[graph.inputs[0]].shape[:1] if graph.inputs else ()
    batch = graph.batch or (first[0] if first else 0)
    return model_changes(ModelView.of_plan(plan), ModelView(section, blocks, batch))


def _dims(plan: Plan) -> tuple[str, ...]:
    """The sizes that the plan was made with, as far as it says them."""
    if plan.provenance.dims:
        return plan.provenance.dims
    sequence = plan.headline.sequence if plan.headline else 0
    return (f"seq={sequence}",) if sequence and not plan.model.file_sha256 else ()


def require_inputs(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> None:
    """Refuse a model or a cluster that a plan was not made for.

    Raises:
        UsageError: says in what it differs.
    """
    model = other_model(plan, graph) if graph is not None else None
    found = model or (other_hardware(plan, cluster) if cluster is not None else None)
    if found is not None:
        raise UsageError(found.message, hint=found.hint)


def other_hardware(plan: Plan, cluster: Cluster) -> Finding | None:
    """How a cluster differs from the one that a plan was made for; None if it is that one."""
    hardware = plan.hardware
    if hardware.fingerprint == cluster.fingerprint:
        return None
    options = list(_options(plan, cluster))
    if options:
        hint = f"add {' '.join(option for _, option in options if option)}" if all(o for _, o in options) else ""
        hint = f"{hint}, or {_AGAIN_HARDWARE}" if hint else _AGAIN_HARDWARE
        words = "; ".join(words for words, _ in options)
        return Finding(Fault.HARDWARE, f"the plan is for {hardware.name}, not {cluster.name}: {words}", hint)
    if _base(hardware.name) != _base(cluster.name):
        return Finding(Fault.HARDWARE, f"the plan is for {hardware.name}, not {cluster.name}", _AGAIN_HARDWARE)
    now = "as it was" if cluster.name == hardware.name else f"not {cluster.name}"
    if figures := _figures(plan, cluster):
        return Finding(Fault.HARDWARE, f"the plan is for {hardware.name}, {now}: {figures}", _AGAIN_HARDWARE)
    unseen = "figures that a plan does not carry differ (efficiency, latency of devices, stack)"
    words = f"the plan is for {_another('profile', hardware, cluster)}: {unseen}"
    return Finding(Fault.HARDWARE, words, _AGAIN_HARDWARE)


def _another(kind: str, said: ModelSection | HardwareSection, given: Graph | Cluster) -> str:
    """A model or cluster and the one given in its place, which differ in their fingerprints; one name is said once."""
    marks = said.fingerprint[:12], given.fingerprint[:12]
    if said.name == given.name:
        return f"another {kind} of {said.name} (fingerprint {marks[0]}, {marks[1]} here)"
    return f"{said.name} (fingerprint {marks[0]}), not {given.name} (fingerprint {marks[1]})"


def _base(name: str) -> str:
    """Name of a cluster without its number of nodes and its changed figures."""
    return name.partition(" (")[0].partition(", ")[0]


def _options(plan: Plan, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(words, option that gives the plan's) of the number of nodes, the stack and the changed figures that differ."""
    hardware = plan.hardware
    if _base(hardware.name) != _base(cluster.name):
        return
    if hardware.device_count != cluster.device_count:
        said, given = (plural(count, "device") for count in (hardware.device_count, cluster.device_count))
        yield f"{said} in the plan, {given} here", f"--nodes {hardware.nodes}"
    if hardware.stack != cluster.stack.name:
        said = f"under {hardware.stack or 'no stack'} in the plan, under {cluster.stack.name} here"
        yield said, f"--stack {plan.provenance.stack or hardware.stack}" if hardware.stack else ""
    changed, given_changes = (name.partition(", ")[2] for name in (hardware.name, cluster.name))
    if changed != given_changes:
        said = f"{changed or 'no figure'} changed in the plan, {given_changes or 'none'} here"
        asked = plan.provenance.changes or tuple(filter(None, changed.split(", ")))
        yield said, " ".join(f"--set {change}" for change in asked) or "no --set"


def _figures(plan: Plan, cluster: Cluster) -> str:
    """The first figures in which the plan's cluster and the one given differ; "" if the plan carries none of them."""
    section = hardware_section(with_headroom(cluster, plan.hardware.headroom))
    found = [d for d in differences(plan.hardware, section, ("hardware",)) if d.path[1] not in ("name", "fingerprint")]
    more = [f"and {plural(len(found) - _TOLD, 'figure')} more"] if len(found) > _TOLD else []
    return "; ".join(
        [
            *(str(d).replace("in the file", "in the plan").replace("worked out anew", "here") for d in found[:_TOLD]),
            *more,
        ]
    )
