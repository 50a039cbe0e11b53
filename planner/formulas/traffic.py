"""Bytes and elements that sharding, experts and the exchange of gradients move, and sizes of models.

The other closed forms of the exchange are in `planner.exchange`; bundled models (`planner.bundled_info`) are counted by
their graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange.formulas import (
    all_reduce_bytes,
    byteps_s,
    byteps_shares,
    reduce_scatter_bytes,
    ring_all_reduce_s,
    separate_server_s,
)
from planner.formulas.checks import chosen, divides, positive, same_length, whole
from planner.operators import loop_nest
from planner.sharding import Part, StateBytes, WeightChoice, ideal_mesh
from planner.sharding.mixtures import Mixture, exchanges, model_parameters, sent_bytes
from planner.sharding.searches.tofu import Pass, cuts_of, moved_bytes


def tofu_operator_bytes(
    equation: str, tensor_bytes: Sequence[float], rests: Sequence[str], parts: int = 2
) -> dict[str, float]:
    """Bytes that all workers fetch and reduce for each way to cut an einsum in equal parts, given how its tensors rest.

    Partition-n-reduce: cutting a dimension that a tensor lacks fetches the tensor, cutting it as it does not rest moves
    a share, and partial results of a reduced dimension are added up where the result rests.

    Args:
        equation: `ik,kj->ij`.
        tensor_bytes: of the operands and the result, whole.
        rests: for each of them the dimension along which it is cut, or "" for whole copies.
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
    one = Pass("einsum", (nest,), tuple(reads), (write,))
    places = [Part(t.index(rest)) if rest else Part(-1) for t, rest in zip(terms, rests, strict=True)]
    return {
        cut.dim: math.fsum(
            moved_bytes(rest, used, parts, size, written=at == len(reads))
            for at, (rest, used, size) in enumerate(zip(places, (*cut.reads, *cut.writes), tensor_bytes, strict=True))
        )
        for cut in cuts_of(one, parts, 1.0)
    }


def _terms(equation: str) -> tuple[str, ...]:
    reads, arrow, write = equation.replace(" ", "").partition("->")
    terms = (*reads.split(","), write)
    if not arrow or not all(t.isalpha() for t in terms):
        raise UsageError(f"cannot read the einsum {equation!r}", hint="write it as ik,kj->ij")
    return terms


def tofu_total_bytes(step_bytes: Sequence[float], parts: int = 2) -> float:
    """Bytes of a recursion whose step i moves delta_i in each group made so far: sum of parts^(i-1) delta_i.

    >>> formulas.tofu_total_bytes([64, 32, 20])
    208.0
    """
    whole(2, parts=parts)
    return math.fsum(parts**i * delta for i, delta in enumerate(step_bytes))


def tofu_recursion_is_optimal(step_bytes: Sequence[float], parts: int = 2) -> bool:
    """The theorem's condition: parts^(i-1) delta_i never falls from step to step.

    >>> formulas.tofu_recursion_is_optimal([64, 32, 20]), formulas.tofu_recursion_is_optimal([64, 30])
    (True, False)
    """
    totals = [parts**i * delta for i, delta in enumerate(step_bytes)]
    return all(a <= b for a, b in itertools.pairwise(totals))


def tofu_rnn_bytes(
    layers: int, hidden: int, inputs: int = 1024, *, copies: int = 3, item_bytes: float = 4.0, workers: int = 1
) -> float:
    """Weights, gradients and history of L layers of LSTM, 4H (inputs + H) weights each; on k workers 1/k.

    >>> formulas.tofu_rnn_bytes(6, 4096) / 2**30, formulas.tofu_rnn_bytes(10, 8192) / 2**30
    (8.4375, 57.375)
    """
    whole(layers=layers, hidden=hidden, inputs=inputs, copies=copies, workers=workers)
    unit = WeightChoice((), (), ())
    each = StateBytes(item_bytes, item_bytes, item_bytes * (copies - 2))
    shapes = [(4 * hidden, (hidden if layer else inputs) + hidden) for layer in range(layers)]
    return sum(each.held(shape, unit, ()) for shape in shapes) / workers


def gshard_expert_parameters(experts: int, layers: int, width: int, hidden: int, every: int = 2) -> int:
    """Weights of all experts where every second layer is a mixture of experts of two matrices: E (L/2) 2 M H.

    >>> formulas.gshard_expert_parameters(2048, 36, width=1024, hidden=8192)
    618475290624
    """
    whole(experts=experts, layers=layers, width=width, hidden=hidden, every=every)
    return model_parameters(Mixture(experts, width, hidden), layers, every)


def gshard_capacity(group_tokens: int, experts: int, top: int = 2, factor: float = 1.0) -> int:
    """Tokens of a group that an expert takes at most: top S/E times the factor, rounded up.

    >>> formulas.gshard_capacity(2048, 128), formulas.gshard_capacity(1024, 2048)
    (32, 1)
    """
    whole(group_tokens=group_tokens, experts=experts, top=top)
    return Mixture(experts, 1, 1, top, factor).capacity(group_tokens)


def gshard_all_to_all_bytes(
    tokens: int, width: int, devices: int, top: int = 2, item_bytes: float = 2.0, *, train_step: bool = False
) -> float:
    """Bytes a device sends in one all-to-all of a mixture layer: top tokens M bytes (D-1)/D; in training four of them.

    Dispatch and combine forward, and the gradients of both. One group of `tokens` and one expert on each device.

    >>> [formulas.gshard_all_to_all_bytes(2048, 1024, 2048, train_step=t) for t in (False, True)]
    [8384512.0, 33538048.0]
    """
    whole(tokens=tokens, width=width, devices=devices, top=top)
    if tokens * top % devices:
        one = reduce_scatter_bytes(top * tokens * width * item_bytes, devices)
        return 4 * one if train_step else one
    found = exchanges(Mixture(devices, width, 1, top), ideal_mesh((devices,)), devices, tokens, item_bytes)
    return sum(map(sent_bytes, found.values())) if train_step else sent_bytes(found["dispatch"])


def gshard_all_to_all_growth(devices: int, from_devices: int) -> float:
    """How many times longer an all-to-all takes on a larger 2-D torus, bytes a device being equal: sqrt(D/D').

    >>> formulas.gshard_all_to_all_growth(2048, from_devices=128)
    4.0
    """
    whole(devices=devices, from_devices=from_devices)
    return math.sqrt(devices / from_devices)


@dataclass(frozen=True, slots=True)
class LinearElements:
    """Elements that a device sends for one linear layer in a training step.

    Attributes:
        data_parallel: all-reduce of the weight's gradient.
        grid: inputs, weights and results each gathered or scattered twice over rows or columns of a square grid.
        grid_stationary: the same with results that never move: inputs and weights three times each.
    """

    data_parallel: float
    grid: float
    grid_stationary: float


def autoddl_linear_elements(batch: int, inputs: int, outputs: int, devices: int) -> LinearElements:
    """A linear layer b x i -> o on P devices: data parallel, and in two dimensions on a grid of sqrt(P) x sqrt(P).

    Data parallel 2(P-1)/P io. On the grid each device has 1/P of x, y and w; to gather or scatter one of them over r =
    sqrt(P) devices sends (r-1)/P of it, so that 2(r-1)/P (bi + bo + io) falls as 1/sqrt(P).

    >>> found = formulas.autoddl_linear_elements(4096, 4096, 4096, devices=64)
    >>> found.data_parallel, found.grid
    (33030144.0, 11010048.0)

    Raises:
        UsageError: P is not a square.
    """
    whole(batch=batch, inputs=inputs, outputs=outputs, devices=devices)
    side = math.isqrt(devices)
    if side * side != devices:
        raise UsageError(f"{devices} devices make no square grid", hint="use a square number, or planner.sharding")
    x, y, w = batch * inputs, batch * outputs, inputs * outputs
    each = (side - 1) / devices
    return LinearElements(all_reduce_bytes(w, devices), 2 * each * (x + y + w), 3 * each * (x + w))


def tensor_parallel_layer_elements(batch: int, sequence: int, hidden: int, ranks: int) -> float:
    """Elements a rank sends for one tensor-parallel transformer layer in a training step: 4 all-reduces of b s h.

    >>> formulas.tensor_parallel_layer_elements(8, 1024, 4096, ranks=8)
    234881024.0
    """
    whole(batch=batch, sequence=sequence, hidden=hidden)
    return 4 * all_reduce_bytes(batch * sequence * hidden, ranks)


ALPA_EXTRA = {"all-gather": 0.1, "all-reduce": 0.01, "reduce-scatter": 0.001, "all-to-all": 0.001}
"""What Alpa's released cost model adds to each collective, so that ties go to the later ones."""


def alpa_collective_cost(
    kind: str, payload_bytes: float, ranks: int, latency: float = 0.0, per_byte: float = 1.0, *, extra: bool = True
) -> float:
    """Cost of a collective in Alpa's model: alpha + beta f(n) bytes, and a constant of the released program.

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
    """Meshes of a stage: powers of two within a host, then whole hosts, any number of them or powers of two.

    >>> formulas.alpa_submeshes(2, 8)
    ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))
    """
    whole(hosts=hosts, devices_per_host=devices_per_host)
    inside = [(1, 2**k) for k in range(devices_per_host.bit_length()) if 2**k < devices_per_host]
    counts = [h for h in range(1, hosts + 1) if every_host_count or h & (h - 1) == 0]
    return (*inside, *((h, devices_per_host) for h in counts))


def rabenseifner_s(payload_bytes: float, ranks: int, latency_s: float, byte_per_s: float) -> float:
    """Seconds of Rabenseifner's all-reduce: 2 log2(r) alpha + 2 (r-1)/r M/B.

    >>> formulas.rabenseifner_s(800, 8, latency_s=1, byte_per_s=100)
    20.0
    """
    whole(ranks=ranks)
    positive(byte_per_s=byte_per_s)
    return 2 * math.log2(ranks) * latency_s + ring_all_reduce_s(payload_bytes, ranks, byte_per_s)


def byteps_cpu_share(gpu_machines: int, cpu_machines: int) -> float:
    """The part of the gradients that all CPU machines sum together: 2k(n-1)/(n^2+kn-2k).

    >>> formulas.byteps_cpu_share(8, 1), formulas.byteps_cpu_share(8, 8)
    (0.2, 1.0)
    """
    return cpu_machines * byteps_shares(gpu_machines, cpu_machines).cpu


def byteps_speedup(gpu_machines: int, cpu_machines: int, over: str = "all-reduce") -> float:
    """Time of a ring all-reduce, or of k separate servers, over BytePS's; over a ring at most 2(n-1)/n, for k = n.

    >>> formulas.byteps_speedup(8, 2), round(formulas.byteps_speedup(8, 2, over="servers"), 4)
    (1.1875, 2.7143)

    Raises:
        UsageError: another way, or no server to compare with.
    """
    own = byteps_s(1.0, gpu_machines, cpu_machines, 1.0)
    if over == "all-reduce":
        other = ring_all_reduce_s(1.0, gpu_machines, 1.0)
    elif over == "servers":
        other = separate_server_s(1.0, gpu_machines, cpu_machines, 1.0)
    else:
        raise UsageError(f"unknown way {over!r}", hint="use all-reduce or servers")
    return other / own if own > 0 else 1.0


def transformer_block_parameters(hidden: int, feed_forward: int | None = None) -> int:
    """Weights of one transformer layer with biases and two norms: 4h^2 + 2hf + 9h + f; 12h^2 + 13h for f = 4h.

    >>> formulas.transformer_block_parameters(1024), 24 * formulas.transformer_block_parameters(1024)
    (12596224, 302309376)
    """
    inner = 4 * hidden if feed_forward is None else feed_forward
    whole(hidden=hidden, feed_forward=inner)
    return 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner


def bert_embedding_parameters(hidden: int, vocab: int = 30522, positions: int = 512, segments: int = 2) -> int:
    """Weights of BERT's embeddings: words, positions and segments, and their norm.

    >>> formulas.bert_embedding_parameters(1024)
    31782912
    """
    whole(hidden=hidden, vocab=vocab, positions=positions)
    return (vocab + positions + segments + 2) * hidden


def bert_parameters(layers: int, hidden: int, vocab: int = 30522, positions: int = 512) -> int:
    """Weights of BERT in pre-training: embeddings, layers, pooler, and both heads (the decoder's weights its own).

    >>> formulas.bert_parameters(48, 1024)
    669790012
    """
    whole(layers=layers)
    pooler = hidden * hidden + hidden
    words = hidden * hidden + 3 * hidden + vocab * hidden + vocab
    body = layers * transformer_block_parameters(hidden)
    return bert_embedding_parameters(hidden, vocab, positions) + body + pooler + words + 2 * hidden + 2


def gpt_embedding_parameters(hidden: int, vocab: int = 50257, positions: int = 1024) -> int:
    """Weights of GPT-2's embeddings: words and positions.

    >>> formulas.gpt_embedding_parameters(1280)
    65639680
    """
    whole(hidden=hidden, vocab=vocab, positions=positions)
    return (vocab + positions) * hidden


def gpt_parameters(layers: int, hidden: int, vocab: int = 50257, positions: int = 1024) -> int:
    """Weights of GPT-2: embeddings, which the output shares, layers, and the last norm.

    >>> formulas.gpt_parameters(12, 768)
    124439808
    """
    whole(layers=layers)
    return (
        gpt_embedding_parameters(hidden, vocab, positions) + layers * transformer_block_parameters(hidden) + 2 * hidden
    )


def largest_stage_parameters(layers: int, hidden: int, stages: int, model: str = "bert") -> int:
    """Weights of the first of D stages of equal layers: the most, with the embeddings; what its workers all-reduce.

    >>> [formulas.largest_stage_parameters(48, 1024, d) for d in (2, 4, 8, 16)]
    [334092288, 182937600, 107360256, 69571584]
    >>> formulas.largest_stage_parameters(64, 1280, 8, model="gpt")
    223059200

    Raises:
        UsageError: stages that do not divide the layers, or another model than bert or gpt.
    """
    whole(layers=layers, stages=stages)
    divides("layers", layers, "stages", stages)
    table = {"bert": bert_embedding_parameters, "gpt": gpt_embedding_parameters}
    return layers // stages * transformer_block_parameters(hidden) + chosen("model", model, table)(hidden)
