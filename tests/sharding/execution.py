"""Runs every strategy of an operator on a simulated mesh and compares with the operator run whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.operators import OpCall, spec
from planner.sharding import Options, Reason, Strategy, ideal_mesh, strategies
from tests.sharding.mesh_sim import Context, Log, Program, coordinates, join, local_program, pullback, run, scatter

Whole = Callable[..., tuple[np.ndarray, ...]]
Local = Callable[..., tuple[np.ndarray, ...]]
Spmd = Callable[..., Program]

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


class Case:
    """One operator call with values, how to run it whole, and how a rank runs its piece.

    Args:
        call: the operator and its tensors.
        inputs: values by position.
        whole: the operator, arrays in and a tuple of arrays out.
        wanted: positions of the inputs whose gradients are checked.
        local: the same on pieces, given a `Context` first; by default the operator itself.
        forward: a program with exchanges, given the context and the pieces; returns outputs and what it keeps.
        backward: its backward program, given context, pieces, what was kept and the outputs' gradients.
        outputs: positions of the outputs that `whole` returns.
    """

    def __init__(
        self,
        call: OpCall,
        inputs: Sequence[np.ndarray | None],
        whole: Whole,
        wanted: Sequence[int] = (0,),
        *,
        local: Local | None = None,
        forward: Spmd | None = None,
        backward: Spmd | None = None,
        outputs: Sequence[int] = (0,),
    ) -> None:
        self.call, self.inputs, self.whole, self.wanted = call, list(inputs), whole, tuple(wanted)
        self.local = local or (lambda context, *arrays: whole(*arrays))
        self.forward, self.backward, self.outputs = forward, backward, tuple(outputs)


def check(case: Case, sizes: Sequence[int] = (2,), options: Options | None = None) -> set[tuple[str, ...]]:
    """Run all strategies; returns the names of the dimensions cut."""
    what = spec(case.call)
    results = case.whole(*case.inputs)
    random = np.random.default_rng(5)
    gradients = [random.normal(size=np.shape(y)) for y in results]
    expected = pullback(case.whole, case.inputs, case.wanted, gradients)
    done = set()
    for strategy in strategies(case.call, what, ideal_mesh(list(sizes)), 4.0, options):
        _check_one(case, strategy, sizes, results, gradients, expected)
        done.add(strategy.splits)
    return done


def _context(case: Case, strategy: Strategy, sizes: Sequence[int], at: tuple[int, ...]) -> Context:
    shapes = {p: np.shape(a) for p, a in enumerate(case.inputs) if a is not None}
    axes = tuple(sorted({e.axis for e in strategy.exchanges}))
    return Context(tuple(sizes), at, strategy.splits, axes, dict(strategy.reads), dict(strategy.writes), shapes)


def _check_one(
    case: Case, strategy: Strategy, sizes: Sequence[int], results: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray], expected: dict[int, np.ndarray],
) -> None:  # fmt: skip
    whole_layout = dict(strategy.reads)
    everywhere = tuple(next(iter(whole_layout.values()))) if whole_layout else ()
    assert len(everywhere) in (0, len(sizes))
    pieces = {
        p: scatter(a, whole_layout[p], sizes) if p in whole_layout else dict.fromkeys(coordinates(sizes), a)
        for p, a in enumerate(case.inputs)
        if a is not None
    }
    grad_pieces = {
        p: scatter(g, dict(strategy.write_gradients)[p], sizes) for p, g in zip(case.outputs, gradients, strict=True)
    }
    contexts = {at: _context(case, strategy, sizes, at) for at in coordinates(sizes)}
    locals_ = {at: [pieces[p][at] if p in pieces else None for p in range(len(case.inputs))] for at in contexts}
    outs, kept, log = _forward(case, strategy, contexts, locals_, sizes)
    label = str(strategy)
    for k, p in enumerate(case.outputs):
        layout = dict(strategy.writes)[p]
        joined = join({at: outs[at][k] for at in outs}, layout, sizes, np.shape(results[k]))
        np.testing.assert_allclose(joined, results[k], err_msg=f"{label}: output {p}", **TOLERANCE)
    back, back_log = _backward(case, strategy, contexts, locals_, kept, grad_pieces, sizes)
    for p in case.wanted:
        layout = dict(strategy.read_gradients)[p]
        joined = join({at: back[at][p] for at in back}, layout, sizes, np.shape(case.inputs[p]))
        np.testing.assert_allclose(joined, expected[p], err_msg=f"{label}: gradient {p}", **TOLERANCE)
    _check_exchanges(strategy, log, False)
    if case.wanted:
        _check_exchanges(strategy, back_log, True)


def _forward(case: Case, strategy: Strategy, contexts: dict, pieces: dict, sizes: Sequence[int]) -> tuple:
    if case.forward is None:
        assert not strategy.exchanges, f"{strategy} exchanges data, but its program is not written"
        return {at: case.local(contexts[at], *pieces[at]) for at in contexts}, {}, Log()
    programs = {at: case.forward(contexts[at], *pieces[at]) for at in contexts}
    results, log = run(programs, sizes, next(iter(contexts.values())).axes)
    return {at: r[0] for at, r in results.items()}, {at: r[1] for at, r in results.items()}, log


def _backward(
    case: Case, strategy: Strategy, contexts: dict, pieces: dict, kept: dict, gradients: dict, sizes: Sequence[int]
) -> tuple[dict, Log]:
    def given(at: tuple[int, ...]) -> list[np.ndarray]:
        return [gradients[p][at] for p in case.outputs]

    if case.backward is None:
        return {
            at: pullback(_bound(case.local, contexts[at]), pieces[at], case.wanted, given(at)) for at in contexts
        }, Log()
    programs = {at: case.backward(contexts[at], *pieces[at], kept[at], *given(at)) for at in contexts}
    return run(programs, sizes, next(iter(contexts.values())).axes)


def _bound(function: Callable[..., Any], context: Context) -> Callable[..., Any]:
    return lambda *arrays: function(context, *arrays)


def _check_exchanges(strategy: Strategy, log: Log, backward: bool) -> None:
    """What the program exchanged is what the strategy declares: bytes by axis, and for statistics how often."""
    declared = [e for e in strategy.exchanges if e.backward is backward]
    for axis in {e.axis for e in strategy.exchanges} | {a for a, _ in log.seen}:
        here = [e for e in declared if e.axis == axis]
        total = sum(e.payload_bytes * e.times for e in here)
        seen = [n for a, n in log.seen if a == axis]
        assert total == 4.0 * sum(seen), f"{strategy}: declared {here}, sent {seen} elements"
        if any(e.reason is Reason.STATISTICS for e in here):
            assert sum(e.times for e in here) == len(seen), f"{strategy}: declared {here}, sent {seen}"


__all__ = ["Case", "check", "local_program"]
