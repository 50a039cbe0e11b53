"""What training runs around a convolution and exporters merge into it: a norm after it, padding before it.

Inference can fold a normalisation into the convolution (or linear layer) before it, training cannot: the normalisation
runs after the convolution and keeps its result. Three traces show a fold: a bias that the exporter named after the
weight (or, in older exports, weight and bias without names); a module named like a norm; a result named as the first of
several, which normalisations have and convolutions have not. The scale is part of the weight, and stays there.

Padding is a copy in training, which exporters merge into the convolution or leave as a node. Frameworks' convolutions
pad both sides alike. A convolution that does not was a padding and a convolution before an exporter merged them, and
so, in the same file, was every other convolution that pads. Padding by nothing is left out.
"""

from __future__ import annotations

import re
from dataclasses import replace

from planner.graph import DType, Graph, Node, Tensor, TensorKind, per_graph
from planner.operators.rewriting import PATTERNS, UNNORMALISED, Pattern, Rewrite

_NORM_NAME = re.compile(r"(^|[._/])(bn\d*|batch_?norm\d*|norm\d*)([._/]|$)", re.IGNORECASE)
_NAMELESS = re.compile(r"^onnx::Conv_\d+")
_FIRST_OF_SEVERAL = re.compile(r"^getitem(_\d+)?$")


def _unfolded(graph: Graph, index: int) -> Rewrite | None:
    """The convolution without its bias, then the normalisation, which shifts by the bias."""
    node = graph.nodes[index]
    if len(node.inputs) < 3 or not node.inputs[2] or not _shows_a_fold(node):
        return None
    result = graph.tensors[node.outputs[0]]
    made = replace(result, name=f"{result.name}{UNNORMALISED}")
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


def _pads(node: Node) -> tuple[int, ...]:
    given = node.attributes.get("pads", ())
    return tuple(int(pad) for pad in given) if isinstance(given, tuple) else ()


@per_graph
def _were_merged(graph: Graph) -> bool:
    """Whether some convolution pads its two sides differently."""
    all_pads = (_pads(node) for node in graph.nodes if node.op == "Conv")
    return any(pads[: len(pads) // 2] != pads[len(pads) // 2 :] for pads in all_pads)


def _padded(graph: Graph, index: int) -> Rewrite | None:
    node = graph.nodes[index]
    at = graph.producer.get(node.inputs[0], -1)
    if at >= 0 and graph.nodes[at].op == "Pad" and len(graph.nodes[at].inputs) > 1:
        pad = graph.nodes[at]
        amounts = graph.constants.get(pad.inputs[1], (1,))
        unpadded = replace(node, inputs=(pad.inputs[0], *node.inputs[1:]))
        return None if any(amounts) else Rewrite(frozenset({at, index}), (unpadded,))
    pads = _pads(node)
    if not any(pads) or not _were_merged(graph):
        return None
    source = graph.tensors[node.inputs[0]]
    half = len(pads) // 2
    grown = (size + pads[d] + pads[half + d] for d, size in enumerate(source.shape[2:]))
    made = Tensor(f"{node.key}@padded", (*source.shape[:2], *grown), source.dtype, TensorKind.ACTIVATION)
    sizes = Tensor(f"{node.key}@pads", (2 * len(source.shape),), DType.INT64, TensorKind.CONSTANT)
    pad = Node(made.name, "Pad", (source.name, sizes.name), (made.name,), {}, node.module, "", node.repeat)
    attributes = {**node.attributes, "pads": (0,) * len(pads)}
    convolution = replace(node, inputs=(made.name, *node.inputs[1:]), attributes=attributes)
    amounts = (0, 0, *pads[:half], 0, 0, *pads[half:])
    return Rewrite(frozenset({index}), (pad, convolution), (made, sizes), {sizes.name: amounts})


PATTERNS.register("padding", Pattern(frozenset({"Conv"}), _padded))
