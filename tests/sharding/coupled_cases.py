"""Operators whose ranks exchange data inside, forward and backward written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.operators.calls import call
from tests.sharding.execution import Case
from tests.sharding.mesh_sim import (
    AllToAll,
    Context,
    Halo,
    HaloBack,
    Program,
    Reduce,
    Shift,
    coordinates,
    held,
    pullback,
)

RNG = np.random.default_rng(17)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def _text(*shape: int) -> str:
    return " ".join(["x", *map(str, shape)])


def _drive(program: Program, combine_only: bool = True) -> Any:
    """Run a program alone: every reduction gives back its own value."""
    answer = None
    while True:
        try:
            event = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = event.value


def _alone(forward: Callable[..., Program]) -> Callable[..., tuple[np.ndarray, ...]]:
    return lambda *arrays: _drive(forward(None, *arrays))[0]


def softmax(log: bool = False) -> Case:
    def forward(context: Context, x: np.ndarray) -> Program:
        top = yield Reduce(x.max(-1, keepdims=True), np.maximum)
        total = yield Reduce(np.exp(x - top).sum(-1, keepdims=True))
        y = x - top - np.log(total) if log else np.exp(x - top) / total
        return (y,), y

    def backward(context: Context, x: np.ndarray, y: np.ndarray, g: np.ndarray) -> Program:
        inner = yield Reduce((g if log else g * y).sum(-1, keepdims=True))
        return {0: g - np.exp(y) * inner if log else y * (g - inner)}

    what = call("LogSoftmax" if log else "Softmax", ["x 4 2 4"], ["x 4 2 4"])
    return Case(what, [numbers(4, 2, 4)], _alone(forward), forward=forward, backward=backward)


def _moments(
    op: str, shape: tuple[int, ...], over: tuple[int, ...], weights: int, weight_dim: int, **attributes: Any
) -> Case:
    """Mean and deviation over some dimensions, then maybe scale and shift along one."""
    count = np.prod([shape[d] for d in over])
    align = [1] * len(shape)
    align[weight_dim] = -1
    others = tuple(d for d in range(len(shape)) if d != weight_dim)

    def forward(context: Context, x: np.ndarray, *w: np.ndarray) -> Program:
        sums = yield Reduce(np.stack([x.sum(over, keepdims=True), (x * x).sum(over, keepdims=True)]))
        mean = sums[0] / count
        deviation = np.sqrt(sums[1] / count - mean**2 + 1e-5)
        normal = (x - mean) / deviation
        y = normal * w[0].reshape(align) + w[1].reshape(align) if weights else normal
        return (y,), (normal, deviation)

    def backward(context: Context, x: np.ndarray, *rest: Any) -> Program:
        *w, (normal, deviation), g = rest
        scaled = g * w[0].reshape(align) if weights else g
        sums = yield Reduce(np.stack([scaled.sum(over, keepdims=True), (scaled * normal).sum(over, keepdims=True)]))
        found = {0: (scaled - sums[0] / count - normal * sums[1] / count) / deviation}
        if weights:
            found |= {1: (g * normal).sum(others), 2: g.sum(others)}
        return found

    extra = [f"w {shape[weight_dim]}"] * weights
    arrays = [numbers(*shape), *(numbers(shape[weight_dim]) for _ in range(weights))]
    wanted = (0, 1, 2) if weights else (0,)
    what = call(op, [_text(*shape), *extra], [_text(*shape)], **attributes)
    return Case(what, arrays, _alone(forward), wanted, forward=forward, backward=backward)


def layer_norm() -> Case:
    return _moments("LayerNormalization", (4, 2, 4), (2,), 2, 2)


def batch_norm() -> Case:
    return _moments("BatchNormalization", (4, 2, 2, 2), (0, 2, 3), 4, 1, training_mode=1)


def mean_variance_norm() -> Case:
    return _moments("MeanVarianceNormalization", (2, 4, 2, 2), (0, 2, 3), 0, 1)


def group_norm(groups: int = 2, channels: int = 4, op: str = "GroupNormalization") -> Case:
    shape = (2, channels, 4)
    each = channels // groups
    count = each * 4

    def _groups(context: Context | None) -> np.ndarray:
        index = np.arange(channels) if context is None else context.held(0, 1)
        return np.unique(index // each, return_inverse=True)[1]

    def _sum(values: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.stack([values[:, of == g].sum((1, 2)) for g in range(of.max() + 1)], axis=1)

    def forward(context: Context | None, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> Program:
        of = _groups(context)
        sums = yield Reduce(np.stack([_sum(x, of), _sum(x * x, of)]))
        mean = sums[0] / count
        deviation = np.sqrt(sums[1] / count - mean**2 + 1e-5)
        normal = (x - mean[:, of, None]) / deviation[:, of, None]
        return (normal * w[:, None] + b[:, None],), (normal, deviation)

    def backward(context: Context, x: np.ndarray, w: np.ndarray, b: np.ndarray, kept: Any, g: np.ndarray) -> Program:
        normal, deviation = kept
        of, scaled = _groups(context), g * w[:, None]
        sums = yield Reduce(np.stack([_sum(scaled, of), _sum(scaled * normal, of)]))
        dx = (scaled - sums[0][:, of, None] / count - normal * sums[1][:, of, None] / count) / deviation[:, of, None]
        return {0: dx, 1: (g * normal).sum((0, 2)), 2: g.sum((0, 2))}

    attributes = {"num_groups": groups} if op == "GroupNormalization" else {}
    what = call(op, [_text(*shape), f"w {channels}", f"w {channels}"], [_text(*shape)], opset=21, **attributes)
    arrays = [numbers(*shape), numbers(channels), numbers(channels)]
    return Case(what, arrays, _alone(forward), (0, 1, 2), forward=forward, backward=backward)


def rms_norm() -> Case:
    def forward(context: Context, x: np.ndarray, w: np.ndarray) -> Program:
        squares = yield Reduce((x * x).sum(-1, keepdims=True))
        root = np.sqrt(squares / 4 + 1e-5)
        return (x / root * w,), root

    def backward(context: Context, x: np.ndarray, w: np.ndarray, root: np.ndarray, g: np.ndarray) -> Program:
        inner = yield Reduce((g * w * x).sum(-1, keepdims=True))
        return {0: g * w / root - x * inner / (4 * root**3), 1: (g * x / root).sum((0, 1))}

    what = call("RMSNormalization", ["x 4 2 4", "w 4"], ["x 4 2 4"])
    return Case(what, [numbers(4, 2, 4), numbers(4)], _alone(forward), (0, 1), forward=forward, backward=backward)


def lp_norm() -> Case:
    def forward(context: Context, x: np.ndarray) -> Program:
        squares = yield Reduce((x * x).sum(1, keepdims=True))
        return (x / np.sqrt(squares),), np.sqrt(squares)

    def backward(context: Context, x: np.ndarray, norm: np.ndarray, g: np.ndarray) -> Program:
        inner = yield Reduce((g * x).sum(1, keepdims=True))
        return {0: g / norm - x * inner / norm**3}

    what = call("LpNormalization", ["x 4 4"], ["x 4 4"], axis=1)
    return Case(what, [numbers(4, 4)], _alone(forward), forward=forward, backward=backward)


def skip_layer_norm() -> Case:
    """Residual sum, layer normalisation, and the sum as a second result."""
    inner = layer_norm()

    def forward(context: Context, x: np.ndarray, skip: np.ndarray, w: np.ndarray, b: np.ndarray) -> Program:
        (y,), kept = yield from inner.forward(context, x + skip, w, b)
        return (y, x + skip), kept

    def backward(
        context: Context,
        x: np.ndarray,
        skip: np.ndarray,
        w: np.ndarray,
        b: np.ndarray,
        kept: Any,
        g: np.ndarray,
        g_sum: np.ndarray,
    ) -> Program:
        found = yield from inner.backward(context, x + skip, w, b, kept, g)
        return {0: found[0] + g_sum, 1: found[0] + g_sum, 2: found[1], 3: found[2]}

    what = call(
        "com.microsoft.SkipLayerNormalization", ["x 4 2 4", "x 4 2 4", "w 4", "w 4"], ["x 4 2 4", None, None, "x 4 2 4"]
    )
    arrays = [numbers(4, 2, 4), numbers(4, 2, 4), numbers(4), numbers(4)]
    return Case(what, arrays, _alone(forward), (0, 1, 2, 3), forward=forward, backward=backward, outputs=(0, 3))


def embed_layer_norm() -> Case:
    """Sum of rows of three tables, normalised; ranks pick rows by the positions of the steps they hold."""
    inner = _moments("LayerNormalization", (2, 2, 4), (2,), 2, 2)
    ids, segments = np.array([[0, 3], [1, 3]]), np.array([[0, 1], [1, 1]])

    def total(
        context: Context | None, ids: np.ndarray, segments: np.ndarray, *tables: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        steps = np.arange(2) if context is None else context.held_result(0, 1, 2)
        return tables[0][ids] + tables[1][steps] + tables[2][segments], steps

    def forward(context: Context | None, *given: np.ndarray) -> Program:
        return (yield from inner.forward(context, total(context, *given[:5])[0], *given[5:]))

    def backward(context: Context, *rest: Any) -> Program:
        *given, kept, g = rest
        summed, steps = total(context, *given[:5])
        found = yield from inner.backward(context, summed, *given[5:], kept, g)
        word, position, segment = (np.zeros(table.shape) for table in given[2:5])
        np.add.at(word, given[0], found[0])
        np.add.at(position, steps, found[0].sum(0))
        np.add.at(segment, given[1], found[0])
        return {2: word, 3: position, 4: segment, 5: found[1], 6: found[2]}

    texts = ["i:int32 2 2", "i:int32 2 2", "w 4 4", "w 2 4", "w 2 4", "w 4", "w 4"]
    what = call("com.microsoft.EmbedLayerNormalization", texts, ["x 2 2 4"])
    arrays = [ids, segments, *(numbers(*map(int, text.split()[1:])) for text in texts[2:])]
    return Case(what, arrays, _alone(forward), (2, 3, 4, 5, 6), forward=forward, backward=backward)


def cross_entropy() -> Case:
    labels = np.array([0, 3, 1, 2])

    def _mine(context: Context | None, ids: np.ndarray) -> np.ndarray:
        classes = np.arange(4) if context is None else context.held(0, 1)
        return ids[:, None] == classes[None, :]

    def forward(context: Context | None, x: np.ndarray, ids: np.ndarray) -> Program:
        top = yield Reduce(x.max(1), np.maximum)
        e = np.exp(x - top[:, None])
        sums = yield Reduce(np.stack([e.sum(1), np.where(_mine(context, ids), x - top[:, None], 0).sum(1)]))
        return (np.asarray((np.log(sums[0]) - sums[1]).sum() / 4),), e / sums[0][:, None]

    def backward(context: Context, x: np.ndarray, ids: np.ndarray, p: np.ndarray, g: np.ndarray) -> Program:
        return {0: (p - _mine(context, ids)) * g / 4}
        yield

    what = call("SoftmaxCrossEntropyLoss", ["x 4 4", "i:int64 4"], ["x"])
    return Case(what, [numbers(4, 4), labels], _alone(forward), forward=forward, backward=backward)


def reduction(op: str) -> Case:
    """Reductions whose partial results do not add: maximum, minimum, norms, logarithms of sums."""
    over, shape = (1, 2), (4, 2, 2)
    sums = {"ReduceL2": np.square, "ReduceLogSum": lambda x: x, "ReduceLogSumExp": None}

    def forward(context: Context, x: np.ndarray) -> Program:
        if op in ("ReduceMax", "ReduceMin"):
            best = np.maximum if op == "ReduceMax" else np.minimum
            y = yield Reduce(best.reduce(x, axis=over, keepdims=True), best)
        elif op == "ReduceLogSumExp":
            top = yield Reduce(x.max(over, keepdims=True), np.maximum)
            total = yield Reduce(np.exp(x - top).sum(over, keepdims=True))
            y = top + np.log(total)
        else:
            total = yield Reduce(sums[op](x).sum(over, keepdims=True))
            y = np.sqrt(total) if op == "ReduceL2" else np.log(total)
        return (y,), y

    def backward(context: Context, x: np.ndarray, y: np.ndarray, g: np.ndarray) -> Program:
        slope = {
            "ReduceL2": lambda: x / y,
            "ReduceLogSum": lambda: np.exp(-y) * np.ones_like(x),
            "ReduceLogSumExp": lambda: np.exp(x - y),
        }.get(op, lambda: (x == y).astype(float))()
        return {0: slope * g}
        yield

    values = np.abs(numbers(*shape)) + 0.5
    what = call(op, ["x 4 2 2", "c:int64 2"], ["x 4 1 1"], constants={1: over}, opset=18)
    return Case(
        what,
        [values, None],
        _alone(lambda c, x, axes=None: forward(c, x)),
        forward=lambda c, x, a: forward(c, x),
        backward=lambda c, x, a, y, g: backward(c, x, y, g),
    )


def global_max_pool() -> Case:
    def forward(context: Context, x: np.ndarray) -> Program:
        y = yield Reduce(x.max((2, 3), keepdims=True), np.maximum)
        return (y,), y

    def backward(context: Context, x: np.ndarray, y: np.ndarray, g: np.ndarray) -> Program:
        return {0: (x == y) * g}
        yield

    what = call("GlobalMaxPool", ["x 2 2 2 4"], ["x 2 2 1 1"])
    return Case(what, [numbers(2, 2, 2, 4)], _alone(forward), forward=forward, backward=backward)


def windowed(
    op: str,
    arrays: Sequence[np.ndarray],
    kernel: Callable[..., np.ndarray],
    out: str,
    pads: Sequence[int],
    halos: Sequence[int],
    wanted: Sequence[int],
    **attributes: Any,
) -> Case:
    """A convolution or pooling: `kernel` runs on a padded input, borders come from neighbours or are zeros."""
    spatial = len(halos)
    before, after = pads[:spatial], pads[spatial:]

    def _cuts(context: Context) -> list[tuple[int, int]]:
        """Mesh axis and spatial dimension of each cut window."""
        return [(a, int(name[1:])) for a, name in enumerate(context.splits) if name[:1] == "y"]

    def _padded(x: np.ndarray, cut: set[int]) -> np.ndarray:
        width = [(0, 0), (0, 0), *((0, 0) if d in cut else (before[d], after[d]) for d in range(spatial))]
        x = np.pad(x, width)
        for d in cut:
            size = x.shape[2 + d]
            x = np.take(x, np.arange(halos[d] - before[d], size - halos[d] + after[d]), axis=2 + d)
        return x

    def whole(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        return (kernel(_padded(values[0], set()), *values[1:]),)

    def forward(context: Context, x: np.ndarray, *rest: np.ndarray) -> Program:
        for axis, d in _cuts(context):
            if halos[d]:
                x = yield Halo(axis, x, 2 + d, halos[d])
        cut = {d for _, d in _cuts(context)}
        return (kernel(_padded(x, cut), *rest),), x

    def backward(context: Context, x: np.ndarray, *rest: Any) -> Program:
        *weights, wide, g = rest
        cut = {d for _, d in _cuts(context)}
        local = lambda *values: (kernel(_padded(values[0], cut), *values[1:]),)  # noqa: E731
        found = pullback(local, [wide, *weights], wanted, [g])
        for axis, d in reversed(_cuts(context)):
            if halos[d]:
                found[0] = yield HaloBack(axis, found[0], 2 + d, halos[d])
        return found

    kinds = ["x", *["w"] * (len(arrays) - 1)]
    texts = [" ".join([k, *map(str, a.shape)]) for k, a in zip(kinds, arrays, strict=True)]
    what = call(op, texts, [out], pads=tuple(pads), **attributes)
    return Case(what, arrays, whole, wanted, forward=forward, backward=backward)


def convolve(strides: tuple[int, ...], dilations: tuple[int, ...], group: int = 1) -> Callable[..., np.ndarray]:
    def kernel(x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> np.ndarray:
        groups = max(1, min(group, x.shape[1] // w.shape[1]))
        reach = [d * (r - 1) for d, r in zip(dilations, w.shape[2:], strict=True)]
        out = [(n - m - 1) // s + 1 for n, m, s in zip(x.shape[2:], reach, strides, strict=True)]
        y = 0.0
        for at in np.ndindex(w.shape[2:]):
            index = tuple(
                slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in zip(at, dilations, out, strides, strict=True)
            )
            part = x[(slice(None), slice(None), *index)].reshape(x.shape[0], groups, -1, *out)
            weight = w[(slice(None), slice(None), *at)].reshape(groups, -1, w.shape[1])
            y = y + np.einsum("ngc...,gkc->ngk...", part, weight).reshape(x.shape[0], -1, *out)
        return y + bias[0].reshape(-1, *[1] * len(out)) if bias else y

    return kernel


def convolution() -> Case:
    arrays = [numbers(2, 2, 4, 4), numbers(2, 2, 3, 3), numbers(2)]
    return windowed("Conv", arrays, convolve((1, 1), (1, 1)), "x 2 2 4 4", (1, 1, 1, 1), (1, 1), (0, 1, 2))


def strided_convolution() -> Case:
    arrays = [numbers(2, 2, 8), numbers(2, 2, 3)]
    return windowed("Conv", arrays, convolve((2,), (1,)), "x 2 2 4", (1, 0), (1,), (0, 1), strides=(2,))


def grouped_convolution() -> Case:
    arrays = [numbers(2, 4, 4), numbers(4, 2, 3)]
    return windowed("Conv", arrays, convolve((1,), (1,), 2), "x 2 4 4", (1, 1), (1,), (0, 1), group=2)


def _pool(kind: str, window: int, stride: int) -> Callable[..., np.ndarray]:
    def kernel(x: np.ndarray) -> np.ndarray:
        out = (x.shape[2] - window) // stride + 1
        parts = np.stack([x[:, :, o : o + (out - 1) * stride + 1 : stride] for o in range(window)])
        return {"max": parts.max(0), "mean": parts.mean(0), "norm": np.sqrt((parts**2).sum(0))}[kind]

    return kernel


def pooling(op: str) -> Case:
    kind = {"MaxPool": "max", "AveragePool": "mean", "LpPool": "norm"}[op]
    arrays = [np.abs(numbers(2, 2, 4)) + 0.1]
    return windowed(op, arrays, _pool(kind, 3, 1), "x 2 2 4", (1, 1), (1,), (0,), kernel_shape=(3,))


def attention(
    op: str = "Attention", batch: int = 2, heads: int = 4, groups: int = 2, steps: int = 4, width: int = 1
) -> Case:
    ratio = heads // groups

    def _owner(context: Context | None, q: np.ndarray) -> np.ndarray:
        """For each local query head, the local key-value head."""
        if context is None:
            return np.arange(heads) // ratio
        mine = list(context.held(1, 1))
        return np.array([mine.index(h) for h in context.held(0, 1) // ratio])

    def _axis(context: Context | None) -> int:
        return context.splits.index("ring") if context is not None and "ring" in context.splits else -1

    def forward(context: Context | None, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Program:
        of, axis = _owner(context, q), _axis(context)
        top = np.full((*q.shape[:3], 1), -np.inf)
        total, mixed = 0.0, 0.0
        hops = context.sizes[axis] if axis >= 0 else 1
        for hop in range(hops):
            if hop:
                k, v = yield Shift(axis, (k, v))
            scores = np.einsum("bhsd,bhtd->bhst", q, k[:, of]) / np.sqrt(width)
            new = np.maximum(top, scores.max(-1, keepdims=True))
            e, old = np.exp(scores - new), np.exp(top - new)
            total, mixed, top = total * old + e.sum(-1, keepdims=True), mixed * old + e @ v[:, of], new
        y = mixed / total
        return (y,), (y, top + np.log(total))

    def _block(q: np.ndarray, k: np.ndarray, v: np.ndarray, of: np.ndarray, kept: Any, g: np.ndarray) -> tuple:
        y, logs = kept
        p = np.exp(np.einsum("bhsd,bhtd->bhst", q, k[:, of]) / np.sqrt(width) - logs)
        ds = p * (np.einsum("bhse,bhte->bhst", g, v[:, of]) - (g * y).sum(-1, keepdims=True)) / np.sqrt(width)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        np.add.at(dk, (slice(None), of), np.einsum("bhst,bhsd->bhtd", ds, q))
        np.add.at(dv, (slice(None), of), np.einsum("bhst,bhse->bhte", p, g))
        return np.einsum("bhst,bhtd->bhsd", ds, k[:, of]), dk, dv

    def backward(context: Context, q: np.ndarray, k: np.ndarray, v: np.ndarray, kept: Any, g: np.ndarray) -> Program:
        of, axis = _owner(context, q), _axis(context)
        dq, dk, dv = _block(q, k, v, of, kept, g)
        if axis < 0:
            return {0: dq, 1: dk, 2: dv}
        travelling: tuple[np.ndarray, ...] = ()
        for _ in range(1, context.sizes[axis]):
            k, v = yield Shift(axis, (k, v))
            if travelling:
                travelling = yield Shift(axis, travelling)
            more = _block(q, k, v, of, kept, g)
            dq = dq + more[0]
            travelling = tuple(a + b for a, b in zip(travelling or (0.0, 0.0), more[1:], strict=True))
        home = yield Shift(axis, travelling)
        return {0: dq, 1: dk + home[0], 2: dv + home[1]}

    def whole(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return _drive(forward(None, *arrays))[0]

    q, k = (batch, heads, steps, width), (batch, groups, steps, width)
    what = call(op, [_text(*q), _text(*k), _text(*k)], [_text(*q)])
    return Case(what, [numbers(*q), numbers(*k), numbers(*k)], whole, (0, 1, 2), forward=forward, backward=backward)


def experts() -> Case:
    """Two of four experts a row, each picked equally often: rows go to their experts, what these make comes back."""
    count, top = 4, 2

    def send(context: Context | None, rows: np.ndarray, labels: list[tuple[int, ...]], axis: int, to: list[int]) -> Any:
        """Rows and labels to other ranks of an axis; returns those that came, with the rank each came from."""
        chosen = [[i for i, rank in enumerate(to) if rank == r] for r in range(context.sizes[axis])]
        arrived = yield AllToAll(axis, [rows[c] for c in chosen], [[labels[i] for i in c] for c in chosen])
        origin = [(r, *label) for r, (_, got) in enumerate(arrived) for label in got]
        return np.concatenate([got for got, _ in arrived]), origin

    def owner(context: Context, axis: int, expert: int) -> int:
        """The rank along an axis that holds an expert, wherever that is along the others."""
        for at in coordinates(context.sizes):
            if expert in held(count, 0, context.reads[2], context.sizes, at):
                return at[axis]
        raise AssertionError("no rank holds the expert")

    def there_and_back(context: Context | None, rows: np.ndarray, picked: list[int], work: Any) -> Any:
        """Each row to its expert, `work(row, expert)` there, the results back in the rows' order."""
        axes = () if context is None else context.axes
        labels: list[tuple[int, ...]] = [(e, i) for i, e in enumerate(picked)]
        for axis in axes:
            rows, labels = yield from send(context, rows, labels, axis, [owner(context, axis, x[-2]) for x in labels])
        rows = np.stack([work(row, label[-2]) for row, label in zip(rows, labels, strict=True)])
        for axis in reversed(axes):
            rows, back = yield from send(context, rows, [x[1:] for x in labels], axis, [x[0] for x in labels])
            labels = [x[1:] for x in back]
        order = np.argsort([label[-1] for label in labels])
        return rows[order]

    def mine(context: Context | None) -> list[int]:
        return list(range(count)) if context is None else context.held(2, 0).tolist()

    def gates(router: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = np.exp(router) / np.exp(router).sum(-1, keepdims=True)
        return scores, np.argsort(-scores, axis=1)[:, :top]

    def forward(context: Context | None, x: np.ndarray, router: np.ndarray, *given: np.ndarray) -> Program:
        first, low, second, high = given
        own, (scores, chosen) = mine(context), gates(router)
        seen: list[np.ndarray] = []

        def work(row: np.ndarray, e: int) -> np.ndarray:
            seen.append(row)
            if e not in own:
                return np.zeros_like(row)
            at = own.index(e)
            return second[at] @ np.maximum(first[at] @ row + low[at], 0) + high[at]

        flat = np.repeat(x.reshape(-1, x.shape[-1]), top, axis=0)
        made = yield from there_and_back(context, flat, chosen.ravel().tolist(), work)
        made = made.reshape(-1, top, x.shape[-1])
        weights = np.take_along_axis(scores, chosen, 1)
        return ((weights[..., None] * made).sum(1).reshape(x.shape),), (made, seen)

    def backward(context: Context, x: np.ndarray, router: np.ndarray, *rest: Any) -> Program:
        first, low, second, high, (made, seen), g = rest
        arguments = iter(seen)
        own, (scores, chosen) = mine(context), gates(router)
        slopes = [np.zeros_like(w) for w in (first, low, second, high)]

        def work(slope: np.ndarray, e: int) -> np.ndarray:
            argument = next(arguments)
            if e not in own:
                return np.zeros_like(argument)
            at = own.index(e)
            inner = first[at] @ argument + low[at]
            towards = (second[at].T @ slope) * (inner > 0)
            for total, part in zip(
                slopes,
                (np.outer(towards, argument), towards, np.outer(slope, np.maximum(inner, 0)), slope),
                strict=True,
            ):
                total[at] += part
            return first[at].T @ towards

        slope = g.reshape(-1, x.shape[-1])
        weights = np.take_along_axis(scores, chosen, 1)
        sent = (weights[..., None] * slope[:, None]).reshape(-1, x.shape[-1])
        back = yield from there_and_back(context, sent, chosen.ravel().tolist(), work)
        picked = np.zeros_like(scores)
        np.put_along_axis(picked, chosen, (made * slope[:, None]).sum(-1), 1)
        towards = scores * (picked - (picked * scores).sum(-1, keepdims=True))
        return {0: back.reshape(-1, top, x.shape[-1]).sum(1).reshape(x.shape), 1: towards,
                **dict(zip((2, 3, 4, 5), slopes, strict=True))}  # fmt: skip

    texts = ["x 4 1 2", "x 4 4", "w 4 4 2", "w 4 4", "w 4 2 4", "w 4 2"]
    what = call("com.microsoft.MoE", texts, ["x 4 1 2"], k=top)
    arrays = [numbers(*map(int, text.split()[1:])) for text in texts]
    arrays[1] = 0.1 * arrays[1] + np.array([[3, 0, 3, 0], [0, 3, 0, 3], [3, 0, 3, 0], [0, 3, 0, 3]])
    return Case(what, arrays, _alone(forward), tuple(range(6)), forward=forward, backward=backward)
