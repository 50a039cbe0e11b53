"""What is known of a bundled model without building it, and how a configuration becomes a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""A configuration with a value for every key of its type."""


class ModelBuildError(ValueError):
    """A model that does not exist or cannot be built at the size asked for.

    Args:
        message: what is wrong, one line.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)


class UnknownModelError(ModelBuildError, LookupError):
    """No bundled model, or no type of model, has that name."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A bundled model by name.

    Attributes:
        name: what it is called on the command line, `llama3-70b`.
        family: what it is listed under, `llama`.
        description: one line for people.
        layers: number of repeated blocks (encoder plus decoder, or weighted layers of a convolutional net).
        parameters: published number of trained weights, tied ones counted once; rounded where the source rounds.
        active: those that one token uses, embedding and head included; None where all are.
        seq: sequence length it is built at unless another is asked for; None for models that read no sequence.
        max_seq: longest sequence its position table allows; None when there is no such limit.
        source: where the sizes come from.
    """

    name: str
    family: str
    description: str
    layers: int
    parameters: int
    active: int | None
    seq: int | None
    max_seq: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration.

    Attributes:
        kind: type of its value; a whole number where a fraction is expected is one.
        default: value where the configuration has none.
        required: the configuration must have it.
        items: type of the items of a list.
        count: how many items a list has, each a number of layers; 0 for any.
    """

    kind: type
    default: Any = None
    required: bool = False
    items: type = int
    count: int = 0


def required(kind: type = int) -> Key:
    """A key that a configuration must have."""
    return Key(kind, required=True)


@dataclass(frozen=True, slots=True)
class ModelType:
    """What a configuration's `model_type` names.

    Attributes:
        family: what its models are listed under.
        keys: keys that its configurations may have, by name.
        size: a configuration with a value for every key to sizes of the builder, whose module constructs the graph.
        positions: key of the longest sequence that its position table allows; "" where there is no such table.
        reads_sequence: whether the model reads a sequence, whose length is chosen.
    """

    family: str
    keys: Mapping[str, Key]
    size: Callable[[Config], object]
    positions: str = ""
    reads_sequence: bool = True
