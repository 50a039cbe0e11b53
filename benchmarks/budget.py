"""How large the program is: code lines without blanks, docstrings and comments, files, classes, by package and by part.

>>> code_lines('"A docstring."\\n\\n# A comment.\\nONE = (\\n    1,\\n)\\n')
3

Run as `python -m benchmarks.budget`; `make check` prints it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("planner", "cli", "models")
PARTS = {"wing": "planner/published", "runtime": "planner/runtime", "exporters": "planner/export"}
"""Parts of the program beside the core, each a package; the core is all else."""
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass
class Size:
    """Of a package.

    Attributes:
        lines: of code.
        files: Python files.
        classes: definitions of classes.
    """

    lines: int = 0
    files: int = 0
    classes: int = 0


def code_lines(source: str) -> int:
    """Lines that hold code: no blanks, no comments, no text that stands for itself."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def sizes(root: Path) -> dict[str, Size]:
    """By package: folders of `planner` by themselves, the other top-level folders as one each."""
    found: dict[str, Size] = defaultdict(Size)
    for path in sorted(p for top in ROOTS for p in (root / top).rglob("*.py")):
        parts = path.relative_to(root).parts
        size, source = found["/".join(parts[:2]) if len(parts) > 2 else parts[0]], path.read_text(encoding="utf-8")
        size.lines += code_lines(source)
        size.files += 1
        size.classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))
    return dict(sorted(found.items()))


def total(found: Iterable[Size]) -> Size:
    """Sums over packages."""
    each = list(found)
    return Size(sum(s.lines for s in each), sum(s.files for s in each), sum(s.classes for s in each))


def by_part(found: Mapping[str, Size]) -> dict[str, Size]:
    """By part of the program, the core first: the sum of its packages."""
    core = total(size for package, size in found.items() if package not in PARTS.values())
    return {"core": core, **{part: found[package] for part, package in PARTS.items()}}


def main() -> None:
    """Print the tables, and how many names the front door has."""
    import planner

    found = sizes(Path(__file__).parents[1])
    print(f"{'package':<22}{'code lines':>11}{'files':>7}{'classes':>9}")
    for name, size in (*found.items(), *by_part(found).items(), ("all", total(found.values()))):
        print(f"{name:<22}{size.lines:>11,}{size.files:>7}{size.classes:>9}")
    print(f"names at the front door: {len(planner.__all__)}")


if __name__ == "__main__":
    main()
