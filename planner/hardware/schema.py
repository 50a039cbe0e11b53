"""The profile files as strict models: what may stand in them, in which units, with which defaults.

Only the loader imports this module (pydantic takes its time); the rest of the program sees `planner.hardware.types`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from planner.errors import UsageError
from planner.hardware.types import Collective
from planner.registry import did_you_mean
from planner.units import EXAMPLES, UNITS, Dimension, parse, render


def finding(message: str, hint: str = "") -> PydanticCustomError:
    """A validation error with a message of our own and what to do about it."""
    return PydanticCustomError("finding", "{message}", {"message": message, "hint": hint})


@dataclass(frozen=True)
class Quantity:
    """A number that files write with a unit, or without one where the dimension has none.

    Attributes:
        dimension: what it measures.
        least: 0 where it may be nothing, 1 where it must be positive.
        most: largest value.
    """

    dimension: Dimension
    least: int = 1
    most: float = math.inf

    def read(self, text: object) -> float:
        """The value in SI units.

        Raises:
            PydanticCustomError: no value, another dimension, or out of range.
        """
        if text is None:
            raise finding("no value is given", f"write {self.dimension}, with {EXAMPLES[self.dimension]}")
        try:
            value = parse(text, self.dimension)
        except UsageError as error:
            raise finding(error.problem.message, error.problem.hint) from error
        if value < 0 or (value == 0 and self.least > 0):
            raise finding(f"{text} is {'negative' if value < 0 else 'zero'}", "write a positive quantity")
        if value > self.most:
            raise finding(f"{text} is more than 1", "a fraction lies between 0 and 1, or 0% and 100%")
        return value

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(lambda value: render(value, self.dimension))
        return core_schema.no_info_before_validator_function(self.read, handler(source), serialization=written)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        units = "|".join(u.replace("$", r"\$") for u in UNITS[self.dimension] if u)
        bare = "" in UNITS[self.dimension]
        number = r"\+?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
        pattern = rf"^\s*{number}\s*({units}){'?' if bare else ''}\s*$"
        text = {"type": "string", "pattern": pattern, "description": f"with {EXAMPLES[self.dimension]}"}
        return {"anyOf": [{"type": "number", "minimum": 0}, text]} if bare else text


@dataclass(frozen=True)
class Proportion:
    """A ratio of at least 1, written `2:1` or as a bare number."""

    def read(self, text: object) -> float:
        """The ratio as a number.

        Raises:
            PydanticCustomError: the text is no ratio, or it is below 1.
        """
        match = re.fullmatch(rf"\s*{_RATIO}\s*", str(text))
        if match is None or isinstance(text, bool) or float(match[2] or 1) == 0:
            raise finding(f"{text!r} is no ratio", "write 2:1, or 2")
        value = float(match[1]) / float(match[2] or 1)
        if not 1 <= value < math.inf:
            raise finding(f"the ratio {text} is below 1", "2:1 halves the bandwidth, 1:1 leaves it whole")
        return value

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(lambda value: f"{value:.6g}:1")
        return core_schema.no_info_before_validator_function(self.read, handler(source), serialization=written)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        text = {"type": "string", "pattern": rf"^\s*{_RATIO}\s*$", "description": "such as 2:1"}
        return {"anyOf": [{"type": "number", "minimum": 1}, text]}


_RATIO = r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(?:\s*:\s*([0-9]{1,6}(?:\.[0-9]{1,6})?))?"
"""A ratio as it is written: two numbers around a colon, or one."""

Bytes = Annotated[float, Quantity(Dimension.BYTES)]
Reserve = Annotated[float, Quantity(Dimension.BYTES, 0)]
ByteRate = Annotated[float, Quantity(Dimension.BYTE_RATE)]
FlopRate = Annotated[float, Quantity(Dimension.FLOP_RATE)]
Flops = Annotated[float, Quantity(Dimension.FLOPS)]
Seconds = Annotated[float, Quantity(Dimension.SECONDS, 0)]
Fraction = Annotated[float, Quantity(Dimension.FRACTION, 1, 1.0)]
Part = Annotated[float, Quantity(Dimension.FRACTION, 0, 1.0)]
Factor = Annotated[float, Quantity(Dimension.FRACTION, 1, 10.0)]
Price = Annotated[float, Quantity(Dimension.PRICE, 0)]
Ratio = Annotated[float, Proportion()]
Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Flag = StrictBool
Names = tuple[str, ...]
Passes = tuple[NonNegativeFloat, NonNegativeFloat]
Compared = tuple[Count, PositiveFloat, PositiveFloat]
Factors = Annotated[dict[str, Factor], Field(min_length=1)]
Parts = Annotated[dict[str, Part], Field(min_length=1)]
MatrixType = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4", "mxfp4", "nvfp4", "int8", "int16"]
Direction = Literal["per-direction", "bidirectional"]
T = TypeVar("T")

_SILENT = (("verified", True), ("count", 1))
"""Values that go without saying."""


class Strict(BaseModel):
    """A mapping in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """In the notation of the files: without what is absent or says nothing, and where figures come from last."""
        fields = handler(self)
        written = {k: v for k, v in fields.items() if v not in (None, "", [], {}) and (k, v) not in _SILENT}
        return dict(sorted(written.items(), key=lambda entry: entry[0] in Cited.model_fields))


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

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """`Figure_Bytes`, after the name of the type here; the JSON Schema calls it so."""
        return f"{cls.__name__}_{next((name for name, kind in globals().items() if kind == params[0]), 'T')}"


class Stated(Cited, Generic[T]):
    """A value and where it comes from, as `{value: [gated_activation], source: vendor}`."""

    value: T


class Figure(Stated[T]):
    """One quantity, written as `80 GB` or as `{value: 80 GB, source: vendor}`."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: object) -> object:
        return data if isinstance(data, dict) else {"value": data}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler.resolve_ref_schema(handler(core))
        return {"title": cls.__name__, "anyOf": [whole["properties"]["value"], whole], "description": Figure.__doc__}


class PeerLink(Stated[ByteRate], use_attribute_docstrings=True):
    """The wire between two single devices; its direction must be said."""

    direction: Direction
    """is the figure `per-direction`, or `bidirectional` (both summed)?"""

    @property
    def byte_per_s(self) -> float:
        """One direction."""
        return self.value / (2 if self.direction == "bidirectional" else 1)


class Port(PeerLink, use_attribute_docstrings=True):
    """What joins one child (a device, a node, ...) to a level: `count` equal ports."""

    count: Count = 1
    """equal ports a child has, such as 8 network cards a node"""


class SizeCurve(Cited, Generic[T]):
    """Achievable fraction by size of one operation: by FLOPs as `{1 GFLOP: 45%, 128 GFLOP: 75%}`, or by bytes."""

    points: dict[T, Fraction] = Field(min_length=1)

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: dict[float, float]) -> dict[float, float]:
        if list(points) != sorted(points):
            raise finding("the sizes of a curve must ascend", "sort the points by size")
        return points


class DeviceBody(Strict, use_attribute_docstrings=True):
    """One accelerator, without its name."""

    about: str = ""
    """one line on what it is"""
    memory: Figure[Bytes]
    """memory that a program can see, as its driver says, such as `79.15 GiB`"""
    reserve: Figure[Reserve] | None = None
    """memory that the runtime keeps for itself, context and kernels; 600 MiB when absent"""
    neighbour_buffers: Figure[Reserve] | None = None
    """buffers of the collective library for each neighbour in a group; 220 MiB when absent"""
    memory_bandwidth: Figure[ByteRate]
    """nominal, such as `2039 GB/s`"""
    matrix: dict[MatrixType, Figure[FlopRate]] = Field(min_length=1)
    """dense peak of the matrix units by number format, such as `{bf16: 312 TFLOP/s}`"""
    vector: Figure[FlopRate]
    """peak of element-wise fp32 arithmetic, such as `19.5 TFLOP/s`"""
    matrix_efficiency: SizeCurve[Flops] | None = None
    """achievable fraction of `matrix` by operation size"""
    format_rates: dict[MatrixType, Figure[Fraction]] = Field(default_factory=dict)
    """part of `matrix_efficiency` that products of a number format reach"""
    memory_efficiency: SizeCurve[Bytes] | None = None
    """achievable fraction of `memory_bandwidth` by size"""
    launch: Figure[Seconds] | None = None
    """host time of one forward operation, whatever the software; the stack's when absent"""
    handover: Figure[Seconds] | None = None
    """host time of passing a micro-batch to another stage; none beside a `launch`, else the stack's"""
    host_link: PeerLink | None = None
    """what copies between the device and its host's memory reach; 24 GB/s each way when absent"""
    matrix_unit: Figure[Count] | None = None
    """rows and columns of the matrix units' array, to multiples of which products are padded; 1 when absent"""
    peer_links: Port | None = None
    """links to other devices or to their switch (NVLink, xGMI): one of them, and `count` of them; none when absent"""
    price: Figure[Price] | None = None
    """a device and hour, such as `4.10 $/h`"""

    @field_validator("reserve")
    @classmethod
    def _leaves_memory(cls, reserve: Figure[Reserve] | None, info: ValidationInfo) -> Figure[Reserve] | None:
        memory = info.data.get("memory")
        if reserve is not None and memory is not None and reserve.value >= memory.value:
            raise finding("the reserve leaves no memory", "it must be less than `memory`")
        return reserve


class DeviceFile(DeviceBody):
    """A file that describes one accelerator."""

    kind: ClassVar = "a device"
    device: str = Field(min_length=1)
    """name of the device, such as `a100-sxm-80gb`"""
    sources: dict[str, str] = Field(default_factory=dict)
    """citations by short name"""


class DeviceCount(Strict, use_attribute_docstrings=True):
    """So many devices of one type, in the order of the ranks."""

    type: str
    """name of a bundled device or of one under `device_types`"""
    count: Count = 1
    """how many in a row"""
    links: str = ""
    """name of their links, where devices of one type differ in them; `nodes_of` has the figures by that name"""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("devices", ())
        if known and name not in known:
            raise finding(f"unknown device {name!r}", did_you_mean(name, known))
        return name


class MeasuredRow(Strict, use_attribute_docstrings=True):
    """One measured collective: `seconds = latency + traffic / bandwidth`, traffic as a ring moves it per rank."""

    ranks: Annotated[int, Field(strict=True, ge=2)]
    latency: Seconds
    bandwidth: ByteRate
    """bus bandwidth: 2 (n-1)/n of the payload over the time, for all-reduce"""


class Measured(Cited):
    """Measured collectives that replace the model where the number of ranks is the same."""

    all_reduce: list[MeasuredRow] = Field(default_factory=list)
    reduce_scatter: list[MeasuredRow] = Field(default_factory=list)
    all_gather: list[MeasuredRow] = Field(default_factory=list)
    all_to_all: list[MeasuredRow] = Field(default_factory=list)
    broadcast: list[MeasuredRow] = Field(default_factory=list)

    def rows(self) -> list[tuple[Collective, MeasuredRow]]:
        """All rows with their collective."""
        return [(kind, row) for kind in Collective for row in getattr(self, kind, ())]


class LinkFigures(Strict, use_attribute_docstrings=True):
    """Figures of one tier's links in nodes of another device type; what is absent is as for all."""

    port: Port | None = None
    """the links of one child into this tier"""
    peer: PeerLink | None = None
    """the wire between two single devices"""
    latency: Figure[Seconds] | None = None
    """start-up time of one message"""
    efficiency: Figure[Fraction] | None = None
    """achievable fraction of the bandwidths"""


class LevelEntry(Strict, use_attribute_docstrings=True):
    """One tier of links, joining `size` children of the tier below."""

    level: str = Field(min_length=1)
    """name of the tier, such as `nvlink` or `infiniband`"""
    size: Count | None = None
    """children that it joins; absent on the outermost level of `network`"""
    port: Port
    """the links of one child into this tier, with value, direction and count"""
    device_ports: Count | None = None
    """ports that one device can drive; when absent the ports are dealt out, at least one each"""
    peer: PeerLink | None = None
    """the wire between two single devices, in a mesh or torus"""
    torus: Count | None = None
    """dimensions of the torus as which the children are wired, such as 2 for TPU v3"""
    oversubscription: Figure[Ratio] | None = None
    """what the children can send at once over what the tier carries, such as `2:1`; 1:1 when absent"""
    latency: Figure[Seconds]
    """start-up time of one message, such as `5 us`"""
    efficiency: Figure[Fraction]
    """achievable fraction of the bandwidths, such as `80%`"""
    measured: Measured | None = None
    """measured collectives among devices of this level"""
    nodes_of: dict[str, LinkFigures] = Field(default_factory=dict)
    """figures that differ in nodes of a device type, by its name, or of devices with `links` of that name"""

    def of(self, part: DeviceCount) -> LevelEntry:
        """The tier as devices of a type, with links of a name, have it."""
        special = self.nodes_of.get(part.links) or self.nodes_of.get(part.type)
        figures = {k: v for k in LinkFigures.model_fields if (v := getattr(special, k, None)) is not None}
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


class ClusterFile(Strict, use_attribute_docstrings=True):
    """A file that describes a cluster."""

    kind: ClassVar = "a cluster"
    cluster: str = Field(min_length=1)
    """name of the cluster, such as `dgx-a100`"""
    about: str = ""
    """one line on what it is"""
    devices: Annotated[
        list[DeviceCount], BeforeValidator(_device_list), Field(min_length=1), WithJsonSchema(_DEVICES_SCHEMA)
    ]
    """a device name, or a list of {type, count} in rank order, repeated until the cluster is full"""
    device_types: dict[str, DeviceBody] = Field(default_factory=dict)
    """devices of your own, by name"""
    order: list[Whole] = Field(default_factory=list)
    """numbers of a node's devices, as its driver counts them, in the order of the ranks; 0, 1, 2, .. when absent"""
    node: list[LevelEntry] = Field(default_factory=list)
    """levels inside a node, innermost first"""
    network: list[LevelEntry] = Field(default_factory=list)
    """levels that join nodes, innermost first"""
    nodes: Count = 1
    """nodes when the user gives no number"""
    max_nodes: Count | None = None
    """most nodes there can be"""
    host_memory: Figure[Bytes] | None = None
    """memory of a node's host that training may fill, such as `1.5 TB`; no limit when absent"""
    node_price: Figure[Price] | None = None
    """a node and hour, such as `32.77 $/h`"""
    sources: dict[str, str] = Field(default_factory=dict)
    """citations by short name"""

    def levels(self) -> list[tuple[tuple[str, int], LevelEntry]]:
        """All tiers of links with their places in the file, innermost first."""
        tiers = {"node": self.node, "network": self.network}
        return [((key, i), entry) for key, entries in tiers.items() for i, entry in enumerate(entries)]

    @property
    def node_size(self) -> int:
        """Devices of a node."""
        return math.prod(entry.size or 1 for entry in self.node)


class StackFile(Strict, use_attribute_docstrings=True):
    """A file that describes the software that trains."""

    kind: ClassVar = "a stack"
    stack: str = Field(min_length=1)
    """name of the stack, such as `megatron-2021`"""
    about: str = ""
    """one line on what it is"""
    base: str | None = None
    """a bundled stack, or a file in this one's folder, that has every figure which is absent here"""
    launch: Figure[Seconds] | None = None
    """host time of one forward operation, such as `65 us`"""
    backward_launch: Figure[Part] | None = None
    """part of `launch` that an operation takes in backward"""
    library_launch: Figure[Seconds] | None = None
    """host time of a kernel that a library launches itself"""
    waits: Stated[Flag] | None = None
    """whether the host waits for each kernel before it goes on"""
    handover: Figure[Seconds] | None = None
    """host time of passing a micro-batch to another stage"""
    stretch: Figure[Factor] | None = None
    """factor on the time of all work, such as `103%`"""
    matrix_rate: Figure[Factor] | None = None
    """factor on the devices' matrix efficiency"""
    memory_rate: Figure[Factor] | None = None
    """factor on the devices' memory efficiency"""
    link_rate: Figure[Factor] | None = None
    """factor on the bandwidths of links"""
    attention: Stated[Factors] | None = None
    """what fused attention reaches of a plain product's rate, by pattern of device names"""
    causal_part: Figure[Fraction] | None = None
    """part of the score products that fused attention does under a causal mask"""
    attention_block: Stated[Count] | None = None
    """queries and keys of a block of fused attention, worked out whole where a mask hides a part of it"""
    unaligned_rate: Figure[Fraction] | None = None
    """what a product of activations reaches of its rate where rows are no multiple of 16 bytes"""
    fused: Stated[Names] | None = None
    """kernels that run several operators as one, such as `[gated_activation]`"""
    loss: Stated[Passes] | None = None
    """times that the loss reads or writes the logits"""
    accumulation_bytes: Stated[Whole] | None = None
    """bytes that adding a gradient to the sum over micro-batches moves, an element"""
    overlap: Figure[Part] | None = None
    """part of a pass's work behind which exchanges hide"""
    inner_overlap: Stated[Parts] | None = None
    """part of the communication among ranks that share operators which their work hides, by axis"""
    product_pieces: Stated[Count] | None = None
    """products that one is run as where ranks share it, beside the communication of the others"""
    rows_once: Stated[Flag] | None = None
    """whether a row crosses a link once for all experts behind it, not once for each"""
    grouped_experts: Stated[Flag] | None = None
    """whether one kernel does the products of all experts, not one for each"""
    gather_ports: Stated[Whole] | None = None
    """ports of a node that carry a gather among nodes, as a ring; 0 for all, by any algorithm"""
    allocator_cache: Figure[Factor] | None = None
    """memory that the allocator reserves, over what is allocated at the peak"""
    compared: Stated[Compared] | None = None
    """measured over predicted times of one's own: runs, and the 80 % interval"""
    sources: dict[str, str] = Field(default_factory=dict)
    """citations by short name"""
