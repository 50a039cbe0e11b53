"""Scaled dot-product attention and rotary embedding, in every form that exporters write.

Matrix work is `2 b h s t (d + e)` for s queries, t keys, head sizes d (query, key) and e (value), the whole square even
under a causal mask, as torch's counter counts it. Backward is twice that: the gradients of scores, query, key, value.
A fused kernel computes the scores once more in backward; that work is `details["recompute_matrix_flops"]`. It keeps
query, key, value, mask, its result and one fp32 number a row; one that is not fused keeps the scores in place of the
last three; their number is `details["score_elements"]`. No kernel is fused where the mask needs a gradient (a learned
position bias, scores of relative positions): that gradient is as large as the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from planner.errors import ModelError
from planner.graph import TensorKind
from planner.operators.assemble import (
    elements_like,
    keep_extra,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.entry import WEIGHT_AND_BIAS, JointCut, OpCall, Role, Rule, Shaped, as_first, like
from planner.operators.flow import along_nests
from planner.operators.rules.reduce import BACKWARD_FLOPS, FORWARD_FLOPS
from planner.operators.types import DimKind, LoopNest, OpSpec, Saved

_PARALLEL, _COUPLED, _WHOLE = "b g r s e", "t u p", "d three two packed mask rows i"
"""t: all keys, u: new keys, p: past keys. Where query, key and value lie side by side in one tensor with as many heads
each, it is `three g d`: heads are cut in an interleaved way. Otherwise it is `packed` and not split."""


_MASK = (1, 2, 3, 4)
"""Numbers of dimensions that a mask may have."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of one attention: batch, query heads, key-value heads, queries, keys (past included), head sizes.

    `window` is the number of keys that a query sees at most, where fewer than all; 0 for all.
    """

    batch: int
    query_heads: int
    key_heads: int
    queries: int
    keys: int
    head: int
    value_head: int
    window: int = 0

    @property
    def scores(self) -> int:
        """Number of scores."""
        return self.batch * self.query_heads * self.queries * min(self.window or self.keys, self.keys)

    @property
    def matrix_flops(self) -> float:
        """Both products."""
        return 2.0 * self.scores * (self.head + self.value_head)


def _nest(call: OpCall, given: dict[int, str], results: dict[int, str], heads: Heads, flops: float = 0.0) -> LoopNest:
    """The nest over those inputs and outputs that the call has, by position."""
    if heads.key_heads <= 0 or heads.query_heads % heads.key_heads:
        raise ModelError(
            f"{heads.query_heads} query heads are not a multiple of {heads.key_heads} key-value heads",
            hint="check the attention's head counts",
        )
    ratio = heads.query_heads // heads.key_heads
    left, right = (", ".join(f"?{p}:{terms}" for p, terms in side.items()) for side in (given, results))
    return call.nest(
        f"{left} -> {right}",
        sizes={"t": heads.keys, "g": heads.key_heads, "r": ratio, "d": heads.head, "e": heads.value_head},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=heads.matrix_flops,
        vector_flops=FORWARD_FLOPS * heads.scores + flops,
    )


def _spec(
    call: OpCall,
    nest: LoopNest,
    heads: Heads,
    saved: tuple[Saved, ...],
    roles: tuple[bool, bool, bool],
    *,
    input_grad: float = 0.0,
    weight_grad: float = 0.0,
    projections: int = 0,
) -> OpSpec:
    """Description of one attention.

    Args:
        call: the operator and its tensors.
        nest: its loop nest.
        heads: its sizes.
        saved: what is kept besides the rows' fp32 logarithms.
        roles: whether query, key and value need gradients.
        input_grad: further matrix work towards activations (projections inside the operator).
        weight_grad: further matrix work towards weights.
        projections: number of projections inside the operator.
    """
    query, key, value = roles
    bias = call.op == "Attention" and call.need(3)
    written = _eager_work(call, heads) | ({"own_score_elements": float(heads.scores)} if bias else {})
    rows = keep_extra(0, heads.batch * heads.query_heads * heads.queries)
    scores = (query or key) * heads.value_head + (query + key) * heads.head + value * heads.value_head
    again = 2.0 * heads.scores * heads.head if call.trains else 0.0
    return streaming(
        call,
        nest,
        saved=(*saved, replace(rows, fused=True)),
        kernels=1 + projections,
        backward_kernels=2 + 2 * projections,
        backward_flops=BACKWARD_FLOPS * heads.scores,
        input_grad=2.0 * heads.scores * scores + input_grad,
        weight_grad=weight_grad,
        extra={
            "score_elements": float(heads.scores),
            "recompute_matrix_flops": again,
            "keys": float(heads.keys),
            "window": float(min(heads.window or heads.keys, heads.keys)),
            "head": float(heads.head),
            "value_head": float(heads.value_head),
            **written,
        },
    )


def _eager_work(call: OpCall, heads: Heads) -> dict[str, float]:
    """Traffic and kernels of an attention run step by step, less those of one kernel.

    Scores are written, maybe masked (read, written), normalised (read, written) and read by the product with the
    values; backward the products pass over them four times and the softmax three times; a sum's gradient is its
    operand's. Query, key and value are copied, as batched products cannot read them where they lie.
    """
    masked = call.has(3) or call.int_attribute("is_causal", 0) or call.int_attribute("unidirectional", 0)
    steps = 1 if masked else 0
    rows = heads.batch * (heads.query_heads * heads.queries * heads.head)
    rows += heads.batch * heads.key_heads * heads.keys * (heads.head + heads.value_head)
    return {
        "eager_elements": (4.0 + 2.0 * steps) * heads.scores + 2.0 * rows,
        "eager_kernels": 5.0 + steps,
        "eager_back_elements": 7.0 * heads.scores + 2.0 * rows,
        "eager_back_kernels": 6.0,
    }


def _kept(call: OpCall, inputs: tuple[int, ...], mask: int) -> tuple[Saved, ...]:
    """Query, key and value; mask and result where the kernel is fused."""
    fused = (*keep_inputs(call, mask), *keep_outputs(0))
    return (*keep_inputs(call, *inputs), *(replace(item, fused=True) for item in fused))


def _mask_terms(call: OpCall, position: int, heads: Heads) -> str:
    """A mask's dimensions, aligned from the right with batch, heads, queries and keys."""
    if not call.has(position):
        return ""
    shape = call.input(position).shape
    names = ["b", "(g r)", "s", "t" if shape and shape[-1] in (1, heads.keys) else "mask"]
    return " ".join(names[len(names) - len(shape) :])


def _padding_terms(call: OpCall, position: int, heads: Heads) -> str:
    """Which keys of a sample count: a length each, or a mask over keys; packed lengths belong to all samples."""
    if not call.has(position):
        return ""
    shape = call.input(position).shape
    if len(shape) == 1:
        return "b" if shape[0] == heads.batch else "mask"
    keys = "t" if shape[-1] == heads.keys else "mask"
    return {2: f"b {keys}", 3: f"b s {keys}"}.get(len(shape), "b 1 rows mask")


def _window(call: OpCall) -> int:
    """Keys that a query sees at most, by the attributes of operator set 25; 0 where a side is not bounded."""
    left, right = call.int_attribute("left_window_size", -1), call.int_attribute("right_window_size", -1)
    right = 0 if call.int_attribute("is_causal", 0) else right
    return left + right + 1 if left >= 0 and right >= 0 else 0


def _thirds(heads: Heads, width: int) -> str:
    """The dimension in which query, key and value lie side by side."""
    same = heads.head == heads.value_head and heads.query_heads == heads.key_heads
    return "(three g d)" if same and width == 3 * heads.query_heads * heads.head else "packed"


@Rule(ports=(0, 1, 2, 3, 4, 5), keeps_layout=True, heavy=True, joint=JointCut.RING).of("Attention")
def attention(call: OpCall) -> OpSpec:
    """The standard's attention: query, key, value of rank 3 or 4, mask, past key and value; grouped heads."""
    q, k, v = (call.input(i).shape for i in range(3))
    past = call.input(4).shape[2] if call.has(4) else 0
    window = _window(call)
    if len(q) == 4:
        heads = Heads(q[0], q[1], k[1], q[2], k[2] + past, q[3], v[3], window)
        terms, result = ["b (g r) s d", "b g u d", "b g u e"], "b (g r) s e"
    else:
        query_heads, key_heads = call.int_attribute("q_num_heads", 0), call.int_attribute("kv_num_heads", 0)
        if query_heads <= 0 or key_heads <= 0:
            raise ModelError("attention of rank 3 lacks q_num_heads or kv_num_heads", where=call.where)
        heads = Heads(q[0], query_heads, key_heads, q[1], k[1] + past, q[2] // query_heads, v[2] // key_heads, window)
        terms, result = ["b s (g r d)", "b u (g d)", "b u (g e)"], "b s (g r e)"
    mask = _mask_terms(call, 3, heads)
    given = dict(enumerate([*terms, mask, "b g p d", "b g p e", "b"]))
    results = dict(enumerate([result, "b g t d", "b g t e", "b (g r) s t"]))
    nest = _nest(call, given, results, heads)
    return _spec(
        call,
        nest,
        heads,
        _kept(call, (0, 1, 2), 3),
        (call.need(0), call.need(1) or call.need(4), call.need(2) or call.need(5)),
    )


def _multi_head_results(call: OpCall) -> list[Shaped | None]:
    query, count = call.input(0), call.int_attribute("num_heads", 1)
    if call.has(2):
        value = call.input(2).shape
        hidden, steps = (value[2], value[1]) if len(value) == 3 else (value[1] * value[3], value[2])
    else:
        packed = call.input(1 if call.has(1) else 0).shape
        hidden, steps = packed[2] * packed[4], packed[1]
    total = steps + (call.input(6).shape[2] if call.has(6) else 0)
    present = like(query, (query.shape[0], count, total, hidden // count))
    return [like(query, (*query.shape[:2], hidden)), present, present]


_MULTI_HEAD = {0: (3, 5), 1: (3, 4, 5), 2: (3, 4)}


@Rule(
    ports=(0, 1, 2, 3, 5),
    infer=_multi_head_results,
    weights={3: Role.BIAS},
    ranks={**_MULTI_HEAD, 4: _MASK, 5: _MASK, 6: (4,), 7: (4,)},
    heavy=True,
    joint=JointCut.RING,
).of("com.microsoft.MultiHeadAttention")
def multi_head_attention(call: OpCall) -> OpSpec:
    """Query, key, value projected already; packed as `b s h 3 d`, or key and value packed as `b t h 2 d`."""
    q = call.input(0).shape
    count = call.int_attribute("num_heads", 1)
    past = call.input(6).shape[2] if call.has(6) else 0
    result = call.output().shape
    if len(q) == 5:
        heads = Heads(q[0], q[2], q[2], q[1], q[1] + past, q[4], q[4])
        terms, roles = ["b u g three d"], (call.need(0),) * 3
    else:
        k = call.input(1).shape
        head, steps = q[2] // count, k[2] if len(k) == 4 else k[1]
        heads = Heads(q[0], count, count, q[1], steps + past, head, result[2] // count)
        packed = len(k) == 5
        keys = {5: ["b u g two d"], 4: ["b g u d", "b g u e"]}.get(len(k), ["b u (g d)", "b u (g e)"])
        terms, roles = ["b s (g d)", *keys], (call.need(0), call.need(1), call.need(1 if packed else 2))
    given = dict(enumerate(terms)) | {4: _padding_terms(call, 4, heads), 5: _mask_terms(call, 5, heads)}
    given |= {3: _thirds(heads, call.input(3).shape[0]) if call.has(3) else "", 6: "b g p d", 7: "b g p e"}
    nest = _nest(call, given, {0: "b s (g e)", 1: "b g t d", 2: "b g t e"}, heads)
    return _spec(call, nest, heads, _kept(call, (0, 1, 2), 5), roles)


def _grouped_results(call: OpCall) -> list[Shaped | None]:
    query, heads, groups = call.input(0), call.int_attribute("num_heads", 1), call.int_attribute("kv_num_heads", 1)
    batch, steps, width = query.shape
    head = width // heads if call.has(1) else width // (heads + 2 * groups)
    total = max(call.input(3).shape[2], steps) if call.has(3) else steps
    present = like(query, (batch, groups, total, head))
    return [like(query, (batch, steps, heads * head)), present, present]


_GROUPED = {0: (3,), 1: (3,), 2: (3,), 3: (4,), 4: (4,)}


@Rule(
    ports=(0, 1, 2, 11),
    travel=partial(along_nests, broadcast=False),
    infer=_grouped_results,
    weights={11: Role.ADDED},
    ranks=_GROUPED,
    heavy=True,
    joint=JointCut.RING,
).of("com.microsoft.GroupQueryAttention")
def group_query_attention(call: OpCall) -> OpSpec:
    """Grouped heads with past key and value; query may hold key and value too; may rotate query and key itself.

    Each head may have a score of its own in the softmax (a sink), and a query may see a window of keys only.
    """
    q = call.input(0).shape
    query_heads, key_heads = call.int_attribute("num_heads", 1), call.int_attribute("kv_num_heads", 1)
    packed = not call.has(1)
    head = q[2] // (query_heads + 2 * key_heads) if packed else q[2] // query_heads
    past = call.input(3).shape[2] if call.has(3) else 0
    keys = call.output(1).shape[2] if call.has_output(1) else q[1] + past
    window = max(0, call.int_attribute("local_window_size", -1))
    heads = Heads(q[0], query_heads, key_heads, q[1], max(keys, q[1]), head, head, window)
    rotated = 3.0 * q[0] * q[1] * (query_heads + key_heads) * head if call.int_attribute("do_rotary", 0) else 0.0
    given = {0: f"b u {_thirds(heads, q[2])}"} if packed else {0: "b s (g r d)", 1: "b u (g d)", 2: "b u (g e)"}
    given |= {3: "b g p d", 4: "b g p e", 5: "b", 11: "(g r)"}
    if call.has(5) and len(call.input(5).shape) != 1:
        given[5] = "b 1"
    nest = _nest(call, given, {0: "b s (g r e)", 1: "b g t d", 2: "b g t e"}, heads, rotated)
    roles = (call.need(0),) * 3 if packed else (call.need(0), call.need(1), call.need(2))
    return _spec(call, nest, heads, _kept(call, (0, 1, 2), 9), roles)


def _projected_results(call: OpCall) -> list[Shaped | None]:
    x, count, sizes = call.input(0), call.int_attribute("num_heads", 1), call.ints("qkv_hidden_sizes")
    batch, steps, _ = x.shape
    hidden = sizes[2] if len(sizes) == 3 else call.input(1).shape[1] // 3
    total = steps + (call.input(4).shape[3] if call.has(4) else 0)
    return [like(x, (batch, steps, hidden)), like(x, (2, batch, count, total, hidden // count))]


@Rule(
    ports=(0, 1, 2),
    infer=_projected_results,
    weights=WEIGHT_AND_BIAS,
    ranks={0: (3,), 1: (2,), 3: _MASK, 4: (5,), 5: _MASK},
    heavy=True,
).of("com.microsoft.Attention")
def projected_attention(call: OpCall) -> OpSpec:
    """Attention with its query, key and value projections inside: `x [b s i]`, weights `[i, 2 d + e]`."""
    x, weight = call.input(0), call.input(1)
    count = call.int_attribute("num_heads", 1)
    sizes = call.ints("qkv_hidden_sizes")
    width, value_width = (sizes[0], sizes[2]) if len(sizes) == 3 else (weight.shape[1] // 3, weight.shape[1] // 3)
    past = call.input(4).shape[3] if call.has(4) else 0
    batch, steps, inner = x.shape
    heads = Heads(batch, count, count, steps, steps + past, width // count, value_width // count)
    projection = 2.0 * batch * steps * inner * weight.shape[1]
    inside, nest = _projected_nests(call, heads, projection)
    weighted = projection if call.need(1) and weight.kind is TensorKind.PARAMETER else 0.0
    towards = (projection if call.need(0) else 0.0) + (projection if call.need(1) and not weighted else 0.0)
    made = keep_extra(1, batch * steps * weight.shape[1], x)
    roles = (call.trains,) * 3
    base = _spec(
        call,
        nest,
        heads,
        (made, *_kept(call, (0,), 5)),
        roles,
        input_grad=towards,
        weight_grad=weighted,
        projections=1,
    )
    return replace(base, nests=(inside, nest))


def _projected_nests(call: OpCall, heads: Heads, projection: float) -> tuple[LoopNest, LoopNest]:
    """The projection, which every query needs of all steps, and the attention over it; both by sample and head."""
    packed = _thirds(heads, call.input(1).shape[1])
    inside = call.nest(
        f"b u i, i {packed}, ?{packed}",
        sizes={"g": heads.key_heads, "d": heads.head, "three": 3},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=projection,
    )
    given = {0: "b u i", 3: _padding_terms(call, 3, heads), 4: "two b g p d", 5: _mask_terms(call, 5, heads)}
    nest = _nest(call, given, {0: "b s (g e)", 1: "two b g t d"}, heads)
    whole = tuple(replace(dim, kind=DimKind.WHOLE) if dim.name == "e" else dim for dim in nest.dims)
    return inside, replace(nest, dims=whole)


@Rule(ports=(0,), travel=partial(along_nests, broadcast=False), infer=as_first, keeps_layout=True).of(
    "RotaryEmbedding", "com.microsoft.RotaryEmbedding"
)
def rotary_embedding(call: OpCall) -> OpSpec:
    """Pairs of elements turned by position: two products and a sum each; keeps the tables, not the input.

    The standard takes (x, cos, sin, ids), com.microsoft (x, ids, cos, sin).
    """
    x = call.input(0)
    heads = _rotary_heads(call)
    names = "b g s h" if len(x.shape) == 4 else "b s (g h)" if heads else "b s h"
    terms = {position: _table_terms(call, position) for position in (1, 2, 3) if call.has(position)}
    tables = "".join(f", ?{position}:{text}" for position, text in terms.items())
    nest = call.nest(
        f"{names}{tables} -> ?{names}",
        sizes={"g": heads, "h": x.shape[-1] // heads} if heads else {},
        parallel="b g s",
        coupled="h",
        whole="v f",
        vector_flops=3.0 * x.elements,
    )
    touched = traffic(x, call.output())
    for table in call.present()[1:]:
        touched += elements_like(table, min(table.elements, x.elements))
    return streaming(
        call,
        nest,
        saved=keep_inputs(call, 1, 2, 3),
        forward=touched,
        backward=touched,
        backward_flops=3.0 * x.elements,
    )


def _rotary_heads(call: OpCall) -> int:
    """Heads in the last dimension of an input of rank 3: stated, else as wide as the tables say; 0 where unknown."""
    x = call.input(0)
    if len(x.shape) != 3:
        return 0
    tables = [t for t in call.present()[1:] if t.dtype.is_float]
    partly = call.int_attribute("rotary_embedding_dim", 0)
    head = 2 * tables[0].shape[-1] if tables and not partly else 0
    count = call.int_attribute("num_heads", 0) or (x.shape[2] // head if head else 0)
    return count if count and x.shape[2] % count == 0 else 0


def _table_terms(call: OpCall, position: int) -> str:
    """Tables by position `v f`, by sample and step `b s f`, or beside the heads; positions `b s`, or one offset."""
    table = call.input(position)
    if table.dtype.is_float:
        return {3: "b s f", 4: "b g s f"}.get(len(table.shape), "v f")
    return "b s" if len(table.shape) == 2 else "1"
