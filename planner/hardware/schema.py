"""The profile files as strict models: what may stand in them, in which units, with which defaults.

Only the loader imports this module (pydantic takes its time); the rest of the program sees `planner.hardware.types`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    PositiveFloat,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from planner.errors import UsageError
from planner.hardware.types import Collective
from planner.registry import did_you_mean
from planner.units import EXAMPLES, UNITS, Dimension, parse


def finding(message: str, hint: str = "") -> PydanticCustomError:
    """A validation error with a message of our own and what to do about it."""
    return PydanticCustomError("finding", "{message}", {"message": message, "hint": hint})


def _read(dimension: Dimension, least: float, most: float) -> BeforeValidator:
    def read(text: object) -> float:
        if text is None:
            raise finding("no value is given", f"write {dimension}, with {EXAMPLES[dimension]}")
        try:
            value = parse(text, dimension)
        except UsageError as error:
            raise finding(error.problem.message, error.problem.hint) from error
        if value < 0 or (value == 0 and least > 0):
            raise finding(f"{text} is {'negative' if value < 0 else 'zero'}", "write a positive quantity")
        if value > most:
            raise finding(f"{text} is more than 1", "a fraction lies between 0 and 1, or 0% and 100%")
        return value

    return BeforeValidator(read)


def _text(dimension: Dimension) -> WithJsonSchema:
    units = "|".join(u.replace("$", r"\$") for u in UNITS[dimension] if u)
    bare = "" in UNITS[dimension]
    number = r"\+?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
    pattern = rf"^\s*{number}\s*({units}){'?' if bare else ''}\s*$"
    text = {"type": "string", "pattern": pattern, "description": f"with {EXAMPLES[dimension]}"}
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, text]} if bare else text)


_BIG = float("inf")
Bytes = Annotated[float, _read(Dimension.BYTES, 1, _BIG), _text(Dimension.BYTES)]
Reserve = Annotated[float, _read(Dimension.BYTES, 0, _BIG), _text(Dimension.BYTES)]
ByteRate = Annotated[float, _read(Dimension.BYTE_RATE, 1, _BIG), _text(Dimension.BYTE_RATE)]
FlopRate = Annotated[float, _read(Dimension.FLOP_RATE, 1, _BIG), _text(Dimension.FLOP_RATE)]
Flops = Annotated[float, _read(Dimension.FLOPS, 1, _BIG), _text(Dimension.FLOPS)]
Seconds = Annotated[float, _read(Dimension.SECONDS, 0, _BIG), _text(Dimension.SECONDS)]
Fraction = Annotated[float, _read(Dimension.FRACTION, 1, 1.0), _text(Dimension.FRACTION)]
Part = Annotated[float, _read(Dimension.FRACTION, 0, 1.0), _text(Dimension.FRACTION)]
Factor = Annotated[float, _read(Dimension.FRACTION, 1, 10.0), _text(Dimension.FRACTION)]
Price = Annotated[float, _read(Dimension.PRICE, 0, _BIG), _text(Dimension.PRICE)]
Count = Annotated[int, Field(strict=True, ge=1)]
MatrixType = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4", "mxfp4", "nvfp4", "int8", "int16"]
Direction = Literal["per-direction", "bidirectional"]


class Strict(BaseModel):
    """A mapping in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cited(Strict):
    """Something with a source."""

    source: str | None = Field(None, description="where it comes from: a key of `sources`, or a citation or URL")
    verified: bool = Field(
        True, strict=True, description="false for a figure that nobody has checked against its source"
    )
    note: str | None = Field(None, description="how it was derived, or what to know about it")

    @field_validator("source")
    @classmethod
    def _known(cls, source: str | None, info: ValidationInfo) -> str | None:
        known = (info.context or {}).get("sources", {})
        if source is not None and source not in known and source.isidentifier():
            raise finding(f"unknown source {source!r}", did_you_mean(source, known) + " or write out the citation")
        return source


class Figure(Cited):
    """One quantity, written as `80 GB` or as `{value: 80 GB, source: vendor}`."""

    dimension: ClassVar[Dimension]
    value: Any

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: object) -> object:
        return data if isinstance(data, dict) else {"value": data}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [whole["properties"]["value"], whole], "description": cls.__doc__}


class MemoryFigure(Figure):
    """An amount of memory, such as `80 GB`."""

    dimension: ClassVar[Dimension] = Dimension.BYTES
    value: Bytes


class ReserveFigure(Figure):
    """An amount of memory that may be nothing, such as `2 GB`."""

    dimension: ClassVar[Dimension] = Dimension.BYTES
    value: Reserve


class BandwidthFigure(Figure):
    """A bandwidth without a direction, such as `2039 GB/s` of device memory."""

    dimension: ClassVar[Dimension] = Dimension.BYTE_RATE
    value: ByteRate


class ComputeFigure(Figure):
    """A computing rate, such as `312 TFLOP/s`."""

    dimension: ClassVar[Dimension] = Dimension.FLOP_RATE
    value: FlopRate


class TimeFigure(Figure):
    """A time, such as `5 us`."""

    dimension: ClassVar[Dimension] = Dimension.SECONDS
    value: Seconds


class FractionFigure(Figure):
    """An achievable fraction, such as `87%`."""

    dimension: ClassVar[Dimension] = Dimension.FRACTION
    value: Fraction


class PartFigure(Figure):
    """A part that may be nothing, such as `50%`."""

    dimension: ClassVar[Dimension] = Dimension.FRACTION
    value: Part


class FactorFigure(Figure):
    """A factor around one, such as `104%`."""

    dimension: ClassVar[Dimension] = Dimension.FRACTION
    value: Factor


class AttentionRates(Cited):
    """Achievable fraction by pattern of device names, as `{h100*: 45%, "*": 75%}`; the first that matches holds."""

    value: dict[str, Factor] = Field(min_length=1)


class AxisParts(Cited):
    """Fractions by pattern of the names of mesh axes, as `{expert: 0%, "*": 40%}`; the first that matches holds."""

    value: dict[str, Part] = Field(min_length=1)


class PassesFigure(Cited):
    """Times that the logits are read or written, `[forward, backward]`."""

    value: tuple[NonNegativeFloat, NonNegativeFloat]


class NamesFigure(Cited):
    """Some names, such as `[gated_activation]`; `[]` for none."""

    value: tuple[str, ...]


class ComparedFigure(Cited):
    """Runs that were compared, and between what measured over predicted lies, `[runs, low, high]`."""

    value: tuple[Count, PositiveFloat, PositiveFloat]


class CountFigure(Cited):
    """A whole number that may be 0."""

    value: int = Field(strict=True, ge=0)


class FlagFigure(Cited):
    """Whether something is so: `true` or `false`."""

    value: bool = Field(strict=True)


class PriceFigure(Figure):
    """A price, such as `4.10 $/h`."""

    dimension: ClassVar[Dimension] = Dimension.PRICE
    value: Price


class PeerLink(Cited):
    """The wire between two single devices; its direction must be said."""

    dimension: ClassVar[Dimension] = Dimension.BYTE_RATE
    value: ByteRate
    direction: Direction = Field(description="is the figure `per-direction`, or `bidirectional` (both summed)?")

    @property
    def byte_per_s(self) -> float:
        """One direction."""
        return self.value / (2 if self.direction == "bidirectional" else 1)


class Port(PeerLink):
    """What joins one child (a device, a node, ...) to a level: `count` equal ports."""

    count: Count = Field(1, description="equal ports a child has, such as 8 network cards a node")


class FlopCurve(Cited):
    """Achievable fraction by FLOPs of one operation, as `{1 GFLOP: 45%, 128 GFLOP: 75%}`."""

    dimension: ClassVar[Dimension] = Dimension.FLOPS
    points: dict[Flops, Fraction] = Field(min_length=1)

    _ascending = field_validator("points")(lambda points: _ascending(points))


class ByteCurve(Cited):
    """Achievable fraction by bytes of one operation, as `{1 MB: 60%, 100 MB: 90%}`."""

    dimension: ClassVar[Dimension] = Dimension.BYTES
    points: dict[Bytes, Fraction] = Field(min_length=1)

    _ascending = field_validator("points")(lambda points: _ascending(points))


def _ascending(points: dict[float, float]) -> dict[float, float]:
    if list(points) != sorted(points):
        raise finding("the sizes of a curve must ascend", "sort the points by size")
    return points


class DeviceBody(Strict):
    """One accelerator, without its name."""

    about: str = Field("", description="one line on what it is")
    memory: MemoryFigure = Field(description="memory that a program can see, as its driver says, such as `79.15 GiB`")
    reserve: ReserveFigure | None = Field(
        None, description="memory that the runtime keeps for itself, context and kernels; 600 MiB when absent"
    )
    neighbour_buffers: ReserveFigure | None = Field(
        None, description="buffers of the collective library for each neighbour in a group; 220 MiB when absent"
    )
    memory_bandwidth: BandwidthFigure = Field(description="nominal, such as `2039 GB/s`")
    matrix: dict[MatrixType, ComputeFigure] = Field(
        min_length=1, description="dense peak of the matrix units by number format, such as `{bf16: 312 TFLOP/s}`"
    )
    vector: ComputeFigure = Field(description="peak of element-wise fp32 arithmetic, such as `19.5 TFLOP/s`")
    matrix_efficiency: FlopCurve | None = Field(None, description="achievable fraction of `matrix` by operation size")
    format_rates: dict[MatrixType, FractionFigure] = Field(
        default_factory=dict, description="part of `matrix_efficiency` that products of a number format reach"
    )
    memory_efficiency: ByteCurve | None = Field(None, description="achievable fraction of `memory_bandwidth` by size")
    launch: TimeFigure | None = Field(
        None, description="host time of one forward operation, whatever the software; the stack's when absent"
    )
    handover: TimeFigure | None = Field(
        None,
        description="host time of passing a micro-batch to another stage; none beside a `launch`, else the stack's",
    )
    price: PriceFigure | None = Field(None, description="a device and hour, such as `4.10 $/h`")

    @field_validator("reserve")
    @classmethod
    def _leaves_memory(cls, reserve: ReserveFigure | None, info: ValidationInfo) -> ReserveFigure | None:
        memory = info.data.get("memory")
        if reserve is not None and memory is not None and reserve.value >= memory.value:
            raise finding("the reserve leaves no memory", "it must be less than `memory`")
        return reserve


class DeviceFile(DeviceBody):
    """A file that describes one accelerator."""

    kind: ClassVar = "a device"
    device: str = Field(min_length=1, description="name of the device, such as `a100-sxm-80gb`")
    sources: dict[str, str] = Field(default_factory=dict, description="citations by short name")


class DeviceCount(Strict):
    """So many devices of one type, in the order of the ranks."""

    type: str = Field(description="name of a bundled device or of one under `device_types`")
    count: Count = Field(1, description="how many in a row")

    @field_validator("type")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("devices", ())
        if known and name not in known:
            raise finding(f"unknown device {name!r}", did_you_mean(name, known))
        return name


class MeasuredRow(Strict):
    """One measured collective: `seconds = latency + traffic / bandwidth`, traffic as a ring moves it per rank."""

    ranks: Annotated[int, Field(strict=True, ge=2)]
    latency: Seconds
    bandwidth: ByteRate = Field(description="bus bandwidth: 2 (n-1)/n of the payload over the time, for all-reduce")


class Measured(Cited):
    """Measured collectives that replace the model where the number of ranks is the same."""

    all_reduce: list[MeasuredRow] = Field(default_factory=list)
    reduce_scatter: list[MeasuredRow] = Field(default_factory=list)
    all_gather: list[MeasuredRow] = Field(default_factory=list)
    all_to_all: list[MeasuredRow] = Field(default_factory=list)
    broadcast: list[MeasuredRow] = Field(default_factory=list)

    def rows(self) -> list[tuple[Collective, MeasuredRow]]:
        """All rows with their collective."""
        kinds = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return [
            (kind, row) for kind in (*kinds, Collective.ALL_TO_ALL, Collective.BROADCAST) for row in getattr(self, kind)
        ]


class LinkFigures(Strict):
    """Figures of one tier's links in nodes of another device type; what is absent is as for all."""

    port: Port | None = Field(None, description="the links of one child into this tier")
    peer: PeerLink | None = Field(None, description="the wire between two single devices")
    latency: TimeFigure | None = Field(None, description="start-up time of one message")
    efficiency: FractionFigure | None = Field(None, description="achievable fraction of the bandwidths")


class LevelEntry(Strict):
    """One tier of links, joining `size` children of the tier below."""

    level: str = Field(min_length=1, description="name of the tier, such as `nvlink` or `infiniband`")
    size: Count | None = Field(None, description="children that it joins; absent on the outermost level of `network`")
    port: Port = Field(description="the links of one child into this tier, with value, direction and count")
    device_ports: Count | None = Field(
        None, description="ports that one device can drive; when absent the ports are dealt out, at least one each"
    )
    peer: PeerLink | None = Field(None, description="the wire between two single devices, in a mesh or torus")
    torus: Count | None = Field(
        None, description="dimensions of the torus as which the children are wired, such as 2 for TPU v3"
    )
    latency: TimeFigure = Field(description="start-up time of one message, such as `5 us`")
    efficiency: FractionFigure = Field(description="achievable fraction of the bandwidths, such as `80%`")
    measured: Measured | None = Field(None, description="measured collectives among devices of this level")
    nodes_of: dict[str, LinkFigures] = Field(
        default_factory=dict, description="figures that differ in nodes of a device type, by its name"
    )

    def of(self, device: str) -> LevelEntry:
        """The tier as nodes of a device type have it."""
        own = self.nodes_of.get(device)
        figures = {} if own is None else {k: v for k in type(own).model_fields if (v := getattr(own, k)) is not None}
        return self.model_copy(update=figures | ({"measured": None} if figures else {}))

    @field_validator("device_ports")
    @classmethod
    def _are_there(cls, ports: int | None, info: ValidationInfo) -> int | None:
        port = info.data.get("port")
        if ports is not None and port is not None and ports > port.count:
            raise finding(f"{ports} ports a device, but a child has only {port.count}", "raise `count` of the port")
        return ports


def _device_list(data: object) -> object:
    return [{"type": data, "count": 1}] if isinstance(data, str) else data


_DEVICES_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/DeviceCount"}},
    ]
}


class ClusterFile(Strict):
    """A file that describes a cluster."""

    kind: ClassVar = "a cluster"
    cluster: str = Field(min_length=1, description="name of the cluster, such as `dgx-a100`")
    about: str = Field("", description="one line on what it is")
    devices: Annotated[
        list[DeviceCount], BeforeValidator(_device_list), Field(min_length=1), WithJsonSchema(_DEVICES_SCHEMA)
    ] = Field(description="a device name, or a list of {type, count} in rank order, repeated until the cluster is full")
    device_types: dict[str, DeviceBody] = Field(default_factory=dict, description="devices of your own, by name")
    node: list[LevelEntry] = Field(default_factory=list, description="levels inside a node, innermost first")
    network: list[LevelEntry] = Field(default_factory=list, description="levels that join nodes, innermost first")
    nodes: Count = Field(1, description="nodes when the user gives no number")
    max_nodes: Count | None = Field(None, description="most nodes there can be")
    node_price: PriceFigure | None = Field(None, description="a node and hour, such as `32.77 $/h`")
    sources: dict[str, str] = Field(default_factory=dict, description="citations by short name")


class StackFile(Strict):
    """A file that describes the software that trains."""

    kind: ClassVar = "a stack"
    stack: str = Field(min_length=1, description="name of the stack, such as `megatron-2021`")
    about: str = Field("", description="one line on what it is")
    base: str | None = Field(None, description="a stack, by name or file, that has every figure which is absent here")
    launch: TimeFigure | None = Field(None, description="host time of one forward operation, such as `65 us`")
    backward_launch: PartFigure | None = Field(None, description="part of `launch` that an operation takes in backward")
    library_launch: TimeFigure | None = Field(None, description="host time of a kernel that a library launches itself")
    waits: FlagFigure | None = Field(None, description="whether the host waits for each kernel before it goes on")
    handover: TimeFigure | None = Field(None, description="host time of passing a micro-batch to another stage")
    stretch: FactorFigure | None = Field(None, description="factor on the time of all work, such as `103%`")
    matrix_rate: FactorFigure | None = Field(None, description="factor on the devices' matrix efficiency")
    memory_rate: FactorFigure | None = Field(None, description="factor on the devices' memory efficiency")
    link_rate: FactorFigure | None = Field(None, description="factor on the bandwidths of links")
    attention: AttentionRates | None = Field(
        None, description="what fused attention reaches of a plain product's rate, by pattern of device names"
    )
    causal_part: FractionFigure | None = Field(
        None, description="part of the score products that fused attention does under a causal mask"
    )
    unaligned_rate: FractionFigure | None = Field(
        None, description="what a product of activations reaches of its rate where rows are no multiple of 16 bytes"
    )
    fused: NamesFigure | None = Field(
        None, description="kernels that run several operators as one, such as `[gated_activation]`"
    )
    loss: PassesFigure | None = Field(None, description="times that the loss reads or writes the logits")
    accumulation_bytes: CountFigure | None = Field(
        None, description="bytes that adding a gradient to the sum over micro-batches moves, an element"
    )
    overlap: PartFigure | None = Field(None, description="part of a pass's work behind which exchanges hide")
    inner_overlap: AxisParts | None = Field(
        None, description="part of the communication among ranks that share operators which their work hides, by axis"
    )
    rows_once: FlagFigure | None = Field(
        None, description="whether a row crosses a link once for all experts behind it, not once for each"
    )
    gather_ports: CountFigure | None = Field(
        None, description="ports of a node that carry a gather among nodes, as a ring; 0 for all, by any algorithm"
    )
    allocator_cache: FactorFigure | None = Field(
        None, description="memory that the allocator reserves, over what is allocated at the peak"
    )
    compared: ComparedFigure | None = Field(
        None, description="measured over predicted times of one's own: runs, and the 80 % interval"
    )
    sources: dict[str, str] = Field(default_factory=dict, description="citations by short name")
