"""Which operators of the standard have no rule, by name: the list may only change knowingly."""

from __future__ import annotations

import onnx.defs

from planner.operators import RULES, Origin, spec
from tests.operators.calls import call

FALLBACK = {
    "If", "Loop", "Scan", "SequenceMap",  # control flow is inlined before it is described
    "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",  # host work
}  # fmt: skip

NEWER = {"FlexAttention"}
"""Added after operator set 24 and not described yet."""


def _standard(newest: int) -> set[str]:
    return {s.name for s in onnx.defs.get_all_schemas() if not s.domain and s.since_version <= newest}


def test_every_standard_operator_has_a_rule_or_is_listed() -> None:
    missing = {name for name in _standard(10**6) if RULES.find(name) is None}
    assert missing - NEWER == FALLBACK & _standard(10**6)


def test_operator_sets_9_to_24_are_covered() -> None:
    history = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.since_version <= 24}
    assert {name for name in history if RULES.find(name) is None} == FALLBACK & history


def test_rules_name_operators_that_exist() -> None:
    history = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    ours = {name for name in RULES.names() if "." not in name}
    assert ours - history <= {
        "SimplifiedLayerNormalization",
        "BitCast",
        "CausalConvWithState",
        "SwiGLU",
        "TensorScatter",
    }


def test_what_falls_back_says_so_and_is_not_free() -> None:
    for name in sorted(FALLBACK | NEWER):
        found = spec(call(name, ["x 2 3"], ["x 2 3"]))
        assert found.origin is Origin.FALLBACK
        assert found.forward.byte_count == 48
        assert found.vector_flops == 6
