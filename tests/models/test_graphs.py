"""Names, module paths, ties and shapes that the rest of the program relies on."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

import models
from models._moe import MoE
from tests.models.graphs import forward_flops, parameter_count, shapes_of, weights

SCOPES = "pkg.torch.onnx.name_scopes"
ONE_OF_EACH = (
    "gpt2",
    "llama2-7b",
    "bert-base",
    "t5-small",
    "mixtral-8x7b",
    "vit-s16",
    "resnet18",
    "vgg11",
    "gnmt-8",
    "dlrm",
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_node_has_a_name_a_module_path_and_known_shapes(name: str) -> None:
    graph = models.build(name).graph
    described = shapes_of(models.build(name))
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    for node in graph.node:
        (scopes,) = [ast.literal_eval(p.value) for p in node.metadata_props if p.key == SCOPES]
        assert scopes[0] == ""
        assert all(inner.startswith(outer) for outer, inner in itertools.pairwise(scopes[:-1]))
        assert all(output in described for output in node.output)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_weights_have_no_data_and_constants_have(name: str) -> None:
    model = models.build(name)
    for tensor in model.graph.initializer:
        assert (tensor.data_location == TensorProto.EXTERNAL) != bool(tensor.raw_data)
    assert model.ByteSize() < 1_500_000


@pytest.mark.parametrize(
    ("name", "weight", "shape"),
    [
        ("llama3-70b", "model.layers.7.mlp.up_proj.weight", (28672, 8192)),
        ("llama3-70b", "model.layers.79.self_attn.k_proj.weight", (1024, 8192)),
        ("gpt2", "transformer.h.11.attn.c_attn.weight", (768, 2304)),
        ("bert-large", "bert.encoder.layer.23.attention.self.query.bias", (1024,)),
        ("t5-base", "decoder.block.3.layer.1.EncDecAttention.k.weight", (768, 768)),
        ("mixtral-8x7b", "model.layers.0.mlp.experts.gate_up_proj", (8, 28672, 4096)),
        ("vit-b16", "vit.layers.4.attention.q_proj.weight", (768, 768)),
        ("resnet50", "layer3.0.downsample.0.weight", (1024, 512, 1, 1)),
        ("vgg16", "classifier.6.weight", (1000, 4096)),
        ("gnmt-16", "decoder.rnn_layers.3.weight_ih", (1, 4096, 2048)),
        ("dlrm", "emb_l.0.weight", (39884406, 128)),
    ],
)
def test_weights_have_the_names_and_shapes_people_know(name: str, weight: str, shape: tuple[int, ...]) -> None:
    found = {t.name: tuple(t.dims) for t in models.build(name).graph.initializer}
    assert found[weight] == shape


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("bert-base", "bert.embeddings.word_embeddings.weight"),
        ("t5-small", "shared.weight"),
        ("llama3.2-1b", "model.embed_tokens.weight"),
    ],
)
def test_a_tied_head_reads_the_embedding_through_a_transpose(name: str, weight: str) -> None:
    readers = [node.op_type for node in models.build(name).graph.node if weight in node.input]
    assert set(readers) == {"Gather", "Transpose"}
    assert readers.count("Transpose") == 1


@pytest.mark.parametrize("name", ["llama2-7b", "bert-48", "gpt2-64"])
def test_an_untied_head_has_a_weight_of_its_own(name: str) -> None:
    graph = models.build(name).graph
    info = {t.name: tuple(t.dims) for t in graph.initializer}
    heads = [n for n in info if n.endswith(("lm_head.weight", "output_layer.weight"))]
    assert len(heads) == 1


def test_masks_and_rotary_tables_are_made_once() -> None:
    gpt = models.build("gpt2").graph
    assert sum(node.op_type == "LessOrEqual" for node in gpt.node) == 1
    llama = models.build("llama2-7b").graph
    assert sum(node.op_type in ("Cos", "Sin") for node in llama.node) == 2


def test_graphs_end_at_logits() -> None:
    for name in ONE_OF_EACH:
        graph = models.build(name).graph
        last = [node for node in graph.node if graph.output[0].name in node.output]
        assert last[0].op_type in ("MatMul", "Gemm", "Add")


def test_batch_norm_stays_in_training_mode() -> None:
    norms = [node for node in models.build("resnet50").graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == 53
    assert all(len(node.output) == 3 for node in norms)
    assert all(a.i == 1 for node in norms for a in node.attribute if a.name == "training_mode")


@settings(deadline=None, max_examples=15)
@given(batch=st.integers(1, 64), name=st.sampled_from(ONE_OF_EACH))
def test_work_grows_with_the_batch(batch: int, name: str) -> None:
    assert forward_flops(models.build(name, batch=batch)) == batch * forward_flops(models.build(name))


@settings(deadline=None, max_examples=50)
@given(experts=st.integers(1, 64), top_k=st.integers(1, 8), tokens=st.integers(1, 4096), factor=st.floats(0.5, 2.0))
def test_experts_have_places_for_the_routed_tokens_and_few_more(
    experts: int, top_k: int, tokens: int, factor: float
) -> None:
    places = experts * MoE(experts, top_k, factor).capacity(tokens)
    assert top_k * tokens * factor <= places * (1 + 1e-9)
    assert places < top_k * tokens * factor + experts + 1


def test_expert_work_is_that_of_the_routed_tokens() -> None:
    # 1024 tokens, 2 experts each, 2 products of 1024 x 8192 an expert pass, in 6 blocks.
    model = models.build("gshard-12.5b", seq=1024)
    shapes = shapes_of(model)
    work = sum(
        2 * shapes[node.input[0]][-1] * _size(shapes[node.output[0]])
        for node in model.graph.node
        if node.op_type == "MatMul" and len(shapes[node.input[1]]) == 3 and shapes[node.input[1]][0] == 128
    )
    assert work == 6 * (1024 * 2) * 2 * (2 * 1024 * 8192)


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_the_same_model_is_the_same_bytes() -> None:
    first, second = (models.build("mixtral-8x7b").SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_one_predictor_of_several_tokens_has_its_weights_once() -> None:
    plain, one = (models.build(name, seq=64) for name in ("nemotron-3-super", "nemotron-3-super-mtp"))
    names = [tensor.name for tensor in weights(one) if "mtp" in tensor.name]
    assert {name.split(".")[2] for name in names} == {"0"}
    # Attention 2 (4096 + 256) 4096, router 512 (4096 + 1), 512 experts 2 (2688 1024), rows 2 (4096 1024), the shared
    # expert 2 (4096 5376), eh_proj 2 (4096 4096), five norms.
    experts = 512 * 4097 + 512 * 2 * 2688 * 1024 + 2 * 4096 * 1024 + 2 * 4096 * 5376
    added = 2 * 4096 * (4096 + 256) + experts + 2 * 4096 * 4096 + 5 * 4096
    assert parameter_count(one) - parameter_count(plain) == added
    assert [output.name for output in one.graph.output] == ["lm_head.matmul", "lm_head.matmul_1", "lm_head.matmul_2"]


def test_names_are_unique_and_every_family_has_models() -> None:
    names = models.names()
    assert len(set(names)) == len(names)
    assert {models.info(name).family for name in names} == set(models.families())
    assert all(models.info(name).source for name in names)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lama3-70b", {}, "did you mean 'llama3-70b'"),
        ("gpt2", {"seq": 1025}, "more than the 1024 positions"),
        ("gpt2", {"seq": 0}, "not positive"),
        ("gpt2", {"batch": 0}, "not positive"),
        ("resnet50", {"seq": 8}, "reads no sequence"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_remedy(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(models.ModelBuildError, match=message):
        models.build(name, **options)  # type: ignore[arg-type]


def test_nothing_of_the_planner_and_nothing_heavy_is_imported() -> None:
    code = "import sys, models; models.names(); print(sorted({'planner', 'onnx', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_root(), check=True)
    assert done.stdout.strip() == "[]"


def _root() -> Path:
    return Path(__file__).resolve().parents[2]
