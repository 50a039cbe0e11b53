"""The model as a plan file describes it: inputs and outputs, what changes in its file for the micro-batch, its blocks.

Sizes are those at the plan's micro-batch. Repeated blocks are written once, as a template that expands without loss:
names that differ only in numbers which grow by constant steps are written `layers.{0+1i}`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from planner.errors import PlanError
from planner.operators import BatchConstants


class Loss(StrEnum):
    """Where the training loss is."""

    IN_GRAPH = "in_graph"
    AT_OUTPUTS = "at_outputs"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that enters or leaves the model.

    Attributes:
        name: its name in the model.
        shape: at the plan's micro-batch size.
        dtype: the type that it has in training.
    """

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
class SeparatedWeight:
    """A weight of its own that the file stores as one with others, because all were equal when it was exported, or that
    it lacks, because it was zero.

    Attributes:
        weight: its name in the plan.
        stored: the tensor of the file that holds its first values; "" where these are zeros and the file has none.
        operators: that read it in the file, by their first outputs.
        operand: the place among their inputs of the tensor, or of what the file computes from it alone; from 0.
    """

    weight: str
    stored: str
    operators: tuple[str, ...]
    operand: int


OF_FILE = ("file_sha256", "identities", "exported_batch", "rebatch", "rebatched_tensors", "separated")
"""Fields of `ModelSection` that are about the model's file."""


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
        separated: weights that the file stores as one with others; left out where there are none.
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
    separated: tuple[SeparatedWeight, ...] = ()

    def comparable(self, other: ModelSection) -> ModelSection:
        """The section with what the other says of the model's file, where one of them does not know the file.

        Another file of the same structure (other weights) is the same model: its sha256 is always taken over.
        """
        both_known = bool(other.file_sha256 and self.file_sha256)
        taken: dict[str, Any] = {name: getattr(other, name) for name in (OF_FILE[:1] if both_known else OF_FILE)}
        return replace(self, **taken)

    @property
    def batch_constants(self) -> BatchConstants:
        """What changes in the file for the plan's micro-batch."""
        operands = {(name, entry.operand): entry.values for entry in self.rebatch for name in entry.operators}
        return BatchConstants(operands, {t.tensor: dict(enumerate(t.shape)) for t in self.rebatched_tensors})


_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
_SLOT = re.compile(r"\{([0-9]+)\+([0-9]+)i\}")


def filled(text: str, copy: int) -> str:
    """A template's text for one copy (0, 1, ...): every `{b+si}` stands for b + s * copy.

    >>> filled("layers.{2+1i}", 3)
    'layers.5'
    """
    return _SLOT.sub(lambda match: str(int(match[1]) + int(match[2]) * copy), text)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text, in order."""
    return tuple(int(number) for number in _NUMBER.findall(text))


def outline(text: str) -> str:
    """The text with each number replaced by `#`."""
    return _NUMBER.sub("#", text)


def template(first: str, second: str) -> str:
    """The template whose copies 0 and 1 are the two texts, which have equal outlines."""
    steps = iter([b - a for a, b in zip(numbers(first), numbers(second), strict=True)])

    def slot(match: re.Match[str]) -> str:
        step = next(steps)
        return f"{{{match.group()}+{step}i}}" if step else match.group()

    return _NUMBER.sub(slot, first)


Skeleton = tuple[int, tuple[int, ...]]
"""A row of texts without the numbers in them: its shape, equal for rows that differ in numbers only, -1 where a brace,
which would be read as a slot, forbids a template; and the numbers, in order."""


def skeletons(rows: Iterable[tuple[Sequence[str], Hashable]]) -> list[Skeleton]:
    """The skeletons of rows of texts, each with what else must be equal in copies of one template."""
    known: dict[object, int] = {}
    result: list[Skeleton] = []
    for texts, equal in rows:
        if any("{" in text for text in texts):
            result.append((-1, ()))
            continue
        shape = known.setdefault((*map(outline, texts), equal), len(known))
        result.append((shape, tuple([n for text in texts for n in numbers(text)])))
    return result


def repeats(rows: Sequence[Skeleton], start: int, period: int) -> int:
    """How often the rows from `start` repeat with that period, numbers growing by constant steps (at least 1)."""
    count = 1
    while start + (count + 1) * period <= len(rows):
        for k in range(start, start + period):
            (shape, first), (_, second), (shape_now, current) = rows[k], rows[k + period], rows[k + count * period]
            if shape < 0 or shape != shape_now:
                return count
            pairs = zip(first, second, current, strict=True)
            if any(b < a or c != a + (b - a) * count for a, b, c in pairs):
                return count
        count += 1
    return count


MAX_PERIOD = 16
"""Longest sequence of blocks that can be one repeated unit (a transformer layer contracts to 2 to 10 blocks)."""

MAX_BLOCKS = 1_000_000
"""Limit on the blocks of a plan; a file with more is refused."""

MIN_REPEAT = 3
"""Fewest copies that are written as a template: any two alike blocks differ by constant steps."""


@dataclass(frozen=True, slots=True)
class BlockParameter:
    """A weight tensor that a block reads.

    Attributes:
        name: the initializer's name in the model file.
        shape: as stored in the file.
        dtype: as stored in the file.
        label: what a person calls it, `model.layers.7.mlp.up_proj.weight`; left out when equal to `name`.
        module: path of the module that owns it; left out when unknown.
        trainable: false for buffers (running statistics, position ids).
        transposed: the file stores the transpose of the module's weight.
        tied_to: name of the parameter that this one is a copy of; left out when it stands for itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    label: str = ""
    module: str = ""
    trainable: bool = True
    transposed: bool = False
    tied_to: str = ""

    @property
    def owner(self) -> str:
        """Name of the parameter that holds the value: itself, or the one it is tied to."""
        return self.tied_to or self.name

    @property
    def elements(self) -> int:
        """Number of elements."""
        return functools.reduce(lambda a, b: a * b, self.shape, 1)


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring operators that are never cut apart.

    Attributes:
        name: readable, mostly the path of the module.
        nodes: operators by the name of their first output, in topological order.
        parameters: weights that these operators read, in order of first use.
        structure: hash (hex) of what the operators compute, without names, equal at every micro-batch size; by it two
            versions of a model are matched. Left out in files of before.
    """

    name: str
    nodes: tuple[str, ...]
    parameters: tuple[BlockParameter, ...]
    structure: str = ""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A sequence of blocks, written out once and repeated.

    With `repeat` 1 the blocks stand as they are. Otherwise they are a template: the run expands to `repeat` copies of
    the sequence, and in copy i (0, 1, ...) every `{b+si}` inside a string stands for the number b + s * i.

    Attributes:
        repeat: how many copies.
        blocks: the sequence.
    """

    repeat: int
    blocks: tuple[Block, ...]


def expand(runs: Sequence[BlockRun]) -> tuple[Block, ...]:
    """All blocks of the model in order, templates written out.

    Raises:
        PlanError: they are more than any model has.
    """
    total = sum(max(0, run.repeat) * len(run.blocks) for run in runs)
    if total > MAX_BLOCKS:
        raise PlanError(f"the plan lists {total} blocks", where="blocks", hint=f"at most {MAX_BLOCKS} can be read")
    result: list[Block] = []
    for run in runs:
        if run.repeat == 1:
            result.extend(run.blocks)
            continue
        for i in range(run.repeat):
            fill = functools.partial(filled, copy=i)
            result.extend(_map_strings(block, fill) for block in run.blocks)
    return tuple(result)


def compress(blocks: Sequence[Block]) -> tuple[BlockRun, ...]:
    """The shortest list of runs that a greedy left-to-right search finds; `expand` gives the same blocks back.

    Blocks form a run when they differ only in numbers inside their strings, each number growing by a constant step from
    copy to copy. O(blocks * MAX_PERIOD) comparisons.
    """
    rows = skeletons((_strings(block), _weights(block)) for block in blocks)
    runs: list[BlockRun] = []
    position = 0
    while position < len(blocks):
        period, repeat = _best_run(rows, position)
        if repeat > 1:
            template = tuple(_template(blocks[position + k], blocks[position + k + period]) for k in range(period))
            runs.append(BlockRun(repeat, template))
        elif runs and runs[-1].repeat == 1:
            runs[-1] = BlockRun(1, (*runs[-1].blocks, blocks[position]))
        else:
            runs.append(BlockRun(1, (blocks[position],)))
        position += period * repeat
    return tuple(runs)


def _weights(block: Block) -> Hashable:
    """What beside names must be equal in blocks of one template."""
    weights = tuple([(p.shape, p.dtype, p.trainable, p.transposed) for p in block.parameters])
    return len(block.nodes), block.structure, weights


def blocks_as_said(blocks: tuple[Block, ...], said: tuple[Block, ...]) -> tuple[Block, ...]:
    """Blocks without their structures if those of a file, which may be of before, have none either."""
    if any(block.structure for block in said):
        return blocks
    return tuple(replace(block, structure="") for block in blocks)


def _best_run(rows: Sequence[Skeleton], start: int) -> tuple[int, int]:
    """(period, repeat) of the run from `start` that saves the most blocks; (1, 1) without a run of `MIN_REPEAT`."""
    best = (1, 1)
    remaining = len(rows) - start
    for period in range(1, min(MAX_PERIOD, remaining // MIN_REPEAT) + 1):
        if remaining - remaining % period - period <= (best[1] - 1) * best[0]:
            continue
        repeat = repeats(rows, start, period)
        if repeat >= MIN_REPEAT and (repeat - 1) * period > (best[1] - 1) * best[0]:
            best = (period, repeat)
    return best


def _template(first: Block, second: Block) -> Block:
    """The template whose copies 0 and 1 are the two blocks."""
    others = iter(_strings(second))
    return _map_strings(first, lambda text: template(text, next(others)))


def _strings(block: Block) -> list[str]:
    """Every name in a block, in the order in which `_map_strings` meets them."""
    texts = [block.name, *block.nodes]
    for p in block.parameters:
        texts += (p.name, p.label, p.module, p.tied_to)
    return texts


def _map_strings(block: Block, change: Callable[[str], str]) -> Block:
    """The block with every name in it changed, always in the same order."""
    return Block(
        change(block.name),
        tuple(change(node) for node in block.nodes),
        tuple(
            replace(p, name=change(p.name), label=change(p.label), module=change(p.module), tied_to=change(p.tied_to))
            for p in block.parameters
        ),
        block.structure,
    )


def turned_copies(blocks: Iterable[Block]) -> dict[str, str]:
    """Tied weights that the file stores as the transpose of the one that they are copies of, and that one."""
    parameters = {p.name: p for block in blocks for p in block.parameters}
    turned = {}
    for copy in parameters.values():
        owner = parameters.get(copy.owner, copy)
        if copy.shape == owner.shape[::-1] and (copy.shape, copy.transposed) != (owner.shape, owner.transposed):
            turned[copy.name] = owner.name
    return turned
