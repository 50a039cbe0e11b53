"""A comparison as one self-contained picture: time of an iteration against memory of the fullest device."""

from __future__ import annotations

import math
from html import escape

from planner.systems.compare import Comparison
from planner.systems.types import Semantics, SystemRow
from planner.units import format_bytes, format_seconds

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 50, 60
SYNC_COLOUR, ASYNC_COLOUR = "#2563eb", "#d97706"


def comparison_svg(comparison: Comparison) -> str:
    """Filled points are synchronous, hollow ones change the training semantics; logarithmic time."""
    rows = [row for row in comparison.rows if row.feasible and row.memory is not None]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(comparison.model)} on {escape(comparison.hardware)}, '
        f"global batch {comparison.global_batch}</text>",
        f'<text x="{LEFT}" y="41" fill="#555">filled: synchronous; hollow: changes the training semantics</text>',
    ]
    if rows:
        parts += _drawn(rows)
    else:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT // 2}">no system can train this model on this cluster</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(rows: list[SystemRow]) -> list[str]:
    times = [row.iteration_s for row in rows]
    low, high = math.floor(math.log2(min(times)) * 2) / 2, math.ceil(math.log2(max(times)) * 2) / 2
    span = max(high - low, 0.5)
    most = max(max(row.memory.total, row.capacity_bytes) for row in rows if row.memory)

    def x(seconds: float) -> float:
        return LEFT + (math.log2(seconds) - low) / span * (WIDTH - LEFT - RIGHT)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - size / (most * 1.05) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for step in range(5):
        size, seconds = most * step / 4, 2 ** (low + span * step / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{format_bytes(size)}</text>')
        place = f'x="{x(seconds):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f"<text {place}>{format_seconds(seconds)}</text>")
    for capacity in sorted({row.capacity_bytes for row in rows}):
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(capacity):.1f}" y2="{y(capacity):.1f}"'
        parts.append(f'<line {line} stroke="#b91c1c" stroke-dasharray="5 4"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 18}" text-anchor="middle">time of an iteration (logarithmic)</text>')
    parts.append(f'<text x="16" y="{TOP - 8}">memory of the fullest device</text>')
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda r: (r.iteration_s, r.system)):
        parts += _point(row, x(row.iteration_s), y(row.memory.total if row.memory else 0.0), taken)
    return parts


def _point(row: SystemRow, at_x: float, at_y: float, taken: list[tuple[float, float]]) -> list[str]:
    """A mark and its name, the name moved down where another one stands."""
    asynchronous = row.semantics is Semantics.ASYNC
    colour = ASYNC_COLOUR if asynchronous else SYNC_COLOUR
    label_y = at_y + 4
    while any(abs(at_x - ox) < 110 and abs(label_y - oy) < 13 for ox, oy in taken):
        label_y += 13
    taken.append((at_x, label_y))
    fill = "white" if asynchronous else colour
    return [
        f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{at_x + 9:.1f}" y="{label_y:.1f}" fill="{colour}">{escape(row.system)}</text>',
    ]
