"""Images sampled at computed places, columns of windows summed back to an image, Fourier transforms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from planner.runtime.operators.call import OperatorCall, rule

_MODES = {"linear": "bilinear", "bilinear": "bilinear", "nearest": "nearest", "cubic": "bicubic", "bicubic": "bicubic"}
"""Interpolations of `GridSample`, by their name in any operator set, as torch calls them."""


@rule("GridSample")
def _grid_sample(c: OperatorCall) -> torch.Tensor:
    mode, padding = _MODES[str(c.attr("mode", "linear"))], c.attr("padding_mode", "zeros")
    return F.grid_sample(c[0], c[1].to(c[0].dtype), mode, padding, bool(c.attr("align_corners", 0)))


@rule("AffineGrid")
def _affine_grid(c: OperatorCall) -> torch.Tensor:
    return F.affine_grid(c[0], c.ints(1) or [], bool(c.attr("align_corners", 0)))


@rule("Col2Im")
def _columns_to_image(c: OperatorCall) -> torch.Tensor:
    """The sum of each place's entries in all windows: an addition to the flattened, padded image."""
    image, block = c.ints(1) or [], c.ints(2) or []
    rank = len(image)
    pads = c.attr("pads") or [0] * (2 * rank)
    steps, widths = c.attr("strides") or [1] * rank, c.attr("dilations") or [1] * rank
    padded = [size + pads[d] + pads[rank + d] for d, size in enumerate(image)]
    places = torch.zeros((), dtype=torch.int64, device=c[0].device)
    for d in range(rank):
        count = (padded[d] - widths[d] * (block[d] - 1) - 1) // steps[d] + 1
        inside = torch.arange(block[d], device=c[0].device)[:, None] * widths[d]
        at = inside + torch.arange(count, device=c[0].device) * steps[d]
        shape = [1] * (2 * rank)
        shape[d], shape[rank + d] = at.shape
        places = places + at.reshape(shape) * math.prod(padded[d + 1 :])
    columns = c[0].reshape(c[0].shape[0], c[0].shape[1] // math.prod(block), -1)
    flat = columns.new_zeros(*columns.shape[:2], math.prod(padded)).index_add(2, places.reshape(-1), columns)
    result = flat.reshape(*columns.shape[:2], *padded)
    for d, size in enumerate(image):
        result = result.narrow(2 + d, pads[d], size)
    return result


def _complex(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose last dimension holds their real and imaginary part, or the real part alone."""
    both = x if x.shape[-1] == 2 else torch.cat([x, torch.zeros_like(x)], -1)
    return torch.view_as_complex(both.contiguous())


@rule("DFT")
def _fourier(c: OperatorCall) -> torch.Tensor:
    axis = (c.ints(2) or [int(c.attr("axis", 1 if c.opset < 20 else -2))])[0] % c[0].dim()
    given = c.ints(1)
    if c.attr("inverse", 0) and c.attr("onesided", 0):
        length = given[0] if given else 2 * (c[0].shape[axis] - 1)
        return torch.fft.irfft(_complex(c[0]), length, axis).unsqueeze(-1)
    length = given[0] if given else c[0].shape[axis]
    z = (torch.fft.ifft if c.attr("inverse", 0) else torch.fft.fft)(_complex(c[0]), length, axis)
    return torch.view_as_real(z.narrow(axis, 0, length // 2 + 1) if c.attr("onesided", 0) else z)


@rule("STFT")
def _short_time_fourier(c: OperatorCall) -> torch.Tensor:
    window, given = c.get(2), c.ints(3)
    length = given[0] if given else int(c[2].shape[0])
    signal = _complex(c[0] if c[0].dim() == 3 else c[0].unsqueeze(-1))
    frames = signal.unfold(1, length, (c.ints(1) or [1])[0])
    z = torch.fft.fft(frames if window is None else frames * window, dim=-1)
    return torch.view_as_real(z.narrow(-1, 0, length // 2 + 1) if c.attr("onesided", 1) else z)
