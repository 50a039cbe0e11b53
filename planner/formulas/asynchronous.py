"""Pipelines that never drain: staleness, weight versions, what a trainer must correct, and their memory.

Stages are counted from 0; the literature's i = 1..P is i + 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.exchange.formulas import all_reduce_bytes
from planner.formulas._checks import chosen, positive, same_length, whole
from planner.schedules import pipelined_backprop, pipemare
from planner.space.partition.twobw import TwoBWSchedule, stage_bytes


def pipedream_weight_versions(stages: int) -> tuple[int, ...]:
    """Versions of its weights that each stage stashes: D - s.

    >>> formulas.pipedream_weight_versions(4)
    (4, 3, 2, 1)
    """
    whole(stages=stages)
    return tuple(range(stages, 0, -1))


def pipedream_staleness(stages: int) -> tuple[int, ...]:
    """Updates between a forward's weights and the update, by stage: D - 1 - s.

    >>> formulas.pipedream_staleness(4)
    (3, 2, 1, 0)
    """
    return tuple(versions - 1 for versions in pipedream_weight_versions(stages))


def pipedream_mean_weight_copies(stages: int) -> float:
    """Copies of the whole model that stashing keeps, stages being equal: (D + 1)/2.

    >>> formulas.pipedream_mean_weight_copies(4), formulas.pipedream_mean_weight_copies(8)
    (2.5, 4.5)
    """
    return sum(pipedream_weight_versions(stages)) / stages


def pipedream_noam(workers: int, input_replicas: int) -> int:
    """Mini-batches admitted for each replica of the first stage: ceil(workers / its replicas).

    >>> formulas.pipedream_noam(4, 1), formulas.pipedream_noam(16, 15)
    (4, 2)
    """
    whole(workers=workers, input_replicas=input_replicas)
    return math.ceil(workers / input_replicas)


def pipedream_stage_bytes(stages: int, stage: int, weight_bytes: float, activation_bytes: float) -> float:
    """Weights and activations of a stage: (D - s)(w_s + a_s); optimizer state comes on top.

    >>> formulas.pipedream_stage_bytes(4, 0, weight_bytes=2, activation_bytes=3)
    20
    """
    whole(stages=stages)
    whole(0, stage=stage)
    return (stages - stage) * (weight_bytes + activation_bytes)


def pipedream_stage_s(
    compute_s: float, weight_bytes: float, replicas: int, byte_per_s: float, cost: str = "published"
) -> float:
    """Time of a replicated stage a mini-batch, m replicas: the longer of work and exchange, or their sum as released.

    published max(compute, 2(m-1) w/B)/m, released (compute + 4(m-1) w/(m B))/m.

    >>> formulas.pipedream_stage_s(10, 0.7, 3, 4.0), formulas.pipedream_stage_s(10, 0.7, 3, 4.0, cost="released")
    (3.3333333333333335, 3.488888888888889)
    """
    whole(replicas=replicas)
    positive(byte_per_s=byte_per_s)
    table = {
        "published": max(compute_s, 2 * (replicas - 1) * weight_bytes / byte_per_s),
        "released": compute_s + 2 * all_reduce_bytes(weight_bytes, replicas) / byte_per_s,
    }
    return chosen("cost", cost, table) / replicas


def pipedream_transfer_s(boundary_bytes: float, byte_per_s: float) -> float:
    """Time of a boundary a mini-batch, activations there and gradients back: 2 a/B.

    >>> formulas.pipedream_transfer_s(2.0, 4.0)
    1.0
    """
    positive(byte_per_s=byte_per_s)
    return 2 * boundary_bytes / byte_per_s


def pipedream_stashes(behind: int, replicas: int, *, released: bool = False) -> int:
    """Mini-batches whose weights and activations a replica stashes, `behind` workers being on later stages.

    ceil((behind + replicas)/replicas); the released program ceil(behind/replicas), nothing on the last stage.

    >>> formulas.pipedream_stashes(3, 2), formulas.pipedream_stashes(3, 2, released=True)
    (3, 2)
    """
    whole(0, behind=behind)
    whole(replicas=replicas)
    return math.ceil((behind if released else behind + replicas) / replicas)


def pipedream_2bw_weight_versions(stages: int) -> tuple[int, ...]:
    """Versions of its weights that each stage keeps: 2.

    >>> formulas.pipedream_2bw_weight_versions(4)
    (2, 2, 2, 2)
    """
    whole(stages=stages)
    return (2,) * stages


def pipedream_2bw_staleness(stages: int, *, uniform: bool = True) -> tuple[int, ...]:
    """Updates between a forward's weights and the update, at the most, m >= D: 1 by W(t+1) = W(t) - nu grad W(t-1).

    With `uniform=False` each forward reads what is newest, and the last stage has no delay.

    >>> formulas.pipedream_2bw_staleness(4), formulas.pipedream_2bw_staleness(4, uniform=False)
    ((1, 1, 1, 1), (1, 1, 1, 0))
    """
    whole(stages=stages)
    return (1,) * stages if uniform else (1,) * (stages - 1) + (0,)


def pipedream_2bw_stage_bytes(
    weight_bytes: float,
    activation_bytes: float,
    input_bytes: float,
    stages: int,
    *,
    schedule: str = "2bw",
    micro_batches: int | None = None,
    recompute: bool = False,
) -> float:
    """Weights and activations of the worst of d equal stages, as 2BW's planner counts them.

    v W/d + n A/d, with recomputation v W/d + A/d + n A_in: v versions (2bw 2, dream d, flush and gpipe 1), n
    micro-batches (d; gpipe all m).

    Args:
        weight_bytes: W of the whole model.
        activation_bytes: A of the whole model for one micro-batch.
        input_bytes: A_in, what recomputation keeps of a micro-batch on a stage.
        stages: d.
        schedule: 2bw, flush, gpipe or dream.
        micro_batches: m, needed for gpipe; else d when absent.
        recompute: whether activations are computed again.

    >>> [formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, recompute=r) for r in (False, True)]
    [16.0, 9.0]
    >>> formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, schedule="gpipe", micro_batches=16)
    50.0
    """
    whole(stages=stages)
    order = chosen("schedule", schedule, {s.value: s for s in TwoBWSchedule})
    if order is TwoBWSchedule.GPIPE:
        whole(micro_batches=micro_batches or 0)
    kept = order.in_flight(stages, micro_batches or stages)
    return stage_bytes(
        order, weight_bytes / stages, activation_bytes / stages, input_bytes, stages, kept, recompute=recompute
    )


def pipedream_2bw_time_s(
    compute_s: Sequence[float], transfer_s: Sequence[float], all_reduce_s: Sequence[float], micro_batches: int
) -> float:
    """2BW's planner's time a micro-batch: max over the stages of max(compute + transfers, all-reduce/m).

    >>> formulas.pipedream_2bw_time_s([3, 4], [0.5, 0.5], [8, 40], micro_batches=8)
    5.0
    """
    whole(micro_batches=micro_batches)
    same_length(compute_s=compute_s, transfer_s=transfer_s, all_reduce_s=all_reduce_s)
    return max(
        max(work + moved, synced / micro_batches)
        for work, moved, synced in zip(compute_s, transfer_s, all_reduce_s, strict=True)
    )


def pipemare_delays(stages: int, micro_batches: int) -> tuple[float, ...]:
    """tau of each stage's forward in mini-batches: (2(P-i)+1)/N, i = 1..P; the backward's is 0 (PipeDream's is tau).

    >>> formulas.pipemare_delays(4, 4)
    (1.75, 1.25, 0.75, 0.25)
    """
    whole(stages=stages, micro_batches=micro_batches)
    return pipemare.delays(stages, micro_batches)


def pipemare_stashed_copies(stages: int, micro_batches: int) -> float:
    """Extra copies of the weights that stashing (PipeDream) keeps and PipeMare does not: the mean tau, P/N.

    >>> formulas.pipemare_stashed_copies(8, 4)
    2.0
    """
    return pipemare.stashed_copies(stages, micro_batches)


def pipemare_flushed_utilisation(stages: int, micro_batches: int) -> float:
    """Use of the workers when the pipeline drains instead (GPipe): N/(N+P-1); PipeMare's is 1.

    >>> round(formulas.pipemare_flushed_utilisation(4, 4), 4)
    0.5714
    """
    return 1 / pipemare_gain(stages, micro_batches)


def pipemare_gain(stages: int, micro_batches: int) -> float:
    """Throughput over that of a pipeline that drains: (N+P-1)/N.

    >>> formulas.pipemare_gain(4, 4), formulas.pipemare_gain(107, 32)
    (1.75, 4.3125)
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (micro_batches + stages - 1) / micro_batches


def pipemare_learning_rate(base: float, tau: float, step: int, steps: int) -> float:
    """T1, the learning rate of a stage at step k of K annealed ones: base / tau^(1 - min(k/K, 1)).

    >>> [round(formulas.pipemare_learning_rate(0.1, 1.75, k, 100), 6) for k in (0, 50, 100)]
    [0.057143, 0.075593, 0.1]
    """
    return base * pipemare.learning_rate_factor(tau, step, steps)


def pipemare_velocity_decay(tau_forward: float, tau_backward: float = 0.0, decay: float = 0.135) -> float:
    """T2, gamma = D^(1/(tau_fwd - tau_bkwd)) of the weights' velocity; 0 without delay.

    >>> [round(formulas.pipemare_velocity_decay(tau), 6) for tau in (1.75, 0.25)]
    [0.318455, 0.000332]
    """
    return pipemare.velocity_decay(tau_forward - tau_backward, decay)


def pipemare_velocity(velocity: float, new_weight: float, old_weight: float, gamma: float) -> float:
    """T2, the running mean of the weights' steps: delta <- gamma delta + (1 - gamma)(w_new - w_old).

    >>> formulas.pipemare_velocity(1.0, new_weight=5.0, old_weight=2.0, gamma=0.5)
    2.0
    """
    return gamma * velocity + (1 - gamma) * (new_weight - old_weight)


def pipemare_backward_weight(weight: float, velocity: float, tau_forward: float, tau_backward: float = 0.0) -> float:
    """T2, the weight that the backward computes with: u = w - (tau_fwd - tau_bkwd) delta.

    >>> formulas.pipemare_backward_weight(5.0, velocity=2.0, tau_forward=1.75)
    1.5
    """
    return weight - (tau_forward - tau_backward) * velocity


def pipemare_throughput(stages: int, micro_batches: int, synchronous_share: float) -> float:
    """T3, throughput relative to no bubble when that share of the epochs runs at N/(N+P-1).

    >>> round(formulas.pipemare_throughput(8, 4, synchronous_share=10 / 100), 6)
    0.851064
    """
    whole(stages=stages, micro_batches=micro_batches)
    return pipemare.mean_throughput(stages, micro_batches, synchronous_share)


def pipemare_memory_factor(buffers: int) -> float:
    """Weight memory with T2's buffer over that without, n buffers: 4/3 of momentum SGD (w, g, m), 5/4 of Adam.

    >>> round(formulas.pipemare_memory_factor(3), 4), formulas.pipemare_memory_factor(4)
    (1.3333, 1.25)
    """
    whole(buffers=buffers)
    return (buffers + 1) / buffers


def pipelined_backprop_delays(stages: int) -> tuple[int, ...]:
    """Updates between a forward's weights and the update: 2(S-s), s = 1..S.

    >>> formulas.pipelined_backprop_delays(4)
    (6, 4, 2, 0)
    """
    whole(stages=stages)
    return tuple(2 * (stages - 1 - s) for s in range(stages))


def pipelined_backprop_in_flight(stages: int) -> tuple[int, ...]:
    """Samples whose activations each stage keeps: 2(S-s)+1.

    >>> formulas.pipelined_backprop_in_flight(4)
    (7, 5, 3, 1)
    """
    return tuple(delay + 1 for delay in pipelined_backprop_delays(stages))


def fill_drain_utilisation(stages: int, samples: int) -> float:
    """Use of the workers when the pipeline drains after N samples, F and B side by side: N/(N+2S-2).

    >>> round(formulas.fill_drain_utilisation(4, 128), 6)
    0.955224
    """
    whole(stages=stages, samples=samples)
    return pipelined_backprop.fill_drain_utilisation(stages, samples)


def fill_drain_bound(stages: int, samples: int) -> float:
    """The published bound of the same, N/(N+2S).

    >>> round(formulas.fill_drain_bound(4, 128), 6)
    0.941176
    """
    whole(stages=stages, samples=samples)
    return pipelined_backprop.fill_drain_bound(stages, samples)


def spike_compensation(momentum: float, delay: int) -> tuple[float, float]:
    """SC_D: w <- w - eta (a v + b g) with a = m^D and b = (1 - m^D)/(1 - m).

    >>> [round(x, 6) for x in formulas.spike_compensation(0.9, 4)]
    [0.6561, 3.439]
    """
    return pipelined_backprop.spike_compensation(momentum, delay)


def weight_prediction_horizon(delay: int, factor: float = 1.0) -> float:
    """LWP_D: updates by which the forward predicts its weights, T = D; without other corrections about 2D does better.

    >>> formulas.weight_prediction_horizon(6), formulas.weight_prediction_horizon(6, factor=2)
    (6.0, 12)
    """
    whole(0, delay=delay)
    return factor * delay


def predicted_weight(weight: float, velocity: float, learning_rate: float, horizon: float) -> float:
    """The weight that a pass predicts, w - eta T v (v of momentum SGD); from two weights: v = (w_old - w_new)/eta.

    >>> formulas.predicted_weight(1.0, velocity=0.5, learning_rate=0.1, horizon=6)
    0.7
    """
    whole(0, horizon=horizon)
    return weight - learning_rate * horizon * velocity


def scaled_optimizer(momentum: float, learning_rate: float, batch: int, new_batch: int) -> tuple[float, float]:
    """Momentum and learning rate for another batch: m' = m^(N'/N), eta' = eta (1-m') N'/((1-m) N).

    >>> [round(x, 8) for x in formulas.scaled_optimizer(0.9, 0.1, 128, 1)]
    [0.99917721, 6.43e-06]
    """
    whole(batch=batch, new_batch=new_batch)
    return pipelined_backprop.scaled_optimizer(momentum, learning_rate, batch, new_batch)


def spectrain_horizons(stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Updates by which SpecTrain predicts at stage k of N: forward floor(k/2) + N - k - 1, backward floor(k/2).

    >>> formulas.spectrain_horizons(4)
    ((3, 2, 2, 1), (0, 0, 1, 1))
    """
    whole(stages=stages)
    both = [pipelined_backprop.spectrain_horizons(stages, k) for k in range(stages)]
    return tuple(forward for forward, _ in both), tuple(backward for _, backward in both)


def pipeoptim_horizons(stages: int) -> tuple[int, ...]:
    """Updates by which PipeOptim predicts at each stage: D - rank - 1.

    >>> formulas.pipeoptim_horizons(4)
    (3, 2, 1, 0)
    """
    return pipedream_staleness(stages)
