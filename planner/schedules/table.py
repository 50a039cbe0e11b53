"""All schedules in one table."""

from __future__ import annotations

from typing import cast

from planner.schedules._defaults import Defaults


def schedule_table() -> str:
    """Markdown: what each schedule decides, its bubble, memory, staleness, and where it was published."""
    from planner.schedules import SCHEDULES

    rows = ["| name | decides; options | bubble | memory | staleness | source |", "|---|---|---|---|---|---|"]
    for name, schedule in SCHEDULES.items():
        f = cast(Defaults, schedule).facts
        rows.append(f"| `{name}` | {f.decides} | {f.bubble} | {f.memory} | {f.staleness} | {f.source} |")
    return "\n".join(rows) + "\n"
