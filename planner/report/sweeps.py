"""Reports of sweeps: a table, and a picture of throughput against price, or memory if no price is known."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ask.sweeps import SweepRow
from planner.report import svg
from planner.report.svg import Scale, horizontal_lines, round_ticks, vertical_lines
from planner.report.tables import Cell, Form, Report, Section, data_table, table
from planner.units import plural

STYLE = """
.some { fill: #999 } .best { fill: #2563eb } .front { stroke: #2563eb }
@media (prefers-color-scheme: dark) { .some { fill: #777 } .best { fill: #7aa7ff } .front { stroke: #7aa7ff } }
"""
MARK = "*"
PARETO = f"{MARK} no other row is at least as good in throughput, price and memory, and better in one of them"
GIB = 1 << 30
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960.0, 560.0, 90.0, 880.0, 60.0, 490.0
FIGURES = (
    "iteration_s", "bound_s", "samples_per_s", "tokens_per_s_per_device", "mfu", "memory_bytes", "device_bytes",
    "dollars_per_hour", "dollars_per_tera_tokens", "dollars_per_mega_samples",
)  # fmt: skip
DATA = (*FIGURES, "pareto", "shape", "reason", "seconds")
"""Columns of the rows for tools, after the swept names."""


def sweep_report(rows: Sequence[SweepRow]) -> Report:
    """All points in order; values that all points share are in the title only."""
    swept = _swept(rows)
    common = [(name, value) for name, value in rows[0].point if name not in swept] if rows else []
    tokens = any(row.headline and row.headline.sequence for row in rows)
    priced = any(row.headline and row.headline.dollars_per_hour for row in rows)
    columns = dict.fromkeys(swept, Form.NAME) | {"": Form.NAME, "step": Form.SECONDS}
    columns |= {
        "tokens/s/device" if tokens else "samples/s/device": Form.FIGURE,
        "MFU": Form.SHARE,
        "memory": Form.BYTES,
    }
    columns |= {"$/10^12 tokens" if tokens else "$/10^6 samples": Form.FIGURE} if priced else {}
    columns |= {"plan, or why there is none": Form.TEXT}
    shown = table(columns, (_cells(row, swept, priced=priced) for row in rows))
    made = sum(row.headline is not None for row in rows)
    lines = (f"{plural(len(rows), 'point')}, {made} with a plan", PARETO)
    title = ", ".join(value if name in ("model", "hardware") else f"{name} {value}" for name, value in common)
    return Report(
        f"sweep: {title}", (Section(table=shown), Section(lines=lines)), data_table(_data(rows), (*swept, *DATA))
    )


def _swept(rows: Sequence[SweepRow]) -> list[str]:
    """Names with more than one value among the points."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.point:
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


def _cells(row: SweepRow, swept: Sequence[str], *, priced: bool) -> tuple[Cell, ...]:
    point, line = dict(row.point), row.headline
    values = [point.get(name) for name in swept]
    if line is None:
        return (*values, "", None, None, None, None, *([None] if priced else []), row.reason)
    rate = line.tokens_per_s_per_device or line.samples_per_s / line.device_count
    dollars = line.dollars_per_tera_tokens or line.dollars_per_mega_samples
    price = (f"{dollars:,.3g}" if dollars < 100 else f"{dollars:,.0f}",) if priced else ()
    figures = (line.iteration_s, f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", line.mfu, line.memory_bytes)
    return (*values, MARK if row.pareto else "", *figures, *price, row.shape)


def _data(rows: Sequence[SweepRow]) -> list[dict[str, object]]:
    data = []
    for row in rows:
        line = row.headline
        figures = {} if line is None else {name: getattr(line, name) for name in FIGURES if hasattr(line, name)}
        result = {"bound_s": row.bound_s or None, "pareto": row.pareto, "shape": row.shape, "reason": row.reason}
        data.append({**dict(row.point), **figures, **result, "seconds": round(row.seconds, 3)})
    return data


def sweep_svg(rows: Sequence[SweepRow]) -> str:
    """Throughput of all devices to the right, price (or memory if no price is known) upwards, both logarithmic.

    Pareto-optimal points are filled in colour; each point has a tooltip with its values.
    """
    made = [(row, *_place(row)) for row in rows if row.headline is not None]
    title = sweep_report(rows).title
    parts = [svg.text(LEFT, 24, title, "title")]
    if not made:
        return svg.svg(WIDTH, HEIGHT, STYLE, [*parts, svg.text(LEFT, TOP + 40, "no point has a plan")])
    priced = all(row.headline and row.headline.dollars_per_hour for row, _, _ in made)
    x, y = _scale([rate for _, rate, _ in made], LEFT, RIGHT), _scale([cost for _, _, cost in made], BOTTOM, TOP)
    tokens = any(row.headline and row.headline.sequence for row, _, _ in made)
    unit = "tokens" if tokens else "samples"
    words = f"dollars for 10^{12 if tokens else 6} {unit}" if priced else "memory of the fullest device, GiB"
    parts += [
        svg.text(LEFT - 60, TOP - 14, f"{words}, logarithmic", "quiet"),
        svg.text((LEFT + RIGHT) / 2, BOTTOM + 40, f"{unit} a second, all devices, logarithmic", "quiet", "middle"),
        *vertical_lines(x, y, "{:,.6g}".format, 18),
        *horizontal_lines(x, y, "{:,.6g}".format),
    ]
    swept = _swept(rows)
    for row, rate, cost in sorted(made, key=lambda point: point[0].pareto):
        tip = ", ".join(f"{name} {value}" for name, value in row.point if name in swept) + f": {row.headline}"
        parts.append(svg.circle("best" if row.pareto else "some", x.at(rate), y.at(cost), 6 if row.pareto else 4, tip))
    return svg.svg(WIDTH, HEIGHT, STYLE, parts)


def _place(row: SweepRow) -> tuple[float, float]:
    """Throughput, and price or GiB, of a row with a plan."""
    line = row.headline
    if line is None:
        return 0.0, 0.0
    rate = line.samples_per_s * (line.sequence or 1)
    return rate, (line.dollars_per_tera_tokens or line.dollars_per_mega_samples or line.memory_bytes / GIB)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale that covers some values with a margin."""
    margin = max(max(values) / min(values), 1.2) ** 0.08
    low, high = min(values) / margin, max(values) * margin
    return Scale(low, high, start, end, round_ticks(low, high))
