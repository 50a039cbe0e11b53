"""Hooks into the Python interpreter: lazy imports of a package's names, words on names that have moved, and a garbage
collector that is suspended while many long-lived objects are created.

A package lists its exports once, as plain imports under `TYPE_CHECKING`. Type checkers and editors read them, and
`exports_of` reads them from the package's source.

>>> import gc
>>> with uncollected():
...     gc.isenabled()
False
>>> gc.isenabled()
True
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any


@functools.cache
def exports_of(package: str) -> dict[str, str]:
    """By name that a package exports: the dotted name of what it stands for, a submodule or a member of a module."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for block in ast.parse(pkgutil.get_data(package, "__init__.py") or b"").body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def exported(package: str, name: str) -> Any:  # noqa: ANN401
    """The object that a package exports under a name; imports it if needed.

    Raises:
        AttributeError: the package does not export the name.
    """
    target = None if name.startswith("_") else exports_of(package).get(name)
    if target is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, member = target.rpartition(".")
    if module == package:
        return importlib.import_module(target)
    value = getattr(importlib.import_module(module), member)
    setattr(sys.modules[package], name, value)
    return value


class MovedNames(MetaPathFinder):
    """Imports by an old path fail with words that say the new one: `import planner.partitions`, and also
    `from planner.importers import read_piper`, which looks for a module when the package lacks the name.

    Stands first in `sys.meta_path`: an update leaves the old folder behind where it holds compiled files, and Python
    would import that as an empty package.

    Args:
        moved: by old dotted name, where it is now.
    """

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """None for a name that has not moved.

        Raises:
            ModuleNotFoundError: the name has moved; says where. It carries no `name`, since `from .. import` takes an
                error with the module's name for a plain lack and drops its words.
        """
        if fullname in self._moved:
            raise ModuleNotFoundError(f"No module named {fullname!r}; it is {self._moved[fullname]} now")


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector inside the block; blocks may nest.

    Collections are a sixth of the time of reading and pricing a model. Searches should not use this, since they may
    leave much garbage behind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
