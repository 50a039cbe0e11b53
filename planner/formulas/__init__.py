"""Published closed forms and small exact problems of every system, by name.

A name begins with its system (`gpipe_bubble`, `byteps_shares`, `zero_state_bytes`) and says what it gives; the unit is
its last word where there is one. docs/formulas.md lists all of them. What has no closed form is simulated:
`planner.measure_schedule("zb-v", 8, 16, forward_s=1, backward_s=2, weight_grad_s=1)`.

>>> from planner import formulas
>>> formulas.gpipe_makespan_s(stages=4, micro_batches=8, forward_s=1, backward_s=2)
33.0
>>> formulas.names("seq1f1b")
('seq1f1b_bubble', 'seq1f1b_in_flight', 'seq1f1b_warm_up')
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.registry import did_you_mean

if TYPE_CHECKING:
    from planner.exchange.formulas import all_reduce_bytes as all_reduce_bytes
    from planner.exchange.formulas import balanced_loads as balanced_loads
    from planner.exchange.formulas import byteps_s as byteps_s
    from planner.exchange.formulas import byteps_shares as byteps_shares
    from planner.exchange.formulas import herring_s as herring_s
    from planner.exchange.formulas import in_network_bytes as in_network_bytes
    from planner.exchange.formulas import parallax_transfer as parallax_transfer
    from planner.exchange.formulas import pcie_uplink_bytes as pcie_uplink_bytes
    from planner.exchange.formulas import reduce_scatter_bytes as reduce_scatter_bytes
    from planner.exchange.formulas import ring_all_reduce_s as ring_all_reduce_s
    from planner.exchange.formulas import round_robin_loads as round_robin_loads
    from planner.exchange.formulas import separate_server_s as separate_server_s
    from planner.exchange.formulas import sharded_server_bytes as sharded_server_bytes
    from planner.exchange.formulas import touched_by as touched_by
    from planner.exchange.formulas import tree_all_reduce_bytes as tree_all_reduce_bytes
    from planner.exchange.formulas import wsp_period_s as wsp_period_s
    from planner.exchange.formulas import wsp_staleness as wsp_staleness
    from planner.exchange.formulas import zero_elements as zero_elements
    from planner.exchange.formulas import zero_parts as zero_parts
    from planner.exchange.formulas import zero_state_bytes as zero_state_bytes
    from planner.exchange.partitions import best_partitions as best_partitions
    from planner.exchange.partitions import fit_partitions as fit_partitions
    from planner.exchange.partitions import search_partitions as search_partitions
    from planner.exchange.partitions import whole_partitions as whole_partitions
    from planner.formulas.asynchronous import fill_drain_bound as fill_drain_bound
    from planner.formulas.asynchronous import fill_drain_utilisation as fill_drain_utilisation
    from planner.formulas.asynchronous import pipedream_2bw_stage_bytes as pipedream_2bw_stage_bytes
    from planner.formulas.asynchronous import pipedream_2bw_staleness as pipedream_2bw_staleness
    from planner.formulas.asynchronous import pipedream_2bw_time_s as pipedream_2bw_time_s
    from planner.formulas.asynchronous import pipedream_2bw_weight_versions as pipedream_2bw_weight_versions
    from planner.formulas.asynchronous import pipedream_mean_weight_copies as pipedream_mean_weight_copies
    from planner.formulas.asynchronous import pipedream_noam as pipedream_noam
    from planner.formulas.asynchronous import pipedream_stage_bytes as pipedream_stage_bytes
    from planner.formulas.asynchronous import pipedream_stage_s as pipedream_stage_s
    from planner.formulas.asynchronous import pipedream_staleness as pipedream_staleness
    from planner.formulas.asynchronous import pipedream_stashes as pipedream_stashes
    from planner.formulas.asynchronous import pipedream_transfer_s as pipedream_transfer_s
    from planner.formulas.asynchronous import pipedream_weight_versions as pipedream_weight_versions
    from planner.formulas.asynchronous import pipelined_backprop_delays as pipelined_backprop_delays
    from planner.formulas.asynchronous import pipelined_backprop_in_flight as pipelined_backprop_in_flight
    from planner.formulas.asynchronous import pipemare_backward_weight as pipemare_backward_weight
    from planner.formulas.asynchronous import pipemare_delays as pipemare_delays
    from planner.formulas.asynchronous import pipemare_flushed_utilisation as pipemare_flushed_utilisation
    from planner.formulas.asynchronous import pipemare_gain as pipemare_gain
    from planner.formulas.asynchronous import pipemare_learning_rate as pipemare_learning_rate
    from planner.formulas.asynchronous import pipemare_memory_factor as pipemare_memory_factor
    from planner.formulas.asynchronous import pipemare_stashed_copies as pipemare_stashed_copies
    from planner.formulas.asynchronous import pipemare_throughput as pipemare_throughput
    from planner.formulas.asynchronous import pipemare_velocity as pipemare_velocity
    from planner.formulas.asynchronous import pipemare_velocity_decay as pipemare_velocity_decay
    from planner.formulas.asynchronous import pipeoptim_horizons as pipeoptim_horizons
    from planner.formulas.asynchronous import predicted_weight as predicted_weight
    from planner.formulas.asynchronous import scaled_optimizer as scaled_optimizer
    from planner.formulas.asynchronous import spectrain_horizons as spectrain_horizons
    from planner.formulas.asynchronous import spike_compensation as spike_compensation
    from planner.formulas.asynchronous import weight_prediction_horizon as weight_prediction_horizon
    from planner.formulas.directions import chimera_bubble as chimera_bubble
    from planner.formulas.directions import chimera_critical_passes as chimera_critical_passes
    from planner.formulas.directions import chimera_in_flight as chimera_in_flight
    from planner.formulas.directions import chimera_iteration_s as chimera_iteration_s
    from planner.formulas.directions import chimera_makespan_s as chimera_makespan_s
    from planner.formulas.directions import chimera_sync_ranks as chimera_sync_ranks
    from planner.formulas.directions import chimera_weight_copies as chimera_weight_copies
    from planner.formulas.directions import dualpipe_bubble_s as dualpipe_bubble_s
    from planner.formulas.directions import dualpipe_in_flight as dualpipe_in_flight
    from planner.formulas.directions import dualpipe_weight_copies as dualpipe_weight_copies
    from planner.formulas.directions import gems_bubble as gems_bubble
    from planner.formulas.directions import gems_makespan_s as gems_makespan_s
    from planner.formulas.directions import gems_survey_bubble as gems_survey_bubble
    from planner.formulas.directions import hanayo_bubble as hanayo_bubble
    from planner.formulas.directions import hanayo_makespan as hanayo_makespan
    from planner.formulas.directions import zero_bubble_bubble_s as zero_bubble_bubble_s
    from planner.formulas.directions import zero_bubble_in_flight as zero_bubble_in_flight
    from planner.formulas.directions import zero_bubble_v_makespan as zero_bubble_v_makespan
    from planner.formulas.exchange import all_gather_bytes as all_gather_bytes
    from planner.formulas.exchange import all_to_all_bytes as all_to_all_bytes
    from planner.formulas.exchange import byteps_bound as byteps_bound
    from planner.formulas.exchange import byteps_cpu_share as byteps_cpu_share
    from planner.formulas.exchange import byteps_speedup as byteps_speedup
    from planner.formulas.exchange import rabenseifner_s as rabenseifner_s
    from planner.formulas.exchange import speedup as speedup
    from planner.formulas.hetpipe import hetpipe_allocation as hetpipe_allocation
    from planner.formulas.hetpipe import hetpipe_clock_may_advance as hetpipe_clock_may_advance
    from planner.formulas.hetpipe import hetpipe_in_flight as hetpipe_in_flight
    from planner.formulas.hetpipe import hetpipe_staleness as hetpipe_staleness
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_assignments as mesh_tensorflow_assignments
    from planner.formulas.mesh_tensorflow import (
        mesh_tensorflow_feed_forward_elements as mesh_tensorflow_feed_forward_elements,
    )
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_layout as mesh_tensorflow_layout
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_layout_and_mesh as mesh_tensorflow_layout_and_mesh
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_mesh_shapes as mesh_tensorflow_mesh_shapes
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_peak_bytes as mesh_tensorflow_peak_bytes
    from planner.formulas.mesh_tensorflow import mesh_tensorflow_schedule as mesh_tensorflow_schedule
    from planner.formulas.mesh_tensorflow import named_program as named_program
    from planner.formulas.models import bert_embedding_parameters as bert_embedding_parameters
    from planner.formulas.models import bert_parameters as bert_parameters
    from planner.formulas.models import gpt_embedding_parameters as gpt_embedding_parameters
    from planner.formulas.models import gpt_parameters as gpt_parameters
    from planner.formulas.models import largest_stage_parameters as largest_stage_parameters
    from planner.formulas.models import transformer_block_parameters as transformer_block_parameters
    from planner.formulas.partitions import alpa_partition as alpa_partition
    from planner.formulas.partitions import hetpipe_partition as hetpipe_partition
    from planner.formulas.partitions import max_load_partition as max_load_partition
    from planner.formulas.partitions import pipedream_partition as pipedream_partition
    from planner.formulas.pipelines import bpipe_in_flight as bpipe_in_flight
    from planner.formulas.pipelines import gpipe_activation_bytes as gpipe_activation_bytes
    from planner.formulas.pipelines import gpipe_bubble as gpipe_bubble
    from planner.formulas.pipelines import gpipe_in_flight as gpipe_in_flight
    from planner.formulas.pipelines import gpipe_makespan_s as gpipe_makespan_s
    from planner.formulas.pipelines import gpipe_speedup as gpipe_speedup
    from planner.formulas.pipelines import interleaved_bubble as interleaved_bubble
    from planner.formulas.pipelines import interleaved_bubble_over_ideal as interleaved_bubble_over_ideal
    from planner.formulas.pipelines import interleaved_in_flight as interleaved_in_flight
    from planner.formulas.pipelines import interleaved_makespan_s as interleaved_makespan_s
    from planner.formulas.pipelines import interleaved_memory_factor as interleaved_memory_factor
    from planner.formulas.pipelines import interleaved_warm_up as interleaved_warm_up
    from planner.formulas.pipelines import one_f_one_b_bubble as one_f_one_b_bubble
    from planner.formulas.pipelines import one_f_one_b_in_flight as one_f_one_b_in_flight
    from planner.formulas.pipelines import one_f_one_b_makespan_s as one_f_one_b_makespan_s
    from planner.formulas.pipelines import pipeline_bubble as pipeline_bubble
    from planner.formulas.pipelines import pipeline_bubble_over_ideal as pipeline_bubble_over_ideal
    from planner.formulas.pipelines import pipeline_makespan_s as pipeline_makespan_s
    from planner.formulas.pipelines import pipeline_memory as pipeline_memory
    from planner.formulas.pipelines import recompute_overhead as recompute_overhead
    from planner.formulas.pipelines import seq1f1b_bubble as seq1f1b_bubble
    from planner.formulas.pipelines import seq1f1b_in_flight as seq1f1b_in_flight
    from planner.formulas.pipelines import seq1f1b_lengths as seq1f1b_lengths
    from planner.formulas.pipelines import seq1f1b_warm_up as seq1f1b_warm_up
    from planner.formulas.sharding import alpa_collective_cost as alpa_collective_cost
    from planner.formulas.sharding import alpa_submeshes as alpa_submeshes
    from planner.formulas.sharding import autoddl_linear_elements as autoddl_linear_elements
    from planner.formulas.sharding import core_years as core_years
    from planner.formulas.sharding import gshard_all_to_all_bytes as gshard_all_to_all_bytes
    from planner.formulas.sharding import gshard_all_to_all_growth as gshard_all_to_all_growth
    from planner.formulas.sharding import gshard_capacity as gshard_capacity
    from planner.formulas.sharding import gshard_expert_parameters as gshard_expert_parameters
    from planner.formulas.sharding import tensor_parallel_layer_elements as tensor_parallel_layer_elements
    from planner.formulas.sharding import tofu_operator_bytes as tofu_operator_bytes
    from planner.formulas.sharding import tofu_recursion_is_optimal as tofu_recursion_is_optimal
    from planner.formulas.sharding import tofu_rnn_bytes as tofu_rnn_bytes
    from planner.formulas.sharding import tofu_total_bytes as tofu_total_bytes
    from planner.formulas.stages import alpa_latency_s as alpa_latency_s
    from planner.formulas.stages import bapipe_bandwidth_byte_per_s as bapipe_bandwidth_byte_per_s
    from planner.formulas.stages import bapipe_features as bapipe_features
    from planner.formulas.stages import bapipe_makespan_s as bapipe_makespan_s
    from planner.formulas.stages import bapipe_schedule as bapipe_schedule
    from planner.formulas.stages import bapipe_weight_bytes as bapipe_weight_bytes
    from planner.formulas.stages import contiguous_sets as contiguous_sets
    from planner.formulas.stages import dapple_in_flight as dapple_in_flight
    from planner.formulas.stages import dapple_latency_s as dapple_latency_s
    from planner.formulas.stages import dapple_placement as dapple_placement
    from planner.formulas.stages import dapple_released_latency_s as dapple_released_latency_s
    from planner.formulas.stages import max_load_bound as max_load_bound
    from planner.formulas.stages import piper_in_flight as piper_in_flight
    from planner.formulas.stages import piper_stage_s as piper_stage_s
    from planner.formulas.stages import piper_time_per_sample_s as piper_time_per_sample_s

_PIPELINES, _DIRECTIONS = "planner.formulas.pipelines", "planner.formulas.directions"
_ASYNCHRONOUS, _STAGES = "planner.formulas.asynchronous", "planner.formulas.stages"
_PARTITIONS, _SHARDING = "planner.formulas.partitions", "planner.formulas.sharding"
_EXCHANGE, _SYNC, _COUNTS = "planner.formulas.exchange", "planner.exchange.formulas", "planner.exchange.partitions"
_MODELS, _HETPIPE = "planner.formulas.models", "planner.formulas.hetpipe"
_MESH = "planner.formulas.mesh_tensorflow"

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Pipelines that fill and drain": {
        _PIPELINES: (
            "pipeline_makespan_s", "pipeline_bubble", "pipeline_bubble_over_ideal", "pipeline_memory",
            "recompute_overhead",
        ),
    },
    "GPipe": {
        _PIPELINES: (
            "gpipe_makespan_s", "gpipe_bubble", "gpipe_speedup", "gpipe_in_flight", "gpipe_activation_bytes",
        ),
    },
    "1F1B with a flush": {
        _PIPELINES: ("one_f_one_b_makespan_s", "one_f_one_b_bubble", "one_f_one_b_in_flight"),
    },
    "Interleaved 1F1B": {
        _PIPELINES: (
            "interleaved_makespan_s", "interleaved_bubble", "interleaved_bubble_over_ideal", "interleaved_warm_up",
            "interleaved_in_flight", "interleaved_memory_factor",
        ),
    },
    "Chimera": {
        _DIRECTIONS: (
            "chimera_makespan_s", "chimera_bubble", "chimera_in_flight", "chimera_weight_copies",
            "chimera_critical_passes", "chimera_iteration_s", "chimera_sync_ranks",
        ),
    },
    "GEMS": {_DIRECTIONS: ("gems_makespan_s", "gems_bubble", "gems_survey_bubble")},
    "BaPipe": {
        _STAGES: (
            "bapipe_makespan_s", "bapipe_features", "bapipe_weight_bytes", "bapipe_bandwidth_byte_per_s",
            "bapipe_schedule",
        ),
    },
    "PipeDream": {
        _ASYNCHRONOUS: (
            "pipedream_weight_versions", "pipedream_staleness", "pipedream_mean_weight_copies", "pipedream_noam",
            "pipedream_stashes", "pipedream_stage_bytes", "pipedream_stage_s", "pipedream_transfer_s",
        ),
        _PARTITIONS: ("pipedream_partition",),
    },
    "PipeDream-2BW": {
        _ASYNCHRONOUS: (
            "pipedream_2bw_weight_versions", "pipedream_2bw_staleness", "pipedream_2bw_stage_bytes",
            "pipedream_2bw_time_s",
        ),
    },
    "PipeMare": {
        _ASYNCHRONOUS: (
            "pipemare_delays", "pipemare_stashed_copies", "pipemare_flushed_utilisation", "pipemare_gain",
            "pipemare_learning_rate", "pipemare_velocity_decay", "pipemare_velocity", "pipemare_backward_weight",
            "pipemare_throughput", "pipemare_memory_factor",
        ),
    },
    "Pipelined Backpropagation": {
        _ASYNCHRONOUS: (
            "pipelined_backprop_delays", "pipelined_backprop_in_flight", "fill_drain_utilisation", "fill_drain_bound",
            "spike_compensation", "weight_prediction_horizon", "predicted_weight", "scaled_optimizer",
        ),
    },
    "SpecTrain and PipeOptim": {_ASYNCHRONOUS: ("spectrain_horizons", "pipeoptim_horizons")},
    "HetPipe": {
        _HETPIPE: (
            "hetpipe_staleness", "hetpipe_in_flight", "hetpipe_allocation", "hetpipe_clock_may_advance",
        ),
        _PARTITIONS: ("hetpipe_partition",),
        _SYNC: ("wsp_staleness", "wsp_period_s"),
    },
    "Tofu": {
        _SHARDING: ("tofu_operator_bytes", "tofu_total_bytes", "tofu_recursion_is_optimal", "tofu_rnn_bytes"),
    },
    "GShard": {
        _SHARDING: (
            "gshard_expert_parameters", "gshard_capacity", "gshard_all_to_all_bytes", "gshard_all_to_all_growth",
            "core_years",
        ),
    },
    "Mesh-TensorFlow": {
        _MESH: (
            "mesh_tensorflow_feed_forward_elements", "mesh_tensorflow_layout", "mesh_tensorflow_layout_and_mesh",
            "mesh_tensorflow_peak_bytes",
            "mesh_tensorflow_schedule", "mesh_tensorflow_assignments", "mesh_tensorflow_mesh_shapes", "named_program",
        ),
    },
    "Collectives": {
        _SYNC: (
            "all_reduce_bytes", "reduce_scatter_bytes", "tree_all_reduce_bytes", "in_network_bytes",
            "ring_all_reduce_s", "sharded_server_bytes", "separate_server_s",
        ),
        _EXCHANGE: ("all_gather_bytes", "all_to_all_bytes", "rabenseifner_s", "speedup"),
    },
    "BytePS": {
        _SYNC: ("byteps_shares", "byteps_s", "pcie_uplink_bytes"),
        _EXCHANGE: ("byteps_cpu_share", "byteps_speedup", "byteps_bound"),
    },
    "Herring": {_SYNC: ("herring_s", "round_robin_loads", "balanced_loads")},
    "Parallax": {
        _SYNC: ("parallax_transfer", "touched_by"),
        _COUNTS: ("best_partitions", "whole_partitions", "fit_partitions", "search_partitions"),
    },
    "DAPPLE": {_STAGES: ("dapple_latency_s", "dapple_released_latency_s", "dapple_in_flight", "dapple_placement")},
    "Zero bubble": {_DIRECTIONS: ("zero_bubble_bubble_s", "zero_bubble_v_makespan", "zero_bubble_in_flight")},
    "Hanayo": {_DIRECTIONS: ("hanayo_makespan", "hanayo_bubble")},
    "BPipe": {_PIPELINES: ("bpipe_in_flight",)},
    "DualPipe": {_DIRECTIONS: ("dualpipe_bubble_s", "dualpipe_in_flight", "dualpipe_weight_copies")},
    "Seq1F1B": {_PIPELINES: ("seq1f1b_bubble", "seq1f1b_in_flight", "seq1f1b_warm_up", "seq1f1b_lengths")},
    "Alpa": {
        _STAGES: ("alpa_latency_s",),
        _PARTITIONS: ("alpa_partition",),
        _SHARDING: ("alpa_collective_cost", "alpa_submeshes"),
    },
    "ZeRO and FSDP": {_SYNC: ("zero_state_bytes", "zero_parts", "zero_elements")},
    "AutoDDL and tensor parallelism": {_SHARDING: ("autoddl_linear_elements", "tensor_parallel_layer_elements")},
    "Piper": {_STAGES: ("piper_stage_s", "piper_time_per_sample_s", "piper_in_flight", "contiguous_sets")},
    "Acyclic partition of a DAG (Archer et al.)": {_STAGES: ("max_load_bound",), _PARTITIONS: ("max_load_partition",)},
    "Sizes of models": {
        _MODELS: (
            "transformer_block_parameters", "bert_embedding_parameters", "bert_parameters", "gpt_embedding_parameters",
            "gpt_parameters", "largest_stage_parameters",
        ),
    },
}  # fmt: skip
"""Names by system and by the module that has them."""

_MODULE_OF = {name: module for modules in GROUPS.values() for module, own in modules.items() for name in own}

__all__ = ["GROUPS", "names", *sorted(_MODULE_OF)]


def names(begin: str = "") -> tuple[str, ...]:
    """Names of all formulas that begin so, sorted."""
    return tuple(sorted(name for name in _MODULE_OF if name.startswith(begin)))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'planner.formulas' has no attribute {name!r}; {_hint(name)}")
    found: Callable[..., Any] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted(__all__)


def _hint(name: str) -> str:
    """The names of the same system, or the closest ones."""
    own = names(name.split("_")[0] + "_")
    return f"known of {name.split('_')[0]}: {', '.join(own)}" if own else did_you_mean(name, _MODULE_OF)
