"""Gantt of characters, SVG, Trace Event JSON, JSON document."""

from __future__ import annotations

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest

import planner
from planner import draw_svg
from planner.report import draw_gantt
from planner.report.tables import Line
from planner.simulate import Activity, rank_ranges, simulate, timeline_document, trace_json
from tests.simulate.plans import toy_plan

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(picture: tuple[Line, ...]) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in picture]


def labels_of(picture: tuple[Line, ...]) -> list[str]:
    return [label.strip() for (label, _), *_ in picture if label.startswith("stage")]


def test_gantt_of_a_small_pipeline() -> None:
    """One millisecond is two cells: (8 * 3 + 2.5) ms are 53."""
    lines = lines_of(draw_gantt(simulate(toy_plan()), width=16 + 53))
    assert lines == [
        "stage 0  rank 0 FFFFFF········BBBBFFBBBBFFBBBBFFBBBB··BBBB··BBBBSSSSU",
        "stage 1  rank 1 ··FFFF····BBBBFFBBBBFFBBBBFFBBBBFFBBBB··BBBBSSSSU····",
        "stage 2  rank 2 ····FFBBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBBSSSSU········",
        f"{'':16}0 s{'26.5 ms':>50}",
        "F forward  B backward  S synchronisation  U update  · idle",
    ]


def test_gantt_groups_replicas_and_clips_long_iterations() -> None:
    picture = draw_gantt(simulate(toy_plan(replicas=(2, 2, 2), micro_batches=128)), width=80)
    assert labels_of(picture) == ["stage 0  ranks 0-1", "stage 1  ranks 2-3", "stage 2  ranks 4-5"]
    assert [line.count(" … ") for line in lines_of(picture)[:3]] == [2, 2, 2]
    assert "between start, steady state and end are not shown" in lines_of(picture)[-1]
    assert all(len(line) <= 80 for line in lines_of(picture)[:4])
    middle = lines_of(picture)[1].split(" … ")[1]
    assert set(middle) == {"F", "B"}  # nobody waits in the steady state


@pytest.mark.parametrize("width", [40, 77, 120, 240])
def test_gantt_fits_the_width(width: int) -> None:
    lines = lines_of(draw_gantt(simulate(toy_plan()), width=width))
    assert {len(line) for line in lines[:3]} == {width}


def test_gantt_leaves_rows_out_only_with_a_note() -> None:
    picture = draw_gantt(simulate(toy_plan()), most_rows=2)
    assert len(labels_of(picture)) == 2
    assert lines_of(picture)[-1] == "1 of 3 rows are not shown"


def test_recomputation_and_communication_are_told_apart() -> None:
    plan = toy_plan(backward_s=(0.003,) * 3, recompute_s=0.001, receive_s=0.001)
    picture = draw_gantt(simulate(plan), width=120)
    assert {Activity.RECOMPUTE, Activity.COMMUNICATION} <= {style for line in picture for _, style in line}
    assert "RRBBBB" in lines_of(picture)[0].replace("RRRBBBBB", "RRBBBB")


def test_svg_is_well_formed_and_says_what_it_shows() -> None:
    text = draw_svg(simulate(toy_plan(capacity_gib=2)))
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"stage 0  rank 0", "forward", "backward", "idle", "memory of one device", "2.88 GiB of 2 GiB"} <= set(words)
    assert len(list(root.iter(f"{SVG}polygon"))) == 3
    assert sum(word == "5" for word in words) == 6  # micro-batch 5, forward and backward on three stages
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_svg_of_a_long_iteration_is_clipped_with_a_note() -> None:
    text = draw_svg(simulate(toy_plan(micro_batches=3000)))
    assert len(text) < 200_000
    assert "between start, steady state and end are not shown" in text
    assert {">start<", ">steady state<", ">end<"} <= set(re.findall(r">[a-z ]+<", text))


def test_svg_shows_every_stage_of_a_long_pipeline() -> None:
    graph, cluster = planner.load_graph("gpt2-xl", dims={"seq": 64}), planner.load_cluster("dgx-a100", nodes=5)
    plan = planner.predict(graph, cluster, planner.Job(396), planner.Degrees(pipeline=33, data=1)).plan
    words = [element.text or "" for element in ElementTree.fromstring(draw_svg(simulate(plan))).iter(f"{SVG}text")]
    assert [word for word in words if word.startswith("stage ")] == [
        *(f"stage {stage}  rank {stage}" for stage in range(33)),
        *(f"stage {stage}" for stage in range(33)),
    ]
    assert not any("rows are not shown" in word for word in words)


def test_where_rows_are_many_every_stage_has_one() -> None:
    """Replicas of a stage work at different times where the stages' numbers of replicas differ."""
    timeline = simulate(toy_plan(replicas=(3, 2, 1)))
    everything = draw_gantt(timeline)
    of = [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]
    assert labels_of(everything) == [f"stage {stage}  rank {rank}" for stage, rank in of]
    fewer = draw_gantt(timeline, most_rows=5)
    assert labels_of(fewer) == ["stage 0  rank 0", "stage 1  rank 3", "stage 2  rank 5"]
    assert lines_of(fewer)[-1] == "3 of 6 rows are not shown: replicas of the same stages, at other times"


def test_communication_inside_a_group_is_told_apart() -> None:
    """As much of each forward and backward as the plan says, at its end."""
    plan = planner.predict(
        planner.load_graph("llama3.2-1b", dims={"seq": 2048}),
        planner.load_cluster("dgx-a100"),
        planner.Job(16),
        planner.Degrees(tensor=4, pipeline=2, recompute=True),
    ).plan
    trace = json.loads(trace_json(simulate(plan)))["traceEvents"]
    inside = {stage.index: 0.0 for stage in plan.stages}
    for event in trace:
        if event.get("cat") == "communication inside a group":
            inside[event["pid"]] += event["dur"] / 1e6
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        _, forward_s, again_s = plan.inside_s(stage.index)
        assert terms.inside_s > forward_s >= again_s > 0
        assert inside[stage.index] == pytest.approx(plan.micro_batches.count * (terms.inside_s + again_s), rel=1e-6)


def test_trace_events() -> None:
    document = json.loads(trace_json(simulate(toy_plan(receive_s=0.001), transfers="overlapped")))
    events = document["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[0, 0], threads[1, 1], threads[2, 2]} == {"rank 0", "rank 1", "rank 2"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"stage 0", "stage 1", "stage 2"}
    forwards = [e for e in events if e.get("cat") == "forward"]
    assert len(forwards) == 18
    assert forwards[0] == {
        "name": "F0.0 forward", "cat": "forward", "ph": "X", "ts": 0.0, "dur": 1000.0, "pid": 0, "tid": 0
    }  # fmt: skip
    assert sum(e.get("cat") == "transfer" for e in events) == 2 * 2 * 6
    assert {e["name"] for e in events if e["ph"] == "C"} == {f"memory of rank {rank}" for rank in range(3)}


def test_document() -> None:
    document = timeline_document(simulate(toy_plan(copies=2, replicas=(1, 1, 1))))
    assert json.loads(json.dumps(document)) == document
    assert document["step_s"] == pytest.approx(0.0265)
    assert [lane["ranks"] for lane in document["lanes"]] == [[0, 3], [1, 4], [2, 5]]
    assert max(document["memory"][0]["held_bytes"]) == document["lanes"][0]["peak_bytes"]
    assert document["fits"] is True


def test_rank_ranges() -> None:
    assert rank_ranges([3, 1, 0, 7]) == "0-1,3,7"
    assert rank_ranges(range(0, 20, 2)) == "0,2,4,6,... (10)"


def test_the_margin_is_as_wide_as_the_longest_label() -> None:
    """A digit is 0.64 of the font's 12 pixels wide in the widest of the usual fonts, DejaVu Sans; a letter not more."""
    job = planner.Job(global_batch=32768, precision="bf16")
    graph = planner.load_graph("gpt2", dims={"seq": 128})
    cluster = planner.load_cluster("dgx-h100", nodes=4096)
    plan = planner.predict(graph, cluster, job, planner.Degrees(pipeline=2, chunks=6)).plan
    texts = ElementTree.fromstring(draw_svg(simulate(plan))).iter(f"{SVG}text")
    labels = [e for e in texts if e.get("text-anchor") == "end"]
    assert labels[0].text == "stage 0,2,4,6,... (6)  ranks 0-16383"
    assert labels[1].text == "stage 1,3,5,7,... (6)  ranks 16384-32767"
    digits = sum(map(str.isdigit, labels[1].text or ""))
    assert float(labels[1].get("x", 0)) >= digits * 0.64 * 12 + (len(labels[1].text or "") - digits) * 0.35 * 12


def test_a_long_name_is_shortened_in_a_title() -> None:
    timeline = dataclasses.replace(simulate(toy_plan()), name="layer" * 200)
    texts = ElementTree.fromstring(draw_svg(timeline)).iter(f"{SVG}text")
    title = next(e.text or "" for e in texts if "strong" in e.get("class", ""))
    assert len(title) < 160
    assert title.startswith("layerlayer")
    assert "…" in title
    assert title.endswith("micro-batches")
