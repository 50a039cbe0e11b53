"""Cross entropy of logits whose words are shared by the ranks of a group: no rank has all logits of a row."""

from __future__ import annotations

from typing import Any, cast

import torch

from planner.runtime.groups import RankGroup


class _SharedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Keeps the log-softmax of the rank's own words.

    Source: Megatron Core `tensor_parallel/cross_entropy.py` exchanges the same: the largest logit of a row, the sum of
    exponentials, and the logit of the label.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: torch.Tensor, labels: torch.Tensor, ignored: int, first: int, line: RankGroup,
    ) -> torch.Tensor:  # fmt: skip
        largest = line.gather(logits.amax(1)).amax(0).unsqueeze(1)
        logs = logits - largest
        total = logs.exp().sum(1, keepdim=True)
        line.sum(total)
        logs.sub_(total.log_())
        counted = labels != ignored
        own = counted & (labels >= first) & (labels < first + logits.shape[1])
        places = torch.where(own, labels - first, torch.zeros_like(labels)).unsqueeze(1)
        score = (logs.gather(1, places).squeeze(1) * own).sum()
        line.sum(score)
        ctx.save_for_backward(logs, places, own, counted)
        return -score / counted.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        logs, places, own, counted = ctx.saved_tensors
        shares = logs.exp()
        shares.scatter_add_(1, places, -own.to(logs.dtype).unsqueeze(1))
        return shares.mul_(counted.unsqueeze(1) * (gradient / counted.sum())), None, None, None, None


def shared_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int, first: int, line: RankGroup
) -> torch.Tensor:
    """Mean cross entropy, the same on all ranks of a group. A collective call.

    Args:
        logits: this rank's words of the logits, [rows, own words].
        labels: [rows], the same on all ranks.
        ignored: label of rows that do not count.
        first: the rank's first word.
        line: the group.
    """
    return cast(torch.Tensor, _SharedCrossEntropy.apply(logits, labels, ignored, first, line))
