"""Devices, links, levels and mixed pools; what a transfer and a collective cost on them."""

from planner.hardware.catalog import cluster_names, device_names
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
from planner.hardware.loader import lint, load_cluster, load_device, profile_json_schema
from planner.hardware.reserve import FRAGMENTATION, HEADROOM, neighbours, reserve_bytes, shown_bytes, with_headroom
from planner.hardware.types import Cluster, Collective, CollectiveFit, Curve, Device, Level
from planner.hardware.write import profile_template, profile_text, profile_yaml, resolved_profile

__all__ = [
    "ALGORITHMS",
    "FRAGMENTATION",
    "HEADROOM",
    "Cluster",
    "Collective",
    "CollectiveFit",
    "Curve",
    "Device",
    "Level",
    "Terms",
    "cluster_names",
    "collective_s",
    "collective_terms",
    "contiguous_terms",
    "device_names",
    "lint",
    "load_cluster",
    "load_device",
    "moved_bytes",
    "neighbours",
    "profile_json_schema",
    "profile_template",
    "profile_text",
    "profile_yaml",
    "reserve_bytes",
    "resolved_profile",
    "send_terms",
    "shown_bytes",
    "strided_terms",
    "with_headroom",
]
