"""All findings about a plan, and what could not be looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from planner.check.reevaluate import check_claims, reevaluate
from planner.errors import PlanError, ShardplanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.operators.batching import rebatch
from planner.plans import Fault, Finding, Plan, validate
from planner.plans.check_figures import check_figures, check_options
from planner.plans.documents import KeyPath
from planner.plans.findings import AGAIN, Difference, Expected, differences, limited, mismatches, stage_in
from planner.plans.readings import has_closed_form, is_searched
from planner.play.memory import peak_in_flight
from planner.simulate import closed_form_s, simulate
from planner.simulate.timeline import times_of
from planner.systems.backends import BACKENDS
from planner.systems.backends.needs import lacks
from planner.units import format_bytes, format_seconds

BREAKING = frozenset((
    Fault.STAGE_RANGE, Fault.REPLICAS, Fault.DIVISIBILITY, Fault.PREDICTION_STAGES, Fault.RANK_RANGE, Fault.RANK_TWICE,
    Fault.CONFIGURATION, Fault.ACTIONS_UNREADABLE, Fault.ACTION_MISSING, Fault.ACTION_TWICE, Fault.ACTION_ROUTE,
    Fault.ACTION_UNKNOWN, Fault.ACTION_ORDER, Fault.WEIGHT_VERSION, Fault.DEADLOCK,
))  # fmt: skip
"""Faults that leave no orders to play."""

UNREADABLE = frozenset((
    Fault.STAGE_RANGE, Fault.REPLICAS, Fault.DIVISIBILITY, Fault.PREDICTION_STAGES, Fault.MODEL_FINGERPRINT,
    Fault.OPTIONS, Fault.CONFIGURATION, Fault.MICRO_BATCH, Fault.SHARDING, Fault.MESH, Fault.SHARDING_BLOCKS,
    Fault.SHARDING_NAMES, Fault.LAYOUT, Fault.LAYOUT_MISSING, Fault.SPLIT, Fault.SPLIT_MISSING,
    Fault.HARDWARE_FINGERPRINT,
))  # fmt: skip
"""Faults that leave no decision to evaluate anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """What checking a plan came to.

    Attributes:
        findings: everything that is wrong, at most a score of each kind; empty for a good plan.
        unchecked: what could not be looked at and why, a line each.
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()


def check_plan(
    plan: Plan,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    *,
    search_s: float = 0.0,
    backends: Sequence[str] = (),
) -> CheckReport:
    """Everything that is wrong with a plan.

    By itself its parts must agree: structure, orders, sums, times played anew. With model and hardware its own decision
    is evaluated anew, by the same code that plans, and every value of the file is compared with what comes out.

    Args:
        plan: the plan.
        graph: the model, at any batch.
        cluster: the hardware.
        search_s: seconds that a search may take for what the plan claims about all others; none by default.
        backends: training frameworks, by name, that are to take the plan as it is.

    Raises:
        UsageError: no framework has one of the names.
        ShardplanError: the model cannot be set to the plan's micro-batch size.

    O(operators + actions), and what planning takes without its search.
    """
    if graph is not None and graph.fingerprint == plan.model.fingerprint:
        graph = rebatch(graph, plan.micro_batches.size)
    renewed = cluster is not None and is_renewed(plan, cluster)
    found = validate(plan, graph, None if renewed else cluster)
    faults = {finding.fault for finding in found}
    own: list[Finding] = []
    if not faults & BREAKING:
        own = [*check_figures(plan), *check_options(plan)]
        try:
            own += mismatches(plan, _played(plan))
        except PlanError as error:
            own.append(Finding(Fault.PREDICTIONS, f"cannot be simulated: {error.problem.message}", error.problem.hint))
    unchecked: tuple[str, ...] = ()
    if graph is None or cluster is None:
        unchecked = tuple(_without(plan, graph, cluster))
    elif faults & UNREADABLE:
        unchecked = ("prices: what is wrong leaves no decision to evaluate anew",)
    else:
        sound = not own and faults <= {Fault.DIGEST}
        priced, unchecked = _anew(plan, graph, cluster, search_s, sound=sound)
        own += priced
    own += lacking(plan, backends, graph)
    return CheckReport(tuple(limited([*found, *own])), unchecked)


def _played(plan: Plan) -> Iterator[Expected]:
    """Times, and micro-batches that stages keep, of a plan whose orders run, as they come out when it is played.

    Raises:
        PlanError: it cannot be played.
    """
    timeline, said = simulate(plan), plan.predictions
    if said.simulated_iteration_s is not None:
        yield Fault.PREDICTIONS, ("predictions", "simulated_iteration_s"), timeline.step_s
    if has_closed_form(plan):
        replicas = [len(stage.replicas) // plan.copies for stage in plan.stages]
        closed_s = closed_form_s(replicas, plan.micro_batches.count // plan.copies, times_of(plan))
        yield Fault.PREDICTIONS, ("predictions", "iteration_s"), closed_s
    elif plan.schedule.given:
        yield Fault.PREDICTIONS, ("predictions", "iteration_s"), timeline.step_s
    peaks = plan.schedule.limits or peak_in_flight(timeline.trace.program).max(axis=0).tolist()
    for stage, peak in enumerate(peaks):
        yield Fault.PREDICTIONS, ("predictions", "stages", stage, "in_flight"), peak


def lacking(plan: Plan, backends: Sequence[str], graph: Graph | None = None) -> list[Finding]:
    """What a plan needs that some frameworks lack, a finding each.

    Raises:
        UsageError: no framework has one of the names.
    """
    takers = [BACKENDS.get(name) for name in backends]
    return [
        Finding(Fault.BACKEND, f"{backend.title} lacks {need}", f"`shardplan plan --for {backend.key}` does without")
        for backend in takers
        for need in lacks(plan, backend, graph)
    ]


def is_renewed(plan: Plan, cluster: Cluster) -> bool:
    """Whether a cluster is the plan's with another profile: same name and size, other figures."""
    hardware = plan.hardware
    same = (hardware.name, hardware.device_count) == (cluster.name, cluster.device_count)
    return same and hardware.fingerprint != cluster.fingerprint


def _without(plan: Plan, graph: Graph | None, cluster: Cluster | None) -> list[str]:
    """What needs the model and the hardware, as far as they are not given."""
    both = "with model and hardware"
    found = [
        f"{both}: whether times, bytes and collectives of the stages are what their operators cost",
        f"{both}: whether memory is as the options (precision, optimizer, ZeRO, recomputation) make it",
        f"{both}: bound, proof and alternatives; coverage, notes and what is not modelled",
    ]
    if graph is None:
        found.append("with the model: operators, edges, parameters, boundary tensors, names of blocks and modules")
    if cluster is None:
        found.append("with the hardware: whether devices and links are the cluster's")
    if plan.system is not None:
        found.append(f"{both}: whether {plan.system.name} decides like this, and its iteration time")
    return found


def _anew(
    plan: Plan, graph: Graph, cluster: Cluster, search_s: float, *, sound: bool
) -> tuple[list[Finding], tuple[str, ...]]:
    """Findings about a plan evaluated anew, and what was not checked."""
    found: list[Finding] = []
    claims: tuple[str, ...] = ()
    renewed = is_renewed(plan, cluster)
    try:
        anew, violations = reevaluate(plan, graph, cluster)
        wrong = [each for each in differences(plan, anew) if renewed or each.path[0] != "hardware"]
        for violation in violations:
            fault = Fault.MEMORY if violation.kind == "memory" else Fault.OPTIONS
            found.append(Finding(fault, violation.message, AGAIN, violation.stage))
        others = sound and (other_version(plan) or renewed)
        if is_searched(plan) and not wrong:
            searched = check_claims(plan, graph, cluster, search_s)
            wrong, claims = [*searched.wrong], searched.unchecked
            if searched.otherwise and not others:
                found.append(Finding(Fault.DIFFERS, searched.otherwise, AGAIN))
        elif is_searched(plan):
            claims = ("bound, proof and alternatives: the figures that they are about differ",)
    except ShardplanError as error:
        return [Finding(Fault.UNPRICED, error.problem.message, error.problem.hint)], ()
    prices = [each for each in wrong if is_price(each.path)] if others else []
    if prices:
        found.append(Finding(Fault.REPRICED, _repriced(plan, anew, cluster, prices), "plan again for current figures"))
    rest = [each for each in wrong if each not in prices]
    found += [Finding(Fault.DIFFERS, str(each), AGAIN, stage_in(each.path)) for each in rest]
    return found, claims


def other_version(plan: Plan) -> bool:
    """Whether another version of this program made the plan."""
    return plan.provenance.version != version("shardplan")


def is_price(path: KeyPath) -> bool:
    """Whether a value of the file is a price, or follows from prices and the profile alone."""
    inside = path[0] == "shardings" and any(part in ("figures", "collectives") for part in path)
    return inside or path[0] in ("predictions", "alternatives", "exchange", "hardware")


def _repriced(plan: Plan, anew: Plan, cluster: Cluster, wrong: Sequence[Difference]) -> str:
    """Both figures, why they differ, and how many more do."""
    now, own = version("shardplan"), plan.provenance.version
    causes = [f"by version {own}, this is {now}"] if other_version(plan) else []
    if is_renewed(plan, cluster):
        causes.append(f"for another profile of {cluster.name} ({plan.hardware.fingerprint[:12]})")
    before, after = _figures(plan), _figures(anew)
    count = f"{len(wrong)} figures differ, first" if len(wrong) > 1 else "one figure differs,"
    return f"the plan was priced {' and '.join(causes)}: {before} in the file, {after} now; {count} {wrong[0]}"


def _figures(plan: Plan) -> str:
    peaks: Sequence[int] = [terms.memory.total_bytes for terms in plan.predictions.stages]
    return f"{format_seconds(plan.predictions.reached_s)} an iteration and {format_bytes(max(peaks))} a device"
