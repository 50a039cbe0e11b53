"""An operator is one entry: what is known of it stands in the file of its rule, and in no second table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import planner
from planner.operators import RULES

ROOT = Path(planner.__file__).parent

ELSEWHERE = {
    "HANDLERS": "how the importer puts tensors in the place of sequences",
    "_HANDLERS": "which nodes of a file the importer does not take as they are",
    "_LAST": "what the last node of a function of a formula can be",
    "_FOLDS_OF_ONE": "which nodes of one input are taken out",
    "_JOINING": "what exporters compute weights with",
    "_LOSSES": "where a graph ends in a loss",
    "_LINEAR": "what a residual branch or a head ends in",
    "_HEAD_WRAPPERS": "what lies between a head and the output",
    "_FUSED": "what shows how a fused projection is divided",
    "_CARRIERS": "what hands that division on",
    "LOSS_OPS": "the same",
    "_COMPARISONS": "what a causal mask is made with",
    "_MASKS": "what a mask of the rows of one expert is made with",
    "_MERGES": "what joins the choices of a row in such a mask",
    "_REDUCTIONS": "what a loop that looks up a bag of embeddings ends in",
}
"""Lists of operators that are no facts about one operator, but what some shape of graph is recognised by."""


def tables() -> Iterator[tuple[str, set[str]]]:
    """Module-level values outside the rules that name several operators."""
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(("operators/rules/", "operators/modules.py", "runtime/")):
            continue
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                texts = {n.value for n in ast.walk(statement.value) if isinstance(n, ast.Constant)}
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                yield ast.unparse(target), texts & set(RULES.names())


def test_no_table_of_operators_stands_beside_the_entries() -> None:
    assert {name for name, names in tables() if len(names) > 1} == ELSEWHERE.keys()


def test_an_operator_is_registered_in_one_file() -> None:
    files = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "operators" / "rules").glob("*.py"))]
    registered = [{n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)} for text in files]
    named = {op: sum(op in texts for texts in registered) for op in RULES.names()}
    assert {op for op, count in named.items() if count != 1} == set()
