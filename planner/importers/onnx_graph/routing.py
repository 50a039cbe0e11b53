"""How many rows a mixture of experts sends to each expert, where an exported graph finds them by their data.

Experts written out as a loop pick their rows with a mask: a one-hot of the places that a TopK chose, or their
comparison with the expert's number, of which NonZero makes row numbers. How many there are depends on data; with every
expert picked equally often, each of E experts has 1/E of what all are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from planner.importers.onnx_graph.work import WorkGraph, WorkNode
from planner.operators import rule_of

_MASKS = frozenset(("Equal", "Greater", "OneHot"))
_MERGES = frozenset(("ReduceMax", "ReduceSum"))


def routed_part(node: WorkNode, work: WorkGraph, known: Mapping[str, Fraction]) -> Fraction | None:
    """Part of a node's results that concerns one expert of a mixture, each being picked equally often.

    Of the places that TopK chooses among E it is 1/E, and so of a one-hot of them or a comparison with one place.

    Args:
        node: the node.
        work: types of its operands and results.
        known: parts of what earlier nodes make.

    Returns:
        None for results that have nothing to do with a choice among experts.
    """
    kinds = [work.types.get(name) for name in node.inputs]
    first = kinds[0] if kinds else None
    axis = node.attributes.get("axis", 0 if node.op == "ScatterElements" else -1)
    if first is None or not first.shape or not isinstance(axis, int):
        return None
    if node.op == "TopK":
        return Fraction(1, max(1, first.shape[axis]))
    if node.op == "ScatterElements" and node.inputs[1] in known and kinds[1] is not None:
        return min(Fraction(1), known[node.inputs[1]] * kinds[1].shape[axis])
    part = known.get(node.inputs[0])
    result = work.types.get(node.outputs[0])
    if part is None or result is None:
        return None
    if node.op in _MERGES:
        return min(Fraction(1), part * Fraction(first.elements, max(1, result.elements)))
    rule = rule_of(node.op)
    return part if node.op in _MASKS or rule.rearranges or rule.hands_on else None
