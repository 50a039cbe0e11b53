"""What plans say of a model's layers: kinds, predictors behind them, embedding before and loss behind."""

from __future__ import annotations

import pytest

from planner.plans.readings import is_decoder, kinds_of_layers


@pytest.mark.parametrize(
    ("names", "kinds", "decoder"),
    [
        (("embed", "layers.0", "layers.1", "head"), ("layers.",), True),
        (("embed[1/2]", "embed[2/2]", "layers.0[1/2]", "layers.0[2/2]", "head[1/2]", "head[2/2]"), ("layers.",), True),
        (("embed", "layers.0.mlp", "layers.10.mlp", "head"), ("layers.",), True),
        (("layers.0[1/2]", "layers.0[2/2]", "layers.1", "head"), ("layers.",), False),  # no embedding before
        (("embed", "layers.0", "layers.1"), ("layers.",), False),  # no loss behind
        (("embed", "layers.0", "layers.1", "mtp.0", "head"), ("layers.",), True),  # 1 of 2 at most predicts
        (("embed", "layers.0", "mtp.0", "head"), ("layers.", "mtp."), False),
        (("embed", "a.0", "b.0", "a.1", "b.1", "head"), ("a.", "b."), False),
        (("embed", "head"), (), False),
        ((), (), False),
    ],
)
def test_a_decoder_is_an_embedding_layers_of_one_kind_and_a_loss(
    names: tuple[str, ...], kinds: tuple[str, ...], decoder: bool
) -> None:
    assert kinds_of_layers(names) == kinds
    assert is_decoder(names) is decoder
