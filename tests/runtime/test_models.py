"""Bundled models run in torch as the ONNX reference runs them."""

from __future__ import annotations

import numpy as np
import pytest

import models
from tests.models import test_values as values

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner.runtime import run_graph  # noqa: E402


@pytest.mark.parametrize("case", sorted(values.TINY))
def test_models_give_the_logits_of_the_reference(case: str) -> None:
    size, feeds, _ = values.TINY[case]
    model = models.build_custom(size, batch=values.BATCH, seq=values.SEQ, seed=1)
    expected = values.run(values.with_scans_written_out(model), feeds)
    found = run_graph(model, {name: torch.from_numpy(x) for name, x in feeds.items()}, torch.float32)
    for value, wanted in zip(model.graph.output, expected, strict=True):
        np.testing.assert_allclose(found[value.name].numpy(), wanted, rtol=1e-3, atol=2e-3)
