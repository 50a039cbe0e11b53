"""Sizes of transformer models in closed form; bundled models (`planner.bundled_info`) are counted by their graphs."""

from __future__ import annotations

from planner.formulas._checks import chosen, divides, whole


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
