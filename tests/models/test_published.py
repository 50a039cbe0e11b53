"""Bundled models against published parameter counts and against work counted on real exports."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import onnx
import pytest

import models
from planner import load_graph
from planner.operators import graph_specs
from tests.models.graphs import check, forward_flops, parameter_count, weights
from tests.shared_data import shared_path

EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-64": 1_389_327_360,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "gpt-neox-20b": 20_554_567_680,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "bert-48": 669_790_012,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "vit-s16": 22_050_664,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "gnmt-16": 276_735_232,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "dlrm": 24_036_595_969,
}

CHECKED = [
    "gpt2", "gpt2-64", "gpt3-13b", "llama2-7b", "llama3-405b", "llama3.2-1b",
    "bert-base", "bert-48", "t5-small", "t5-11b", "mixtral-8x7b", "qwen3-30b-a3b",
    "gshard-50b", "switch-xxl-128", "switch-c-2048", "vit-s16", "vit-h14", "resnet18",
    "resnet152", "alexnet", "vgg19", "gnmt-8", "gnmt-16", "dlrm", "deepseek-v3-mtp", "gpt-oss-20b", "gemma2-2b",
    "llama4-maverick", "nemotron-3-super", "qwen3-next-80b-a3b", "gpt-neox-20b",
]  # fmt: skip

REFERENCE = {
    "gpt2_124m_metadata": ("gpt2", 1, 1024),
    "gpt2_124m_legacy_dyn": ("gpt2", 2, 128),
    "bert_base_dyn": ("bert-base", 2, 64),
    "resnet50": ("resnet50", 32, None),
    "vgg16": ("vgg16", 32, None),
    "vit_s16": ("vit-s16", 8, None),
    "t5_base": ("t5-base", 4, 512),
    "gnmt_lstm": ("gnmt-16", 64, 50),
    "dlrm": ("dlrm", 2048, None),
    "llama2_7b_opset23": ("llama2-7b", 1, 2048),
    "mixtral_8x7b_batched": ("mixtral-8x7b", 1, 256),
}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_parameters_are_exactly_the_published_ones(name: str) -> None:
    assert parameter_count(models.build(name)) == EXACT[name]


@pytest.mark.parametrize("name", models.names())
def test_parameters_are_near_the_figure_in_the_table(name: str) -> None:
    published = models.info(name).parameters
    # Megatron's table rounds to 0.1 billion (2.8 % of its smallest model), GShard's to its leading digits.
    tolerance = 0.07 if name.startswith("gshard") else 0.03
    assert parameter_count(models.build(name)) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("case", sorted(REFERENCE))
def test_work_and_parameters_equal_the_real_export(case: str) -> None:
    reference: dict[str, Any] = json.loads(shared_path("onnx/reference.json").read_text())[case]
    name, batch, seq = REFERENCE[case]
    model = models.build(name, batch=batch, seq=seq)
    assert forward_flops(model) == pytest.approx(reference["fwd_flops"], rel=1e-3)
    assert parameter_count(model) == reference["params"]


SIZES = {"llama3-405b": "llama3.1-405b", "gpt3-175b": None}
"""Bundled models by another name in the table of sizes; None where its vocabulary is another."""


def _active(model: onnx.ModelProto, share: float) -> float:
    """Weights that one token uses where it is sent to that share of the experts."""
    return sum(math.prod(t.dims) * (share if ".experts." in t.name else 1.0) for t in weights(model))


def test_totals_and_active_parameters_are_those_of_the_table_of_sizes() -> None:
    table = json.loads(shared_path("reference/models.json").read_text())["models"]
    found = {name: table[key] for name in models.names() if (key := SIZES.get(name, name)) in table}
    assert len(found) >= 22
    for name, sizes in found.items():
        model, info = models.build(name, seq=512), models.info(name)
        share = sizes["top_k"] / sizes["experts"] if "experts" in sizes else 1.0
        assert parameter_count(model) == pytest.approx(sizes["computed_total_params"], rel=2.5e-3), name
        assert parameter_count(model) == pytest.approx(info.parameters, rel=2.5e-3), name
        assert _active(model, share) == pytest.approx(sizes["computed_active_params"], rel=2.5e-3), name
        assert (info.active or info.parameters) == pytest.approx(sizes["computed_active_params"], rel=2.5e-3), name


def _attention(layers: int, heads: int, keys: int, widths: int) -> int:
    """Work a token of both products of attention, over the whole square."""
    return layers * 2 * heads * keys * widths


def _delta(layers: int, heads: int, key: int, value: int, chunk: int) -> int:
    """Work a token of a gated delta rule in chunks: products within a chunk, and four with the state."""
    return layers * heads * 2 * (chunk * (2 * key + value + key + value) + 3 * key * value)


def _scan(layers: int, heads: int, width: int, groups: int, state: int, chunk: int) -> int:
    """Work a token of Mamba-2 in chunks: directions with each other, with values, states made and read."""
    return layers * 2 * (groups * state * chunk + heads * width * chunk + 2 * heads * width * state)


@pytest.mark.parametrize(
    ("name", "embedding", "attention"),
    [
        ("llama3-8b", 128256 * 4096, _attention(32, 32, 4096, 2 * 128)),
        ("gemma3-12b", 0, _attention(8, 16, 4096, 2 * 256) + _attention(40, 16, 1024, 2 * 256)),
        ("gemma4-26b", 0, _attention(5, 16, 4096, 2 * 512) + _attention(25, 16, 1024, 2 * 256)),
        ("mixtral-8x7b", 32000 * 4096, _attention(32, 32, 4096, 2 * 128)),
        ("qwen3-235b-a22b", 151936 * 4096, _attention(94, 64, 4096, 2 * 128)),
        ("gpt-oss-20b", 201088 * 2880, _attention(12, 64, 4096, 2 * 64) + _attention(12, 64, 128, 2 * 64)),
        ("llama4-scout", 202048 * 5120, _attention(48, 40, 4096, 2 * 128)),
        ("deepseek-v3", 129280 * 7168, _attention(61, 128, 4096, 192 + 128)),
        ("kimi-k2", 163840 * 7168, _attention(61, 64, 3072, 192 + 128)),
        ("nemotron-3-nano", 131072 * 2688, _attention(6, 32, 4096, 2 * 128) + _scan(23, 64, 64, 8, 128, 128)),
        ("qwen3-next-80b-a3b", 151936 * 2048, _attention(12, 16, 4096, 2 * 256) + _delta(36, 32, 128, 128, 64)),
    ],
)
def test_work_a_token_is_two_operations_an_active_weight_and_attention(
    name: str, embedding: int, attention: int
) -> None:
    info, seq = models.info(name), 3072 if name == "kimi-k2" else 4096  # a multiple of experts over experts a token
    graph = load_graph(name, dims={"seq": seq})
    work = sum(spec.matrix_flops for spec in graph_specs(graph)) / seq
    assert work == pytest.approx(2 * ((info.active or info.parameters) - embedding) + attention, rel=1e-3)


def test_the_largest_mixtures_are_built_and_read_in_seconds() -> None:
    begun = time.process_time()
    load_graph("deepseek-v3")
    assert time.process_time() - begun < 10


def test_work_of_gpt2_by_hand() -> None:
    # 12 blocks of 24 s h^2 + 4 s^2 h, and a head of 2 s h v.
    blocks = 12 * (24 * 1024 * 768**2 + 4 * 1024**2 * 768)
    assert blocks + 2 * 1024 * 768 * 50257 == 291_648_307_200
    assert forward_flops(models.build("gpt2")) == 291_648_307_200


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gshard-600b", 618_475_290_624),
        ("gshard-200b", 206_158_430_208),
        ("gshard-150b", 154_618_822_656),
        ("gshard-50b", 51_539_607_552),
        ("gshard-37b", 38_654_705_664),
        ("gshard-12.5b", 12_884_901_888),
    ],
)
def test_expert_weights_of_gshard(name: str, expected: int) -> None:
    experts = [math.prod(t.dims) for t in weights(models.build(name)) if ".experts." in t.name]
    assert sum(experts) == expected


@pytest.mark.parametrize("name", CHECKED)
def test_the_file_is_valid_and_its_shapes_are_those_inferred(name: str) -> None:
    info = models.info(name)
    check(models.build(name, batch=2, seq=None if info.seq is None else min(64, info.seq)))


def test_a_trillion_parameters_are_a_small_file() -> None:
    assert models.build("megatron-1t").ByteSize() < 2_000_000
