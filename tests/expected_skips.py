"""Skips that are expected, by reason, and a pytest plugin that fails a run in CI for any other.

`--may-lack browser,gpu` says which parts a run may lack: a test that is skipped for another part fails the run, and so
does, in CI (CI=true), one that is skipped for a reason not listed here. Elsewhere such skips are told at the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

EXPECTED_SKIPS: dict[str, tuple[str, ...]] = {
    "torch": ("torch is not installed", "onnxscript is not installed", "could not import '(torch|onnxscript)'.*"),
    "onnxruntime": ("onnxruntime is not installed", "could not import 'onnxruntime'.*"),
    "sweep": ("could not import 'distributed'.*",),
    "onnx tests": ("the onnx package has no (light models|test cases) here.*",),
    "linux": ("no device that is always full", "limits of time and memory are those of Linux"),
    "network": ("the machine has the loopback alone",),
    "backends": ("(jax|transformers|deepspeed|megatron-core) is not installed",),
    "browser": ("playwright is not installed", "no Chromium on this machine", "vl-convert-python is not installed"),
    "checkouts": ("(MEGATRON_LM|TORCHTITAN) names no checkout",),
    "gpu": ("torch sees no GPU",),
    "shared": ("reference data absent: .*",),
}
"""Parts that a machine may lack, and the reasons for which tests are then skipped, as patterns of the whole reason."""


def part_of(reason: str) -> str:
    """The part whose lack is a reason to skip a test; "" where the reason is not expected."""
    expected = (part for part, reasons in EXPECTED_SKIPS.items() if any(re.fullmatch(each, reason) for each in reasons))
    return next(expected, "")


def unexpected(skips: Iterable[tuple[str, str]], may_lack: Iterable[str] | None) -> Iterator[str]:
    """Skips that are not expected, a line each.

    Args:
        skips: name and reason of each skipped test or file.
        may_lack: parts that may be missing; None for all of `EXPECTED_SKIPS`.
    """
    allowed = set(EXPECTED_SKIPS if may_lack is None else may_lack)
    for name, reason in skips:
        part = part_of(reason)
        if part not in allowed:
            yield f"{name}: {reason} ({f'{part} is needed here' if part else 'not in tests/expected_skips.py'})"


class SkipCheck:
    """Collects what is skipped; with several processes the one that prints the result does."""

    def __init__(self, config: pytest.Config) -> None:
        given: str | None = config.getoption("--may-lack")
        self._may_lack = None if given is None else [part for part in given.split(",") if part]
        unknown = sorted({*(self._may_lack or ())} - {*EXPECTED_SKIPS})
        if unknown:
            raise pytest.UsageError(f"--may-lack {', '.join(unknown)}: the parts are {', '.join(EXPECTED_SKIPS)}")
        self._fails = given is not None or os.environ.get("CI") == "true"
        self._skips: list[tuple[str, str]] = []

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        clean = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._fails and clean and any(unexpected(self._skips, self._may_lack)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = list(unexpected(self._skips, self._may_lack))
        if lines:
            terminalreporter.section("unexpected skips" if self._fails else "skips that would fail in CI")
            terminalreporter.write("".join(f"{line}\n" for line in lines))


def add_option(parser: pytest.Parser) -> None:
    """Add `--may-lack` to the command line of pytest."""
    others = ", ".join(EXPECTED_SKIPS)
    parser.addoption("--may-lack", metavar="PARTS", help=f"fail where a test is skipped for another part of {others}")
