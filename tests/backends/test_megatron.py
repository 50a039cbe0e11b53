"""Megatron's own parser reads the pipeline layouts that are exported to it as the stages of the plan."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)
pytest.importorskip("torch", reason="torch is not installed")

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from planner import export
from tests.export.plans import plan

PLANS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama3.2-1b", 16, {"pipeline": 2}),
    ("llama3.2-1b", 16, {"pipeline": 4, "tensor": 2}),
    ("llama3-8b", 32, {"pipeline": 4, "chunks": 2, "schedule": "interleaved"}),
    ("llama3-8b", 32, {"pipeline": 2, "chunks": 8, "schedule": "interleaved"}),
    ("llama3-8b", 32, {"pipeline": 4, "layout": "Et*7|t*9|t*9|t*7L"}),
    ("llama3-8b", 32, {"pipeline": 4, "chunks": 2, "layout": "E|t*5|t*5|t*5|t*5|t*6|t*6|L"}),
    ("gpt2", 12, {"pipeline": 4}),
    ("gpt2-xl", 48, {"pipeline": 8}),
]


@pytest.mark.parametrize(("model", "layers", "degrees"), PLANS, ids=lambda value: str(value).replace("'", ""))
def test_megatron_reads_the_stages_of_the_plan(model: str, layers: int, degrees: dict[str, Any]) -> None:
    found = plan(model, **degrees)
    arguments = export.export(found, "megatron").files["arguments.txt"].splitlines()
    said = next(line for line in arguments if line.startswith("--pipeline-model-parallel-layout"))
    text, workers = said.split('"')[1], degrees["pipeline"]
    parsed = PipelineParallelLayerLayout(text, workers)
    parsed.validate_layer_layout(layers, 0)
    assert parsed.virtual_pipeline_model_parallel_size == len(found.stages) // workers
    before = 0
    for stage in found.stages:
        worker, chunk = stage.index % workers, stage.index // workers
        items = parsed.layout[worker][chunk]
        own = [found.block_table[at] for at in range(*stage.blocks)]
        named = {name.split("[")[0] for name in (block.name for block in own) if _is_layer(name)}
        assert items.count(LayerType.decoder) == len(named)
        assert (LayerType.embedding in items, LayerType.loss in items) == (
            stage.index == 0, stage.index == len(found.stages) - 1,
        )  # fmt: skip
        numbers = [before + k for k in range(len(named))]
        assert [int(name.rpartition(".")[2]) for name in sorted(named, key=_number)] == numbers
        before += len(named)
    assert before == layers


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _is_layer(name: str) -> bool:
    return name.split("[")[0].rpartition(".")[2].isdecimal()
