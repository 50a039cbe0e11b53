"""`requires` names everything that a backend must be able to do: no word, mark or key of a plan lacks its flag."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import planner
from planner.plans import SCHEDULE_KEYS, WORDS, Requirement, dumps, loads, seal, validate
from planner.plans.types import minor_of
from planner.schedules import ActionKind
from tests.runtime import cases

MARKS = ("+", "/", "@", ">")
NEED_NOTHING = {
    "name": "the orders say what is done",
    "orders": "their words say it",
    "iterations": "orders that never drain, which the weight policy says",
    "weight_policy": "anything but sync is async_weights",
    "versions": "of async_weights",
    "staleness": "follows from the orders",
    "spans": "about predictions",
    "transfers": "about predictions",
    "given": "about the wish",
    "causal": "of sub_sequences",
}
"""Keys of the schedule section without a flag of their own, and why."""


def _plan(schedule: str, stages: int = 4, **degrees: object) -> planner.Plan:
    return cases.plan(cases.Case("", "gpt", stages, {"pipeline": stages, "schedule": schedule, **degrees}))


def test_every_word_and_mark_of_an_order_is_in_the_table() -> None:
    assert set(WORDS) == {*(kind.value for kind in ActionKind), *MARKS}


def test_every_key_of_the_schedule_is_in_the_table_or_needs_nothing() -> None:
    keys = {field.name for field in dataclasses.fields(_plan("1f1b").schedule)}
    assert keys == {*SCHEDULE_KEYS, *NEED_NOTHING}


@pytest.mark.parametrize("schedule", planner.schedules.names())
def test_the_words_of_every_schedule_have_their_flags(schedule: str) -> None:
    plan = _plan(schedule)
    text = " ".join(order.actions for order in plan.schedule.orders)
    used = set(re.findall(r"[A-Z]+", text)) | {mark for mark in "/@>" if mark in text}
    used |= {"+"} if re.search(r"\+[A-Z]", text) else set()
    assert {WORDS[word] for word in used} - {None} <= set(plan.requires)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("1f1b", ""),
        ("seq1f1b", "sub_sequences"),
        ("bpipe", "evictions"),
        ("dualpipe", "paired_actions"),
        ("chimera", "order_routing early_exchange"),
        ("bapipe-fbp", "lanes in_flight_limits"),
        ("pipemare", "corrections"),
        ("hetpipe", "bounded_staleness partial_updates early_exchange"),
    ],
)
def test_schedules_need_what_they_are_known_for(schedule: str, flags: str) -> None:
    plan = _plan(schedule)
    known = {
        r for r in plan.requires if list(Requirement).index(r) >= list(Requirement).index(Requirement.ORDER_ROUTING)
    }
    assert set(flags.split()) <= known
    assert minor_of(plan.requires) == (6 if "split_backward" in plan.requires else int(bool(known)))
    assert plan.minor == 8  # since blocks say what they compute
    if not flags:
        assert not known


def test_stages_that_differ_are_named() -> None:
    stages = ((0.5, 1), (1.0, 1))
    plan = cases.plan(cases.Case("", "gpt", 2, stages=stages))
    first, second = plan.configuration.stages
    mixed = dataclasses.replace(plan.configuration, stages=(dataclasses.replace(first, repeats=("layernorm",)), second))
    graph, cluster = planner.graph_from_proto(cases.model("gpt")), planner.load_cluster("dgx-a100")
    found = planner.predict(graph, cluster, plan.options, mixed).plan
    assert {"recompute", "module_recompute", "mixed_recompute"} <= set(found.requires)
    assert minor_of(found.requires) == 5


def test_operators_that_a_stage_repeats_are_listed() -> None:
    graph = planner.graph_from_proto(cases.model("gpt"))
    plan = cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2, "repeats": ("mlp_norm", "act", "core_attn")}))
    for number, stage in enumerate(plan.stages):
        layers = range(4 * number, 4 * number + 4)
        norms = [f"transformer.h.{k}.ln_2.layernormalization" for k in layers]
        acts = [name for name in stage.repeated if "mlp" in name]
        assert stage.dropped == tuple(name for name in stage.repeated if "attn" not in name)
        assert set(stage.dropped) == {*norms, *acts}
        assert len(acts) == len(norms)
        assert len(stage.repeated) > len(stage.dropped)  # attention keeps its results
    assert not validate(plan, graph)
    old = json.loads(dumps(plan))
    for entry in old["stages"]:
        del entry["repeated"], entry["dropped"]
    unlisted = seal(loads(json.dumps(old)))
    assert "stages[0].repeated" in validate(unlisted, graph)[0].message
    old["minor"] = 4
    assert not validate(seal(loads(json.dumps(old))), graph)


def test_a_file_of_minor_0_is_not_held_to_the_flags_of_1() -> None:
    document = json.loads(dumps(_plan("dualpipe")))
    assert document.pop("minor") == 8
    document["requires"].remove("paired_actions")
    assert not validate(seal(loads(json.dumps(document))))
    document["minor"] = 1
    found = validate(seal(loads(json.dumps(document))))
    assert [finding.message for finding in found] == [
        'requires: nothing in the file, ["paired_actions"] worked out anew'
    ]
