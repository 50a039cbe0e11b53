"""Instances of published partition problems: read, solved, written down, checked, explained."""

from planner.partitions.check import PartitionFinding, check_partition
from planner.partitions.families import FAMILIES, Instance, family_of, load_instance
from planner.partitions.files import dumps, is_partition_plan, json_schema, loads, read, write
from planner.partitions.report import (
    PartitionChange,
    partition_changes,
    partition_diff_report,
    partition_report,
)
from planner.partitions.run import partition
from planner.partitions.types import PartitionPlan

dump_partition, load_partition, read_partition, write_partition = dumps, loads, read, write
partition_schema, instance_family = json_schema, family_of

__all__ = [
    "FAMILIES",
    "Instance",
    "PartitionChange",
    "PartitionFinding",
    "PartitionPlan",
    "check_partition",
    "dump_partition",
    "dumps",
    "family_of",
    "instance_family",
    "is_partition_plan",
    "json_schema",
    "load_instance",
    "load_partition",
    "loads",
    "partition",
    "partition_changes",
    "partition_diff_report",
    "partition_report",
    "partition_schema",
    "read",
    "read_partition",
    "write",
    "write_partition",
]
