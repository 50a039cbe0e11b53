"""The tables of docs/schedules.md: what every schedule says of itself, and the same measured."""

from __future__ import annotations

from planner.play import Conditions, measure_schedule
from planner.schedules import SCHEDULES, ActivationUnit, Schedule, get, names, printed

WORKERS, MICRO_BATCHES = 4, 8
VARIANTS = (
    "chimera:over=double",
    "bapipe-fbp:fill_overlap=true",
    "pipedream:vertical=true",
    "pipedream-2bw:uniform=false",
    "gpipe:recompute=true",
)
"""Options that have a row of their own in the measured table."""


HEADER = "| name | decides; options | idle time | keeps | versions | staleness | source |"


def schedule_rows(page: str) -> str:
    """The table of schedules: idle time, what is kept, versions and staleness as each says them, and its publication.

    What stands in the second column, and after a semicolon in the others, is written by hand and left as it is.
    """
    table = page.partition(HEADER)[2].partition("\n\n")[0]
    cells_of = {line.split("`")[1]: line.strip("| ").split(" | ") for line in table.splitlines() if "`" in line[:4]}
    rows = [HEADER, "|---|---|---|---|---|---|---|"]
    for name, schedule in SCHEDULES.items():
        f, written = schedule.facts, cells_of.get(name, [""] * 7)
        said = (idle_cell(schedule), kept_cell(schedule), printed(f.versions), printed(f.staleness))
        notes = (cell.partition("; ")[2] for cell in written[2:6])
        cells = ("; ".join(filter(None, pair)) for pair in zip(said, notes, strict=True))
        rows.append(f"| {' | '.join((f'`{name}`', written[1], *cells, f.source))} |")
    return "\n".join(rows) + "\n"


def measured_rows() -> str:
    """Every schedule played: 4 workers, 8 micro-batches, F = 1, B = 2 of which W = 1.

    Where a worker has several stages, its F and B are split evenly over them; of the numbers of chunks that a schedule
    takes the fewest are played.
    """
    rows = [
        "| name | iteration | bubble | micro-batches kept by worker | versions | mean staleness by stage |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_measured_row(name) for name in (*names(), *VARIANTS))]) + "\n"


def _measured_row(name: str) -> str:
    stages = get(name).stage_counts(WORKERS)[0]
    chunks = max(stages, WORKERS) // WORKERS
    measured = measure_schedule(
        name,
        WORKERS * chunks,
        MICRO_BATCHES,
        forward_s=1 / chunks,
        backward_s=2 / chunks,
        conditions=Conditions(pair_overlap=1.0),
    )
    kept = ", ".join(f"{units:g}" for units in measured.held_micro_batches)
    stale = ", ".join(f"{age:g}" for age in measured.mean_staleness) if measured.cycle else "0"
    versions = max(measured.weight_versions)
    return f"| `{name}` | {measured.iteration_s:g} | {measured.bubble:.3f} | {kept} | {versions} | {stale} |"


def idle_cell(schedule: Schedule) -> str:
    """Idle time as an expression, with the conditions under which it holds."""
    facts = schedule.facts
    return printed(facts.idle) + (f" for {printed(facts.idle_holds)}" if facts.idle_holds else "")


def kept_cell(schedule: Schedule) -> str:
    """What a worker keeps, with its unit where that is no micro-batch."""
    unit = "" if schedule.activation_unit is ActivationUnit.MICRO_BATCH else f" {schedule.activation_unit}s"
    return f"{'at most ' if schedule.facts.kept_bound else ''}{printed(schedule.facts.kept)}{unit}"
