"""Recurrent networks over a whole sequence.

Matrix work: `2 T B D (g h i + g h h)` for T steps, batch B, D directions, g gates, input i, hidden h; backward the same
for each operand that needs a gradient. The input's product is one kernel for all steps; the recurrent product runs step
by step and reads its weights each time. A library runs the whole recurrence in one call, so that all kernels but the
first are launched without the framework (`library_kernels`, `library_back_kernels` in the details).
"""

from __future__ import annotations

from functools import partial

from planner.errors import ModelError
from planner.graph import TensorKind
from planner.operators.assemble import elements_like, keep_extra, keep_inputs, keep_outputs, streaming, traffic
from planner.operators.flow import along_nests
from planner.operators.site import Role, Rule, Site
from planner.operators.types import LoopNest, OpSpec


def _recurrent(site: Site, gates: int, kept_per_unit: int, flops_per_unit: float) -> OpSpec:
    """Description of a recurrence.

    Args:
        site: the call: x, w, r, bias, sequence lengths, initial states.
        gates: products a unit has.
        kept_per_unit: numbers kept for each step and unit besides the outputs (gates, cell state).
        flops_per_unit: element-wise work a step and unit.
    """
    x, w, r = site.input(0), site.input(1), site.input(2)
    batch_first = site.int_attribute("layout", 0) == 1
    if len(x.shape) != 3 or len(w.shape) != 3:
        raise ModelError(f"{site.call.op} expects an input of rank 3, not {list(x.shape)}", where=site.where)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    directions, _, inner = w.shape
    hidden = r.shape[2]
    units = float(steps * batch * directions * hidden)
    inputs, recurrent = 2.0 * units * gates * inner, 2.0 * units * gates * hidden
    sizes = {"g": gates, "h": hidden}
    nest = _nest(site, batch_first, sizes, inputs + recurrent, flops_per_unit * units)
    input_grad, weight_grad = _gradient_flops(site, inputs, recurrent, steps)
    kept = (keep_extra(0, units * kept_per_unit, x),) if kept_per_unit else ()
    outputs = keep_outputs(0) if site.has_output(0) else (keep_extra(1, units, x),)
    pre = elements_like(x, 2.0 * units * gates)
    forward = traffic(*site.present(), *site.results()) + traffic(r) * (steps - 1) + pre
    stepwise = 2 * steps * directions
    library = {"library_kernels": float(stepwise), "library_back_kernels": float(stepwise if site.trains else 0)}
    return streaming(
        site,
        nest,
        saved=(*keep_inputs(site, 0, 5, 6), *outputs, *kept),
        forward=forward,
        backward=forward + pre * 2.0 + elements_like(x, units * kept_per_unit) + traffic(x, w, r),
        kernels=1 + stepwise,
        backward_kernels=3 + stepwise,
        backward_flops=1.5 * flops_per_unit * units,
        input_grad=input_grad,
        weight_grad=weight_grad,
        extra=library,
    )


def _nest(site: Site, batch_first: bool, sizes: dict[str, int], matrix_flops: float, vector_flops: float) -> LoopNest:
    """Batch and directions are parallel; a step needs every unit of the step before it."""
    x, state, y = ("b t i", "b d h", "b t d h") if batch_first else ("t b i", "d b h", "t d b h")
    return site.nest(
        f"{x}, d (g h) i, d (g h) j, ?d bias, ?b, ?{state}, ?{state}, ?d peep -> ?{y}, ?{state}, ?{state}",
        sizes=sizes,
        parallel="b d",
        coupled="t h j",
        whole="i g bias peep",
        matrix_flops=matrix_flops,
        vector_flops=vector_flops,
    )


def _gradient_flops(site: Site, inputs: float, recurrent: float, steps: int) -> tuple[float, float]:
    """Matrix work towards activations and towards weights.

    The state's gradient flows back from step to step whenever one is needed, to the initial state only when that one
    needs it.
    """
    backward_steps = steps if site.need(5) else steps - 1
    towards, weights = (recurrent * backward_steps / max(1, steps) if site.trains else 0.0), 0.0
    if site.need(0):
        towards += inputs
    for position, work in ((1, inputs), (2, recurrent)):
        if site.need(position):
            if site.input(position).kind is TensorKind.PARAMETER:
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
def lstm(site: Site) -> OpSpec:
    """Long short-term memory: four gates and a cell state are kept for each step and unit."""
    return _recurrent(site, gates=4, kept_per_unit=5, flops_per_unit=21.0)


@_CELL.of("GRU")
def gru(site: Site) -> OpSpec:
    """Gated recurrent unit.

    For each step and unit torch's composite cell keeps 7 numbers: two gates, the candidate, the state, which is an
    output, and the recurrent products of all three (the candidate's is needed, the others lie beside it).
    """
    return _recurrent(site, gates=3, kept_per_unit=6, flops_per_unit=18.0)


@_CELL.of("RNN")
def rnn(site: Site) -> OpSpec:
    """Plain recurrence: its outputs are all that backward needs."""
    return _recurrent(site, gates=1, kept_per_unit=0, flops_per_unit=4.0)
