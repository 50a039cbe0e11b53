"""Communication of sharded blocks, judged anew from their layouts: none is left out, none is too much."""

from __future__ import annotations

from collections.abc import Iterator

from planner.plans.findings import Fault, Finding
from planner.plans.rebuild import Rebuilt
from planner.plans.shard_text import group_collective
from planner.plans.shardings import GroupCollective, ShardedBlock
from planner.sharding import describe, evaluate

_MAKE_AGAIN = "plan again instead of editing the file"


def check_communication(rebuilt: Rebuilt, entry: ShardedBlock) -> Iterator[Finding]:
    """Findings about one entry whose splits and layouts are legal one by one.

    Which collectives they take, how large and how fast, only the cluster says: that is compared when the plan is
    evaluated anew.
    """
    setting, decision = rebuilt.part(entry), rebuilt.decision(entry)
    verdict = evaluate(setting, decision, facts=rebuilt.facts)
    for violation in verdict.violations:
        yield Finding(Fault.LAYOUT, violation, _MAKE_AGAIN)
    if verdict.violations:
        return
    text = describe(setting, decision, verdict.communication, rebuilt.facts.carrying)
    said = set(map(_key, entry.collectives))
    needed = {_key(group_collective(use, rebuilt.mesh, setting.micro_batches)) for use in text.collectives}
    for of, reason, phase in sorted(needed - said):
        if rebuilt.prices is None and phase == "backward" and (of, reason, "forward") in said:
            continue  # what backward keeps of a gathered tensor is said by prices
        message = f"communication {phase} of {of!r} is needed but not listed"
        yield Finding(Fault.COLLECTIVE_MISSING, message, _MAKE_AGAIN, tensor=of)
    for of, _, phase in sorted(said - needed):
        message = f"communication {phase} of {of!r} is listed but not needed"
        yield Finding(Fault.COLLECTIVE_UNKNOWN, message, _MAKE_AGAIN, tensor=of)


def _key(use: GroupCollective) -> tuple[str, str, str]:
    return use.of, use.reason, use.phase
