"""Small graphs to shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from planner.graph import Graph
from planner.sharding import PARTIAL, REPLICATED, Mesh, Part, Setting, WeightChoice, ideal_mesh
from tests.operators.calls import graph, node


def products(sizes: Sequence[int], *, relu: bool = False, batch: int = 8) -> Graph:
    """A chain of matrix products `[batch, sizes[0]] -> [batch, sizes[-1]]`, an activation between two."""
    tensors, nodes, last = {"x": f"x {batch} {sizes[0]}"}, [], "x"
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        tensors |= {f"w{k}": f"w {a} {b}", f"h{k}": f"x {batch} {b}"}
        nodes.append(node("MatMul", f"{last} w{k}", f"h{k}"))
        last = f"h{k}"
        if relu and k + 2 < len(sizes):
            tensors[f"r{k}"] = f"x {batch} {b}"
            nodes.append(node("Relu", last, f"r{k}"))
            last = f"r{k}"
    return graph(tensors, nodes)


def attention_block(batch: int = 8, steps: int = 16, width: int = 32, heads: int = 8, inner: int = 128) -> Graph:
    """A transformer block with separate projections: norm, attention, sum, norm, two products, sum."""
    full, split, turned = f"x {batch} {steps} {width}", f"x {batch} {steps} {heads} {width // heads}", ""
    turned = f"x {batch} {heads} {steps} {width // heads}"
    tensors = {"x": full, "g1": f"w {width}", "b1": f"w {width}", "n1": full, "shape": "c:int64 4", "flat": "c:int64 3"}
    nodes = [node("LayerNormalization", "x g1 b1", "n1")]
    for p in "qkv":
        tensors |= {f"w{p}": f"w {width} {width}", f"{p}0": full, f"{p}1": split, f"{p}2": turned}
        nodes += [
            node("MatMul", f"n1 w{p}", f"{p}0"),
            node("Reshape", f"{p}0 shape", f"{p}1"),
            node("Transpose", f"{p}1", f"{p}2", perm=(0, 2, 1, 3)),
        ]
    tensors |= {"a": turned, "a1": split, "a2": full, "wo": f"w {width} {width}", "o": full, "s1": full}
    tensors |= {"g2": f"w {width}", "b2": f"w {width}", "n2": full, "wu": f"w {width} {inner}"}
    tensors |= {"u": f"x {batch} {steps} {inner}", "r": f"x {batch} {steps} {inner}"}
    tensors |= {"wd": f"w {inner} {width}", "d": full, "y": full}
    nodes += [
        node("Attention", "q2 k2 v2", "a"),
        node("Transpose", "a", "a1", perm=(0, 2, 1, 3)),
        node("Reshape", "a1 flat", "a2"),
        node("MatMul", "a2 wo", "o"),
        node("Add", "x o", "s1"),
        node("LayerNormalization", "s1 g2 b2", "n2"),
        node("MatMul", "n2 wu", "u"),
        node("Gelu", "u", "r"),
        node("MatMul", "r wd", "d"),
        node("Add", "s1 d", "y"),
    ]
    return graph(tensors, nodes)


def setting(what: Graph, mesh: Mesh | Sequence[int], work_s: float = 0.0, **options: object) -> Setting:
    """A setting in which every node takes the same time."""
    placed = mesh if isinstance(mesh, Mesh) else ideal_mesh(list(mesh))
    times = np.full(len(what.nodes), work_s)
    return Setting(what, placed, forward_s=times, backward_s=2 * times, **options)  # type: ignore[arg-type]


def zero_choice(stage: int) -> WeightChoice:
    """Where ZeRO's stage 0 to 3 lets the states of a weight rest on one axis: the last as many of them are cut."""
    cut = Part(0)
    weight, gradient, optimizer = {
        0: (REPLICATED, REPLICATED, REPLICATED),
        1: (REPLICATED, PARTIAL, cut),
        2: (REPLICATED, cut, cut),
        3: (cut, cut, cut),
    }[stage]
    return WeightChoice((weight,), (gradient,), (optimizer,))
