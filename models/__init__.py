"""Builders of well-known models as ONNX graphs: shapes, no weights.

    import models

    model = models.build("llama3-70b", batch=1, seq=4096)

The graph has real operators, names, module paths and shapes, but its weights are initializers whose data file does not
exist, so that a model of a trillion parameters is a small file. Graphs end at logits, without loss and softmax.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ._graph import GraphBuilder
from ._types import Entry, ModelBuildError, ModelInfo, UnknownModelError

if TYPE_CHECKING:
    import onnx

FAMILIES = ("gpt", "llama", "bert", "t5", "moe", "vit", "resnet", "vgg", "gnmt", "dlrm")

__all__ = [
    "FAMILIES",
    "ModelBuildError",
    "ModelInfo",
    "UnknownModelError",
    "build",
    "build_custom",
    "families",
    "info",
    "names",
]


@functools.cache
def _entries() -> Mapping[str, Entry]:
    """All bundled models by name, in the order of families and sizes."""
    modules = [importlib.import_module(f"{__name__}.{family}") for family in FAMILIES]
    return {name: entry for module in modules for name, entry in module.MODELS.items()}


def _entry(name: str) -> Entry:
    entries = _entries()
    if name not in entries:
        close = difflib.get_close_matches(name.lower(), entries, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(c) for c in close)}?" if close else f"known: {', '.join(entries)}"
        raise UnknownModelError(f"no bundled model is called {name!r}", hint)
    return entries[name]


def names() -> tuple[str, ...]:
    """Names of all bundled models, by family and size."""
    return tuple(_entries())


def families() -> tuple[str, ...]:
    """Names of the families of builders."""
    return FAMILIES


def info(name: str) -> ModelInfo:
    """What is known of a bundled model without building it.

    Raises:
        UnknownModelError: no bundled model has that name; the hint names the closest ones.
    """
    return _entry(name).info


def build(name: str, *, batch: int = 1, seq: int | None = None) -> onnx.ModelProto:
    """Build a bundled model: fixed shapes, float32 weights without data.

    Args:
        name: a name from `names`.
        batch: samples in one forward pass, the leading dimension of every input.
        seq: sequence length; the model's usual one when absent. An encoder-decoder reads a quarter of it as target.

    Raises:
        UnknownModelError: no bundled model has that name.
        ModelBuildError: a batch or sequence length that the model cannot have.
    """
    entry = _entry(name)
    if batch < 1:
        raise ModelBuildError(f"batch {batch} is not positive", "give a batch of 1 or more")
    g = GraphBuilder(name, opset=entry.opset, source=entry.info.source)
    entry.construct(g, batch, _sequence(entry.info, seq))
    return g.finish()


def build_custom(
    size: object, *, batch: int = 1, seq: int = 0, name: str = "custom", seed: int | None = None
) -> onnx.ModelProto:
    """Build a model of any size, as `models.gpt.GPTSize(layers=4, hidden=512, ...)` states it.

    Args:
        size: an instance of a family's size class.
        batch: samples in one forward pass.
        seq: sequence length, for families that read one.
        name: name of the graph.
        seed: when given, weights hold reproducible random values, for models small enough to run.

    Raises:
        TypeError: `size` is no size of a family here.
    """
    module = importlib.import_module(type(size).__module__)
    if not module.__name__.startswith(f"{__name__}.") or not hasattr(module, "construct"):
        raise TypeError(f"{type(size).__name__} is no size of a bundled family")
    g = GraphBuilder(name, opset=module.OPSET, seed=seed)
    module.construct(size, g, batch, seq)
    return g.finish()


def _sequence(info: ModelInfo, seq: int | None) -> int:
    """The sequence length to build at; 0 for a model that reads none."""
    if info.seq is None:
        if seq is not None:
            raise ModelBuildError(f"{info.name} reads no sequence", "leave the sequence length out")
        return 0
    length = info.seq if seq is None else seq
    if length < 1:
        raise ModelBuildError(f"sequence length {length} is not positive", f"{info.name} is usually run at {info.seq}")
    if info.max_seq is not None and length > info.max_seq:
        raise ModelBuildError(
            f"sequence length {length} is more than the {info.max_seq} positions of {info.name}",
            f"ask for {info.max_seq} or less",
        )
    return length
