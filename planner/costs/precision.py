"""Number formats of training: the type of matrix products, and bytes of a parameter in memory and on links.

A precision is a table entry with a name; options after a colon change how its parameters are stored and exchanged:
`mxfp8:grads=fp32,last=4`, `bf16:grads=fp32,reduce=bf16`. An optimizer is named alike: `adam:moments=bf16`.

The narrow precisions are the recipes of Transformer Engine as Megatron Core runs them. Activations between operators,
attention, routers, embeddings and the head stay in bf16 (`planner.costs.narrow` says which products do not). Each
operand of a product is cast to the narrow format, once by rows and once by columns: the scales of a block run along the
dimension that is summed over, and the gradients sum over the other one (NVIDIA, Transformer Engine, `Linear` and its
recipes `DelayedScaling`, `Float8CurrentScaling`, `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import JobError, UsageError
from planner.graph import DType
from planner.hardware.types import Device
from planner.registry import chosen, with_options


@dataclass(frozen=True, slots=True)
class NarrowFormat:
    """A format of less than 16 bits in which linear layers multiply.

    Attributes:
        name: as a device states its peak.
        element_bytes: one copy of an element, its part of the block's scales included.
        readings: how often a cast reads the 16-bit values: twice if it needs their maximum first.
        gathered_bytes: bytes a parameter in which ranks gather weights that are stored in the format.
        multiple: every dimension of a product must be a multiple of this.
    """

    name: str
    element_bytes: float
    readings: int
    gathered_bytes: float
    multiple: int = 16

    @property
    def pair_bytes(self) -> float:
        """Bytes of an element's two copies, by rows and by columns."""
        return 2 * self.element_bytes


FP8 = NarrowFormat("fp8", 1.0, 1, 1.0)
"""8 bits with one scale a tensor, known from the steps before (delayed scaling)."""
FP8_CURRENT = NarrowFormat("fp8", 1.0, 2, 1.0)
"""8 bits with one scale a tensor, that of its own largest value (current scaling)."""
FP8_BLOCKS = NarrowFormat("fp8", 1 + 4 / 128, 1, 1.0, 128)
"""8 bits with an fp32 scale for every 128 elements (DeepSeek-V3, section 3.3)."""
MXFP8 = NarrowFormat("mxfp8", 1 + 1 / 32, 1, 2.0, 32)
"""8 bits with an 8-bit scale for every 32 elements (OCP Microscaling). Ranks gather 16 bits and cast on arrival."""
NVFP4 = NarrowFormat("nvfp4", 1 / 2 + 1 / 16, 2, 2.0, 32)
"""4 bits with an 8-bit scale for every 16 elements, and one a tensor from its largest value."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights, gradients and activations are stored and computed.

    Attributes:
        name: what the user writes, options included.
        format: the number format that matrix units compute in, by which a device states its peaks.
        compute: type of activations and of matrix units' inputs.
        weight_bytes: bytes a parameter takes in the working copy, and when ranks gather it.
        gradient_bytes: bytes a parameter's gradient takes when it travels.
        master_bytes: bytes of the fp32 master copy, kept with the optimizer state; 0 without one.
        spare_bytes: bytes of a gradient that stay beside those that travel: one in the compute type, zeroed, not freed,
            or the rest of a wider sum.
        copy_bytes: bytes of a parameter's narrow copies, beside `weight_bytes`. Of weights that are gathered in every
            pass they are made of what was gathered.
        narrow: what linear layers multiply in; None for the compute type.
        first, last: numbered layers at either end that multiply in the compute type.
    """

    name: str
    format: str
    compute: DType
    weight_bytes: float
    gradient_bytes: float
    master_bytes: int
    spare_bytes: float = 0
    copy_bytes: float = 0
    narrow: NarrowFormat | None = None
    first: int = 0
    last: int = 0

    @property
    def loss_bytes(self) -> float:
        """Bytes of an element of the loss: mixed precision computes it in fp32, a pure one in its own type."""
        return 4.0 if self.master_bytes else self.compute.bits / 8

    @property
    def held_gradient_bytes(self) -> float:
        """Bytes of a parameter's gradients in memory; `gradient_bytes` are those that travel."""
        return self.gradient_bytes + self.spare_bytes

    @property
    def held_weight_bytes(self) -> float:
        """Bytes of a parameter's working copies in memory; `weight_bytes` are those that travel."""
        return self.weight_bytes + self.copy_bytes

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that matrix units must compute in."""
        return (self.format, self.narrow.name) if self.narrow else (self.format,)

    def computes_as(self, other: Precision) -> bool:
        """Whether passes take as long as in another precision, and nothing fewer bytes: plans are no faster in it."""
        own, its = (
            (each.weight_bytes, each.gradient_bytes, each.master_bytes, each.spare_bytes, each.copy_bytes)
            for each in (self, other)
        )
        alike = (self.formats, self.compute, self.first, self.last) == (
            other.formats, other.compute, other.first, other.last
        )  # fmt: skip
        return alike and all(mine >= there for mine, there in zip(own, its, strict=True))

    def lacks(self, device: Device) -> tuple[str, ...]:
        """The formats that a device does not compute in."""
        return tuple(name for name in self.formats if name not in device.matrix_flop_per_s)


class Stored(StrEnum):
    """A format in which a parameter's figures are stored or sent; OWN is the precision's usual one."""

    OWN = "own"
    BF16 = "bf16"
    FP32 = "fp32"

    def bytes_or(self, usual: float) -> float:
        """Bytes of one figure, `usual` for the precision's own."""
        return {Stored.OWN: usual, Stored.BF16: 2, Stored.FP32: 4}[self]


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of a precision, written after a colon behind its name.

    Attributes:
        grads: sum of the gradients over micro-batches (Megatron's main gradients).
        reduce: gradients while ranks exchange them; own is that of `grads`.
        weights: working copy of the weights beside the narrow ones; own keeps none where the recipe does without.
        first, last: numbered layers at either end that multiply in bf16.
    """

    grads: Stored = Stored.OWN
    reduce: Stored = Stored.OWN
    weights: Stored = Stored.OWN
    first: int = 0
    last: int = 0

    def applied(self, base: Precision, name: str) -> Precision:
        """A precision of that name with these options.

        Raises:
            UsageError: an option that says nothing about the precision.
        """
        held = self.grads.bytes_or(base.gradient_bytes)
        sent = self.reduce.bytes_or(held)
        spare = max(0.0, held - sent) + base.spare_bytes
        others = [f.name for f in dataclasses.fields(self)[2:] if getattr(self, f.name) != f.default]
        if others and (base.narrow is None or min(self.first, self.last) < 0 or self.weights is Stored.FP32):
            hint = "first=N and last=N with N of 0 or more, and weights=bf16, go with fp8, mxfp8 and nvfp4"
            raise UsageError(f"precision {name!r} cannot have {', '.join(others)} so", hint=hint)
        wide = _recipe(name, base.narrow, alone=False) if base.narrow and self.weights is Stored.BF16 else base
        return dataclasses.replace(
            wide, name=name, gradient_bytes=sent, spare_bytes=spare, first=self.first, last=self.last
        )


def _recipe(name: str, narrow: NarrowFormat, *, alone: bool) -> Precision:
    """A narrow recipe, whose weights are stored in the narrow format alone (Megatron's `--fp8-param-gather`) or beside
    those in bf16."""
    sent = narrow.gathered_bytes if alone else 2
    copies = narrow.pair_bytes - (sent if alone else 0)
    return Precision(name, "bf16", DType.BFLOAT16, sent, 2, 4, copy_bytes=copies, narrow=narrow)


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", DType.FLOAT32, 4, 4, 0),
        Precision("tf32", "tf32", DType.FLOAT32, 4, 4, 0),
        Precision("bf16", "bf16", DType.BFLOAT16, 2, 2, 4),
        Precision("fp16", "fp16", DType.FLOAT16, 2, 2, 4),
        Precision("bf16-fp32grad", "bf16", DType.BFLOAT16, 2, 4, 4),
        Precision("bf16-deepspeed", "bf16", DType.BFLOAT16, 2, 4, 4, spare_bytes=2),  # its BF16_Optimizer
        Precision("bf16-pure", "bf16", DType.BFLOAT16, 2, 2, 0),
        _recipe("fp8", FP8, alone=True),
        _recipe("fp8-cs", FP8_CURRENT, alone=True),
        _recipe("fp8-blockwise", FP8_BLOCKS, alone=False),
        _recipe("mxfp8", MXFP8, alone=True),
        _recipe("nvfp4", NVFP4, alone=False),
    )
}

BEST_FIRST = ("bf16", "fp16", "fp32")
"""Default precisions, best first: fp16 needs loss scaling, and fp32 takes twice the memory."""

OPTIMIZER_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0, "momentum": 1, "adafactor": 0, "lamb": 2}
"""Running means that an optimizer keeps of each parameter's gradient, without the master copy."""


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Options of an optimizer, written after a colon behind its name.

    Attributes:
        moments: its running means; own is fp32.
    """

    moments: Stored = Stored.OWN


def precision(name: str) -> Precision:
    """The precision of that name, which may have options: `mxfp8:grads=fp32`.

    Raises:
        UsageError: no precision has that name, or it does not have such options.
    """
    key, _, text = name.partition(":")
    base = chosen("precision", key, PRECISIONS)
    return with_options(FormatOptions(), text, f"precision {key!r}").applied(base, name) if text else base


def best_precision(devices: Sequence[Device]) -> str:
    """The first of `BEST_FIRST` whose format every one of the devices computes in; the first where none is."""
    able = (name for name in BEST_FIRST if not any(map(PRECISIONS[name].lacks, devices)))
    return next(able, BEST_FIRST[0])


def precision_remark(name: str, devices: Sequence[Device]) -> str:
    """Why a precision was chosen where none was asked for: which devices lack a better one; empty for the best."""
    if name not in BEST_FIRST:
        return "as the framework trains"
    better = BEST_FIRST[: BEST_FIRST.index(name)]
    lacking = {p: [d.name for d in devices if PRECISIONS[p].lacks(d)] for p in better}
    return "; ".join(f"no {p} on {', '.join(names)}" for p, names in lacking.items() if names)


def supported_precision(name: str, device: Device) -> Precision:
    """The precision of that name (the best one where it is empty), if the device computes in its formats.

    Raises:
        UsageError: no precision has that name.
        JobError: the device states no rate for one of its formats.
    """
    chosen = precision(name or best_precision([device]))
    lacking = chosen.lacks(device)
    if lacking:
        known = ", ".join(sorted(device.matrix_flop_per_s)) or "none"
        others = [p for p in PRECISIONS.values() if not p.lacks(device)]
        alike = [p for p in others if (p.narrow is None) == (chosen.narrow is None)]
        able = " or ".join(p.name for p in alike or others)
        raise JobError(
            f"{device.name} does not compute in {' and '.join(lacking)}, but in {known}",
            hint=f"use --precision {able}" if able else "add the format's peak to the hardware profile",
        )
    return chosen


def update_bytes(optimizer: str, chosen: Precision) -> float:
    """Bytes a parameter that an update moves: state read and written, gradient read, weight written."""
    return 2 * optimizer_state_bytes(optimizer, chosen) + chosen.gradient_bytes + chosen.held_weight_bytes


def optimizer_state_bytes(optimizer: str, formats: Precision) -> int:
    """Bytes of optimizer state a parameter, master copy included.

    Args:
        optimizer: its name, which may have options: `adam:moments=bf16`.
        formats: the precision, whose master copy stands with the state.

    Raises:
        UsageError: no optimizer has that name, or it does not have such options.
    """
    key, _, text = optimizer.partition(":")
    moments = chosen("optimizer", key, OPTIMIZER_MOMENTS)
    options = with_options(OptimizerOptions(), text, f"optimizer {key!r}") if text else OptimizerOptions()
    return moments * int(options.moments.bytes_or(4)) + formats.master_bytes
