"""What follows from putting operators into stages: tensors between stages, inputs, shared weights, duplicated
operators.

The assembly of a plan and its check both start here, one from the decision, the other from what the file says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.costs.precision import Precision
from planner.graph import Graph, Tensor, layer_of
from planner.plans.gradients import differentiable
from planner.plans.records import Boundary, SharedParameter, TensorSpec


@dataclass(frozen=True)
class Staging:
    """Operators of a graph in stages.

    Attributes:
        graph: the graph at the plan's micro-batch size.
        stage_of: stage of each operator by index; duplicated and unknown ones are not in it.
        copies: stages of each duplicated operator by index.
        chosen: number formats.
    """

    graph: Graph
    stage_of: Mapping[int, int]
    copies: Mapping[int, frozenset[int]]
    chosen: Precision

    @functools.cached_property
    def flows(self) -> frozenset[str]:
        """Tensors through which a gradient flows."""
        return differentiable(self.graph)

    def readers(self, tensor: str) -> tuple[int, ...]:
        """Stages that read a tensor, ascending."""
        found: set[int] = set()
        for node in self.graph.consumers.get(tensor, ()):
            found |= {self.stage_of[node]} if node in self.stage_of else self.copies.get(node, frozenset())
        return tuple(sorted(found))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Tensors that go to another stage than the one that makes them, by stage and in order of production."""
        found = []
        for index, stage in sorted(self.stage_of.items(), key=lambda entry: (entry[1], entry[0])):
            for name in self.graph.nodes[index].outputs:
                targets = tuple(s for s in self.readers(name) if s != stage) if name else ()
                if targets:
                    found.append(self._boundary(name, stage, targets))
        return tuple(found)

    def _boundary(self, name: str, stage: int, targets: tuple[int, ...]) -> Boundary:
        tensor = self.graph.tensors[name]
        dtype = trained_dtype(tensor, self.chosen)
        size = tensor.elements * self.chosen.compute.bits // 8 if tensor.dtype.is_float else tensor.byte_count
        return Boundary(name, stage, targets, tensor.shape, dtype, size, name in self.flows)

    def inputs(self, stage: int) -> tuple[str, ...]:
        """Model inputs that a stage reads, in the model's order."""
        return tuple(name for name in self.graph.inputs if stage in self.readers(name))

    def outputs(self, stage: int) -> tuple[str, ...]:
        """Model outputs that a stage makes; a duplicated operator's belongs to its first stage."""
        return tuple(name for name in self.graph.outputs if self._maker(name) == stage)

    def _maker(self, tensor: str) -> int:
        node = self.graph.producer.get(tensor, -1)
        return self.stage_of.get(node, min(self.copies.get(node, (-1,))))

    def shared_parameters(self, *, summed: bool = True) -> tuple[SharedParameter, ...]:
        """Trained parameters that several stages read, in order of first use.

        Args:
            summed: whether their gradients are summed over the stages: the pipeline drains before an update.
        """
        names: dict[str, dict[str, None]] = {}
        stages: dict[str, set[int]] = {}
        for node, stage in self.stage_of.items():
            for index in parameter_indices(self.graph, node):
                parameter = self.graph.parameters[index]
                owner = parameter.tied_to or parameter.name
                if parameter.trainable:
                    names.setdefault(owner, {})[parameter.name] = None
                    stages.setdefault(owner, set()).add(stage)
        return tuple(
            SharedParameter(
                parameter=owner,
                names=tuple(sorted(names[owner], key=lambda name: self.graph.parameter_index[name])),
                stages=tuple(sorted(found)),
                reduction="sum" if summed else "none",
                bytes=self.graph.parameters[self.graph.parameter_index[owner]].elements * self.chosen.gradient_bytes,
            )
            for owner, found in sorted(stages.items(), key=lambda entry: self.graph.parameter_index[entry[0]])
            if len(found) > 1
        )

    def divided_modules(self) -> tuple[str, ...]:
        """Layers whose weighted operators lie in more than one stage."""
        stages: dict[str, set[int]] = {}
        for node, stage in self.stage_of.items():
            module = layer_of(self.graph.nodes[node].module)
            if module and self.graph.node_parameters[node]:
                stages.setdefault(module, set()).add(stage)
        return tuple(module for module, found in stages.items() if len(found) > 1)


def parameter_indices(graph: Graph, node: int) -> tuple[int, ...]:
    """Indices of the parameters that a node reads as the file names them, ties not resolved, each once."""
    sources = (s for name in graph.nodes[node].inputs for s in graph.sources.get(name, ()))
    return tuple(dict.fromkeys(graph.parameter_index[s] for s in sources))


def trained_dtype(tensor: Tensor, chosen: Precision) -> str:
    """The type a tensor has in training: floats the compute type, all else as stored."""
    return str(chosen.compute if tensor.dtype.is_float else tensor.dtype)


def tensor_specs(graph: Graph, names: Sequence[str], chosen: Precision) -> tuple[TensorSpec, ...]:
    """Descriptions of the named tensors that the graph knows."""
    known = (graph.tensors[name] for name in names if name in graph.tensors)
    return tuple(TensorSpec(t.name, t.shape, trained_dtype(t, chosen)) for t in known)
