"""What must be known of a registered entry is part of its protocol: no test on its name, its class or its members."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner import exchange, export, schedules, systems

ROOT = Path(schedules.__file__).parents[1]

REGISTRIES = {
    "schedules": schedules.names(),
    "exchange": exchange.names(),
    "export": export.names(),
    "systems": tuple(name for name in systems.names() if name not in schedules.names()),
    "systems/backends": systems.backend_names(),
}
"""Registered names by the package whose modules register them."""

MEMBERS = {"schedules": {name for name in dir(schedules.Schedule) if not name.startswith("_")}}
"""What the entries' protocol has, so that nobody need ask whether an entry has it."""

CLASSES = {"schedules": {type(entry).__name__ for _, entry in schedules.SCHEDULES.items()} | {"CustomOrders"}}
"""Implementations of it, which nobody but their own file tells apart."""

OF_THEIR_OWN = {
    "solvers/_frontier.py": ("1f1b",),
    "solvers/diagnosis.py": ("1f1b", "auto"),
    "published/formulas/sharding.py": ("all-reduce",),
    "plans/readings.py": ("ring",),
    "importers/onnx_graph/passes.py": ("onnx",),
    "space/recompute_choices.py": ("auto",),
    "systems/backends/__init__.py": ("auto",),
    "runtime/__init__.py": ("torch",),
}
"""Comparisons left: with names of published formulas, of algorithms and choices of a job that are called like an entry,
and what the search of stages prefers."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        yield place, ast.parse(path.read_text(encoding="utf-8"))


def texts(node: ast.AST) -> Iterator[str]:
    """String constants of an operand: itself, or members of a tuple, list or set."""
    members = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    for member in members:
        if isinstance(member, ast.Constant) and isinstance(member.value, str):
            yield member.value


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of strings that something is compared with, matched against, or begins with."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            found = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            found = list(node.args)
        for operand in found:
            for text in texts(operand):
                yield operand.lineno, text.partition(":")[0]


def own_file(place: str, package: str, name: str) -> bool:
    """Whether a file of the package registers that name."""
    return place.startswith(f"{package}/") and f'register("{name}"' in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.parametrize("package", sorted(REGISTRIES))
def test_no_comparison_with_a_registered_name(package: str) -> None:
    names = set(REGISTRIES[package])
    wrong = [
        f"{place}:{line}: {text}"
        for place, tree in modules()
        for line, text in compared(tree)
        if text in names and not own_file(place, package, text) and text not in OF_THEIR_OWN.get(place, ())
    ]
    assert wrong == []


def reads(tree: ast.AST, package: str) -> bool:
    """Whether a module imports something of a package of `planner`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {f"{node.module}.{alias.name}." for node in imports for alias in node.names}
    return any(name.startswith(f"planner.{package}.") for name in names)


def guesses(tree: ast.AST, members: set[str], classes: set[str]) -> Iterator[str]:
    """`getattr` of a member, `isinstance` of a class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
            continue
        asked = node.args[1]
        by_name = node.func.id in ("getattr", "hasattr") and members & set(texts(asked))
        of_class = node.func.id == "isinstance" and classes & {n.id for n in ast.walk(asked) if isinstance(n, ast.Name)}
        if by_name or of_class:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", sorted(MEMBERS))
def test_no_guess_at_what_an_entry_is(package: str) -> None:
    """In modules that know the package; others may have things of their own with such members."""
    known = ((place, tree) for place, tree in modules() if reads(tree, package))
    found = ((place, guesses(tree, MEMBERS[package], CLASSES[package])) for place, tree in known)
    assert [f"{place}:{guess}" for place, own in found for guess in own] == []


def test_guesses_are_found() -> None:
    tree = ast.parse(
        'getattr(x, "rhythm", None)\nisinstance(x, (int, GPipe))\nhasattr(x, "append")\nisinstance(x, str)'
    )
    assert [g[0] for g in guesses(tree, MEMBERS["schedules"], CLASSES["schedules"])] == ["1", "2"]


def test_exceptions_are_needed() -> None:
    for place, names in OF_THEIR_OWN.items():
        found = {text for _, text in compared(ast.parse((ROOT / place).read_text(encoding="utf-8")))}
        assert set(names) <= found, place


def test_comparisons_are_found() -> None:
    tree = ast.parse('if key in ("gpipe", "x") or name == "1f1b" or name.startswith("chimera:pairs"):\n    pass')
    assert [text for _, text in compared(tree)] == ["gpipe", "x", "1f1b", "chimera"]
