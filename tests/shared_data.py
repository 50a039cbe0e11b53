"""Where reference data outside the repository lies: `SHARDPLAN_SHARED`, else `../shared` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("SHARDPLAN_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared_path(relative: str) -> Path:
    """Path of a reference file; skips the test, by the file's name, when it is absent."""
    path = ROOT / relative
    if not path.exists():
        pytest.skip(f"reference data absent: {relative}")
    return path
