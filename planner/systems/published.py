"""Published systems that are data alone: an existing proposer, its limits, and what a backend must know.

Systems with a planner of their own stand in files of their own.
"""

from planner.solvers.layouts import Layouts
from planner.space.job_options import LIMITS, PRICED
from planner.space.subspaces import Limits, Recompute
from planner.systems import System, register
from planner.systems.proposals import by_exchange, by_layouts, by_search

PUBLISHED = (
    # Plain synchronous data parallelism: what every published system compares itself with.
    System(
        key="data-parallel",
        title="Data parallelism",
        solver=by_exchange,
        source="common practice",
        exchange="all-reduce",
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch after an all-reduce",
        },
        tunable={"exchange": "all-reduce"},
    ),
    # GPipe: balanced cells, all forwards, then all backwards, activations recomputed.
    System(
        key="gpipe",
        title="GPipe",
        solver=by_search,
        source="Huang et al., NeurIPS 2019",
        limits=Limits(schedules=("gpipe",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, gradients of all micro-batches summed",
            "batch_norm": "statistics per micro-batch in training, moving averages over the mini-batch",
        },
    ),
    # PipeDream-Flush: 1F1B, drained at every mini-batch.
    System(
        key="1f1b",
        title="PipeDream-Flush (1F1B)",
        solver=by_search,
        source="Narayanan et al., ICML 2021 (PipeDream-2BW), section 3; SC 2021",
        limits=Limits(schedules=("1f1b",), recompute=(Recompute.BLOCKS,), fewest_stages=2),
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch, after the flush",
        },
    ),
    # Chimera: pipelines in both directions, W x D workers.
    System(
        key="chimera",
        title="Chimera",
        solver=by_search,
        source="Li and Hoefler, SC 2021",
        limits=Limits(schedules=("chimera",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "1, in 2f copies of every stage",
            "update": "once per mini-batch after an all-reduce among the 2fW workers of a stage",
            "exchange": "launched eagerly where a bubble follows, at the end elsewhere",
        },
    ),
    # PipeDream-2BW: width, depth, micro-batch and recomputation; two weight versions, no flush.
    System(
        key="pipedream-2bw",
        title="PipeDream-2BW",
        solver=by_search,
        source="Narayanan et al., ICML 2021",
        limits=Limits(schedules=("pipedream-2bw",), recompute=(Recompute.BLOCKS, Recompute.STAGES), fewest_stages=2),
        backend={
            "weight_versions": "2 (the one being used and the one being made), swapped once per mini-batch",
            "update": "once per mini-batch of m >= d micro-batches",
            "learning_rate": "as in synchronous training; the delay is constant",
        },
    ),
    # PipeMare: one stage per device, asynchronous, no stashing.
    System(
        key="pipemare",
        title="PipeMare",
        solver=by_search,
        source="Yang et al., MLSys 2021",
        limits=Limits(schedules=("pipemare",), fewest_stages=2, stage_a_device=True, copies=False),
        backend={
            "weight_versions": "1, and one buffer as large as the weights for T2",
            "T1": "learning rate divided by tau_i^p, p annealed from 1 to 0",
            "T2": (
                "backward weights u = w - tau delta with delta a running mean of weight changes, gamma = 0.135^(1/tau)"
            ),
            "T3": "the first epochs synchronous",
        },
    ),
    # Pipelined backpropagation: an update after every sample, never drained.
    System(
        key="pipelined-backprop",
        title="Pipelined Backpropagation",
        solver=by_search,
        source="Kosson et al., MLSys 2021; Chen et al. 2018 (SpecTrain)",
        limits=Limits(
            schedules=("pipelined-backprop",), fewest_stages=2, stage_a_device=True, micro_batches=(1,), copies=False
        ),
        backend={
            "weight_versions": "1, and a predicted copy while it is used",
            "update": "after every sample",
            "spike_compensation": "w <- w - eta (a v + b g), a = m^D, b = (1 - m^D)/(1 - m)",
            "weight_prediction": "forward with w - eta T v, T = D (SpecTrain: both passes)",
            "optimizer": "m' = m^(N'/N), eta' = eta (1 - m') N' / ((1 - m) N)",
        },
    ),
    # BytePS: data parallelism with summation services on all machines.
    System(
        key="byteps",
        title="BytePS",
        solver=by_exchange,
        source="Jiang et al., OSDI 2020",
        exchange="byteps",
        backend={
            "weight_versions": "1",
            "server_placement": (
                "a summation service on the processors of every machine, CPU machines more: "
                "2(n-1)/(n^2+kn-2k) of the bytes each"
            ),
            "update": "on the devices: gradients are pulled, not weights",
        },
        tunable={"cpu_machines": "0", "inside": "auto", "efficiency": "1"},
    ),
    # Herring: data parallelism with balanced fusion buffers on servers beside the devices.
    System(
        key="herring",
        title="Herring",
        solver=by_exchange,
        source="Thangakrishnan et al., SC 2020",
        exchange="herring",
        backend={
            "weight_versions": "1",
            "server_placement": "one on every machine, the same share of every fusion buffer",
            "fusion_buffer": "25 MB",
        },
        tunable={"efficiency": "1", "buffer_bytes": "25e6"},
    ),
    # Parallax: sparse variables on parameter servers, dense ones by all-reduce.
    System(
        key="parallax",
        title="Parallax",
        solver=by_exchange,
        source="Kim et al., EuroSys 2019",
        exchange="parallax",
        backend={
            "weight_versions": "1",
            "server_placement": "partitions of sparse variables on all machines, largest first to the least loaded",
            "partitions": "as many as machines; measured and fitted (c + b/P + a(P-1)) in a real run",
        },
        tunable={"partitions": "0", "dense_from": "1"},
    ),
    # Mesh-TensorFlow: named dimensions on mesh dimensions.
    System(
        key="mesh-tensorflow",
        title="Mesh-TensorFlow",
        solver=by_layouts,
        source="Shazeer et al., NeurIPS 2018; its layout optimizer",
        layouts=Layouts("mesh-tensorflow", within_memory="mesh-tensorflow-memory", line=True, wide=True),
        backend={
            "weight_versions": "1",
            "layout": "the same named dimension is cut alike in every tensor",
        },
    ),
    # Tofu: every operator cut along dimensions found by recursion, on the devices of one machine.
    System(
        key="tofu",
        title="Tofu",
        solver=by_layouts,
        source="Wang et al., EuroSys 2019",
        layouts=Layouts("tofu", one_node=True, chain=True),
        backend={
            "weight_versions": "1",
            "layouts": (
                "one dimension of every tensor, or several by recursion; weights and optimizer state "
                "sharded like their gradients"
            ),
        },
    ),
    # GShard: layouts of a few tensors annotated, the rest completed; experts over devices.
    System(
        key="gshard",
        title="GShard",
        solver=by_layouts,
        source="Lepikhin et al., ICLR 2021",
        layouts=Layouts("gshard", within_memory="leanest"),
        backend={
            "weight_versions": "1",
            "expert_capacity": (
                "top-2 gating, C = 2 S / E tokens for an expert and a group of S tokens, times a capacity"
                " factor; tokens above it are passed on by the residual path"
            ),
            "auxiliary_loss": "balances the load of the experts",
        },
    ),
    # The best of all of them: this planner's own search, and every named system beside it.
    System(
        key="auto",
        title="auto",
        solver=by_search,
        source="this planner",
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"},
        best_of_all=True,
        backend={
            "plan": "`shardplan plan --system auto` writes it, as `compare --write-plans` does for every row",
        },
    ),
)

for system in PUBLISHED:
    register(system)
