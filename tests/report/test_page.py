"""The page of a plan: its figures are the plan's, nothing is fetched, charts compile, its bytes are the same again."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.plans import Plan, explain_plan
from planner.simulate import simulate
from tests.cli.plan_files import run, written
from tests.plans.sharded_sample import language
from tests.simulate.plans import toy_plan

GIB = 2**30


class Page(HTMLParser):
    """Scripts, elements with their attributes, and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.raw: dict[str, str] = {}
        self._script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("id") or "code") if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.raw[self._script] = self.raw.get(self._script, "") + data
        else:
            self.words.append(data)

    @property
    def specs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw["specs"])
        return found

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return language().plan


@pytest.fixture(scope="module")
def sharded_page(sharded: Plan) -> str:
    return planner.report.plan_page(sharded, *against(sharded))


def against(plan: Plan) -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt2"), planner.load_cluster("dgx-a100", nodes=2, stack=plan.hardware.stack)


def rows(spec: dict[str, Any]) -> list[dict[str, str]]:
    """The table of a chart over time."""
    return list(csv.DictReader(io.StringIO(spec["data"]["values"])))


def test_the_page_says_what_the_plan_says(sharded: Plan, sharded_page: str) -> None:
    page = Page(sharded_page)
    line = sharded.headline
    assert line is not None
    assert line.subject in page.text
    for figure in line.figures:
        assert figure.split(" ")[0] in page.text
    explanation = explain_plan(sharded)
    for told in (*explanation.assumptions, *sharded.not_modelled, *(note.message for note in sharded.notes)):
        assert told in page.text
    charts = [attributes["id"] for _, attributes in page.elements if attributes.get("class") == "chart"]
    assert charts == ["model", "timeline", "memory", "time", "kinds", "alternatives", "roofline"]
    assert set(page.specs) == {*charts, "zoom"}


def test_nothing_is_fetched(sharded_page: str) -> None:
    """No element names another file; what scripts may reach is cut off by the page's own policy."""
    page = Page(sharded_page)
    named = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")]
    assert named == []
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "base"}
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policy) == 1
    assert "default-src 'none'" in str(policy[0])
    assert "http" not in str(policy[0])
    own = sharded_page[: sharded_page.index("<!--\n")] + sharded_page[sharded_page.rindex("<script>") :]
    assert not re.search(r"https?://|@import|url\(", own)
    assert "sourceMappingURL" not in sharded_page


def test_blocks_stages_and_weights_are_the_plans(sharded: Plan, sharded_page: str) -> None:
    cells = Page(sharded_page).specs["model"]["layer"][0]["data"]["values"]
    assert [cell["block"] for cell in cells] == [block.name for block in sharded.block_table]
    assert [cell["stage"] for cell in cells] == [s.index for s in sharded.stages for _ in range(*s.blocks)]
    read_twice = 50257 * 768  # the embedding, by the head
    elements = sum(int(cell["parameters"].replace(",", "")) for cell in cells)
    assert elements == sharded.model.parameters + read_twice


def test_times_of_the_timeline_add_up_to_the_step(sharded: Plan, sharded_page: str) -> None:
    timeline, specs = simulate(sharded), Page(sharded_page).specs
    by_row: dict[str, float] = {}
    for part in specs["time"]["data"]["values"]:
        by_row[part["row"]] = by_row.get(part["row"], 0.0) + part["size"]
    assert list(by_row.values()) == pytest.approx([timeline.step_s] * len(sharded.stages))
    for stage, terms in zip(sharded.stages, sharded.predictions.stages, strict=True):
        parts = {p["kind"]: p["size"] for p in specs["time"]["data"]["values"] if p["row"] == f"stage {stage.index}"}
        count = sharded.micro_batches.count // len(stage.replicas)
        inside_s, _, again_s = sharded.inside_s(stage.index)
        assert parts["communication inside a group"] == pytest.approx(count * (inside_s + again_s))
        worked = sum(parts.get(kind, 0.0) for kind in ("forward", "backward", "recompute"))
        whole_s = terms.forward_s + terms.backward_s - inside_s - again_s
        assert worked == pytest.approx(count * whole_s)
    drawn = rows(specs["timeline"])
    assert max(float(row["end"]) for row in drawn) == pytest.approx(timeline.played_s)
    forwards = [row for row in drawn if row["kind"] == "F" and row["code"] == "0"]
    assert len(forwards) == sharded.micro_batches.count // sharded.copies * len(sharded.stages)


def test_memory_is_the_simulations(sharded: Plan, sharded_page: str) -> None:
    timeline, specs = simulate(sharded), Page(sharded_page).specs
    peaks = [0.0] * len(sharded.stages)
    for row in rows(specs["memory"]):
        peaks[int(row["lane"])] = max(peaks[int(row["lane"])], float(row["held"]))
    held = {lane.stages: lane.memory.peak_bytes / GIB for lane in timeline.lanes}
    assert peaks == pytest.approx(list(held.values()), rel=1e-4)
    kinds: dict[str, dict[str, float]] = {}
    for part in specs["kinds"]["data"]["values"]:
        kinds.setdefault(part["row"], {})[part["kind"]] = part["size"] * GIB
    for stage, terms in zip(sharded.stages, sharded.predictions.stages, strict=True):
        parts, memory = kinds[f"stage {stage.index}"], terms.memory
        assert sum(parts.values()) == pytest.approx(memory.total_bytes)
        assert parts["weights"] == pytest.approx(memory.weights_bytes)
        assert parts["optimizer"] == pytest.approx(memory.optimizer_bytes)
    limits = [each["encoding"]["y"]["datum"] for each in specs["memory"]["layer"][1:]]
    assert limits == sorted({terms.capacity_bytes / GIB for terms in sharded.predictions.stages})


def test_alternatives_have_their_times_and_memory(sharded: Plan, sharded_page: str) -> None:
    spec = Page(sharded_page).specs["alternatives"]
    points = spec["data"]["values"]
    low, high = next(layer for layer in spec["layer"] if "text" in layer["encoding"])["encoding"]["y"]["scale"][
        "domain"
    ]
    assert all(low < point["memory"] < high for point in points)
    assert points[0]["seconds"] == sharded.predictions.reached_s
    expected = {(other.label, sharded.compared_s(other)[1]) for other in sharded.alternatives}
    assert {(point["name"], point["seconds"]) for point in points[1:]} == {
        (label, seconds) for label, seconds in expected if seconds is not None
    }


def test_roofline_points_are_the_operators(sharded: Plan, sharded_page: str) -> None:
    """A layer's first product of its MLP on one of 8 ranks: an eighth of 2 x 1024 x 768 x 3072 operations."""
    points = Page(sharded_page).specs["roofline"]["data"]["values"]
    wide = next(point for point in points if point["name"] == "c_fc")
    assert wide["alike"] == 12
    graph, cluster = against(sharded)
    prices = planner.profile(graph, cluster.devices[0], precision=sharded.options.precision, micro_batch=1)
    product = next(i for i, node in enumerate(graph.nodes) if node.op == "MatMul" and node.module.endswith("c_fc"))
    seconds = prices.at(1 / 8)[0][product]
    assert wide["rate"] == pytest.approx(2 * 1024 * 768 * 3072 / 8 / seconds)
    assert (
        sum(point["share"] for point in points)
        + sum(
            float(sum(each[i] for each in prices.at(1 / 8)) / sum(each.sum() for each in prices.at(1 / 8)))
            for i in range(len(graph.nodes))
            if not prices.forward_flops[i]
        )
        > 0.9
    )


def test_the_same_plan_gives_the_same_bytes(sharded: Plan, sharded_page: str) -> None:
    assert planner.report.plan_page(sharded, *against(sharded)) == sharded_page


def test_long_timelines_are_coarser_outside_the_steady_state() -> None:
    """The part in focus has every action; the page stays small, and keeps ends and peaks."""
    plan = toy_plan(micro_batches=6000)
    text = planner.report.plan_page(plan)
    assert len(text) < 3_000_000
    specs = Page(text).specs
    begin, end = specs["zoom"]["focus"]
    drawn = rows(specs["timeline"])
    exact = [row for row in drawn if row["kind"] == "F" and begin <= float(row["begin"]) and float(row["end"]) <= end]
    assert len(exact) >= 3 * math.floor((end - begin) / 0.003) - 3
    assert max(float(row["end"]) for row in drawn) == pytest.approx(specs["zoom"]["end"], rel=1e-2)
    assert "Outside the steady state" in text
    peak = max(lane.memory.peak_bytes for lane in simulate(plan).lanes) / GIB
    assert max(float(row["held"]) for row in rows(specs["memory"])) == pytest.approx(peak, rel=1e-4)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved:chunks=2", "zb-h1", "chimera", "pipedream"])
def test_every_kind_of_schedule_has_a_page(schedule: str) -> None:
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    degrees = planner.Degrees(pipeline=4, chunks=2 if "chunks" in schedule else 1, schedule=schedule)
    plan = planner.predict(graph, cluster, planner.Job(64), degrees).plan
    page = Page(planner.report.plan_page(plan))
    parts = page.specs["time"]["data"]["values"]
    step_s = simulate(plan).step_s
    for row in {part["row"] for part in parts}:
        assert sum(part["size"] for part in parts if part["row"] == row) == pytest.approx(step_s, rel=1e-6)


def test_command(sharded: Plan, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    plan_file, page = written(sharded, tmp_path), tmp_path / "report.html"
    assert run("report", plan_file, "-o", page) == 0
    assert '"roofline":' in page.read_text()  # of the model and the hardware that the plan names
    named = page.read_bytes()
    capfdbinary.readouterr()
    model = ("--model", "gpt2", "-H", "dgx-a100", "--nodes", "2")
    assert run("report", plan_file, "-o", "-", *model) == 0
    assert capfdbinary.readouterr().out == named
    assert run("report", plan_file, "-o", page, "--model", "gpt2-medium", "-H", "dgx-a100", "--nodes", "2") == 2
    assert b"the plan is for gpt2" in capfdbinary.readouterr().err


def test_without_the_model_the_page_says_what_it_lacks(sharded: Plan, tmp_path: Path) -> None:
    missing = dataclasses.replace(sharded.provenance, model="elsewhere.onnx")
    plan_file, page = written(dataclasses.replace(sharded, provenance=missing), tmp_path), tmp_path / "report.html"
    assert run("report", plan_file, "-o", page) == 0
    words = Page(page.read_text()).text
    assert "The roofline of the operators needs the model and the hardware: add --model and --hardware." in words
    assert "elsewhere.onnx" in words
    assert run("report", plan_file, "-o", page, "--model", "elsewhere.onnx", "-H", "dgx-a100") == 3


def test_text_of_the_plan_cannot_become_markup() -> None:
    plan = toy_plan()
    model = dataclasses.replace(plan.model, name="</script><b>toy")
    text = planner.report.plan_page(dataclasses.replace(plan, model=model, headline=None))
    assert "</script><b>toy" not in text
    assert "&lt;/script&gt;&lt;b&gt;toy" in text


def test_charts_compile(sharded_page: str) -> None:
    """The library's own compiler takes every specification without a warning."""
    vl_convert = pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    for name, spec in Page(sharded_page).specs.items():
        if name != "zoom":
            compiled = vl_convert.vegalite_to_vega({**spec, "width": 900}, vl_version="6.4")
            assert compiled["marks"], name
