"""Recurrent networks, and states carried from token to token in chunks: linear attention, DeltaNet, Mamba-2.

    y_t = q_t^T S_t,    S_t = a_t S_(t-1) + k_t v_t^T,    delta rules: v_t less what S held for k_t

A head's state S is [d, e]. Tokens are taken in chunks of c: within one the work is that of attention over c keys, and
each chunk reads the state before it and hands on its own. Matrix work a token and head, by product:

    q k^T: 2 c d    scores v: 2 c e    q S: 2 d e    k v^T: 2 d e
    delta rules also    k k^T: 2 c d    its inverse times k and v: 2 c (d + e)    k S: 2 d e

The whole square of a chunk counts, as in attention; the inversion of a c x c triangle is left out. Backward is twice
that, and computes products within chunks and states again (`details["recompute_matrix_flops"]`).
Sources: Dao and Gu 2024, Transformers are SSMs, section 6; Yang et al. 2024, Gated Delta Networks, section 3.3.

Recurrent networks run over a whole sequence. Matrix work: `2 T B D (g h i + g h h)` for T steps, batch B, D directions,
g gates, input i, hidden h; backward the same for each operand that needs a gradient. The input's product is one kernel
for all steps; the recurrent product runs step by step and reads its weights each time. A library runs the whole
recurrence in one call, so that all kernels but the first are launched without the framework (`library_kernels`,
`library_back_kernels` in the details).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from planner.errors import ModelError
from planner.graph import TensorKind
from planner.operators.assemble import (
    elements_like,
    gradient_traffic,
    keep_extra,
    keep_inputs,
    keep_outputs,
    streaming,
    traffic,
)
from planner.operators.entry import OpCall, Role, Rule, as_first
from planner.operators.flow import along_nests
from planner.operators.types import LoopNest, OpSpec, Saved

_PARALLEL, _WHOLE, _COUPLED = "b g r", "d e", "t"


@dataclass(frozen=True, slots=True)
class _Scan:
    """Sizes of a scan.

    Attributes:
        tokens: of all samples.
        chunk: tokens in a chunk.
        scores: heads with a product of queries and keys of their own.
        states: heads with a state of their own.
        outputs: heads of results.
        key: width of a query or key.
        value: width of a value.
        delta: a key's old value is taken out of the state.
    """

    tokens: int
    chunk: int
    scores: int
    states: int
    outputs: int
    key: int
    value: int
    delta: bool

    @property
    def within(self) -> float:
        """Matrix work of the products that are computed again in backward: scores, and each chunk's share of states."""
        square = self.states * self.chunk * (2 * self.key + self.value) if self.delta else 0
        return 2.0 * self.tokens * (self.scores * self.chunk * self.key + self.states * self.key * self.value + square)

    @property
    def matrix_flops(self) -> float:
        """Matrix work of the forward pass."""
        old = self.states * self.key * self.value if self.delta else 0
        return self.within + 2.0 * self.tokens * (self.outputs * self.value * (self.chunk + self.key) + old)

    @property
    def passed(self) -> float:
        """Elements that one kernel hands to the next: states at the chunks' ends, scores, replaced keys and values."""
        states = self.tokens / self.chunk * self.states * self.key * self.value
        replaced = self.states * (self.chunk + self.key + self.value) if self.delta else 0
        return states + self.tokens * (self.scores * self.chunk + replaced)


def _chunk(call: OpCall, usual: int, steps: int) -> int:
    return max(1, min(call.int_attribute("chunk_size", usual), steps))


def _spec(call: OpCall, nest: LoopNest, scan: _Scan, saved: tuple[Saved, ...], kernels: tuple[int, int]) -> OpSpec:
    """Description of one scan.

    Args:
        call: the operator and its tensors.
        nest: its loop nest.
        scan: its sizes.
        saved: what is kept for backward.
        kernels: those of the forward and of the backward pass.
    """
    x = call.input(0)
    handed = elements_like(x, 2.0 * scan.passed)
    return streaming(
        call,
        nest,
        saved=saved,
        forward=traffic(*call.present(), *call.results()) + handed,
        backward=gradient_traffic(call, saved) + handed * 3.0,
        kernels=kernels[0],
        backward_kernels=kernels[1],
        backward_flops=2.0 * nest.vector_flops,
        input_grad=2.0 * scan.matrix_flops,
        extra={"recompute_matrix_flops": scan.within if call.trains else 0.0},
    )


@Rule(
    travel=partial(along_nests, broadcast=False),
    weights={4: Role.ADDED, 5: Role.SCALE, 6: Role.BIAS},
    infer=as_first,
    ranks={**dict.fromkeys(range(4), (3,)), **dict.fromkeys((4, 5, 6), (1,))},
    heavy=True,
    scans=True,
).of("shardplan.StateSpaceScan")
def state_space_scan(call: OpCall) -> OpSpec:
    """Mamba-2's scan of `x [b t h e]` with directions `B`, `C` `[b t g d]` that a group of heads shares, as one call.

    Inputs: x, B, C, step [b t h], A_log [h], D [h], step bias [h]. A token's step is `s = softplus(step + bias)`; its
    decay is `exp(-s exp(A_log))`, its value `s x`, and `D x` is added to the result. Kept: x, B, C, the raw step, the
    result, and the running sum of decays in fp32.
    """
    x, directions = call.input(0).shape, call.input(1).shape
    heads, groups = call.int_attribute("num_heads", 1), call.int_attribute("num_groups", 1)
    if heads % groups or x[2] % heads or directions[2] % groups:
        raise ModelError(f"{heads} heads in {groups} groups do not divide the widths", where=call.where)
    tokens = x[0] * x[1]
    scan = _Scan(tokens, _chunk(call, 256, x[1]), groups, heads, heads, directions[2] // groups, x[2] // heads, False)
    nest = call.nest(
        "b t (g r e), b t (g d), b t (g d), b t (g r), ?(g r), ?(g r), ?(g r) -> b t (g r e)",
        sizes={"g": groups, "r": heads // groups, "d": scan.key, "e": scan.value},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=scan.matrix_flops,
        vector_flops=tokens * heads * (4.0 * scan.chunk + 6.0 * scan.value),
    )
    saved = (*keep_inputs(call, 0, 1, 2, 3), *keep_outputs(0), keep_extra(0, tokens * heads))
    return _spec(call, nest, scan, saved, (5, 14))


@Rule(
    travel=partial(along_nests, broadcast=False),
    ranks={**dict.fromkeys((0, 1, 2, 4, 5), (3,)), 3: (4,)},
    heavy=True,
    scans=True,
).of("LinearAttention")
def linear_attention(call: OpCall) -> OpSpec:
    """The standard's linear attention in its four rules; several query heads may share a state.

    Kept: query, key, value, decay, rate; delta rules also the inverted triangle of each chunk.
    """
    q, k, v = (call.input(i).shape for i in range(3))
    query_heads, heads = call.int_attribute("q_num_heads", 0), call.int_attribute("kv_num_heads", 0)
    if heads <= 0 or query_heads <= 0 or query_heads % heads:
        raise ModelError(f"{query_heads} query heads for {heads} states", where=call.where, hint="repair the model")
    delta = "delta" in call.str_attribute("update_rule", "gated_delta")
    tokens = q[0] * q[1]
    widths = (k[2] // heads, v[2] // heads)
    scan = _Scan(tokens, _chunk(call, 64, q[1]), query_heads, heads, query_heads, *widths, delta)
    decay = "b t (g d)" if call.has(4) and call.input(4).shape[2] != heads else "b t g"
    nest = call.nest(
        f"b t (g r d), b t (g d), b t (g e), ?b g d e, ?{decay}, ?b t g -> ?b t (g r e), ?b g d e",
        sizes={"g": heads, "r": query_heads // heads, "d": scan.key, "e": scan.value},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=scan.matrix_flops,
        vector_flops=tokens * query_heads * (4.0 * scan.chunk + 2.0 * scan.value),
    )
    triangle = (keep_extra(0, tokens * heads * scan.chunk, call.input(0)),) if delta else ()
    return _spec(call, nest, scan, (*keep_inputs(call, 0, 1, 2, 4, 5), *triangle), (6, 9) if delta else (3, 6))


def _recurrent(call: OpCall, gates: int, kept_per_unit: int, flops_per_unit: float) -> OpSpec:
    """Description of a recurrence.

    Args:
        call: the operator and its tensors: x, w, r, bias, sequence lengths, initial states.
        gates: products a unit has.
        kept_per_unit: numbers kept for each step and unit besides the outputs (gates, cell state).
        flops_per_unit: element-wise work a step and unit.
    """
    x, w, r = call.input(0), call.input(1), call.input(2)
    batch_first = call.int_attribute("layout", 0) == 1
    if len(x.shape) != 3 or len(w.shape) != 3:
        raise ModelError(f"{call.op} expects an input of rank 3, not {list(x.shape)}", where=call.where)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    directions, _, inner = w.shape
    hidden = r.shape[2]
    units = float(steps * batch * directions * hidden)
    inputs, recurrent = 2.0 * units * gates * inner, 2.0 * units * gates * hidden
    sizes = {"g": gates, "h": hidden}
    nest = _nest(call, batch_first, sizes, inputs + recurrent, flops_per_unit * units)
    input_grad, weight_grad = _gradient_flops(call, inputs, recurrent, steps)
    kept = (keep_extra(0, units * kept_per_unit, x),) if kept_per_unit else ()
    outputs = keep_outputs(0) if call.has_output(0) else (keep_extra(1, units, x),)
    pre = elements_like(x, 2.0 * units * gates)
    forward = traffic(*call.present(), *call.results()) + traffic(r) * (steps - 1) + pre
    stepwise = 2 * steps * directions
    library = {"library_kernels": float(stepwise), "library_back_kernels": float(stepwise if call.trains else 0)}
    return streaming(
        call,
        nest,
        saved=(*keep_inputs(call, 0, 5, 6), *outputs, *kept),
        forward=forward,
        backward=forward + pre * 2.0 + elements_like(x, units * kept_per_unit) + traffic(x, w, r),
        kernels=1 + stepwise,
        backward_kernels=3 + stepwise,
        backward_flops=1.5 * flops_per_unit * units,
        input_grad=input_grad,
        weight_grad=weight_grad,
        extra=library,
    )


def _nest(call: OpCall, batch_first: bool, sizes: dict[str, int], matrix_flops: float, vector_flops: float) -> LoopNest:
    """Batch and directions are parallel; a step needs every unit of the step before it."""
    x, state, y = ("b t i", "b d h", "b t d h") if batch_first else ("t b i", "d b h", "t d b h")
    return call.nest(
        f"{x}, d (g h) i, d (g h) j, ?d bias, ?b, ?{state}, ?{state}, ?d peep -> ?{y}, ?{state}, ?{state}",
        sizes=sizes,
        parallel="b d",
        coupled="t h j",
        whole="i g bias peep",
        matrix_flops=matrix_flops,
        vector_flops=vector_flops,
    )


def _gradient_flops(call: OpCall, inputs: float, recurrent: float, steps: int) -> tuple[float, float]:
    """Matrix work towards activations and towards weights.

    The state's gradient flows back from step to step whenever one is needed, to the initial state only when that one
    needs it.
    """
    backward_steps = steps if call.need(5) else steps - 1
    towards, weights = (recurrent * backward_steps / max(1, steps) if call.trains else 0.0), 0.0
    if call.need(0):
        towards += inputs
    for position, work in ((1, inputs), (2, recurrent)):
        if call.need(position):
            if call.input(position).kind is TensorKind.PARAMETER:
                weights += work
            else:
                towards += work
    return towards, weights


_CELL = Rule(
    ports=(0, 1, 2, 3, 5, 6, 7),
    travel=partial(along_nests, broadcast=False),
    weights={1: Role.OF_INPUT, 2: Role.OF_STATE, 3: Role.BIAS, 7: Role.PEEPHOLE},
    ranks=dict.fromkeys((0, 1, 2), (3,)),
    heavy=True,
)


@_CELL.of("LSTM")
def lstm(call: OpCall) -> OpSpec:
    """Long short-term memory: four gates and a cell state are kept for each step and unit."""
    return _recurrent(call, gates=4, kept_per_unit=5, flops_per_unit=21.0)


@_CELL.of("GRU")
def gru(call: OpCall) -> OpSpec:
    """Gated recurrent unit.

    For each step and unit torch's composite cell keeps 7 numbers: two gates, the candidate, the state, which is an
    output, and the recurrent products of all three (the candidate's is needed, the others lie beside it).
    """
    return _recurrent(call, gates=3, kept_per_unit=6, flops_per_unit=18.0)


@_CELL.of("RNN")
def rnn(call: OpCall) -> OpSpec:
    """Plain recurrence: its outputs are all that backward needs."""
    return _recurrent(call, gates=1, kept_per_unit=0, flops_per_unit=4.0)
