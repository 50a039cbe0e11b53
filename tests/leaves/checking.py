"""Whether `check` finds a mutation of a plan; a job is searched once, however many plans of it are checked."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator
from unittest import mock

from planner import api
from planner.check import check_plan, replan
from planner.errors import PlanError, ShardplanError
from planner.plans import Plan, dumps, loads, plan_schema, seal
from tests.leaves.mutations import Mutation, additions, mutations
from tests.leaves.shapes import inputs, planned

SEARCH_S = 600.0

EXCEPTIONS: dict[tuple[str, ...], str] = {
    ("provenance",): "how the plan came to be, for people; the digest leaves it out, and any version may have made it",
    ("model", "file_sha256"): "another file of the same structure (other weights) has the same plan",
}
"""Values that no check can judge, by the beginning of their paths, and why."""


@functools.cache
def text_of(shape: str) -> str:
    """The plan of a shape as its file."""
    return dumps(planned(shape))


@functools.cache
def mutations_of(shape: str) -> tuple[Mutation, ...]:
    """All mutations of the plan of a shape."""
    document = json.loads(text_of(shape))
    return (*mutations(document), *additions(document, plan_schema()))


def sampled(shape: str, count: int, seed: int) -> list[Mutation]:
    """Some mutations of the plan of a shape; of equal names and changes one counts, so that long lists are no more."""
    draw = random.Random(f"{seed} {shape}")
    by_kind: dict[tuple[object, ...], list[Mutation]] = {}
    for mutation in mutations_of(shape):
        by_kind.setdefault((mutation.names, mutation.what), []).append(mutation)
    kinds = draw.sample(sorted(by_kind, key=str), min(count, len(by_kind)))
    return [draw.choice(by_kind[kind]) for kind in kinds]


@contextlib.contextmanager
def searched_once() -> Iterator[None]:
    """Context in which a job is searched once."""
    answers: dict[object, Plan | ShardplanError] = {}
    search = api.plan

    def plan(graph: object, cluster: object, job: object, *, orders: object = None, **others: object) -> Plan:
        key = id(graph), id(cluster), repr(job), repr(orders)
        if key not in answers:
            try:
                answers[key] = search(graph, cluster, job, orders=orders, **others)  # type: ignore[arg-type]
            except ShardplanError as error:
                answers[key] = error
        answer = answers[key]
        if isinstance(answer, ShardplanError):
            raise answer
        return answer

    with mock.patch.object(api, "plan", plan):
        yield


def edited(shape: str, mutation: Mutation) -> Plan | None:
    """The plan with a mutation and a digest of its own; None where it says what the plan said.

    Raises:
        PlanError: such a file is not read.
    """
    plan = loads(json.dumps(mutation.applied(json.loads(text_of(shape)))))
    if mutation.names != ("digest",):
        plan = seal(plan)
    return None if dumps(plan) == text_of(shape) else plan


def is_missed(shape: str, mutation: Mutation) -> bool:
    """Whether `check` does not find a mutation that makes the file say something else, and that is wrong."""
    try:
        plan = edited(shape, mutation)
    except PlanError:
        return False
    if plan is None or any(mutation.names[: len(names)] == names for names in EXCEPTIONS):
        return False
    if check_plan(plan).findings or check_plan(plan, *inputs(shape), search_s=SEARCH_S).findings:
        return False
    return not is_another_answer(shape, plan)


def is_another_answer(shape: str, plan: Plan) -> bool:
    """Whether a file is, byte for byte, what this program answers to the job that it states: nothing in it is wrong.

    So it is where an option of the job is edited that does not change the answer.
    """
    return replan(plan, *inputs(shape)).digest == plan.digest


def missed(shape: str, chosen: list[Mutation]) -> list[str]:
    """Those of some mutations that are missed or lead to an internal error, as text."""
    lines = []
    with searched_once():
        for mutation in chosen:
            try:
                lines += [f"{shape}: {mutation}"] if is_missed(shape, mutation) else []
            except Exception as error:  # whatever it is, it is no finding
                lines.append(f"{shape}: {mutation}: {type(error).__name__}: {error}")
    return lines
