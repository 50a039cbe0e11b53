"""What the layers of a decoder hold, for frameworks that have layers of several kinds: experts, mixers of a hybrid.

Everything is read off the names of parameters, which are those of the torch module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from planner.plans import Plan
from planner.plans.readings import layer_name, layers, predictors

MIXERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("E", frozenset({"experts"})),
    ("M", frozenset({"A_log", "D"})),
    ("G", frozenset({"A_log"})),
    ("+", frozenset({"kv_b_proj"})),
    ("*", frozenset({"k_proj"})),
    ("*", frozenset({"qkv_proj"})),
    ("*", frozenset({"linear_qkv"})),
)
"""Symbols of Megatron's hybrid layers, and the names inside a layer that tell them: experts, state space, gated delta
net, attention with latent keys, attention (`core/models/hybrid/hybrid_layer_allocation.py`)."""

DENSE = "-"
"""The symbol of a layer with none of them: a feed-forward network."""

_INNER = re.compile(r"\.\w+\.\d+(?=\.)")
"""A numbered module inside a layer: layers of a predictor of further tokens."""


def _names(plan: Plan) -> Mapping[str, dict[str, int]]:
    """By layer: the dimensions of its parameters, by their names below it."""
    found: dict[str, dict[str, int]] = {name: {} for name in layers(plan)}
    for block in plan.block_table:
        layer = layer_name(block)
        for parameter in block.parameters if layer in found else ():
            if parameter.name.startswith(f"{layer}."):
                found[layer][parameter.name.removeprefix(layer)] = len(parameter.shape)
    return found


def mixtures(plan: Plan) -> Mapping[str, int]:
    """Number of experts of each layer that is a mixture, or has one in it."""
    counts: dict[str, int] = {}
    for block in plan.block_table:
        layer, numbers = layer_name(block), set[str]()
        for parameter in block.parameters:
            path, found, rest = parameter.name.partition(".experts.")
            if not found or not path.startswith(layer):
                continue
            number = rest.partition(".")[0]
            if number.isdigit():
                numbers.add(number)
            elif len(parameter.shape) > 1:
                counts[layer] = parameter.shape[0]
        if numbers:
            counts[layer] = counts.get(layer, 0) + len(numbers)
    own = layers(plan)
    return {layer: counts[layer] for layer in own if layer in counts}


def unlike_layers(plan: Plan) -> bool:
    """Whether layers have unlike parameters: mixtures among dense layers, mixers of several kinds."""
    return len({frozenset(own) for own in _names(plan).values()}) > 1


def hybrid_symbols(plan: Plan) -> Mapping[str, str]:
    """Symbols of the layers of a hybrid, where each is one mixer alone; none for a model of layers of one kind.

    A predictor of further tokens has a symbol for each of its inner layers, those of the first predictor.
    """
    names, further = _names(plan), predictors(plan)
    plain = {layer: own for layer, own in names.items() if layer not in further}
    children = [{name.split(".")[1] for name, dims in own.items() if dims > 1} for own in plain.values()]
    symbols = {layer: _symbol(own) for layer, own in plain.items()}
    if any(len(own) != 1 for own in children) or len(set(symbols.values())) < 2:
        return {}
    return symbols | dict.fromkeys(further, _inner_symbols(names[further[0]]) if further else "")


def _inner_symbols(names: Mapping[str, int]) -> str:
    """Symbols of the numbered modules of a predictor by the names of its parameters, in order."""
    parts = dict.fromkeys(found[0] for name in names if (found := _INNER.match(name)))
    return "".join(_symbol([name for name in names if name.startswith(part)]) for part in parts)


def _symbol(names: Iterable[str]) -> str:
    """The symbol of a layer by the names of its parameters."""
    parts = {part for name in names for part in name.split(".")}
    return next((symbol for symbol, own in MIXERS if own <= parts), DENSE)
