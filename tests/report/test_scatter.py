"""The picture of a comparison: what stands in it, and that names can be read."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ask.sweeps import SweepRow
from planner.plans.figures import Headline
from planner.report import comparison_svg, sweep_svg
from planner.report.svg import LETTER, time_ticks
from planner.space import MemoryBytes
from planner.systems import Comparison, Semantics, SystemRow

SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, seconds: float, gigabytes: float, *, sync: bool = True, alters: str = "") -> SystemRow:
    memory = MemoryBytes(gigabytes * 2**30, 0.0, 0.0, 0.0, 0.0, 0.0)
    kind = Semantics.SYNC if sync else Semantics.ASYNC
    return SystemRow(
        name,
        name,
        kind,
        True,
        iteration_s=seconds,
        memory=memory,
        capacity_bytes=16 * 2**30,
        plan="a plan",
        alters=alters,
    )


def picture(*rows: SystemRow) -> ElementTree.Element:
    return ElementTree.fromstring(comparison_svg(Comparison("a<b", "box & co", 8, "sync", rows)))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def names(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Boxes of the names of points."""
    found = []
    for element in root.iter(f"{SVG}text"):
        if element.get("class") in ("first", "second"):
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            found.append((x, y - 9, x + LETTER * len(element.text or ""), y + 2))
    return found


def test_every_row_is_named_and_what_does_not_fit_below() -> None:
    failed = SystemRow("tofu", "Tofu", Semantics.SYNC, False, "too large")
    root = picture(
        row("gpipe", 1, 4), row("2bw", 2, 8, sync=False), row("parallax", 3, 9, alters="updates few rows"), failed
    )
    shown = texts(root)
    assert {"gpipe", "2bw", "parallax+", "not possible: tofu", "+ parallax: updates few rows"} <= set(shown)
    assert "a<b on box & co, global batch 8" in shown
    assert "limit 16 GiB" in shown
    points = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    assert sorted(c.get("class", "") for c in points) == ["mark first", "mark first", "mark second"]


def test_more_memory_is_higher_and_more_time_further_right() -> None:
    root = picture(row("a", 1, 4), row("b", 10, 12))
    left, right = [c for c in root.iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    assert float(left.get("cx", 0)) < float(right.get("cx", 0))
    assert float(left.get("cy", 0)) > float(right.get("cy", 0))


def test_without_rows_it_says_so() -> None:
    assert "no system can train this model on this cluster" in texts(picture())


@given(st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(5, 9)), min_size=1, max_size=14), st.floats(1.6, 60))
@settings(deadline=None, max_examples=40)
def test_names_lie_inside_and_do_not_cover_each_other(places: list[tuple[float, float]], far: float) -> None:
    """As many rows as there are systems in a corner of the picture, and one far off, as in most comparisons."""
    rows = [row(f"system-{i}", *place) for i, place in enumerate(places)]
    root = picture(*rows, row("pipelined-backprop", far, 2))
    _, _, width, height = (float(n) for n in root.get("viewBox", "").split())
    boxes = names(root)
    for box in boxes:
        assert box[0] >= 0
        assert box[1] >= 0
        assert box[2] <= width
        assert box[3] <= height
    for one, other in itertools.combinations(boxes, 2):
        assert min(one[2], other[2]) <= max(one[0], other[0]) or min(one[3], other[3]) <= max(one[1], other[1])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 20, (0.5, 1, 2, 5, 10, 20)),
        (0.001, 9, (0.001, 0.01, 0.1, 1)),
        (14, 2000, (60, 120, 300, 600, 1800)),
        (0.53, 0.56, (0.53, 0.54, 0.55, 0.56)),
    ],
)
def test_times_are_round(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert time_ticks(low, high) == pytest.approx(ticks)


def test_it_follows_the_scheme_of_the_viewer() -> None:
    text = comparison_svg(Comparison("m", "h", 8, "sync", (row("a", 1, 4),)))
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r'(fill|stroke)="', text)


def _swept(devices: int, *, pareto: bool) -> SweepRow:
    line = Headline("gpt2", {"h100": devices}, 8, 1.0, 8.0 * devices, devices << 30, 80 << 30)
    return SweepRow((("devices", str(devices)), ("model", "gpt2")), line, "a plan", pareto=pareto)


def test_points_of_a_sweep_are_named_the_best_always_and_the_others_where_they_are_few() -> None:
    few = [_swept(n, pareto=n == 2) for n in (1, 2, 3)]
    texts = [text.text for text in ElementTree.fromstring(sweep_svg(few)).iter(f"{SVG}text")]
    assert {"devices 1", "devices 2", "devices 3"} <= set(texts)
    assert "no other is as good in throughput, price and memory" in texts
    many = [_swept(n, pareto=n == 2) for n in range(1, 31)]
    texts = [text.text for text in ElementTree.fromstring(sweep_svg(many)).iter(f"{SVG}text")]
    assert [text for text in texts if (text or "").startswith("devices ")] == ["devices 2"]
