"""The page in a browser: drawn without a word on the console, nothing requested, moved by every device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planner
from tests.simulate.plans import toy_plan

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

PLAYED_S = 0.6 * 3 + 0.0085
"""600 micro-batches of 3 ms in three stages, their fill and their tails."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as session:
        started = session.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(planner.report.plan_page(toy_plan(micro_batches=600)), encoding="utf-8")
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(params=[(1280, 900, "light"), (1280, 900, "dark"), (390, 844, "light")], ids=["light", "dark", "phone"])
def page(browser: Any, page_file: Path, said: list[str], request: pytest.FixtureRequest) -> Iterator[Any]:
    width, height, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = context.new_page()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda asked: said.append(asked.url) if asked.url != page_file.as_uri() else None)
    opened.goto(page_file.as_uri())
    opened.wait_for_selector("body[data-drawn]")
    yield opened
    context.close()


def shown(page: Any) -> tuple[float, float]:
    """Begin and end of what the timeline and the memory chart show, once both have drawn the same."""
    page.wait_for_function("!waiting")
    page.evaluate("Promise.all(zoomed.map(view => view.runAsync())).then(() => null)")
    begin, end = page.evaluate("[zoomed.map(view => view.signal('begin')), zoomed.map(view => view.signal('end'))]")
    assert len(set(begin)) == len(set(end)) == 1
    return begin[0], end[0]


def test_it_draws_every_chart_and_says_nothing(page: Any, said: list[str]) -> None:
    charts = page.locator(".chart canvas")
    assert charts.count() == 6
    assert all(charts.nth(at).bounding_box()["width"] > 150 for at in range(6))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert said == []


def test_buttons_keys_wheel_and_pointer_move_in_time(page: Any, said: list[str]) -> None:
    focus = shown(page)
    page.get_by_role("button", name="Whole step").click()
    assert shown(page) == pytest.approx((0.0, PLAYED_S), rel=0.01)
    page.locator("#timeline").focus()
    page.keyboard.press("s")
    assert shown(page) == pytest.approx(focus)
    page.keyboard.press("ArrowRight")
    length = focus[1] - focus[0]
    assert shown(page) == pytest.approx((focus[0] + length / 5, focus[1] + length / 5))
    page.keyboard.press("+")
    begin, end = shown(page)
    assert end - begin == pytest.approx(0.6 * length)
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.up()
    later = shown(page)
    assert later[0] > begin
    assert later[1] - later[0] == pytest.approx(end - begin)
    page.keyboard.down("Control")
    page.mouse.wheel(0, 200)
    page.keyboard.up("Control")
    page.wait_for_function(f"to - from > {1.2 * (end - begin)}")
    assert said == []


def test_pointing_at_a_stretch_says_what_it_is(page: Any) -> None:
    chart = page.locator("#timeline canvas")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + box["height"] - 45)
    page.mouse.move(box["x"] + 0.6 * box["width"] + 1, box["y"] + box["height"] - 45)
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    assert "of micro-batch" in tip.inner_text()


def test_light_and_dark(page: Any) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


LEGENDS = """
views.flatMap((view, at) => {
  const marks = view.scenegraph().root.items[0].items.filter(mark => mark.role === "legend");
  const width = view.container().querySelector("canvas").clientWidth;
  return marks.map(mark => [charts[at].id, view.origin()[0] + mark.bounds.x2, width]);
})
"""
"""By legend: its chart, where it ends, and the width of the picture, in pixels."""


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan with ten activities, and rows of several stages."""
    job = planner.Job(global_batch=64, precision="bf16")
    degrees = planner.Degrees(tensor=2, pipeline=2, chunks=6, zero=1)
    graph = planner.load_graph("gpt2", dims={"seq": 128})
    plan = planner.predict(graph, planner.load_cluster("dgx-a100"), job, degrees).plan
    path = tmp_path_factory.mktemp("page") / "wide.html"
    path.write_text(planner.report.plan_page(plan), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [320, 375, 412, 440, 600, 900, 1280])
def test_no_legend_is_cut_off(browser: Any, wide_file: Path, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 812})
    page = context.new_page()
    page.goto(wide_file.as_uri())
    page.wait_for_selector("body[data-drawn]")
    legends = page.evaluate(LEGENDS)
    assert {"timeline", "time", "kinds"} <= {chart for chart, *_ in legends}
    assert [entry for entry in legends if entry[1] > entry[2]] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_legends_fit_again_when_the_phone_is_turned(browser: Any, wide_file: Path) -> None:
    context = browser.new_context(viewport={"width": 812, "height": 375})
    page = context.new_page()
    page.goto(wide_file.as_uri())
    page.wait_for_selector("body[data-drawn]")
    page.set_viewport_size({"width": 320, "height": 812})
    page.wait_for_function("drawnWidth === 320")
    page.wait_for_function(f"({LEGENDS}).length && ({LEGENDS}).every(([, end, width]) => end <= width && width < 300)")
    context.close()


def test_labels_of_a_timeline_are_inside_its_picture(browser: Any, tmp_path: Path) -> None:
    """32,768 ranks in 80 chunks: the longest labels of rows."""
    job = planner.Job(global_batch=65536, precision="bf16")
    degrees = planner.Degrees(pipeline=8, chunks=6)
    graph = planner.load_graph("gpt2-xl", dims={"seq": 1024})
    plan = planner.predict(graph, planner.load_cluster("dgx-h100", nodes=4096), job, degrees).plan
    path = tmp_path / "timeline.svg"
    path.write_text(planner.draw_svg(planner.simulate_plan(plan)), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    edges = "[...document.querySelectorAll('text')].map(e => e.getBBox()).map(b => [b.x, b.x + b.width])"
    width = page.evaluate("document.documentElement.viewBox.baseVal.width")
    found = page.evaluate(edges)
    assert len(found) > 30
    assert min(begin for begin, _ in found) >= 0
    assert max(end for _, end in found) <= width
    page.close()
