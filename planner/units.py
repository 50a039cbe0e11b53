"""Parse quantities ("80 GB", "25 Gbit/s", "3 us", "87%") to SI floats, and format SI floats for people.

Only the edges of the program use this module. Decimal prefixes are powers of 1000, binary ones (`KiB`, `GiB`) powers of
1024. `Gb/s` is refused, since it may mean bits or bytes; write `Gbit/s` or `GB/s`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum

from planner.errors import UsageError

_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_FLOPS = {f"{p}FLOP": f for p, f in (_DECIMAL | {"E": 1e18}).items()}


class Dimension(StrEnum):
    """What a quantity measures; the value is the word used in messages."""

    BYTES = "an amount of memory"
    BYTE_RATE = "a bandwidth"
    FLOPS = "an amount of work"
    FLOP_RATE = "a computing rate"
    SECONDS = "a time"
    FRACTION = "a fraction"
    PRICE = "a price"


LEAST, MOST = 1e-30, 1e30
"""Smallest and largest nonzero quantity in SI units, so that products and quotients of several stay finite."""

UNITS: Mapping[Dimension, Mapping[str, float]] = {
    Dimension.BYTES: _BYTES,
    Dimension.BYTE_RATE: {f"{u}/s": f for u, f in _BYTES.items()}
    | {f"{p}bit/s": f / 8 for p, f in (_DECIMAL | {"k": 1e3}).items()},
    Dimension.FLOPS: _FLOPS,
    Dimension.FLOP_RATE: {f"{u}/s": f for u, f in _FLOPS.items()},
    Dimension.SECONDS: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    Dimension.FRACTION: {"": 1.0, "%": 0.01},
    Dimension.PRICE: {"$/h": 1.0},
}
"""SI value of each accepted unit: bytes, bytes/s, FLOP, FLOP/s, seconds, 0..1, US dollars an hour."""

EXAMPLES: Mapping[Dimension, str] = {
    Dimension.BYTES: "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB",
    Dimension.BYTE_RATE: "GB/s, GiB/s, MB/s, TB/s, Gbit/s or Mbit/s",
    Dimension.FLOPS: "FLOP, MFLOP, GFLOP or TFLOP",
    Dimension.FLOP_RATE: "GFLOP/s, TFLOP/s or PFLOP/s",
    Dimension.SECONDS: "s, ms, us or ns",
    Dimension.FRACTION: "a number like 0.87 or a percentage like 87%",
    Dimension.PRICE: "$/h",
}

_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*")


def parse(text: object, dimension: Dimension) -> float:
    """The SI value of a quantity with its unit, such as `parse("25 Gbit/s", Dimension.BYTE_RATE)`, 3.125e9.

    Raises:
        UsageError: not a number, or its unit is missing, ambiguous or of another dimension; the hint says what to use.
    """
    units = UNITS[dimension]
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UsageError(f"{text!r} is not {dimension}", hint=f"write a number and {_choices(dimension)}")
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{str(text)!r} is not {dimension}", hint=f"write a number and {_choices(dimension)}")
    number, unit = match[1].replace("_", ""), match[2] or ""
    if unit in units:
        # In decimal, so that "2.039 TB/s" is the float nearest to 2.039e12.
        try:
            value = float(Decimal(number) * Decimal(repr(units[unit])))
        except ArithmeticError:  # an exponent beyond those of decimals
            value = math.inf
        if value and not LEAST <= abs(value) <= MOST:
            what = "large" if abs(value) > MOST else "small"
            raise UsageError(f"{text} is too {what}", hint=f"write a finite quantity, from {LEAST:g} to {MOST:g}")
        return value
    if not unit:
        raise UsageError(f"{text} has no unit: expected {dimension}", hint=f"write {text} with {_choices(dimension)}")
    raise UsageError(f"{unit!r} is not a unit of {dimension}", hint=_unit_hint(unit, dimension))


def _choices(dimension: Dimension) -> str:
    return f"one of {EXAMPLES[dimension]}" if dimension is not Dimension.FRACTION else EXAMPLES[dimension]


def _unit_hint(unit: str, dimension: Dimension) -> str:
    """What to write instead: `bit` or `B` for a `b`, else the unit with the closest spelling, else all units."""
    bits = re.fullmatch(r"([KMGTkmgt])b(?:/s|ps)|([KMGTkmgt])bits?ps", unit)
    if bits and dimension is Dimension.BYTE_RATE:
        prefix = (bits[1] or bits[2]).upper()
        return f"write {prefix}bit/s for bits or {prefix}B/s for bytes"
    if re.fullmatch(r"[KMGTkmgt]i?b(?:it)?", unit) and dimension is Dimension.BYTES:
        return f"{unit!r} reads as bits: write {unit[0].upper()}B or {unit[0].upper()}iB"
    if "flop" in unit.lower() and dimension in (Dimension.FLOPS, Dimension.FLOP_RATE):
        prefix = unit[0].upper() if unit[0].upper() in "KMGTPE" else ""
        return f"write {prefix}FLOP{'/s' if dimension is Dimension.FLOP_RATE else ''}"
    if f"{unit}/s" in UNITS[dimension]:
        return f"write {unit}/s"
    folded = {u.lower(): u for u in UNITS[dimension]}
    if unit.lower() in folded:
        return f"write {folded[unit.lower()]}"
    close = difflib.get_close_matches(unit, [u for u in UNITS[dimension] if u], n=1)
    return f"did you mean {close[0]}? one of {EXAMPLES[dimension]}" if close else f"write {_choices(dimension)}"


_SHOWN: Mapping[Dimension, tuple[str, ...]] = {
    Dimension.BYTES: ("TiB", "GiB", "MiB", "KiB", "B"),
    Dimension.BYTE_RATE: ("TB/s", "GB/s", "MB/s", "KB/s", "B/s"),
    Dimension.FLOPS: ("EFLOP", "PFLOP", "TFLOP", "GFLOP", "MFLOP", "KFLOP", "FLOP"),
    Dimension.FLOP_RATE: ("EFLOP/s", "PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "KFLOP/s", "FLOP/s"),
    Dimension.SECONDS: ("s", "ms", "us", "ns"),
    Dimension.FRACTION: ("%",),
    Dimension.PRICE: ("$/h",),
}
_DECIMAL_BYTES = ("TB", "GB", "MB", "KB", "B")
_EXACT_DIGITS = 12


def render(value: float, dimension: Dimension, digits: int = _EXACT_DIGITS) -> str:
    """A value in the largest unit in which it is 1 or more; `parse` reads 12 digits back to the same value.

    Bytes are in powers of 1024, as drivers and allocators count them; with 12 digits, in powers of 1000 if that text is
    shorter: `2 GB`, `79.15 GiB`.
    """
    shown = _rendered(value, dimension, _SHOWN[dimension], digits)
    if dimension is not Dimension.BYTES or digits < _EXACT_DIGITS:
        return shown
    return min(_rendered(value, dimension, _DECIMAL_BYTES, digits), shown, key=len)


def _rendered(value: float, dimension: Dimension, names: Sequence[str], digits: int) -> str:
    if not math.isfinite(value):
        return str(value)
    units = [(u, UNITS[dimension][u]) for u in names]
    smallest = units[-1]
    # Round before choosing the unit, so that 999.9996 ms is 1 s and not 1000 ms.
    large_enough = (pair for pair in units if abs(float(f"{value / pair[1]:.{digits}g}")) >= 1)
    unit, factor = next(large_enough, smallest)
    if value == 0 and dimension is Dimension.SECONDS:
        unit, factor = "s", 1.0
    number = f"{value / factor:.{digits}g}"
    if "e" in number:
        number = f"{value / factor:.0f}" if abs(value / factor) >= 1 else number
    return f"{number}%" if unit == "%" else f"{number} {unit}"


def format_bytes(byte_count: float, digits: int = 3) -> str:
    """Bytes for people: `16.2 GiB`."""
    return render(byte_count, Dimension.BYTES, digits)


def format_rate(byte_per_s: float, digits: int = 3) -> str:
    """Bandwidth for people: `25 GB/s`."""
    return render(byte_per_s, Dimension.BYTE_RATE, digits)


def format_flops(flops: float, digits: int = 3) -> str:
    """Work for people: `1.24 TFLOP`."""
    return render(flops, Dimension.FLOPS, digits)


def format_flop_rate(flop_per_s: float, digits: int = 3) -> str:
    """Computing rate for people: `312 TFLOP/s`."""
    return render(flop_per_s, Dimension.FLOP_RATE, digits)


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Time for people: `1.24 ms`; from two minutes on `3 min 20 s`, from two hours on `5 h 12 min`."""
    if math.isfinite(seconds) and seconds >= 7200:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    if math.isfinite(seconds) and seconds >= 120:
        minutes, remaining_s = divmod(round(seconds), 60)
        return f"{minutes} min {remaining_s} s"
    return render(seconds, Dimension.SECONDS, digits)


def format_fraction(fraction: float, digits: int = 3) -> str:
    """A fraction for people: `87%`."""
    return render(fraction, Dimension.FRACTION, digits)


def is_visible(change: float, digits: int = 2) -> bool:
    """True if a fraction, such as a relative change, is not zero when it is shown in percent with so many decimals.

    >>> is_visible(0.0001), is_visible(-0.00004), is_visible(0.00004, digits=3)
    (True, False, True)
    """
    return float(f"{abs(change) * 100:.{digits}f}") != 0


def format_number(value: float, digits: int = 4) -> str:
    """A number with some significant digits, or all digits before the point: 0.1235, 93.74, 123,457."""
    return f"{value:,.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def short_count(count: float, digits: int = 3) -> str:
    """A large number as people say it: 124M, 70.6B, 1.01T."""
    rounded = float(f"{count:.{digits}g}")  # before the unit is chosen: 999.9 million is 1B
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if rounded >= size:
            return f"{rounded / size:.{digits}g}{unit}"
    return f"{count:,.0f}"


def plural(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `3 copies`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"
