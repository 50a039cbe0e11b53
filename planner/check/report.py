"""Check a plan completely: all findings, and what could not be checked.

Its configuration is evaluated anew with the same pricing, evaluation, simulation and assembly as planning; the bound,
the proof, the alternatives and the free choice are compared with those of a new search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from importlib.metadata import version

from planner import api
from planner.errors import InfeasibleError, PlanError, ShardplanError
from planner.graph import Graph
from planner.hardware.types import Cluster, with_headroom
from planner.json_text import KeyPath
from planner.operators.batching import rebatch
from planner.planning import Progress
from planner.plans import Fault, Finding, Plan, assemble, validate, with_minor, with_price
from planner.plans.checks import check_figures
from planner.plans.figures import gap_to
from planner.plans.files import seal
from planner.plans.findings import PLAN_AGAIN, ROUNDED, Difference, differences, limited
from planner.plans.identity import other_hardware
from planner.plans.model import blocks_as_said, compress
from planner.plans.readings import has_closed_form, is_searched, schedule_of
from planner.plans.rebuild import priced_configuration
from planner.plans.words import significant
from planner.play.memory import peak_in_flight
from planner.prediction import predict
from planner.simulate import closed_form_s, simulate
from planner.simulate.timeline import times_of
from planner.space import evaluate, play_terms
from planner.space.job_options import LIMITS, given, without
from planner.space.jobs import allowed_sizes
from planner.space.pricer import Pricer
from planner.space.types import Certificate, Job, Violation
from planner.systems import decide_again
from planner.systems.backends import ANY, BACKENDS, backends_of, within_limits
from planner.systems.backends.needs import lacks, running
from planner.units import format_bytes, format_seconds


def reevaluate(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, tuple[Violation, ...]]:
    """Compute a plan anew from its configuration, for the plan's model, cluster and options.

    Bound, search space and alternatives are copied from the plan. The plan of a published system is decided anew by the
    system's rules.

    Args:
        plan: a plan whose structure is sound.
        graph: its model at any batch.
        cluster: its hardware.

    Returns:
        The plan with the same configuration and all else computed anew, and the violated limits of the job and of
        memory.

    Raises:
        ShardplanError: the configuration cannot be priced; the message says why.
    """
    if plan.system is not None:
        return decide_again(plan, graph, cluster), ()
    job = plan.options
    cluster = with_headroom(cluster, plan.hardware.headroom)
    noted, _ = allowed_sizes(graph, job)
    pricer = Pricer(noted, cluster, job)
    decision, costs_by_sharding = priced_configuration(plan, pricer)
    schedule = schedule_of(plan)
    evaluation = evaluate(costs_by_sharding, cluster, job, decision, schedule=schedule)
    if not evaluation.stages:
        raise InfeasibleError(evaluation.violations[0].message, hint="plan again")
    played_s = play_terms(decision, schedule, evaluation.stages).iteration_s
    anew = assemble(
        pricer,
        cluster,
        job,
        decision,
        evaluation,
        played_s,
        certificate=_certificate_of(plan, played_s) if is_searched(plan) else None,
        provenance=plan.provenance,
        schedule=schedule,
        given=plan.schedule.given,
    )
    anew = _with_blocks_of(plan, _priced_as(plan, anew))
    takers = tuple(BACKENDS.get(name) for name in plan.options.backends)
    anew = dataclasses.replace(
        anew,
        alternatives=plan.alternatives,
        runs_on=running(anew, takers, graph) if plan.runs_on else (),
        free_choice=plan.free_choice,
        headline=plan.headline and anew.headline,  # files of before have none
    )
    return seal(with_minor(anew)), evaluation.violations


def _certificate_of(plan: Plan, played_s: float) -> Certificate:
    """The plan's certificate, with the gap to the iteration time computed anew."""
    predictions = plan.predictions
    gap = gap_to(predictions.bound_s, significant(played_s))
    proven = predictions.proven_optimal and gap <= ROUNDED
    return Certificate(
        predictions.bound_s, gap, predictions.space, proven, predictions.tried_bound_s, predictions.line_bound_s
    )


def _priced_as(plan: Plan, anew: Plan) -> Plan:
    """The new plan at the old plan's price per device-hour, which may be the user's own."""
    old, new = plan.headline, anew.headline
    if old is None or new is None or old.dollars_per_hour == new.dollars_per_hour:
        return anew
    return with_price(anew, old.dollars_per_hour / old.device_count)


def _with_blocks_of(plan: Plan, anew: Plan) -> Plan:
    """The new plan without structures of blocks if the plan, of a file of before, has none."""
    blocks = blocks_as_said(anew.block_table, plan.block_table)
    return anew if blocks is anew.block_table else dataclasses.replace(anew, blocks=compress(blocks))


ClaimCheck = tuple[Sequence[Difference], tuple[str, ...], str]
"""Claims of a plan that differ from those of a new search, what could not be compared, and how the search decides
otherwise ("" if it does not)."""


def replan(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """Plan anew in the way in which the plan was made: by search, a system's rules, or the user's configuration.

    The same version of this program gives the same plan for the same inputs, so that a plan file can serve as a lock
    file.

    Args:
        plan: the plan; its options are used, and its orders or configuration if the user gave them.
        graph: the model as it is now.
        cluster: the hardware as it is now.

    Raises:
        InfeasibleError: nothing fits any more.
        ShardplanError: the options are not possible for the model and the hardware.
    """
    now = dataclasses.replace(plan.provenance, version=version("shardplan"))
    if plan.system is not None:
        anew = decide_again(plan, graph, cluster)
    elif plan.schedule.given in ("name", "configuration"):
        anew = predict(graph, cluster, plan.options, plan).plan
    else:
        anew = _searched_again(plan, graph, cluster)
    return seal(dataclasses.replace(_with_blocks_of(plan, _priced_as(plan, anew)), provenance=now))


def _searched_again(
    plan: Plan, graph: Graph, cluster: Cluster, progress: Progress | None = None, job: Job | None = None
) -> Plan:
    """The result of a search with the plan's options, or with those of another job."""
    user_schedule = schedule_of(plan) if plan.schedule.given == "orders" else None
    return api.plan(
        graph, cluster, job or asked_job(plan), orders=user_schedule, progress=progress, provenance=plan.provenance
    )


def asked_job(plan: Plan) -> Job:
    """The job that a search has to be given to make a plan.

    A plan for frameworks names them in its options. One without was asked for without regard to them, unless it says as
    its free choice why none of the usual ones takes it.
    """
    if plan.options.backends or plan.free_choice is not None:
        return plan.options
    return dataclasses.replace(plan.options, backends=(ANY,))


def _opened_job(plan: Plan) -> Job:
    """The job without limits that its frameworks come with, which the file does not tell from a user's.

    A search takes these from the frameworks again; its free choice is then held to no limit of theirs.
    """
    job, limits = plan.options, limits_set(plan.options)
    return without(job, [name for name in given(job) if name not in KEPT and name not in limits])


KEPT = ("devices", "backends")
"""Limits that no framework comes with."""


def limits_set(job: Job) -> list[str]:
    """Limits of a plan's job that a user set, without those that its frameworks come with."""
    open_job = within_limits(without(job, LIMITS.keys() - set(KEPT)), backends_of(job) if job.backends else ())
    return [name for name in given(job) if name not in KEPT and getattr(job, name) != getattr(open_job, name)]


_CLAIMED = "bound, proof, alternatives and free choice"
"""What only another search can tell, in words."""
_BOUND = ("bound_s", "gap", "proven_optimal", "space", "tried_bound_s", "line_bound_s")


def check_claims(plan: Plan, graph: Graph, cluster: Cluster, limit_s: float) -> ClaimCheck:
    """Search again, and compare bound, proof, alternatives and free choice with those of the plan.

    Args:
        plan: the plan.
        graph: its model.
        cluster: its hardware.
        limit_s: time limit of the search in seconds; the claims stay unchecked if it is exceeded.

    Raises:
        ShardplanError: the search fails.
    """
    if limit_s <= 0:
        return (), (f"{_CLAIMED}: no search was made",), ""
    end = time.monotonic() + limit_s

    def stop(done: int, total: int, best_s: float, bound_s: float) -> None:
        if time.monotonic() > end:
            raise TimeoutError

    try:
        again = _searched_again(plan, graph, cluster, stop)
    except TimeoutError:
        return (), (f"{_CLAIMED}: searching anew takes more than {limit_s:g} s",), ""
    found = _against(plan, again)
    if found and {each.path[0] for each in found} == {"free_choice"} and _opened_job(plan) != asked_job(plan):
        with contextlib.suppress(TimeoutError):  # the limits in the file may be those of the frameworks
            found = _against(plan, _searched_again(plan, graph, cluster, stop, _opened_job(plan)))
    decided = [each for each in found if each.path[0] not in ("predictions", "alternatives", "free_choice")]
    wrong = [each for each in found if each.path[0] == "predictions" and each.path[1] in _BOUND]
    if not decided:
        wrong += [each for each in found if each.path[0] in ("alternatives", "free_choice")]
        return wrong, (), ""
    wrong = [each for each in wrong if each.path[1] in ("bound_s", "space")]
    more = f", and {len(decided) - 1} more" if len(decided) > 1 else ""
    seconds = format_seconds(again.predictions.reached_s)
    otherwise = f"the search decides otherwise, for {seconds} an iteration: {decided[0]}{more}"
    return wrong, ("alternatives and free choice: the search decides otherwise",), otherwise


def _against(plan: Plan, again: Plan) -> list[Difference]:
    """What differs between a plan and the result of another search."""
    again = _with_blocks_of(plan, again)
    return list(differences(plan, dataclasses.replace(again, model=again.model.comparable(plan.model))))


BREAKING = frozenset((Fault.STRUCTURE, Fault.ORDERS))
"""Faults after which the orders cannot be simulated."""

UNREADABLE = frozenset((Fault.STRUCTURE, Fault.SHARDINGS, Fault.MODEL, Fault.HARDWARE, Fault.OPTIONS))
"""Faults after which the configuration cannot be evaluated anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of checking a plan.

    Attributes:
        findings: everything that is wrong, at most 20 of each kind; empty for a good plan.
        unchecked: what could not be checked and why, a line each.
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
    """Find everything that is wrong with a plan.

    The plan's parts must agree with each other: structure, orders, sums, simulated times. With model and hardware, its
    configuration is evaluated anew by the code that plans, and every value of the file is compared with the result.

    Args:
        plan: the plan.
        graph: the model, at any batch.
        cluster: the hardware.
        search_s: time limit in seconds of a search that checks bound, proof, alternatives and free choice; no search by
            default.
        backends: names of training frameworks that must be able to run the plan as it is.

    Raises:
        UsageError: no framework has one of the names.
        ShardplanError: the model cannot be set to the plan's micro-batch size.

    O(operators + actions), and the time of planning without its search.
    """
    if graph is not None and graph.fingerprint == plan.model.fingerprint:
        graph = rebatch(graph, plan.micro_batches.size)
    renewed = graph is not None and cluster is not None and is_renewed(plan, cluster)  # then it is priced anew
    validation = validate(plan, graph, None if renewed else cluster)
    faults = {finding.fault for finding in validation}
    further: list[Finding] = []
    if not faults & BREAKING:
        further = check_figures(plan)
        try:
            further += [d.finding(plan, Fault.FIGURES) for d in differences(plan, _played(plan))]
        except PlanError as error:
            message = f"cannot be simulated: {error.problem.message}"
            further.append(Finding(Fault.FIGURES, message, error.problem.hint))
    unchecked: tuple[str, ...] = ()
    if graph is None or cluster is None:
        unchecked = tuple(_without(plan, graph, cluster))
    elif faults & UNREADABLE:
        unchecked = ("prices: what is wrong leaves no decision to evaluate anew",)
    else:
        sound = not further and faults <= {Fault.DIGEST}
        priced, unchecked = _anew(plan, graph, cluster, search_s, sound=sound)
        further += priced
    further += lacking(plan, backends, graph)
    return CheckReport(tuple(limited([*validation, *further])), unchecked)


def _played(plan: Plan) -> Plan:
    """A plan whose orders run, with iteration time and micro-batches in flight as simulated.

    Raises:
        PlanError: the plan cannot be simulated.
    """
    timeline, said = simulate(plan), plan.predictions
    iteration_s = timeline.step_s if plan.schedule.given else said.iteration_s
    if has_closed_form(plan):
        replicas = [len(stage.replicas) // plan.copies for stage in plan.stages]
        iteration_s = closed_form_s(replicas, plan.micro_batches.count // plan.copies, times_of(plan))
    peaks = plan.schedule.limits or peak_in_flight(timeline.trace.program).max(axis=0).tolist()
    stages = (dataclasses.replace(terms, in_flight=n) for terms, n in zip(said.stages, peaks, strict=True))
    played = dataclasses.replace(
        said,
        iteration_s=iteration_s,
        simulated_iteration_s=None if said.simulated_iteration_s is None else timeline.step_s,
        stages=tuple(stages),
    )
    return dataclasses.replace(plan, predictions=played)


def lacking(plan: Plan, backends: Sequence[str], graph: Graph | None = None) -> list[Finding]:
    """Findings about what a plan needs and some frameworks lack.

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
    """True if the cluster has the name and size of the plan's cluster but other figures."""
    hardware = plan.hardware
    same = (hardware.name, hardware.device_count) == (cluster.name, cluster.device_count)
    return same and hardware.fingerprint != cluster.fingerprint


def _without(plan: Plan, graph: Graph | None, cluster: Cluster | None) -> list[str]:
    """What cannot be checked without the model or the hardware, a line each."""
    both = "with model and hardware"
    lines = [
        f"{both}: whether times, bytes and collectives of the stages are what their operators cost",
        f"{both}: whether memory is as the options (precision, optimizer, ZeRO, recomputation) make it",
        f"{both}: {_CLAIMED}; coverage, notes and what is not modelled",
    ]
    if graph is None:
        lines.append("with the model: operators, edges, parameters, boundary tensors, names of blocks and modules")
    if cluster is None:
        lines.append("with the hardware: whether devices and links are the cluster's")
    if plan.system is not None:
        lines.append(f"{both}: whether {plan.system.name} decides like this, and its iteration time")
    return lines


def _anew(
    plan: Plan, graph: Graph, cluster: Cluster, search_s: float, *, sound: bool
) -> tuple[list[Finding], tuple[str, ...]]:
    """Findings of evaluating the plan anew, and what was not checked."""
    findings: list[Finding] = []
    claims: tuple[str, ...] = ()
    renewed = is_renewed(plan, cluster)
    try:
        anew, violations = reevaluate(plan, graph, cluster)
        anew = dataclasses.replace(anew, model=anew.model.comparable(plan.model))
        wrong: Sequence[Difference] = [d for d in differences(plan, anew) if renewed or d.path[0] != "hardware"]
        for violation in violations:
            fault = Fault.MEMORY if violation.kind == "memory" else Fault.OPTIONS
            findings.append(Finding(fault, violation.message, PLAN_AGAIN, violation.stage))
        prices_may_differ = sound and (other_version(plan) or renewed)
        if is_searched(plan) and not wrong:
            wrong, claims, otherwise = check_claims(plan, graph, cluster, search_s)
            if otherwise and not prices_may_differ:
                findings.append(Finding(Fault.DIFFERS, otherwise, PLAN_AGAIN))
        elif is_searched(plan):
            claims = (f"{_CLAIMED}: the figures that they are about differ",)
    except ShardplanError as error:
        return [Finding(Fault.UNPRICED, error.problem.message, error.problem.hint)], ()
    prices = [difference for difference in wrong if is_price(difference.path)] if prices_may_differ else []
    if prices:
        message = _repriced(plan, anew, cluster, prices)
        findings.append(Finding(Fault.REPRICED, message, "plan again for current figures"))
    findings += [d.finding(plan, Fault.DIFFERS) for d in wrong if d not in prices]
    return findings, claims


def other_version(plan: Plan) -> bool:
    """True if another version of this program made the plan."""
    return plan.provenance.version != version("shardplan")


def is_price(path: KeyPath) -> bool:
    """True if a value of the file is a price, or follows from prices and the hardware profile alone."""
    inside = path[0] == "shardings" and any(part in ("figures", "collectives") for part in path)
    return inside or path[0] in ("predictions", "alternatives", "exchange", "hardware", "headline", "free_choice")


def _repriced(plan: Plan, anew: Plan, cluster: Cluster, wrong: Sequence[Difference]) -> str:
    """The message that the plan was priced with other figures: old and new ones, and why."""
    now, own = version("shardplan"), plan.provenance.version
    causes = [f"by version {own}, this is {now}"] if other_version(plan) else []
    if is_renewed(plan, cluster):
        other = other_hardware(plan, cluster)
        causes.append(f"for other hardware ({other.message if other else cluster.name})")
    before, after = _figures(plan), _figures(anew)
    count = f"{len(wrong)} figures differ, first" if len(wrong) > 1 else "one figure differs,"
    return f"the plan was priced {' and '.join(causes)}: {before} in the file, {after} now; {count} {wrong[0]}"


def _figures(plan: Plan) -> str:
    peaks: Sequence[int] = [terms.memory.total_bytes for terms in plan.predictions.stages]
    return f"{format_seconds(plan.predictions.reached_s)} an iteration and {format_bytes(max(peaks))} a device"
