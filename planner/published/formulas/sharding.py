"""Bytes and elements sent by sharded operators, experts and gradient exchange; named layouts; model sizes.

More closed forms of gradient exchange are in `planner.exchange`; sizes of bundled models in `planner.bundled_info`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.errors import UsageError, divides, same_length, whole
from planner.exchange.formulas import (
    all_reduce_bytes,
    byteps_s,
    byteps_shares,
    reduce_scatter_bytes,
    ring_all_reduce_s,
    separate_server_s,
)
from planner.operators import loop_nest
from planner.registry import chosen
from planner.sharding import Part, StateBytes, WeightChoice
from planner.sharding.named_layout import (
    LayoutAnswer,
    NamedOperation,
    NamedProgram,
    NamedTensor,
    assignments,
    best_layout,
    peak_bytes,
    schedule,
)
from planner.sharding.searches.tofu import Pass, cuts_of, moved_bytes
from planner.sums import float_sum


def tofu_operator_bytes(
    equation: str, tensor_bytes: Sequence[float], rests: Sequence[str], parts: int = 2
) -> dict[str, float]:
    """Bytes that all workers send, by the dimension along which an einsum is cut, given how its tensors are stored.

    Partition-n-reduce: if a tensor lacks the dimension, all of it is fetched; if it is stored cut along another, a
    share is fetched; partial results of a reduced dimension are summed where the result is stored.

    Args:
        equation: `ik,kj->ij`.
        tensor_bytes: full bytes of the operands and the result.
        rests: for each of them the dimension along which it is stored cut, or "" if every worker has a copy.
        parts: workers of this step.

    >>> formulas.tofu_operator_bytes("ik,kj->ij", [64, 64, 64], rests=["i", "k", "i"])
    {'i': 64.0, 'k': 96.0, 'j': 128.0}

    Raises:
        UsageError: the equation cannot be read, or sizes or rests do not match it.
    """
    whole(2, parts=parts)
    terms = _terms(equation)
    same_length(tensors=terms, tensor_bytes=tensor_bytes, rests=rests)
    for term, rest in zip(terms, rests, strict=True):
        if rest and rest not in term:
            raise UsageError(f"a tensor {term!r} cannot rest cut along {rest!r}", hint=f"use one of {', '.join(term)}")
    reads, write = terms[:-1], terms[-1]
    text = f"{', '.join(' '.join(t) for t in reads)} -> {' '.join(write)}"
    shapes = [(k, (parts,) * len(t)) for k, t in enumerate(reads)]
    nest = loop_nest(text, shapes, [(0, (parts,) * len(write))], contraction=True)
    forward = Pass("einsum", (nest,), tuple(reads), (write,))
    places = [Part(t.index(rest)) if rest else Part(-1) for t, rest in zip(terms, rests, strict=True)]
    return {
        cut.dim: math.fsum(
            moved_bytes(rest, used, parts, size, written=at == len(reads))
            for at, (rest, used, size) in enumerate(zip(places, (*cut.reads, *cut.writes), tensor_bytes, strict=True))
        )
        for cut in cuts_of(forward, parts, 1.0)
    }


def _terms(equation: str) -> tuple[str, ...]:
    reads, arrow, write = equation.replace(" ", "").partition("->")
    terms = (*reads.split(","), write)
    if not arrow or not all(t.isalpha() for t in terms):
        raise UsageError(f"cannot read the einsum {equation!r}", hint="write it as ik,kj->ij")
    return terms


def tofu_rnn_bytes(
    layers: int, hidden: int, inputs: int = 1024, *, copies: int = 3, item_bytes: float = 4.0, workers: int = 1
) -> float:
    """Bytes per worker of weights, gradients and history of L LSTM layers with 4H (inputs + H) weights each.

    >>> formulas.tofu_rnn_bytes(6, 4096) / 2**30, formulas.tofu_rnn_bytes(10, 8192) / 2**30
    (8.4375, 57.375)
    """
    whole(layers=layers, hidden=hidden, inputs=inputs, copies=copies, workers=workers)
    unit = WeightChoice((), (), ())
    state_bytes = StateBytes(item_bytes, item_bytes, item_bytes * (copies - 2))
    shapes = [(4 * hidden, (hidden if layer else inputs) + hidden) for layer in range(layers)]
    return float_sum(state_bytes.held(shape, unit, ()) for shape in shapes) / workers


def gshard_expert_parameters(experts: int, layers: int, width: int, hidden: int, every: int = 2) -> int:
    """Weights of all experts if every second layer has E experts of two matrices: E (L/2) 2 M H.

    >>> formulas.gshard_expert_parameters(2048, 36, width=1024, hidden=8192)
    618475290624
    """
    whole(experts=experts, layers=layers, width=width, hidden=hidden, every=every)
    return experts * (layers // every) * 2 * width * hidden


def gshard_capacity(group_tokens: int, experts: int, top: int = 2, factor: float = 1.0) -> int:
    """Capacity of an expert: at most top S/E tokens of a group times the factor, rounded up.

    >>> formulas.gshard_capacity(2048, 128), formulas.gshard_capacity(1024, 2048)
    (32, 1)
    """
    whole(group_tokens=group_tokens, experts=experts, top=top)
    return math.ceil(top * group_tokens / experts * factor)


def gshard_all_to_all_bytes(
    tokens: int, width: int, devices: int, top: int = 2, item_bytes: float = 2.0, *, train_step: bool = False
) -> float:
    """Bytes a device sends in one all-to-all of a mixture layer: top tokens M bytes (D-1)/D.

    A training step has four: dispatch and combine forward, and the gradients of both. Each device has one group of
    `tokens` and one expert.

    >>> [formulas.gshard_all_to_all_bytes(2048, 1024, 2048, train_step=t) for t in (False, True)]
    [8384512.0, 33538048.0]
    """
    whole(tokens=tokens, width=width, devices=devices, top=top)
    sent = reduce_scatter_bytes(top * tokens * width * item_bytes, devices)
    return 4 * sent if train_step else sent


def autoddl_linear_elements(batch: int, inputs: int, outputs: int, devices: int) -> tuple[float, float, float]:
    """Elements sent for a linear layer b x i -> o on P devices: data parallel, and on a grid of sqrt(P) x sqrt(P).

    Data parallel: 2(P-1)/P io. On the grid each device has 1/P of x, y and w. Gathering or scattering one of them over
    r = sqrt(P) devices sends (r-1)/P of it, in all 2(r-1)/P (bi + bo + io), which falls as 1/sqrt(P).

    >>> formulas.autoddl_linear_elements(4096, 4096, 4096, devices=64)
    (33030144.0, 11010048.0, 11010048.0)

    Returns:
        Elements that a device sends in a training step: data parallel, for the weight's gradient; on a grid, inputs,
        weights and results, each gathered or scattered twice; and on a grid where results stay in place, inputs and
        weights, three times each.

    Raises:
        UsageError: P is not a square.
    """
    whole(batch=batch, inputs=inputs, outputs=outputs, devices=devices)
    side = math.isqrt(devices)
    if side * side != devices:
        raise UsageError(f"{devices} devices make no square grid", hint="use a square number, or planner.sharding")
    x, y, w = batch * inputs, batch * outputs, inputs * outputs
    share = (side - 1) / devices
    return all_reduce_bytes(w, devices), 2 * share * (x + y + w), 3 * share * (x + w)


ALPA_EXTRA = {"all-gather": 0.1, "all-reduce": 0.01, "reduce-scatter": 0.001, "all-to-all": 0.001}
"""Constant that Alpa's released cost model adds to each collective as a tie-breaker."""


def alpa_collective_cost(
    kind: str, payload_bytes: float, ranks: int, latency: float = 0.0, per_byte: float = 1.0, *, extra: bool = True
) -> float:
    """Cost of a collective in Alpa's model: alpha + beta f(n) bytes, plus a constant in the released program.

    f is 2(n-1)/n for all-reduce, (n-1)/n for all-gather and reduce-scatter, (n-1)/n^2 n/2 for all-to-all.

    >>> formulas.alpa_collective_cost("all-reduce", 8, 4, latency=1, per_byte=0.5)
    7.01
    >>> formulas.alpa_collective_cost("all-to-all", 8, 4, extra=False)
    3.0
    """
    whole(ranks=ranks)
    constant = chosen("collective", kind, ALPA_EXTRA)
    moved = {
        "all-reduce": all_reduce_bytes(payload_bytes, ranks),
        "all-to-all": reduce_scatter_bytes(payload_bytes, ranks) / 2,
    }.get(kind, reduce_scatter_bytes(payload_bytes, ranks))
    return latency + per_byte * moved + (constant if extra else 0.0)


def alpa_submeshes(hosts: int, devices_per_host: int, *, every_host_count: bool = True) -> tuple[tuple[int, int], ...]:
    """Meshes that a stage may have: powers of two devices of a host, or any number (or powers of two) of full hosts.

    >>> formulas.alpa_submeshes(2, 8)
    ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))
    """
    whole(hosts=hosts, devices_per_host=devices_per_host)
    inside = [(1, 2**k) for k in range(devices_per_host.bit_length()) if 2**k < devices_per_host]
    counts = [h for h in range(1, hosts + 1) if every_host_count or h & (h - 1) == 0]
    return (*inside, *((h, devices_per_host) for h in counts))


def byteps_cpu_share(gpu_machines: int, cpu_machines: int) -> float:
    """Fraction of the gradients that the CPU machines sum: 2k(n-1)/(n^2+kn-2k).

    >>> formulas.byteps_cpu_share(8, 1), formulas.byteps_cpu_share(8, 8)
    (0.2, 1.0)
    """
    return cpu_machines * byteps_shares(gpu_machines, cpu_machines)[0]


def byteps_speedup(gpu_machines: int, cpu_machines: int, over: str = "all-reduce") -> float:
    """Speed-up of BytePS over a ring all-reduce, or over k separate servers; over a ring at most 2(n-1)/n, for k = n.

    >>> formulas.byteps_speedup(8, 2), round(formulas.byteps_speedup(8, 2, over="servers"), 4)
    (1.1875, 2.7143)

    Raises:
        UsageError: `over` is unknown, or there is no server to compare with.
    """
    byteps_time_s = byteps_s(1.0, gpu_machines, cpu_machines, 1.0)
    if over == "all-reduce":
        other = ring_all_reduce_s(1.0, gpu_machines, 1.0)
    elif over == "servers":
        other = separate_server_s(1.0, gpu_machines, cpu_machines, 1.0)
    else:
        raise UsageError(f"unknown way {over!r}", hint="use all-reduce or servers")
    return other / byteps_time_s if byteps_time_s > 0 else 1.0


def transformer_block_parameters(hidden: int, feed_forward: int | None = None) -> int:
    """Weights of one transformer layer with biases and two norms: 4h^2 + 2hf + 9h + f; 12h^2 + 13h for f = 4h.

    >>> formulas.transformer_block_parameters(1024), 24 * formulas.transformer_block_parameters(1024)
    (12596224, 302309376)
    """
    inner = 4 * hidden if feed_forward is None else feed_forward
    whole(hidden=hidden, feed_forward=inner)
    return 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner


EMBEDDED_ROWS = {"bert": 30522 + 512 + 2 + 2, "gpt": 50257 + 1024}
"""Rows of width h in the embeddings: BERT's words, positions, segments and norm; GPT-2's words and positions."""


def largest_stage_parameters(layers: int, hidden: int, stages: int, model: str = "bert") -> int:
    """Weights of the first of D stages of equal layers, which has the embeddings and is the largest.

    >>> [formulas.largest_stage_parameters(48, 1024, d) for d in (2, 4, 8, 16)]
    [334092288, 182937600, 107360256, 69571584]
    >>> formulas.largest_stage_parameters(64, 1280, 8, model="gpt")
    223059200

    Raises:
        UsageError: the stages do not divide the layers, or the model is neither bert nor gpt.
    """
    whole(layers=layers, hidden=hidden, stages=stages)
    divides("layers", layers, "stages", stages)
    rows = chosen("model", model, EMBEDDED_ROWS)
    return layers // stages * transformer_block_parameters(hidden) + rows * hidden


def mesh_tensorflow_feed_forward_elements(
    batch: int, width: int, hidden: int, batch_ranks: int, hidden_ranks: int
) -> tuple[float, float]:
    """Elements of the all-reduces of two products b x d -> h -> d, batch and hidden each split over a mesh dimension.

    Activations: the result forward and the input's gradient backward, 2 x 2(r-1)/r b/r' d for r ranks of the hidden and
    r' of the batch dimension; weights 2(r'-1)/r' 2 d h/r.

    >>> formulas.mesh_tensorflow_feed_forward_elements(512, 1024, 4096, batch_ranks=4, hidden_ranks=4)
    (393216.0, 3145728.0)

    Returns:
        Elements that a rank sends in a training step for activations, and for weights.
    """
    whole(batch_ranks=batch_ranks, hidden_ranks=hidden_ranks)
    divides("batch", batch, "ranks", batch_ranks)
    divides("hidden", hidden, "ranks", hidden_ranks)
    activations = 2 * all_reduce_bytes(batch / batch_ranks * width, hidden_ranks)
    return activations, all_reduce_bytes(2 * width * hidden / hidden_ranks, batch_ranks)


def mesh_tensorflow_mesh_shapes(devices: int, most_dims: int | None = None) -> tuple[tuple[int, ...], ...]:
    """All shapes of a mesh with non-increasing dimensions, at most `most_dims` of them.

    >>> formulas.mesh_tensorflow_mesh_shapes(16, most_dims=2), len(formulas.mesh_tensorflow_mesh_shapes(512))
    (((16,), (8, 2), (4, 4)), 30)
    """
    whole(devices=devices, most_dims=1 if most_dims is None else most_dims)

    def shapes(left: int, largest: int, dims: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [()]
        return [
            (n, *rest)
            for n in range(min(left, largest), 1, -1)
            if dims and left % n == 0
            for rest in shapes(left // n, n, dims - 1)
        ]

    return tuple(shapes(devices, devices, most_dims or devices)) if devices > 1 else ((1,),)


def mesh_tensorflow_layout_and_mesh(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    devices: int,
    most_dims: int | None = None,
    unsplittable: Sequence[str] = (),
    item_bytes: float = 4.0,
) -> tuple[dict[str, int], str, float]:
    """The mesh shape and layout of minimum peak memory on a number of devices; the first shape among equals.

    >>> formulas.mesh_tensorflow_layout_and_mesh("ab,bc->ac", {"a": 10, "b": 5, "c": 20}, devices=8)
    ({'mesh_0': 4, 'mesh_1': 2}, 'a:mesh_1;c:mesh_0', 300.0)

    Returns:
        Ranks of each mesh dimension, the layout, and the peak memory of a rank.
    """
    program = named_program(equations, sizes, item_bytes)
    best: tuple[dict[str, int], str, float] | None = None
    for shape in mesh_tensorflow_mesh_shapes(devices, most_dims):
        mesh = {f"mesh_{i}": ranks for i, ranks in enumerate(shape)}
        found = best_layout(program, mesh, unsplittable=unsplittable)
        if best is None or found.peak_bytes < best[2]:
            best = mesh, str(found), found.peak_bytes
    if best is None:
        raise UsageError(f"{devices} devices make no mesh", hint="use one or more")
    return best


def mesh_tensorflow_layout(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    unsplittable: Sequence[str] = (),
    item_bytes: float = 4.0,
) -> LayoutAnswer:
    """The layout of minimum peak memory, as auto_mtf chooses it; among equals the one that splits most dimensions.

    Args:
        equations: einsums over one-letter dimensions; a tensor used twice has a name (`x:ab,bc->y:ac`, `y:ac,cd->ad`).
            Operands that no equation computes are inputs, which stay in memory.
        sizes: size of each dimension.
        mesh: ranks of each mesh dimension.
        unsplittable: dimensions that must not be split.
        item_bytes: bytes of an element.

    >>> sizes = {"a": 10, "b": 5, "c": 20}
    >>> found = formulas.mesh_tensorflow_layout("ab,bc->ac", sizes, {"m1": 4, "m2": 2})
    >>> str(found), found.peak_bytes
    ('a:m2;c:m1', 300.0)
    """
    return best_layout(named_program(equations, sizes, item_bytes), mesh, unsplittable=unsplittable)


def mesh_tensorflow_peak_bytes(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    layout: str,
    item_bytes: float = 4.0,
) -> float:
    """Peak memory of a rank over the program, in bytes, under a layout `a:m2;c:m1`.

    >>> formulas.mesh_tensorflow_peak_bytes("ab,bc->ac", {"a": 10, "b": 5, "c": 20}, {"m1": 4, "m2": 2}, "a:m2;c:m1")
    300.0
    """
    where = {dim: axis for dim, _, axis in (item.partition(":") for item in layout.split(";") if item)}
    program = named_program(equations, sizes, item_bytes)
    for dim, axis in where.items():
        if dim not in sizes or axis not in mesh:
            raise UsageError(f"the layout gives {dim!r} to {axis!r}", hint="name a dimension and a mesh dimension")
        divides(f"elements of {dim}", sizes[dim], f"ranks of {axis}", mesh[axis])
    return peak_bytes(program, mesh, where)


def mesh_tensorflow_schedule(equations: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The order of operations that auto_mtf assumes: of those ready, the one after which the fewest bytes are live.

    An equation without operands (`->x:ab`) creates a tensor that is freed after its last use; results that are never
    read are kept.

    >>> made = ["->x:ab", "->y:bc", "x:ab,y:bc->z:abc", "x:ab,y:bc->w:ac", "w:ac->v:abc"]
    >>> formulas.mesh_tensorflow_schedule(made, {"a": 3, "b": 4, "c": 5})
    (0, 1, 3, 2, 4)
    """
    return schedule(named_program(equations, sizes))


def mesh_tensorflow_assignments(dims: int, mesh_dims: int) -> int:
    """Number of injective partial assignments of tensor dimensions to mesh dimensions: sum over k of C(n,k) m!/(m-k)!.

    >>> formulas.mesh_tensorflow_assignments(3, 2)
    13
    """
    whole(0, dims=dims, mesh_dims=mesh_dims)
    return sum(1 for _ in assignments([f"d{i}" for i in range(dims)], [f"m{i}" for i in range(mesh_dims)]))


def named_program(equations: str | Sequence[str], sizes: Mapping[str, int], item_bytes: float = 4.0) -> NamedProgram:
    """A program of einsums over named dimensions; see `mesh_tensorflow_layout`.

    >>> program = formulas.named_program(["x:ab,bc->y:ac", "y:ac,cd->ad"], dict.fromkeys("abcd", 2))
    >>> [t.name for t in program.tensors]
    ['x', 't1', 'y', 't3', 't4']

    Raises:
        UsageError: an equation cannot be read, or a dimension has no size.
    """
    tensors: dict[str, NamedTensor] = {}
    operations = []
    for equation in [equations] if isinstance(equations, str) else equations:
        reads, _, write = equation.replace(" ", "").partition("->")
        names = []
        for term in (*(reads.split(",") if reads else ()), write):
            name, colon, dims = term.partition(":")
            name, dims = (name, dims) if colon else (f"t{len(tensors)}", name)
            missing = [d for d in dims if d not in sizes]
            if not dims or missing:
                raise UsageError(
                    f"cannot read {term!r} in {equation!r}", hint="every letter is a dimension with a size"
                )
            tensors.setdefault(name, NamedTensor(name, tuple(dims), tuple(sizes[d] for d in dims), item_bytes))
            names.append(name)
        operations.append(NamedOperation(tuple(names[:-1]), (names[-1],)))
    return NamedProgram(tuple(tensors.values()), tuple(operations))
