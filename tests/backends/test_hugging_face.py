"""Models of Hugging Face as torch's exporters write them: parameters counted, gradients of plans against the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402

WORDS = 300
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 64}


def tokens() -> Any:
    return torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(1))


def images() -> Any:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def bloom() -> Any:  # a tied head stored turned, biases by head repeated for each sample, equal norms stored once
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=WORDS, hidden_size=64, n_layer=2, n_head=4))


def gemma2() -> Any:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, head_dim=16))


def albert() -> Any:  # one layer, applied twice
    sizes = {**SIZES, "vocab_size": WORDS, "embedding_size": 32}
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**sizes))


def mpnet() -> Any:
    return hf.MPNetForMaskedLM(hf.MPNetConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=64))


def mamba2() -> Any:
    sizes = {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
    return hf.Mamba2ForCausalLM(hf.Mamba2Config(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, **sizes))


def swin() -> Any:  # rolled windows
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return hf.SwinForImageClassification(hf.SwinConfig(image_size=32, patch_size=2, **sizes))


MODELS: tuple[tuple[str, Callable[[], Any], Callable[[], Any], int], ...] = (
    ("dynamo", bloom, tokens, 0), ("torchscript", bloom, tokens, 0), ("dynamo", gemma2, tokens, 0),
    ("dynamo", albert, tokens, 0), ("torchscript", mpnet, tokens, 0),
    ("dynamo", mamba2, tokens, 0),
    ("torchscript", swin, images, 2 * 49 * (2 + 4)),  # tables of 7 x 7 distances by head are looked up once
)  # fmt: skip
"""Exporter, model, inputs, and parameters that the file no longer holds."""


class Logits(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A model with its logits as only result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x).logits


@pytest.mark.parametrize(
    ("exporter", "make", "inputs", "lost"), MODELS, ids=[f"{make.__name__}, {how}" for how, make, _, _ in MODELS]
)
def test_plans_of_an_export_have_the_models_gradients(
    exporter: str, make: Callable[[], Any], inputs: Callable[[], Any], lost: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, file = make().eval(), tmp_path / "model.onnx"
    model.config.use_cache = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        how: dict[str, Any] = {"verbose": False} if exporter == "dynamo" else {"opset_version": 17}
        torch.onnx.export(Logits(model), (inputs(),), file, dynamo=exporter == "dynamo", **how)
    graph = planner.load_graph(file)
    assert graph.parameter_count() + lost == sum(weight.numel() for weight in model.parameters())
    for limits in ({"pipeline_stages": (2,), "tensor_parallel": (1,)}, {"tensor_parallel": (2,)}):
        job = planner.Job(8, precision="fp32", micro_batches=(4,), data_parallel=(1,), backends=("any",), **limits)
        plan = planner.plan(graph, planner.load_cluster("dgx-h100", devices=2), job)
        check = runtime.run(plan, file, check=True).check
        assert check is not None
        assert not check.wrong, check
