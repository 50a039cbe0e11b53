"""The model as a plan file describes it, and what changes in its file for the plan's micro-batch.

Sizes are those at the plan's micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from planner.operators import BatchConstants


class Loss(StrEnum):
    """Where the training loss is."""

    IN_GRAPH = "in_graph"
    AT_OUTPUTS = "at_outputs"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that enters or leaves the model, at the plan's micro-batch size, in the type it is trained in."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class RebatchedOperand:
    """Constant operands of the model file that hold its batch, and what they are at the plan's micro-batch.

    Attributes:
        operators: that read it, by their first outputs in the file.
        operand: its place among their inputs, from 0.
        values: all of its elements at the plan's micro-batch (a target of Reshape or Expand).
    """

    operators: tuple[str, ...]
    operand: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RebatchedTensor:
    """A constant of the model file, or a value that it computes from constants, that has an entry for each sample.

    Of more entries in the file the first are taken; where it has fewer, all are equal and are repeated.

    Attributes:
        tensor: its name.
        shape: at the plan's micro-batch.
    """

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The model that the plan is for.

    Attributes:
        name: for people.
        fingerprint: sha256 (hex) of the model's structure; a plan holds for this model only.
        opset: version of the default ONNX operator set; 0 for other formats.
        inputs: fed at each step.
        outputs: results.
        loss: whether the graph computes the loss or ends at outputs that a loss is to be put on.
        operators: operators that the stages divide among themselves.
        parameters: trained weight elements, a tied copy counted once.
        loss_output: the output that is the loss, where the graph computes it and it is not the first output.
        file_sha256: sha256 (hex) of the model file, without weights beside it; for information, since another file of
            the same structure (other weights) has the same plan. Left out for models that are built by name.
        identities: operators of the file, by first output, that hand on their first operand unchanged: they are in no
            block, and their results lie as the operand does. They need not run, and must not where the file is fixed at
            another batch, which their other operands may hold. Left out where there are none, and without a file.
        exported_batch: batch that the model file is fixed at; left out where the file leaves it open.
        rebatch: constants that must have other values for the plan's micro-batch; left out where none must.
        rebatched_tensors: constants and weights with other sizes there.
    """

    name: str
    fingerprint: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    loss: Loss
    operators: int
    parameters: int
    loss_output: str = ""
    file_sha256: str = ""
    identities: tuple[str, ...] = ()
    exported_batch: int = 0
    rebatch: tuple[RebatchedOperand, ...] = ()
    rebatched_tensors: tuple[RebatchedTensor, ...] = ()

    def comparable(self, other: ModelSection) -> ModelSection:
        """The section with what the other says of the model's file, where one of them does not know the file.

        Another file of the same structure (other weights) is the same model: its sha256 is always taken over.
        """
        if other.file_sha256 and self.file_sha256:
            return replace(self, file_sha256=other.file_sha256)
        return replace(
            self, file_sha256=other.file_sha256, identities=other.identities, exported_batch=other.exported_batch,
            rebatch=other.rebatch, rebatched_tensors=other.rebatched_tensors,
        )  # fmt: skip

    @property
    def batch_constants(self) -> BatchConstants:
        """What changes in the file for the plan's micro-batch."""
        operands = {(name, entry.operand): entry.values for entry in self.rebatch for name in entry.operators}
        return BatchConstants(operands, {t.tensor: dict(enumerate(t.shape)) for t in self.rebatched_tensors})
