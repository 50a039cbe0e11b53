"""The whole job in one place: a model and a cluster in, a plan out.

>>> import planner
>>> graph = planner.load_graph("gpt2")
>>> cluster = planner.load_cluster("dgx-a100")
>>> plan = planner.plan(graph, cluster, planner.Job(global_batch=64))
>>> plan.micro_batches.global_batch
64
>>> plan.predictions.iteration_s >= plan.predictions.bound_s
True
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from planner.bundled import build_bundled, bundled_names
from planner.errors import JobError, ModelError, PlanError, Problem
from planner.graph import Graph
from planner.hardware.types import Cluster, check_devices
from planner.importers import graph_from_proto
from planner.importers import load_graph as import_file
from planner.importers.hugging_face import require_dims
from planner.interpreter import uncollected
from planner.planning import PlanTask, Progress, plan_for, plan_freely
from planner.plans import Plan, Provenance
from planner.registry import did_you_mean
from planner.schedules import OrderError, Schedule, custom_schedule, read_orders
from planner.space.jobs import settled
from planner.space.types import Job
from planner.systems.backends import ANY, Backend, able, backends_of, settled_for


@uncollected()
def load_graph(model: str | Path, *, dims: Mapping[str, int] | None = None) -> Graph:
    """Read a model file, or build a bundled model by name.

    Args:
        model: path of an ONNX file (or another known format), or a name from `bundled_names()`.
        dims: sizes of symbolic dimensions; for a bundled model `batch` and `seq`.

    Raises:
        ModelError: no such file or name, or a file that cannot be read far enough to price it.
        UsageError: a dimension that the model does not have.
    """
    sizes = dict(dims or {})
    if str(model) in bundled_names() and not os.path.exists(model):
        require_dims("bundled models have", sizes)
        built = build_bundled(str(model), batch=sizes.get("batch", 1), seq=sizes.get("seq"))
        return graph_from_proto(built, name=str(model))
    if not os.path.exists(model):
        near = did_you_mean(str(model), bundled_names())
        raise ModelError(
            "no such file or bundled model",
            where=str(model),
            hint=f"an ONNX file, a config.json or a bundled name; {near}",
        )
    return import_file(model, dims=sizes)


def plan(
    graph: Graph,
    cluster: Cluster,
    job: Job,
    *,
    orders: str | Path | Schedule | None = None,
    progress: Progress | None = None,
    strict_ops: bool = False,
    provenance: Provenance | None = None,
) -> Plan:
    """Find the fastest way to train a model on a cluster, and prove how good it is.

    The fastest is the one with the shortest simulated iteration, and the bound is of that time: of the longest chain of
    work and waits that any plan of the space has. The plan also carries the closed form of its time and the runners-up.

    Args:
        graph: the model (`load_graph`).
        cluster: the hardware (`load_cluster`).
        job: global batch, precision, limits; its `schedules` may be any of `schedule_names()`, with options.
        orders: a CSV or JSON file of orders of work (see `planner.schedules.read_orders`), whose numbers of stages and
            micro-batches hold, or a schedule of one's own: the best stages for it.
        progress: called with (done, total, best seconds so far, bound in seconds) while searching.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        JobError: a field of the job makes no sense, no micro-batch size divides the global batch, there are fewer
            devices than it names, or another contradiction in the job.
        PlanError: the orders deadlock (the message shows the cycle) or cannot run (it names the action).
        InfeasibleError: nothing fits; the message says what would.
        ModelError: the model's batch cannot be changed (the node is named) and does not divide the global batch, or
            `strict_ops` found a fallback.
    """
    own = _own_orders(orders)
    check_devices(cluster, job.devices)
    job = job if own is None else dataclasses.replace(job, schedules=(own.name,))
    settled(job, cluster)  # its errors come first
    if job.assume_dropout and not job.dropout:
        raise JobError("dropout masks are both assumed and left out", hint="set dropout, or not assume_dropout")
    backends, reason = _backends(graph, job, own)
    task = PlanTask(graph, cluster, settled_for(job, backends, cluster), own, progress, strict_ops, provenance)
    return plan_for(task, backends) if backends else plan_freely(task, reason)


def _backends(graph: Graph, job: Job, own: Schedule | None) -> tuple[tuple[Backend, ...], str]:
    """The frameworks of which one is to take the plan; none, and why, where none of the usual ones does what is asked.

    Raises:
        JobError: none that the user names does.
    """
    backends = backends_of(job)
    fitting, problem = able(job, backends, graph)
    if own is not None and backends:
        problem = Problem("no framework takes orders of one's own", hint=f"leave out --for, or say --for {ANY}")
    if problem is None:
        return fitting, ""
    if job.backends:
        raise JobError(problem.message, hint=problem.hint)
    return (), problem.message


def _own_orders(orders: str | Path | Schedule | None) -> Schedule | None:
    """Orders of one's own as a schedule.

    Raises:
        PlanError: they deadlock or cannot run.
    """
    if not isinstance(orders, (str, Path)):
        return orders
    work = read_orders(Path(orders))
    try:
        return custom_schedule(work, Path(orders).stem)
    except OrderError as error:  # with the exchanges that the file leaves out
        raise PlanError(error.problem.message, where=str(orders), hint=error.problem.hint) from error
