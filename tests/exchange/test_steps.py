"""From a graph to what is exchanged."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import ModelError
from planner.exchange import Variable, step_of
from planner.graph import DType, Graph, Node, Parameter, Tensor, TensorKind


def _graph(second_reader: str = "Gather") -> Graph:
    """Token look-up in 100 rows of 4, a tied second table, and a matrix product."""
    table = Tensor("emb", (100, 4), DType.FLOAT32, TensorKind.PARAMETER)
    tensors = {
        "emb": table,
        "copy": Tensor("copy", (100, 4), DType.FLOAT32, TensorKind.PARAMETER),
        "w": Tensor("w", (4, 4), DType.FLOAT32, TensorKind.PARAMETER),
        "fixed": Tensor("fixed", (4,), DType.FLOAT32, TensorKind.PARAMETER),
        "ids": Tensor("ids", (2, 5), DType.INT64, TensorKind.INPUT),
        **{n: Tensor(n, (2, 5, 4), DType.FLOAT32, TensorKind.ACTIVATION) for n in ("a", "b", "c")},
    }
    reader = ("copy", "ids") if second_reader == "Gather" else ("b", "copy")
    return Graph(
        "g",
        "f",
        (
            Node("a", "Gather", ("emb", "ids"), ("a",)),
            Node("b", "MatMul", ("a", "w"), ("b",)),
            Node("c", second_reader, reader, ("c",)),
        ),
        tensors,
        ("ids",),
        ("c",),
        (
            Parameter("emb", "emb", (100, 4), DType.FLOAT32),
            Parameter("w", "w", (4, 4), DType.FLOAT32),
            Parameter("copy", "copy", (100, 4), DType.FLOAT32, tied_to="emb"),
            Parameter("fixed", "fixed", (4,), DType.FLOAT32, trainable=False),
        ),
        {name: (name,) for name in ("emb", "copy", "w", "fixed")},
    )


def test_a_graph_becomes_a_step() -> None:
    """Backward 3 + 2 + 1 s in reverse: w is ready after 5 s, the table after 6; 20 of 100 rows are read."""
    step = step_of(_graph(), np.asarray([1.0, 1, 1]), np.asarray([1.0, 2, 3]), gradient_bytes=2)
    assert step.variables == (
        Variable("emb", 800, 6.0, sparse=True, touched=0.2),
        Variable("w", 32, 5.0),
    )
    assert (step.forward_s, step.backward_s) == (3, 6)
    merged = step_of(_graph(), np.ones(3), np.ones(3), lookups=8)
    assert merged.variables[0].touched == 1.0


def test_a_table_that_is_also_multiplied_is_dense() -> None:
    step = step_of(_graph("MatMul"), np.ones(3), np.ones(3), weight_bytes=4)
    assert not step.variables[0].sparse
    assert step.variables[0].pulled_bytes == 1600


def test_times_must_fit_the_graph() -> None:
    with pytest.raises(ModelError):
        step_of(_graph(), np.ones(2), np.ones(3))
