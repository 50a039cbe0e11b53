"""What is known of a bundled model without building it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._graph import GraphBuilder


class ModelBuildError(ValueError):
    """A bundled model that does not exist or cannot be built at the size asked for.

    Args:
        message: what is wrong, one line.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)


class UnknownModelError(ModelBuildError, LookupError):
    """No bundled model has that name."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A bundled model by name.

    Attributes:
        name: what it is called on the command line, `llama3-70b`.
        family: the builder that makes it, `llama`.
        description: one line for people.
        layers: number of repeated blocks (encoder plus decoder, or weighted layers of a convolutional net).
        parameters: published number of trained weights, tied ones counted once; rounded where the source rounds.
        seq: sequence length it is built at unless another is asked for; None for models that read no sequence.
        max_seq: longest sequence its position table allows; None when there is no such limit.
        source: where the sizes come from.
    """

    name: str
    family: str
    description: str
    layers: int
    parameters: int
    seq: int | None
    max_seq: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundled model: what is known of it, and how to build it.

    Attributes:
        info: what is known without building.
        opset: operator set that its graph uses.
        construct: adds the model to an empty graph at a batch size and a sequence length (0 for models without one).
    """

    info: ModelInfo
    opset: int
    construct: Callable[[GraphBuilder, int, int], None]
