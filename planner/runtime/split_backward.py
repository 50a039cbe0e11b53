"""A backward pass in two halves: gradients of a stage's inputs first, gradients of weights of products later.

Each half runs every node of the autograd graph at most once. The first half asks autograd for the gradients of the
products' results beside those of the inputs, and leaves the products' weights out; the second computes the gradients of
these weights from the kept gradients, one product after the other. All other weights (norms, biases that are added
apart, embeddings) get their gradients in the first half, as a plan's costs count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from planner.runtime.operators.call import PRODUCTS

Values = Mapping[str, torch.Tensor]
End: TypeAlias = torch.Tensor | torch.autograd.graph.GradientEdge
"""Where a backward pass begins: a tensor, or its place in the autograd graph, which holds no data."""


@dataclass(slots=True)
class Box:
    """Holds what an operator keeps for its backward, until it is emptied.

    Attributes:
        kept: what it holds.
        once: whether the next that looks into it empties it.
    """

    kept: object
    once: bool = False

    def open(self) -> object:
        """What it holds."""
        kept = self.kept
        if self.once:
            self.kept = None
        return kept


@dataclass
class WaitingProducts:
    """The products of one pass whose weights' gradients can wait, and what they wait with.

    All else that the forward pass kept goes as soon as the first half has read it.

    Attributes:
        early: gradients of the other weights, from the first half.
    """

    early: dict[str, torch.Tensor | None] = field(default_factory=dict)
    _products: list[tuple[End, list[torch.Tensor], list[Box]]] = field(default_factory=list)
    _boxes: list[Box] = field(default_factory=list)
    _new: list[Box] = field(default_factory=list)
    _ends: set[object] = field(default_factory=set)
    _uses: Counter[int] = field(default_factory=Counter)
    _waiting: list[tuple[End, tuple[str, ...], torch.Tensor]] = field(default_factory=list)

    def boxed(self, kept: object) -> Box:
        """What an operator keeps, in a box that is emptied after the first half unless the operator waits."""
        self._new.append(Box(kept))
        return self._new[-1]

    def saw(self, op: str, operands: Sequence[torch.Tensor | None], result: object) -> None:
        """Note an operator of the forward pass, as `Context.saw` is told of it."""
        boxes, self._new = self._new, []
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        made_from = None if op in PRODUCTS else self._leaf_behind(result)
        if made_from is None:  # else it may be on the way from a product to its weight
            self._boxes += boxes
        leaves = [leaf for x in operands if (leaf := self._leaf_behind(x)) is not None and leaf is not made_from]
        self._uses.update(map(id, leaves))
        if op in PRODUCTS and leaves:
            self._products.append((torch.autograd.graph.get_gradient_edge(result), leaves, boxes))
            self._ends.add(result.grad_fn)

    def first_half(
        self, ends: Sequence[End], seeds: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
        weights: Values,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Gradients of the inputs; keeps the gradients that the second half begins with.

        Args:
            ends: where the backward pass begins.
            seeds: their gradients.
            inputs: leaves of the stage's inputs.
            weights: trained weights that the forward pass read, by name.
        """
        names = {id(weight): name for name, weight in weights.items()}
        waiting = [
            (end, tuple(names[id(x)] for x in leaves if id(x) in names and self._uses[id(x)] == 1), boxes)
            for end, leaves, boxes in self._products
        ]
        waiting = [product for product in waiting if product[1]]
        late = {name for _, own, _ in waiting for name in own}
        now = {name: weight for name, weight in weights.items() if name not in late}
        needed = {id(box) for _, _, boxes in waiting for box in boxes}
        passing = [box for box in (*self._boxes, *self._new) if id(box) not in needed]
        for box in passing:
            box.once = True
        wanted: list[End] = [*inputs, *now.values(), *(end for end, _, _ in waiting)]
        found = gradients(ends, seeds, wanted, keep=True)
        self.early = dict(zip(now, found[len(inputs) :], strict=False))
        self._waiting = [
            (end, own, gradient)
            for (end, own, _), gradient in zip(waiting, found[len(inputs) + len(now) :], strict=True)
            if gradient is not None
        ]
        for box in passing:
            box.kept = None
        self._products, self._ends, self._boxes, self._new = [], set(), [], []
        return found[: len(inputs)]

    def second_half(self, weights: Values) -> Iterator[Mapping[str, torch.Tensor | None]]:
        """Gradients of all weights, by name: those of the first half, and product by product those that waited."""
        yield self.early
        self.early = {}
        while self._waiting:
            end, names, gradient = self._waiting.pop()
            yield dict(zip(names, gradients([end], [gradient], [weights[n] for n in names]), strict=True))

    def _leaf_behind(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The only leaf of autograd that a tensor is made from, by moves and functions of one tensor."""
        if x is None or not x.requires_grad:
            return None
        if x.grad_fn is None:
            return x
        node = x.grad_fn
        while node not in self._ends:
            before = [fn for fn, _ in node.next_functions if fn is not None]
            if len(before) != 1:
                return None
            node = before[0]
            leaf: torch.Tensor | None = getattr(node, "variable", None)
            if leaf is not None:
                return leaf
        return None


def gradients(
    ends: Sequence[End], seeds: Sequence[torch.Tensor], wanted: Sequence[End], *, keep: bool = False
) -> list[torch.Tensor | None]:
    """Gradients of tensors; None for those that no end follows from.

    Args:
        ends: where the backward pass begins.
        seeds: their gradients.
        wanted: tensors, or their places in the graph, whose gradients are asked for.
        keep: true to keep what the forward pass saved.
    """
    if not ends or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad(ends, wanted, seeds, retain_graph=keep, allow_unused=True))


def gradients_in_place(
    ends: list[End], seeds: list[torch.Tensor], inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of inputs; those of weights are added to what their `grad` holds, which is taken off them.

    Args:
        ends: where the backward pass begins; the list is emptied, so that they are freed meanwhile.
        seeds: their gradients, likewise.
        inputs: leaves without a gradient so far.
        weights: leaves with one.
    """
    try:
        if ends and (inputs or weights):
            torch.autograd.backward(_emptied(ends), _emptied(seeds), inputs=[*inputs, *weights])
        return [x.grad for x in inputs]
    finally:
        for x in (*inputs, *weights):
            x.grad = None


def _emptied(given: list[Any]) -> tuple[Any, ...]:
    taken = tuple(given)
    given.clear()
    return taken
