"""Measured prices: every distinct operator call is run alone by onnxruntime on this machine's CPU.

A call becomes a model of one node with random operands of the true shapes, in fp32; the median of several warm runs is
its price. Results are cached as JSON, keyed by what the call's cost depends on, the onnxruntime version and the
machine. Calls that need more memory than allowed, or that onnxruntime cannot run, are scaled from the nearest call that
was measured, with a note. Backward passes are not run: they take as much longer as they have more work.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.costs.one_node import call_bytes, one_node_model
from planner.costs.precision import precision as precision_named
from planner.costs.pricing import saved_options
from planner.costs.types import Profile
from planner.costs.work import tensor_bytes
from planner.errors import ModelError, OutputError, UsageError
from planner.files import write_whole
from planner.graph import Graph, Note, NoteLevel
from planner.hardware import machine_name
from planner.operators.batching import rebatch
from planner.operators.saved import element_bytes, saved_for_backward, saved_notes
from planner.operators.specs import graph_specs
from planner.operators.types import OpCall, OpSpec, Origin

CACHE_VERSION = 1
DEFAULT_MEMORY_CAP_BYTES = 1 << 30
_WARM_RUNS = 1
_RUNS = 5
_ENOUGH_S = 0.25
Progress = Callable[[int, int, str], None]
"""Called with calls done, calls in all, and the operator at hand."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one distinct call; None where it was not run, with the reason."""

    seconds: float | None
    reason: str = ""


def default_cache_folder() -> Path:
    """Where measurements are kept: `shardplan` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardplan"


def measure(
    graph: Graph,
    *,
    micro_batch: int | None = None,
    cache_folder: Path | None = None,
    memory_cap_bytes: int = DEFAULT_MEMORY_CAP_BYTES,
    fused_attention: bool = True,
    dropout: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Price every node by running its operator on this machine's CPU.

    Args:
        graph: the graph.
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
    runtime = _onnxruntime()
    sized = graph if micro_batch is None else rebatch(graph, micro_batch)
    specs = graph_specs(sized)
    machine = machine_name()
    store = _Store((cache_folder or default_cache_folder()), machine, runtime.__version__)
    calls = [OpCall.of(sized, node) for node in sized.nodes]
    keys = ["" if _is_free(s) else _key(c) for c, s in zip(calls, specs, strict=True)]
    distinct = {key: i for i, key in reversed(list(enumerate(keys))) if key}
    timings: dict[str, Timing] = {}
    for done, (key, i) in enumerate(sorted(distinct.items(), key=lambda kv: kv[1])):
        if progress:
            progress(done, len(distinct), calls[i].op)
        known = store.get(key)
        timings[key] = Timing(known) if known is not None else _run_call(runtime, calls[i], memory_cap_bytes)
        store.put(key, timings[key].seconds)
    store.write()
    forward, notes = _forward_seconds(sized, specs, keys, timings)
    return _assemble(sized, specs, forward, machine, notes, fused_attention=fused_attention, dropout=dropout)


def _onnxruntime() -> Any:  # noqa: ANN401
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(
            "measuring needs onnxruntime, which is not installed", hint="pip install 'shardplan[measure]'"
        ) from None
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def _is_free(spec: OpSpec) -> bool:
    return spec.view or spec.origin is Origin.PLUMBING or spec.kernels == 0


def _key(call: OpCall) -> str:
    return hashlib.sha256(repr((call.opset, call.signature())).encode()).hexdigest()[:32]


# --- running one call --------------------------------------------------------------------------------------------


def _run_call(runtime: Any, call: OpCall, memory_cap_bytes: int) -> Timing:  # noqa: ANN401
    needed = call_bytes(call)
    if needed > memory_cap_bytes:
        return Timing(None, f"needs {needed / 2**30:.1f} GiB, more than the {memory_cap_bytes / 2**30:.1f} GiB allowed")
    try:
        model, feeds = one_node_model(call)
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return Timing(_median_run(session, feeds))
    except Exception as error:  # onnxruntime raises classes of its own, one a cause, none public
        return Timing(None, f"onnxruntime cannot run it: {str(error).splitlines()[0][:160]}")


def _median_run(session: Any, feeds: Mapping[str, np.ndarray]) -> float:  # noqa: ANN401
    for _ in range(_WARM_RUNS):
        session.run(None, feeds)
    runs: list[float] = []
    while len(runs) < _RUNS and (not runs or sum(runs) < _ENOUGH_S or len(runs) < 3):
        start = time.perf_counter()
        session.run(None, feeds)
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


# --- cache -------------------------------------------------------------------------------------------------------


class _Store:
    """Measured seconds of one machine and one onnxruntime version, in one JSON file."""

    def __init__(self, folder: Path, machine: str, version: str) -> None:
        tag = hashlib.sha256(f"{machine}|{version}".encode()).hexdigest()[:12]
        self.path = folder / f"measured-{tag}.json"
        self.head = {"version": CACHE_VERSION, "machine": machine, "onnxruntime": version}
        self.seconds: dict[str, float] = self._read()
        self.changed = False

    def _read(self) -> dict[str, float]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict) or any(content.get(k) != v for k, v in self.head.items()):
            return {}
        stored = content.get("seconds")
        pairs = stored.items() if isinstance(stored, dict) else ()
        return {str(k): float(v) for k, v in pairs if isinstance(v, (int, float)) and v > 0}

    def get(self, key: str) -> float | None:
        return self.seconds.get(key)

    def put(self, key: str, seconds: float | None) -> None:
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
        text = json.dumps({**self.head, "seconds": dict(sorted(self.seconds.items()))}, indent=1)
        write_whole(self.path, text + "\n")


# --- prices ------------------------------------------------------------------------------------------------------


def _work(spec: OpSpec) -> float:
    """One number to scale by: matrix work where there is any, else traffic."""
    return spec.matrix_flops or spec.forward_bytes or 1.0


def _forward_seconds(
    graph: Graph, specs: Sequence[OpSpec], keys: Sequence[str], timings: Mapping[str, Timing]
) -> tuple[np.ndarray, tuple[Note, ...]]:
    forward = np.zeros(len(specs))
    run = [i for i, key in enumerate(keys) if key and timings[key].seconds is not None]
    missing: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        seconds = timings[key].seconds if key else 0.0
        if seconds is None:
            missing.setdefault(key, []).append(i)
        else:
            forward[i] = seconds * graph.nodes[i].repeat
    if missing and not run:
        reason = next(timings[key].reason for key in missing)
        raise ModelError("no operator of the model could be run", hint=f"price it with --device; the first: {reason}")
    notes = []
    for key, nodes in missing.items():
        first = nodes[0]
        nearest = _nearest(graph, specs, run, first)
        forward[nodes] = forward[nearest] * _work(specs[first]) / _work(specs[nearest])
        how = f"scaled from {graph.nodes[nearest].op} {graph.nodes[nearest].key!r}"
        message = f"{graph.nodes[first].op} ({len(nodes)} nodes) was not run: {timings[key].reason}; {how}"
        notes.append(Note(NoteLevel.WARNING, "not-measured", message, graph.nodes[first].key))
    return forward, tuple(notes)


def _nearest(graph: Graph, specs: Sequence[OpSpec], run: Sequence[int], wanted: int) -> int:
    """Of the measured nodes the one most like another: same kind of work, same operator, then closest in size."""
    heavy, op, size = specs[wanted].matrix_flops > 0, graph.nodes[wanted].op, _work(specs[wanted])

    def unlikeness(i: int) -> tuple[bool, bool, float, int]:
        other_kind = (specs[i].matrix_flops > 0) != heavy
        return other_kind, graph.nodes[i].op != op, abs(float(np.log(_work(specs[i]) / size))), i

    return min(run, key=unlikeness)


def _backward_ratio(spec: OpSpec) -> tuple[float, float]:
    """Backward over forward time, and the part of it that goes to weights."""
    matrix = spec.input_grad_matrix_flops + spec.weight_grad_matrix_flops
    if spec.matrix_flops:
        return matrix / spec.matrix_flops, spec.weight_grad_matrix_flops / spec.matrix_flops
    return (spec.backward_bytes / spec.forward_bytes if spec.forward_bytes else 0.0), 0.0


def _assemble(
    graph: Graph,
    specs: Sequence[OpSpec],
    forward: np.ndarray,
    machine: str,
    notes: tuple[Note, ...],
    *,
    fused_attention: bool,
    dropout: bool,
) -> Profile:
    chosen = precision_named("fp32")
    options = saved_options(chosen, fused_attention=fused_attention, dropout=dropout, assume_dropout=False)
    sizes = element_bytes(graph, 4.0)
    ratios = np.array([_backward_ratio(s) for s in specs]).reshape(-1, 2)
    scores = np.array([s.scores_in_memory(fused_attention) for s in specs])
    outputs, workspace = tensor_bytes(graph, sizes, scores)
    return Profile(
        device=machine,
        precision=chosen.name,
        micro_batch=graph.batch,
        source="measured",
        forward_s=forward,
        backward_s=forward * ratios[:, 0],
        weight_grad_s=forward * ratios[:, 1],
        forward_flops=np.array([s.matrix_flops for s in specs]),
        backward_flops=np.array([s.input_grad_matrix_flops + s.weight_grad_matrix_flops for s in specs]),
        moved_bytes=np.array([s.forward_bytes for s in specs]),
        output_bytes=outputs,
        workspace_bytes=workspace,
        origin=tuple(s.origin for s in specs),
        saved=saved_for_backward(graph, specs, width=sizes, options=options),
        notes=(*notes, *saved_notes(graph, options)),
    )
