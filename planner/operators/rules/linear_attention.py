"""States that are carried from token to token, computed in chunks: linear attention, DeltaNet, Mamba-2.

    y_t = q_t^T S_t,    S_t = a_t S_(t-1) + k_t v_t^T,    delta rules: v_t less what S held for k_t

A head's state S is [d, e]. Tokens are taken in chunks of c: within one the work is that of attention over c keys, and
each chunk reads the state before it and hands on its own. Matrix work a token and head, by product:

    q k^T: 2 c d    scores v: 2 c e    q S: 2 d e    k v^T: 2 d e
    delta rules also    k k^T: 2 c d    its inverse times k and v: 2 c (d + e)    k S: 2 d e

The whole square of a chunk counts, as in attention; the inversion of a c x c triangle is left out. Backward is twice
that, and computes products within chunks and states again (`details["recompute_matrix_flops"]`).
Sources: Dao and Gu 2024, Transformers are SSMs, section 6; Yang et al. 2024, Gated Delta Networks, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from planner.errors import ModelError
from planner.operators.assemble import elements_like, gradient_traffic, keep_extra, keep_inputs, keep_outputs, streaming
from planner.operators.assemble import traffic as pass_over
from planner.operators.flow import along_nests
from planner.operators.site import Role, Rule, Site, as_first
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


def _chunk(site: Site, usual: int, steps: int) -> int:
    return max(1, min(site.int_attribute("chunk_size", usual), steps))


def _spec(site: Site, nest: LoopNest, scan: _Scan, saved: tuple[Saved, ...], kernels: tuple[int, int]) -> OpSpec:
    """Description of one scan.

    Args:
        site: the call.
        nest: its loop nest.
        scan: its sizes.
        saved: what is kept for backward.
        kernels: those of the forward and of the backward pass.
    """
    x = site.input(0)
    handed = elements_like(x, 2.0 * scan.passed)
    return streaming(
        site,
        nest,
        saved=saved,
        forward=pass_over(*site.present(), *site.results()) + handed,
        backward=gradient_traffic(site, saved) + handed * 3.0,
        kernels=kernels[0],
        backward_kernels=kernels[1],
        backward_flops=2.0 * nest.vector_flops,
        input_grad=2.0 * scan.matrix_flops,
        extra={"recompute_matrix_flops": scan.within if site.trains else 0.0},
    )


@Rule(
    travel=partial(along_nests, broadcast=False),
    weights={4: Role.ADDED, 5: Role.SCALE, 6: Role.BIAS},
    infer=as_first,
    ranks={**dict.fromkeys(range(4), (3,)), **dict.fromkeys((4, 5, 6), (1,))},
    heavy=True,
).of("shardplan.StateSpaceScan")
def state_space_scan(site: Site) -> OpSpec:
    """Mamba-2's scan of `x [b t h e]` with directions `B`, `C` `[b t g d]` that a group of heads shares, as one call.

    Inputs: x, B, C, step [b t h], A_log [h], D [h], step bias [h]. A token's step is `s = softplus(step + bias)`; its
    decay is `exp(-s exp(A_log))`, its value `s x`, and `D x` is added to the result. Kept: x, B, C, the raw step, the
    result, and the running sum of decays in fp32.
    """
    x, directions = site.input(0).shape, site.input(1).shape
    heads, groups = site.int_attribute("num_heads", 1), site.int_attribute("num_groups", 1)
    if heads % groups or x[2] % heads or directions[2] % groups:
        raise ModelError(f"{heads} heads in {groups} groups do not divide the widths", where=site.where)
    tokens = x[0] * x[1]
    scan = _Scan(tokens, _chunk(site, 256, x[1]), groups, heads, heads, directions[2] // groups, x[2] // heads, False)
    nest = site.nest(
        "b t (g r e), b t (g d), b t (g d), b t (g r), ?(g r), ?(g r), ?(g r) -> b t (g r e)",
        sizes={"g": groups, "r": heads // groups, "d": scan.key, "e": scan.value},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=scan.matrix_flops,
        vector_flops=tokens * heads * (4.0 * scan.chunk + 6.0 * scan.value),
    )
    saved = (*keep_inputs(site, 0, 1, 2, 3), *keep_outputs(0), keep_extra(0, tokens * heads))
    return _spec(site, nest, scan, saved, (5, 14))


@Rule(
    travel=partial(along_nests, broadcast=False),
    ranks={**dict.fromkeys((0, 1, 2, 4, 5), (3,)), 3: (4,)},
    heavy=True,
).of("LinearAttention")
def linear_attention(site: Site) -> OpSpec:
    """The standard's linear attention in its four rules; several query heads may share a state.

    Kept: query, key, value, decay, rate; delta rules also the inverted triangle of each chunk.
    """
    q, k, v = (site.input(i).shape for i in range(3))
    query_heads, heads = site.int_attribute("q_num_heads", 0), site.int_attribute("kv_num_heads", 0)
    if heads <= 0 or query_heads <= 0 or query_heads % heads:
        raise ModelError(f"{query_heads} query heads for {heads} states", where=site.where, hint="repair the model")
    delta = "delta" in site.str_attribute("update_rule", "gated_delta")
    tokens = q[0] * q[1]
    widths = (k[2] // heads, v[2] // heads)
    scan = _Scan(tokens, _chunk(site, 64, q[1]), query_heads, heads, query_heads, *widths, delta)
    decay = "b t (g d)" if site.has(4) and site.input(4).shape[2] != heads else "b t g"
    nest = site.nest(
        f"b t (g r d), b t (g d), b t (g e), ?b g d e, ?{decay}, ?b t g -> ?b t (g r e), ?b g d e",
        sizes={"g": heads, "r": query_heads // heads, "d": scan.key, "e": scan.value},
        parallel=_PARALLEL,
        coupled=_COUPLED,
        whole=_WHOLE,
        matrix_flops=scan.matrix_flops,
        vector_flops=tokens * query_heads * (4.0 * scan.chunk + 2.0 * scan.value),
    )
    triangle = (keep_extra(0, tokens * heads * scan.chunk, site.input(0)),) if delta else ()
    return _spec(site, nest, scan, (*keep_inputs(site, 0, 1, 2, 4, 5), *triangle), (6, 9) if delta else (3, 6))
