"""What an importer is, what it may be told, and the registry of model formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.graph import Graph
from planner.registry import Registry

HEAD_BYTES = 4096
"""How much of a file's beginning a format may look at to recognise it."""

MOST_INSTANCE_DEVICES = 4096
"""Devices of one kind that an instance of a partition problem may ask for: more could not be told apart in time."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Choices that a file leaves open.

    Attributes:
        ties: which separate weight tensors are copies of each other. "auto" decides by the conventions of known model
            families, "none" leaves all apart, and pairs of parameter names or labels `(copy, original)` say it exactly.
        keep_final_softmax: price a Softmax that ends the graph; else it is left out, since training works on logits.
    """

    ties: str | tuple[tuple[str, str], ...] = "auto"
    keep_final_softmax: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of model file.

    Attributes:
        title: what a person calls it.
        suffixes: file name endings that usually mean this format, lower case with the dot.
        sniff: whether a file with these first bytes (at most `HEAD_BYTES`) is of this format.
        load: reads the file; gets the path, sizes of symbolic axes and the options, and raises `ModelError`.
    """

    title: str
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    load: Callable[[Path, Mapping[str, int], ImportOptions], Graph]


FORMATS: Registry[Format] = Registry("planner.importers", "model format")
"""All formats by name; a module of this package registers its own when first looked up."""
