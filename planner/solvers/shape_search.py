"""Search over pipeline shapes, for any schedule: best sharding first, then best shape; each is cut, judged, simulated.

The reported bound is the shapes' bound over every cut, so it also covers the cuts that were not tried.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from planner.errors import InfeasibleError, JobError
from planner.hardware.types import Cluster
from planner.schedules import get
from planner.solvers._candidates import SAME, Candidates, comparable
from planner.solvers.shape_cuts import TINY_CHAIN, Cutter, ShapeCut, enumerable, next_start
from planner.solvers.shapes import MAX_ACTIONS, SchedulesFor, Shape, Shapes, least
from planner.solvers.stage_options import StageOptions, stage_options
from planner.space import Timed, evaluate
from planner.space.configuration import Configuration, StageChoice
from planner.space.cuts import stage_starts
from planner.space.evaluate import in_closed_form
from planner.space.job_options import in_words
from planner.space.pricer import FloorKey, Floors, Refinement
from planner.space.terms import TermCache
from planner.space.timing import play_terms
from planner.space.types import BlockCosts, Evaluation, Job

WAITING = 0.1
"""Bubble fraction of a pipeline with one stage per worker above which other schedules are searched too."""

FAR = 0.05
"""Shapes whose estimate is slower than the best by more than this fraction are bounded, not cut."""

MAX_SHAPES = 8
"""Most shapes of one sharding group that are cut, apart from those whose cuts are enumerated.

Variants of a shape, which differ in the ZeRO stage or in where copies lie, count once."""

VARIANT_WITHIN = 0.005
"""Fraction by which a further variant of a shape may be expected to exceed the best time, for it to be cut."""

MAX_GROUPS = 6
"""Most sharding groups whose shapes are cut."""

MAX_POLISHED = 3
"""Shapes whose best configuration is improved by local search with the simulator."""

SIMULATE_WITHIN = 0.03
"""Configurations whose bound is within this fraction of the best time are simulated, so that they can be improved."""

POLISH_ACTIONS, ACTIONS_A_JUDGEMENT = 200_000, 500
"""Budget of simulated actions for the local search, and the number of actions that judging a stage counts as."""

IDEAL_FACTOR = 4.0
"""Shapes whose bound exceeds the ideal time (`Shapes.ideal_s`) by this factor are tried only if nothing else fits."""

MAX_EXCESS = 0.03
"""Cuts estimated to exceed memory by more than this fraction are not judged."""


@dataclass(frozen=True, slots=True)
class ShardingGroup:
    """Shardings that stages of one pipeline may mix, or the floor of a family of shardings that is not priced yet.

    Attributes:
        costs: costs per sharding, over the same ranks and with the same boundary layouts; the floor alone if unpriced.
        key: the family's key for `Pricer.refine`; None if the shardings are priced.
        floor: lower bound on the costs of all shardings of the family, if some were not offered; else None.
    """

    costs: tuple[BlockCosts, ...]
    key: FloorKey | None = None
    floor: BlockCosts | None = None


Refine = Callable[[int, FloorKey], Refinement | None]

_Entry = tuple[float, int, ShardingGroup, list[Shape]]
"""Lowest estimate in seconds, a serial number, and the group with its shapes in order of their estimates."""


class ShapeSearch:
    """One search over shapes.

    Args:
        cluster: the cluster.
        job: the job; its `schedules` are searched.
        schedule_of: schedules by name.
        costs_by_size: costs by micro-batch size and sharding number, for the judge.
        candidates: collects the configurations and knows the best time so far.
        refine: prices the shardings of a floor; returns None if that is not worth it.
        lower: called with a bound in seconds that some configurations may reach (`Account.lower_other`).

    Attributes:
        shapes_seen: number of shapes enumerated so far.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        schedule_of: SchedulesFor,
        costs_by_size: dict[int, dict[int, BlockCosts]],
        candidates: Candidates,
        refine: Refine,
        lower: Callable[..., None],
    ) -> None:
        self._cluster, self._job, self._schedule_of = cluster, job, schedule_of
        self._costs_by_size, self._candidates, self._refine, self._lower = costs_by_size, candidates, refine, lower
        self._shapes = Shapes(cluster, job, schedule_of)
        self._counter, self._groups_solved = itertools.count(), 0
        self._nearest: tuple[float, Configuration, Evaluation] | None = None
        self._blocks = self.shapes_seen = 0
        self._ideal_factor, self._thorough = math.inf, False
        self._best_by_shape: dict[tuple[object, ...], tuple[float, Configuration]] = {}
        self._groups_by_sharding: dict[tuple[int, int], tuple[BlockCosts, ...]] = {}
        self._term_caches: dict[int, TermCache] = {}

    def run(
        self,
        single_device: Sequence[BlockCosts],
        floors: Floors,
        *,
        any_plan: bool,
        thorough: bool,
        report: Callable[[], None],
    ) -> None:
        """Run the search.

        Args:
            single_device: costs with one device per worker, by micro-batch size.
            floors: floors of families of shardings with their keys, by mesh and micro-batch size.
            any_plan: stop at the first configuration that fits.
            thorough: price all shardings that may be faster than the best, to get a tighter bound.
            report: called after each sharding group.
        """
        groups = [ShardingGroup((costs,)) for costs in single_device] + [
            ShardingGroup((floor,), key) for floor, key in floors
        ]
        self._thorough = thorough
        self._blocks = max((len(group.costs[0].parameter_elements) for group in groups), default=0)
        for ideal_factor in (IDEAL_FACTOR, math.inf) if self._blocks > TINY_CHAIN else (math.inf,):
            self._ideal_factor = ideal_factor
            self._search(groups, any_plan=any_plan, report=report)
            if self._candidates:
                break
        if self._candidates and not any_plan:
            self._polish()

    def _polish(self) -> None:
        """Local search with the simulator from the best configurations of the fastest shapes."""
        for seconds, best in sorted(self._best_by_shape.values(), key=lambda entry: comparable(entry[0]))[
            :MAX_POLISHED
        ]:
            tries = POLISH_ACTIONS // (len(best.stages) * (2 * best.micro_batches + ACTIONS_A_JUDGEMENT))
            improved = True
            while improved and tries > 0:
                improved = False
                for other in itertools.islice(self._neighbours(best), tries):
                    tries -= 1
                    other_s = self._judge(other, seconds)
                    if other_s < seconds * (1 - SAME):
                        best, seconds, improved = other, other_s, True
                        break

    def _neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """Neighbours in the local search: one sharding for all stages, one boundary moved, or one stage changed."""
        stages, alike = configuration.stages, self._job.structure.alike
        numbers = dict.fromkeys(stage.sharding for stage in stages)
        shared = [tuple(dataclasses.replace(s, sharding=number) for s in stages) for number in numbers]
        changed = itertools.chain(
            shared if len(shared) > 1 else (),
            self._with_boundary_moved(configuration),
            () if alike else self._with_stage_changed(configuration),
        )
        return (dataclasses.replace(configuration, stages=neighbour) for neighbour in changed)

    def _with_boundary_moved(self, configuration: Configuration) -> Iterator[tuple[StageChoice, ...]]:
        """The stages with one boundary moved to the next allowed place, up or down."""
        stages = configuration.stages
        starts = stage_starts(self._costs_by_size[configuration.micro_batch][stages[0].sharding], self._job)
        for at in range(1, len(stages)):
            before, after = stages[at - 1], stages[at]
            for place in (next_start(after.start, by, starts) for by in (-1, 1)):
                if before.start < place < after.stop:
                    pair = dataclasses.replace(before, stop=place), dataclasses.replace(after, start=place)
                    yield (*stages[: at - 1], *pair, *stages[at + 1 :])

    def _with_stage_changed(self, configuration: Configuration) -> Iterator[tuple[StageChoice, ...]]:
        """The stages with one of them changed: first its recomputation, then its sharding."""
        stages = configuration.stages
        for at, stage in enumerate(stages):
            other = dataclasses.replace(stage, recompute=not (stage.recompute or stage.repeats), repeats=(), layers=0)
            yield (*stages[:at], other, *stages[at + 1 :])
        for at, stage in enumerate(stages):
            for costs in self._groups_by_sharding.get((configuration.micro_batch, stage.sharding), ()):
                if costs.sharding != stage.sharding:
                    other = dataclasses.replace(stage, sharding=costs.sharding)
                    yield (*stages[:at], other, *stages[at + 1 :])

    def _search(self, groups: Sequence[ShardingGroup], *, any_plan: bool, report: Callable[[], None]) -> None:
        """Search sharding groups, lowest estimate first; bound those that are not worth cutting."""
        heap: list[_Entry] = []
        for group in groups:
            self._push(heap, group)
        self._groups_solved = 0
        while heap and not (any_plan and self._candidates):
            estimate_s, _, group, shapes = heapq.heappop(heap)
            far = estimate_s > self._candidates.best_s * (1 + FAR) or self._groups_solved >= MAX_GROUPS
            far = far and self._blocks > TINY_CHAIN
            refine = group.key is not None and (self._thorough or not far)
            refined = self._refine(group.costs[0].micro_batch, group.key) if group.key is not None and refine else None
            if refined is not None:
                self._expand(heap, group, refined)
            elif far or group.key is not None:
                self._bound(shapes, only_bounds=False)
            else:
                self._solve(group, shapes, any_plan=any_plan)
                report()
        for _, _, _, shapes in heap:
            self._bound(shapes, only_bounds=False)

    def estimate_s(self, groups: Iterable[Sequence[BlockCosts]]) -> float:
        """Least estimated seconds of a shape, over shardings that stages of one pipeline may mix; infinite if none."""
        shapes = (shape for group in groups for shape in self._shapes.of(group, self._candidates.best_s))
        return least(shapes, attrgetter("estimate_s"))

    def error(self, largest: int) -> InfeasibleError:
        """The error to raise if no shape fits: what the nearest configuration lacks.

        Args:
            largest: micro-batch size beyond which no single block fits; 0 if there is none.

        Raises:
            JobError: there is no shape at all.
        """
        names = " or ".join(self._job.schedules)
        if self._nearest is None:
            if largest:
                return InfeasibleError(
                    f"{names}: {self._shapes.obstacle(self._blocks)}, with micro-batches of at most {largest} samples; "
                    "no single block fits with larger ones",
                    hint="use smaller micro-batches, or more of them",
                )
            words = in_words(self._job)
            limits = f" with {words}" if words else ""
            raise JobError(
                f"{names} can serve no number of stages, copies and micro-batches of this job{limits}: "
                f"{self._shapes.obstacle(self._blocks)}",
                hint="change the global batch, the devices or the schedule",
            )
        _, configuration, verdict = self._nearest
        message = verdict.violations[0].message
        shape = f"{len(configuration.stages)} stages, micro-batch {configuration.micro_batch}"
        return InfeasibleError(
            f"{configuration.schedule}: {message} at the least ({shape})",
            hint="use more stages, devices or recomputation",
        )

    def _push(self, heap: list[_Entry], group: ShardingGroup) -> None:
        """Enumerate the shapes of a sharding group and queue it by its best estimate."""
        far_s = self._ideal_factor * self._shapes.ideal_s(group.costs)
        self._lower(far_s, only_bounds=False)
        shapes = list(self._shapes.of(group.costs, min(far_s, self._candidates.best_s)))
        if group.key is None:  # else shapes are only bounded
            shapes.sort(
                key=lambda s: (comparable(s.estimate_s), comparable(s.bound_s), s.stages, s.workers, s.adjacent)
            )
        if shapes:
            self.shapes_seen += len(shapes)
            heapq.heappush(
                heap, (comparable(least(shapes, attrgetter("estimate_s"))), next(self._counter), group, shapes)
            )

    def _expand(self, heap: list[_Entry], group: ShardingGroup, refined: Refinement) -> None:
        """Replace a floor by the closer floors and the priced shardings that it stands for."""
        closer, priced = refined
        for floor, key in closer:
            self._push(heap, ShardingGroup((floor,), key))
        if priced:
            self._push(heap, ShardingGroup(tuple(priced), None, group.costs[0]))

    def _bound(self, shapes: Sequence[Shape], *, only_bounds: bool) -> None:
        """Lower the search's bound to the least bound of some shapes."""
        best_s = self._candidates.best_s
        self._lower(least(shapes, lambda shape: shape.closest_bound_s(best_s)), only_bounds=only_bounds)

    def _solve(self, group: ShardingGroup, shapes: Sequence[Shape], *, any_plan: bool) -> None:
        """Cut the most promising shapes of a sharding group and bound the others."""
        self._groups_solved += 1
        self._groups_by_sharding |= {(costs.micro_batch, costs.sharding): group.costs for costs in group.costs}
        left_out, cut, reached = list[Shape](), 0, dict[tuple[object, ...], list[tuple[Shape, float]]]()
        options_of = functools.cache(
            lambda whole_stages: stage_options(group.costs, dataclasses.replace(self._job, whole_stages=whole_stages))
        )
        for shape in shapes:
            options = options_of(self._job.whole_stages or shape.repeats)
            best_s = self._candidates.best_s
            if shape.bound_below_s(best_s, options.work_each_s) >= best_s or (any_plan and self._candidates):
                continue
            enumerated = enumerable(shape, options, self._job)
            variants = reached.setdefault((shape.schedule.name, shape.workers, shape.copies), [])
            far = shape.estimate_s > self._candidates.best_s * (1 + FAR) or (not variants and cut >= MAX_SHAPES)
            far = far or any(self._slower(shape, other, other_s) for other, other_s in variants)
            if enumerated or not far:
                cut += not enumerated and not variants
                variants.append((shape, self._cut_shape(shape, options)))
            if (
                not enumerated or shape.zero > 1
            ):  # Bytes of gathered weights are an estimate, so a cut left out may fit.
                left_out.append(shape)
        self._bound(left_out, only_bounds=False)
        if group.floor is not None:
            self._bound(list(self._shapes.of((group.floor,), self._candidates.best_s)), only_bounds=True)

    def _slower(self, shape: Shape, other: Shape, other_s: float) -> bool:
        """True if another variant, which took `other_s`, makes a shape look too slow.

        It needs no more memory, or it fits, and by the estimates less memory would not have made it faster.
        """
        no_leaner = other.zero >= shape.zero or (other_s < math.inf and shape.estimate_s >= other.estimate_s)
        expected_s = other_s * shape.estimate_s / other.estimate_s
        return no_leaner and expected_s > self._candidates.best_s * (1 + VARIANT_WITHIN)

    def _cut_shape(self, shape: Shape, options: StageOptions) -> float:
        """Judge cuts of a shape; if all stages must be alike, for each option on its own.

        Returns the seconds of the fastest, or a bound on them; infinity if none fits or may beat the best.
        """
        cutter = Cutter(shape, options, self._cluster, self._job)
        fastest_s = math.inf
        for variant in cutter.alike() if self._job.structure.alike else (cutter,):
            if variant.bound_s < self._candidates.best_s:
                fastest_s = min(fastest_s, self._judge_cuts(variant))
        return fastest_s

    def _judge_cuts(self, cutter: Cutter) -> float:
        """Judge cuts.

        Returns the seconds of the fastest, its bound if that is no better than the best; infinity if none fits.
        """
        cuts = cutter.cuts(self._candidates.best_s)
        slower = [cut.bound_s for cut in cuts if cut.excess <= 0 and cut.bound_s >= self._candidates.best_s]
        seconds = [
            self._judge(cutter.configuration(cut, self._job), self._candidates.best_s * (1 + SIMULATE_WITHIN))
            for cut in self._worth_judging(cuts)
        ]
        return min([*seconds, *slower], default=math.inf)

    def _worth_judging(self, cuts: Sequence[ShapeCut]) -> Iterator[ShapeCut]:
        """Cuts that may fit and beat the best; the first one in any case while nothing fits, for the error message."""
        for at, cut in enumerate(cuts):
            may_fit = cut.excess <= MAX_EXCESS or (at == 0 and not self._candidates)
            if may_fit and cut.bound_s < self._candidates.best_s * (1 - SAME):
                yield cut

    def _judge(self, configuration: Configuration, cutoff_s: float) -> float:
        """Judge a configuration, simulate it if its bound is below the cutoff, and return its seconds.

        Returns the bound if it is not simulated, infinity if it does not fit.
        """
        job, schedule = self._job, self._schedule_of(configuration.schedule)
        costs_by_sharding = self._costs_by_size[configuration.micro_batch]
        cache = self._term_caches.setdefault(configuration.micro_batch, TermCache())
        verdict = evaluate(
            costs_by_sharding, self._cluster, job, configuration, schedule=schedule, timed=Timed.BOUND, cache=cache
        )
        if not verdict.feasible:
            excess = max(
                (v.needed / v.available - 1 for v in verdict.violations if v.kind == "memory"), default=math.inf
            )
            if self._nearest is None or excess < self._nearest[0]:
                self._nearest = excess, configuration, verdict
            return math.inf
        key = (configuration.schedule, configuration.copies, configuration.micro_batch, len(configuration.stages))
        best_of_shape_s, _ = best_of_shape = self._best_by_shape.get(key, (math.inf, configuration))
        if verdict.iteration_s >= min(cutoff_s, max(best_of_shape_s, self._candidates.best_s)) * (1 - SAME):
            return verdict.iteration_s
        seconds = play_terms(configuration, schedule, verdict.stages).iteration_s
        simulated = dataclasses.replace(verdict, iteration_s=seconds)
        if in_closed_form(configuration, schedule):
            simulated = evaluate(costs_by_sharding, self._cluster, job, configuration, schedule=schedule)
        self._candidates.add(configuration, simulated, least_s=verdict.iteration_s, seconds=seconds)
        self._best_by_shape[key] = min(best_of_shape, (seconds, configuration), key=lambda entry: comparable(entry[0]))
        return seconds


def waits(configuration: Configuration, evaluation: Evaluation) -> bool:
    """True if a judged configuration has a bubble above `WAITING`, so that other schedules may be faster.

    False without a look if it has too many actions to simulate: with that many micro-batches the bubble is small.
    """
    if 2 * len(configuration.stages) * configuration.micro_batches > MAX_ACTIONS:
        return False
    return play_terms(configuration, get(configuration.schedule), evaluation.stages).idle > WAITING
