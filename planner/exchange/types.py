"""What is exchanged in a training step, and what an exchange costs: the types that every scheme reads and returns.

`step_of` makes a step from a model's graph and the times of its nodes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from planner.errors import JobError, ModelError
from planner.exchange.recipe import Recipe, Sizes
from planner.graph import Graph, TensorKind

if TYPE_CHECKING:
    from planner.exchange.fabric import Fabric, Servers, Traffic
    from planner.exchange.messages import Message


@dataclass(frozen=True, slots=True)
class Variable:
    """A trained tensor and its gradient.

    Attributes:
        name: unique in the step.
        gradient_bytes: bytes of the whole gradient, in the number format in which it travels.
        ready_s: when the gradient is complete, from the start of the backward; None when only at its end.
        sparse: the gradient is of rows of an embedding, of which one step touches a part.
        touched: that part, of the rows that the ranks of one machine touch together (alpha), 0 < touched <= 1.
        weight_bytes: bytes of the weights where they travel instead of gradients; None when as many.
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
    def sent(self) -> Sizes:
        """What a machine sends and takes of it through servers: of a sparse variable the rows that it touches."""
        part = self.touched if self.sparse else 1.0
        return Sizes(part * self.gradient_bytes, part * self.pulled_bytes)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of a data-parallel group, as every rank lives it.

    Attributes:
        variables: what must be exchanged.
        backward_s: the backward of one micro-batch.
        forward_s: the forward of one micro-batch.
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
    """What a rank keeps, as a part of the whole model's, so that any number format can be multiplied in.

    Attributes:
        weights: part of the weights kept between the steps.
        gradients: part of the gradients kept until the update.
        optimizer: part of the optimizer state.
        server_optimizer: part of the optimizer state on the fullest server, in host memory; 0 without servers.
        transient_bytes: bytes beside that: gathered weights and unsharded gradients under way.
    """

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    server_optimizer: float = 0.0
    transient_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many updates a weight may lack that a synchronous step would have: mini-batches, 0 when synchronous.

    Attributes:
        local: updates of the worker itself.
        overall: updates of any worker.
    """

    local: int = 0
    overall: int = 0

    @property
    def synchronous(self) -> bool:
        """Whether training means the same as on one device."""
        return self.local == 0 and self.overall == 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Which servers hold a variable: `shares[e]` of it at endpoint e (the machines of the group, then the servers)."""

    variable: str
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of the exchange and when it travels, from the start of the backward of the last micro-batch."""

    variables: tuple[str, ...]
    method: str
    payload_bytes: float
    ready_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How a variable travels: the method, what it costs there by itself, and why it was taken."""

    variable: str
    method: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class Exchange:
    """What one step's exchange costs under one scheme.

    Attributes:
        scheme: its name with its options.
        seconds: what it takes when everything is ready at once and nothing else runs.
        exposed_s: what it adds to the step beside forward and backward.
        traffic: bytes through every port of the fabric in one step.
        memory: what a rank keeps.
        staleness: of the weights that gradients are computed with.
        transfers: the messages in time; empty where weights travel in the forward too (ZeRO, WSP).
        methods: how each variable travels, by name.
        placements: where servers hold it, where there are servers.
        choices: why, where something was chosen.
        notes: what the model leaves out in this case.
    """

    scheme: str
    seconds: float
    exposed_s: float
    traffic: Traffic
    memory: MemoryFactors
    staleness: Staleness
    transfers: tuple[Transfer, ...]
    methods: Mapping[str, str]
    placements: tuple[Placement, ...] = ()
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """What a scheme wants to send: messages not yet laid in time, and all that follows from them alone."""

    messages: tuple[Message, ...]
    traffic: Traffic
    methods: Mapping[str, str]
    placements: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table of schemes says about one.

    Attributes:
        decides: what it decides, in a few words.
        time: seconds of M bytes on n machines (or ranks) with links of B bytes/s each way.
        traffic: bytes a machine sends, and receives.
        memory: what a rank keeps.
        source: where it was published.
    """

    decides: str
    time: str
    traffic: str
    memory: str
    source: str


class Scheme(Protocol):
    """One way to exchange gradients and weights: a frozen object registered in `planner.exchange.SCHEMES`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual."""
        ...

    @property
    def facts(self) -> Facts:
        """What the table of schemes says."""
        ...

    @property
    def recipe(self) -> Recipe:
        """What is exchanged; all else that is said of the scheme follows from it, and from how messages travel."""
        ...

    @property
    def zero(self) -> int | None:
        """The ZeRO stage by which jobs and plans choose the scheme; None where they cannot."""
        ...

    @property
    def per_tensor(self) -> bool:
        """Whether some variables can travel this way and others another."""
        ...

    @property
    def assumes(self) -> str:
        """What it needs of the hardware that no profile says, empty for nothing."""
        ...

    def staleness(self, step: Step) -> Staleness:
        """Of the weights that gradients are computed with."""
        ...

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """What a rank keeps."""
        ...

    def supports(self, fabric: Fabric) -> str:
        """Why the fabric cannot run it, empty when it can."""
        ...

    def added_servers(self, machines: int) -> Servers:
        """Machines without accelerators that it adds to a group of so many machines.

        Raises:
            UsageError: an option that says how many cannot be read.
        """
        ...

    @abstractmethod
    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """The messages of one step; `fabric` must be supported."""
        ...

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """What one step's exchange costs.

        Raises:
            UsageError: the fabric cannot run the scheme; says why.
        """
        ...


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

    A parameter that only look-ups (`Gather` along its rows) read is sparse; the part of its rows that is touched is at
    most indices over rows, which is taken. Tied copies are one variable, as large as one and ready with the last.

    Args:
        graph: the model, at the micro-batch that the times are for.
        forward_s: seconds of each node, float64 [nodes].
        backward_s: seconds of each node's backward, float64 [nodes].
        gradient_bytes: bytes an element of a gradient takes when it travels.
        weight_bytes: bytes an element of a weight takes; None for as many.
        micro_batches: micro-batches whose gradients accumulate.
        lookups: micro-batches whose touched rows come together before they are sent: those of a step times the ranks
            of a machine.

    Raises:
        ModelError: times that are not one a node.

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
    """The first node that reads each parameter (or a tied copy), and the rows read of those that are only looked up."""
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
    """How many rows a look-up reads of a parameter; None when the node is no look-up along its rows."""
    node = graph.nodes[index]
    if node.op != "Gather" or position != 0 or node.attributes.get("axis", 0) != 0:
        return None
    return float(graph.tensors[node.inputs[1]].elements * node.repeat)
