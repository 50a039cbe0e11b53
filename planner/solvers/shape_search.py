"""The best configurations among shapes of pipelines, for any schedule: the most promising way to share operators first,
and of each the most promising shapes; each is cut, judged and played.

The bound is that of the shapes over every cut: it holds for all that was not tried, too.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.errors import InfeasibleError, JobError
from planner.hardware.types import Cluster
from planner.schedules import get
from planner.solvers._candidates import SAME, Candidates, comparable
from planner.solvers.shape_cuts import TINY, Cut, Cutter, enumerable, moved
from planner.solvers.shapes import LONGEST, SchedulesFor, Shape, Shapes
from planner.solvers.stage_options import StageOptions, stage_options
from planner.solvers.types import Key, Refined
from planner.space import Timed, evaluate
from planner.space.asked import in_words
from planner.space.configuration import Configuration, StageChoice
from planner.space.cuts import stage_starts
from planner.space.evaluate import in_closed_form
from planner.space.terms import TermCache
from planner.space.timing import play_terms
from planner.space.types import BlockCosts, Evaluation, Job

WAITING = 0.1
"""Bubble of pipelines with one stage on each worker above which other schedules are looked at, too."""

FAR = 0.1
"""Shapes whose estimate is slower than the best by more than this are left to the bound."""

MOST_SHAPES = 8
"""Shapes of one way to share operators that are cut at the most, those that can be enumerated apart."""

MOST_FAMILIES = 6
"""Groups of ways to share operators of which shapes are cut at the most."""

MOST_POLISHED = 3
"""Shapes whose best configuration is improved by playing."""

RIVAL = 0.03
"""Configurations that may be slower than the best by no more than this are played, so that they can be improved."""

MOST_ACTIONS, ACTIONS_A_JUDGEMENT = 200_000, 500
"""Actions that may be played to move the boundaries of the best, and as how many judging a stage counts."""

WIDE = 4.0
"""Shapes whose bound is more than so many times what all devices take on end are looked at only where nothing fits."""

ROOM = (1.0, 0.999, 0.98, 0.9)
"""Parts of the memory that cuts may fill: less where the judge finds that what they keep beside does not fit."""

CLOSE = 0.03
"""Cuts that exceed the memory by more than this are not judged where others do not."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to share operators: worked out, or what none of them is below.

    Attributes:
        costs: by way, on the same ranks with boundaries that lie alike.
        key: what they are worked out by (`Shardings.refine`); None where they are.
        floor: what none of them, nor of those that are not offered, is below; None where these are all.
    """

    costs: tuple[BlockCosts, ...]
    key: Key | None = None
    floor: BlockCosts | None = None


Refine = Callable[[int, Key], Refined | None]


class ShapeSearch:
    """Searches shapes.

    Args:
        cluster: the machine.
        job: what is to be trained; its `schedules` are searched.
        schedule_of: schedules by name.
        shelves: costs by micro-batch size and number of the sharding, for the judge.
        found: takes what is found, and says how fast the best is.
        refine: works out ways to share operators; None where that is not worth it.
        lower: told of a bound: some configurations may be as fast as this (`Account.lower_beside`).
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        schedule_of: SchedulesFor,
        shelves: dict[int, dict[int, BlockCosts]],
        found: Candidates,
        refine: Refine,
        lower: Callable[..., None],
    ) -> None:
        self._cluster, self._job, self._schedule_of = cluster, job, schedule_of
        self._shelves, self._found, self._refine, self._lower = shelves, found, refine, lower
        self._shapes = Shapes(cluster, job, schedule_of)
        self._count, self._solved = itertools.count(), 0
        self.nearest: tuple[float, Configuration, Evaluation] | None = None
        self._blocks = self.looked = 0
        self._wide, self._thorough = math.inf, False
        self._tops: dict[tuple[object, ...], tuple[float, Configuration]] = {}
        self._alike: dict[tuple[int, int], tuple[BlockCosts, ...]] = {}
        self._judged: dict[int, TermCache] = {}

    def run(
        self,
        alone: Sequence[BlockCosts],
        floors: Sequence[tuple[BlockCosts, Key]],
        *,
        any_plan: bool,
        thorough: bool,
        report: Callable[[], None],
    ) -> None:
        """Search them.

        Args:
            alone: costs where every worker is one device, by micro-batch size.
            floors: what ways to share operators are not below, by mesh and micro-batch size.
            any_plan: end with the first configuration that fits.
            thorough: work out all ways to share operators that may be faster than the best, for the sake of the bound.
            report: called now and then.
        """
        every = [Ways((costs,)) for costs in alone] + [Ways((floor,), key) for floor, key in floors]
        self._thorough = thorough
        self._blocks = max((len(ways.costs[0].parameter_elements) for ways in every), default=0)
        for wide in (WIDE, math.inf) if self._blocks > TINY else (math.inf,):
            self._wide = wide
            self._search(every, any_plan=any_plan, report=report)
            if self._found:
                break
        if self._found and not any_plan:
            self._polish()

    def _polish(self) -> None:
        """Move boundaries of the best of the fastest shapes, and repeat their forwards elsewhere, as long as that makes
        them faster."""
        for seconds, best in sorted(self._tops.values(), key=lambda entry: comparable(entry[0]))[:MOST_POLISHED]:
            tries = MOST_ACTIONS // (len(best.stages) * (2 * best.micro_batches + ACTIONS_A_JUDGEMENT))
            moved = True
            while moved and tries > 0:
                moved = False
                for other in itertools.islice(self._neighbours(best), tries):
                    tries -= 1
                    other_s = self._judge(other, seconds)
                    if other_s < seconds * (1 - SAME):
                        best, seconds, moved = other, other_s, True
                        break

    def _neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """All stages' operators shared as those of one stage, each boundary a place up or down, each stage's forward
        repeated where it is not, or not where it is, and each stage's operators shared in another way."""
        stages, alike = configuration.stages, self._job.structure.alike
        numbers = dict.fromkeys(stage.sharding for stage in stages)
        shared = [tuple(dataclasses.replace(s, sharding=number) for s in stages) for number in numbers]
        changed = itertools.chain(
            shared if len(shared) > 1 else (),
            self._shifted(configuration),
            () if alike else self._replaced(configuration),
        )
        return (dataclasses.replace(configuration, stages=own) for own in changed)

    def _shifted(self, configuration: Configuration) -> Iterator[tuple[StageChoice, ...]]:
        """The stages with each boundary a place up or down."""
        stages = configuration.stages
        starts = stage_starts(self._shelves[configuration.micro_batch][stages[0].sharding], self._job)
        for at in range(1, len(stages)):
            before, here = stages[at - 1], stages[at]
            for place in (moved(here.start, by, starts) for by in (-1, 1)):
                if before.start < place < here.stop:
                    pair = dataclasses.replace(before, stop=place), dataclasses.replace(here, start=place)
                    yield (*stages[: at - 1], *pair, *stages[at + 1 :])

    def _replaced(self, configuration: Configuration) -> Iterator[tuple[StageChoice, ...]]:
        """The stages with one of them run in another way: repeated, or not, then sharing its operators otherwise."""
        stages = configuration.stages
        others = [[dataclasses.replace(s, recompute=not (s.recompute or s.repeats), repeats=())] for s in stages]
        ways = [self._alike.get((configuration.micro_batch, s.sharding), ()) for s in stages]
        shared = [
            [dataclasses.replace(s, sharding=way.sharding) for way in own if way.sharding != s.sharding]
            for s, own in zip(stages, ways, strict=True)
        ]
        for at, other in [(at, other) for found in (others, shared) for at, own in enumerate(found) for other in own]:
            yield (*stages[:at], other, *stages[at + 1 :])

    def _search(self, every: Sequence[Ways], *, any_plan: bool, report: Callable[[], None]) -> None:
        """Search ways to share operators, the most promising first."""
        heap: list[tuple[float, int, Ways, list[Shape]]] = []
        for ways in every:
            self._push(heap, ways)
        self._solved = 0
        while heap and not (any_plan and self._found):
            estimate_s, _, ways, shapes = heapq.heappop(heap)
            far = estimate_s > self._found.best_s * (1 + FAR) or self._solved >= MOST_FAMILIES
            far = far and self._blocks > TINY
            closer = ways.key is not None and (self._thorough or not far)
            refined = self._refine(ways.costs[0].micro_batch, ways.key) if ways.key is not None and closer else None
            if refined is not None:
                self._unfold(heap, ways, refined)
            elif far or ways.key is not None:
                self._bound(shapes, only_bounds=False)
            else:
                self._solve(ways, shapes, any_plan=any_plan)
                report()
        for _, _, _, shapes in heap:
            self._bound(shapes, only_bounds=False)

    def error(self, largest: int) -> InfeasibleError:
        """Why no shape fits: what came nearest.

        Args:
            largest: micro-batch size beyond which no single block fits; 0 where there is none.

        Raises:
            JobError: there is no shape at all.
        """
        names = " or ".join(self._job.schedules)
        if self.nearest is None:
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
        _, configuration, verdict = self.nearest
        message = verdict.violations[0].message
        shape = f"{len(configuration.stages)} stages, micro-batch {configuration.micro_batch}"
        return InfeasibleError(
            f"{configuration.schedule}: {message} at the least ({shape})",
            hint="use more stages, devices or recomputation",
        )

    def _push(self, heap: list[tuple[float, int, Ways, list[Shape]]], ways: Ways) -> None:
        far_s = self._wide * self._shapes.least_s(ways.costs)
        self._lower(far_s, only_bounds=False)
        shapes = sorted(
            self._shapes.of(ways.costs, min(far_s, self._found.best_s)),
            key=lambda s: (comparable(s.estimate_s), comparable(s.bound_s), s.stages, s.workers, s.adjacent),
        )
        if shapes:
            self.looked += len(shapes)
            heapq.heappush(heap, (comparable(shapes[0].estimate_s), next(self._count), ways, shapes))

    def _unfold(self, heap: list[tuple[float, int, Ways, list[Shape]]], ways: Ways, refined: Refined) -> None:
        """Put what a floor stands for in its place."""
        closer, known, _ = refined
        for floor, key in closer:
            self._push(heap, Ways((floor,), key))
        if known:
            self._push(heap, Ways(tuple(known), None, ways.costs[0]))

    def _bound(self, shapes: Sequence[Shape], *, only_bounds: bool) -> None:
        if shapes:
            self._lower(min(shape.bound_s for shape in shapes), only_bounds=only_bounds)

    def _solve(self, ways: Ways, shapes: Sequence[Shape], *, any_plan: bool) -> None:
        """Cut the most promising shapes; what is left of them is bounded."""
        self._solved += 1
        self._alike |= {(way.micro_batch, way.sharding): ways.costs for way in ways.costs}
        left, cut = math.inf, 0
        tables = functools.cache(
            lambda whole: stage_options(ways.costs, dataclasses.replace(self._job, whole_stages=whole))
        )
        for shape in shapes:
            options = tables(self._job.whole_stages or shape.repeats)
            if shape.least_s(options.work_each_s) >= self._found.best_s or (any_plan and self._found):
                continue
            few = enumerable(shape, options, self._job)
            far = shape.estimate_s > self._found.best_s * (1 + FAR) or cut >= MOST_SHAPES
            if few or not far:
                cut += not few
                self._try_shape(shape, options)
            if not few or shape.zero > 1:  # what is gathered is not known exactly
                left = min(left, shape.bound_s)
        self._lower(left, only_bounds=False)
        if ways.floor is not None:
            self._bound(list(self._shapes.of((ways.floor,), self._found.best_s)), only_bounds=True)

    def _try_shape(self, shape: Shape, options: StageOptions) -> None:
        """Judge cuts of a shape, where stages are to be alike in each option on its own."""
        cutter = Cutter(shape, options, self._cluster, self._job)
        for each in cutter.alike() if self._job.structure.alike else (cutter,):
            if each.least_s < self._found.best_s:
                self._try(each)

    def _try(self, cutter: Cutter) -> None:
        """Judge cuts; where what is kept beside does not fit, cuts that fill less of the memory."""
        for part in ROOM:
            smaller = cutter.within(part)
            cuts = smaller.cuts(self._found.best_s)
            found = [
                self._judge(smaller.configuration(cut, self._job), self._found.best_s * (1 + RIVAL))
                for cut in self._worth(cuts)
            ]
            if cutter.few or not found or min(found) < math.inf or cuts[0].over > CLOSE:
                break

    def _worth(self, cuts: Sequence[Cut]) -> Iterator[Cut]:
        """Cuts that may fit and be faster; the leanest one where none fits, for what it lacks."""
        for at, cut in enumerate(cuts):
            if cut.least_s < self._found.best_s * (1 - SAME) and (cut.over <= CLOSE or (at == 0 and not self._found)):
                yield cut

    def _judge(self, configuration: Configuration, cutoff_s: float) -> float:
        """Seconds of a configuration that fits: played where it may be below the cutoff, else no more than it takes;
        infinite where it does not fit."""
        job, schedule = self._job, self._schedule_of(configuration.schedule)
        shelf = self._shelves[configuration.micro_batch]
        known = self._judged.setdefault(configuration.micro_batch, TermCache())
        verdict = evaluate(shelf, self._cluster, job, configuration, schedule=schedule, timed=Timed.BOUND, cache=known)
        if not verdict.feasible:
            over = max((v.needed / v.available - 1 for v in verdict.violations if v.kind == "memory"), default=math.inf)
            if self.nearest is None or over < self.nearest[0]:
                self.nearest = over, configuration, verdict
            return math.inf
        key = (configuration.schedule, configuration.copies, configuration.micro_batch, len(configuration.stages))
        top_s, _ = top = self._tops.get(key, (math.inf, configuration))
        if verdict.iteration_s >= min(cutoff_s, max(top_s, self._found.best_s)) * (1 - SAME):
            return verdict.iteration_s
        seconds = play_terms(configuration, schedule, verdict.stages).iteration_s
        played = dataclasses.replace(verdict, iteration_s=seconds)
        if in_closed_form(configuration, schedule):
            played = evaluate(shelf, self._cluster, job, configuration, schedule=schedule)
        self._found.add(configuration, played, least_s=verdict.iteration_s, seconds=seconds)
        self._tops[key] = min(top, (seconds, configuration), key=lambda entry: comparable(entry[0]))
        return seconds


def waits(configuration: Configuration, evaluation: Evaluation) -> bool:
    """Whether the pipelines of a judged configuration wait for so long that other orders of work may pay; not where
    they have too many micro-batches to be played, and so to wait for long."""
    if 2 * len(configuration.stages) * configuration.micro_batches > LONGEST:
        return False
    return play_terms(configuration, get(configuration.schedule), evaluation.stages).bubble > WAITING
