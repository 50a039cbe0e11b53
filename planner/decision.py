"""Which of the plans that a search finds is the answer, which stand beside it, and what is proven of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from planner.errors import JobError
from planner.plans import chunks_of, gap_to
from planner.solvers import Answer, comparable
from planner.space import Configuration
from planner.space.timing import MOST_MICRO_BATCHES
from planner.space.types import Candidate, Certificate

OPTIMAL_GAP = 1e-9
"""Gap below which a plan counts as proven optimal."""

ABOUT_AS_FAST = 0.005
"""Of plans for frameworks that are slower than the fastest by no more than this fraction the simplest is taken."""


def decide(answer: Answer, *, simplest: bool) -> tuple[Candidate, float, tuple[Candidate, ...]]:
    """The fastest candidate that can be played, its time, and all other candidates.

    A runner-up of the shape and time of a trivial plan is shown once, by the trivial plan's name.

    Args:
        answer: the search's.
        simplest: take the simplest of those that are about as fast.

    Raises:
        JobError: all have more micro-batches than can be played.
    """
    trivial = {c.decision for c in answer.trivial}
    candidates = (answer.best, *answer.runners_up, *(t for t in answer.trivial if t.simulated_s is not None))
    playable = [c for c in candidates if c.decision.micro_batches <= MOST_MICRO_BATCHES]
    if not playable:
        decision = answer.best.decision
        raise JobError(
            f"{decision.micro_batches:,} micro-batches of {decision.micro_batch} in a pipeline: a plan can have "
            f"{MOST_MICRO_BATCHES:,}",
            hint="use a smaller global batch, or one with more divisors",
        )
    best = min(playable, key=_played_s)
    if simplest:
        about_as_fast = [c for c in playable if _played_s(c) <= _played_s(best) * (1 + ABOUT_AS_FAST)]
        best = min(about_as_fast, key=lambda c: (_complexity(c.decision), _played_s(c)))
    named = {(_shape(c.decision), _played_s(c)) for c in answer.trivial}
    others = [c for c in (answer.best, *answer.runners_up) if (_shape(c.decision), _played_s(c)) not in named]
    others += answer.trivial
    shown = _shown(best, [c for c in others if c.decision != best.decision], trivial)
    return best, best.simulated_s or math.inf, shown


def joint(answers: Mapping[str, Answer]) -> Answer:
    """The answer of several searches in spaces of their own: the fastest of all, and what is proven of all.

    Args:
        answers: by the name of the space.
    """
    found = [candidate for answer in answers.values() for candidate in (answer.best, *answer.runners_up)]
    distinct = {candidate.decision: candidate for candidate in sorted(found, key=_played_s)}
    best, *others = distinct.values()
    most = max(len(answer.runners_up) for answer in answers.values())
    trivial: dict[str, Candidate] = {}
    for answer in answers.values():
        trivial = {candidate.label: candidate for candidate in answer.trivial} | trivial
    return Answer(
        dataclasses.replace(best, label="best"),
        tuple(dataclasses.replace(other, label="runner-up") for other in others[:most]),
        tuple(trivial.values()),
        _joint_certificate({name: answer.certificate for name, answer in answers.items()}),
    )


def _joint_certificate(certificates: Mapping[str, Certificate]) -> Certificate:
    """What several certificates prove together; the gap is that of no answer yet (`certificate_of`)."""
    own = tuple(certificates.values())
    bound_s = min(each.bound_s for each in own)
    tried_s = min(each.bound_s if each.tried_bound_s is None else each.tried_bound_s for each in own)
    line_s = min(each.bound_s if each.line_bound_s is None else each.line_bound_s for each in own)
    spaces = dict.fromkeys(each.space for each in own)
    named = (f"for {name}, {each.space}" for name, each in certificates.items())
    return Certificate(
        bound_s,
        gap=0.0,
        space=next(iter(spaces)) if len(spaces) == 1 else "; or ".join(named),
        proven_optimal=False,
        tried_bound_s=tried_s if tried_s > bound_s else None,
        line_bound_s=line_s if line_s > bound_s else None,
    )


def _played_s(candidate: Candidate) -> float:
    return comparable(candidate.simulated_s or math.inf)


def _complexity(decision: Configuration) -> tuple[int, ...]:
    """Sort key, smaller for simpler plans: stages, ranks, offload, recomputation, ZeRO stage, depth, copies."""
    ranks = max(stage.ranks for stage in decision.stages)
    again = max((len(stage.offload), stage.recompute, len(stage.repeats)) for stage in decision.stages)
    depth = len(decision.stages) // chunks_of(decision.schedule)
    return len(decision.stages), ranks, *map(int, again), decision.zero, depth, decision.copies


def _shown(chosen: Candidate, others: Sequence[Candidate], trivial: Set[Configuration]) -> tuple[Candidate, ...]:
    """The other candidates; of runners-up of one shape only the first, renumbered."""
    seen, shown, number = {_shape(chosen.decision)}, [], 0
    for candidate in others:
        shape = _shape(candidate.decision)
        if candidate.decision not in trivial:
            if shape in seen:
                continue
            number += candidate.label != "best"
            label = candidate.label if candidate.label == "best" else f"runner-up {number}"
            candidate = dataclasses.replace(candidate, label=label)
        seen.add(shape)
        shown.append(candidate)
    return tuple(shown)


def _shape(decision: Configuration) -> tuple[object, ...]:
    """The shape of a plan: all but the exact cuts, and replicas of a stage counted over all copies."""
    stages = tuple((decision.copies * s.replicas, s.ranks, s.keeping) for s in decision.stages)
    return stages, decision.micro_batch, decision.schedule, decision.zero


def certificate_of(answer: Answer, simulated_s: float) -> Certificate:
    """The search's certificate, its gap measured at the time of the decision taken."""
    bound_s = min(answer.certificate.bound_s, simulated_s)
    gap = gap_to(bound_s, simulated_s)
    covered = not any(stage.layers or stage.offload for stage in answer.best.decision.stages)
    return dataclasses.replace(
        answer.certificate, bound_s=bound_s, gap=gap, proven_optimal=covered and gap <= OPTIMAL_GAP
    )
