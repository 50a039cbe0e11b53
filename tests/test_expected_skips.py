"""A run in CI fails for tests that are skipped for a reason not listed, or for lack of a part that it must have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.expected_skips import part_of, unexpected

ROOT = Path(__file__).parents[1]

SKIPPED = {
    "nothing": "def test_it(): pass",
    "gpu": "import pytest\ndef test_it(): pytest.skip('torch sees no GPU')",
    "file": "import pytest\npytest.skip('deepspeed is not installed', allow_module_level=True)",
    "module": "import pytest\ndef test_it(): pytest.importorskip('torch.nonesuch')",
    "other": "import pytest\n@pytest.mark.skip(reason='too slow')\ndef test_it(): pass",
}

CONFTEST = """
from tests import expected_skips
pytest_addoption = expected_skips.add_option
def pytest_configure(config):
    config.pluginmanager.register(expected_skips.SkipCheck(config))
"""


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("torch is not installed", "torch"),
        ("could not import 'torch': No module named 'torch'", "torch"),
        ("could not import 'torch.nonesuch': No module named 'torch.nonesuch'", ""),
        ("megatron-core is not installed", "backends"),
        ("no Chromium on this machine", "browser"),
        ("reference data absent: onnx/gpt2.onnx", "shared"),
        ("too slow", ""),
    ],
)
def test_reasons_belong_to_parts(reason: str, part: str) -> None:
    assert part_of(reason) == part


def test_what_a_run_must_have_is_no_reason() -> None:
    skips = [("a", "torch sees no GPU"), ("b", "torch is not installed"), ("c", "too slow")]
    assert [line[0] for line in unexpected(skips, None)] == ["c"]
    assert [line[0] for line in unexpected(skips, ["gpu"])] == ["b", "c"]
    assert [line[0] for line in unexpected(skips, [])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("test", "options", "in_ci", "status"),
    [
        ("nothing", (), True, 0),
        ("gpu", (), True, 0),
        ("gpu", ("--may-lack", "gpu"), True, 0),
        ("gpu", ("--may-lack", "shared"), False, 1),
        ("file", ("--may-lack", "backends"), True, 5),
        ("file", ("--may-lack", "gpu"), True, 1),
        ("file", ("--may-lack", "gpu", "-n", "1"), True, 1),
        ("module", (), True, 1),
        ("other", (), False, 0),
        ("other", (), True, 1),
        ("other", ("-n", "1"), True, 1),
        ("nothing", ("--may-lack", "nonesuch"), True, 4),
    ],
)
def test_a_run_fails_for_unexpected_skips(
    test: str, options: tuple[str, ...], in_ci: bool, status: int, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(SKIPPED[test])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": str(in_ci).lower()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    run = subprocess.run(
        [*command, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert ("unexpected skips" in run.stdout) == (status == 1)


def test_reasons_in_the_tests_are_listed() -> None:
    """Every reason that is written out in a test belongs to a part; else CI alone would show that it does not."""

    written = {
        reason
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.name != Path(__file__).name
        for call in re.findall(r"(?:importorskip|skipif|pytest\.skip)\(.*", path.read_text(encoding="utf-8"))
        for reason in re.findall(r"""(?:reason=|pytest\.skip\()f?"([^"{]+)""", call)
    }
    assert len(written) > 8
    assert [reason for reason in sorted(written) if not part_of(reason)] == []
