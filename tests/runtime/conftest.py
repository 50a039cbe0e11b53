"""Tests of the runtime compute on the processor, whatever the machine has, but for those of GPUs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_the_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if request.module.__name__ != "tests.runtime.test_gpu":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
