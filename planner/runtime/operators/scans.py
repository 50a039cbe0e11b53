"""Recurrent layers with a matrix as state, chunk by chunk: linear attention in its four rules, and Mamba-2's scan.

Within a chunk of tokens the recurrence is written as products of matrices, as kernels do: with decays `a`, keys `k`,
values `v` and the state `S` before the chunk,

    S_t = (a_1 .. a_t) S + sum_i (a_i+1 .. a_t) k_i u_i^T,    u_i = v_i,

and by a delta rule with rates `b`, `u_t = b_t (v_t - a_t S_t-1^T k_t)`: a triangular system of equations (Yang et al.,
Parallelizing Linear Transformers with the Delta Rule, NeurIPS 2024; Dao and Gu, Mamba-2, ICML 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import OperatorCall, rule
from planner.runtime.operators.kernels import repeated


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """Queries, keys and values of the heads of a recurrence.

    Attributes:
        q: queries [b, heads, queries of a head, t, d].
        k: keys [b, heads, t, d].
        v: values [b, heads, t, e].
        decay: logarithm of the decay [b, heads, t, 1], or [.., d] where each dimension of a key has its own.
        rate: of a delta rule [b, heads, t, 1]; None by other rules.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor | None

    def run(self, state: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Results [b, heads, queries of a head, t, e] and the last state, from the first one [b, heads, d, e]."""
        results = []
        chunk = 1 if self.decay.shape[-1] > 1 else chunk
        for first in range(0, self.k.shape[2], chunk):
            result, state = self._chunk(slice(first, first + chunk), state)
            results.append(result)
        return torch.cat(results, 3), state

    def _chunk(self, at: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, u = self.q[..., at, :], self.k[..., at, :], self.v[..., at, :]
        total = self.decay[..., at, :].cumsum(2)  # the decay since the state before the chunk
        ratio = total[..., :1] - total[..., :1].transpose(2, 3)  # from each token to each later one
        since = ratio.masked_fill(torch.ones_like(ratio, dtype=torch.bool).triu(1), -torch.inf).exp()
        turned = k.transpose(2, 3)
        if self.rate is not None:
            rate = self.rate[..., at, :]
            replaced = (rate * (k @ turned) * since).tril(-1)
            given = rate * (u - (k * total.exp()) @ state)
            u = torch.linalg.solve_triangular(replaced, given, upper=False, unitriangular=True)
        scores = (q @ turned.unsqueeze(2)) * since.unsqueeze(2)
        result = (q * total.exp().unsqueeze(2)) @ state.unsqueeze(2) + scores @ u.unsqueeze(2)
        last = total[..., -1:, :]
        state = last.exp().transpose(2, 3) * state + (k * (last - total).exp()).transpose(2, 3) @ u
        return result, state


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, t, heads d] as [b, heads, t, d]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


@rule("LinearAttention")
def _linear_attention(c: OperatorCall) -> list[torch.Tensor]:
    query_heads, heads = int(c.attr("q_num_heads", 0)), int(c.attr("kv_num_heads", 0))
    update = str(c.attr("update_rule", "gated_delta"))
    if update not in ("linear", "gated", "delta", "gated_delta"):
        raise ModelError(f"no rule {update!r} of linear attention", where=c.name, hint="use gated_delta")
    gated, delta = "gated" in update, "delta" in update
    if (gated and not c.has(4)) or (delta and not c.has(5)):
        raise ModelError(f"the rule {update} lacks its decay or rate", where=c.name, hint="repair the model")
    scale = float(c.attr("scale", 0.0)) or (c[0].shape[2] // query_heads) ** -0.5
    given = [c[0], c[1], c[2], *(c[p] for p, read in ((3, c.has(3)), (4, gated), (5, delta)) if read)]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        rest = list(others)
        keys, values = _by_head(k, heads), _by_head(v, heads)
        first = keys.new_zeros(*keys.shape[:2], keys.shape[3], values.shape[3])
        state = rest.pop(0) if c.has(3) else first
        decay = _by_head(rest.pop(0), heads) if gated else keys.new_zeros(*keys.shape[:3], 1)
        rate = rest.pop(0).transpose(1, 2).unsqueeze(3) if delta else None
        queries = _by_head(q, query_heads).unflatten(1, (heads, -1)) * scale
        y, state = _Recurrence(queries, keys, values, decay, rate).run(state, int(c.attr("chunk_size", 64)))
        return [y.flatten(1, 2).transpose(1, 2).flatten(2), state]

    return list(repeated(function, given))


@rule("shardplan.StateSpaceScan")
def _state_space_scan(c: OperatorCall) -> torch.Tensor:
    heads, groups = int(c.attr("num_heads", 1)), int(c.attr("num_groups", 1))

    def function(
        x: torch.Tensor, b: torch.Tensor, directions: torch.Tensor, step: torch.Tensor, a_log: torch.Tensor,
        skip: torch.Tensor, bias: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        own = _by_head(x, heads)
        size = F.softplus(step + bias).transpose(1, 2).unsqueeze(3)
        keys, queries = (_by_head(y, groups).repeat_interleave(heads // groups, 1) for y in (b, directions))
        decay = -size * a_log.exp()[:, None, None]
        state = x.new_zeros(*keys.shape[:2], keys.shape[3], own.shape[3])
        recurrence = _Recurrence(queries.unsqueeze(2), keys, own * size, decay, None)
        y, _ = recurrence.run(state, int(c.attr("chunk_size", 256)))
        return [(y.squeeze(2) + own * skip[:, None, None]).transpose(1, 2).flatten(2)]

    return repeated(function, [c[p] for p in range(7)])[0]
