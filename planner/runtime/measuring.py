"""Measures single operators in torch, forward and backward, on any of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import torch

from planner.costs.measured import Seconds, median_s
from planner.errors import UsageError
from planner.hardware import machine_name
from planner.runtime.interpreter import Values, run
from planner.runtime.model_file import read_model, require_rules
from planner.runtime.operators import Context

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 8
"""Passes launched in a row on a GPU, so that the host's launch time is hidden where the work takes longer."""


class TorchRunner:
    """Measures operator calls in torch, computed by the runtime's rules.

    Attributes:
        software: torch and its version.
        machine: name of the device.
        precision: of the operands.
    """

    def __init__(self, device: str = "cuda", precision: str = "bf16") -> None:
        """Choose a device by torch's name of it.

        Raises:
            UsageError: torch has no such device here, or the operands cannot be of that precision.
        """
        if precision not in _TYPES:
            raise UsageError(f"operators are not measured in {precision}", hint=f"use {', '.join(_TYPES)}")
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"torch cannot use the device {device!r}: {reason}", hint="use cuda or cpu") from None
        self.on_gpu = self.device.type == "cuda"
        self.machine = torch.cuda.get_device_name(self.device) if self.on_gpu else machine_name()
        self.software = f"torch {torch.__version__}"
        self.precision = precision

    def seconds(self, model: bytes, feeds: Mapping[str, np.ndarray]) -> Seconds:
        """Median seconds of the forward pass of a model of one node, and of the backward pass to all floating operands.

        The backward pass is nan where no result follows from a floating operand.

        Raises:
            ModelError: the operator has no torch rule, or it cannot be computed.
        """
        model_file, dtype = read_model(onnx.load_from_string(model)), _TYPES[self.precision]
        steps = model_file.cone(model_file.outputs, model_file.inputs)
        require_rules(steps)
        values = {name: self._operand(array, dtype) for name, array in feeds.items()}
        values |= {
            name: model_file.weight(name, dtype).to(self.device)
            for name in (*model_file.weights, *model_file.constants)
        }

        def forward() -> Values:
            return run(steps, values, Context(dtype, fitted=model_file.fitted), wanted=model_file.outputs)

        with torch.no_grad():
            forward_s = self._median_s(forward)
        with torch.enable_grad():
            results = [y for y in forward().values() if isinstance(y, torch.Tensor) and y.requires_grad]
        if not results:
            return forward_s, float("nan")
        operands = [x for x in values.values() if x.requires_grad]
        gradients = [torch.ones_like(y) for y in results]

        def backward() -> object:
            return torch.autograd.grad(results, operands, gradients, retain_graph=True, allow_unused=True)

        return forward_s, self._median_s(backward)

    def _operand(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        x = torch.from_numpy(array).to(self.device)
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x

    def _median_s(self, run_once: Callable[[], object]) -> float:
        if not self.on_gpu:
            return median_s(run_once)

        def batch() -> None:
            for _ in range(_REPEATS):
                run_once()
            torch.cuda.synchronize(self.device)

        return median_s(batch) / _REPEATS
