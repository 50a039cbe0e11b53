"""Measured prices: every distinct operator call is run alone on this machine.

A call becomes a model of one node with random operands of the true shapes; the median of several warm runs is its
price. Who runs it is a `Runner`: onnxruntime on the CPU in fp32, or torch on any of its devices
(`planner.runtime.TorchRunner`), which runs backward passes, too; where none was run, it takes as much longer than the
forward pass as it has more work. Results are cached as JSON, keyed by what the call's cost depends on, the runner and
the machine. Calls that need more memory than allowed, or that cannot be run, are scaled from the nearest call that was
measured, with a note.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from planner.costs.one_node import call_bytes, one_node_model
from planner.costs.precision import precision as precision_named
from planner.costs.rates import scores_done
from planner.costs.types import Profile
from planner.costs.work import tensor_bytes
from planner.errors import ModelError, OutputError, UsageError
from planner.files import write_whole
from planner.foreign_files import Door
from planner.graph import Graph, Note, NoteLevel
from planner.hardware import machine_name
from planner.hardware.types import Stack
from planner.operators.batching import rebatch
from planner.operators.entry import OpCall
from planner.operators.saved import SavedOptions, element_bytes, saved_for_backward, saved_notes
from planner.operators.specs import graph_specs
from planner.operators.types import OpSpec, Origin
from planner.sums import float_sum

CACHE_VERSION = 2
DEFAULT_MEMORY_CAP_BYTES = 1 << 30
_WARM_RUNS = 1
_RUNS = 5
_ENOUGH_S = 0.25
_NAN = float("nan")
Progress = Callable[[int, int, str], None]
"""Called with calls done, calls in all, and the operator at hand."""


Seconds = tuple[float, float]
"""Seconds of a call's forward and backward pass; nan for a backward pass that was not run."""


class Runner(Protocol):
    """Runs operator calls on a device of this machine.

    Attributes:
        software: name and version of the library.
        machine: name of the device.
        precision: number format of the operands, by name.
    """

    software: str
    machine: str
    precision: str

    def seconds(self, model: bytes, feeds: Mapping[str, np.ndarray]) -> Seconds:
        """Median seconds of the passes of a model of one node with these operands.

        Raises:
            Exception: it cannot be run; the first line of the message says why.
        """
        ...


Timing = Seconds | str
"""Seconds of one distinct call, or why it was not run."""


class OnnxRuntime:
    """Runs calls by onnxruntime on this machine's CPU, in fp32, forward alone."""

    precision = "fp32"

    def __init__(self) -> None:
        """Import onnxruntime.

        Raises:
            UsageError: it is not installed.
        """
        try:
            import onnxruntime
        except ImportError:
            raise UsageError(
                "measuring needs onnxruntime, which is not installed",
                hint="pip install onnxruntime (shardplan[measure])",
            ) from None
        onnxruntime.set_default_logger_severity(4)
        self._engine: Any = onnxruntime
        self.software = f"onnxruntime {onnxruntime.__version__}"
        self.machine = machine_name()

    def seconds(self, model: bytes, feeds: Mapping[str, np.ndarray]) -> Seconds:
        """As `Runner` says."""
        options = self._engine.SessionOptions()
        options.log_severity_level = 4
        session = self._engine.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return median_s(lambda: session.run(None, feeds)), _NAN


def median_s(run: Callable[[], object]) -> float:
    """Median seconds of some runs after a warm one: at least three, until a quarter of a second is spent."""
    for _ in range(_WARM_RUNS):
        run()
    runs: list[float] = []
    while len(runs) < _RUNS and (not runs or float_sum(runs) < _ENOUGH_S or len(runs) < 3):
        start = time.perf_counter()
        run()
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def default_cache_folder() -> Path:
    """Where measurements are kept: `shardplan` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardplan"


def measure(
    graph: Graph,
    *,
    runner: Runner | None = None,
    micro_batch: int | None = None,
    cache_folder: Path | None = None,
    memory_cap_bytes: int = DEFAULT_MEMORY_CAP_BYTES,
    fused_attention: bool = True,
    dropout: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Price every node by running its operator on this machine.

    Args:
        graph: the graph.
        runner: what runs the operators; onnxruntime on the CPU when None.
        micro_batch: samples per execution; by default the batch that the graph's shapes are for.
        cache_folder: where measurements are kept; `default_cache_folder()` when None.
        memory_cap_bytes: calls whose operands and results together need more are not run but scaled.
        fused_attention: as in `profile`, for the kept bytes; operators are run as the file has them.
        dropout: as in `profile`.
        progress: told before each distinct call.

    Raises:
        UsageError: onnxruntime is not installed.
        OutputError: the cache cannot be written.
        ModelError: a node stops the change of batch, or no operator could be run at all.
    """
    runner = runner or OnnxRuntime()
    sized = graph if micro_batch is None else rebatch(graph, micro_batch)
    specs = graph_specs(sized)
    store = _Store((cache_folder or default_cache_folder()), runner)
    calls = [OpCall.of(sized, node) for node in sized.nodes]
    keys = ["" if _is_free(s) else _key(c) for c, s in zip(calls, specs, strict=True)]
    distinct = {key: i for i, key in reversed(list(enumerate(keys))) if key}
    timings: dict[str, Timing] = {}
    for done, (key, i) in enumerate(sorted(distinct.items(), key=lambda kv: kv[1])):
        if progress:
            progress(done, len(distinct), calls[i].op)
        known = store.get(key)
        timings[key] = timing = known if known is not None else _run_call(runner, calls[i], memory_cap_bytes)
        store.put(key, None if isinstance(timing, str) else timing)
    store.write()
    seconds, notes = _node_seconds(sized, specs, keys, timings)
    where = runner.machine, runner.precision
    return _assemble(sized, specs, seconds, where, notes, fused_attention=fused_attention, dropout=dropout)


def passes_profile(
    graph: Graph,
    seconds: Mapping[str, Seconds],
    *,
    machine: str,
    rank: tuple[float, float, float | None] | None = None,
    fused_attention: bool = True,
    dropout: bool = True,
) -> Profile:
    """Prices from times within whole passes in fp32 (`planner.runtime.measure_passes`).

    Args:
        graph: the graph at the micro-batch that was measured.
        seconds: forward and backward by name of the results, in the order in which they were made. What is counted with
            results that the graph does not have (folded, or inside a pattern) goes to the next node, the end to the
            last. Nodes that make equal calls, with gradients of the same operands, get their
            mean.
        machine: where it was measured.
        rank: seconds that a rank takes for a whole forward, a whole backward, and the part of a split backward that
            gradients of weights take (None: as their FLOPs), without anything that observes its operators, which makes
            them longer: times of operators are scaled to these. By default they stay as they are.
        fused_attention, dropout: as in `profile`, for the kept bytes.

    Raises:
        ModelError: no result of the graph was measured.
    """
    makers = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs if name}
    by_node, waiting, last = np.zeros((len(graph.nodes), 2)), np.zeros(2), -1
    for name, times in seconds.items():
        waiting += times
        if name in makers:
            last = makers[name]
            by_node[last] += waiting
            waiting[:] = 0.0
    if last < 0:
        raise ModelError("none of the model's operators was measured", hint="measure the file that the graph is of")
    specs = graph_specs(graph)
    alike: dict[tuple[str, float], list[int]] = {}
    for i, (node, spec) in enumerate(zip(graph.nodes, specs, strict=True)):
        alike.setdefault((_key(OpCall.of(graph, node)), spec.input_grad_matrix_flops), []).append(i)
    for nodes in alike.values():
        by_node[nodes] = by_node[nodes].mean(axis=0)
    by_node[last] += waiting
    if rank is not None:
        by_node *= np.array(rank[:2]) / np.maximum(by_node.sum(axis=0), 1e-30)
    found = _assemble(graph, specs, by_node, (machine, "fp32"), (), fused_attention=fused_attention, dropout=dropout)
    if rank is None or rank[2] is None or not found.weight_grad_s.any():
        return found
    scaled_s = found.weight_grad_s * rank[2] / found.weight_grad_s.sum()
    return replace(found, weight_grad_s=np.minimum(scaled_s, found.backward_s))


def _is_free(spec: OpSpec) -> bool:
    return spec.view or spec.origin is Origin.PLUMBING or spec.kernels == 0


def _key(call: OpCall) -> str:
    return hashlib.sha256(repr((call.opset, call.signature())).encode()).hexdigest()[:32]


# --- running one call --------------------------------------------------------------------------------------------


def _run_call(runner: Runner, call: OpCall, memory_cap_bytes: int) -> Timing:
    needed = call_bytes(call)
    if needed > memory_cap_bytes:
        return f"needs {needed / 2**30:.1f} GiB, more than the {memory_cap_bytes / 2**30:.1f} GiB allowed"
    try:
        return runner.seconds(*one_node_model(call))
    except Exception as error:  # libraries raise classes of their own, one a cause, not all public
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        return f"{runner.software.partition(' ')[0]} cannot run it: {reason}"


# --- cache -------------------------------------------------------------------------------------------------------


class _Store:
    """Seconds that one runner measured on one machine, in one JSON file."""

    def __init__(self, folder: Path, runner: Runner) -> None:
        self.head = {
            "version": CACHE_VERSION, "machine": runner.machine, "software": runner.software,
            "precision": runner.precision,
        }  # fmt: skip
        tag = hashlib.sha256("|".join(map(str, self.head.values())).encode()).hexdigest()[:12]
        self.path = folder / f"measured-{tag}.json"
        self.seconds: dict[str, Seconds] = self._read()
        self.changed = False

    def _read(self) -> dict[str, Seconds]:
        """What the file keeps; nothing where it is missing or damaged: it is measured again, and written anew."""
        door = Door(str(self.path), UsageError, "remove it")
        try:
            content = door.json(door.content(self.path))
        except UsageError:
            return {}
        if not isinstance(content, dict) or any(content.get(k) != v for k, v in self.head.items()):
            return {}
        stored = content.get("seconds")
        pairs = stored.items() if isinstance(stored, dict) else ()
        known = ((key, value if isinstance(value, list) else []) for key, value in pairs)
        times = {key: v for key, v in known if len(v) == 2 and _is_time(v[0]) and (v[1] is None or _is_time(v[1]))}
        return {key: (forward, _NAN if backward is None else backward) for key, (forward, backward) in times.items()}

    def get(self, key: str) -> Seconds | None:
        return self.seconds.get(key)

    def put(self, key: str, seconds: Seconds | None) -> None:
        if seconds is not None and self.seconds.get(key) != seconds:
            self.seconds[key] = seconds
            self.changed = True

    def write(self) -> None:
        if not self.changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot keep measurements: {reason}", where=str(self.path.parent)) from None
        stored = {key: [f, None if math.isnan(b) else b] for key, (f, b) in sorted(self.seconds.items())}
        text = json.dumps({**self.head, "seconds": stored}, indent=1)
        write_whole(self.path, text + "\n")


# --- prices ------------------------------------------------------------------------------------------------------


def _work(spec: OpSpec) -> float:
    """One number to scale by: matrix work where there is any, else traffic."""
    return spec.matrix_flops or spec.forward.byte_count or 1.0


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _node_seconds(
    graph: Graph, specs: Sequence[OpSpec], keys: Sequence[str], timings: Mapping[str, Timing]
) -> tuple[np.ndarray, tuple[Note, ...]]:
    """Seconds of the passes of every node [nodes, 2], and what was not run."""
    seconds_by_node = np.zeros((len(specs), 2))
    run = [i for i, key in enumerate(keys) if key and not isinstance(timings[key], str)]
    missing: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        timing = timings[key] if key else (0.0, 0.0)
        if isinstance(timing, str):
            missing.setdefault(key, []).append(i)
            continue
        forward_s, backward_s = timing
        if math.isnan(backward_s):
            backward_s = forward_s * _backward_ratio(specs[i])
        seconds_by_node[i] = graph.nodes[i].repeat * forward_s, graph.nodes[i].repeat * backward_s
    if missing and not run:
        reason = next(timings[key] for key in missing)
        raise ModelError("no operator of the model could be run", hint=f"price it with --device; the first: {reason}")
    notes = []
    for key, nodes in missing.items():
        first = nodes[0]
        nearest = _nearest(graph, specs, run, first)
        forward_s = seconds_by_node[nearest, 0] * _work(specs[first]) / _work(specs[nearest])
        seconds_by_node[nodes] = forward_s, forward_s * _backward_ratio(specs[first])
        how = f"scaled from {graph.nodes[nearest].op} {graph.nodes[nearest].key!r}"
        message = f"{graph.nodes[first].op} ({len(nodes)} nodes) was not run: {timings[key]}; {how}"
        notes.append(Note(NoteLevel.WARNING, "not-measured", message, graph.nodes[first].key))
    return seconds_by_node, tuple(notes)


def _nearest(graph: Graph, specs: Sequence[OpSpec], run: Sequence[int], wanted: int) -> int:
    """The measured node most similar to a given one: same kind of work, same operator, then closest in size."""
    heavy, op, size = specs[wanted].matrix_flops > 0, graph.nodes[wanted].op, _work(specs[wanted])

    def unlikeness(i: int) -> tuple[bool, bool, float, int]:
        other_kind = (specs[i].matrix_flops > 0) != heavy
        return other_kind, graph.nodes[i].op != op, abs(float(np.log(_work(specs[i]) / size))), i

    return min(run, key=unlikeness)


def _backward_ratio(spec: OpSpec) -> float:
    """Backward over forward time, by their work."""
    if spec.matrix_flops:
        return (spec.input_grad_matrix_flops + spec.weight_grad_matrix_flops) / spec.matrix_flops
    return spec.backward.byte_count / spec.forward.byte_count if spec.forward.byte_count else 0.0


def _weight_part(spec: OpSpec) -> float:
    """The part of a backward pass that goes to weights."""
    matrix = spec.input_grad_matrix_flops + spec.weight_grad_matrix_flops
    return spec.weight_grad_matrix_flops / matrix if spec.matrix_flops and matrix else 0.0


_MASKED = Stack("", causal_part=0.5, attention_block=1)
"""What kernels that were measured leave out is not known: under a causal mask half of the scores, as the best do."""


def _assemble(
    graph: Graph,
    specs: Sequence[OpSpec],
    seconds: np.ndarray,
    measured_on: tuple[str, str],
    notes: tuple[Note, ...],
    *,
    fused_attention: bool,
    dropout: bool,
) -> Profile:
    machine, precision_name = measured_on
    precision = precision_named(precision_name)
    options = SavedOptions(fused_attention=fused_attention, dropout=dropout, loss_bytes=precision.loss_bytes)
    sizes = element_bytes(graph, precision.compute.bits / 8)
    scores = np.array([s.scores_in_memory(fused_attention) for s in specs])
    outputs, workspace = tensor_bytes(graph, sizes, scores)
    return Profile(
        device=machine,
        precision=precision.name,
        micro_batch=graph.batch,
        source="measured",
        forward_s=seconds[:, 0],
        backward_s=seconds[:, 1],
        weight_grad_s=seconds[:, 1] * np.array([_weight_part(s) for s in specs]),
        forward_flops=np.array([s.matrix_flops for s in specs]),
        backward_flops=np.array([s.input_grad_matrix_flops + s.weight_grad_matrix_flops for s in specs]),
        moved_bytes=np.array([s.forward.byte_count for s in specs]),
        output_bytes=outputs,
        workspace_bytes=workspace,
        origin=tuple(s.origin for s in specs),
        saved=saved_for_backward(graph, specs, width=sizes, options=options),
        executed=np.tile(scores_done(graph, specs, _MASKED, fused=fused_attention), (2, 1)).clip(max=1.0),
        notes=(*notes, *saved_notes(graph, options)),
    )
