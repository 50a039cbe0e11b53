"""The partition benchmark's tables: what was found, beside what the peers were recorded to find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from planner.sums import float_sum

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
SAME = 1e-9


def tables(rows: list[Row]) -> str:
    """All tables as markdown; those without rows are left out."""
    parts = []
    for name, (title, about, columns) in _TABLES.items():
        table_rows = [row for row in rows if row["table"] == name]
        if table_rows:
            shown = [column for column in columns if any(column[1](row) for row in table_rows)]
            parts.append(
                f"## {title}\n\n{about}\n\n{_markdown(shown, table_rows)}\n\n{_summary(name, table_rows)}".rstrip()
            )
    return "\n\n".join(parts) + "\n"


def _markdown(columns: list[Column], rows: list[Row]) -> str:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("| --- |" + " ---: |" * (len(columns) - 1))
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def figure(value: float | None, digits: int = 5) -> str:
    """A number, or a dash."""
    if value is None or not math.isfinite(value):
        return "-"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _ideals(row: Row) -> str:
    return f"{row['ideals']:,}" if row.get("ideals") else ""


def _gap(row: Row) -> str:
    if row.get("failed"):
        return "failed"
    if row["objective"] is None:
        return "none exists" if row["proven"] else "none found"
    return "optimal" if row["proven"] else f"{row['gap']:.2%}"


def _milli(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    return figure(value * 1e3 if row["unit"] == "s" else value)


def _objective(row: Row) -> str:
    return _milli(row, row["objective"])


def _peer(row: Row, name: str) -> Row:
    figures: Row = row.get("recorded", {}).get("peer", {}).get(name, {})
    return figures


def _dp_load(row: Row) -> str:
    dp = _peer(row, "dp")
    if not dp:
        return ""
    return figure(dp["max_load"]) if dp.get("finished") else "not in 600 s"


def _ratio(peer_s: float | None, own_s: float | None) -> str:
    if not peer_s or not own_s:
        return ""
    times = peer_s / own_s
    return f"{times:,.0f}x" if times >= 10 else f"{times:.2g}x"


def _best_peer(row: Row) -> str:
    peers = row.get("recorded", {}).get("peer", {})
    loads = {name: p["max_load"] for name, p in peers.items() if p.get("finished") and p["max_load"] is not None}
    if not loads:
        return ""
    name = min(loads, key=lambda n: loads[n])
    return f"{figure(loads[name])} ({name})"


def _model(row: Row, kind: str) -> str:
    models = [m for m in row.get("recorded", {}).get("exact_model", []) if m["kind"] == kind]
    if not models:
        return ""
    best = min(models, key=lambda m: (m["max_load"], m["wall_s"]))
    status = "" if best["status"] == "OPTIMAL" else f" (bound {figure(best['bound'])})"
    return f"{figure(best['max_load'])}{status}, {best['wall_s']:.0f} s"


def _live(row: Row) -> str:
    peer = row.get("live")
    if not peer:
        return ""
    value = peer["judged"] if peer["judged"] is not None else peer["objective"]
    return figure(value) if peer["finished"] else "did not finish"


def _live_ratio(row: Row) -> str:
    peer = row.get("live")
    return _ratio(peer["cpu_s"], row["cpu_s"]) if peer else ""


_FOUND: list[Column] = [
    ("gap", _gap),
    ("s", lambda r: figure(r["seconds"], 3)),
    ("CPU s", lambda r: figure(r["cpu_s"], 3)),
    ("MB", lambda r: figure(r["megabytes"], 3)),
]
_LIVE: list[Column] = [("peer program", _live), ("its CPU / ours", _live_ratio)]
_INSTANCE: list[Column] = [
    ("instance", lambda r: r["label"]),
    ("nodes", lambda r: str(r.get("nodes", ""))),
    ("ideals", _ideals),
]


def _recorded(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get("recorded", {}).get(key)


def _peer_value(key: str) -> Callable[[Row], str]:
    return lambda row: _milli(row, _recorded(key)(row)) if row.get("recorded") else ""


def _against(key: str) -> Callable[[Row], str]:
    """By how much the recorded objective is longer."""

    def cell(row: Row) -> str:
        recorded = _recorded(key)(row)
        if not recorded or not row["objective"]:
            return ""
        return "equal" if abs(recorded / row["objective"] - 1) < SAME else f"{recorded / row['objective'] - 1:+.1%}"

    return cell


def _cpu_against(key: str) -> Callable[[Row], str]:
    return lambda row: _ratio(_recorded(key)(row), row["cpu_s"])


_GROWTH: list[Column] = [
    *_INSTANCE,
    ("ms", _objective),
    ("bound", lambda r: _milli(r, r["bound"])),
    *_FOUND,
]

_TABLES: dict[str, tuple[str, str, list[Column]]] = {
    "contiguous": (
        "Operator graphs, contiguous",
        "Largest load in ms, stages in a chain of ideals. *DP*: the published programme over ideals, its recorded "
        "result and CPU time over ours. *exact model*: a CP-SAT model of the chain problem, recorded with its seconds.",
        [
            *_INSTANCE,
            ("ms", _objective),
            *_FOUND,
            ("DP", _dp_load),
            ("its CPU / ours", lambda r: _ratio(_peer(r, "dp").get("cpu_s"), r["cpu_s"])),
            ("exact model", lambda r: _model(r, "chain")),
            *_LIVE,
        ],
    ),
    "scattered": (
        "Operator graphs, not contiguous",
        "The same without any condition on the order, 60 s each. *best peer* is the best of all recorded published "
        "programmes (which must be contiguous, but for local search).",
        [
            *_INSTANCE,
            ("ms", _objective),
            ("bound", lambda r: _milli(r, r["bound"])),
            *_FOUND,
            ("best peer", _best_peer),
            ("exact model", lambda r: _model(r, "noncontig")),
            *_LIVE,
        ],
    ),
    "latency": (
        "Operator graphs, latency of one sample",
        "Nothing pipelined: only what the graph lets run side by side gains from more devices. 15 s each.",
        [*_INSTANCE[:2], ("ms", _objective), ("bound", lambda r: _milli(r, r["bound"])), *_FOUND],
    ),
    "piper": (
        "Piper's instance",
        "Time per sample in ms. *recorded*: the released programme (mode dp), with its CPU time over ours.",
        [
            *_INSTANCE[:1],
            ("ms", _objective),
            *_FOUND,
            ("recorded", _peer_value("tps")),
            ("it is slower by", _against("tps")),
            ("its CPU / ours", _cpu_against("cpu")),
            *_LIVE,
        ],
    ),
    "pipedream": (
        "PipeDream's profiles on one level",
        "Time a minibatch in ms under the released optimiser's own rules (cost, sizes, cuts). *16 GB*: it also had its "
        "rule of memory, which charges nothing to the last stage, decides none of these plans and is left out here. "
        "*recorded*: what it found, with the CPU time of its programme alone over ours.",
        [
            *_INSTANCE,
            ("ms", _objective),
            *_FOUND,
            ("recorded", _peer_value("pipe_s")),
            ("it is slower by", _against("pipe_s")),
            ("its CPU / ours", _cpu_against("dp_s")),
            *_LIVE,
        ],
    ),
    "hierarchical": (
        "PipeDream's profiles on several levels, nested as released",
        "All servers of a stage split it alike. CPU as above.",
        [
            *_INSTANCE,
            ("ms", _objective),
            *_FOUND,
            ("recorded", _peer_value("pipe_s")),
            ("it is slower by", _against("pipe_s")),
            ("its CPU / ours", _cpu_against("dp_s")),
        ],
    ),
    "placed": (
        "PipeDream's profiles on several levels, each stage on devices of its own",
        "The same clusters and prices, but a stage may take any run of neighbouring devices: never worse than the flat "
        "plan on the slowest links, which nesting is.",
        [
            *_INSTANCE,
            ("ms", _objective),
            *_FOUND,
            ("recorded, nested", _peer_value("pipe_s")),
            ("it is slower by", _against("pipe_s")),
        ],
    ),
    "iteration": (
        "Iteration time over device meshes",
        "Sum of stage times plus (M - 1) times the longest, M = 64, made-up transformer layers. *peer*: Alpa's own "
        "programme for this size, seconds over ours (at least 100 s at 48 layers on 64 devices).",
        [
            *_INSTANCE[:1],
            ("ms", _objective),
            *_FOUND,
            ("peer s / ours", lambda r: _ratio(_recorded("dp_s")(r), r["seconds"])),
        ],
    ),
    "layerwise": (
        "Layer-wise strategies under memory",
        "Sum of layer times and changes of layout on one device's memory. The last row of each size has the same "
        "layers with all sizes a thousand times larger: the time must not depend on the memory's size.",
        [*_INSTANCE[:1], ("ms", _objective), *_FOUND],
    ),
    "growth-nodes": (
        "Growth with nodes",
        "Contiguous, no memory limit, copies of a graph in line.",
        _GROWTH,
    ),
    "growth-scattered": (
        "Growth with nodes, not contiguous",
        "No memory limit, copies of a graph in line, 30 s each.",
        _GROWTH,
    ),
    "growth-devices": ("Growth with devices", "Contiguous, no memory limit.", _GROWTH),
    "growth-branching": (
        "Growth with branching",
        "Contiguous, no memory limit, copies of a graph side by side: the number of ideals is a power of theirs.",
        _GROWTH,
    ),
}


def _summary(name: str, rows: list[Row]) -> str:
    """One line that counts: proven, no worse than recorded, how much less CPU."""
    keys = {"piper": ("tps", "cpu"), "pipedream": ("pipe_s", "dp_s"), "hierarchical": ("pipe_s", "dp_s")}
    solved = [row for row in rows if row["objective"] is not None]
    text = [f"{sum(bool(row['proven']) for row in rows)} of {len(rows)} proven"]
    if name in keys:
        value, cpu = keys[name]
        compared = [row for row in solved if _recorded(value)(row)]
        no_worse = sum(bool(row["objective"] <= row["recorded"][value] * (1 + SAME)) for row in compared)
        text.append(f"{no_worse} of {len(compared)} no worse than recorded")
        text.append(_ratios(row["recorded"][cpu] / row["cpu_s"] for row in compared if row["recorded"].get(cpu)))
    elif name == "contiguous":
        compared = [row for row in solved if _peer(row, "dp").get("finished")]
        no_worse = sum(bool(row["objective"] <= _peer(row, "dp")["max_load"] * (1 + SAME)) for row in compared)
        text.append(f"{no_worse} of {len(compared)} no worse than the DP")
        text.append(_ratios(_peer(row, "dp")["cpu_s"] / row["cpu_s"] for row in compared))
    return "; ".join(part for part in text if part) + "."


def _ratios(values: Iterable[float]) -> str:
    ratios = sorted(values)
    if not ratios:
        return ""
    mean = math.exp(float_sum(map(math.log, ratios)) / len(ratios))
    shown = [figure(value, 2) for value in (ratios[0], ratios[-1], mean)]
    return f"recorded CPU time over ours: {shown[0]} to {shown[1]}, geometric mean {shown[2]}"
