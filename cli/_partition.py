"""Partition problems: `shardplan plan` on an instance file, and other commands on partition plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

import planner

from ._options import Options, on_command_line, refuse_others
from ._report import best_so_far, progress_line, say_checked, say_document, say_where, show

DIFFERENT = 1
SHARED = frozenset({"model", "output", "form", "quiet"})
"""Options of `shardplan plan` that models and instances share."""
RENAMED = {"devices": "devices", "global_batch": "batch"}
"""Options for models that also apply to some instances, with their names there."""
OWN = (
    "objective", "solver", "time_limit", "contiguous", "cpus", "memory", "bandwidth", "machines", "cost", "layout",
    "transfers", "idle",
)  # fmt: skip
"""Options for instances only."""

_OPTIONS = (
    click.option("--objective", metavar="NAME", help="Instances: what to minimise, such as max-load, time-per-sample, "
                 "time-per-minibatch."),
    click.option("--solver", metavar="NAME", help="Instances: use only this solver. [default: auto]"),
    click.option("--time-limit", metavar="TIME", help="Instances: time limit of the search. [default: 60s]"),
    click.option("--contiguous/--non-contiguous", default=None, help="Operator graphs: whether each device must have a "
                 "contiguous pipeline stage. [default: contiguous]"),
    click.option("--cpus", type=click.IntRange(min=0), help="Operator graphs: CPUs in addition to accelerators."),
    click.option("--memory", metavar="SIZE", help="Instances: memory per device, such as 16GiB."),
    click.option("--bandwidth", metavar="RATE,...", help="Instances: bandwidth of links by level, innermost first."),
    click.option("--machines", metavar="AxB", help="PipeDream profiles: 4x2 for two servers with four devices each."),
    click.option("--cost", type=click.Choice(["released", "published"]), help="PipeDream profiles: cost model of "
                 "the released code or of the publication. "
                 "[default: released]"),
    click.option("--layout", type=click.Choice(["placed", "nested"]), help="PipeDream profiles: each stage on its own "
                 "devices, or all servers of a stage alike."),
    click.option("--transfers/--no-transfers", default=None, help="PipeDream profiles: whether moving activations "
                 "takes time."),
    click.option("--idle/--no-idle", default=None, help="PipeDream profiles: whether devices may stay idle."),
)  # fmt: skip


def partition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of partition problems."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def planned_as_partition(model: str) -> bool:
    """True if a file is to be planned as a partition problem; refuses options that do not apply.

    A file that is both a model and an instance is planned as a model, unless an option for instances is given.
    """
    given_options = on_command_line()
    instance_options = [name for name in OWN if name in given_options]
    family = planner.published.instance_family(model)
    if family is None or (family.model and not instance_options):
        if instance_options:
            raise planner.UsageError(
                f"--{instance_options[0].replace('_', '-')} is for instances of partition problems; {model} is none",
                hint="operator graphs, Piper instances and PipeDream profiles are",
            )
        return False
    refuse_others(
        {*SHARED, *OWN, *RENAMED, "hardware", "nodes"}, f"an instance of kind {family.title}",
        "options that say Instances in --help do, where the objective knows them",
    )  # fmt: skip
    if "nodes" in given_options and "hardware" not in given_options:
        hint = "or say --machines 8x2 --bandwidth 10GB/s,1.25GB/s instead of it"
        raise planner.UsageError("--nodes needs --hardware", hint=hint)
    return True


def plan_partition(given: Options) -> None:
    """Plan an instance, and print or write the plan."""
    family: Any = planner.published.instance_family(given.model)
    problem = {name: getattr(given, name) for name in OWN}
    problem |= {instance_name: getattr(given, option) for option, instance_name in RENAMED.items()}
    limit = problem.pop("time_limit") or "60s"
    solver = problem.pop("solver") or "auto"
    cluster = planner.load_cluster(given.hardware, nodes=given.nodes) if given.hardware else None
    unit = family.objective(problem["objective"]).unit
    with progress_line(given.quiet or given.form == "json", counted=False) as draw:

        def show_progress(solver: str, incumbent: float, bound: float) -> None:
            if draw:
                draw(solver=solver, found=best_so_far(incumbent, bound, unit))

        progress = show_progress if draw else None
        plan = planner.partition(
            given.model, solver=solver, time_limit=limit, cluster=cluster, progress=progress, **problem
        )
    if given.output:
        planner.write_partition(plan, given.output)
    if given.form == "json":
        say_document(planner.published.dump_partition(plan))
    elif not given.quiet:
        show(planner.published.partition_report(plan))
        say_where(given.output)


_OF_PARTITIONS = "a partition plan"


def check(text: bytes, given: Options) -> int:
    """`shardplan check` of a partition plan, given by the text of its file."""
    refuse_others({"plan_file", "model", "search_s", "form"}, _OF_PARTITIONS)
    plan, model = planner.published.load_partition(text, name=given.plan_file), given.model
    findings = planner.check_partition(plan, planner.load_instance(model) if model else None)
    goal = plan.objective
    ok = f"ok ({len(plan.parts)} parts, {plan.instance.nodes} nodes, {goal.name} {goal.value:.6g} {goal.unit})"
    ok += f", judged against {model}" if model else ""
    remarks = [] if model or findings else ["not judged against its instance: name it with --model"]
    return say_checked(given.form, {"plan": given.plan_file, "model": model}, findings, ok, remarks)


def explain(given: Options) -> None:
    """`shardplan explain` of a partition plan."""
    refuse_others({"plan_file", "form"}, _OF_PARTITIONS)
    plan = planner.read_partition(given.plan_file)
    show(planner.published.partition_report(plan), plan, given.form)


def diff(texts: tuple[bytes, bytes], given: Options) -> int:
    """`shardplan diff` of two partition plans, given by the texts of their files."""
    refuse_others({"old", "new", "form", "tolerance", "dims", "every_value"}, _OF_PARTITIONS)
    names = given.old, given.new
    if given.form == "github":
        raise planner.UsageError("--format github does not apply to a partition plan", hint="use markdown or json")
    for name, text in zip(names, texts, strict=True):
        if not planner.published.is_partition_plan(text):
            raise planner.PlanError(
                "is no partition plan, and the other one is", where=name, hint="compare two plans of the same kind"
            )
    old, new = (planner.published.load_partition(text, name=name) for name, text in zip(names, texts, strict=True))
    changes = planner.published.partition_changes(old, new, tolerance=given.tolerance)
    document = {"old": names[0], "new": names[1], "changes": changes}
    show(planner.published.partition_diff_report(old, new, changes), document, given.form)
    return DIFFERENT if changes else 0
