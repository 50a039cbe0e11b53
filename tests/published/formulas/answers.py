"""The reference cases answered through `import planner` alone: one function a system, from a case's name and input."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import planner
from planner import formulas
from tests.shared_data import shared_path

Answers = Mapping[str, Any]
Answer = Callable[[str, Answers], Answers]


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)]


def measure(schedule: str, stages: int, micro_batches: int, f: Any, b: Any, **more: Any) -> planner.play.Measurement:
    return planner.measure_schedule(schedule, stages, micro_batches, forward_s=f, backward_s=b, **more)


def split(schedule: str, stages: int, micro_batches: int) -> planner.play.Measurement:
    return measure(schedule, stages, micro_batches, 1, 2, weight_grad_s=1)


def flush(schedule: str) -> Answer:
    def answer(_: str, given: Answers) -> Answers:
        options = ":recompute=true" if "R" in given else ""
        found = measure(schedule + options, given["D"], given["M"], given["F"], given["B"], recompute_s=given.get("R"))
        return {"makespan": found.makespan_s, "bubble": found.bubble, "inflight": found.held}

    return answer


def interleaved(_: str, given: Answers) -> Answers:
    p, v = given["p"], given["v"]
    found = measure(f"interleaved:chunks={v}", p * v, given["m"], given["F"] / v, given["B"] / v)
    return {
        "makespan": found.makespan_s,
        "bubble": found.bubble,
        "bubble_over_ideal": found.bubble_over_ideal,
        "inflight_stage_equiv": found.held_micro_batches,
        "stage0_factor": formulas.interleaved_in_flight(p, 4 * p, chunks=v)[0] / p,
    }


def chimera(name: str, given: Answers) -> Answers:
    if name == "BERT-48 total params":
        return {"params": planner.bundled_info("bert-48").parameters}
    if name != "schedule":
        model = "bert" if name.startswith("BERT") else "gpt"
        sizes = {d: formulas.largest_stage_parameters(given["layers"], given["hidden"], d, model) for d in given["D"]}
        return {str(d): size for d, size in sizes.items()}
    equal, double = (measure(f"chimera:pairs={given['f']}", given["D"], given["N"], given["F"], b) for b in given["B"])
    return {
        "bubble_F_eq_B": equal.bubble,
        "makespan_F_eq_B": equal.makespan_s,
        "makespan_B_2F": double.makespan_s,
        "bubble_B_2F": double.bubble,
        "inflight": equal.held,
    }


def gems(_: str, given: Answers) -> Answers:
    found = measure("gems", given["D"], given["M"], 1, 1)
    survey = formulas.gems_survey_bubble(given["D"])
    return {"makespan": found.makespan_s, "bubble": found.bubble, "survey": survey, "inflight": found.held}


def bapipe(name: str, given: Answers) -> Answers:
    sizes = (given["N"], given["M"], given["F"], given["B"])
    if name.startswith("FBP"):
        strict, streamed = measure("bapipe-fbp", *sizes), measure("bapipe-fbp:fill_overlap=true", *sizes)
        published = formulas.bapipe_features("fbp", given["N"])
        return {
            "makespan": strict.makespan_s,
            "paper_form": streamed.makespan_s,
            "features": strict.held,
            "features_paper": published,
        }
    waiting, overlapped = (measure(f"bapipe-{s}", *sizes, receive_s=given["SR"]) for s in ("sno", "so"))
    return {
        "as_": measure("bapipe-as", *sizes).makespan_s,
        "sno": waiting.makespan_s,
        "so": overlapped.makespan_s,
        "features_as_sno": waiting.held,
        "features_so_exact": overlapped.held,
        "features_so_bound": formulas.bapipe_features("so", given["N"]),
    }


def pipedream(name: str, given: Answers) -> Answers:
    if name.startswith("toy"):
        found = formulas.pipedream_partition(
            given["time"],
            given["weight"],
            given["act"],
            given["workers"],
            given["bandwidth"],
            "published" if "paper" in name else "released",
        )
        return {
            "bottleneck": found.bottleneck_s,
            "boundaries": found.boundaries,
            "replicas": found.replicas,
            "data_parallel": found.data_parallel_s,
        }
    played = measure("pipedream", given["D"], given["D"], 1, 2)
    copies = formulas.pipedream_weight_copies(given["D"], given["D"])
    return {"staleness": played.staleness, "versions": played.weight_versions, "mean_weight_copies": copies}


def pipedream_2bw(name: str, given: Answers) -> Answers:
    if name.startswith("model size"):
        return {"block_params": given["layers"] * formulas.transformer_block_parameters(given["hidden"])}
    if name.startswith("worst stage"):
        found = {}
        for (key, schedule), again in itertools.product(
            (("2bw", "2bw"), ("flush", "flush"), ("gpipe", "gpipe"), ("dream", "dream")), (False, True)
        ):
            found[key + "+R" * again] = formulas.pipedream_2bw_stage_bytes(
                given["W"],
                given["A_total"],
                given["A_in"],
                given["d"],
                schedule=schedule,
                micro_batches=given["m_gpipe"] if schedule == "gpipe" else None,
                recompute=again,
            )
        return found
    # The rule is uniform; the staleness by stage in the case is that of reading what is newest. Both schedules exist.
    uniform = measure("pipedream-2bw", given["D"], given["m"], 1, 2)
    (old,) = set(uniform.staleness)
    newest = measure("pipedream-2bw:uniform=false", given["D"], given["m"], 1, 2)
    return {
        "max_versions": max(uniform.weight_versions),
        "max_staleness_per_stage": newest.staleness,
        "rule": f"W(t+1)=W(t)-nu*grad(W(t-{old})) uniformly",
    }


def pipemare(name: str, given: Answers) -> Answers:
    if name.startswith("T1"):
        rates = [formulas.pipemare_learning_rate(given["base"], given["tau"], k, given["K"]) for k in given["k"]]
        return {"alpha": rates}
    if name.startswith("T2"):
        return {"gamma": [formulas.pipemare_velocity_decay(tau) for tau in given["tau"]]}
    p, n = given["P"], given["N"]
    if name.startswith("T3"):
        epochs = re.search(r"(\d+) of (\d+) epochs", name)
        assert epochs
        return {"rel": formulas.pipemare_throughput(p, n, int(epochs[1]) / int(epochs[2]))}
    played = measure("pipemare", p, n, 1, 1)
    return {
        "tau": played.mean_staleness,
        "pipedream_extra_weight_copies": sum(formulas.pipemare_delays(p, n)) / p,
        "gpipe_util": 1 - formulas.gpipe_bubble(p, n),
        "util_gain": measure("gpipe", p, n, 1, 1).iteration_s / played.iteration_s,
    }


def pipelined_backprop(name: str, given: Answers) -> Answers:
    if name.startswith("SC_D"):
        found = [formulas.spike_compensation(given["m"], delay) for delay in given["D"]]
        return {"a": [a for a, _ in found], "b": [b for _, b in found]}
    if name.startswith("small-batch"):
        sizes = re.search(r"N=(\d+) -> (\d+)", name)
        assert sizes
        momentum, rate = formulas.scaled_optimizer(given["m"], given["eta"], int(sizes[1]), int(sizes[2]))
        return {"m1": momentum, "eta1": rate}
    return {
        "delay": measure("pipelined-backprop", given["S"], 4, 1, 1).staleness,
        "fill_drain_bound": formulas.fill_drain_bound(given["S"], given["N"]),
        "fill_drain_exact": formulas.fill_drain_utilisation(given["S"], given["N"]),
    }


def spectrain(_: str, given: Answers) -> Answers:
    forward, backward = formulas.spectrain_horizons(given["N"])
    return {"fwd": forward, "bwd": backward}


def hetpipe(name: str, given: Answers) -> Answers:
    if name.startswith("min-max"):
        layers, speeds = given["layers"], given["speeds"]
        bottleneck_s, boundaries, order = formulas.hetpipe_partition(layers, speeds)
        # Several plans are as good; those of the case and of the planner both reach the bottleneck.
        loads = [sum(layers[a:b]) / speed for (a, b), speed in zip(itertools.pairwise(boundaries), order, strict=True)]
        assert sorted(order) == sorted(speeds)
        return {"bottleneck": max(loads), "optimum": bottleneck_s}
    played = measure(f"hetpipe:concurrent={given['Nm']},distance={given['D']}", 2, 2 * given["Nm"], 1, 2, replicas=2)
    stale = formulas.wsp_staleness(given["Nm"], given["D"])
    assert set(played.staleness) == {stale.local}
    return {"s_local": stale.local, "wave": stale.local + 1, "s_global": stale.overall}


def tofu(name: str, _: Answers) -> Answers:
    if name.startswith("RNN"):
        (inputs,) = re.findall(r"first layer input (\d+)", name)
        keys = itertools.product((6, 8, 10), (4, 6, 8))
        return {f"{n}-{k}K": formulas.tofu_rnn_bytes(n, 1024 * k, int(inputs)) / 2**30 for n, k in keys}
    if "each" in name:
        sizes = [numbers(name.split(";")[1])[0]] * 3
    else:
        weight, activations = numbers(name)
        sizes = [activations, weight, activations]
    return formulas.tofu_operator_bytes("ik,kj->ij", sizes, rests=["i", "k", "i"])


def gshard(name: str, given: Answers) -> Answers:
    if name.startswith("expert"):
        keys = itertools.product((2048, 512, 128), (36, 12))
        return {f"MoE({e}E,{n}L)": formulas.gshard_expert_parameters(e, n, given["M"], given["H"]) for e, n in keys}
    sent = [
        formulas.gshard_all_to_all_bytes(given["tokens_per_device"], given["M"], given["D"], train_step=whole)
        for whole in (False, True)
    ]
    return {"one_alltoall": sent[0], "per_layer_train": sent[1]}


def mesh_tensorflow(name: str, _: Answers) -> Answers:
    if name.startswith("FFN"):
        b, d, h, ranks = map(int, numbers(name)[:4])
        layouts = {f"batch->{ranks}": (ranks, 1), f"h->{ranks}": (1, ranks), "4x4": (4, 4), "2x8": (2, 8)}
        found = {key: formulas.mesh_tensorflow_feed_forward_elements(b, d, h, *sides) for key, sides in layouts.items()}
        return {
            key: {"per_device_elements": activations + weights, "act": activations, "weights": weights}
            for key, (activations, weights) in found.items()
        }
    sizes = {dim: int(n) for dim, n in re.findall(r"([abc])(\d+)", name)}
    mesh = {axis: int(n) for axis, n in re.findall(r"(m\d):(\d+)", name)}
    equation = "".join(re.findall(r"\[|\]|->|[abc](?=\d)", name)).replace("][", ",").strip("[]").replace("]->[", "->")
    best = formulas.mesh_tensorflow_layout(equation, sizes, mesh)
    return {
        "layout": str(best),
        "peak_bytes": best.peak_bytes,
        "with_m3_1": str(formulas.mesh_tensorflow_layout(equation, sizes, {**mesh, "m3": 1})),
        "unsplittable_ac": str(formulas.mesh_tensorflow_layout(equation, sizes, mesh, unsplittable="ac")),
        "assignments_3dims_2mesh": formulas.mesh_tensorflow_assignments(3, 2),
    }


def byteps(name: str, given: Answers) -> Answers:
    if name.startswith("intra"):
        up = [formulas.pcie_uplink_bytes(given["M"], 2, given["l"], cpu_assisted=c) for c in (False, True)]
        return {"ring_allreduce_per_direction": up[0], "cpu_assisted_per_direction": up[1]}
    n = given["n"]
    return {
        str(k): {
            "t_over_M_B": formulas.byteps_s(1, n, k, 1),
            "cpu_share_total": formulas.byteps_cpu_share(n, k),
            "gpu_share_each": formulas.byteps_shares(n, k)[1],
            "speedup_vs_allreduce": formulas.byteps_speedup(n, k),
            "vs_ps": formulas.byteps_speedup(n, k, over="servers") if k else None,
        }
        for k in range(n + 1)
    }


def herring(name: str, given: Answers) -> Answers:
    if name.startswith("largest"):
        listed = numbers(name)
        return {
            "round_robin": max(formulas.round_robin_loads(listed[:-1], int(listed[-1]))),
            "balanced_fusion": max(formulas.balanced_loads(listed[:-1], int(listed[-1]))),
        }
    machines, size = given["n"], given["M_MB"]
    return {
        "bytes_MB": [formulas.all_reduce_bytes(size, n) for n in machines],
        "time_ms_at_100Gbps_duplex": [1e3 * formulas.herring_s(size * 1e6, n, 100e9 / 8) for n in machines],
    }


def parallax(name: str, _: Answers) -> Answers:
    if name.startswith("partition"):
        b, a = numbers(name)
        # The fixed time is not in the case; 1 is what its time of 9 leaves.
        fit = formulas.fit_partitions({p: 1 + b / p + a * p for p in (2, 4, 8, 16, 32, 64)})
        return {"P": formulas.whole_partitions(b, a), "closed": formulas.best_partitions(b, a), "time": fit.best_s}
    if name.startswith("throughput"):
        ours, horovod, servers = (float(n) for n in re.findall(r"([\d.]+)k", name))
        return {"horovod": ours / horovod, "tf": ours / servers}
    w, alpha, machines = numbers(name.split(",")[1])
    # m variables, evenly placed: as many as there is dense traffic of one in the case, 4 and 1.
    variables = {0.02: 4, 0.65: 1}[alpha]
    one, many = (formulas.parallax_transfer(w, alpha, int(machines), v) for v in (0, variables))
    return {
        "one_var": {
            "dense_PS_server": one.dense_servers,
            "dense_AR": one.dense_all_reduce,
            "sparse_PS_server": one.sparse_servers,
            "sparse_AR_gatherv": one.sparse_gather,
        },
        "m_vars": {
            "dense_PS": many.dense_servers,
            "dense_AR": many.dense_all_reduce,
            "sparse_PS": many.sparse_servers,
            "sparse_AR_gatherv": many.sparse_gather,
        },
    }


def dapple(_: str, given: Answers) -> Answers:
    f, b, m, sync = given["F"], given["B"], given["M"], given["AR"]
    found = measure("dapple", len(f), m, f, b, sync_s=sync or 0.0)
    model = formulas.dapple_latency_s(f, b, m, sync)
    return {"model": model, "sim": found.makespan_s, "inflight": found.held}


def zero_bubble(name: str, given: Answers) -> Answers:
    if name.startswith("V-half"):
        return {
            f"p{p} m{m}": [split(v, 2 * p, m).iteration_s for v in ("v-half", "v-min")]
            for p, m in ((4, 8), (8, 16), (8, 24), (6, 12))
        }
    p, m = given["p"], given["m"]
    h1, h2, v = split("zb-h1", p, m), split("zb-h2", p, m), split("zb-v", 2 * p, m)
    half, least = (split(s, 2 * p, m) for s in ("v-half", "v-min"))
    return {
        "1F1B": measure("1f1b", p, m, 1, 2).iteration_s,
        "ZB-H1 (limit p)": h1.iteration_s,
        "limit 1.5p": split(f"zb-h1:limit={3 * p // 2}", p, m).iteration_s,
        "ZB-H2 (limit 2p)": h2.iteration_s,
        "ZBV chunk units": v.iteration_s,
        "bubble_H1": formulas.zb_h1_idle_s(p, m, 1, 2, 1),
        "peak": {
            "H1": max(h1.held),
            "H2": max(h2.held),
            "ZBV": max(v.held_micro_batches),
            "V_half": max(half.held_micro_batches),
            "V_min": max(least.held_micro_batches),
        },
    }


def hanayo(_: str, given: Answers) -> Answers:
    found = measure(f"hanayo:waves={given['W']}", 2 * given["P"] * given["W"], given["M"], 1, 2)
    return {"makespan_chunk_units": found.makespan_s, "bubble": found.bubble}


def bpipe(_: str, given: Answers) -> Answers:
    p = given["p"]
    plain, balanced = (measure(s, p, 4 * p, 1, 2).held for s in ("1f1b", "bpipe"))
    return {"one_f_one_b": plain, "bpipe": max(balanced)}


def dualpipe(_: str, given: Answers) -> Answers:
    p, m, sizes = given["PP"], given["M"], {"weight_grad_s": given["W"]}
    apart, together = (
        measure(
            "dualpipe", p, m, given["F"], given["B_full"], conditions=planner.play.Conditions(pair_overlap=o), **sizes
        )
        for o in (0.0, 1.0)
    )
    (idle,) = set(apart.worker_idle_s)
    parts = (p, m, given["F"], given["B_full"], given["W"])
    return {
        "F&B=3: bubble all ranks": idle,
        "F&B=3 makespan": apart.makespan_s,
        "F&B=2 makespan": together.makespan_s,
        "F&B=2 bubble by rank": together.worker_idle_s,
        "activations": max(apart.held),
        "params": f"{formulas.dualpipe_weight_copies(p, m):g}x",
        "1F1B bubble": formulas.one_f_one_b_idle_s(*parts),
        "ZB1P bubble": formulas.zb_h1_idle_s(*parts),
    }


def seq1f1b(_: str, given: Answers) -> Answers:
    found = measure(f"seq1f1b:splits={given['k']}", given["p"], given["m"], 1, 2)
    return {
        "bubble_equal_cost": found.bubble,
        "inflight_microbatches": found.held_micro_batches,
        "one_f_one_b": measure("1f1b", given["p"], given["m"], 1, 2).held,
    }


def alpa(name: str, given: Answers) -> Answers:
    if name.startswith("pipeline"):
        return {"T": formulas.alpa_latency_s(given["t"], given["B"])}
    *stages, batches = map(int, re.findall(r"\d+", given["note"].split("slicings")[1]))
    found = {f"T{a}{b}": formulas.alpa_latency_s([a, b], batches) for a, b in (stages[:2], stages[2:])}
    return {**found, "best": min(found.values())}


def zero(_: str, given: Answers) -> Answers:
    state = [formulas.zero_state_bytes(given["params"], given["N"], stage) for stage in range(4)]
    moved = [formulas.zero_elements(given["params"], stage) for stage in range(4)]
    found: dict[str, Any] = dict(zip(("DP", "Pos", "Pos+g", "Pos+g+p"), state, strict=True))
    found["comm_elements"] = dict(zip(("DP", "s1", "s2", "s3"), moved, strict=True))
    return found


def autoddl(name: str, given: Answers) -> Answers:
    if name.startswith("linear"):
        found = formulas.autoddl_linear_elements(given["b"], given["i"], given["o"], given["P"])
        return {"dp": found[0], "d2": found[1]}
    return {
        "allreduce": formulas.all_reduce_bytes,
        "reduce_scatter": formulas.reduce_scatter_bytes,
        "all_gather": formulas.reduce_scatter_bytes,
    }


def piper(name: str, given: Answers) -> Answers:
    if name.startswith("max stage"):
        return {"tps": formulas.piper_time_per_sample_s(given["stages"], given["N"], given["bw"])}
    if name.startswith("contiguous"):
        found = [formulas.contiguous_sets(n) for n in given["n"]]
        return {"downsets": [a for a, _ in found], "intervals": [b for _, b in found]}
    batch, speed = re.findall(r"N=(\d+), (\d+) GiB/s", name)[0]
    answers = {}
    for devices, memory in ((8, 8), (8, 80), (32, 8), (32, 80)):
        plan = planner.partition(
            shared_path("instances/piper/bert32a100.json"),
            devices=devices,
            memory=f"{memory}GiB",
            bandwidth=f"{speed}GiB/s",
            batch=int(batch),
        )
        answers[f"k={devices} mem={memory}GiB"] = {"tps": plan.objective.value, "stages": len(plan.parts)}
    return answers


def archer(name: str, given: Answers) -> Answers:
    devices = int(re.findall(r"k=(\d+)", name)[0])
    chain = name.startswith("chain")
    work = numbers(name.split(" k=")[0]) if chain else given["work"]
    sizes = None if chain else given["size"]
    speed = 1.0 if chain else float(re.findall(r"B=(\d+)", name)[0])
    max_load, blocks = formulas.max_load_partition(work, devices, None if chain else given["edges"], sizes, speed)
    bound = formulas.max_load_bound(work, devices)
    return {"opt": max_load, "blocks": blocks, "lower_bound": bound}


ANSWER: dict[str, Answer] = {
    "GPipe": flush("gpipe"),
    "1F1B-flush": flush("1f1b"),
    "Interleaved-1F1B": interleaved,
    "Chimera": chimera,
    "GEMS": gems,
    "BaPipe": bapipe,
    "PipeDream": pipedream,
    "PipeDream-2BW": pipedream_2bw,
    "PipeMare": pipemare,
    "PipelinedBackprop": pipelined_backprop,
    "SpecTrain": spectrain,
    "HetPipe": hetpipe,
    "Tofu": tofu,
    "GShard": gshard,
    "Mesh-TF": mesh_tensorflow,
    "BytePS": byteps,
    "Herring": herring,
    "Parallax": parallax,
    "DAPPLE": dapple,
    "ZeroBubble": zero_bubble,
    "Hanayo": hanayo,
    "BPipe": bpipe,
    "DualPipe": dualpipe,
    "Seq1F1B": seq1f1b,
    "Alpa": alpa,
    "ZeRO": zero,
    "AutoDDL": autoddl,
    "Piper": piper,
    "Archer-MTPP": archer,
}
