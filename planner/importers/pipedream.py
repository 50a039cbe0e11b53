"""PipeDream's profiles (`graph.txt`): layers measured on one GPU, with their times, sizes and dependencies.

A line for each node, then one for each edge, all ASCII:

    node4 -- ReLU(inplace) -- forward_compute_time=1.2, backward_compute_time=2.3, activation_size=64, parameter_size=0
    <TAB>node4 -- node5

Times are milliseconds for one minibatch, sizes are fp32 bytes; a size may be a list `[a; b]`, one for each result. The
measured figures travel with the graph as attributes of its nodes (`forward_s`, `backward_s`, the batch they hold for as
`measured_batch`, and `recorded_bytes`, the results' size as the file says it), so that `planner.costs.imported_profile`
prices exactly this graph.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import ModelError, Problem
from planner.files import LARGEST_FIGURE, is_figure
from planner.foreign_files import Door
from planner.graph import DType, Graph, ImportReport, Node, Note, NoteLevel, Parameter, Tensor, TensorKind
from planner.importers.formats import FORMATS, Findings, Format
from planner.sums import float_sum

_NODE = re.compile(r"node(\d{1,9})$", re.ASCII)
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")
_PICK = re.compile(r"__getitem__\((\d{1,9})\)", re.ASCII)
_HEAD = re.compile(rb"\s*node\d+ -- ")
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Line:
    """A node line of the file: description, milliseconds, bytes of each result, bytes of its weights."""

    number: int
    text: str
    forward_ms: float
    backward_ms: float
    result_bytes: tuple[float, ...]
    weight_bytes: float

    @property
    def op(self) -> str:
        return self.text.partition("(")[0].strip() or "Unknown"


def sniff(head: bytes) -> bool:
    """Whether a file starts like a PipeDream profile."""
    return _HEAD.match(head) is not None


def load(path: Path, dims: Mapping[str, int], as_written: bool) -> Graph:
    """Read a profile as a graph.

    Nodes that only feed data are dropped (their times are data loading), and so are results that nobody reads and that
    repeat their parent's. The size of a concatenation is that of all its operands, not what the file records.

    Args:
        path: the file.
        dims: `batch` says how many samples a minibatch held, which the file does not.

    Raises:
        ModelError: lines that cannot be read, all of them at once; an edge to a node that is not there, or backwards.
    """
    door = Door(str(path), ModelError, "give the graph.txt that PipeDream's profiler wrote")
    content = door.content(path)
    nodes, reads = _read(door.text(content), path)
    builder = _Builder(nodes, reads, dims.get("batch", 1))
    return builder.build(path, hashlib.sha256(content).hexdigest(), "batch" in dims)


def _read(text: str, path: Path) -> tuple[Mapping[int, _Line], Mapping[int, tuple[int, ...]]]:
    """The lines of nodes by number, and by number the nodes that each reads."""
    nodes: dict[int, _Line] = {}
    edges: dict[int, list[int]] = {}
    findings = Findings(str(path))
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.strip().split(" -- ")
        where = f"{path}:{number}:1"
        try:
            ends = [_number(part) for part in (parts[0], parts[-1])] if line[0].isspace() else []
            if ends:
                edges.setdefault(ends[1], []).append(ends[0])
            else:
                line_of_node = _node_line(parts)
                nodes[line_of_node.number] = line_of_node
        except ValueError as error:
            findings.problems.append(
                Problem(str(error), where, "expected a node line or an edge of a PipeDream profile", line)
            )
    for target, sources in edges.items():
        for source in sources:
            if source not in nodes or target not in nodes:
                findings.wrong("", f"edge node{source} -- node{target} names a node that is not there")
            elif source >= target:
                findings.wrong("", f"edge node{source} -- node{target} goes backwards")
    if not nodes and not findings.problems:
        findings.wrong("", "no node in the file")
    findings.stop()
    return nodes, {k: tuple(dict.fromkeys(v)) for k, v in edges.items()}


def _number(text: str) -> int:
    match = _NODE.match(text.strip())
    if not match:
        raise ValueError(f"{text.strip()[:40]!r} is not a node")
    return int(match.group(1))


def _node_line(parts: list[str]) -> _Line:
    if len(parts) < 3:
        raise ValueError("a node line has three parts: name, description, figures")
    fields = dict(_FIELD.findall(parts[2]))
    missing = [name for name in _FIGURES if name not in fields]
    if missing:
        raise ValueError(f"{parts[0]} lacks {', '.join(missing)}")
    sizes = tuple(float(s) for s in re.findall(r"[-+.\deE]+", fields["activation_size"]))
    times = [float(fields[f]) for f in ("forward_compute_time", "backward_compute_time", "parameter_size")]
    if not all(is_figure(figure) for figure in (*times, *sizes)):
        raise ValueError(f"{parts[0]} has a figure that is negative, not finite or above {LARGEST_FIGURE:g}")
    return _Line(_number(parts[0]), parts[1], times[0], times[1], sizes, times[2])


class _Builder:
    """Turns lines into nodes and tensors; one use."""

    def __init__(self, nodes: Mapping[int, _Line], reads: Mapping[int, tuple[int, ...]], batch: int) -> None:
        self.nodes, self.reads = nodes, reads
        self.batch = batch
        self.tensors: dict[str, Tensor] = {}
        self.notes: list[Note] = []
        read = {source for sources in reads.values() for source in sources}
        order = sorted(nodes)
        self.sources = {n for n in order if n not in reads and nodes[n].op.startswith("Input")}
        self.dead = {n for n in order if n not in read and nodes[n].op == "__getitem__"}

    def build(self, path: Path, fingerprint: str, batch_given: bool) -> Graph:
        """The graph."""
        for number in sorted(self.sources):
            self._add_tensor(f"node{number}", float_sum(self.nodes[number].result_bytes), TensorKind.INPUT)
        kept = [n for n in sorted(self.nodes) if n not in self.sources and n not in self.dead]
        nodes, parameters = [], []
        for number in kept:
            line = self.nodes[number]
            node = self._node(line)
            if line.weight_bytes:
                weight = Parameter(
                    f"node{number}.weight", f"node{number}.weight", (round(line.weight_bytes / _FP32_BYTES),),
                    DType.FLOAT32, node.module,
                )  # fmt: skip
                parameters.append(weight)
                self.tensors[weight.name] = Tensor(weight.name, weight.shape, weight.dtype, TensorKind.PARAMETER)
            nodes.append(node)
        self._note_measurement(batch_given)
        read = {name for node in nodes for name in node.inputs}
        return Graph(
            name=path.name.removesuffix(".txt").removesuffix(".graph"),
            fingerprint=fingerprint,
            nodes=tuple(nodes),
            tensors=self.tensors,
            inputs=tuple(f"node{n}" for n in sorted(self.sources) if f"node{n}" in read),
            outputs=tuple(name for node in nodes for name in node.outputs[:1] if name not in read),
            parameters=tuple(parameters),
            sources={p.name: (p.name,) for p in parameters},
            batch=self.batch,
            report=ImportReport("pipedream", len(self.nodes), len(self.sources), 0, len(self.dead), tuple(self.notes)),
        )

    def _node(self, line: _Line) -> Node:
        name = f"node{line.number}"
        reads = [self._result_of(source, line) for source in self.reads.get(line.number, ())]
        sizes = self._sizes(line, reads)
        outputs = [name if i == 0 else f"{name}:{i}" for i in range(len(sizes))]
        for output, size in zip(outputs, sizes, strict=True):
            self._add_tensor(output, size, TensorKind.ACTIVATION)
        weights = [f"{name}.weight"] if line.weight_bytes else []
        return Node(
            key=name,
            op=f"pipedream.{line.op}",
            inputs=(*reads, *weights),
            outputs=tuple(outputs),
            attributes={
                "text": line.text,
                "forward_s": line.forward_ms / 1e3,
                "backward_s": line.backward_ms / 1e3,
                "recorded_bytes": float_sum(line.result_bytes),
                "measured_batch": self.batch,
                "view": int(line.op in ("__getitem__", "View", "Size") or "inplace" in line.text),
            },
            module=name,
            name=name,
        )

    def _result_of(self, source: int, reader: _Line) -> str:
        """The result that a reader takes: `__getitem__(k)` of a layer with several results takes the k-th."""
        picked = _PICK.match(reader.text)
        index = int(picked.group(1)) if picked else 0
        parts = self.nodes[source].result_bytes
        several = source not in self.sources and 0 < index < len(parts)
        return f"node{source}:{index}" if several else f"node{source}"

    def _sizes(self, line: _Line, reads: list[str]) -> tuple[float, ...]:
        if line.op != "Concat":
            return line.result_bytes or (0.0,)
        operand_bytes = float(sum(self.tensors[name].byte_count for name in reads))
        recorded = float_sum(line.result_bytes)
        if abs(operand_bytes - recorded) > 0.5:
            message = f"{line.text} records {recorded:.0f} bytes; its operands have {operand_bytes:.0f}, which is used"
            self.notes.append(Note(NoteLevel.INFO, "concat-size", message, f"node{line.number}"))
        return (operand_bytes,)

    def _add_tensor(self, name: str, size: float, kind: TensorKind) -> None:
        elements = round(size / _FP32_BYTES)
        per_sample, remainder = divmod(elements, self.batch)
        shape = (self.batch, per_sample) if remainder == 0 else (elements,)
        self.tensors[name] = Tensor(name, shape, DType.FLOAT32, kind)

    def _note_measurement(self, batch_given: bool) -> None:
        loading = float_sum(self.nodes[n].forward_ms for n in self.sources)
        if loading:
            message = f"{loading:.1f} ms of data loading on input nodes are left out"
            self.notes.append(Note(NoteLevel.INFO, "data-loading", message))
        if not batch_given:
            message = (
                "the file does not say how many samples a minibatch holds: counted as one; say it by --dim batch=N"
            )
            self.notes.append(Note(NoteLevel.WARNING, "batch-unknown", message))
        # An embedding that is far slower backward than forward carries the time of the layer after it.
        slow = [n for n, x in self.nodes.items() if x.op == "Embedding" and x.backward_ms > 10 * x.forward_ms]
        if slow:
            message = (
                "some backward times sit on a neighbour of the layer they belong to (an embedding far slower backward "
                "than forward); sums over stages of several layers are sound, single layers are not"
            )
            self.notes.append(Note(NoteLevel.WARNING, "backward-misplaced", message, f"node{slow[0]}"))


FORMATS.register("pipedream", Format("PipeDream profile", (".txt",), sniff, load))
