"""Recurrent layers, written out step by step, and the discrete Fourier transform."""

from __future__ import annotations

import torch

from planner.errors import ModelError
from planner.runtime.operators.call import OperatorCall, rule

Direction = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]
"""Results of one direction: the hidden state after each step, the last hidden state, the last cell state."""


def _start(c: OperatorCall, position: int, direction: int, like: torch.Tensor) -> torch.Tensor:
    """The first state of a direction: an operand, or zeros."""
    given = c.get(position)
    width = int(c.attr("hidden_size"))
    zeros = torch.zeros(like.shape[1], width, dtype=like.dtype, device=like.device)
    return zeros if given is None else given[direction]


def _biases(c: OperatorCall, direction: int, gates: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Biases of input and state."""
    both = c.get(3)
    if both is None:
        return 0.0, 0.0
    half = gates * int(c.attr("hidden_size"))
    return both[direction, :half], both[direction, half:]


def _lstm_direction(c: OperatorCall, direction: int, steps: list[torch.Tensor]) -> Direction:
    w, r = c[1][direction], c[2][direction]
    input_bias, state_bias = _biases(c, direction, 4)
    h, cell = _start(c, 5, direction, c[0]), _start(c, 6, direction, c[0])
    peepholes = c[7][direction].chunk(3) if c.has(7) else (0.0, 0.0, 0.0)
    kept = []
    for x in steps:
        i, o, f, g = (x @ w.T + input_bias + h @ r.T + state_bias).chunk(4, -1)
        i, f = torch.sigmoid(i + peepholes[0] * cell), torch.sigmoid(f + peepholes[2] * cell)
        cell = f * cell + i * torch.tanh(g)
        h = torch.sigmoid(o + peepholes[1] * cell) * torch.tanh(cell)
        kept.append(h)
    return kept, h, cell


def _gru_direction(c: OperatorCall, direction: int, steps: list[torch.Tensor]) -> Direction:
    w, r = c[1][direction], c[2][direction]
    input_bias, state_bias = _biases(c, direction, 3)
    h = _start(c, 5, direction, c[0])
    width, kept = int(c.attr("hidden_size")), []
    for x in steps:
        zx, rx, nx = (x @ w.T + input_bias).chunk(3, -1)
        states = h @ r.T + state_bias
        if not c.attr("linear_before_reset", 0):
            zh, rh = states[:, :width], states[:, width : 2 * width]
            z, reset = torch.sigmoid(zx + zh), torch.sigmoid(rx + rh)
            bias = state_bias[2 * width :] if isinstance(state_bias, torch.Tensor) else 0.0
            new = torch.tanh(nx + (reset * h) @ r[2 * width :].T + bias)
        else:
            zh, rh, nh = states.chunk(3, -1)
            z, reset = torch.sigmoid(zx + zh), torch.sigmoid(rx + rh)
            new = torch.tanh(nx + reset * nh)
        h = (1 - z) * new + z * h
        kept.append(h)
    return kept, h, None


def _rnn_direction(c: OperatorCall, direction: int, steps: list[torch.Tensor]) -> Direction:
    w, r = c[1][direction], c[2][direction]
    input_bias, state_bias = _biases(c, direction, 1)
    h, kept = _start(c, 5, direction, c[0]), []
    for x in steps:
        h = torch.tanh(x @ w.T + input_bias + h @ r.T + state_bias)
        kept.append(h)
    return kept, h, None


_DIRECTIONS = {"LSTM": _lstm_direction, "GRU": _gru_direction, "RNN": _rnn_direction}
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@rule("LSTM", "GRU", "RNN")
def _recurrent(c: OperatorCall) -> list[torch.Tensor]:
    way = c.attr("direction", "forward")
    count = 2 if way == "bidirectional" else 1
    functions = c.attr("activations")
    unusual = functions and list(functions) != _USUAL[c.op] * count
    if unusual or c.has(4) or c.attr("layout", 0) or c.attr("clip") or c.attr("input_forget", 0):
        raise ModelError(
            f"{c.op} with lengths, clipping or activations of its own has no torch rule", where=c.name,
            hint="export it with the usual activations and one length",
        )  # fmt: skip
    steps, done = list(c[0].unbind(0)), []
    for direction in range(count):
        back = way == "reverse" or direction == 1
        kept, h, cell = _DIRECTIONS[c.op](c, direction, steps[::-1] if back else steps)
        done.append((kept[::-1] if back else kept, h, cell))
    results = [
        torch.stack([torch.stack(kept) for kept, _, _ in done], 1),
        torch.stack([h for _, h, _ in done]),
    ]
    cells = [cell for _, _, cell in done if cell is not None]
    return [*results, torch.stack(cells)] if cells else results
