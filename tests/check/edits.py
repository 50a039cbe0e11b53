"""Harmful edits of a plan file by name: each changes the document, or says by False that there is nothing to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from planner.plans import Plan, loads, seal, to_document

Document = dict[str, Any]
Edit = Callable[[Document], bool | None]
TIMES = ("forward_s", "backward_s", "recompute_s", "receive_s", "return_s", "sync_s", "exposed_sync_s", "tied_sync_s",
         "update_s")  # fmt: skip
OF_DEVICES = ("flop_per_s_per_device", "mfu")
TB = 10**12


def edited(plan: Plan, edit: Edit) -> Plan | None:
    """The plan with an edit and a digest of its own, read from its file; None where there is nothing to edit."""
    document = copy.deepcopy(to_document(plan))
    before = copy.deepcopy(document)
    if edit(document) is False or document == before:
        return None
    return seal(loads(json.dumps(document)))


def stage_value(key: str, change: Callable[[Any], Any], at: int = 0) -> Edit:
    """Change a prediction of a stage."""

    def edit(d: Document) -> bool | None:
        terms = d["predictions"]["stages"][at]
        if key not in terms:
            return False
        terms[key] = change(terms[key])
        return None

    return edit


def memory_value(key: str, change: Callable[[int], int]) -> Edit:
    """Change a kind of memory of the first stage."""

    def edit(d: Document) -> None:
        memory = d["predictions"]["stages"][0]["memory"]
        memory[key] = change(memory[key])

    return edit


def prediction(key: str, change: Callable[[Any], Any]) -> Edit:
    """Change a prediction of the whole plan."""

    def edit(d: Document) -> None:
        d["predictions"][key] = change(d["predictions"][key])

    return edit


def every_time(factor: float) -> Edit:
    """All times of all stages, of the whole and of the headline, as if the machine were faster."""

    def edit(d: Document) -> None:
        said = d["predictions"]
        for terms in said["stages"]:
            for key in TIMES:
                terms[key] *= factor
        for key in ("iteration_s", "bound_s", "simulated_iteration_s"):
            said[key] *= factor
        said["samples_per_s"] /= factor
        line = d["headline"]
        slower = ("iteration_s", "low_s", "high_s", "dollars_per_tera_tokens", "dollars_per_mega_samples")
        faster_by = dict.fromkeys(("samples_per_s", "tokens_per_s_per_device", *OF_DEVICES), 1 / factor)
        for key, by in {**dict.fromkeys(slower, factor), **faster_by}.items():
            if key in line:
                line[key] = float(f"{line[key] * by:.9g}")

    return edit


def stage_times(factor: float) -> Edit:
    """All times of the first stage."""

    def edit(d: Document) -> None:
        for key in TIMES:
            d["predictions"]["stages"][0][key] *= factor

    return edit


def faster(d: Document) -> None:
    """An iteration of half the time, with bound and throughput to match."""
    said = d["predictions"]
    said["iteration_s"] /= 2
    said["bound_s"] /= 2
    said["samples_per_s"] *= 2


def faster_in_all(d: Document) -> None:
    """The same and the simulated time."""
    faster(d)
    d["predictions"]["simulated_iteration_s"] /= 2


def no_activations(d: Document) -> None:
    """A stage that keeps nothing."""
    terms = d["predictions"]["stages"][0]
    terms["memory"]["activations_bytes"] = terms["unit_bytes"] = 0


def one_in_flight(d: Document) -> bool | None:
    """One micro-batch in flight, with the memory to match."""
    terms = d["predictions"]["stages"][0]
    if terms["in_flight"] < 2:
        return False
    terms["memory"]["activations_bytes"] -= (terms["in_flight"] - 1) * terms["unit_bytes"]
    terms["in_flight"] = 1
    return None


def no_transfers(d: Document) -> bool:
    """Transfers that take no time."""
    stages = d["predictions"]["stages"]
    some = any(t["receive_s"] or t["return_s"] for t in stages)
    for terms in stages:
        terms["receive_s"] = terms["return_s"] = 0.0
    return some


def no_exposed_sync(d: Document) -> bool:
    """Synchronisation that is hidden altogether."""
    stages = d["predictions"]["stages"]
    some = any(t["exposed_sync_s"] for t in stages)
    for terms in stages:
        terms["exposed_sync_s"] = 0.0
    return some


def collectives(change: Callable[[list[Any]], None]) -> Edit:
    """Change what the first stage with collectives exchanges."""

    def edit(d: Document) -> bool | None:
        for terms in d["predictions"]["stages"]:
            if terms["collectives"]:
                change(terms["collectives"])
                return None
        return False

    return edit


def stage_fact(key: str, change: Callable[[Any], Any], at: int = 0) -> Edit:
    """Change what a stage is."""

    def edit(d: Document) -> bool | None:
        if key not in d["stages"][at]:
            return False
        d["stages"][at][key] = change(d["stages"][at][key])
        return None

    return edit


def zero_off(d: Document) -> bool | None:
    """Optimizer state that is no longer sharded, with two replicas or more, and nothing else changed."""
    if d["stages"][0]["zero"] == 0 or len(d["stages"][0]["replicas"]) < 2:
        return False
    for stage in d["stages"]:
        stage["zero"] = 0
    d["requires"] = [name for name in d["requires"] if not name.startswith("zero")]
    return None


def recompute_off(d: Document) -> bool | None:
    """Stages that no longer recompute, with memory and times as they were."""
    if not any(stage["recompute"] for stage in d["stages"]):
        return False
    for stage in d["stages"]:
        stage["recompute"], stage["kept_blocks"] = False, []
    d["requires"] = [name for name in d["requires"] if name != "recompute"]
    return None


def top(key: str, change: Callable[[Any], Any]) -> Edit:
    """Change a key of the plan itself."""

    def edit(d: Document) -> bool | None:
        if key not in d:
            return False
        d[key] = change(d[key])
        return None

    return edit


def inside(*path: str | int, to: Callable[[Any], Any]) -> Edit:
    """Change the value at a path."""

    def edit(d: Document) -> bool | None:
        at: Any = d
        try:
            for part in path[:-1]:
                at = at[part]
            at[path[-1]] = to(at[path[-1]])
        except (KeyError, IndexError):
            return False
        return None

    return edit


def false_proof(d: Document) -> bool | None:
    """A proof with the bound to match."""
    said = d["predictions"]
    if said["proven_optimal"]:
        return False
    said["bound_s"], said["gap"], said["proven_optimal"] = said["iteration_s"], 0.0, True
    return None


def weaker_bound(d: Document) -> None:
    """A bound of half the time, with the gap to match."""
    said = d["predictions"]
    said["bound_s"] /= 2
    said["gap"], said["proven_optimal"] = 1 - said["bound_s"] / said["iteration_s"], False


def another_bottleneck(d: Document) -> bool | None:
    """Another stage called the slowest."""
    count = len(d["stages"])
    if count < 2:
        return False
    d["predictions"]["bottleneck"] = (d["predictions"]["bottleneck"] + 1) % count
    return None


def invented_alternative(d: Document) -> bool | None:
    """Another plan that takes a tenth more than this one."""
    if not d["alternatives"]:
        return False
    d["alternatives"][0]["iteration_s"] = d["predictions"]["iteration_s"] * 1.1
    return None


def fewer_alternatives(d: Document) -> None:
    """Runners-up left out."""
    d["alternatives"] = d["alternatives"][1:]


def another_schedule(d: Document) -> None:
    """Another name for the same orders."""
    d["schedule"]["name"] = "dapple" if d["schedule"]["name"] != "dapple" else "gpipe"


def unknown_schedule(d: Document) -> None:
    """A name that no schedule has."""
    d["schedule"]["name"] = "mine"


def another_step(d: Document) -> bool | None:
    """Micro-batches of a line further apart."""
    for order in d["schedule"]["orders"]:
        order["step"] += 1
        return None
    return False


def update_first(d: Document) -> bool | None:
    """Weights updated before their gradients are exchanged."""
    for order in d["schedule"]["orders"]:
        if "S0 U0" in order["actions"]:
            order["actions"] = order["actions"].replace("S0 U0", "U0 S0")
            return None
    return False


def fewer_actions(d: Document) -> None:
    """The last action of a line left out."""
    line = d["schedule"]["orders"][0]
    line["actions"] = line["actions"].rsplit(" ", 1)[0]


def routing_flipped(d: Document) -> None:
    """Micro-batches routed otherwise."""
    d["routing"] = "by_order" if d["routing"] == "round_robin" else "round_robin"


def ranks_swapped(d: Document) -> bool | None:
    """Two stages on each other's ranks."""
    if len(d["stages"]) < 2:
        return False
    first, second = d["stages"][0], d["stages"][-1]
    first["replicas"], second["replicas"] = second["replicas"], first["replicas"]
    return None


def boundary_moved(d: Document) -> bool | None:
    """The last block of a stage given to the next."""
    for one, other in zip(d["stages"], d["stages"][1:], strict=False):
        if one["blocks"][1] - one["blocks"][0] > 1:
            one["blocks"][1] -= 1
            other["blocks"][0] -= 1
            return None
    return False


def smaller_micro_batch(d: Document) -> bool | None:
    """Twice as many micro-batches of half the size, and nothing else changed."""
    batches = d["micro_batches"]
    if batches["size"] % 2:
        return False
    batches["size"] //= 2
    batches["count"] *= 2
    batches["gradient_scale"] = 1 / batches["count"]
    return None


def shardings(key: str, factor: float) -> Edit:
    """Scale a figure of the first sharded block."""

    def edit(d: Document) -> bool | None:
        if "shardings" not in d or not d["shardings"][0]["blocks"][0]["figures"][key]:
            return False
        d["shardings"][0]["blocks"][0]["figures"][key] *= factor
        return None

    return edit


def renamed_block(d: Document) -> None:
    """Another name for the first block."""
    d["blocks"][0]["blocks"][0]["name"] += "x"


def renamed_owner(d: Document) -> bool | None:
    """Another module for the first parameter."""
    for run in d["blocks"]:
        for block in run["blocks"]:
            for parameter in block["parameters"]:
                parameter["module"] = "elsewhere"
                return None
    return False


def half(value: Any) -> Any:
    return value // 2 if isinstance(value, int) else value / 2


EDITS: dict[str, Edit] = {
    **{f"{key} halved": memory_value(key, half) for key in
       ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "workspace_bytes")},
    **{f"{key} zero": memory_value(key, lambda _: 0) for key in
       ("weights_bytes", "gradients_bytes", "optimizer_bytes", "workspace_bytes", "reserve_bytes")},
    **{f"{key} is -1 TB": memory_value(key, lambda _: -TB) for key in
       ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "workspace_bytes",
        "reserve_bytes")},
    "activations and unit zero": no_activations,
    "unit_bytes halved": stage_value("unit_bytes", half),
    "capacity_bytes x 10": stage_value("capacity_bytes", lambda v: 10 * v),
    "one in flight": one_in_flight,
    "in_flight + 1": stage_value("in_flight", lambda v: v + 1),
    **{f"{key} / 10": stage_value(key, lambda v: v / 10) for key in TIMES},
    **{f"{key} zero": stage_value(key, lambda _: 0.0) for key in TIMES},
    "forward_s negative": stage_value("forward_s", lambda v: -v),
    "backward_s negative": stage_value("backward_s", lambda v: -v),
    "all times of a stage / 10": stage_times(0.1),
    "all times / 10, the whole too": every_time(0.1),
    "all times x 0.999, the whole too": every_time(0.999),
    "transfers zero": no_transfers,
    "exposed sync zero": no_exposed_sync,
    "collectives dropped": collectives(list.clear),
    "collective's bytes changed": collectives(lambda own: own[0].update(bytes=own[0]["bytes"] // 2)),
    "collective's ranks changed": collectives(lambda own: own[0].update(ranks=own[0]["ranks"] + 1)),
    "collective's kind changed": collectives(lambda own: own[0].update(kind="broadcast")),
    "inside_s zero": stage_value("inside_s", lambda _: 0.0),
    "inside_bytes halved": stage_value("inside_bytes", half),
    "recompute off": recompute_off,
    "recompute flipped": stage_fact("recompute", lambda v: not v),
    "kept blocks": stage_fact("kept_blocks", lambda v: [] if v else [0]),
    "zero off": zero_off,
    "zero + 1": stage_fact("zero", lambda v: (v + 1) % 4),
    "parameters halved": stage_fact("parameters", half),
    "rank_parameters halved": stage_fact("rank_parameters", half),
    "ranks swapped": ranks_swapped,
    "boundary moved": boundary_moved,
    "module names": stage_fact("modules", lambda v: [*v[:-1], v[-1] + "x"]),
    "stage inputs": stage_fact("inputs", lambda v: [*v, "more"]),
    "iteration_s halved": prediction("iteration_s", half),
    "iteration_s halved with its bound": faster,
    "iteration_s halved with all": faster_in_all,
    "simulated_iteration_s halved": prediction("simulated_iteration_s", half),
    "simulated_iteration_s left out": prediction("simulated_iteration_s", lambda _: None),
    "samples_per_s doubled": prediction("samples_per_s", lambda v: 2 * v),
    "bubble zero": prediction("bubble_fraction", lambda _: 0.0),
    "bubble's convention": prediction("bubble_convention", lambda v: v + ", or so"),
    "gap + 0.5": prediction("gap", lambda v: v + 0.5),
    "bound above the time": prediction("bound_s", lambda v: 2 * v),
    "bound halved": weaker_bound,
    "false proof": false_proof,
    "proven flipped": prediction("proven_optimal", lambda v: not v),
    "bottleneck another": another_bottleneck,
    "space another": prediction("space", lambda v: v + " and more"),
    "alternative invented": invented_alternative,
    "alternatives left out": fewer_alternatives,
    "alternative's memory": inside("alternatives", 0, "memory_bytes", to=half),
    "alternative's summary": inside("alternatives", 0, "summary", to=lambda v: v + ", twice"),
    "alternative feasible": inside("alternatives", -1, "infeasible", to=lambda v: [] if v else ["too slow"]),
    "device memory x 10": inside("hardware", "devices", 0, "memory_bytes", to=lambda v: 10 * v),
    "device reserve zero": inside("hardware", "devices", 0, "reserve_bytes", to=lambda _: 0),
    "device name": inside("hardware", "devices", 0, "device", to=lambda v: v + "x"),
    "devices of a run": inside("hardware", "devices", 0, "count", to=lambda v: v + 1),
    "bandwidth x 100": inside("hardware", "levels", 0, "byte_per_s", to=lambda v: 100 * v),
    "device bandwidth x 100": inside("hardware", "levels", 0, "device_byte_per_s", to=lambda v: 100 * v),
    "latency zero": inside("hardware", "levels", 0, "latency_s", to=lambda _: 0.0),
    "level's size": inside("hardware", "levels", 0, "size", to=lambda v: 2 * v),
    "device_count x 2": inside("hardware", "device_count", to=lambda v: 2 * v),
    "hardware's name": inside("hardware", "name", to=lambda v: v + "x"),
    "hardware's fingerprint": inside("hardware", "fingerprint", to=lambda v: "0" + v[:-1]),
    "model's fingerprint": inside("model", "fingerprint", to=lambda v: "0" + v[:-1]),
    "model's name": inside("model", "name", to=lambda v: v + "x"),
    "model's parameters": inside("model", "parameters", to=half),
    "model's loss": inside("model", "loss", to=lambda v: "in_graph" if v == "at_outputs" else "at_outputs"),
    "optimizer another": inside("options", "optimizer", to=lambda v: "sgd" if v != "sgd" else "adam"),
    "precision another": inside("options", "precision", to=lambda v: "fp32" if v != "fp32" else "fp16"),
    "zero not allowed": inside("options", "zero", to=lambda v: [z for z in (0, 1, 2, 3) if z not in v] or [3]),
    "recompute not allowed": inside("options", "recompute", to=lambda v: "never" if v == "always" else "always"),
    "micro-batch not allowed": inside("options", "micro_batches", to=lambda _: [3]),
    "global batch asked": inside("options", "global_batch", to=lambda v: 2 * v),
    "fewer devices asked": inside("options", "devices", to=lambda _: 1),
    "dropout another": inside("options", "dropout", to=lambda v: not v),
    "overlap all": inside("options", "overlap", to=lambda _: 1.0),
    "copies + 1": top("copies", lambda v: v + 1),
    "world_size + 1": top("world_size", lambda v: v + 1),
    "requires more": top("requires", lambda v: sorted({*v, "ring_attention"})),
    "requires less": top("requires", lambda v: v[1:]),
    "routing flipped": routing_flipped,
    "boundaries dropped": top("boundaries", lambda v: v[1:]),
    "ties dropped": top("shared_parameters", lambda v: v[1:]),
    "duplicated dropped": top("duplicated", lambda v: v[1:]),
    "schedule another": another_schedule,
    "schedule unknown": unknown_schedule,
    "weight policy": inside("schedule", "weight_policy", to=lambda v: "stash" if v != "stash" else "newest"),
    "a line's first micro-batch": inside("schedule", "orders", 0, "first", to=lambda v: [v[0] + 1, *v[1:]]),
    "order's step": another_step,
    "update before sync": update_first,
    "actions left out": fewer_actions,
    "versions one": inside("schedule", "versions", to=lambda v: [1] * len(v)),
    "staleness less": inside("schedule", "staleness", to=lambda v: [0] * len(v)),
    "smaller micro-batch": smaller_micro_batch,
    "gradient scale": inside("micro_batches", "gradient_scale", to=lambda v: 2 * v),
    "sharded forward_s": shardings("forward_s", 0.5),
    "sharded saved_bytes": shardings("saved_bytes", 0.5),
    "sharded workspace": shardings("workspace_bytes", 0.5),
    "sharded share": inside("shardings", 0, "blocks", 0, "operators", 0, "share", to=lambda v: v / 2),
    "sharded collective": inside("shardings", 0, "blocks", -1, "collectives", to=lambda v: v[1:]),
    "sharded tensor": inside("shardings", 0, "blocks", 0, "tensors", 0, "value",
                             to=lambda v: "R" if v != "R" else "S0"),
    "exchange's seconds": inside("exchange", "seconds", to=half),
    "exchange's bytes": inside("exchange", "tensors", 0, "bytes", to=half),
    "exchange's method": inside("exchange", "tensors", 0, "method", to=lambda v: v + "x"),
    "exchange dropped": lambda d: d.pop("exchange", None) is not None,
    "system's rules": inside("system", "tells", to=lambda v: dict(list(v.items())[1:])),
    "system's notes": inside("system", "notes", to=lambda v: [*v, "and fast"]),
    "system's name": inside("system", "name", to=lambda v: "gpipe" if v != "gpipe" else "chimera"),
    "system's source": inside("system", "source", to=lambda v: v + "x"),
    "system dropped": lambda d: d.pop("system", None) is not None,
    "coverage": inside("coverage", "by_rule", to=lambda v: v + 1),
    "notes dropped": lambda d: bool(d["notes"]) and (d.update(notes=[]) is None),
    "note added": lambda d: d["notes"].append({"level": "info", "code": "x", "message": "all is well"}),
    "not modelled dropped": top("not_modelled", lambda v: v[1:]),
    "block's name": renamed_block,
    "parameter's module": renamed_owner,
}  # fmt: skip
