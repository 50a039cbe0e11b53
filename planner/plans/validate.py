"""Is a plan whole, consistent, and for this model and this cluster?"""

from __future__ import annotations

from planner.errors import PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster, with_headroom
from planner.plans.check_model import check_graph, check_sharded_cluster, check_sharded_model
from planner.plans.check_schedule import check_claims, check_schedule
from planner.plans.check_shardings import check_meshes, check_shardings
from planner.plans.check_structure import check_configuration, check_structure
from planner.plans.files import compared, plain
from planner.plans.findings import AGAIN, Fault, Finding, limited
from planner.plans.sections import hardware_section
from planner.plans.types import Plan

_STRUCTURAL = (Fault.STAGE_RANGE, Fault.REPLICAS, Fault.DIVISIBILITY, Fault.PREDICTION_STAGES)
"""Faults that leave nothing to hold the other checks against."""

_OTHER_MODEL = frozenset((
    Fault.MODEL_FINGERPRINT, Fault.OPTIONS, Fault.MICRO_BATCH, Fault.OPERATOR_UNKNOWN, Fault.OPERATOR_MISSING,
    Fault.DUPLICATED_INCOMPLETE,
))  # fmt: skip
"""Faults that leave no model to hold shardings against."""

_UNREADABLE = frozenset((
    Fault.SHARDING, Fault.MESH, Fault.SHARDING_BLOCKS, Fault.SHARDING_NAMES, Fault.LAYOUT, Fault.SPLIT,
))  # fmt: skip
"""Faults that leave no shardings to judge."""


def validate(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> list[Finding]:
    """Everything that is wrong with a plan; an empty list for a good one.

    Args:
        plan: the plan.
        graph: the model at the plan's micro-batch size; without it, what only the model knows is not checked.
        cluster: the hardware; without it, what only the hardware knows is not checked.

    Returns:
        Findings, at most a score of each kind. O(operators + actions).
    """
    found = check_structure(plan)
    if not any(finding.fault in _STRUCTURAL for finding in found):
        found += [*check_configuration(plan), *check_schedule(plan)] or check_claims(plan)
    if graph is not None and not any(finding.fault is Fault.STAGE_RANGE for finding in found):
        found += check_graph(plan, graph)
    if cluster is not None:
        found += check_cluster(plan, cluster)
    if not any(finding.fault in _STRUCTURAL for finding in found):
        found += _sharded(plan, graph, cluster, {finding.fault for finding in found})
    return limited(found)


def _sharded(plan: Plan, graph: Graph | None, cluster: Cluster | None, known: set[Fault]) -> list[Finding]:
    """Findings about how groups of ranks share the work, against a model and a cluster that the plan is for."""
    found = check_shardings(plan)
    if cluster is not None and not known & {Fault.HARDWARE_FINGERPRINT, Fault.RANK_RANGE}:
        found += check_sharded_cluster(plan, cluster)
    readable = not {finding.fault for finding in found} & _UNREADABLE
    if graph is not None and plan.shardings and readable and not known & _OTHER_MODEL:
        found += check_sharded_model(plan, graph)
    return found


def require_sound(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other so far that nothing can be read off it.

    Raises:
        PlanError: with every such finding.
    """
    found = [finding for finding in check_structure(plan) if finding.fault in _STRUCTURAL] or check_meshes(plan)
    if found:
        problems = [finding.problem("plan") for finding in found]
        raise PlanError(found[0].message, where="plan", hint="`shardplan check` tells all", problems=problems)


def check_cluster(plan: Plan, cluster: Cluster) -> list[Finding]:
    """Findings about a plan and the hardware it is said to be for."""
    if plan.hardware.fingerprint != cluster.fingerprint:
        own = f"{plan.hardware.name} (fingerprint {plan.hardware.fingerprint[:12]})"
        other = f"{cluster.name} (fingerprint {cluster.fingerprint[:12]})"
        if plan.hardware.stack != cluster.stack.name:
            own, other = f"{own} under {plan.hardware.stack or 'no stack'}", f"{other} under {cluster.stack.name}"
        message = f"the plan is for {own}, not {other}"
        return [Finding(Fault.HARDWARE_FINGERPRINT, message, "plan again for this hardware")]
    headroom = with_headroom(cluster, plan.hardware.headroom)
    wrong = compared(("hardware",), plain(plan.hardware), plain(hardware_section(headroom)))
    found = [Finding(Fault.HARDWARE, str(difference), AGAIN) for difference in wrong]
    if plan.world_size > cluster.device_count:
        message = f"the plan needs {plan.world_size} ranks, {cluster.name} has {cluster.device_count} devices"
        found.append(Finding(Fault.RANK_RANGE, message, "plan again for this hardware"))
    return found
