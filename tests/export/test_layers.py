"""Layers of several kinds in Megatron's arguments, held against the configurations that NVIDIA publishes."""

from __future__ import annotations

import pytest

from planner import export
from planner.errors import PlanError
from planner.plans import Plan
from tests.export.plans import plan
from tests.export.test_reading import again

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""Layers of Nemotron 3 Nano (`examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh`)."""
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
"""Those of Nemotron 3 Super, in the folder of the same name."""


def lines(found: Plan) -> list[str]:
    return str(export.export(found, "megatron").files["arguments.txt"]).splitlines()


def said(found: Plan, argument: str) -> list[str]:
    return [line.removeprefix(f"{argument} ").strip('"') for line in lines(found) if line.split()[0] == argument]


def test_layers_of_a_hybrid_stand_in_their_pattern_and_not_in_a_layout() -> None:
    alone = plan("nemotron-3-nano", expert=8, zero=1)
    assert said(alone, "--hybrid-layer-pattern") == [NANO]
    assert "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec" in lines(alone)
    assert not said(alone, "--num-layers") + said(alone, "--moe-layer-freq")
    assert "PROGRAM:-pretrain_hybrid.py" in str(export.export(alone, "megatron").files["launch.sh"])


def test_stages_of_a_hybrid_are_cut_in_its_pattern_and_read_back() -> None:
    found = plan("nemotron-3-nano", expert=2, pipeline=2, zero=1, layout="Et*9|t*12|t*17|t*14L")
    cut = "|".join((NANO[:9], NANO[9:21], NANO[21:38], NANO[38:]))
    assert said(found, "--hybrid-layer-pattern") == [cut]
    assert not said(found, "--pipeline-model-parallel-layout")
    read = again(found, "megatron", "nemotron-3-nano")
    assert read.configuration == found.configuration
    assert read.predictions.reached_s == pytest.approx(found.predictions.reached_s, rel=1e-3)


def test_predictors_of_a_hybrid_follow_its_pattern_in_the_last_stage() -> None:
    found = plan("nemotron-3-super-mtp", expert=2, pipeline=4, zero=1)
    pattern = said(found, "--hybrid-layer-pattern")[0]
    assert pattern.replace("|", "") == f"{SUPER}/*E/*E"
    assert pattern.count("|") == 3
    assert again(found, "megatron", "nemotron-3-super-mtp").configuration == found.configuration
    apart = plan("nemotron-3-super-mtp", expert=2, pipeline=4, zero=1, layout="Et*30|t*30|t*28m|mL")
    with pytest.raises(PlanError, match="predictors of further tokens in 2 stages, or before stage 3"):
        export.export(apart, "megatron")


@pytest.mark.parametrize(
    ("model", "frequency", "experts"),
    [
        ("deepseek-v2-lite", "([0]*1+[1]*26)*1", "64"),  # the first layer is dense (appendix B)
        ("deepseek-v3-mtp", "([0]*3+[1]*58)*1", "256"),
        ("llama4-maverick", "([0]*1+[1]*1)*24", "128"),  # every other layer
        ("gshard-12.5b", "([0]*1+[1]*1)*6", "128"),
        ("qwen3-30b-a3b", None, "128"),
        ("llama3.2-1b", None, None),
    ],
)
def test_layers_with_experts_are_written(model: str, frequency: str | None, experts: str | None) -> None:
    found = plan(model, zero=1)
    assert said(found, "--moe-layer-freq") == ([frequency] if frequency else [])
    assert said(found, "--num-experts") == ([experts] if experts else [])


def test_layers_recomputed_by_several_are_read_with_a_note() -> None:
    text = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    assert export.read_job(f"{text} 1", "megatron").ignored == ()
    assert export.read_job(f"{text} 4", "megatron").ignored[0].startswith("--recompute-num-layers 4 of uniform")


@pytest.mark.parametrize(
    ("degrees", "need"),
    [
        (
            {"pipeline": 2, "chunks": 2, "schedule": "interleaved:group=12", "global_batch": 32},
            "groups of 12 micro-batches, more than the 8 of a replica",
        ),
        ({"pipeline": 8, "precision": "fp8-cs:first=5"}, "5 wider layers at an end, more than the 4 a worker has"),
    ],
)
def test_what_megatron_refuses_at_its_start_is_refused(degrees: dict[str, object], need: str) -> None:
    with pytest.raises(PlanError, match=need):
        export.export(plan("llama3-8b", zero=1, **degrees), "megatron")
