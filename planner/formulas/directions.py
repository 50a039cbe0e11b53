"""Pipelines in two directions, in waves, and with a split backward: iteration time, bubble, what each worker keeps.

Bubbles are over total time, 1 - work / (workers * iteration), or in seconds of a worker where the name ends in `_s`.
Each form is tested equal to the simulation of its schedule (`planner.measure_schedule`).
"""

from __future__ import annotations

from planner.errors import UsageError
from planner.formulas._checks import chosen, divides, whole
from planner.schedules import chimera, dualpipe, get
from planner.schedules.types import Pipeline


def chimera_makespan_s(stages: int, micro_batches: int, forward_s: float, backward_s: float, pairs: int = 1) -> float:
    """Seconds of Chimera with 2f pipelines, units of D micro-batches one after another (B >= F).

    N = K D: N (F+B) + (D/f - 2)(B + (K-1)(B-F)); N <= D: D (F+B) + 2B (ceil(N/2f) - 1). For F = B every joint of
    units is free; for B = 2F it is 3N + (K+1)(D-2).

    >>> [formulas.chimera_makespan_s(4, n, 1, b) for n, b in ((4, 1), (4, 2), (8, 2))]
    [10, 16, 30]

    Raises:
        UsageError: stages that f pairs do not divide, a backward shorter than the forward, or more micro-batches than
            stages that are not a multiple of them (simulate those).
    """
    whole(stages=stages, micro_batches=micro_batches, pairs=pairs)
    divides("stages", stages, "workers of a pair of pipelines", 2 * pairs)
    if backward_s < forward_s:
        raise UsageError(f"a backward of {backward_s} s is shorter than a forward of {forward_s} s", hint="simulate it")
    if micro_batches > stages and micro_batches % stages:
        raise UsageError(
            f"{micro_batches} micro-batches do not make units of {stages}",
            hint="use a multiple, or planner.measure_schedule('chimera', ...)",
        )
    idle_s = get(f"chimera:pairs={pairs}").idle_s(Pipeline((1,) * stages, micro_batches), forward_s, backward_s)
    return micro_batches * (forward_s + backward_s) + idle_s


def chimera_bubble(stages: int, micro_batches: int, backward_over_forward: float = 1.0, pairs: int = 1) -> float:
    """The bubble: (D/f-2)/(2N+D/f-2) for B = F, for B = 2F and N = D (D-2)/(3N/2+D-2).

    >>> formulas.chimera_bubble(4, 4), formulas.chimera_bubble(4, 4, backward_over_forward=2)
    (0.2, 0.25)
    >>> round(formulas.chimera_bubble(8, 8, pairs=2), 4)
    0.1111
    """
    total = chimera_makespan_s(stages, micro_batches, 1.0, backward_over_forward, pairs)
    return (total - micro_batches * (1 + backward_over_forward)) / total


def chimera_in_flight(stages: int, pairs: int = 1) -> tuple[int, ...]:
    """Micro-batches that each worker keeps, N >= D: D - D/2f + 1 + min(u, D/f-1-u), u = w mod D/f.

    For one pair min(D, D/2 + 1 + min(w, D-1-w)): from D/2 + 1 at the ends to D in the middle.

    >>> formulas.chimera_in_flight(6), formulas.chimera_in_flight(8, pairs=2)
    ((4, 5, 6, 6, 5, 4), (7, 8, 8, 7, 7, 8, 8, 7))
    """
    whole(stages=stages, pairs=pairs)
    divides("stages", stages, "workers of a pair of pipelines", 2 * pairs)
    span = stages // pairs
    return tuple(stages - span // 2 + 1 + min(w % span, span - 1 - w % span) for w in range(stages))


def chimera_weight_copies(pairs: int = 1) -> int:
    """Copies of the model's weights in a pipeline: 2f stages on each worker.

    >>> formulas.chimera_weight_copies(), formulas.chimera_weight_copies(4)
    (2, 8)
    """
    whole(pairs=pairs)
    return 2 * pairs


def chimera_critical_passes(stages: int, micro_batches: int) -> tuple[int, int]:
    """Forwards and backwards on the longest chain, N = D: C_f = N and C_b = N + D - 2.

    >>> formulas.chimera_critical_passes(6, 6)
    (6, 10)
    """
    whole(stages=stages, micro_batches=micro_batches)
    return chimera.critical_passes(stages, micro_batches)


def chimera_iteration_s(
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
    exposed_sync_s: float = 0.0,
) -> float:
    """Chimera's performance model: (F + C) C_f + (B + C) C_b and the exchange that is not overlapped.

    >>> [formulas.chimera_iteration_s(6, 6, 1, 2, transfer_s=c, exposed_sync_s=3) for c in (0, 0.5)]
    [29, 37.0]
    """
    forwards, backwards = chimera_critical_passes(stages, micro_batches)
    return (forward_s + transfer_s) * forwards + (backward_s + transfer_s) * backwards + exposed_sync_s


def chimera_sync_ranks(copies: int, pairs: int = 1) -> int:
    """Workers that exchange one stage's gradients: 2 f W for W copies of the pipelines.

    >>> formulas.chimera_sync_ranks(copies=8)
    16
    """
    whole(copies=copies, pairs=pairs)
    return 2 * pairs * copies


def gems_makespan_s(stages: int, micro_batches: int) -> float:
    """GEMS with F = B = 1: (M-1)(D+1) + 2D.

    >>> formulas.gems_makespan_s(4, 8)
    43
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (micro_batches - 1) * (stages + 1) + 2 * stages


def gems_bubble(stages: int, micro_batches: int) -> float:
    """GEMS with F = B: 1 - 2M/((M-1)(D+1) + 2D).

    >>> round(formulas.gems_bubble(4, 8), 4)
    0.6279
    """
    total = gems_makespan_s(stages, micro_batches)
    return (total - 2 * micro_batches) / total


def gems_survey_bubble(stages: int) -> float:
    """The figure of Guan et al.'s survey (JCST 2024), (D-1)/(D+1/2): no micro-batch enters before the last has left.

    >>> round(formulas.gems_survey_bubble(4), 4)
    0.6667
    """
    whole(stages=stages)
    return (stages - 1) / (stages + 0.5)


def hanayo_bubble(workers: int, waves: int) -> float:
    """Hanayo with W waves, M = P and B = 2F: (2P-2)/(3PW+2P-2). No order does better.

    >>> formulas.hanayo_bubble(2, 1), formulas.hanayo_bubble(4, 2)
    (0.25, 0.2)
    """
    whole(workers=workers, waves=waves)
    return (2 * workers - 2) / (3 * workers * waves + 2 * workers - 2)


def hanayo_makespan(workers: int, waves: int) -> int:
    """The same in times of a chunk's forward (backward 2): 2 (3PW + 2P - 2).

    >>> formulas.hanayo_makespan(2, 1), formulas.hanayo_makespan(4, 2)
    (16, 60)
    """
    whole(workers=workers, waves=waves)
    return 2 * (3 * workers * waves + 2 * workers - 2)


def zero_bubble_bubble_s(
    schedule: str, workers: int, forward_s: float, input_grad_s: float, weight_grad_s: float
) -> float:
    """Waiting time of a worker between its first start and its last end: zero-bubble orders, and 1F1B beside them.

    1f1b (p-1)(F+B+W), zb-h1 (p-1)(F+B-W), zb-h2 (p-1)(F+B-2W), zb-v 0 for F = B = W; B is the input gradient alone.
    They hold for W <= F and W <= B (simulate others), and are not below 0.

    >>> [formulas.zero_bubble_bubble_s(s, 4, 1, 1, 1) for s in ("1f1b", "zb-h1", "zb-h2", "zb-v")]
    [9, 3, 0, 0.0]

    Raises:
        UsageError: no such schedule; zb-v with unequal parts, for which there is no closed form.
    """
    whole(workers=workers)
    both = forward_s + input_grad_s
    if schedule == "zb-v":
        if not forward_s == input_grad_s == weight_grad_s:
            raise UsageError(
                "zb-v has a closed form for F = B = W only", hint="use planner.measure_schedule('zb-v', ..)"
            )
        return 0.0
    kept = {"1f1b": weight_grad_s, "zb-h1": -weight_grad_s, "zb-h2": -2 * weight_grad_s}
    return (workers - 1) * max(0, both + chosen("zero-bubble schedule", schedule, {**kept, "zb-v": 0.0}))


def zero_bubble_in_flight(schedule: str, workers: int) -> int:
    """Activations that a worker keeps at the most, in whole stages: p, 2p-1, p, floor((p+2)/2), floor((p+4)/3).

    >>> [formulas.zero_bubble_in_flight(s, 8) for s in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")]
    [8, 15, 8, 5, 4]
    """
    whole(workers=workers)
    table = {
        "1f1b": workers,
        "zb-h1": workers,
        "zb-h2": 2 * workers - 1,
        "zb-v": workers,
        "v-half": (workers + 2) // 2,
        "v-min": (workers + 4) // 3,
    }
    return chosen("zero-bubble schedule", schedule, table)


def zero_bubble_v_makespan(schedule: str, workers: int, micro_batches: int) -> int:
    """Iteration of two chunks a worker in a V, in times of a chunk's F = B = W: 6m and the bubble, m >= p >= 3.

    zb-v 0 (from 2p micro-batches on); v-half 3p-7, for odd p 3p-4; v-min 4p-5, for multiples of three 4p-7.

    >>> [formulas.zero_bubble_v_makespan(s, 8, 16) for s in ("zb-v", "v-half", "v-min")]
    [96, 113, 123]

    Raises:
        UsageError: no such schedule, or fewer micro-batches or workers than the form holds for (simulate those).
    """
    bubbles = {
        "zb-v": 0,
        "v-half": 3 * workers - (4 if workers % 2 else 7),
        "v-min": 4 * workers - (5 if workers % 3 else 7),
    }
    above = chosen("V schedule", schedule, bubbles)
    whole(3, workers=workers)
    whole(2 * workers if schedule == "zb-v" else workers, micro_batches=micro_batches)
    return 6 * micro_batches + above


def dualpipe_bubble_s(workers: int, pair_s: float, backward_s: float, weight_grad_s: float) -> float:
    """DualPipe's bubble, (PP/2-1)(F&B + B - 3W), the worst worker's when a pair is faster than its halves.

    B is the whole backward. DualPipeV over PP/2 workers has the same. Exact for an input gradient B - W as long as the
    forward, W no longer (simulate others).

    >>> [formulas.dualpipe_bubble_s(pp, pair_s=3, backward_s=2, weight_grad_s=1) for pp in (4, 8, 16)]
    [2.0, 6.0, 14.0]
    """
    whole(workers=workers)
    divides("workers", workers, "directions", 2)
    return dualpipe.bubble_s(workers, pair_s, backward_s, weight_grad_s)


def dualpipe_in_flight(workers: int) -> int:
    """Micro-batches that every worker keeps: PP + 1; it has two stages' weights.

    >>> formulas.dualpipe_in_flight(8)
    9
    """
    whole(workers=workers)
    return workers + 1


def dualpipe_weight_copies() -> int:
    """Copies of the model: one a direction. DualPipeV has 1.

    >>> formulas.dualpipe_weight_copies()
    2
    """
    return len(get("dualpipe").placement(Pipeline((1, 1), 4))[0])
