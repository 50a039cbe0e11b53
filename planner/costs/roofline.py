"""Seconds of each operator on a device: the slowest of matrix units, vector units and memory, with a launch floor.

For each node, forward and backward alike,

    gpu = max(matrix / (matrix_peak * fraction(matrix)), bytes / (bandwidth * fraction(bytes)), vector / vector_peak)

Each gradient product of a node is as large as its forward product and runs at the same fraction. Fractions are those of
the device's fastest 16 or 32 bit type; another type reaches them at sizes that take the same time at its own peak, as
small operations are slow by the time they take rather than by the work they do.

Where fp32 runs on a GPU's vector units, a 3 x 3 convolution takes the faster of the plain sum and Winograd's method
(`planner.costs.rates`), each of its three products by itself:

    winograd = transforms / bandwidth + max(fewer products / (matrix_peak * fraction), transformed tiles / bandwidth)

The host launches kernels ahead of the device, so launching costs nothing while the device is busy: a layer takes
`max(sum of gpu, kernels * launch)`, and where launching is the larger, its nodes share that time by their kernels.
Layers are module paths up to their first number; a graph without modules is one layer. Backward, the gradient engine
launches without the model's own code, in half the time.

A rank that does a share of every operator has that share of the operations and bytes in the formula above and as many
kernels. A product that is cut into pieces, so that communication runs beside them, reaches the rate of a piece: its
forward product and the one towards its operand, not that towards its weights. The product of a mixture's experts is one
kernel for each (unless `Stack.grouped_experts`), at the rate of its size; a share of it is taken to be that of some of
the experts, each whole. Where a layer's launches are what it
comes to, its nodes, faster than its whole work, are stretched towards the times of the whole work until they take the
launches' time together.
"""

from __future__ import annotations

import numpy as np

from planner.costs.work import OperatorWork
from planner.errors import HardwareError
from planner.graph import Graph, Note, NoteLevel, TensorKind, per_model
from planner.graph.blocks import layers_along
from planner.hardware.types import NARROW_FORMATS, Device
from planner.operators.specs import needs_gradient

_STAND_INS = {"bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",), "fp32": ("tf32",), "fp64": ("fp32",)}


class Roofline:
    """Seconds of each node's work on a device, float64 of shape [nodes]; nodes of equal work are priced once.

    Args:
        graph: the graph.
        work: of its nodes.
        device: where it runs.

    Attributes:
        forward_s: forward pass.
        backward_s: backward pass.
        weight_grad_s: the part of it spent on weight gradients.
        executed: [2, nodes] part of a node's matrix work, forward and backward, that its kernels do.
        notes: what was assumed.

    Raises:
        HardwareError: the device states no peak for a node's format, nor for one that can stand in for it.
    """

    def __init__(self, graph: Graph, work: OperatorWork, device: Device) -> None:
        nodes, self.kinds = work.kinds(graph)
        self.work, self.device, self.layers = work.of(nodes), device, _layers(graph)
        peaks, self.notes = _peaks(self.work, device)
        self.peaks, self.moved = peaks * self.work.matrix_share, _fastest(device) / peaks
        self.fast = (self.work.product_bytes > 0) & (peaks == _vector_peak(device))
        towards, weights = self.work.input_grad, self.work.weight_grad
        self.products = np.where(self.work.matrix > 0, self.work.matrix, towards + weights)
        self.whole_gpu = self._gpu(1.0)
        self.forward_s, self.backward_s = map(self._with_launches, self.whole_gpu, self._launches(1.0))
        input_s, weight_s = (flops / self._rates_at(1.0) for flops in (towards, weights))
        share = (weight_s / np.maximum(input_s + weight_s, 1e-30))[self.kinds]
        share[_only_weights(graph) & (input_s + weight_s == 0)[self.kinds]] = 1.0
        self.weight_grad_s = self.backward_s * share
        self.executed = self._executed()[:, self.kinds]

    def _rates_at(self, share: float) -> np.ndarray:
        """Operations of the whole node a second, while that part of them is done."""
        size = share * self.products / self._kernels(share)
        return np.asarray(self.peaks * self.device.matrix_efficiency.at(size * self.moved) / share)

    def _kernels(self, share: float) -> np.ndarray:
        """Products that a share of each node is run as: experts are dealt out whole."""
        return np.maximum(1.0, share * self.work.experts)

    def _launches(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Host time of each node's launches, forward and backward.

        For each further expert a library launches its products, one forward and two backward, and a cast before them.
        """
        work, stack = self.work, self.device.stack
        further_s = (self._kernels(share) - 1) * min(stack.kernel_launch_s, self.device.launch_s)
        casts = np.isin(work.formats, list(NARROW_FORMATS)).astype(float)
        forward = work.kernels * self.device.launch_s + further_s * (1 + casts)
        backward = work.back_kernels * self.device.launch_s + further_s * (2 + casts)
        return stack.stretch * forward, stack.stretch * stack.backward_launch * backward

    def _products_s(self, flops: np.ndarray, share: float, rates: np.ndarray) -> np.ndarray:
        """Seconds of a product of each node, convolutions by the faster method."""
        plain = np.asarray(flops / rates)
        if not self.fast.any():
            return plain
        fast, work = self.fast, self.work
        fewer = (share * flops * work.multiplied)[fast]
        rate = self.peaks[fast] * self.device.matrix_efficiency.at(fewer * self.moved[fast])
        summed = np.maximum(fewer / rate, _memory_s(share * work.product_bytes[fast], self.device))
        method = _memory_s(share * work.transform_bytes[fast], self.device) + summed
        plain[fast] = np.where(fewer > 0, np.minimum(plain[fast], method), plain[fast])
        return plain

    def _executed(self) -> np.ndarray:
        """[2, kinds] part of the matrix work that is done: masked scores and fast convolutions leave some of it out."""
        work, rates = self.work, self._rates_at(1.0)
        parts = []
        for products in ((work.matrix,), (work.input_grad, work.weight_grad)):
            done = np.zeros(len(work.matrix))
            for flops in products:
                faster = self._products_s(flops, 1.0, rates) < flops / rates
                done += np.where(faster, work.multiplied, work.executed) * flops
            flops = np.sum(products, axis=0)
            parts.append(np.where(flops > 0, done / np.where(flops > 0, flops, 1.0), 1.0))
        return np.array(parts)

    def _gpu(self, share: float, pieces: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the device itself, forward and backward."""
        work, device, rates = self.work, self.device, self._rates_at(share)
        cut = np.minimum(rates, self._rates_at(share / pieces) / pieces) if pieces > 1 else rates
        gradients = self._products_s(work.input_grad, share, cut) + self._products_s(work.weight_grad, share, rates)
        forward = _roof(self._products_s(work.matrix, share, cut), share * work.vector, share * work.bytes, device)
        backward = _roof(gradients, share * work.back_vector, share * work.back_bytes, device)
        forward = forward + _memory_s(share * work.beside, device)
        backward = backward + _memory_s(share * work.back_beside, device)
        return np.asarray(device.stack.stretch * forward), np.asarray(device.stack.stretch * backward)

    def _with_launches(self, gpu_s: np.ndarray, launches: np.ndarray) -> np.ndarray:
        """[nodes] seconds; where a layer's launches take longer than its work, each node takes its launches' time."""
        kinds, layers = self.kinds, self.layers
        if self.device.stack.waits:
            return np.asarray((gpu_s + launches)[kinds])
        if not len(layers):
            return np.asarray(gpu_s[kinds])
        bound = np.bincount(layers, launches[kinds]) > np.bincount(layers, gpu_s[kinds])
        return np.asarray(np.where(bound[layers], launches[kinds], gpu_s[kinds]))

    def at(self, share: float, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        """[nodes] seconds, forward and backward, when each node does that part of its work in pieces. O(nodes)."""
        if share == 1.0 or not len(self.layers):
            return self.forward_s, self.backward_s
        if self.device.stack.waits:
            forward, backward = map(np.add, self._gpu(share, pieces), self._launches(share))
            return forward[self.kinds], backward[self.kinds]
        made = zip(self._gpu(share, pieces), self.whole_gpu, self._launches(share), strict=True)
        forward, backward = (self._part(share, *each) for each in made)
        return forward, backward

    def _part(self, share: float, gpu_s: np.ndarray, whole_gpu: np.ndarray, launches: np.ndarray) -> np.ndarray:
        """A share's device time, lifted so that no layer takes less than its launches.

        Device times are held between the share of the whole and the whole, should a curve of efficiency fall with
        size or rise faster than it.
        """
        kinds, layers = self.kinds, self.layers
        part = np.clip(gpu_s, share * whole_gpu, whole_gpu)[kinds]
        work, most, least = (np.bincount(layers, each) for each in (part, whole_gpu[kinds], launches[kinds]))
        room = np.maximum(most - work, 1e-30)
        lift = np.clip((least - work) / room, 0.0, 1.0)[layers]
        lifted = part + lift * (whole_gpu[kinds] - part)
        return np.asarray(np.where((least > most)[layers], launches[kinds], lifted))


def _roof(matrix_s: np.ndarray, vector: np.ndarray, byte_count: np.ndarray, device: Device) -> np.ndarray:
    return np.asarray(
        np.maximum(np.maximum(matrix_s, vector / device.vector_flop_per_s), _memory_s(byte_count, device))
    )


def _memory_s(byte_count: np.ndarray, device: Device) -> np.ndarray:
    return np.asarray(byte_count / (device.memory_byte_per_s * device.memory_efficiency.at(byte_count)))


def _fastest(device: Device) -> float:
    """Peak of the type that the device's curve of fractions is for."""
    wide = [peak for kind, peak in device.matrix_flop_per_s.items() if kind not in NARROW_FORMATS]
    return max(wide or device.matrix_flop_per_s.values())


def _vector_peak(device: Device) -> float:
    """The matrix peak of fp32 where a GPU's vector units do it; 0 where matrix units or a compiled design do."""
    peak = device.matrix_flop_per_s.get("fp32", 0.0)
    return peak if device.launch_s > 0 and peak <= device.vector_flop_per_s else 0.0


@per_model
def _layers(graph: Graph) -> np.ndarray:
    """Number of each node's layer; nodes without a module belong to their predecessor's."""
    numbers: dict[str, int] = {}
    layers = layers_along(graph, range(len(graph.nodes)))
    return np.array([numbers.setdefault(layer, len(numbers)) for layer in layers], dtype=np.int64)


@per_model
def _only_weights(graph: Graph) -> np.ndarray:
    """Nodes whose gradients flow to weights alone (embeddings, the first layer)."""
    needed = needs_gradient(graph)
    return np.array(
        [
            bool(weights)
            and not any(n in needed and graph.tensors[n].kind is TensorKind.ACTIVATION for n in node.inputs)
            for node, weights in zip(graph.nodes, graph.node_parameters, strict=True)
        ],
        dtype=bool,
    )


def _peaks(work: OperatorWork, device: Device) -> tuple[np.ndarray, tuple[Note, ...]]:
    """Matrix peak of each node's format; a format that the device lacks is replaced by a stand-in, with a note."""
    peaks = np.ones(len(work.formats))
    notes: dict[str, Note] = {}
    for wanted in dict.fromkeys(work.formats.tolist()):
        uses_format = work.formats == wanted
        if not ((work.matrix > 0) & uses_format).any():
            continue
        name = next((n for n in (wanted, *_STAND_INS.get(wanted, ())) if n in device.matrix_flop_per_s), "")
        if not name:
            known = ", ".join(sorted(device.matrix_flop_per_s)) or "none"
            raise HardwareError(
                f"{device.name} has no matrix peak for {wanted}",
                hint=f"it has {known}: choose another --precision, or add the figure to the hardware profile",
            )
        if name != wanted:
            message = f"{device.name} has no {wanted} matrix units: priced at its {name} peak"
            notes[wanted] = Note(NoteLevel.WARNING, "peak-stand-in", message)
        peaks[uses_format] = device.matrix_flop_per_s[name] * device.format_rates.get(name, 1.0)
    return peaks, tuple(notes.values())
