"""Operators that run on each rank by themselves, one entry a rule, on small random tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.operators.calls import call
from tests.sharding.coupled_cases import numbers
from tests.sharding.execution import Case
from tests.sharding.mesh_sim import Context

Maker = Callable[[], Case]


def _one(function: Callable[..., np.ndarray]) -> Callable[..., tuple[np.ndarray, ...]]:
    return lambda *arrays: (function(*arrays),)


def _reference(
    op: str, inputs: list[str], output: str, wanted: tuple[int, ...], *, opset: int = 20, **attributes: Any
) -> Case:
    """The standard's own evaluator in double precision; constant inputs are given as `c:int64 2=4,4`."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    types = {"int64": TensorProto.INT64, "bool": TensorProto.BOOL, "": TensorProto.DOUBLE}
    texts, arrays, constants = [], [], {}
    for p, text in enumerate(inputs):
        plain, _, given = text.partition("=")
        kind, *sizes = plain.split()
        shape = tuple(map(int, sizes))
        if given:
            dtype = bool if kind.endswith("bool") else np.int64
            arrays.append(np.array([int(v) for v in given.split(",")]).astype(dtype).reshape(shape))
            constants[p] = tuple(arrays[-1].ravel().tolist())
        else:
            arrays.append(0.5 * numbers(*shape))
        texts.append(plain)
    names = [f"in{p}" for p in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, types[t.split()[0].partition(":")[2]], None)
        for n, t in zip(names, texts, strict=True)
    ]
    node = helper.make_node(op, names, ["out"], **attributes)
    end = helper.make_tensor_value_info("out", TensorProto.DOUBLE, None)
    model = helper.make_model(
        helper.make_graph([node], op, infos, [end]), opset_imports=[helper.make_opsetid("", opset)]
    )
    evaluator = ReferenceEvaluator(model)

    def whole(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.asarray(evaluator.run(None, dict(zip(names, values, strict=True)))[0], dtype=np.float64),)

    what = call(op, texts, [output], opset=opset, constants=constants, **attributes)
    return Case(what, arrays, whole, wanted)


def _affine_grid() -> Case:
    """Places follow the result's own size, of which each rank makes its samples."""

    def function(theta: np.ndarray, size: Any) -> tuple[np.ndarray, ...]:
        y, x = np.meshgrid([-0.5, 0.5], [-0.5, 0.5], indexing="ij")
        return (np.einsum("nik,yxk->nyxi", theta, np.stack([x, y, np.ones_like(x)], axis=-1)),)

    what = call("AffineGrid", ["x 2 2 3", "c:int64 4"], ["x 2 2 2 2"])
    return Case(what, [numbers(2, 2, 3), None], function)


def _simple(
    op: str,
    inputs: list[str],
    output: str,
    function: Callable[..., np.ndarray],
    wanted: tuple[int, ...],
    **attributes: Any,
) -> Case:
    arrays = [np.abs(numbers(*map(int, text.split()[1:]))) + 0.5 for text in inputs]
    return Case(call(op, inputs, [output], **attributes), arrays, _one(function), wanted)


def _quantised(op: str, inputs: list[str | None], output: str, a: int, b: int) -> Case:
    """An inference product; scales are ones and zero points zeros."""
    values: list[np.ndarray | None] = []
    for p, text in enumerate(inputs):
        shape = [] if text is None else [int(n) for n in text.split()[1:]]
        values.append(
            None
            if text is None
            else np.arange(np.prod(shape), dtype=float).reshape(shape)
            if p in (a, b)
            else np.ones(shape)
        )
    return Case(call(op, inputs, [output]), values, lambda *arrays: (arrays[a] @ arrays[b],), ())


def _reshape(before: str, after: str) -> Case:
    target = tuple(map(int, after.split()))
    x = numbers(*map(int, before.split()))

    def local(context: Context, x: np.ndarray, shape: Any) -> tuple[np.ndarray, ...]:
        return (x.reshape(context.result_shape(0, target)),)

    what = call("Reshape", [f"x {before}", f"c:int64 {len(target)}"], [f"x {after}"])
    return Case(what, [x, None], lambda x, shape: (x.reshape(target),), local=local)


def _expand() -> Case:
    def local(context: Context, x: np.ndarray, shape: Any) -> tuple[np.ndarray, ...]:
        return (np.broadcast_to(x, context.result_shape(0, (2, 4, 2))),)

    what = call("Expand", ["x 2 1 2", "c:int64 3"], ["x 2 4 2"])
    return Case(what, [numbers(2, 1, 2), None], lambda x, s: (np.broadcast_to(x, (2, 4, 2)),), local=local)


def _mean(op: str, shape: str, out: str, axes: tuple[int, ...], **attributes: Any) -> Case:
    """A mean divides by the whole's number of elements, on every rank."""
    count = np.prod([int(shape.split()[a]) for a in axes])
    x = numbers(*map(int, shape.split()))
    function = _one(lambda x, *rest: x.sum(axes, keepdims=True) / count)
    inputs = [f"x {shape}"] if op == "GlobalAveragePool" else [f"x {shape}", f"c:int64 {len(axes)}"]
    what = call(op, inputs, [f"x {out}"], constants={1: axes}, **attributes)
    return Case(what, [x, *[None] * (len(inputs) - 1)], function)


def _gather() -> Case:
    ids = np.array([[0, 3], [1, 1]])

    def local(context: Context, table: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = list(context.held(0, 0))
        place = np.array([[rows.index(i) if i in rows else -1 for i in line] for line in ids.tolist()])
        return (np.where(place[..., None] >= 0, table[np.maximum(place, 0)], 0.0),)

    what = call("Gather", ["w 4 2", "i:int64 2 2"], ["x 2 2 2"])
    return Case(what, [numbers(4, 2), ids], lambda t, i: (t[i],), local=local)


def _gather_elements() -> Case:
    ids = np.array([[0, 3], [2, 2], [1, 0], [3, 1]])

    def local(context: Context, table: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        columns = list(context.held(0, 1))
        place = np.array([[columns.index(i) if i in columns else -1 for i in line] for line in ids.tolist()])
        return (np.where(place >= 0, np.take_along_axis(table, np.maximum(place, 0), 1), 0.0),)

    what = call("GatherElements", ["x 4 4", "i:int64 4 2"], ["x 4 2"], axis=1)
    return Case(what, [numbers(4, 4), ids], lambda t, i: (np.take_along_axis(t, i, 1),), local=local)


def _gather_nd() -> Case:
    ids = np.array([[0, 1], [1, 3], [1, 0], [0, 1]])

    def local(context: Context, table: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        rows, columns = list(context.held(0, 0)), list(context.held(0, 1))
        zero = np.zeros(table.shape[2:])
        picked = [
            table[rows.index(i), columns.index(j)] if i in rows and j in columns else zero for i, j in ids.tolist()
        ]
        return (np.stack(picked),)

    what = call("GatherND", ["x 2 4 2", "i:int64 4 2"], ["x 4 2"])
    return Case(what, [numbers(2, 4, 2), ids], lambda t, i: (t[i[:, 0], i[:, 1]],), local=local)


def _scatter_nd() -> Case:
    ids = np.array([[1], [3]])

    def whole(data: np.ndarray, ids: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, ...]:
        result = np.array(data)
        result[ids[:, 0]] = updates
        return (result,)

    def local(context: Context, data: np.ndarray, ids: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, ...]:
        result, rows = np.array(data), list(context.held(0, 0))
        for i, update in zip(ids[:, 0].tolist(), updates, strict=True):
            if i in rows:
                result[rows.index(i)] = update
        return (result,)

    what = call("ScatterND", ["x 4 2", "i:int64 2 1", "x 2 2"], ["x 4 2"])
    return Case(what, [numbers(4, 2), ids, numbers(2, 2)], whole, (0, 2), local=local)


def _scatter_elements() -> Case:
    ids = np.array([[1, 3], [0, 2]])

    def put(data: np.ndarray, columns: list[int], ids: np.ndarray, updates: np.ndarray) -> np.ndarray:
        result = np.array(data)
        for i, j in np.ndindex(*ids.shape):
            if ids[i, j] in columns:
                result[i, columns.index(ids[i, j])] = updates[i, j]
        return result

    what = call("ScatterElements", ["x 2 4", "i:int64 2 2", "x 2 2"], ["x 2 4"], axis=1)
    return Case(
        what,
        [numbers(2, 4), ids, numbers(2, 2)],
        lambda d, i, u: (put(d, list(range(4)), i, u),),
        (0, 2),
        local=lambda c, d, i, u: (put(d, list(c.held(0, 1)), i, u),),
    )


def _one_hot() -> Case:
    def local(context: Context, ids: np.ndarray, depth: Any, values: Any) -> tuple[np.ndarray, ...]:
        return ((ids[:, None] == context.held_result(0, 1, 4)[None]).astype(float),)

    ids = np.array([0, 3, 1, 1])
    what = call("OneHot", ["i:int64 4", "c:int64", "c 2"], ["x 4 4"])
    return Case(what, [ids, None, None], lambda i, d, v: (np.eye(4)[i],), (), local=local)


def _top_k() -> Case:
    def function(x: np.ndarray, k: Any) -> tuple[np.ndarray, ...]:
        order = np.argsort(-x, axis=1)[:, :2]
        return np.take_along_axis(x, order, 1), order.astype(float)

    what = call("TopK", ["x 4 4", "c:int64 1"], ["x 4 2", "x:int64 4 2"], axis=1)
    return Case(what, [numbers(4, 4), None], function, (), outputs=(0, 1))


def _experts(*, biases: bool = False, fusion: int = -1, turned: bool = False) -> Case:
    """Two of four experts a row: plain with ReLU, or gated with both halves in the first matrix."""

    def run(mine: np.ndarray, x: np.ndarray, router: np.ndarray, *given: Any) -> tuple[np.ndarray, ...]:
        first, low, second, high = (*given, None)[:4]
        if turned:
            first, second = first.swapaxes(1, 2), second.swapaxes(1, 2)
        scores = np.exp(router) / np.exp(router).sum(-1, keepdims=True)
        chosen = np.argsort(-scores, axis=1)[:, :2]
        y, flat = np.zeros(x.shape), x.reshape(-1, x.shape[-1])
        rows = y.reshape(-1, x.shape[-1])
        for row, experts in enumerate(chosen.tolist()):
            for e in experts:
                if e in mine:
                    at = list(mine).index(e)
                    inner = first[at] @ flat[row] + (low[at] if biases else 0)
                    half = len(inner) // 2
                    gate, up = (inner[::2], inner[1::2]) if fusion == 1 else (inner[:half], inner[half:])
                    made = np.maximum(inner, 0) if fusion < 0 else gate / (1 + np.exp(-gate)) * up
                    rows[row] += scores[row, e] * (second[at] @ made + (high[at] if biases else 0))
        return (y,)

    wide = 4 if fusion < 0 else 8
    matrices = ("w 4 2 8" if fusion >= 0 else "w 4 2 4", "w 4 4 2") if turned else (f"w 4 {wide} 2", "w 4 2 4")
    inputs: list[str | None] = ["x 2 2 2", "x 4 4", matrices[0], None, matrices[1]]
    if biases:
        inputs = [*inputs[:3], f"w 4 {wide}", matrices[1], "w 4 2"]
    what = call("com.microsoft.MoE", inputs, ["x 2 2 2"], k=2, **({"swiglu_fusion": fusion} if fusion >= 0 else {}))
    arrays = [None if text is None else numbers(*map(int, text.split()[1:])) for text in inputs]
    wanted = tuple(p for p, text in enumerate(inputs) if text is not None)
    return Case(
        what, arrays, lambda *a: run(np.arange(4), *a), wanted, local=lambda c, *a: run(c.held(2, 0), *a)
    )  # fmt: skip


def _lstm() -> Case:
    def function(x: np.ndarray, w: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, ...]:
        hidden, results = r.shape[2], []
        for d in range(w.shape[0]):
            h = c = np.zeros((x.shape[1], hidden))
            steps = []
            for t in range(x.shape[0]):
                gates = (x[t] @ w[d].T + h @ r[d].T).reshape(-1, 4, hidden)
                i, o, f = (1 / (1 + np.exp(-gates[:, k])) for k in range(3))
                c = f * c + i * np.tanh(gates[:, 3])
                h = o * np.tanh(c)
                steps.append(h)
            results.append(np.stack(steps))
        return (np.stack(results, axis=1),)

    what = call("LSTM", ["x 2 2 2", "w 2 8 2", "w 2 8 2"], ["x 2 2 2 2"], hidden_size=2, direction="bidirectional")
    return Case(what, [numbers(2, 2, 2), numbers(2, 8, 2), numbers(2, 8, 2)], function, (0, 1, 2))


def _likelihood() -> Case:
    ids = np.array([0, 3, 1, 2])

    def run(x: np.ndarray, ids: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.asarray(-np.where(ids[:, None] == classes[None], x, 0).sum() / 4),)

    what = call("NegativeLogLikelihoodLoss", ["x 4 4", "i:int64 4"], ["x"])
    return Case(
        what, [numbers(4, 4), ids], lambda x, i: run(x, i, np.arange(4)), local=lambda c, x, i: run(x, i, c.held(0, 1))
    )


def _rotary() -> Case:
    def function(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, ...]:
        half = x.shape[-1] // 2
        a, b, c, s = x[..., :half], x[..., half:], cos[:, None], sin[:, None]
        return (np.concatenate([a * c - b * s, b * c + a * s], axis=-1),)

    what = call("RotaryEmbedding", ["x 2 2 4 4", "c 2 4 2", "c 2 4 2"], ["x 2 2 4 4"])
    return Case(what, [numbers(2, 2, 4, 4), numbers(2, 4, 2), numbers(2, 4, 2)], function)


def _multi_head(op: str) -> Case:
    """Query, key and value of rank 3, two heads a group where heads are grouped."""
    groups = {"com.microsoft.MultiHeadAttention": 4}.get(op, 2)

    def function(q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: Any) -> np.ndarray:
        split = lambda x: x.reshape(*x.shape[:2], -1, 1).transpose(0, 2, 1, 3)  # noqa: E731
        q, k, v = split(q), split(k), split(v)
        return q, k, v

    def run(context: Context | None, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        heads = np.arange(4) if context is None else context.held(0, 2)
        owned = list(np.arange(groups) if context is None else context.held(1, 2))
        of = [owned.index(h // (4 // groups)) for h in heads]
        q, k, v = function(q, k, v)
        scores = q @ k[:, of].transpose(0, 1, 3, 2)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = (p / p.sum(-1, keepdims=True)) @ v[:, of]
        return (y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1),)

    attributes = {"num_heads": 4} if op.startswith("com") else {"q_num_heads": 4, "kv_num_heads": groups}
    if op.endswith("GroupQueryAttention"):
        attributes["kv_num_heads"] = groups
    what = call(op, ["x 2 3 4", f"x 2 3 {groups}", f"x 2 3 {groups}"], ["x 2 3 4"], **attributes)
    arrays = [numbers(2, 3, 4), numbers(2, 3, groups), numbers(2, 3, groups)]
    return Case(what, arrays, lambda *a: run(None, *a), (0, 1, 2), local=run)


def _heads(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention over [batch, steps, heads, width]."""
    scores = np.einsum("bsgd,btgd->bgst", q, k)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bgst,btgd->bsgd", p / p.sum(-1, keepdims=True), v)
    return y.reshape(*y.shape[:2], -1)


def _side_by_side(op: str, inputs: list[str | None], **attributes: Any) -> Case:
    """Query, key and value of two heads of width two side by side; queries may be fewer than keys."""

    def run(context: Context | None, x: np.ndarray, *rest: Any) -> tuple[np.ndarray, ...]:
        given = x
        if op.endswith("Attention") and rest:
            given = x @ rest[0] + rest[1]
        q, k, v = np.moveaxis(given.reshape(*x.shape[:2], 3, -1, 2), 2, 0)
        rows = np.arange(x.shape[1]) if context is None else context.held_result(0, 1, x.shape[1])
        return (_heads(q[:, rows], k, v),)

    arrays = [numbers(*map(int, text.split()[1:])) for text in inputs if text]
    what = call(op, inputs, ["x 2 4 4"], **attributes)
    return Case(what, arrays, lambda *a: run(None, *a), tuple(range(len(arrays))), local=run)


def _biased_heads() -> Case:
    """Biases of query, key and value lie side by side, the operands do not."""

    def run(context: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = bias.reshape(3, 1, 1, -1)
        q, k, v = (x + b for x, b in zip((q, k, v), parts, strict=True))
        return (_heads(*(x.reshape(*x.shape[:2], -1, 2) for x in (q, k, v))),)

    texts = ["x 2 2 4", "x 2 4 4", "x 2 4 4", "w 12"]
    what = call("com.microsoft.MultiHeadAttention", texts, ["x 2 2 4"], num_heads=2)
    arrays = [numbers(*map(int, text.split()[1:])) for text in texts]
    return Case(what, arrays, lambda *a: run(None, *a), (0, 1, 2, 3), local=run)


def _rotary_heads() -> Case:
    """Heads side by side in the last dimension, tables by position."""
    ids = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])

    def function(x: np.ndarray, ids: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = x.reshape(*x.shape[:2], -1, 2, 2)
        a, b, c, s = parts[..., 0, :], parts[..., 1, :], cos[ids][:, :, None], sin[ids][:, :, None]
        return (np.stack([a * c - b * s, b * c + a * s], axis=-2).reshape(x.shape),)

    texts = ["x 2 4 8", "i:int64 2 4", "c 8 2", "c 8 2"]
    what = call("com.microsoft.RotaryEmbedding", texts, ["x 2 4 8"])
    return Case(what, [numbers(2, 4, 8), ids, numbers(8, 2), numbers(8, 2)], function)


def _conv_transpose() -> Case:
    def function(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
        y = np.zeros((x.shape[0], w.shape[1], x.shape[2] + w.shape[2] - 1))
        for r in range(w.shape[2]):
            y[:, :, r : r + x.shape[2]] += np.einsum("nct,ck->nkt", x, w[:, :, r])
        return (y,)

    what = call("ConvTranspose", ["x 2 2 3", "w 2 2 2"], ["x 2 2 4"])
    return Case(what, [numbers(2, 2, 3), numbers(2, 2, 2)], function, (0, 1))


def _window_free(op: str, before: str, after: str, function: Callable[..., np.ndarray], **attributes: Any) -> Case:
    return _simple(op, [f"x {before}"], f"x {after}", function, (0,), **attributes)


def _split(parts: int = 2) -> Case:
    x = numbers(2, 8)
    what = call("Split", ["x 2 8"], ["x 2 4", "x 2 4"], axis=1)
    return Case(what, [x], lambda x: tuple(np.split(x, parts, axis=1)), outputs=(0, 1))


def _causal_conv() -> Case:
    def function(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
        wide = np.pad(x, ((0, 0), (0, 0), (1, 0)))
        return (wide[:, :, :-1] * w[None, :, 0, :1] + wide[:, :, 1:] * w[None, :, 0, 1:],)

    what = call("CausalConvWithState", ["x 2 2 3", "w 2 1 2"], ["x 2 2 3"])
    return Case(what, [numbers(2, 2, 3), numbers(2, 1, 2)], function, (0, 1))


def _state_space_scan() -> Case:
    """Four heads of width 2 in two groups, each with directions of 2."""

    def function(
        x: np.ndarray,
        b: np.ndarray,
        c: np.ndarray,
        step: np.ndarray,
        rate: np.ndarray,
        skip: np.ndarray,
        add: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        size, y = np.log1p(np.exp(step + add)), np.zeros(x.shape)
        samples, tokens, heads = step.shape
        for sample, head in np.ndindex(samples, heads):
            group, own = head * (b.shape[2] // 2) // heads, slice(2 * head, 2 * head + 2)
            of, held = slice(2 * group, 2 * group + 2), np.zeros((2, 2))
            for t in range(tokens):
                s = size[sample, t, head]
                held = np.exp(-s * np.exp(rate[head])) * held + np.outer(b[sample, t, of], s * x[sample, t, own])
                y[sample, t, own] = c[sample, t, of] @ held + skip[head] * x[sample, t, own]
        return (y,)

    texts = ["x 2 3 8", "x 2 3 4", "x 2 3 4", "x 2 3 4", "w 4", "w 4", "w 4"]
    what = call("shardplan.StateSpaceScan", texts, ["x 2 3 8"], num_heads=4, num_groups=2)
    return Case(what, [numbers(*map(int, text.split()[1:])) for text in texts], function, range(7))


def _linear_attention() -> Case:
    """Four query heads and two states, keys of 2 and values of 2, by the gated delta rule."""

    def function(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, _: None, decay: np.ndarray, rate: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        samples, tokens, states = decay.shape
        heads, y = q.shape[2] // 2, np.zeros(q.shape)
        for sample, head in np.ndindex(samples, heads):
            state, held, read = head * states // heads, np.zeros((2, 2)), slice(2 * head, 2 * head + 2)
            own = slice(2 * state, 2 * state + 2)
            for t in range(tokens):
                held = np.exp(decay[sample, t, state]) * held
                new = v[sample, t, own] - k[sample, t, own] @ held
                held = held + rate[sample, t, state] * np.outer(k[sample, t, own], new)
                y[sample, t, read] = q[sample, t, read] @ held
        return (y,)

    texts = ["x 2 3 8", "x 2 3 4", "x 2 3 4", None, "x 2 3 2", "x 2 3 2"]
    what = call("LinearAttention", texts, ["x 2 3 8"], q_num_heads=4, kv_num_heads=2)
    arrays = [None if text is None else numbers(*map(int, text.split()[1:])) for text in texts]
    return Case(what, arrays, function, (0, 1, 2, 4, 5))


def _binary(op: str, function: Callable[..., np.ndarray], inputs: tuple[str, str] = ("x 2 4", "w 4")) -> Case:
    return _simple(op, list(inputs), "x 2 4", function, (0, 1))


def _where() -> Case:
    mask = np.array([[True, False, True, True], [False, True, False, True]])
    what = call("Where", ["i:bool 2 4", "x 2 4", "x 4"], ["x 2 4"])
    return Case(what, [mask, numbers(2, 4), numbers(4)], lambda m, a, b: (np.where(m, a, b),), (1, 2))


def _einsum_sum() -> Case:
    return _simple("Einsum", ["x 2 4", "x 4"], "x 2 4", np.multiply, (0, 1), equation="ij,j->ij")


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


CASES: dict[str, Maker] = {
    "MatMul": lambda: _simple("MatMul", ["x 2 4 2", "w 2 4"], "x 2 4 4", np.matmul, (0, 1)),
    "batched MatMul": lambda: _simple("MatMul", ["x 2 2 4", "x 2 4 2"], "x 2 2 2", np.matmul, (0, 1)),
    "FusedMatMul": lambda: _simple(
        "com.microsoft.FusedMatMul", ["x 2 4", "x 2 4"], "x 2 2", lambda a, b: a @ b.T, (0, 1), transB=1
    ),
    "Gemm": lambda: _simple("Gemm", ["x 4 2", "w 2 4", "w 4"], "x 4 4", lambda a, b, c: a @ b + c, (0, 1, 2)),
    "GemmFastGelu": lambda: _simple(
        "com.microsoft.FusedGemm", ["x 4 2", "w 2 4", "w 4"], "x 4 4", lambda a, b, c: a @ b + c, (0, 1, 2)
    ),
    "Einsum": lambda: _simple(
        "Einsum",
        ["x 2 2 2 2", "x 2 4 2 2"],
        "x 2 2 2 4",
        lambda a, b: np.einsum("bshd,bthd->bhst", a, b),
        (0, 1),
        equation="bshd,bthd->bhst",
    ),
    "Einsum without sum": _einsum_sum,
    "MatMulInteger": lambda: _quantised("MatMulInteger", ["x:int8 2 4", "w:int8 4 2"], "x:int32 2 2", 0, 1),
    "QLinearMatMul": lambda: _quantised(
        "QLinearMatMul",
        ["x:uint8 2 4", "c", "c:uint8", "w:int8 4 2", "c", "c:int8", "c", "c:uint8"],
        "x:uint8 2 2",
        0,
        3,
    ),
    "ConvTranspose": _conv_transpose,
    "CausalConvWithState": _causal_conv,
    "StateSpaceScan": _state_space_scan,
    "LinearAttention": _linear_attention,
    "Gelu": lambda: _window_free("Gelu", "2 4", "2 4", _gelu),
    "Sign": lambda: Case(call("Sign", ["x 2 4"], ["x 2 4"]), [numbers(2, 4)], _one(np.sign), ()),
    "Greater": lambda: Case(
        call("Greater", ["x 2 4", "x 4"], ["x:bool 2 4"]),
        [numbers(2, 4), numbers(4)],
        _one(lambda a, b: (a > b).astype(float)),
        (),
    ),
    "Add": lambda: _binary("Add", np.add),
    "Sub": lambda: _binary("Sub", np.subtract),
    "Mul": lambda: _binary("Mul", np.multiply),
    "Div": lambda: _binary("Div", np.divide),
    "Pow": lambda: _binary("Pow", np.power),
    "Mod": lambda: _binary("Mod", np.fmod, ("x 2 4", "x 2 4")),
    "Max": lambda: _binary("Max", np.maximum),
    "PRelu": lambda: _binary("PRelu", lambda x, s: np.where(x > 0.9, x, s * (x - 0.9))),
    "BiasGelu": lambda: _binary("com.microsoft.BiasGelu", lambda x, b: _gelu(x + b)),
    "SwiGLU": lambda: _simple("SwiGLU", ["x 2 4", "x 2 4"], "x 2 4", lambda a, b: a / (1 + np.exp(-a)) * b, (0, 1)),
    "Where": _where,
    "Dropout that keeps all": lambda: Case(
        call("Dropout", ["x 2 4", "c"], ["x 2 4"], constants={1: (0.0,)}), [numbers(2, 4), None], lambda x, r: (x,)
    ),
    "BiasDropout that keeps all": lambda: _binary("com.microsoft.BiasDropout", lambda x, b: x + b),
    "ReduceSum": lambda: _mean("ReduceMean", "4 2 2", "4 1 1", (1, 2), opset=18),
    "GlobalAveragePool": lambda: _mean("GlobalAveragePool", "2 2 2 4", "2 2 1 1", (2, 3)),
    "ArgMax": lambda: Case(
        call("ArgMax", ["x 4 2"], ["x:int64 4 1"], axis=1),
        [numbers(4, 2)],
        _one(lambda x: x.argmax(1)[:, None].astype(float)),
        (),
    ),
    "CumSum": lambda: Case(
        call("CumSum", ["x 4 4", "c:int64"], ["x 4 4"], constants={1: (1,)}),
        [numbers(4, 4), None],
        lambda x, a: (np.cumsum(x, 1),),
    ),
    "Det": lambda: _window_free("Det", "4 2 2", "4", lambda x: np.linalg.det(x)),
    "NegativeLogLikelihoodLoss": _likelihood,
    "Hardmax": lambda: Case(
        call("Hardmax", ["x 4 4"], ["x 4 4"]),
        [numbers(4, 4)],
        _one(lambda x: (x == x.max(-1, keepdims=True)).astype(float)),
        (),
    ),
    "LRN": lambda: _window_free("LRN", "2 3 4", "2 3 4", lambda x: x / (1 + (x**2).sum(1, keepdims=True)), size=5),
    "GridSample": lambda: _reference("GridSample", ["x 2 2 2 2", "x 2 2 2 2"], "x 2 2 2 2", (0, 1)),
    "AffineGrid": _affine_grid,
    "Col2Im": lambda: _reference(
        "Col2Im", ["x 2 8 4", "c:int64 2=4,4", "c:int64 2=2,2"], "x 2 2 4 4", (0,), strides=(2, 2)
    ),
    "DFT": lambda: _reference("DFT", ["x 2 4 2 2"], "x 2 4 2 2", (0,), opset=17, axis=1),
    "RoiAlign": lambda: _reference(
        "RoiAlign", ["x 1 2 4 4", "c 2 4", "c:int64 2=0,0"], "x 2 2 2 2", (0,), output_height=2, output_width=2
    ),
    "Compress": lambda: _reference("Compress", ["x 2 4 2", "c:bool 4=0,1,1,0"], "x 2 2 2", (0,), axis=1),
    "DeformConv": lambda: _reference(
        "DeformConv", ["x 2 1 2 2", "w 2 1 2 2", "x 2 8 1 1", "w 2"], "x 2 2 1 1", (0, 1, 2, 3)
    ),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "Reshape, merged": lambda: _reshape("2 4 2", "8 2"),
    "Reshape, split": lambda: _reshape("4 8", "4 2 4"),
    "Identity": lambda: _window_free("Identity", "2 4", "2 4", lambda x: x),
    "Transpose": lambda: _window_free("Transpose", "2 4 2", "4 2 2", lambda x: x.transpose(1, 2, 0), perm=(1, 2, 0)),
    "Concat": lambda: _simple(
        "Concat", ["x 2 4", "x 2 4"], "x 2 8", lambda a, b: np.concatenate([a, b], 1), (0, 1), axis=1
    ),
    "uneven Concat": lambda: _simple(
        "Concat", ["x 4 1", "x 4 2"], "x 4 3", lambda a, b: np.concatenate([a, b], 1), (0, 1), axis=1
    ),
    "Split": _split,
    "Slice": lambda: _window_free("Slice", "4 4", "4 2", lambda x: x[:, 1:3]),
    "Expand": _expand,
    "Tile": lambda: _window_free("Tile", "4 2", "4 4", lambda x: np.tile(x, (1, 2))),
    "Pad": lambda: _window_free("Pad", "4 2", "4 4", lambda x: np.pad(x, ((0, 0), (1, 1)))),
    "SpaceToDepth": lambda: _window_free(
        "SpaceToDepth", "2 1 2 2", "2 4 1 1", lambda x: x.reshape(len(x), 4, 1, 1), blocksize=2
    ),
    "Resize": lambda: _window_free("Resize", "2 2 3", "2 2 6", lambda x: np.repeat(x, 2, axis=2), mode="nearest"),
    "Cast": lambda: Case(call("Cast", ["x 2 4"], ["x:float16 2 4"]), [numbers(2, 4)], lambda x: (x,)),
    "MoE, matrices turned": lambda: _experts(turned=True, biases=True),
    "MoE, gate alternating": lambda: _experts(fusion=1, biases=True),
    "MoE, gate beside": lambda: _experts(fusion=2),
    "LSTM": _lstm,
    "RotaryEmbedding": _rotary,
    "RotaryEmbedding, heads side by side": _rotary_heads,
    "projected Attention": lambda: _side_by_side("com.microsoft.Attention", ["x 2 4 4", "w 4 12", "w 12"], num_heads=2),
    "GroupQueryAttention, packed": lambda: _side_by_side(
        "com.microsoft.GroupQueryAttention", ["x 2 4 12"], num_heads=2, kv_num_heads=2
    ),
    "MultiHeadAttention with bias": _biased_heads,
    "Attention of rank 3": lambda: _multi_head("Attention"),
    "MultiHeadAttention": lambda: _multi_head("com.microsoft.MultiHeadAttention"),
    "GroupQueryAttention": lambda: _multi_head("com.microsoft.GroupQueryAttention"),
}
