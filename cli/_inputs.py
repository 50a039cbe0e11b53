"""Inputs of a plan (model, hardware, options): recorded in its provenance, and found again by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import planner

from ._options import Options, beside, read_nodes, shown_name


def provenance_of(given: Options, *files: tuple[str, bytes]) -> Any:  # noqa: ANN401
    """The provenance of a plan that is made with these options, from further files with their content."""
    names = ("dims", "nodes", "changes", "stack", "costs")
    asked = {name: getattr(given, name) for name in names if getattr(given, name, None)}
    read = [planner.plans.FileRead.of(path, content) for path, content in files]
    return planner.default_provenance(given.model, given.hardware, **asked, files=read)


def own_inputs(plan: Any, given: Options) -> Options:  # noqa: ANN401
    """The options completed by the model and hardware that a plan names, at the sizes and with the options it records.

    What the plan records of a model or hardware is used where none is given, or one of the plan's name.

    Args:
        plan: the plan.
        given: `plan_file`, beside which files that the plan names are also looked for, and `against_options`.

    Raises:
        UsageError: the plan does not name its model or hardware, or they are files that are not found.
    """
    asked, inputs = plan.provenance, Options(**vars(given))
    known = {"model": planner.bundled_names, "hardware": planner.cluster_names}
    for name, bundled in known.items():
        path = getattr(given, name) or beside(given.plan_file, getattr(asked, name))
        setattr(inputs, name, path)
        lacking = not os.path.exists(path) or os.path.basename(getattr(asked, name)) != getattr(asked, name)
        if path and lacking and not getattr(given, name) and path not in bundled():
            words = f"the {name} of the plan, {path}, lies neither here nor beside it"
            raise planner.UsageError(words, where=shown_name(given.plan_file), hint=f"name its file by --{name}")
    if not (inputs.model and inputs.hardware):
        raise planner.UsageError("the plan names no model and hardware", hint="add --model and --hardware")
    if Path(inputs.model).name == asked.model:
        inputs.dims = given.dims or recorded_dims(plan)
        inputs.costs = given.costs or _found_beside(given, "costs", asked.costs)
    if Path(inputs.hardware).name == asked.hardware:
        inputs.changes = getattr(given, "changes", ()) or asked.changes
        bundled_stack = asked.stack in planner.hardware.stack_names()
        inputs.stack = given.stack or (
            asked.stack if bundled_stack else _found_beside(given, "stack", asked.stack) or ""
        )
        inputs.nodes = given.nodes or recorded_nodes(plan, inputs.hardware)
    return inputs


def _found_beside(given: Options, what: str, name: str) -> str | None:
    """Path of a file that a plan names, in its folder or the current one; None if it names none.

    Raises:
        UsageError: there is no such file.
    """
    if not name:
        return None
    path = beside(given.plan_file, name)
    if os.path.basename(name) != name or not os.path.isfile(path):
        words = f"the {what} of the plan, {name}, lies neither here nor beside it"
        raise planner.UsageError(words, where=shown_name(given.plan_file), hint=f"name its file by --{what}")
    return path


def recorded_dims(plan: Any) -> tuple[str, ...]:  # noqa: ANN401
    """The sizes that a plan's model was read at; of a bundled model in a file of before, the length of its samples."""
    sequence = plan.headline.sequence if plan.headline else 0
    if plan.provenance.dims or not sequence or plan.provenance.model not in planner.bundled_names():
        return tuple(plan.provenance.dims)
    default_length = planner.bundled_info(plan.provenance.model).seq
    return (f"seq={sequence}",) if default_length and default_length != sequence else ()


def recorded_nodes(plan: Any, hardware: str) -> int | str | None:  # noqa: ANN401
    """The nodes that a plan was made for; None for the profile's own.

    Files of before, and plans made in Python, may say their number alone. It counts unless the profile is a file, whose
    own number may have changed since.
    """
    if plan.provenance.nodes:
        return read_nodes(plan.provenance.nodes)
    by_number = hardware in planner.cluster_names() or not any(block.structure for block in plan.block_table)
    if by_number and planner.load_cluster(hardware).device_count != plan.hardware.device_count:
        return int(plan.hardware.nodes)
    return None
