"""Repeated blocks written once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans import Block, BlockParameter, BlockRun, compress, expand

names = st.text(alphabet="ab.01{}i+", max_size=6)
parameters = st.builds(
    BlockParameter, names, st.tuples(st.integers(1, 3)), st.just("float32"), names, names, st.booleans()
)
blocks = st.builds(Block, names, st.lists(names, max_size=3).map(tuple), st.lists(parameters, max_size=2).map(tuple))


def layer(i: int, node: int) -> Block:
    weight = BlockParameter(f"w{i}", (2, 2), "float32", f"layers.{i}.weight", f"layers.{i}")
    return Block(f"layers.{i}", (f"mm_{node}", f"add_{node + 3}"), (weight,))


def test_layers_that_differ_in_numbers_become_a_template() -> None:
    table = [Block("embed", ("e",), ()), *(layer(i, 10 + 7 * i) for i in range(5)), Block("head", ("y",), ())]
    runs = compress(table)
    weight = BlockParameter("w{0+1i}", (2, 2), "float32", "layers.{0+1i}.weight", "layers.{0+1i}")
    assert runs == (
        BlockRun(1, (Block("embed", ("e",), ()),)),
        BlockRun(5, (Block("layers.{0+1i}", ("mm_{10+7i}", "add_{13+7i}"), (weight,)),)),
        BlockRun(1, (Block("head", ("y",), ()),)),
    )
    assert list(expand(runs)) == table


def test_two_blocks_a_layer_repeat_together() -> None:
    table = [Block(f"l.{i}.{part}", (f"{part}{i}",), ()) for i in range(3) for part in ("attn", "mlp")]
    (run,) = compress(table)
    assert run.repeat == 3
    assert [b.name for b in run.blocks] == ["l.{0+1i}.attn", "l.{0+1i}.mlp"]


def test_a_step_that_changes_ends_the_template() -> None:
    table = [layer(0, 10), layer(1, 20), layer(2, 30), layer(3, 41)]
    runs = compress(table)
    assert [run.repeat for run in runs] == [3, 1]
    assert list(expand(runs)) == table


def test_names_with_braces_and_leading_zeros_are_left_alone() -> None:
    braces = [Block(f"b{i}", (f"x{{0+1i}}{i}",), ()) for i in range(3)]
    zeros = [Block(f"b{i}", (f"x00{i}",), ()) for i in range(3)]
    assert list(expand(compress(braces))) == braces
    assert list(expand(compress(zeros))) == zeros


@given(st.lists(blocks, max_size=8), st.integers(0, 4))
@settings(deadline=None, max_examples=200)
def test_any_table_comes_back(table: list[Block], times: int) -> None:
    table = table + [layer(i, 3 * i) for i in range(times)] + table
    assert list(expand(compress(table))) == table
