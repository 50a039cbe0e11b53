"""Devices, links, levels and mixed pools; what a transfer and a collective cost on them."""

from planner.hardware.catalog import cluster_names, device_names, stack_names
from planner.hardware.collectives import (
    ALGORITHMS,
    DIRECT,
    MEASURED,
    Terms,
    collective_s,
    collective_terms,
    send_terms,
)
from planner.hardware.foreign import from_astra, from_calculon, from_nccl_tests, from_topology, kind_of
from planner.hardware.loader import (
    DEFAULT_STACK,
    lint,
    load_cluster,
    load_device,
    load_stack,
    profile_json_schema,
    warnings,
)
from planner.hardware.measuring import machine_name, measure_machine, measured_profile_text
from planner.hardware.reserve import HEADROOM, neighbours, reserve_bytes, shown_bytes, with_headroom
from planner.hardware.sketch import ClusterSketch, LinkSketch, read_link, sized
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Cluster, Collective, CollectiveFit, Curve, Device, Level, Stack
from planner.hardware.write import (
    profile_template,
    profile_text,
    profile_yaml,
    resolved_profile,
    sketch_text,
    with_measured,
)

__all__ = [
    "ALGORITHMS",
    "DEFAULT_STACK",
    "DIRECT",
    "HEADROOM",
    "MEASURED",
    "Cluster",
    "ClusterSketch",
    "Collective",
    "CollectiveFit",
    "Curve",
    "Device",
    "Level",
    "LinkSketch",
    "Stack",
    "Terms",
    "cluster_names",
    "collective_s",
    "collective_terms",
    "device_names",
    "from_astra",
    "from_calculon",
    "from_nccl_tests",
    "from_topology",
    "kind_of",
    "lint",
    "load_cluster",
    "load_device",
    "load_stack",
    "machine_name",
    "measure_machine",
    "measured_profile_text",
    "moved_bytes",
    "neighbours",
    "profile_json_schema",
    "profile_template",
    "profile_text",
    "profile_yaml",
    "read_link",
    "reserve_bytes",
    "resolved_profile",
    "send_terms",
    "shown_bytes",
    "sized",
    "sketch_text",
    "stack_names",
    "warnings",
    "with_headroom",
    "with_measured",
]
