"""The figures of a plan: predictions, alternatives, coverage of operators, headline.

The headline has the figures by which people compare training runs, the same wherever a plan is shown. MFU is model
FLOPs utilisation as PaLM defines it (Chowdhery et al. 2022, appendix B): the matrix work of forward and backward of the
model, without what is recomputed, over the time of a step and the dense peak of the devices at work in the format that
products with weights multiply in. Attention counts what its kernel executes: under a causal mask half of the scores and
the rest of the blocks on the diagonal where the kernel leaves hidden blocks out, all of them where it does not. So do
convolutions that are done in fewer multiplications. MFU cannot exceed 100 %.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from planner.costs import Profile
from planner.costs.errors import MeasuredError
from planner.costs.precision import Precision
from planner.graph import DType, Graph, TensorKind
from planner.hardware.types import Cluster
from planner.plans.words import significant
from planner.space.steps import NOTHING_EXPOSED, ExposedSeconds
from planner.sums import float_sum
from planner.units import format_number, format_seconds, plural, short_count

MFU_CONVENTION = "MFU counts the products that kernels execute: of causal attention what the mask does not hide"
"""How model FLOPs are counted; see the module."""
BUBBLE_CONVENTION = "time in which ranks wait for other stages, summed over ranks / (ranks * iteration_s)"
"""How `bubble_fraction` is defined. Exposed communication is no part of it."""
IDLE_CONVENTION = "1 - (forward + backward + update time summed over ranks) / (ranks * iteration_s)"
"""How files of before minor version 8 define it: exchanges and transfers between stages count as bubble."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one device of a stage, by kind.

    Attributes:
        weights_bytes: weights, in all versions that are kept.
        gradients_bytes: gradients of weights.
        optimizer_bytes: optimizer state, with master weights.
        activations_bytes: what is kept for the backward of all micro-batches in flight.
        workspace_bytes: what the operator at work needs beside.
        reserve_bytes: context of the runtime, loaded kernels and communication buffers.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> Mapping[str, int]:
        """Bytes by kind, in the order of the fields."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class StageCollective:
    """A collective that a stage's ranks run once an iteration, or with ZeRO-2 and 3 in every pass.

    Attributes:
        kind: which one.
        of: what it is about; tied gradients are exchanged with the other stages that hold the same weights.
        bytes: payload of one rank.
        ranks: ranks in a group.
        groups: groups that run it side by side.
        each: "forward" or "backward" when it is run in every such pass, block by block; the bytes are those of all
            blocks. "" when it is run once an iteration.
    """

    kind: str
    of: Literal["gradients", "weights", "tied gradients"]
    bytes: int
    ranks: int
    groups: int
    each: Literal["", "forward", "backward"] = ""


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What one stage is expected to take: one micro-batch on one replica, unless said otherwise.

    Attributes:
        forward_s: forward computation.
        backward_s: backward computation, recomputation included.
        recompute_s: the part of `backward_s` that repeats the forward.
        receive_s: transfer of the inputs from the stage before.
        return_s: transfer of their gradients back to it.
        sync_s: gradient synchronisation, per iteration, before overlap.
        exposed_sync_s: the part of `sync_s` not hidden behind backward work, and `tied_sync_s`.
        tied_sync_s: summing the gradients of weights that later stages hold too, per iteration.
        update_s: optimizer step, per iteration.
        in_flight: most micro-batches whose activations one replica keeps at a time.
        unit_bytes: activations of each of these; what `memory` has beyond `in_flight` of them is held only while a
            recomputed stage repeats a forward and runs its backward.
        memory: of one device.
        capacity_bytes: memory of the smallest device that the stage uses.
        collectives: per iteration.
        inside_s: communication among the ranks of a group: the part of forward and backward (without recomputation)
            that it takes; left out for groups of one rank.
        inside_bytes: bytes that a rank sends in it; left out with `inside_s`.
        host_bytes: activations of each micro-batch in flight that a rank keeps in the host's memory; left out where
            none are. `memory` has what of them is on the device at a time.
        move_s: copying these there, or back; what work does not hide is in `forward_s` and `backward_s`. Left out with
            `host_bytes`.
        weight_grad_s: the part of `backward_s` that `W` takes where the backward is split; left out where it is not,
            and half of the backward without recomputation where a plan that splits it does not say it.
        turning_bytes: where the backward is split, activations of a micro-batch at most while `I` runs; left out with
            `weight_grad_s`, and `unit_bytes` where a plan that splits it does not say it.
        waiting_bytes: activations and gradients of a micro-batch from the end of `I` to the end of `W`; likewise. The
            activations of `memory` are then the most of the order, not a multiple of `unit_bytes`.
        exposed: the parts of these times in which a device communicates and computes nothing; left out where there are
            none, and of files of before minor version 8.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_s: float
    return_s: float
    sync_s: float
    exposed_sync_s: float
    tied_sync_s: float
    update_s: float
    in_flight: int
    unit_bytes: int
    memory: StageMemory
    capacity_bytes: int
    collectives: tuple[StageCollective, ...]
    inside_s: float = 0.0
    inside_bytes: int = 0
    host_bytes: int = 0
    move_s: float = 0.0
    weight_grad_s: float | None = None
    turning_bytes: int | None = None
    waiting_bytes: int | None = None
    exposed: ExposedSeconds = NOTHING_EXPOSED

    @property
    def halves_bytes(self) -> tuple[int, int] | None:
        """`turning_bytes` and `waiting_bytes`, where both are said."""
        if self.turning_bytes is None or self.waiting_bytes is None:
            return None
        return self.turning_bytes, self.waiting_bytes


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the plan is expected to do, and what is proven about it.

    Attributes:
        iteration_s: closed form of the time of one iteration; measured where the schedule has none.
        simulated_iteration_s: the same played out event by event; null when it was not simulated.
        samples_per_s: global batch / iteration_s.
        bubble_fraction: share of device time in which devices wait for other stages; 0 without a pipeline.
        bubble_convention: how that share is defined.
        bottleneck: the stage that sets the pace.
        bound_s: no plan of `space` is faster when it is played out.
        gap: (reached_s - bound_s) / reached_s.
        space: in words, what the bound speaks of.
        proven_optimal: the gap is zero up to rounding.
        stages: by stage.
        tried_bound_s: no plan is faster that shares operators in one of the ways that were worked out; left out where
            that is not known, or the same.
        line_bound_s: no pipeline with one stage on each worker, 1F1B or GPipe, is faster; left out where the search
            looked at no others, or that is the same.
        measured_error: how predictions of such jobs compared with measured runs; left out where no stack is named.
    """

    iteration_s: float
    simulated_iteration_s: float | None
    samples_per_s: float
    bubble_fraction: float
    bubble_convention: str
    bottleneck: int
    bound_s: float
    gap: float
    space: str
    proven_optimal: bool
    stages: tuple[StagePrediction, ...]
    tried_bound_s: float | None = None
    line_bound_s: float | None = None
    measured_error: MeasuredError | None = None

    @property
    def reached_s(self) -> float:
        """Seconds that bound and gap refer to: the simulated iteration time, if it is known."""
        return self.iteration_s if self.simulated_iteration_s is None else self.simulated_iteration_s


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was priced and not chosen: a runner-up or a trivial one.

    Attributes:
        label: what it is: "runner-up", "pure data parallel", ...
        summary: its shape in a line.
        iteration_s: by closed form; null when it has no price.
        memory_bytes: of the fullest device.
        infeasible: reasons why it cannot run; empty when it can.
        copies: copies of the whole pipeline.
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches per iteration and copy.
        schedule: name of the schedule.
        zero: ZeRO stage.
        starts: first block of each stage.
        replicas: replicas of each stage in one copy.
        recompute: numbers of the stages that recompute.
        ranks: ranks of a replica of each stage; left out where all are one.
        simulated_iteration_s: played out event by event; left out where it was not.
        repeats: modules that each stage repeats, `layernorm,act`, empty for none; left out where no stage repeats any.
        context: ranks of a replica that share the sequence; left out where that is 1.
        expert: ranks of a replica to which samples and experts are dealt; left out where that is 1.
        layers: layers that each stage recomputes, 0 for all or none; left out where it is that everywhere.
        offload: modules whose activations each stage keeps in the host's memory, `core_attn,attn_proj`, empty for none;
            left out where no stage keeps any there.
        experts: ranks of a replica that hold different experts, where tensor parallel ranks do; left out where none do.
    """

    label: str
    summary: str
    iteration_s: float | None
    memory_bytes: int
    infeasible: tuple[str, ...]
    copies: int
    micro_batch: int
    micro_batches: int
    schedule: str
    zero: int
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    simulated_iteration_s: float | None = None
    repeats: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1
    layers: tuple[int, ...] = ()
    offload: tuple[str, ...] = ()
    experts: int = 1


@dataclass(frozen=True, slots=True)
class FreeChoice:
    """The fastest plan where no training framework needs to take it, beside one that is made for frameworks.

    Attributes:
        summary: its shape in a line; empty where it was not searched.
        iteration_s: played out event by event; null where it was not searched.
        bound_s: no plan of any kind is faster; null where it was not searched.
        needs: what it has that none of the frameworks takes; empty where one takes it, too.
        reason: why it was not searched, or why the plan is this one though it is for frameworks.
    """

    summary: str = ""
    iteration_s: float | None = None
    bound_s: float | None = None
    needs: tuple[str, ...] = ()
    reason: str = ""


def gap_to(bound_s: float, reached_s: float) -> float:
    """(reached - bound) / reached, at least 0: how far the bound lies below the time."""
    return max(0.0, 1 - bound_s / reached_s) if reached_s > 0 else 0.0


GIB = 1 << 30
HOUR_S = 3600.0
TOKENS_PRICED, SAMPLES_PRICED = 1e12, 1e6
"""Number of tokens, or of samples for a model without tokens, that a price is given for."""
_INTEGERS = (DType.INT64, DType.INT32)


@dataclass(frozen=True, slots=True)
class Headline:
    """What a plan comes to, by the figures that people compare training runs by.

    Attributes:
        model: name of the model.
        devices: devices at work, by type.
        global_batch: samples of a step.
        iteration_s: time of a step.
        samples_per_s: samples of all devices a second.
        memory_bytes: of the fullest device.
        device_bytes: all memory of that device, headroom and reserve included.
        sequence: tokens of a sample; left out of models without tokens.
        tokens_per_step: tokens of a step; left out of models without tokens.
        tokens_per_s_per_device: left out of models without tokens.
        flops_per_sample: matrix work of forward and backward that kernels execute (of masked attention what is not
            hidden), without recomputation; left out where it is not known, as of operators whose seconds were given.
        peak_flop_per_s: dense peak of the devices at work, all together.
        flop_per_s_per_device: model FLOPs that a device does a second; left out with `flops_per_sample`.
        mfu: model FLOPs utilisation, a fraction of the peak; left out with `flops_per_sample`.
        low_s: with 80 % probability a step takes longer; left out where too few runs of the class were compared.
        high_s: and less than this; left out with `low_s`.
        dollars_per_hour: price of the devices at work, in US dollars; left out where it is not known.
        dollars_per_tera_tokens: price of 10^12 tokens; left out where no price is known, or of models without tokens.
        dollars_per_mega_samples: price of 10^6 samples, of models without tokens.
        available_devices: devices that the job may use; left out where the plan uses all of them well.
        enough_devices: number of devices with which the plan is as fast, where nothing was found that uses more of them
            better; left out where the devices at work are not the first ones.
        fuller_batch: the nearest global batch at which all of them, or more of them, do more samples a second; left out
            where none was found.
        fuller_data: data-parallel size there.
        fuller_gain: further samples a second there, at least, as a part of the plan's.
    """

    model: str
    devices: dict[str, int]
    global_batch: int
    iteration_s: float
    samples_per_s: float
    memory_bytes: int
    device_bytes: int
    sequence: int = 0
    tokens_per_step: int = 0
    tokens_per_s_per_device: float = 0.0
    flops_per_sample: float = 0.0
    peak_flop_per_s: float = 0.0
    flop_per_s_per_device: float = 0.0
    mfu: float = 0.0
    low_s: float | None = None
    high_s: float | None = None
    dollars_per_hour: float = 0.0
    dollars_per_tera_tokens: float = 0.0
    dollars_per_mega_samples: float = 0.0
    available_devices: int = 0
    enough_devices: int = 0
    fuller_batch: int = 0
    fuller_data: int = 0
    fuller_gain: float = 0.0

    @property
    def idle_words(self) -> str:
        """Devices that do nothing, and what would use them; "" where all are well used."""
        idle = max(0, self.available_devices - self.device_count)
        batch = f"-b {self.fuller_batch}, " if self.fuller_batch != self.global_batch else ""
        fuller = f"{batch}DP {self.fuller_data}: +{self.fuller_gain:.0%} samples/s"
        if not idle:
            return fuller if self.fuller_batch else ""
        fewer = f"--devices {self.enough_devices} is as fast" if self.enough_devices else ""
        remedy = fuller if self.fuller_batch else fewer
        return f"{idle} of {plural(self.available_devices, 'device')} idle" + f" ({remedy})" * bool(remedy)

    @property
    def device_count(self) -> int:
        """Devices at work."""
        return sum(self.devices.values())

    def at(self, iteration_s: float, error: MeasuredError | None = None) -> Headline:
        """The headline at another iteration time, with the interval that a measured error gives."""
        low, high = (error.low, error.high) if error else (None, None)
        return _figured(
            dataclasses.replace(
                self,
                iteration_s=significant(iteration_s),
                low_s=None if low is None else significant(low * iteration_s),
                high_s=None if high is None else significant(high * iteration_s),
            )
        )

    def priced(self, dollars_per_device_hour: float) -> Headline:
        """The headline at another price of a device-hour, in US dollars."""
        return _figured(dataclasses.replace(self, dollars_per_hour=dollars_per_device_hour * self.device_count))

    def __str__(self) -> str:
        """The line that people copy: `gpt2, 8 x a100-sxm-80gb, seq 1024, ..: 47 ms, 174,000 tokens/s/device, ..`."""
        return f"{self.subject}: {', '.join(self.figures)}"

    @property
    def subject(self) -> str:
        """The job: model, devices, sequence length, samples or tokens of a step."""
        devices = " + ".join(f"{count} x {name}" for name, count in self.devices.items())
        work = f"seq {self.sequence}, {short_count(self.tokens_per_step)} tokens a step"
        return f"{self.model}, {devices}, {work if self.sequence else f'{self.global_batch} samples a step'}"

    @property
    def figures(self) -> tuple[str, ...]:
        """Time, rate, MFU, memory and price, each with its unit; unknown ones are left out."""
        rate = f"{_thousands(self.tokens_per_s_per_device)} tokens/s/device"
        price = f"${short_count(self.dollars_per_tera_tokens)} per 10^12 tokens"
        if not self.sequence:
            rate = f"{_thousands(self.samples_per_s / self.device_count)} samples/s/device"
            price = f"${format_number(self.dollars_per_mega_samples, 3)} per 10^6 samples"
        time = format_seconds(self.iteration_s)
        if self.low_s is not None and self.high_s is not None:
            time += f" (80 %: {format_seconds(self.low_s)} to {format_seconds(self.high_s)})"
        return (
            time,
            rate,
            *([f"{self.mfu:.1%} MFU"] if self.mfu else []),
            f"{self.memory_bytes / GIB:.3g} of {self.device_bytes / GIB:.3g} GiB",
            *([price] if self.dollars_per_hour else []),
            *filter(None, [self.idle_words]),
        )


def headline_of(
    graph: Graph,
    cluster: Cluster,
    prices: Profile,
    *,
    chosen: Precision,
    global_batch: int,
    ranks: Iterable[int],
    iteration_s: float,
    memory_bytes: float,
    capacity_bytes: float,
    error: MeasuredError | None = None,
    use: Mapping[str, Any] = MappingProxyType({}),
) -> Headline:
    """The headline of a job on some of the cluster's devices.

    Args:
        graph: the model, at the batch of `prices`.
        cluster: the hardware.
        prices: the work of the model's operators, on one device at any micro-batch size.
        chosen: the number formats.
        global_batch: samples of a step.
        ranks: devices at work, at least one.
        iteration_s: time of a step.
        memory_bytes: of the fullest device.
        capacity_bytes: of that device, without the headroom.
        error: how predictions of such jobs compared with measured runs.
        use: fields about devices that are not well used (`planner.plans.idle.fuller_use`).
    """
    types = Counter(int(cluster.device_types[rank]) for rank in ranks)
    used = [(cluster.devices[kind], count) for kind, count in sorted(types.items())]
    rate_format = chosen.formats[-1]
    has_prices = all(device.price_per_hour for device, _ in used)
    device_sizes = [device.memory_bytes for device, _ in used if device.capacity_bytes >= capacity_bytes]
    sequence = tokens_per_sample(graph, prices)
    flops = prices.executed_total / prices.micro_batch
    bare = Headline(
        model=graph.name,
        devices={device.name: count for device, count in used},
        global_batch=global_batch,
        iteration_s=0.0,
        samples_per_s=0.0,
        memory_bytes=round(memory_bytes),
        device_bytes=min(device_sizes, default=round(capacity_bytes)),
        sequence=sequence,
        tokens_per_step=sequence * global_batch,
        flops_per_sample=significant(flops),
        peak_flop_per_s=float_sum(count * device.matrix_flop_per_s.get(rate_format, 0.0) for device, count in used),
        dollars_per_hour=significant(has_prices * float_sum(count * device.price_per_hour for device, count in used)),
        **use,
    )
    return bare.at(iteration_s, error)


def _figured(bare: Headline) -> Headline:
    """The headline with the figures that follow from work, time, devices and price."""
    per_s = bare.global_batch / bare.iteration_s
    flop_per_s, tokens_per_s, hourly = bare.flops_per_sample * per_s, bare.sequence * per_s, bare.dollars_per_hour
    return dataclasses.replace(
        bare,
        samples_per_s=significant(per_s),
        tokens_per_s_per_device=significant(tokens_per_s / bare.device_count),
        flop_per_s_per_device=significant(flop_per_s / bare.device_count),
        mfu=significant(flop_per_s / bare.peak_flop_per_s) if bare.peak_flop_per_s else 0.0,
        dollars_per_tera_tokens=significant(hourly / HOUR_S * TOKENS_PRICED / tokens_per_s) if tokens_per_s else 0.0,
        dollars_per_mega_samples=0.0 if tokens_per_s else significant(hourly / HOUR_S * SAMPLES_PRICED / per_s),
    )


def tokens_per_sample(graph: Graph, prices: Profile) -> int:
    """Tokens of a sample; 0 for a model without tokens.

    Tokens are the steps of the longest integer input `[batch, steps]`, if some weights are multiplied with each step:
    rows of images and indices of embedding tables alone are no tokens.
    """
    fed = (graph.tensors[name] for name in graph.inputs if name in graph.tensors)
    inputs = (t for t in fed if t.kind is TensorKind.INPUT and t.dtype in _INTEGERS)
    steps = max((t.shape[1] for t in inputs if len(t.shape) == 2), default=0)
    rows = prices.micro_batch * steps
    for node, owned, flops in zip(graph.nodes, graph.node_parameters, prices.forward_flops, strict=True):
        shape = graph.tensors[node.outputs[0]].shape
        if owned and flops and shape and math.prod(shape[:-1]) >= rows:
            return steps if steps > 1 else 0
    return 0


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
