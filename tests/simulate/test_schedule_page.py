"""The tables and examples of docs/schedules.md are what the program gives."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.formulas_page import schedule_table
from planner.play import Conditions, measure_schedule
from planner.schedules import get, names

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
WORKERS, MICRO_BATCHES = 4, 8
CHUNKS = {"interleaved": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "hanayo": 2, "dualpipe-v": 2}
VARIANTS = (
    "chimera:over=double",
    "bapipe-fbp:fill_overlap=true",
    "pipedream:vertical=true",
    "pipedream-2bw:uniform=false",
    "gpipe:recompute=true",
)


def row(name: str) -> str:
    """Four workers, 8 micro-batches, F = 1, B = 2 of which W = 1, split evenly over a worker's stages."""
    chunks = CHUNKS.get(name, 1)
    found = measure_schedule(
        name,
        WORKERS * chunks,
        MICRO_BATCHES,
        forward_s=1 / chunks,
        backward_s=2 / chunks,
        conditions=Conditions(pair_overlap=1.0),
    )
    kept = ", ".join(f"{held:g}" for held in found.held_micro_batches)
    stale = ", ".join(f"{age:g}" for age in found.mean_staleness) if found.cycle else "0"
    versions = max(found.weight_versions)
    return f"| `{name}` | {found.iteration_s:g} | {found.bubble:.3f} | {kept} | {versions} | {stale} |"


def test_table_of_schedules() -> None:
    assert schedule_table() in PAGE.read_text()
    assert len(re.findall(r"^\| `", schedule_table(), re.MULTILINE)) == len(names())


def test_measured_table() -> None:
    page = PAGE.read_text()
    expected = [row(name) for name in (*names(), *VARIANTS)]
    assert [line for line in expected if line not in page] == []


def test_names_on_the_page_exist() -> None:
    for name in re.findall(r"`([a-z0-9-]+:[a-z_]+=[^`]+)`", PAGE.read_text()):
        get(name)
