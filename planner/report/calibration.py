"""What measured runs say of a stack: the factors, and how far predictions were and are off."""

from __future__ import annotations

from planner.calibration import Calibration, FittedRun
from planner.report.tables import Form, Report, Section, table
from planner.units import format_fraction, plural


def calibration_report(found: Calibration) -> Report:
    """The fitted factors, every run, and the errors before, after and of runs that were left out."""
    factors = table(
        {"figure": Form.NAME, "what it is": Form.TEXT, "factor": Form.FIGURE, "80 %": Form.FIGURE, "now": Form.FIGURE},
        [(f.name, f.meaning, f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}", f.figure) for f in found.factors],
    )
    runs = table(
        {
            "run": Form.TEXT, "measured": Form.SECONDS, "before": Form.SECONDS, "off": Form.CHANGE,
            "after": Form.SECONDS, "off after": Form.CHANGE, "off left out": Form.CHANGE,
        },
        [_row(each) for each in found.runs],
    )  # fmt: skip
    errors = [format_fraction(found.error(name)) for name in ("before_s", "after_s", "left_out_s")]
    lines = [
        f"mean error of {plural(len(found.runs), 'run')}: {errors[0]} before, {errors[1]} after; {errors[2]} of runs "
        "that had no part in the fit (each left out in turn)"
    ]
    stuck = [factor.name for factor in found.factors if factor.bounded]
    if stuck:
        lines.append(f"{', '.join(stuck)}: as far from 1 as a fit may go; look for what else is wrong")
    if found.memory:
        value, low, high = found.memory
        lines.append(f"peak memory: measured {value:.3f} times what is predicted (80 %: {low:.3f} to {high:.3f})")
    return Report(
        f"{found.base}, fitted to measured runs",
        (Section(table=factors), Section(table=runs), Section(lines=tuple(lines))),
    )


def _row(each: FittedRun) -> tuple[str | float, ...]:
    measured = each.run.seconds
    return (
        _words(each),
        measured,
        each.before_s,
        each.before_s / measured - 1,
        each.after_s,
        each.after_s / measured - 1,
        each.left_out_s / measured - 1,
    )


def _words(each: FittedRun) -> str:
    """A run's configuration, as far as it says anything."""
    d = each.run.degrees
    parts = [f"tp {d.tensor}" * (d.tensor > 1), f"pp {d.pipeline}" * (d.pipeline > 1), f"dp {d.data}" * (d.data > 1)]
    parts += [f"{d.chunks} chunks" * (d.chunks > 1), f"micro-batch {d.micro_batch}", d.schedule]
    parts += [f"ZeRO-{d.zero}" * (d.zero > 0), "recompute" * d.recompute, f"batch {each.run.global_batch}"]
    return ", ".join(part for part in parts if part)
