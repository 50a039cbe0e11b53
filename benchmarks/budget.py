"""How large the program is: code lines without blanks, docstrings and comments, files, classes, by package.

>>> code_lines('"A docstring."\\n\\n# A comment.\\nONE = (\\n    1,\\n)\\n')
3

Run as `python -m benchmarks.budget`; `make check` prints it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("planner", "cli", "models")
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


def main() -> None:
    """Print the table, and how many names the front door has."""
    import planner

    found = sizes(Path(__file__).parents[1])
    total = Size(*(sum(int(getattr(s, name)) for s in found.values()) for name in ("lines", "files", "classes")))
    print(f"{'package':<22}{'code lines':>11}{'files':>7}{'classes':>9}")
    for package, size in (*found.items(), ("all", total)):
        print(f"{package:<22}{size.lines:>11,}{size.files:>7}{size.classes:>9}")
    print(f"names at the front door: {len(planner.__all__)}")


if __name__ == "__main__":
    main()
