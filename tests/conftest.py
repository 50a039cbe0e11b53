"""How the tests are run: garbage is collected seldom, processes that tests start find the package compiled, and tests
that are skipped for no expected reason fail the run in CI."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from cli.main import GARBAGE_THRESHOLDS
from tests import expected_skips

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    expected_skips.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(expected_skips.SkipCheck(config), "skip check")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests begin first: at the end of the order one process would run them alone."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_readme.py"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the tests do, and run it as seldom as the command line does.

    It is a sixth of the time of planning otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
