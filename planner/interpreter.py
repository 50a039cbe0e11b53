"""What is asked of the Python interpreter: names of a package that are imported when they are first used, and its
garbage collector suspended while many long-lived objects are created.

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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@functools.cache
def exports_of(package: str) -> dict[str, str]:
    """By name that a package exports: its module; a submodule maps to itself."""
    imports = [
        (node.module or "", alias.name)
        for block in ast.parse(pkgutil.get_data(package, "__init__.py") or b"").body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {name: f"{module}.{name}" if module == package else module for module, name in imports}


def exported(package: str, name: str) -> Any:  # noqa: ANN401
    """The object that a package exports under a name; imports it if needed.

    Raises:
        AttributeError: the package does not export the name.
    """
    module = None if name.startswith("_") else exports_of(package).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    imported = importlib.import_module(module)
    if module == f"{package}.{name}":
        return imported
    value = getattr(imported, name)
    setattr(sys.modules[package], name, value)
    return value


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
