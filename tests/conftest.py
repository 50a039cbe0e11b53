"""How the tests are run: garbage is collected seldom, and processes that tests start find the package compiled."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from cli.main import GARBAGE_THRESHOLDS

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the tests do, and run it as seldom as the command line does.

    It is a sixth of the time of planning otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
