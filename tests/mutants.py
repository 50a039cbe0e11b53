"""Trial of the tests of a package: one line is changed at a time, and its own tests must fail.

`python -m tests.mutants exchange --count 20 --seed 1` (`make mutants PACKAGE=exchange`) changes comparisons,
arithmetic, constants, functions such as `min`, `and` and `or` of `planner/exchange` in a copy of the tree and runs
`tests/exchange` on each; `--at planner/exchange/formulas.py:147` tries every change of one line. Survivors are printed
as `file:line: old -> new`: what the tests do not see, or what makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("planner", "cli", "models", "hardware_profiles", "benchmarks", "docs", "tests", "pyproject.toml", "README.md")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
FUNCTIONS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "float_sum": "max", "math.fsum": "max",
    "math.ceil": "math.floor", "math.floor": "math.ceil", "sorted": "list", "abs": "float",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed expression of a file.

    Attributes:
        path: the file, from the root of the tree.
        line: the line where the expression begins, from 1 on.
        old, new: the expression before and after, on one line.
        source: the whole changed file.
    """

    path: Path
    line: int
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def _changed_constant(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    return [value + 1] if isinstance(value, int | float) else []


def changes(node: ast.expr) -> Iterator[ast.expr]:
    """Expressions that differ from one in a single operator, constant or function, or in a term less."""

    def with_(**fields: object) -> ast.expr:
        made = copy.copy(node)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    match node:
        case ast.Compare(ops=[operator, *rest]):
            yield with_(ops=[COMPARISONS[type(operator)](), *rest])
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left):
            yield with_(op=ARITHMETIC[type(node.op)]())
            yield left
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield with_(op=ARITHMETIC[type(node.op)]())
        case ast.BoolOp(values=[first, *_]):
            yield with_(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            yield first
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant():
            yield from (ast.Constant(value) for value in _changed_constant(node.value))
        case ast.Call(func=function) if ast.unparse(function) in FUNCTIONS:
            yield with_(func=ast.Name(FUNCTIONS[ast.unparse(function)]))
        case ast.Call(func=ast.Name("range"), args=[*before, last], keywords=[]) if len(before) < 2:
            yield with_(args=[*before, ast.BinOp(last, ast.Sub(), ast.Constant(1))])
        case ast.Subscript(slice=ast.Slice() as cut):
            yield from (
                with_(slice=ast.Slice(**{**dict(ast.iter_fields(cut)), part: None}))
                for part in ("lower", "upper", "step")
                if getattr(cut, part) is not None
            )


class _Expressions(ast.NodeVisitor):
    """Collects expressions that run, with those in f-strings and annotations left out."""

    def __init__(self) -> None:
        self.found: list[ast.expr] = []

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.found.append(node)
        super().generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave f-strings alone: the places of their parts are not those of the file before Python 3.12."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value, not at the type."""
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Leave types of arguments alone."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Look at all but the type of the result."""
        for part in (node.args, *node.decorator_list, *node.body):
            self.visit(part)


def mutants(path: Path, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    visitor = _Expressions()
    visitor.visit(ast.parse(source))
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in visitor.found:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        for changed in changes(node):
            text = f"({ast.unparse(changed)})" if not isinstance(changed, ast.Constant) else ast.unparse(changed)
            whole = encoded[:begin] + text.encode() + encoded[end:]
            found.append(Mutant(path, node.lineno, ast.unparse(node), ast.unparse(changed), whole.decode()))
    return sorted(found, key=lambda mutant: mutant.line)


def drawn(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Some mutants, at most one of a line, each line as likely as any other; in the order of the files."""
    by_line: dict[tuple[Path, int], list[Mutant]] = {}
    for mutant in every:
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    random_ = random.Random(seed)
    lines = random_.sample(sorted(by_line), min(count, len(by_line)))
    return [random_.choice(by_line[line]) for line in sorted(lines)]


def _sources(package: str) -> list[Path]:
    """The files of a package of the planner, a top-level folder, or a module, from the root of the tree."""
    for folder in (ROOT / "planner" / package, ROOT / package):
        if folder.is_dir():
            return [path.relative_to(ROOT) for path in sorted(folder.rglob("*.py"))]
    return [Path("planner") / f"{package}.py"]


def _tests(package: str) -> str:
    """The tests of a package."""
    return f"tests/{package}" if (ROOT / "tests" / package).is_dir() else f"tests/test_{package}.py"


class Tree:
    """A copy of the tree in which files are changed and tests are run."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self.folder, self._tests = folder, tests
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def run(self, limit_s: float | None) -> int | None:
        """Exit status of the tests, which stop at the first failure; None if they take longer than the limit."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("SHARDPLAN_SHARED", str(ROOT.parent / "shared"))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *self._tests]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        return done.returncode

    def survives(self, mutant: Mutant, limit_s: float) -> bool:
        """True if the tests pass all the same."""
        path = self.folder / mutant.path
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.source, encoding="utf-8")
        try:
            return self.run(limit_s) == 0
        finally:
            path.write_text(before, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Try the mutants, and print those that survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("package", help="a folder of planner/ with tests of its own, cli, models, or a module")
    parser.add_argument("--count", type=int, default=20, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at", metavar="FILE:LINE", action="append", help="try every change of this line instead")
    parser.add_argument("--tests", nargs="+", help="run these tests instead of the package's own")
    given = parser.parse_args(arguments)
    paths = _sources(given.package)
    every = [m for path in paths for m in mutants(path, (ROOT / path).read_text(encoding="utf-8"))]
    named = [m for m in every if f"{m.path}:{m.line}" in (given.at or ())]
    chosen = named if given.at else drawn(every, given.count, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), given.tests or [_tests(given.package)])
        begin = time.monotonic()
        if (status := tree.run(None)) != 0:
            sys.stdout.write(f"the tests fail without any change (status {status})\n")
            return 1
        limit_s = 3 * (time.monotonic() - begin) + 30
        survivors = []
        for number, mutant in enumerate(chosen, start=1):
            survives = tree.survives(mutant, limit_s)
            survivors += [mutant] * survives
            sys.stdout.write(f"{number}/{len(chosen)} {'SURVIVES' if survives else 'caught'} {mutant}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} caught; {len(every)} changes are possible\n")
    sys.stdout.write("".join(f"survivor: {mutant}\n" for mutant in survivors))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
