"""How the batch travels through each operator: from the marked dimensions of the operands to those of the results.

A mark says where the batch sits inside a dimension: its size is `outer * batch * inner`. A rule reads marks of
operands, writes those of results, and notes which values of constant operands (target shapes) are proportional to the
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from planner.graph import Node, Tensor, TensorKind
from planner.operators.batch_flow import Flow, Mark


def _tensor(flow: Flow, name: str) -> Tensor:
    return flow.graph.tensors[name]


def _axis(node: Node, default: int, rank: int) -> int:
    value = node.attributes.get("axis", default)
    return (int(value) if isinstance(value, int) else default) % max(rank, 1)


def _axes(flow: Flow, node: Node, position: int, rank: int) -> tuple[int, ...] | None:
    """Axes by attribute or constant operand, none negative; None where not given."""
    value: object = node.attributes.get("axes")
    if value is None and position < len(node.inputs) and node.inputs[position]:
        value = flow.graph.constants.get(node.inputs[position])
    if isinstance(value, int):
        value = (value,)
    return tuple(sorted(int(a) % rank for a in value)) if isinstance(value, tuple) else None


# --- rules -------------------------------------------------------------------------------------------------------


def broadcast(flow: Flow, i: int, node: Node) -> None:
    """Element-wise over operands that are broadcast against each other."""
    for output in node.outputs:
        if output and output in flow.graph.tensors:
            _merge(flow, i, [n for n in node.inputs if n], output)


def _merge(flow: Flow, i: int, names: Iterable[str], output: str) -> None:
    """Marks of a result whose dimensions are aligned with its operands' from the right."""
    rank = len(_tensor(flow, output).shape)
    merged: list[Mark | None] = [None] * rank
    operands = [n for n in dict.fromkeys(names) if len(_tensor(flow, n).shape) <= rank]
    for name in operands:
        lead = rank - len(_tensor(flow, name).shape)
        for d, mark in enumerate(flow.of(name)):
            merged[lead + d] = merged[lead + d] or mark
    for name in operands:
        shape = _tensor(flow, name).shape
        lead = rank - len(shape)
        for d, size in enumerate(shape):
            mark = merged[lead + d]
            if mark is not None and size != 1:
                flow.require(i, name, d, mark)
    flow.set(output, merged)


def same(flow: Flow, i: int, node: Node) -> None:
    """Results have the first operand's dimensions; where a size differs the dimension must not follow the batch."""
    source = node.inputs[0]
    shape, marks = _tensor(flow, source).shape, flow.of(source)
    for output in node.outputs:
        if not output or output not in flow.graph.tensors:
            continue
        result = _tensor(flow, output).shape
        if len(result) != len(shape):
            continue
        kept = [m if a == b else None for m, a, b in zip(marks, shape, result, strict=True)]
        for d, (mark, size) in enumerate(zip(marks, result, strict=True)):
            if mark is not None and kept[d] is None and size != 1:
                raise flow.fail(i, f"changes dimension {d}, which follows the batch, from {shape[d]} to {size}")
        flow.set(output, kept)


def leading(flow: Flow, i: int, node: Node) -> None:
    """Operators without a rule of their own: a first dimension that is the batch stays the first dimension."""
    marked = [n for n in node.inputs if n and any(flow.of(n))]
    if not marked:
        return
    for name in marked:
        if flow.of(name)[0] is None or any(flow.of(name)[1:]):
            raise flow.fail(i, f"is not known, and {name!r} has the batch in a dimension other than the first")
    mark = flow.of(marked[0])[0]
    size = _tensor(flow, marked[0]).shape[0]
    for name in node.inputs:
        shape = _tensor(flow, name).shape if name else ()
        if name and mark and _tensor(flow, name).kind is TensorKind.CONSTANT and shape[:1] == (size,) and size > 1:
            flow.require(i, name, 0, mark)
    for output in node.outputs:
        shape = _tensor(flow, output).shape if output in flow.graph.tensors else ()
        if shape[:1] == (size,):
            flow.set(output, (mark, *(None,) * (len(shape) - 1)))


def matmul(flow: Flow, i: int, node: Node) -> None:
    """`... m k, ... k n -> ... m n`, the leading dimensions broadcast."""
    a, b, output = node.inputs[0], node.inputs[1], node.outputs[0]
    left, right = flow.of(a), flow.of(b)
    rank = len(_tensor(flow, output).shape)
    merged: list[Mark | None] = [None] * rank
    wide = len(left) > 1 and len(right) > 1
    if wide or len(left) > 1:
        merged[-2 if wide else -1] = left[-2]
    if len(right) > 1:
        merged[-1] = right[-1]
    for marks in (left, right):
        for d, mark in enumerate(marks[:-2]):
            at = rank - 2 - len(marks[:-2]) + d if wide else d
            merged[at] = merged[at] or mark
    for name, marks in ((a, left), (b, right)):
        for d in range(len(marks) - 2):
            mark = merged[rank - len(marks) + d]
            if mark is not None and _tensor(flow, name).shape[d] != 1:
                flow.require(i, name, d, mark)
    flow.set(output, merged)


def gemm(flow: Flow, i: int, node: Node) -> None:
    """`m k, k n -> m n`, operands transposed on demand, plus a broadcast bias."""
    left, right = flow.of(node.inputs[0]), flow.of(node.inputs[1])
    rows = left[1] if node.attributes.get("transA") else left[0]
    columns = right[0] if node.attributes.get("transB") else right[1]
    flow.set(node.outputs[0], (rows, columns))
    if len(node.inputs) > 2 and node.inputs[2]:
        _merge(flow, i, [node.outputs[0], node.inputs[2]], node.outputs[0])


def einsum(flow: Flow, i: int, node: Node) -> None:
    """By the letters of the equation."""
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        raise flow.fail(i, f"has an equation that is not followed: {equation!r}")
    found: dict[str, Mark] = {}
    for name, letters in zip(node.inputs, left.split(","), strict=True):
        found.update({c: m for c, m in zip(letters, flow.of(name), strict=True) if m is not None})
    for name, letters in zip(node.inputs, left.split(","), strict=True):
        for d, letter in enumerate(letters):
            if letter in found and _tensor(flow, name).shape[d] != 1:
                flow.require(i, name, d, found[letter])
    flow.set(node.outputs[0], [found.get(c) for c in right])


def batch_first(flow: Flow, i: int, node: Node) -> None:
    """Convolutions, pools and the like: the first dimension of the first operand is that of the results."""
    marks = flow.of(node.inputs[0])
    if any(marks[1:]):
        raise flow.fail(i, f"has the batch in a dimension of {node.inputs[0]!r} other than the first")
    for output in node.outputs:
        if output in flow.graph.tensors:
            flow.set(output, (marks[0], *(None,) * (len(_tensor(flow, output).shape) - 1)))


def transpose(flow: Flow, i: int, node: Node) -> None:
    """Dimensions permuted."""
    marks = flow.of(node.inputs[0])
    perm = node.attributes.get("perm")
    order = tuple(int(p) for p in perm) if isinstance(perm, tuple) else tuple(reversed(range(len(marks))))
    flow.set(node.outputs[0], [marks[p] for p in order])


def reshape(flow: Flow, i: int, node: Node) -> None:
    """The same elements in row-major order: the batch keeps the number of elements that lie below it."""
    source, output = _tensor(flow, node.inputs[0]), _tensor(flow, node.outputs[0])
    result: list[Mark | None] = [None] * len(output.shape)
    for d, mark in enumerate(flow.of(source.name)):
        if mark is None:
            continue
        below = mark.inner * math.prod(source.shape[d + 1 :])
        found = place(below, flow.batch, output.shape, _open_dimension(flow, node, output.name))
        if found is None or result[found[0]] is not None:
            raise flow.fail(i, f"mixes the batch with other dimensions: {list(source.shape)} -> {list(output.shape)}")
        result[found[0]] = found[1]
    flow.set(output.name, result)
    if node.op == "Reshape":
        flow.note_shape(i, 1, output.name)


def _open_dimension(flow: Flow, node: Node, output: str) -> int | None:
    """The dimension that a reshape leaves open (-1), where its target is known."""
    target = flow.graph.constants.get(node.inputs[1]) if node.op == "Reshape" else None
    if target is None or len(target) != len(_tensor(flow, output).shape) or -1 not in target:
        return None
    return target.index(-1)


def place(below: int, batch: int, shape: Sequence[int], open_dim: int | None = None) -> tuple[int, Mark] | None:
    """The dimension of a row-major shape that holds a factor `batch` with `below` elements under it.

    Above 1 at most one dimension fits, up to dimensions of size 1. A batch of 1 fits in many places: a dimension that
    is exactly the batch is preferred, then the one that the reshape leaves open, then the leftmost.
    """
    fitting: list[tuple[int, Mark]] = []
    suffix = math.prod(shape)
    for d, size in enumerate(shape):
        suffix = suffix // size if size else 0
        if not suffix or below % suffix:
            continue
        inner = below // suffix
        if size % (inner * batch) == 0 and inner * batch <= size:
            mark = Mark(size // (inner * batch), inner)
            if mark == Mark():
                return d, mark
            fitting.append((d, mark))
    return next((found for found in fitting if found[0] == open_dim), fitting[0] if fitting else None)


def squeeze(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 removed."""
    shape, marks = _tensor(flow, node.inputs[0]).shape, flow.of(node.inputs[0])
    axes = _axes(flow, node, 1, len(shape))
    gone = axes if axes is not None else tuple(d for d, size in enumerate(shape) if size == 1)
    if any(marks[d] for d in gone):
        raise flow.fail(i, "removes the batch dimension, which works for one sample only")
    flow.set(node.outputs[0], [m for d, m in enumerate(marks) if d not in gone])


def unsqueeze(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 inserted."""
    marks = list(flow.of(node.inputs[0]))
    axes = _axes(flow, node, 1, len(_tensor(flow, node.outputs[0]).shape)) or ()
    for axis in axes:
        marks.insert(axis, None)
    flow.set(node.outputs[0], marks)


def concat(flow: Flow, i: int, node: Node) -> None:
    """Joined along an axis; along the batch only when every part follows it."""
    names = [n for n in node.inputs if n]
    rank = len(_tensor(flow, names[0]).shape)
    axis = _axis(node, 0, rank)
    merged: list[Mark | None] = [None] * rank
    for d in range(rank):
        found = [flow.of(n)[d] for n in names]
        if d != axis:
            merged[d] = next((m for m in found if m is not None), None)
            mark = merged[d]
            for name in names:
                if mark is not None:
                    flow.require(i, name, d, mark)
        elif any(found):
            if not all(found):
                raise flow.fail(i, "joins along the batch with a part that does not follow it")
            merged[d] = Mark(_tensor(flow, node.outputs[0]).shape[d] // flow.batch, 1)
    flow.set(node.outputs[0], merged)


def split(flow: Flow, i: int, node: Node) -> None:
    """Cut along an axis that is not the batch."""
    marks = flow.of(node.inputs[0])
    if marks[_axis(node, 0, len(marks))] is not None and sum(bool(o) for o in node.outputs) > 1:
        raise flow.fail(i, "cuts the batch in parts of fixed size")
    for output in node.outputs:
        flow.set(output, marks)


def slice_(flow: Flow, i: int, node: Node) -> None:
    """A range along some axes; along the batch only all of it."""
    source, output = _tensor(flow, node.inputs[0]), _tensor(flow, node.outputs[0])
    marks = flow.of(source.name)
    for d, (mark, a, b) in enumerate(zip(marks, source.shape, output.shape, strict=True)):
        if mark is not None and a != b:
            raise flow.fail(i, f"takes {b} of {a} along dimension {d}, which follows the batch")
    flow.set(output.name, marks)
    ends = flow.graph.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
    axes = flow.graph.constants.get(node.inputs[3]) if len(node.inputs) > 3 else None
    if ends is not None and any(marks):
        along = [int(a) % len(marks) for a in axes] if axes is not None else range(len(ends))
        flags = tuple(marks[d] is not None and end == source.shape[d] for d, end in zip(along, ends, strict=True))
        if any(flags):
            flow.edits[(i, 2)] = flags


def gather(flow: Flow, i: int, node: Node) -> None:
    """Rows picked along an axis: the axis is replaced by the dimensions of the indices."""
    data, indices = flow.of(node.inputs[0]), flow.of(node.inputs[1])
    axis = _axis(node, 0, len(data))
    if data[axis] is not None and not any(indices):
        raise flow.fail(i, f"picks fixed positions along dimension {axis}, which follows the batch")
    flow.set(node.outputs[0], (*data[:axis], *indices, *data[axis + 1 :]))


def _share(flow: Flow, i: int, operands: Sequence[tuple[str, int]]) -> Mark | None:
    """Make dimensions (operand, dimension) that run together follow the batch if one of them does; their mark."""
    mark = next((m for name, d in operands if (m := flow.of(name)[d]) is not None), None)
    if mark is not None:
        for name, d in operands:
            flow.require(i, name, d, mark)
    return mark


def gather_nd(flow: Flow, i: int, node: Node) -> None:
    """Slices picked by index tuples."""
    table, name = node.inputs[0], node.inputs[1]
    depth = _tensor(flow, name).shape[-1]
    shared = node.attributes.get("batch_dims", 0)
    start = int(shared) if isinstance(shared, int) else 0
    for d in range(start):
        _share(flow, i, ((table, d), (name, d)))
    data = flow.of(table)
    if any(data[start : start + depth]) and not any(flow.of(name)):
        if _tensor(flow, name).shape[0] != flow.batch or len(_tensor(flow, name).shape) < 2:
            raise flow.fail(i, "picks fixed positions along the batch")
        flow.require(i, name, 0, Mark())
    flow.set(node.outputs[0], (*flow.of(name)[:-1], *data[start + depth :]))


def scatter_nd(flow: Flow, i: int, node: Node) -> None:
    """Slices replaced at index tuples: one tuple an update, each update laid over the trailing dimensions."""
    data, name, updates = node.inputs[:3]
    rows = len(_tensor(flow, name).shape) - 1
    depth = _tensor(flow, name).shape[-1]
    for d in range(rows):
        _share(flow, i, ((updates, d), (name, d)))
    for d in range(len(_tensor(flow, data).shape) - depth):
        _share(flow, i, ((updates, rows + d), (data, depth + d)))
    flow.set(node.outputs[0], flow.of(data))


def scatter_elements(flow: Flow, i: int, node: Node) -> None:
    """Elements replaced along an axis; in other dimensions of equal size data, indices and updates run together."""
    data, name, updates = node.inputs[:3]
    shape, rows = _tensor(flow, data).shape, _tensor(flow, name).shape
    axis = _axis(node, 0, len(shape))
    for d, (size, count) in enumerate(zip(shape, rows, strict=True)):
        together = ((name, d), (updates, d))
        _share(flow, i, ((data, d), *together) if d != axis and size == count else together)
    flow.set(node.outputs[0], flow.of(data))


def rotary(flow: Flow, i: int, node: Node) -> None:
    """Position ids [b, s], or without them tables [b, s, d], run with the batch of what is turned.

    The standard has the ids last, com.microsoft in second place.
    """
    same(flow, i, node)
    x = node.inputs[0]
    places = node.inputs[1:2] if node.op.startswith("com.") else node.inputs[3:4]
    ids = [name for name in places if name and len(_tensor(flow, name).shape) == 2]
    for name in ids or (node.inputs[1:3] if not node.op.startswith("com.") else ()):
        producer = flow.graph.producer.get(name)
        repeated = producer is None or flow.graph.nodes[producer].op in ("Expand", "Tile")
        if repeated and _tensor(flow, name).shape[0] == _tensor(flow, x).shape[0]:
            _share(flow, i, ((x, 0), (name, 0)))


def like_second(flow: Flow, i: int, node: Node) -> None:
    """Results have the dimensions of the indices (GatherElements)."""
    flow.set(node.outputs[0], flow.of(node.inputs[1]))


def expand(flow: Flow, i: int, node: Node) -> None:
    """Broadcast to a fixed shape; a first dimension that grows to the batch size follows the batch."""
    source, output = _tensor(flow, node.inputs[0]), _tensor(flow, node.outputs[0])
    lead = len(output.shape) - len(source.shape)
    marks: list[Mark | None] = [*(None for _ in range(lead)), *flow.of(source.name)]
    grows = lead > 0 or source.shape[0] == 1
    if output.shape and output.shape[0] == flow.batch > 1 and grows and not any(marks):
        marks[0] = Mark()
    flow.set(output.name, marks)
    flow.note_shape(i, 1, output.name)


def tile(flow: Flow, i: int, node: Node) -> None:
    """Repeated along each dimension; a first dimension repeated batch times follows the batch."""
    source, output = _tensor(flow, node.inputs[0]), _tensor(flow, node.outputs[0])
    marks = list(flow.of(source.name))
    for d, (mark, a, b) in enumerate(zip(marks, source.shape, output.shape, strict=True)):
        if mark is not None:
            marks[d] = Mark(mark.outer * (b // a), mark.inner)
    if output.shape and source.shape[0] == 1 and output.shape[0] == flow.batch > 1 and not any(marks):
        marks[0] = Mark()
        flow.edits[(i, 1)] = tuple(d == 0 for d in range(len(marks)))
    flow.set(output.name, marks)


def reduce(flow: Flow, i: int, node: Node) -> None:
    """Some dimensions reduced; a sum over the batch no longer follows it."""
    source, output = _tensor(flow, node.inputs[0]), node.outputs[0]
    marks = flow.of(source.name)
    if node.op in ("ArgMax", "ArgMin"):
        axes: tuple[int, ...] | None = (_axis(node, 0, len(marks)),)
    else:
        axes = _axes(flow, node, 1, len(marks))
    gone = set(range(len(marks))) if axes is None else set(axes)
    if len(_tensor(flow, output).shape) == len(marks):
        flow.set(output, [None if d in gone else m for d, m in enumerate(marks)])
    else:
        flow.set(output, [m for d, m in enumerate(marks) if d not in gone])


def topk(flow: Flow, i: int, node: Node) -> None:
    """The largest along an axis that is not the batch."""
    marks = flow.of(node.inputs[0])
    if marks[_axis(node, -1, len(marks))] is not None:
        raise flow.fail(i, "picks a fixed number of samples of the batch")
    for output in node.outputs:
        flow.set(output, marks)


def one_hot(flow: Flow, i: int, node: Node) -> None:
    """A new axis beside those of the indices."""
    marks = list(flow.of(node.inputs[0]))
    marks.insert(_axis(node, -1, len(marks) + 1), None)
    flow.set(node.outputs[0], marks)


def recurrent(flow: Flow, i: int, node: Node) -> None:
    """LSTM, GRU, RNN: the batch is the second dimension of the input, the first in layout 1."""
    first = node.attributes.get("layout", 0) == 1
    mark = flow.of(node.inputs[0])[0 if first else 1]
    if mark is None:
        return
    for position, dim in ((4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
        if position < len(node.inputs) and node.inputs[position]:
            flow.require(i, node.inputs[position], dim, mark)
    for output, dim in zip(node.outputs, (0 if first else 2, *(0 if first else 1,) * 2), strict=False):
        if output in flow.graph.tensors:
            rank = len(_tensor(flow, output).shape)
            flow.set(output, [mark if d == dim else None for d in range(rank)])


def loss(flow: Flow, i: int, node: Node) -> None:
    """Cross entropy: a mean or sum over the batch, or one value a label; log-probabilities like the scores."""
    if node.attributes.get("reduction", "mean") == "none":
        flow.set(node.outputs[0], flow.of(node.inputs[1]))
    if len(node.outputs) > 1:
        flow.set(node.outputs[1], flow.of(node.inputs[0]))


def resize(flow: Flow, i: int, node: Node) -> None:
    """Spatial sizes change, the batch stays."""
    same(flow, i, node)
    if len(node.inputs) > 3 and node.inputs[3]:
        flow.note_shape(i, 3, node.outputs[0])


Rule = Callable[[Flow, int, Node], None]

_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (
        broadcast,
        "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean "
        "Min Mod Mul Or PRelu Pow Sub Sum Where Xor com.microsoft.BiasGelu com.microsoft.FastGelu",
    ),
    (
        same,
        "Abs Acos Acosh Asin Asinh Atan Atanh BatchNormalization BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh "
        "CumSum DequantizeLinear Dropout DynamicQuantizeLinear Elu Erf Exp EyeLike Floor Gelu GroupNormalization "
        "HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu "
        "Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg Not Pad QuantizeLinear RMSNormalization "
        "RandomNormalLike RandomUniformLike Bernoulli Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
        "SimplifiedLayerNormalization Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu "
        "com.microsoft.Gelu com.microsoft.QuickGelu Upsample",
    ),
    (
        batch_first,
        "AveragePool Col2Im Conv ConvInteger ConvTranspose DeformConv DepthToSpace GlobalAveragePool GlobalLpPool "
        "GlobalMaxPool GridSample LpPool MaxPool QLinearConv SpaceToDepth",
    ),
    (matmul, "MatMul MatMulInteger QLinearMatMul com.microsoft.FusedMatMul com.microsoft.MatMulNBits"),
    (gemm, "Gemm"),
    (einsum, "Einsum"),
    (transpose, "Transpose"),
    (reshape, "Reshape Flatten"),
    (squeeze, "Squeeze"),
    (unsqueeze, "Unsqueeze"),
    (concat, "Concat"),
    (split, "Split"),
    (slice_, "Slice"),
    (gather, "Gather"),
    (gather_nd, "GatherND"),
    (scatter_nd, "ScatterND"),
    (scatter_elements, "Scatter ScatterElements"),
    (like_second, "GatherElements"),
    (expand, "Expand"),
    (tile, "Tile"),
    (
        reduce,
        "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare",
    ),
    (topk, "TopK"),
    (one_hot, "OneHot"),
    (rotary, "RotaryEmbedding com.microsoft.RotaryEmbedding"),
    (recurrent, "GRU LSTM RNN"),
    (loss, "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"),
    (resize, "Resize"),
)

RULES: dict[str, Rule] = {op: rule for rule, ops in _BY_RULE for op in ops.split()}
"""Rule by operator; `leading` serves all others."""
