"""A plan of any kind passes its check, and whatever is changed in its file is found, the digest computed anew."""

from __future__ import annotations

import pytest

from planner.check import check_plan
from planner.errors import PlanError
from planner.plans import Plan, dumps, loads
from tests.check.edits import EDITS, edited
from tests.check.plans import KINDS, loaded, planned

SYSTEMS = tuple(kind for kind, (who, *_) in KINDS.items() if who.startswith("system"))
WHOLE = ("unequal replicas", "zb-h1", "parallax", "orders of one's own")
"""Kinds that all edits are made of; of the others every twelfth is, each kind beginning with another."""

# edits that may change nothing, and the kinds of plans of which that is true
HARMLESS: dict[str, tuple[str, ...]] = {
    "dropout another": tuple(KINDS),  # no model here has dropout
    "overlap all": SYSTEMS,  # which choose by their own rules
    "zero not allowed": SYSTEMS,
    "recompute not allowed": (*SYSTEMS, "repeated forwards"),  # or keep to it anyway
    "schedule another": ("orders of one's own",),  # a name for the same orders
    "schedule unknown": ("orders of one's own",),
}

FOUND_ALONE = (
    "weights_bytes is -1 TB", "activations_bytes is -1 TB", "forward_s negative", "backward_s negative",
    "one in flight", "in_flight + 1", "iteration_s halved with its bound", "simulated_iteration_s halved",
    "samples_per_s doubled", "bubble zero", "gap + 0.5", "bound above the time", "bottleneck another",
    "device_count x 2", "level's size", "devices of a run", "all times of a stage / 10", "transfers zero",
    "capacity_bytes x 10", "module names", "model's parameters", "weights_bytes halved", "gradients_bytes zero",
    "optimizer_bytes halved", "collectives dropped", "zero not allowed", "recompute not allowed",
    "micro-batch not allowed", "alternative's summary",
)  # fmt: skip
"""Found in a plan of the own search without model and hardware."""


def is_found(kind: str, plan: Plan) -> bool:
    """Whether a check has a finding, by itself or with model and hardware."""
    return bool(check_plan(plan).findings or check_plan(plan, *loaded(kind), search_s=60).findings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_as_planned_has_no_finding(kind: str) -> None:
    plan = loads(dumps(planned(kind)))
    report = check_plan(plan, *loaded(kind), search_s=60)
    assert report.findings == ()
    assert report.unchecked == ()
    assert check_plan(plan).findings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_edit_is_found(kind: str) -> None:
    edits = list(EDITS) if kind in WHOLE else list(EDITS)[list(KINDS).index(kind) % 12 :: 12]
    missed, tried = [], 0
    for name in edits:
        try:
            plan = edited(planned(kind), EDITS[name])
        except PlanError:  # the file is not even read
            tried += 1
            continue
        if plan is None:
            continue
        tried += 1
        if not is_found(kind, plan) and kind not in HARMLESS.get(name, ()):
            missed.append(name)
    assert missed == []
    assert tried > len(edits) // 3


def test_there_are_edits_of_many_kinds() -> None:
    assert len(EDITS) > 120


@pytest.mark.parametrize("name", FOUND_ALONE)
def test_without_model_and_hardware_figures_must_agree(name: str) -> None:
    plan = edited(planned("unequal replicas"), EDITS[name])
    assert plan is not None
    assert check_plan(plan).findings
