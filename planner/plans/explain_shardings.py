"""What other splits of the operators that groups of ranks share would cost.

The cost of another split of an operator is that of the fastest block with this split. The block's other operators,
tensors and weights choose freely; its boundaries stay as they are. Answers that hold more weights or kept activations
than the plan count only where there is no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.graph import Graph, TensorKind
from planner.hardware.types import Cluster
from planner.plans.identity import require_inputs
from planner.plans.rebuild import RebuiltSharding, rebuild
from planner.plans.shardings import ShardedBlock
from planner.plans.types import Plan
from planner.plans.words import significant
from planner.sharding import Load, ShardingProblem, Strategy, Verdict, WeightChoice, evaluate, formulate, layout_text
from planner.sharding.elimination import Factor, minima
from planner.sums import float_sum

MOST_OPERATORS = 3
"""Operators of a block that are explained, the costliest ones."""
MOST_RIVALS = 5
"""Other splits of an operator that are listed at most."""
_WORTH = tuple(itertools.product((0.0, 0.03, 0.3, 1000.0), repeat=2))
"""Pairs of prices for kept activations and weights: what the plan holds costs so many times its seconds."""
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class SplitRival:
    """The best way to run a block in which an operator is split otherwise; differences are to the plan.

    Attributes:
        splits: for each mesh axis the dimension cut, "" for none.
        more_s: seconds of a micro-batch and its part of an update.
        more_work_s: of these, work of a rank.
        more_communication_s: of these, communication.
        more_weight_bytes: weights, gradients and optimizer state of a rank.
        more_kept_bytes: what a rank keeps for backward of a micro-batch.
    """

    splits: tuple[str, ...]
    more_s: float
    more_work_s: float
    more_communication_s: float
    more_weight_bytes: float
    more_kept_bytes: float


@dataclass(frozen=True, slots=True)
class SplitReason:
    """How one of a block's costliest operators is split, and what all other splits cost.

    Attributes:
        sharding: name of the sharding.
        block: number of the first block of its kind.
        blocks: how many blocks are sharded alike.
        operator: name of its first output in the first block.
        op: its type.
        splits: for each mesh axis the dimension cut, "" for none.
        reads: layouts of the operands, by position.
        writes: layouts of the results, by position.
        share: part of the work that one rank does.
        work_s: seconds of that work, forward and backward.
        block_s: seconds of the block: a micro-batch and its part of an update.
        what: the split in words.
        rivals: by other splits (at most `MOST_RIVALS`), cheapest first, those that hold more than the plan last; none
            where no other is legal.
    """

    sharding: str
    block: int
    blocks: int
    operator: str
    op: str
    splits: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    share: float
    work_s: float
    block_s: float
    what: str
    rivals: tuple[SplitRival, ...]


def split_reasons(plan: Plan, graph: Graph, cluster: Cluster, *, most: int = MOST_OPERATORS) -> tuple[SplitReason, ...]:
    """Reasons for the costliest operators of every kind of sharded block.

    Args:
        plan: a plan without findings.
        graph: its model at the plan's micro-batch size.
        cluster: its hardware.
        most: how many operators of a block.

    Raises:
        UsageError: the plan is not for this model or cluster.
        PlanError: a split or layout is not one that its operator or tensor can have.

    Complexity: for each operator one elimination over its block.
    """
    require_inputs(plan, graph, cluster)
    return tuple(
        reason
        for rebuilt in rebuild(plan, graph, cluster)
        for entry in rebuilt.sharding.blocks
        for reason in _SplitBlock(rebuilt, entry).reasons(most)
    )


class _SplitBlock:
    """One sharding entry: its problem with fixed boundaries, and the plan's answer to it."""

    def __init__(self, rebuilt: RebuiltSharding, entry: ShardedBlock) -> None:
        self.rebuilt, self.entry = rebuilt, entry
        self.setting, decision = rebuilt.part(entry), rebuilt.decision(entry)
        free = formulate(self.setting, rebuilt.facts)
        wrong = [n for n, c in zip(free.names, free.choices, strict=True) if decision.get(n) not in c]
        if wrong:
            raise PlanError(
                f"{wrong[0].removeprefix('op:')!r} is sharded in a way that is not legal",
                where="shardings",
                hint="`shardplan check` with model and hardware tells all",
            )
        self.at = {name: v for v, name in enumerate(free.names)}
        ends = [self.at[name] for name in rebuilt.crossing(entry) if name in self.at]
        self.problem: ShardingProblem = free.restricted(
            {v: np.asarray([free.choices[v].index(decision[free.names[v]])]) for v in ends}
        )
        self.chosen = [c.index(decision[name]) for name, c in zip(free.names, self.problem.choices, strict=True)]
        self.verdict = evaluate(self.setting, decision, facts=rebuilt.facts)

    def reasons(self, most: int) -> Iterator[SplitReason]:
        """Reasons for the costliest operators, costliest first."""
        first = self.entry.first[0]
        for work_s, i in self._costliest(most):
            node = self.rebuilt.graph.nodes[i]
            v = self.at[f"op:{node.key}"]
            split = self.problem.choices[v][self.chosen[v]]
            if isinstance(split, Strategy):
                yield SplitReason(
                    sharding=self.rebuilt.sharding.name,
                    block=first,
                    blocks=len(self.entry.members()),
                    operator=node.key,
                    op=node.op,
                    splits=split.splits,
                    reads=tuple(layout_text(layout) for _, layout in split.reads),
                    writes=tuple(layout_text(layout) for _, layout in split.writes),
                    share=significant(split.share),
                    work_s=significant(work_s),
                    block_s=significant(self.verdict.seconds),
                    what=split_words(self.rebuilt, i, split),
                    rivals=tuple(self._rivals(v, split)),
                )

    def _costliest(self, most: int) -> list[tuple[float, int]]:
        """(seconds of a rank, operator) of the operators with the most unsplit work."""
        ranked = []
        for i in self.setting.members:
            choice = self.problem.choices[v := self.at[f"op:{self.rebuilt.graph.nodes[i].key}"]][self.chosen[v]]
            if isinstance(choice, Strategy):
                unsplit, split = (self.setting.rank_s(i, load) for load in (Load(1.0), self.setting.load(i, choice)))
                ranked.append((float_sum(unsplit), float_sum(split), i))
        ranked.sort(key=lambda item: (-item[0], item[2]))
        return [(rank_s, i) for _, rank_s, i in ranked[:most]]

    def _rivals(self, v: int, split: Strategy) -> list[SplitRival]:
        """The fastest answers of the block for each other split of an operator."""
        problem, last = self.problem, len(self.problem.names)
        prices = self._prices()
        variable_costs = [
            Factor((u, last), time[:, None] + kept[:, None] * prices[:, int(self._is_weight(u))])
            for u, (time, kept) in enumerate(zip(problem.seconds, problem.bytes, strict=True))
        ]
        cheapest = minima((*problem.sizes, len(prices)), [*variable_costs, *problem.links], (v, last))
        if cheapest is None:
            return []
        groups: dict[tuple[str, ...], list[int]] = {}
        for c, choice in enumerate(problem.choices[v]):
            if isinstance(choice, Strategy) and choice.splits != split.splits:
                groups.setdefault(choice.splits, []).append(c)
        best: list[tuple[tuple[bool, float], tuple[str, ...], tuple[int, ...]]] = []
        for splits, choices in groups.items():
            answers = {
                cheapest.choices((choices[int(cheapest.totals[choices, p].argmin())], p))[:last]
                for p in range(len(prices))
                if np.isfinite(cheapest.totals[choices, p]).any()
            }
            if answers:
                rank, answer = min((self._rank(answer), answer) for answer in answers)
                best.append((rank, splits, answer))
        best.sort()
        return [self._rival(splits, self._judged(answer)) for _, splits, answer in best[:MOST_RIVALS]]

    def _prices(self) -> np.ndarray:
        """Array [price, 2]: seconds per byte of kept activations and of weights."""
        units = [self.verdict.seconds / max(1.0, size) for size in self._held(self.verdict)]
        return np.asarray([[a * units[1], w * units[0]] for a, w in _WORTH])

    def _is_weight(self, v: int) -> bool:
        return isinstance(self.problem.choices[v][0], WeightChoice)

    def _judged(self, answer: Sequence[int]) -> Verdict:
        return evaluate(self.setting, self.problem.decision(answer), facts=self.rebuilt.facts)

    @staticmethod
    def _held(verdict: Verdict) -> tuple[float, float]:
        return verdict.weight_bytes, verdict.activation_bytes

    def _rank(self, answer: Sequence[int]) -> tuple[bool, float]:
        """Sort key of answers: those that hold more than the plan last, then by seconds."""
        problem, held = self.problem, [0.0, 0.0]
        seconds = float_sum(float(f.table[tuple(answer[u] for u in f.variables)]) for f in problem.links)
        for v, c in enumerate(answer):
            seconds += float(problem.seconds[v][c])
            held[0 if self._is_weight(v) else 1] += float(problem.bytes[v][c])
        limits = self._held(self.verdict)
        return any(new > old * (1 + _SLACK) for new, old in zip(held, limits, strict=True)), seconds

    def _rival(self, splits: tuple[str, ...], verdict: Verdict) -> SplitRival:
        planned = self.verdict
        more_s, more_work_s = verdict.seconds - planned.seconds, verdict.compute_s - planned.compute_s
        return SplitRival(
            splits=splits,
            more_s=significant(more_s, 6),
            more_work_s=significant(more_work_s, 6),
            more_communication_s=significant(more_s - more_work_s, 6),
            more_weight_bytes=significant(verdict.weight_bytes - planned.weight_bytes),
            more_kept_bytes=significant(verdict.activation_bytes - planned.activation_bytes),
        )


def split_words(rebuilt: RebuiltSharding, i: int, split: Strategy) -> str:
    """A split in words: the cut operands and dimensions by mesh axis, and the layout of the result."""
    node, graph, names = rebuilt.graph.nodes[i], rebuilt.graph, rebuilt.mesh.names
    words = []
    for axis, name in enumerate(names):
        if not split.splits[axis]:
            words.append(f"every rank along {name} does the same")
            continue
        operands = (_operand(graph, node.inputs[p], own[axis].dim) for p, own in split.reads if own[axis].cuts)
        cut = " and ".join(dict.fromkeys(operands))
        results = {_result(layout[axis].dim) for _, layout in split.writes}
        words.append(f"{name} cuts {cut or 'no operand'}; {' and '.join(sorted(results)) or 'no result'}")
    return ". ".join(words)


def _operand(graph: Graph, name: str, dim: int) -> str:
    kind = "weight" if graph.tensors[name].kind is TensorKind.PARAMETER else "input"
    return f"the {kind}'s dimension {dim}"


def _result(dim: int) -> str:
    known = {-1: "the result is whole on every rank", -2: "the results are partial sums"}
    return known.get(dim, f"the result is cut along dimension {dim}")
