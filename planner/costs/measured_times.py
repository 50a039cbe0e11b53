"""Measured times of a model's operators as a file: written by `profile --measure --format json`, read by `--costs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.costs.types import Profile
from planner.errors import UsageError
from planner.graph import Graph, Note, NoteLevel

_COLUMNS = ("forward_s", "backward_s", "weight_grad_s")


@dataclass(frozen=True, eq=False)
class MeasuredTimes:
    """Seconds of each operator of a model for one micro-batch size; arrays aligned with its nodes.

    Attributes:
        device: where they were measured.
        model: fingerprint of the model's structure, whatever its batch.
        micro_batch: samples.
        forward_s, backward_s, weight_grad_s: as in `Profile`.
    """

    device: str
    model: str
    micro_batch: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_grad_s: np.ndarray

    def instead_of(self, priced: Profile) -> Profile:
        """A profile with these times in place of its own, in proportion to its micro-batch and, where ranks share an
        operator, to their share of it; bytes and work stay."""
        scale = priced.micro_batch / self.micro_batch
        message = f"times were measured on {self.device} for {self.micro_batch} samples; other sizes are in proportion"
        return replace(
            priced,
            device=self.device,
            source="measured",
            forward_s=scale * self.forward_s,
            backward_s=scale * self.backward_s,
            weight_grad_s=scale * self.weight_grad_s,
            notes=(*priced.notes, Note(NoteLevel.INFO, "measured-times", message)),
            by_share=None,
        )


def times_document(graph: Graph, profile: Profile) -> dict[str, Any]:
    """The times of a profile by node, as plain data."""
    columns = {name: getattr(profile, name).tolist() for name in _COLUMNS}
    return {"device": profile.device, "model": _structure(graph), "micro_batch": profile.micro_batch, **columns}


def read_times(text: str, graph: Graph, name: str = "costs") -> MeasuredTimes:
    """Measured times from JSON, for the model that they were measured of.

    Raises:
        UsageError: no such file, or of another model.
    """
    hint = "write it with `shardplan profile MODEL --measure --format json`"
    try:
        times: Mapping[str, Any] = json.loads(text)["times"]
        columns = {column: np.array(times[column], dtype=np.float64) for column in _COLUMNS}
        found = MeasuredTimes(str(times["device"]), str(times["model"]), int(times["micro_batch"]), **columns)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("no measured times of a model's operators", where=name, hint=hint) from error
    if found.model != _structure(graph) or any(len(column) != len(graph.nodes) for column in columns.values()):
        raise UsageError(f"the times are of another model than {graph.name}", where=name, hint=hint)
    if found.micro_batch < 1 or not all(np.isfinite(c).all() and (c >= 0).all() for c in columns.values()):
        raise UsageError("times are finite and not negative, of at least one sample", where=name, hint=hint)
    return found


def _structure(graph: Graph) -> str:
    """What the times are bound to: operators by name, in order, whatever the batch."""
    import hashlib

    return hashlib.sha256("\n".join(f"{node.op} {node.key}" for node in graph.nodes).encode()).hexdigest()
