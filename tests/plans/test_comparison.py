"""What a comparison says first: causes, decisions, costs; layers matched by structure."""

from __future__ import annotations

import dataclasses

import pytest

from planner.errors import InfeasibleError, PlanError, UsageError
from planner.graph import Graph, Note, NoteLevel
from planner.plans import (
    Plan,
    Provenance,
    compare_plans,
    dump_answer,
    dumps,
    gate,
    gates,
    infeasible_answer,
    load_answer,
    read_rules,
    seal,
    with_price,
)
from planner.report import diff_annotations, diff_markdown, diff_report, diff_verdict, report_to_text
from tests.graph import make_graph
from tests.plans.sample import decision, language_model, make_plan


def model(layers: int, fingerprint: str = "", *, special: int = -1) -> Graph:
    """Layers of one product each, one of which may have another name and two products."""
    lines = ["[embed] h0 = Gather(w_embed, x)"]
    for i in range(layers):
        name, number = ("adapter", 0) if i == special else ("layers", i - (0 <= special < i))
        if i == special:
            lines.append(f"[{name}.{number}] a0 = MatMul(h{i}, wa)")
            lines.append(f"[{name}.{number}] h{i + 1} = Add(a0, h{i})")
        else:
            lines.append(f"[{name}.{number}] h{i + 1} = MatMul(h{i}, w{number})")
    graph = make_graph([*lines, f"[head] y = MatMul(h{layers}, w_head)"])
    return dataclasses.replace(graph, name="toy", fingerprint=fingerprint or f"{layers}{special}", batch=1, opset=17)


def staged(layers: list[int], **more: object) -> Plan:
    """A plan of as many stages, each with so many layers; the embedding and the head beside the first and the last."""
    starts = [0]
    for count in layers[:-1]:
        starts.append(starts[-1] + count + (len(starts) == 1))
    total = sum(layers)
    chosen = decision((1,) * len(layers), tuple(starts), total + 2)
    return make_plan(model(total), chosen, devices=len(layers), alternatives=(), **more)


def test_one_layer_among_126_is_one_sentence() -> None:
    old, new = staged([5, *[8] * 14, 9]), staged([6, *[8] * 14, 9])
    found = compare_plans(old, new)
    assert found.decisions == ("stage 0: 5 -> 6 layers; 15 stages unchanged",)
    assert [cause.split("; ")[0] for cause in found.causes] == ["the model changed: 1 layer more (layers.126)"]
    assert [remark.rule for remark in found.remarks] == ["model-changed", "decision-changed"]


def test_a_layer_inserted_in_the_middle_renames_nothing_that_follows() -> None:
    old, new = make_plan(model(6), decision((1,), (0,), 8)), make_plan(model(7, special=3), decision((1,), (0,), 9))
    found = compare_plans(old, new)
    assert found.causes[0].startswith("the model changed: 1 layer more (adapter.0)")
    blocks = {change.path for change in found.changes if change.area == "blocks"}
    assert blocks == {("adapter.0",)}


def test_a_layer_that_goes_is_one_layer_fewer() -> None:
    found = compare_plans(staged([3, 3]), staged([3, 2]))
    assert found.causes[0].startswith("the model changed: 1 layer fewer (layers.5)")
    assert found.decisions == ("stage 1: 3 -> 2 layers; 1 stage unchanged",)


def test_stages_that_change_alike_are_told_together() -> None:
    old = make_plan(model(8), decision((2, 2, 2, 2), (0, 3, 5, 7), 10))
    new = make_plan(model(8), decision((2, 2, 2, 2), (0, 3, 5, 7), 10, zero=1))
    (said,) = compare_plans(old, new).decisions[1:]
    assert said == "stages 0-3: ZeRO 0 -> 1"


def test_more_stages_are_told_as_such() -> None:
    old, new = staged([2, 2, 2]), staged([2, 1, 1, 2])
    assert "stage 1 of the old plan became stages 1-2; 2 stages unchanged" in compare_plans(old, new).decisions[1]


def test_hardware_options_and_tool_are_causes() -> None:
    old = make_plan()
    level = dataclasses.replace(old.hardware.levels[0], byte_per_s=5e10)
    hardware = dataclasses.replace(old.hardware, fingerprint="other", levels=(level,))
    options = dataclasses.replace(old.options, zero=(1,))
    provenance = dataclasses.replace(old.provenance, version="0.1")
    new = seal(dataclasses.replace(old, hardware=hardware, options=options, provenance=provenance))
    assert compare_plans(old, new).causes == (
        "the hardware changed: level bus byte_per_s 100 GB/s -> 50 GB/s",
        "the options changed: zero 0, 1, 2, 3 -> 1",
        "the tool changed: version 0.0 -> 0.1",
    )


def test_another_choice_without_a_cause_is_a_warning_and_an_edited_file_an_error() -> None:
    old, new = make_plan(), make_plan(chosen=decision(starts=(0, 3, 4)))
    assert [(r.rule, r.severity) for r in compare_plans(old, new).remarks] == [("unexplained-choice", "warning")]
    edited = dataclasses.replace(old, digest="0" * 64)
    assert [(r.rule, r.severity) for r in compare_plans(old, edited).remarks] == [("digest", "error")]


def test_a_stage_beyond_its_memory_is_an_error() -> None:
    old = make_plan()
    first = dataclasses.replace(old.predictions.stages[0], capacity_bytes=2**30)
    stages = (first, *old.predictions.stages[1:])
    new = seal(dataclasses.replace(old, predictions=dataclasses.replace(old.predictions, stages=stages)))
    remarks = {r.rule: r for r in compare_plans(old, new).remarks}
    assert remarks["does-not-fit"].message == "stage 0 needs 3 GiB, a device has 1 GiB"
    assert remarks["does-not-fit"].stage == 0


def slower(plan: Plan, factor: float) -> Plan:
    p = plan.predictions
    return seal(dataclasses.replace(plan, predictions=dataclasses.replace(p, iteration_s=p.iteration_s * factor)))


@pytest.mark.parametrize(
    ("text", "factor", "fails"),
    [
        ("step_time:+3%", 1.02, False),
        ("step_time:+3%", 1.04, True),
        ("step_time:+3%", 0.5, False),
        ("throughput:-3%", 1.02, False),
        ("throughput:-3%", 1.04, True),
        ("step_time:0.51s", 1.01, False),
        ("step_time:510ms", 1.03, True),
        ("throughput:11", 1.2, True),
        ("throughput:11", 1.05, False),
        ("peak_memory:15%", 1.0, True),
        ("peak_memory:20%", 1.0, False),
        ("peak_memory:2GiB", 1.0, True),
        ("warning", 1.01, True),
        ("error", 1.01, False),
        ("slower", 1.01, True),
        ("faster", 1.01, False),
    ],
)
def test_gates(text: str, factor: float, fails: bool) -> None:
    found = compare_plans(make_plan(), slower(make_plan(), factor))
    assert bool(gate(text).struck(found.costs, found.remarks)) == fails


def filled(part: float, headroom: float = 0.05) -> Plan:
    """The sample plan on devices of which its fullest stage, of 3 GiB, fills a part of what the headroom leaves."""
    plan = make_plan()
    capacity = round(3 * 2**30 / part)
    stages = tuple(dataclasses.replace(terms, capacity_bytes=capacity) for terms in plan.predictions.stages)
    hardware = dataclasses.replace(plan.hardware, headroom=headroom)
    return seal(
        dataclasses.replace(
            plan, hardware=hardware, headline=None, predictions=dataclasses.replace(plan.predictions, stages=stages)
        )
    )


EQUAL = {
    "as it is": make_plan(),
    "97 % of what the headroom leaves": filled(0.97),
    "99.6 % of what the headroom leaves": filled(0.996),
    "99.6 % of the device, without headroom": filled(0.996, 0.0),
    "more than the device has": filled(1.2),
}


@pytest.mark.parametrize("plan", EQUAL.values(), ids=EQUAL)
def test_two_equal_plans_pass_every_default_gate(plan: Plan) -> None:
    found = compare_plans(plan, plan)
    assert {each.text: each.struck(found.costs, found.remarks) for each in gates(["default"])} == {
        "step_time:+3%": "", "peak_memory:+5%": "", "error": "",
    }  # fmt: skip


def test_default_gates_fail_on_what_is_worse() -> None:
    old = filled(0.97)
    for new, gate_text in ((slower(old, 1.031), "step_time:+3%"), (filled(1.01), "error")):
        found = compare_plans(old, new)
        assert [each.text for each in gates(["default"]) if each.struck(found.costs, found.remarks)] == [gate_text]


def test_gates_are_read_once_each() -> None:
    assert [each.text for each in gates(["slower", "default", "error", "slower"])] == [
        "slower", "step_time:+3%", "peak_memory:+5%", "error",
    ]  # fmt: skip


def test_a_share_of_memory_counts_the_headroom_and_says_it() -> None:
    """3 GiB are 97 % of what a headroom of 5 % leaves: 0.97 x 0.95 = 92.15 % of the device."""
    found = compare_plans(filled(0.97), filled(0.97))
    assert not gate("peak_memory:95%").struck(found.costs, found.remarks)
    assert gate("peak_memory:92%").struck(found.costs, found.remarks) == (
        "peak_memory is 3 GiB (92%) of all memory of the device; the plan leaves 5.0% free"
    )
    full = compare_plans(filled(0.9, 0.0), filled(0.97, 0.0))
    assert gate("peak_memory:95%").struck(full.costs, full.remarks)
    assert "memory-nearly-full" in [remark.rule for remark in full.remarks]


def test_a_plan_that_repairs_its_digest_passes() -> None:
    edited = dataclasses.replace(make_plan(), digest="0" * 64)
    assert [(r.rule, r.severity) for r in compare_plans(edited, make_plan()).remarks] == [("old-digest", "info")]


def test_a_plan_that_fits_no_worse_than_before_is_a_warning() -> None:
    rules = [remark.rule for remark in compare_plans(filled(1.2), filled(1.1)).remarks]
    assert "still-does-not-fit" in rules
    assert "does-not-fit" not in rules
    assert "does-not-fit" in [remark.rule for remark in compare_plans(filled(1.1), filled(1.2)).remarks]


@pytest.mark.parametrize(("factor", "word"), [(1.00004, ""), (0.99996, ""), (1.0001, "slower"), (0.9999, "faster")])
def test_a_change_that_rounds_to_zero_is_neither_slower_nor_faster(factor: float, word: str) -> None:
    old = make_plan()
    found = compare_plans(old, slower(old, factor))
    rules = {remark.rule for remark in found.remarks}
    assert rules & {"slower", "faster"} == {word} - {""}
    verdict = diff_verdict(found)
    assert verdict == "a step takes 500 ms, as before" if not word else verdict.startswith("a step takes 500 ms -> ")
    assert "0.00%" not in report_to_text(diff_report(found))


def test_a_price_that_changed_is_told_and_can_be_a_gate() -> None:
    old, new = with_price(make_plan(), 2.0), with_price(make_plan(), 2.5)
    found = compare_plans(old, new)
    assert [change.path for change in found.changes] == [("dollars_per_hour",)]
    assert gate("price:+20%").struck(found.costs, found.remarks).endswith(", +25.00%")
    assert not gate("price:+30%").struck(found.costs, found.remarks)
    assert gate("price:+30%").struck(compare_plans(make_plan(), make_plan()).costs, ()) == "price is not known"


def test_a_gate_fails_on_what_is_no_number_and_on_what_is_not_known() -> None:
    costs = compare_plans(make_plan(), make_plan()).costs
    nan = [dataclasses.replace(cost, new=float("nan")) for cost in costs]
    assert gate("step_time:+3%").struck(nan, ())
    assert gate("step_time:2h").struck(nan, ())
    assert gate("step_time:+3%").struck((), ()) == "step_time is not known"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weather", "is no gate"),
        ("step_tim:+3%", "did you mean 'step_time'"),
        ("step_time:-3%", "fails on an improvement"),
        ("throughput:+3%", "fails on an improvement"),
        ("step_time:95%", r"write step_time:\+3% for a change"),
        ("step_time:+3GiB", "not"),
    ],
)
def test_what_is_no_gate_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gate(text)


def test_severities_of_ones_own() -> None:
    old = make_plan()
    rules = read_rules("slower: error  # for us\n\nmodel-changed: off\n")
    (remark,) = compare_plans(old, slower(old, 1.1), rules=rules).remarks[:1]
    assert (remark.rule, remark.severity) == ("slower", "error")
    quiet = compare_plans(old, slower(old, 1.1), rules={"slower": "off", "figures-changed": "off"})
    assert quiet.remarks == ()
    assert quiet.changes


@pytest.mark.parametrize("text", ["slowr: error", "slower: grave", "slower", "slower: info\nslower: off"])
def test_a_rules_file_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_rules(text)


def test_markdown_is_short_whatever_changed() -> None:
    old = make_plan()
    notes = tuple(
        Note(NoteLevel.INFO, f"code-{i}", "something that was assumed about an operator" * 3) for i in range(999)
    )
    new = seal(dataclasses.replace(make_plan(chosen=decision(starts=(0, 3, 4))), notes=notes))
    text = diff_markdown(compare_plans(old, new))
    assert text.startswith("<!-- shardplan diff -->\n\n**shardplan: ")
    assert len(text.encode()) <= 60_000
    assert text.count("<details>") == text.count("</details>") > 1
    assert text.index("| figure |") < text.index("<details>")
    assert "Notes and what follows is left out here for its length" in text


def test_annotations_are_one_line_each_whatever_the_names() -> None:
    old = make_plan()
    found = compare_plans(old, slower(old, 1.1))
    text = diff_annotations(found, {"step_time:+3%": "too\nslow: 100%"}, file="a,b.json")
    first, *others = text.splitlines()
    assert first == "::error file=a%2Cb.json,title=gate step_time%3A+3%25::too\\nslow: 100%25"
    assert others[0].startswith("::warning file=a%2Cb.json,title=slower::step_time 500 ms -> 550 ms")


def test_no_plan_is_an_answer_that_is_compared() -> None:
    old = make_plan()
    error = InfeasibleError("stage 0 needs 20 GiB", hint="16 devices")
    answer = infeasible_answer(error, old.model.fingerprint, "other", Provenance("shardplan", "0.0", (), "toy", "box"))
    read = load_answer(dump_answer(answer))
    assert read == answer
    found = compare_plans(old, answer)
    assert found.causes == ("the hardware changed (toy-box -> box)",)
    assert [(r.rule, r.message) for r in found.remarks] == [("infeasible", "stage 0 needs 20 GiB (16 devices)")]
    assert compare_plans(answer, old).decisions == ("finds a plan where there was none",)
    assert isinstance(load_answer(dumps(old)), Plan)
    with pytest.raises(PlanError):
        load_answer(dump_answer(answer).replace("reason", "reasons"))
    with pytest.raises(PlanError):
        load_answer("{")


def test_the_toy_of_other_tests_has_layers() -> None:
    found = compare_plans(
        make_plan(dataclasses.replace(language_model(4), fingerprint="4")),
        make_plan(dataclasses.replace(language_model(5), fingerprint="5"), decision(starts=(0, 2, 4), blocks=7)),
    )
    assert found.decisions == ("stage 2: 1 -> 2 layers; 2 stages unchanged",)
