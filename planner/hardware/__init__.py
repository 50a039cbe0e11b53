"""Devices, links, levels and mixed pools; what a transfer and a collective cost on them."""

from planner.hardware.collectives import COLUMNS, DIRECT, MEASURED, Terms, collective_s, collective_terms, send_terms
from planner.hardware.document import cluster_names, device_names, stack_names
from planner.hardware.foreign import (
    fitted_line,
    from_astra,
    from_calculon,
    from_nccl_tests,
    from_topology,
    kind_of,
    measured_row,
)
from planner.hardware.loader import (
    DEFAULT_STACK,
    lint,
    load_cluster,
    load_device,
    load_stack,
    profile_json_schema,
    warnings,
)
from planner.hardware.measuring import (
    MachineFigures,
    machine_name,
    measure_machine,
    measured_device,
    measured_profile_text,
)
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import (
    HEADROOM,
    Cluster,
    Collective,
    CollectiveFit,
    Curve,
    Device,
    Level,
    Stack,
    check_devices,
    neighbours,
    reserve_bytes,
    shown_bytes,
    with_headroom,
)
from planner.hardware.write import (
    ClusterSketch,
    LinkSketch,
    profile_template,
    profile_text,
    profile_yaml,
    read_link,
    resolved_profile,
    sized,
    sketch_text,
    with_measured,
)
