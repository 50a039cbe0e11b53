"""Two versions of a model whose names differ: blocks are matched by what they compute, and names are told in a line."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.graph import Graph, build_chain
from planner.plans import Plan, compare_plans, dumps, gates, loads, seal
from planner.plans.model import blocks_as_said, compress
from planner.report import diff_report, report_to_text
from tests.cli.plan_files import run
from tests.graph import make_graph
from tests.plans.sample import decision, make_plan
from tests.shared_data import shared_path

Rename = Callable[[str], str]


def language_model(layers: int = 4, *, activation: str = "Gelu", special: int = -1, stack: str = "layers") -> Graph:
    """An embedding, layers of attention and MLP, and a head; one layer may have another activation."""
    lines = ["[model.embed_tokens] model.embed_tokens.gather = Gather(w:model.embed_tokens, input_ids)"]
    last = "model.embed_tokens.gather"
    for i in range(layers):
        at, op = f"model.{stack}.{i}", activation if i == special else "Gelu"
        lines += [
            f"[{at}.self_attn] {at}.self_attn.matmul = MatMul({last}, w:{at}.self_attn.q_proj)",
            f"[{at}.self_attn] {at}.add = Add({last}, {at}.self_attn.matmul)",
            f"[{at}.mlp] {at}.mlp.up = MatMul({at}.add, w:{at}.mlp.up_proj)",
            f"[{at}.mlp] {at}.mlp.act = {op}({at}.mlp.up)",
            f"[{at}.mlp] {at}.mlp.down = MatMul({at}.mlp.act, w:{at}.mlp.down_proj)",
            f"[{at}] {at}.out = Add({at}.add, {at}.mlp.down)",
        ]
        last = f"{at}.out"
    lines.append(f"[lm_head] lm_head.matmul = MatMul({last}, w:lm_head)")
    graph = make_graph(lines, inputs=("input_ids",))
    return renamed(graph, lambda name: f"{name[2:]}.weight" if name.startswith("w:") else name)


def renamed(graph: Graph, change: Rename, modules: Rename | None = None) -> Graph:
    """The graph with every name in it changed; paths of modules otherwise where that is said."""
    modules = modules or change
    nodes = tuple(
        dataclasses.replace(
            node,
            key=change(node.key),
            inputs=tuple(map(change, node.inputs)),
            outputs=tuple(map(change, node.outputs)),
            module=modules(node.module),
        )
        for node in graph.nodes
    )
    parameters = tuple(
        dataclasses.replace(p, name=change(p.name), label=change(p.label), module=modules(p.module))
        for p in graph.parameters
    )
    return dataclasses.replace(
        graph,
        name="toy",
        fingerprint=hashlib.sha256(repr((nodes, parameters)).encode()).hexdigest(),
        nodes=nodes,
        tensors={change(t.name): dataclasses.replace(t, name=change(t.name)) for t in graph.tensors.values()},
        inputs=tuple(map(change, graph.inputs)),
        outputs=tuple(map(change, graph.outputs)),
        parameters=parameters,
        sources={change(name): tuple(map(change, found)) for name, found in graph.sources.items()},
        batch=1,
        opset=17,
    )


def planned(graph: Graph, stages: int = 2) -> Plan:
    """A plan of so many stages; the last one takes what the others leave."""
    blocks = len(planned_blocks(graph))
    return make_plan(graph, decision((1,) * stages, tuple(range(0, 2 * stages, 2)), blocks), alternatives=())


def planned_blocks(graph: Graph) -> tuple[str, ...]:
    """Names of the graph's blocks."""
    return tuple(block.name for block in build_chain(graph).blocks)


def substitution(pattern: str, replacement: str) -> Rename:
    return lambda name: re.sub(pattern, replacement, name)


def of_onnx(name: str) -> str:
    """The names of another exporter, with slashes."""
    return f"/{name.replace('.', '/')}" if name.count(".") > 1 else name


RENAMES: dict[str, tuple[Rename, tuple[str, ...]]] = {
    "a module around layers": (
        substitution(r"^model\.", "model.language_model."), ("model.* -> model.language_model.*",)),
    "a prefix of torch.compile": (
        lambda name: f"_orig_mod.{name}" if "." in name else name, ("* -> _orig_mod.*",)),
    "a prefix of DDP": (lambda name: f"module.{name}" if "." in name else name, ("* -> module.*",)),
    "a prefix dropped": (substitution(r"^model\.", ""), ("model.* -> *",)),
    "a module inside layers": (substitution("self_attn", "attention"), ("*.self_attn.* -> *.attention.*",)),
    "layers under another name": (
        substitution(r"model\.layers", "model.blocks"), ("model.layers.* -> model.blocks.*",)),
    "layers numbered from 1": (
        lambda name: re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 1}", name),
        ("model.layers.0-3 -> model.layers.1-4",)),
    "two at once": (
        lambda name: name.replace("self_attn", "attention").replace("mlp", "feed_forward"),
        ("*.mlp.* -> *.feed_forward.*", "*.self_attn.* -> *.attention.*")),
    "inside and outside": (
        lambda name: re.sub(r"^model\.", "model.text.", name).replace("self_attn", "attention"),
        ("model.* -> model.text.*", "*.self_attn.* -> *.attention.*")),
    "an input": (substitution("^input_ids$", "tokens"), ("input_ids -> tokens",)),
    "an output": (substitution(r"^lm_head\.matmul$", "logits"), ("lm_head.matmul -> logits",)),
    "weights": (substitution(r"\.weight$", ".kernel"), ("*.weight -> *.kernel",)),
}  # fmt: skip


@pytest.mark.parametrize(("change", "rules"), RENAMES.values(), ids=RENAMES)
@pytest.mark.parametrize("stages", [1, 2])
def test_names_alone_are_one_line(change: Rename, rules: tuple[str, ...], stages: int) -> None:
    graph = language_model()
    old, new = planned(graph, stages), planned(renamed(graph, change), stages)
    found = compare_plans(old, new)
    words = f"ames changed ({', '.join(rules)}), nothing else"
    assert found.causes == (f"n{words}",)
    assert found.decisions == ()
    assert report_to_text(diff_report(found)) == f"N{words}.\n"
    assert {(change.area, change.path) for change in found.changes} == {("model", ("fingerprint",))}
    assert not any(each.struck(found.costs, found.remarks) for each in gates(["default"]))


def test_names_of_another_exporter_are_one_line() -> None:
    graph = language_model()
    found = compare_plans(planned(graph), planned(renamed(graph, of_onnx, str)))
    assert found.only_names
    assert found.causes[0].endswith(", nothing else")


def test_names_without_any_meaning_are_one_line() -> None:
    graph = language_model()
    names: dict[str, str] = {}
    opaque = renamed(graph, lambda name: names.setdefault(name, f"n{len(names)}") if name else "")
    (cause,) = compare_plans(planned(graph), planned(opaque)).causes
    assert "other parts of names), nothing else" in cause


def told(old: Graph, new: Graph) -> str:
    found = compare_plans(planned(old), planned(new))
    assert not found.only_names
    (cause,) = found.causes
    return cause


LANGUAGE = substitution(r"^model\.", "model.language_model.")
NAMES = "names changed (model.* -> model.language_model.*)"


def test_a_layer_more_beside_a_renaming_is_one_layer_more() -> None:
    said = told(language_model(4), renamed(language_model(5), LANGUAGE))
    assert said.startswith("the model changed: 1 layer more (model.language_model.layers.4)")
    assert said.endswith(NAMES)


def test_a_layer_fewer_beside_a_renaming_is_one_layer_fewer() -> None:
    said = told(language_model(4), renamed(language_model(3), LANGUAGE))
    assert said.startswith("the model changed: 1 layer fewer (model.layers.3)")
    assert said.endswith(NAMES)


def test_other_operators_beside_a_renaming_are_told_by_block() -> None:
    said = told(language_model(), renamed(language_model(activation="Relu", special=2), LANGUAGE))
    assert said == f"the model changed: 1 block changed (model.language_model.layers.2[2/2]); {NAMES}"


def test_other_operators_under_the_same_names_are_told_by_block() -> None:
    said = told(language_model(), renamed(language_model(activation="Relu", special=2), str))
    assert said == "the model changed: 1 block changed (model.layers.2[2/2])"


def test_a_wider_layer_beside_a_renaming_is_told() -> None:
    graph = language_model()
    wide = tuple(dataclasses.replace(p, shape=(8,)) if "3.mlp.up" in p.name else p for p in graph.parameters)
    said = told(graph, renamed(dataclasses.replace(graph, parameters=wide), LANGUAGE))
    assert "1 block changed (model.language_model.layers.3[2/2])" in said
    assert said.endswith(NAMES)


def test_another_length_of_the_input_beside_a_renaming_is_told_once() -> None:
    graph = language_model()
    longer = {
        name: dataclasses.replace(t, shape=(8,)) if t.kind != "parameter" else t for name, t in graph.tensors.items()
    }
    said = told(graph, renamed(dataclasses.replace(graph, tensors=longer), LANGUAGE))
    assert "block" not in said
    assert "input_ids 4 float32 -> 8 float32" in said
    assert said.endswith(NAMES)


def test_a_layer_more_of_a_renamed_encoder_does_not_shift_the_decoder_behind_it() -> None:
    """Layers of both stacks are alike: only their names say which is which."""

    def stacks(encoder: int, decoder: int, suffix: str) -> Graph:
        graph = language_model(encoder + decoder)

        def name(old: str) -> str:
            match = re.match(r"model\.layers\.(\d+)(.*)", old)
            if not match:
                return old
            at = int(match[1])
            stack, number = ("encoder", at) if at < encoder else ("decoder", at - encoder)
            return f"{stack}{suffix}.layers.{number}{match[2]}"

        return renamed(graph, name)

    said = told(stacks(3, 3, ""), stacks(4, 3, "_stack"))
    assert said.startswith("the model changed: 1 layer more (encoder_stack.layers.3)")
    assert "encoder.* -> encoder_stack.*" in said
    assert "decoder.* -> decoder_stack.*" in said


def test_files_of_before_are_matched_too_and_claim_no_more_than_they_say() -> None:
    def of_before(plan: Plan) -> Plan:
        bare = seal(dataclasses.replace(plan, blocks=compress(blocks_as_said(plan.block_table, ()))))
        return loads(dumps(bare))

    graph = language_model()
    old, new = planned(graph), planned(renamed(graph, LANGUAGE))
    for before, after in ((of_before(old), of_before(new)), (of_before(old), new)):
        (cause,) = compare_plans(before, after).causes
        assert cause == f"the model changed: files of before do not say what operators compute; {NAMES}"
    assert compare_plans(of_before(old), old).causes == ()


def test_stages_keep_their_numbers_when_names_change() -> None:
    graph = language_model()
    old = planned(graph, 3)
    new = planned(renamed(graph, LANGUAGE), 2)
    (said, *_) = compare_plans(old, new).decisions
    assert "other blocks" not in said


@pytest.mark.parametrize(("file", "rule"), [("b", "model.* -> model.language_model.*"), ("c", "* -> module.*")])
def test_the_reported_models(file: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared_path("cases/bug-18")
    job = ("-H", "dgx-a100", "-b", "64", "--tp", "2", "--pp", "2")
    for name in ("a", file):
        assert run("predict", folder / f"{name}.onnx", *job, "-o", tmp_path / f"{name}.plan.json") == 0
    capsys.readouterr()
    assert run("diff", tmp_path / "a.plan.json", tmp_path / f"{file}.plan.json") == 1
    assert capsys.readouterr().out == f"Names changed ({rule}), nothing else.\n"
