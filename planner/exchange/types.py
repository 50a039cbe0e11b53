"""The types that every scheme reads and returns: a training step to exchange, and the cost of an exchange.

`step_of` makes a step from the graph of a model and the times of its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import JobError, ModelError
from planner.exchange.recipe import PayloadBytes
from planner.graph import Graph, TensorKind

if TYPE_CHECKING:
    from planner.exchange.fabric import PortTraffic
    from planner.exchange.scheme import Message


@dataclass(frozen=True, slots=True)
class Variable:
    """A trained tensor and its gradient.

    Attributes:
        name: unique in the step.
        gradient_bytes: bytes of the full gradient, in the number format in which it travels.
        ready_s: when the gradient is complete, from the start of the backward; None for its end.
        sparse: whether it is an embedding of which one step touches only some rows.
        touched: fraction of the rows that the ranks of one machine touch together (alpha), 0 < touched <= 1.
        weight_bytes: bytes of the weights where they travel instead of gradients; None for as many.
    """

    name: str
    gradient_bytes: float
    ready_s: float | None = None
    sparse: bool = False
    touched: float = 1.0
    weight_bytes: float | None = None

    def __post_init__(self) -> None:
        sizes = [self.gradient_bytes, self.gradient_bytes if self.weight_bytes is None else self.weight_bytes]
        if not all(math.isfinite(size) and size >= 0 for size in sizes):
            raise JobError(f"bytes must be finite and not negative, not {sizes}", where=self.name, hint="give a size")
        if not 0 < self.touched <= 1:
            raise JobError(
                f"touched is a fraction of the rows, not {self.touched}", where=self.name, hint="use 0 < touched <= 1"
            )

    @property
    def pulled_bytes(self) -> float:
        """Bytes of the weights."""
        return self.gradient_bytes if self.weight_bytes is None else self.weight_bytes

    @property
    def sent(self) -> PayloadBytes:
        """Bytes that a machine exchanges with servers: of a sparse variable only the rows that it touches."""
        part = self.touched if self.sparse else 1.0
        return PayloadBytes(part * self.gradient_bytes, part * self.pulled_bytes)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of a data-parallel group, the same on every rank.

    Attributes:
        variables: the variables to exchange.
        backward_s: seconds of the backward of one micro-batch.
        forward_s: seconds of the forward of one micro-batch.
        micro_batches: micro-batches whose gradients are accumulated before the update.

    Raises:
        JobError: a name twice, a time that is negative or after the backward, no micro-batch.
    """

    variables: tuple[Variable, ...]
    backward_s: float = 0.0
    forward_s: float = 0.0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if len({v.name for v in self.variables}) != len(self.variables):
            raise JobError("two variables of a step have the same name", hint="name each once")
        if self.micro_batches < 1:
            raise JobError(f"{self.micro_batches} micro-batches", hint="use at least one")
        if not (0 <= self.backward_s < math.inf and 0 <= self.forward_s < math.inf):
            raise JobError("forward and backward take a finite time, not a negative one", hint="give seconds")
        for v in self.variables:
            if v.ready_s is not None and not 0 <= v.ready_s <= self.backward_s * (1 + 1e-9):
                raise JobError(
                    f"its gradient is ready {v.ready_s} s after the start of a backward of {self.backward_s} s",
                    where=v.name,
                    hint="a ready time lies within the backward",
                )

    def ready_s(self, variable: Variable) -> float:
        """When the gradient of a variable is complete, from the start of the backward."""
        return self.backward_s if variable.ready_s is None else variable.ready_s

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients."""
        return math.fsum(v.gradient_bytes for v in self.variables)

    def arrivals(self) -> tuple[Variable, ...]:
        """The variables in the order in which their gradients arrive; equal times keep the order given."""
        return tuple(sorted(self.variables, key=self.ready_s))


@dataclass(frozen=True, slots=True)
class MemoryFactors:
    """Fractions of the model state that a rank keeps; independent of number formats.

    Attributes:
        weights: fraction of the weights kept between the steps.
        gradients: fraction of the gradients kept until the update.
        optimizer: fraction of the optimizer state.
        server_optimizer: fraction of the optimizer state on the fullest server, in host memory; 0 without servers.
        transient_bytes: further bytes of gathered weights and of gradients before they are scattered.
    """

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    server_optimizer: float = 0.0
    transient_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Staleness:
    """Updates that a weight may lack compared to synchronous training, in mini-batches; 0 when synchronous.

    Attributes:
        local: missing updates of the worker itself.
        overall: missing updates of all workers.
    """

    local: int = 0
    overall: int = 0

    @property
    def synchronous(self) -> bool:
        """Whether training is mathematically the same as on one device."""
        return self.local == 0 and self.overall == 0


@dataclass(frozen=True)
class Exchange:
    """The cost of the exchange of one step under one scheme.

    Attributes:
        scheme: name of the scheme with its options.
        seconds: duration when all gradients are ready at once and nothing else runs.
        exposed_s: seconds that it adds to forward and backward.
        traffic: bytes through every port of the fabric in one step.
        memory: fractions of the model state that a rank keeps.
        staleness: of the weights that gradients are computed with.
        transfers: the messages, and when each has arrived, in seconds from the start of the backward of the last
            micro-batch; empty where weights travel in the forward too (ZeRO, WSP).
        methods: by variable, how it travels.
        placements: by variable, the share of each endpoint (the machines of the group, then the servers); empty without
            servers.
        notes: what the model leaves out in this case.
    """

    scheme: str
    seconds: float
    exposed_s: float
    traffic: PortTraffic
    memory: MemoryFactors
    staleness: Staleness
    transfers: tuple[tuple[Message, float], ...]
    methods: Mapping[str, str]
    placements: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def step_of(
    graph: Graph,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    *,
    gradient_bytes: float = 2,
    weight_bytes: float | None = None,
    micro_batches: int = 1,
    lookups: int = 1,
) -> Step:
    """The trained parameters as variables, each ready when the backward has passed the first node that reads it.

    A parameter read only by look-ups (`Gather` along its rows) is sparse; the fraction of touched rows is taken as the
    number of indices over the number of rows, its upper bound. Tied copies are one variable with the bytes of one copy,
    ready with the last.

    Args:
        graph: the model at the micro-batch size of the times.
        forward_s: seconds of each node, float64 [nodes].
        backward_s: seconds of each node's backward, float64 [nodes].
        gradient_bytes: bytes an element of a gradient takes when it travels.
        weight_bytes: bytes an element of a weight takes; None for as many.
        micro_batches: micro-batches whose gradients accumulate.
        lookups: micro-batches whose touched rows are merged before they are sent: the micro-batches of a step times the
            ranks of a machine.

    Raises:
        ModelError: the number of times is not the number of nodes.

    O(nodes + parameters).
    """
    nodes = len(graph.nodes)
    if len(forward_s) != nodes or len(backward_s) != nodes:
        raise ModelError(
            f"{len(forward_s)} forward and {len(backward_s)} backward times for {nodes} nodes",
            where=graph.name,
            hint="give one time a node",
        )
    done_s = np.cumsum(np.asarray(backward_s, dtype=np.float64)[::-1])[::-1]  # when node i's backward is complete
    total_s = float(done_s[0]) if nodes else 0.0
    first, rows = _readers(graph)
    variables = []
    for p in graph.parameters:
        if p.name not in first or not p.trainable or p.tied_to:
            continue
        sparse = p.name in rows and len(p.shape) == 2
        touched = min(1.0, rows[p.name] * lookups / p.shape[0]) if sparse else 1.0
        weight = None if weight_bytes is None else p.elements * weight_bytes
        ready_s = min(float(done_s[first[p.name]]), total_s)
        variables.append(Variable(p.name, p.elements * gradient_bytes, ready_s, sparse, touched, weight))
    return Step(tuple(variables), total_s, float(np.sum(forward_s)), micro_batches)


def _readers(graph: Graph) -> tuple[dict[str, int], dict[str, float]]:
    """The first node that reads each parameter (or a tied copy), and the rows read of each that is only looked up."""
    owner = {p.name: p.tied_to or p.name for p in graph.parameters}
    first: dict[str, int] = {}
    rows: dict[str, float] = {}
    dense: set[str] = set()
    for i, node in enumerate(graph.nodes):
        for position, tensor in enumerate(node.inputs):
            if not tensor or graph.tensors[tensor].kind is not TensorKind.PARAMETER:
                continue
            read = _rows_read(graph, i, position)
            for source in graph.sources.get(tensor) or (tensor,):
                name = owner.get(source, source)
                first.setdefault(name, i)
                if read is None:
                    dense.add(name)
                else:
                    rows[name] = rows.get(name, 0.0) + read
    return first, {name: count for name, count in rows.items() if name not in dense}


def _rows_read(graph: Graph, index: int, position: int) -> float | None:
    """Number of rows of a parameter that a look-up reads; None when the node is no look-up along the rows."""
    node = graph.nodes[index]
    if node.op != "Gather" or position != 0 or node.attributes.get("axis", 0) != 0:
        return None
    return float(graph.tensors[node.inputs[1]].elements * node.repeat)
