"""A batch normalisation that the exporter folded into the convolution (or linear layer) before it.

Inference can do so, training cannot: the normalisation runs after the convolution and keeps its result. Three traces
show a fold: a bias that the exporter named after the weight (or, in older exports, weight and bias without names); a
module named like a norm; a result named as the first of several, which normalisations have and convolutions have not.
The scale is part of the weight, and stays there.
"""

from __future__ import annotations

import re
from dataclasses import replace

from planner.graph import Graph, Node
from planner.operators.rewriting import PATTERNS, Pattern, Rewrite

_NORM_NAME = re.compile(r"(^|[._/])(bn\d*|batch_?norm\d*|norm\d*)([._/]|$)", re.IGNORECASE)
_NAMELESS = re.compile(r"^onnx::Conv_\d+")
_FIRST_OF_SEVERAL = re.compile(r"^getitem(_\d+)?$")


def _unfolded(graph: Graph, index: int) -> Rewrite | None:
    """The convolution without its bias, then the normalisation, which shifts by the bias."""
    node = graph.nodes[index]
    if len(node.inputs) < 3 or not node.inputs[2] or not _shows_a_fold(node):
        return None
    result = graph.tensors[node.outputs[0]]
    made = replace(result, name=f"{result.name}@unnormalised")
    product = replace(node, key=made.name, inputs=node.inputs[:2], outputs=(made.name,))
    inputs = (made.name, "", node.inputs[2])
    norm = Node(node.key, "BatchNormalization", inputs, node.outputs, {}, node.module, node.name, node.repeat)
    return Rewrite(frozenset({index}), (product, norm), (made,))


def _shows_a_fold(node: Node) -> bool:
    weight, bias = node.inputs[1], node.inputs[2]
    if _FIRST_OF_SEVERAL.match(node.outputs[0]):
        return True
    if node.op != "Conv":
        return False
    named_after = bias == f"{weight}_bias" or bool(_NAMELESS.match(weight) and _NAMELESS.match(bias))
    return named_after or bool(_NORM_NAME.search(node.module)) or "batch_norm" in node.name


PATTERNS.register(
    "folded_batchnorm",
    Pattern(
        frozenset({"Conv", "ConvTranspose", "Gemm"}),
        _unfolded,
        note="{count} convolutions hold a folded batch normalisation, a trace of an inference export; counted as in "
        "training",
    ),
)
