"""Searches for one plan: for each framework, in its own precision, and freely; what they find serves the next."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from planner.decision import ABOUT_AS_FAST, certificate_of, decide, joint
from planner.errors import InfeasibleError, JobError, ModelError, ShardplanError
from planner.graph import Graph
from planner.hardware.types import Cluster, with_devices, with_headroom
from planner.plans import FreeChoice, Plan, Provenance, assemble, seal, summary
from planner.schedules import Schedule
from planner.sharding import unmatched
from planner.solvers import Answer, KnownPlan, search
from planner.solvers.diagnosis import conflict, limited
from planner.solvers.shapes import by_engine, schedules_with
from planner.space.cuts import pinned_blocks
from planner.space.job_options import LIMITS, WIDTHS, allows_single_devices, in_words, without
from planner.space.jobs import allowed_sizes, mesh_problem, meshes_for, tensor_ranks
from planner.space.pricer import Pricer
from planner.space.recompute_choices import recomputed_modules
from planner.space.timing import played_s
from planner.space.types import Job, Structure
from planner.systems.backends import ANY, Backend, able, backends_of, distinct, within_limits
from planner.systems.backends.needs import lacks, running

Progress = Callable[[int, int, float, float], None]

MOST_LACKING = 4
"""Plans that a search for frameworks may find and none of them takes, before there is none."""


@dataclasses.dataclass(frozen=True)
class PlanTask:
    """The arguments of `plan`, with the pricers and the progress so far of its searches."""

    graph: Graph
    cluster: Cluster
    job: Job
    own: Schedule | None
    progress: Progress | None
    strict_ops: bool
    provenance: Provenance | None
    pricers: list[Pricer] = dataclasses.field(default_factory=list)
    last_progress: list[tuple[int, int, float, float]] = dataclasses.field(default_factory=list)
    known: list[KnownPlan] = dataclasses.field(default_factory=list)
    beside: bool = False

    def reporter(self) -> Progress | None:
        """Reports the progress of a further search, counted on from that of those before, and remembers it."""
        before, _, _, lowest_s = self.last_progress[0] if self.last_progress else (0, 0, 0.0, math.inf)
        told = self.progress

        def report(done: int, total: int, best_s: float, bound_s: float) -> None:
            in_all = before + max(done, total)  # a search counts what it has yet to close, and adds to it as it goes
            self.last_progress[:] = [(before + done, in_all, best_s, min(bound_s, lowest_s))]
            if told is not None:
                told(*self.last_progress[0])

        return None if told is None else report

    def pricer_for(self, job: Job) -> tuple[Pricer, tuple[int, ...]]:
        """A pricer for a job that differs from the task's only in limits, and the micro-batch sizes to search."""
        graph, sizes = allowed_sizes(self.graph, job)
        known = self.pricers[0] if self.pricers else None
        cluster = known.cluster if known else with_headroom(self.cluster, job.headroom)
        graph = known.graph if known else graph
        self.pricers.append(Pricer(graph, cluster, job, strict_ops=self.strict_ops, like=known))
        return self.pricers[-1], sizes

    def search(
        self, backends: Sequence[Backend] = (), among: Sequence[Backend] = (), *, limit_s: float = math.inf
    ) -> Answer:
        """The answer within the limits of some frameworks (`among` those asked for), or without limits.

        What was found before is known to it, and with a time only faster plans are looked for.

        Raises:
            InfeasibleError: nothing fits; where no limits are set, the message says why, and what would.
            JobError: the limits leave no choice.
        """
        asked = tuple(backend.key for backend in among or backends)
        job = dataclasses.replace(within_limits(self.job, backends), backends=asked)
        pricer, sizes = self.pricer_for(job)
        _check_limits(pricer, job)
        answer = search(
            pricer.costs,
            pricer.cluster,
            dataclasses.replace(job, micro_batches=sizes),
            shardings=pricer,
            progress=self.reporter(),
            simulated_s=functools.partial(played_s, schedule_of=schedules_with(self.own)),
            diagnose=not limited(job) and math.isinf(limit_s),
            own=self.own,
            known=self.known,
            beside=self.beside,
            limit_s=limit_s,
        )
        best, _, _ = decide(answer, simplest=bool(backends))
        self.known.extend((candidate, pricer.costs_of(candidate.decision)) for candidate in (answer.best, best))
        return answer

    def search_for(self, backends: Sequence[Backend]) -> Answer:
        """The joint answer of a search for each framework, but for those all of whose plans others take.

        Those with the most orders of work are searched first, since what they find serves the others.

        Raises:
            InfeasibleError, JobError: none has an answer; the first one's error.
        """
        answers, errors = dict[str, Answer](), list[ShardplanError]()
        for backend in sorted(distinct(backends, self.job), key=lambda each: -len(each.schedules)):
            try:
                answers[backend.title] = self.search((backend,), backends)
            except (InfeasibleError, JobError) as error:
                errors.append(error)
        if not answers:
            raise errors[0]
        return joint(answers)

    def promises(self, backend: Backend, others: Sequence[Backend], limit_s: float) -> bool:
        """Whether the search for a framework that others do not stand for finds a plan faster than a time."""
        if backend not in distinct((*others, backend), self.job):
            return False
        try:
            answer = dataclasses.replace(self, known=[*self.known]).search((backend,), limit_s=limit_s)
            return decide(answer, simplest=False)[1] * (1 + ABOUT_AS_FAST) < limit_s
        except (InfeasibleError, JobError):
            return False

    def explained(self, find: Callable[[], Answer]) -> Answer:
        """An answer; where the user's own limits leave none, the error says which of them exclude everything.

        Raises:
            InfeasibleError: nothing fits.
        """
        try:
            return find()
        except InfeasibleError as error:
            if not limited(self.job) or self.own is not None:
                raise
            raise _excluded(self.pricers[-1], self.job) from error

    def assemble(self, answer: Answer, backends: Sequence[Backend] = ()) -> Plan:
        """The fastest plan of an answer; for frameworks the simplest of those that are about as fast."""
        pricer, job = self.pricers[-1], within_limits(self.job, backends)
        best, simulated_s, others = decide(answer, simplest=bool(backends))
        written = dataclasses.replace(job, structure=Structure(), backends=job.backends if backends else ())
        return assemble(
            pricer,
            pricer.cluster,
            written,
            best.decision,
            best.evaluation,
            simulated_s,
            certificate=certificate_of(answer, simulated_s),
            provenance=self.provenance,
            alternatives=others,
            schedule=self.own,
            given="orders" if self.own is not None else "",
        )


def plan_for(task: PlanTask, backends: Sequence[Backend]) -> Plan:
    """The fastest plan for some frameworks, each in the job's precision or, where that was left open, in its own.

    A framework's own is no faster than the job's. So a plan in it is made only where the framework is the fastest
    without pipelines, in both, and by more than plans that count as about as fast. The free choice comes last: what it
    finds is known to later searches, and would count as the framework's.

    Raises:
        InfeasibleError: as of `_for_backends`, in the job's precision.
        JobError: none of the frameworks does in it what is asked.
    """
    here, refused = able(task.job, backends, task.graph)
    apart = {b.own_precision(task.job.precision): b for b in reversed(backends) if not b.trains_in(task.job.precision)}
    errors: list[ShardplanError] = [JobError(refused.message, hint=refused.hint)] if refused else []
    found: tuple[Plan, PlanTask, tuple[Backend, ...]] | None = None
    try:
        found = (_for_backends(task, here), task, here) if here else None
    except InfeasibleError as error:
        errors.append(error)
    for precision in filter(None, apart):
        limit_s = found[0].predictions.reached_s if found is not None and found[0].runs_on else math.inf
        there = dataclasses.replace(task, job=dataclasses.replace(task.job, precision=precision), pricers=[], known=[])
        alone = apart[precision].relaxed()
        if not (task.promises(alone, here, limit_s) and there.promises(alone, (), limit_s)):
            continue
        with contextlib.suppress(InfeasibleError):
            others, _ = able(there.job, backends, task.graph)
            plan = _for_backends(there, others)
            found = (plan, there, others) if plan.runs_on and plan.predictions.reached_s < limit_s else found
    if found is None:
        raise errors[0]
    plan, task, others = found
    return seal(dataclasses.replace(plan, free_choice=_free_choice(task, plan, others))) if plan.runs_on else plan


def plan_freely(task: PlanTask, reason: str = "") -> Plan:
    """The fastest plan without regard to frameworks, and why none of the usual ones takes it, if it was to be for them.

    Raises:
        InfeasibleError: nothing fits.
    """
    _know_usual(task)
    return _free_plan(task, reason)


def _free_plan(task: PlanTask, reason: str) -> Plan:
    free = task.assemble(task.explained(task.search))
    return seal(dataclasses.replace(free, free_choice=FreeChoice(reason=reason))) if reason else free


def _know_usual(task: PlanTask) -> None:
    """Search within the limits of the usual frameworks, so that the search without limits begins with what is found."""
    job = dataclasses.replace(task.job, backends=())
    usual, refused = able(job, backends_of(job), task.graph)
    if task.own is None and refused is None:
        with contextlib.suppress(InfeasibleError, JobError):
            dataclasses.replace(task, job=job, progress=None).search_for(usual)


def _for_backends(task: PlanTask, backends: Sequence[Backend]) -> Plan:
    """The plan for some frameworks, which one of them at least takes.

    Where nothing fits within the limits of the usual ones, the plan is the free choice.

    Raises:
        InfeasibleError: nothing fits, or nothing within the limits of those that the user names.
    """
    find = functools.partial(task.search_for, backends)
    try:
        return _running(task, task.explained(find) if task.job.backends else find(), backends)
    except InfeasibleError as error:
        if task.job.backends:
            raise
        titles = " and ".join(backend.title for backend in backends)
        return _free_plan(task, f"within the limits of {titles}: {error.problem.message}")


def _running(task: PlanTask, answer: Answer, backends: Sequence[Backend]) -> Plan:
    """The plan of an answer that some frameworks take, with their names.

    Raises:
        InfeasibleError: none of those found does.
    """
    left: Answer | None = answer
    needs: list[tuple[str, tuple[str, ...]]] = []
    while left is not None and len(needs) < MOST_LACKING * len(backends):
        found = task.assemble(left, backends)
        if names := running(found, backends, task.graph):
            return dataclasses.replace(found, runs_on=names)
        needs += [(backend.title, lacks(found, backend, task.graph)) for backend in backends]
        left = left.without(found.configuration)
    title, lacking = min(needs, key=lambda pair: len(pair[1]))
    said = f"the best plan found needs what {title} lacks: {', '.join(lacking)}"
    raise InfeasibleError(said, hint=f"plan with --for {ANY}, or limit the job further")


def _free_choice(task: PlanTask, plan: Plan, backends: Sequence[Backend]) -> FreeChoice:
    """The fastest plan that is found without regard to frameworks, beginning with theirs.

    What it needs is said of the frameworks that take the plan itself: only these lack what the plan does without.
    """
    last_progress, tell = tuple(task.last_progress), task.progress or (lambda *_: None)

    def repeat_progress(done: int, total: int, best_s: float, bound_s: float) -> None:
        for last in last_progress:
            tell(*last)

    reported = repeat_progress if task.progress else None
    beside = dataclasses.replace(task, progress=reported, last_progress=[], beside=True)
    free = beside.assemble(beside.search())
    taking = (backend for backend in backends if backend.key in plan.runs_on)
    needs = min((lacks(free, backend, task.graph) for backend in taking), key=len)
    predictions = free.predictions
    return FreeChoice(summary(free.configuration), predictions.reached_s, predictions.bound_s, needs)


def _check_limits(pricer: Pricer, job: Job) -> None:
    """Refuse limits that name nothing.

    Raises:
        JobError: a block that is to be kept on a stage, a split that is forbidden or a module to recompute is not in
            the model; or a mesh that is asked for does not fit the cluster, or none has the ranks that are asked for.
    """
    pinned_blocks(job, tuple(block.name for block in pricer.chain.blocks))
    pricer.repeated_operators(recomputed_modules(job.recompute))
    for problem in unmatched(pricer.graph, job.forbid)[:1]:
        raise JobError(problem.message, where=problem.where, hint=problem.hint)
    offered = {1, *(tensor_ranks(mesh) for mesh in pricer.meshes)}
    free = meshes_for(pricer.graph, pricer.cluster, dataclasses.replace(job, tensor_parallel=(), meshes=()))
    reached = ", ".join(map(str, sorted({1, *(tensor_ranks(mesh) for mesh in free)})))
    for mesh in job.meshes:
        if reason := mesh_problem(pricer.cluster, job, mesh):
            raise JobError(reason, hint=f"with these devices use {reached} ranks")
    for ranks in sorted(set(job.tensor_parallel) - offered):
        reason = mesh_problem(pricer.cluster, job, (ranks,)) or f"none of the meshes that are allowed has {ranks} ranks"
        raise JobError(reason, hint=f"with these devices use {reached}, or give a mesh of another shape")
    _check_counts(pricer, job)
    shared = any(math.prod(mesh) > 1 for mesh in job.meshes)
    if not pricer.meshes and (shared or not allows_single_devices(job)):
        raise JobError(f"no mesh has all of {in_words(job, WIDTHS)}", hint="leave one of them out")


def _check_counts(pricer: Pricer, job: Job) -> None:
    """Refuse degrees that take more devices than there are, and more stages than blocks.

    Replicas and stages are counted apart: with pipelines in two directions a device is in a replica of each.

    Raises:
        JobError: it says how many.
    """
    shared = {"TP": job.tensor_parallel, "CP": job.context_parallel, "EP": job.expert_parallel}
    there, blocks = job.devices_of(pricer.cluster), len(pricer.chain.blocks)
    if min(job.pipeline_stages, default=1) > blocks:
        stages = min(job.pipeline_stages)
        raise JobError(f"{stages} stages of a model with {blocks} blocks", hint=f"use --pp {blocks} or less")
    for name, sizes in (("PP", job.pipeline_stages), ("DP", job.data_parallel)):
        least = {degree: min(allowed) for degree, allowed in {**shared, name: sizes}.items() if allowed}
        needed = math.prod(least.values())
        if needed > there:
            said = " x ".join(f"{degree} {size}" for degree, size in least.items() if size > 1)
            hint = f"use smaller degrees, or more devices: {with_devices(pricer.cluster, needed)}"
            raise JobError(f"{said} takes {needed:,} devices of {there:,}", hint=hint)


def _excluded(pricer: Pricer, asked: Job) -> InfeasibleError:
    """Why a job with limits has no plan: some of them, or memory whatever they are."""
    words = in_words(asked)
    try:  # what does not fit without limits fits with none of them
        seconds = _feasible_s(pricer, without(asked, LIMITS), diagnose=True)
    except InfeasibleError as error:
        return InfeasibleError(f"{error.problem.message}, with or without {words}", hint=error.problem.hint)

    def attempt(freer: Job) -> float | None:
        backends = backends_of(freer) if freer.backends else ()
        if able(freer, backends, pricer.graph)[1]:
            return None
        return _feasible_s(pricer, within_limits(freer, backends))

    conflicting = conflict(asked, attempt)
    if conflicting is not None:
        return conflicting
    example = "" if seconds is None else f" ({seconds:.3g} s an iteration, say)"
    return InfeasibleError(f"no plan has all of {words}, nor all but two of them", hint=f"lift more of them{example}")


def _feasible_s(like: Pricer, job: Job, *, diagnose: bool = False) -> float | None:
    """Seconds of some feasible plan of a job that differs from a pricer's in limits; None where there is none.

    Where the job allows orders of one stage a worker (1F1B, GPipe), only these are searched: others keep more.
    With `diagnose` it is an error that there is none.

    Raises:
        InfeasibleError: nothing fits, if that is to be diagnosed.
    """
    try:
        _, sizes = allowed_sizes(like.graph, job)
        job = dataclasses.replace(job, micro_batches=sizes)
        lines, _ = by_engine(job, schedules_with(None))
        job = lines if lines.schedules else job
        pricer = Pricer(like.graph, like.cluster, job, like=like)
        answer = search(pricer.costs, pricer.cluster, job, shardings=pricer, any_plan=True, diagnose=diagnose)
    except InfeasibleError:
        if diagnose:
            raise
        return None
    except (JobError, ModelError):  # no size of the model divides this batch, say: no plan either
        return None
    return answer.best.evaluation.iteration_s
