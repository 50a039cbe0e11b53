"""What a job leaves to the machine is settled before anything is priced: the precision where none is asked for."""

from __future__ import annotations

import dataclasses

from planner.costs.precision import Precision, best_precision, precision, supported_precision
from planner.hardware.types import Cluster
from planner.space.jobs import check_job
from planner.space.meshes import device_types
from planner.space.types import Job


def settled(job: Job, cluster: Cluster) -> Job:
    """The job with a precision: its own, or the best that all devices it may use compute in.

    Raises:
        JobError: a field of the job makes no sense, or a device that it may use does not compute in its precision.
        UsageError: no precision has that name.
    """
    check_job(job)
    used = [cluster.devices[t] for t in device_types(cluster, job)]
    chosen = job.precision or best_precision(used)
    for device in used:
        supported_precision(chosen, device)
    return dataclasses.replace(job, precision=chosen)


def precision_of(job: Job, cluster: Cluster) -> Precision:
    """The precision of a job, settled or not."""
    return precision(job.precision or settled(job, cluster).precision)
