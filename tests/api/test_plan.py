"""The front door: one function from model and cluster to plan."""

from __future__ import annotations

import dataclasses
import doctest

import pytest

import planner
import planner.api
from planner.graph import DType, Graph, Node, Parameter, Tensor, TensorKind
from tests.shared_data import shared_path

DIMS = {"gpt2_124m_legacy_dyn": {"batch": 2, "seq": 128}, "bert_base_dyn": {"batch": 2, "seq": 64}}
TOO_LARGE_FOR_ADAM = {"mixtral_8x7b_batched"}
MODELS = (
    "bert_base_dyn", "dlrm", "gnmt_lstm", "gpt2_124m_legacy_dyn", "gpt2_124m_loss_train", "gpt2_124m_metadata",
    "llama2_7b_opset23", "mixtral_8x7b_batched", "resnet50", "resnet50_legacy", "resnet50_legacy_initinputs",
    "t5_base", "vgg16", "vit_s16",
)  # fmt: skip


def test_the_docstring_runs() -> None:
    result = doctest.testmod(planner.api)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", MODELS)
def test_real_exports_plan_for_eight_devices_and_check(name: str) -> None:
    graph = planner.load_graph(shared_path(f"onnx/{name}.onnx"), dims=DIMS.get(name))
    cluster = planner.load_cluster("dgx-a100")
    memory = {"precision": "bf16-pure", "optimizer": "sgd"} if name in TOO_LARGE_FOR_ADAM else {}
    plan = planner.plan(graph, cluster, planner.Job(global_batch=512, **memory))
    assert plan.coverage.by_fallback == 0
    sized = planner.rebatch(graph, plan.micro_batches.size)
    assert planner.plans.validate(plan, sized, cluster) == []
    assert plan.predictions.bound_s <= plan.predictions.iteration_s


@pytest.mark.parametrize("name", sorted(TOO_LARGE_FOR_ADAM))
def test_what_cannot_fit_says_which_blocks_and_what_would(name: str) -> None:
    graph = planner.load_graph(shared_path(f"onnx/{name}.onnx"))
    with pytest.raises(planner.InfeasibleError, match=r"needs .* GiB .*this would fit: "):
        planner.plan(graph, planner.load_cluster("dgx-a100"), planner.Job(global_batch=512))


def test_dropout_masks_can_be_assumed() -> None:
    graph, cluster = planner.load_graph("gpt2"), planner.load_cluster("dgx-a100")
    kept = [
        planner.Pricer(graph, cluster, planner.Job(global_batch=8, assume_dropout=assumed)).costs(1).saved_bytes
        for assumed in (False, True)
    ]
    # A byte an element of the embeddings' sum and of each of the two branches of twelve layers: 1024 tokens of 768.
    assert kept[1][0, -1] - kept[0][0, -1] == 1024 * 768 * (1 + 2 * 12)
    plan = planner.plan(graph, cluster, planner.Job(global_batch=8, assume_dropout=True))
    assert plan.options.assume_dropout
    with pytest.raises(planner.JobError, match="assume"):
        planner.plan(graph, cluster, planner.Job(global_batch=8, assume_dropout=True, dropout=False))


def fixed_at_four() -> Graph:
    """A model exported at a batch of 4 whose reshape mixes samples."""
    shapes = {"x": (4, 6), "w": (6, 6), "h": (4, 6), "s": (2,), "y": (3, 8)}
    kinds = {"x": TensorKind.INPUT, "w": TensorKind.PARAMETER, "s": TensorKind.CONSTANT}
    return Graph(
        name="mixing",
        fingerprint="f" * 64,
        nodes=(Node("h", "MatMul", ("x", "w"), ("h",)), Node("y", "Reshape", ("h", "s"), ("y",), name="blocks/mix")),
        tensors={n: Tensor(n, s, DType.FLOAT32, kinds.get(n, TensorKind.ACTIVATION)) for n, s in shapes.items()},
        inputs=("x",),
        outputs=("y",),
        parameters=(Parameter("w", "w", (6, 6), DType.FLOAT32),),
        sources={"w": ("w",)},
        constants={"s": (3, 8)},
        batch=4,
    )


def test_a_batch_that_cannot_be_changed_is_planned_as_exported() -> None:
    graph, cluster = fixed_at_four(), planner.load_cluster("dgx-a100")
    plan = planner.plan(graph, cluster, planner.Job(global_batch=32))
    assert plan.micro_batches.size == 4
    (note,) = [note for note in plan.notes if note.code == "fixed-batch"]
    assert (note.level, note.where) == ("warning", "blocks/mix")
    assert "Reshape" in note.message
    assert "micro-batches of 4" in note.message
    assert plan.options.micro_batches == ()
    assert planner.plans.validate(plan, graph, cluster) == []


@pytest.mark.parametrize(
    ("job", "advice"),
    [
        (planner.Job(global_batch=30), "a global batch that 4 divides"),
        (planner.Job(global_batch=32, micro_batches=(1, 2)), "allow micro-batches of 4"),
    ],
)
def test_a_batch_that_cannot_be_changed_and_does_not_divide_names_the_node(job: planner.Job, advice: str) -> None:
    with pytest.raises(planner.ModelError, match=advice) as raised:
        planner.plan(fixed_at_four(), planner.load_cluster("dgx-a100"), job)
    assert raised.value.problem.where == "blocks/mix"


def test_what_does_not_fit_at_a_fixed_batch_is_said_without_other_sizes() -> None:
    cluster = planner.load_cluster("dgx-a100")
    tiny = dataclasses.replace(cluster.devices[0], memory_bytes=cluster.devices[0].reserve_bytes + 100)
    machine = dataclasses.replace(cluster, devices=(tiny,))
    with pytest.raises(planner.InfeasibleError) as raised:
        planner.plan(fixed_at_four(), machine, planner.Job(global_batch=32))
    assert "micro-batch 1" not in str(raised.value)


@pytest.mark.parametrize("model", ["resnet50", "llama3.2-1b"])
def test_progress_is_told_and_ends_with_the_bound_reached(model: str) -> None:
    calls: list[tuple[int, int, float, float]] = []
    graph, cluster = planner.load_graph(model), planner.load_cluster("dgx-h100")
    plan = planner.plan(graph, cluster, planner.Job(global_batch=64), progress=lambda *told: calls.append(told))
    assert [done for done, *_ in calls] == sorted(done for done, *_ in calls)
    assert all(done <= total for done, total, *_ in calls)
    assert calls[-1][0] == calls[-1][1]
    assert calls[-1][2] == pytest.approx(plan.predictions.simulated_iteration_s, rel=1e-6)
    assert calls[-1][3] == pytest.approx(plan.predictions.bound_s, rel=1e-6)


def test_a_mixed_pool_is_priced_by_each_device_type() -> None:
    cluster = planner.load_cluster("mixed-pool")
    assert len(cluster.devices) > 1
    plan = planner.plan(planner.load_graph("vgg16"), cluster, planner.Job(global_batch=64, precision="fp16"))
    assert planner.plans.validate(plan, None, cluster) == []
