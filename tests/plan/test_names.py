"""`planner.plan` is a function for users and a package for imports."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import planner.plan.files as f; f.dumps",
        "from planner.plan import Plan",
        "planner.read_plan",
        "planner.load_graph",
        "from planner import api",
        "from planner import plan; plan.dumps",
    ],
)
def test_both_are_there_whatever_was_imported_before(before: str) -> None:
    code = (
        f"import planner; {before}\n"
        "import planner.api, planner.plan.files, planner.plan.orders as orders\n"
        "planner.api.plan = lambda graph, *, job: (graph, job)\n"
        "assert planner.plan(1, job=2) == (1, 2)\n"
        "assert planner.plan.files.dumps and orders.decode"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
