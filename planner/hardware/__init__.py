"""Devices, links, levels and mixed pools; what a transfer and a collective cost on them."""

from planner.hardware.catalog import cluster_names, device_names, stack_names
from planner.hardware.collectives import (
    ALGORITHMS,
    Terms,
    collective_s,
    collective_terms,
    contiguous_terms,
    moved_bytes,
    send_terms,
    strided_terms,
)
from planner.hardware.loader import DEFAULT_STACK, lint, load_cluster, load_device, load_stack, profile_json_schema
from planner.hardware.measure import measured_device
from planner.hardware.types import Cluster, Collective, CollectiveFit, Curve, Device, Level, Stack
from planner.hardware.write import profile_template, profile_text, profile_yaml, resolved_profile

__all__ = [
    "ALGORITHMS",
    "DEFAULT_STACK",
    "Cluster",
    "Collective",
    "CollectiveFit",
    "Curve",
    "Device",
    "Level",
    "Stack",
    "Terms",
    "cluster_names",
    "collective_s",
    "collective_terms",
    "contiguous_terms",
    "device_names",
    "lint",
    "load_cluster",
    "load_device",
    "load_stack",
    "measured_device",
    "moved_bytes",
    "profile_json_schema",
    "profile_template",
    "profile_text",
    "profile_yaml",
    "resolved_profile",
    "send_terms",
    "stack_names",
    "strided_terms",
]
