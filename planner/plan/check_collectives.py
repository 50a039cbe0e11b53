"""What a sharded block costs, judged anew from its layouts: collectives, bytes, seconds, memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from planner.plan.findings import Fault, Finding
from planner.plan.rebuild import Rebuilt
from planner.plan.shard_text import group_collective
from planner.plan.shardings import GroupCollective, ShardedBlock
from planner.sharding import Strategy, TensorChoice, Verdict, describe, evaluate, shard_elements
from planner.sharding.problem import Choice

_MAKE_AGAIN = "plan again instead of editing the file"
_TOLERANCE = 1e-6
Key = tuple[str, str, str, str, tuple[str, ...]]


def check_figures(rebuilt: Rebuilt, entry: ShardedBlock) -> Iterator[Finding]:
    """Findings about one entry whose splits and layouts are legal one by one."""
    setting, decision = rebuilt.part(entry), rebuilt.decision(entry)
    verdict = evaluate(setting, decision, facts=rebuilt.facts)
    for violation in verdict.violations:
        yield Finding(Fault.LAYOUT, violation, _MAKE_AGAIN)
    if verdict.violations:
        return
    text = describe(setting, decision, verdict.communication, rebuilt.facts.carrying)
    right = [group_collective(use, rebuilt.mesh, setting.micro_batches) for use in text.collectives]
    yield from _collectives(entry, right, priced=rebuilt.prices is not None)
    if rebuilt.prices is not None:
        yield from _figures(rebuilt, entry, verdict, decision)


def _collectives(entry: ShardedBlock, right: list[GroupCollective], *, priced: bool) -> Iterator[Finding]:
    """The plan's collectives are those that its layouts need; without a cluster, for the same things at least."""
    said = _by_key(entry.collectives, priced=priced)
    needed = _by_key(right, priced=priced)
    for key in needed.keys() - said.keys():
        yield Finding(Fault.COLLECTIVE_MISSING, f"{_words(key)} is needed but not listed", _MAKE_AGAIN, tensor=key[0])
    for key in said.keys() - needed.keys():
        yield Finding(Fault.COLLECTIVE_UNKNOWN, f"{_words(key)} is listed but not needed", _MAKE_AGAIN, tensor=key[0])
    if not priced:
        return
    for key in said.keys() & needed.keys():
        yield from _compared(key, said[key], needed[key])


def _by_key(uses: Iterable[GroupCollective], *, priced: bool) -> Mapping[Key, list[GroupCollective]]:
    found: dict[Key, list[GroupCollective]] = {}
    for use in uses:
        more = (use.kind, use.axes) if priced else ("communication", ())
        found.setdefault((use.of, use.reason, use.phase, *more), []).append(use)
    return found


def _words(key: Key) -> str:
    of, _, phase, kind, axes = key
    return f"{kind} {phase} of {of!r}" + (f" along {', '.join(axes)}" if axes else "")


def _compared(key: Key, said: list[GroupCollective], right: list[GroupCollective]) -> Iterator[Finding]:
    """Collectives of one kind, in any order: how many, bytes, times, seconds, links."""
    if len(said) != len(right):
        message = f"{_words(key)} is listed {len(said)} times, needed are {len(right)}"
        yield Finding(Fault.COLLECTIVE, message, _MAKE_AGAIN, tensor=key[0])
        return
    if Counter(c.level for c in said) != Counter(c.level for c in right):
        message = f"{_words(key)} crosses the links of {right[0].level!r}, the plan says {said[0].level!r}"
        yield Finding(Fault.LINK_LEVEL, message, _MAKE_AGAIN, tensor=key[0])
    checks = (
        ("payload_bytes", Fault.COLLECTIVE, "bytes"), ("times", Fault.COLLECTIVE, "times"),
        ("sent_bytes", Fault.SHARDING_BYTES, "bytes sent"), ("seconds", Fault.SHARDING_SECONDS, "s"),
    )  # fmt: skip
    for name, fault, unit in checks:
        pairs = zip(sorted(getattr(c, name) for c in said), sorted(getattr(c, name) for c in right), strict=True)
        wrong = next(((a, b) for a, b in pairs if not math.isclose(a, b, rel_tol=_TOLERANCE)), None)
        if wrong:
            message = f"{_words(key)} is {wrong[1]:.9g} {unit}, the plan says {wrong[0]:.9g}"
            yield Finding(fault, message, _MAKE_AGAIN, tensor=key[0])


def _figures(
    rebuilt: Rebuilt, entry: ShardedBlock, verdict: Verdict, decision: Mapping[str, Choice]
) -> Iterator[Finding]:
    steps = [c for c in verdict.communication if c.phase == "step"]
    inside_s = verdict.exchange_s + sum(c.seconds for c in verdict.communication if c.phase != "step")
    figures, micro_batches = entry.figures, rebuilt.setting.micro_batches
    checks = (
        (Fault.SHARDING_SECONDS, "forward_s", verdict.forward_s),
        (Fault.SHARDING_SECONDS, "backward_s", verdict.backward_s),
        (Fault.SHARDING_SECONDS, "step_s", verdict.step_s * micro_batches),
        (Fault.SHARDING_SECONDS, "communication_s", inside_s),
        (Fault.SHARDING_BYTES, "sent_bytes", verdict.sent_bytes - sum(c.sent_bytes for c in steps)),
        (Fault.SHARDING_MEMORY, "saved_bytes", sum(_saved(rebuilt, entry, decision).values())),
        (Fault.SHARDING_MEMORY, "checkpoint_bytes", _inputs(rebuilt, entry)),
        (Fault.SHARDING_MEMORY, "workspace_bytes", _workspace(rebuilt, entry)),
    )
    for fault, name, right in checks:
        said = getattr(figures, name)
        if not math.isclose(said, right, rel_tol=_TOLERANCE, abs_tol=1e-12):
            first = entry.first[0]
            message = f"{name} of block {first} is {right:.9g}, the plan says {said:.9g}"
            yield Finding(fault, message, _MAKE_AGAIN)


def _saved(rebuilt: Rebuilt, entry: ShardedBlock, decision: Mapping[str, Choice]) -> dict[str, float]:
    """Bytes that a rank keeps for backward, by storage."""
    found: dict[str, float] = {}
    for operator, kept in kept_storages(rebuilt, entry, decision):
        storages = rebuilt.facts.saved[rebuilt.graph.producer[operator]]
        for storage, size in zip(storages, kept, strict=True):
            found[storage.storage] = max(found.get(storage.storage, 0.0), size)
    return found


def kept_storages(
    rebuilt: Rebuilt, entry: ShardedBlock, decision: Mapping[str, Choice]
) -> Iterator[tuple[str, list[float]]]:
    """By operator, bytes on a rank of each storage that it keeps: a tensor where it rests, all else by its share."""
    graph, sizes = rebuilt.graph, rebuilt.mesh.sizes
    views = [p for p in entry.tensors if graph.producer.get(p.tensor, -1) not in rebuilt.nodes(entry)]
    for i in rebuilt.nodes(entry):
        chosen, own = decision[f"op:{graph.nodes[i].key}"], list[float]()
        for kept in rebuilt.facts.saved[i]:
            part, rest = chosen.share if isinstance(chosen, Strategy) else 1.0, decision.get(kept.storage)
            if isinstance(rest, TensorChoice):
                tensor = graph.tensors[kept.storage]
                part = shard_elements(tensor.shape, rest.value, sizes) / max(1, tensor.elements)
            elif kept.storage in graph.tensors:
                elements = graph.tensors[kept.storage].elements
                alike = (p for p in views if graph.tensors[p.tensor].elements == elements and not p.optimizer)
                view = next(alike, None)
                shape = graph.tensors[view.tensor].shape if view else ()
                held = shard_elements(shape, rebuilt.layout(view.value), sizes) if view else elements
                part = held / max(1, elements)
            own.append(kept.byte_count * part)
        yield graph.nodes[i].key, own


def _inputs(rebuilt: Rebuilt, entry: ShardedBlock) -> float:
    """Bytes on a rank of the tensors that come from other blocks."""
    graph, members, total = rebuilt.graph, set(rebuilt.nodes(entry)), 0.0
    for place in entry.tensors:
        if not place.optimizer and graph.producer.get(place.tensor, -1) not in members:
            tensor = graph.tensors[place.tensor]
            elements = shard_elements(tensor.shape, rebuilt.layout(place.value), rebuilt.mesh.sizes)
            total += rebuilt.setting.bytes_of(tensor) * elements
    return total


def _workspace(rebuilt: Rebuilt, entry: ShardedBlock) -> float:
    """Transient bytes of the operator that needs most, in proportion to the operands and results that a rank holds."""
    graph, sizes, most = rebuilt.graph, rebuilt.mesh.sizes, 0.0
    for split in entry.operators:
        i = graph.producer[split.operator]
        node, held, whole = graph.nodes[i], 0, 0
        for names, texts in ((node.inputs, split.reads), (node.outputs, split.writes)):
            for position, name in enumerate(names):
                if name in graph.tensors:
                    tensor, text = graph.tensors[name], texts[position] if position < len(texts) else ""
                    layout = rebuilt.layout(text) if text else ()
                    held += shard_elements(tensor.shape, layout, sizes) if layout else tensor.elements
                    whole += tensor.elements
        if rebuilt.prices is not None:
            most = max(most, float(rebuilt.prices.workspace_bytes[i]) * held / max(1, whole))
    return most
