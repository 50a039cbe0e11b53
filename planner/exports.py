"""Names that a package exports and imports when they are first used.

A package lists them once, as plain imports under `TYPE_CHECKING`: type checkers and editors read these, and so does
`exports_of`, from the package's own file.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
from typing import Any


@functools.cache
def exports_of(package: str) -> dict[str, str]:
    """Module of each name that a package exports; what is a module is its own."""
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
    """What a package exports under a name; imported now if it was not before.

    Raises:
        AttributeError: it exports nothing of that name.
    """
    module = None if name.startswith("_") else exports_of(package).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = importlib.import_module(module)
    if module == f"{package}.{name}":
        return found
    value = getattr(found, name)
    setattr(sys.modules[package], name, value)
    return value
