"""Quantities with units to SI values and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.units import (
    Dimension,
    format_bytes,
    format_flop_rate,
    format_flops,
    format_fraction,
    format_number,
    format_rate,
    format_seconds,
    parse,
    render,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("512 B", Dimension.BYTES, 512.0),
        ("80 GB", Dimension.BYTES, 80e9),
        ("1113 MiB", Dimension.BYTES, 1_167_065_088.0),
        ("2TiB", Dimension.BYTES, 2_199_023_255_552.0),
        ("1_000 KB", Dimension.BYTES, 1e6),
        ("25 Gbit/s", Dimension.BYTE_RATE, 3.125e9),
        ("100 Mbit/s", Dimension.BYTE_RATE, 12.5e6),
        ("2.039 TB/s", Dimension.BYTE_RATE, 2.039e12),
        ("1 GiB/s", Dimension.BYTE_RATE, 1_073_741_824.0),
        ("312 TFLOP/s", Dimension.FLOP_RATE, 312e12),
        ("1.979 PFLOP/s", Dimension.FLOP_RATE, 1.979e15),
        ("16 GFLOP", Dimension.FLOPS, 16e9),
        ("5 us", Dimension.SECONDS, 5e-6),
        ("77.1us", Dimension.SECONDS, 77.1e-6),
        ("2 ms", Dimension.SECONDS, 2e-3),
        ("1.5e3 ns", Dimension.SECONDS, 1.5e-6),
        ("0.87", Dimension.FRACTION, 0.87),
        (0.87, Dimension.FRACTION, 0.87),
        ("87%", Dimension.FRACTION, 0.87),
        ("32.77 $/h", Dimension.PRICE, 32.77),
    ],
)
def test_parse(text: object, dimension: Dimension, value: float) -> None:
    assert parse(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "message", "hint"),
    [
        (
            "400 Gb/s",
            Dimension.BYTE_RATE,
            "'Gb/s' is not a unit of a bandwidth",
            "write Gbit/s for bits or GB/s for bytes",
        ),
        (
            "100 Gbps",
            Dimension.BYTE_RATE,
            "'Gbps' is not a unit of a bandwidth",
            "write Gbit/s for bits or GB/s for bytes",
        ),
        ("400 Gbit", Dimension.BYTE_RATE, "'Gbit' is not a unit of a bandwidth", "write Gbit/s"),
        ("80 Gb", Dimension.BYTES, "'Gb' is not a unit of an amount of memory", "'Gb' reads as bits: write GB or GiB"),
        ("312 TFLOPS", Dimension.FLOP_RATE, "'TFLOPS' is not a unit of a computing rate", "write TFLOP/s"),
        ("5 GB", Dimension.SECONDS, "'GB' is not a unit of a time", "write one of s, ms, us or ns"),
        (
            100,
            Dimension.BYTE_RATE,
            "100 has no unit: expected a bandwidth",
            "write 100 with one of GB/s, GiB/s, MB/s, TB/s, Gbit/s or Mbit/s",
        ),
        ("fast", Dimension.SECONDS, "'fast' is not a time", "write a number and one of s, ms, us or ns"),
        (True, Dimension.BYTES, "True is not an amount of memory", "write a number and one of B, KB, MB, GB"),
        ("1e400 GB", Dimension.BYTES, "1e400 GB is too large", "write a finite quantity"),
    ],
)
def test_refused_with_a_hint(text: object, dimension: Dimension, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, dimension)
    assert caught.value.problem.message == message
    assert caught.value.problem.hint.startswith(hint)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(list(Dimension)), st.integers(1, 10**6), st.integers(-3, 6))
def test_rendered_values_read_back(dimension: Dimension, digits: int, exponent: int) -> None:
    value = float(f"{digits}e{exponent}")
    assert parse(render(value, dimension), dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(16_160_000_000), "15.1 GiB"),
        (format_bytes(2**30 - 400), "1 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(123_456), "121 KiB"),
        (format_rate(3.125e9, 4), "3.125 GB/s"),
        (format_flops(1.24e12), "1.24 TFLOP"),
        (format_flop_rate(312e12), "312 TFLOP/s"),
        (format_seconds(0.00124), "1.24 ms"),
        (format_seconds(0), "0 s"),
        (format_seconds(45.25), "45.2 s"),
        (format_seconds(200), "3 min 20 s"),
        (format_seconds(18_720), "5 h 12 min"),
        (format_seconds(float("inf")), "inf"),
        (format_fraction(0.8689), "86.9%"),
        (format_number(23.4285), "23.43"),
        (format_number(12_345.6), "12,346"),
        (format_number(999.7, 3), "1,000"),
        (format_number(float("inf")), "inf"),
    ],
)
def test_text_for_people(text: str, expected: str) -> None:
    assert text == expected
