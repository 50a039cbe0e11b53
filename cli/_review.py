"""`shardplan diff REVISION`: all plans of a repository beside those of a revision."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import planner

from ._options import Options
from ._repository import Repository, Said, stale_words

Compare = Callable[[Any, Any], Any]
Judge = Callable[[Any, Any], dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Reviewer:
    """How two plans are compared and judged.

    Attributes:
        given: options of the command.
        compare: gives the comparison of an old and a new answer.
        judge: gives failures by gate of a comparison and its new answer.
        levels: severity of every rule, or "off".
    """

    given: Options
    compare: Compare
    judge: Judge
    levels: dict[str, str]

    def reviews(self, repository: Repository) -> tuple[list[Any], int]:
        """The reviews of all plans that there is anything to say of, and how many others there are."""
        reviews, unchanged = [], 0
        for old, new in repository.plans():
            review = self._review(repository, old, new)
            if review is None:
                unchanged += 1
            else:
                reviews.append(review)
        return reviews, unchanged

    def _review(self, repository: Repository, old: str, new: str) -> Any:  # noqa: ANN401
        if not new:
            return self._judged(old, _bare("the plan is removed"), None, [("plan-removed", "the plan is removed")])
        load: Any = planner.plans.load_answer
        try:
            text = Path(repository.path(new)).read_bytes()
            if planner.published.is_partition_plan(text):
                load = planner.published.load_partition
            after = load(text, name=new)
        except (planner.PlanError, OSError) as error:
            reason = error.problem.message if isinstance(error, planner.PlanError) else str(error)
            words = f"the plan cannot be read: {reason}"
            return self._judged(new, _bare(words), None, [("unreadable-plan", words)])
        said: list[Said] = []
        before, same = after, bool(old)
        if not old:
            said.append(("plan-added", "the plan is new, and compared with itself"))
        elif old != new:
            said.append(("plan-renamed", f"the plan was {old}"))
        if old and (content := repository.content(old)) != text:
            same = False
            try:
                before = load(content, name=old)
            except planner.PlanError as error:
                words = f"the plan of the revision cannot be read ({error.problem.message}): compared with itself"
                said.append(("plan-added", words))
        is_partition = load is planner.published.load_partition
        said += (_stale_instance if is_partition else stale_words)(repository, new, after)
        if same and all(rule == "unknown-source" for rule, _ in said):
            return None
        compared = self._of_partitions(before, after) if is_partition else self.compare(before, after)
        return self._judged(new, compared, None if is_partition else after, said)

    def _of_partitions(self, old: Any, new: Any) -> Any:  # noqa: ANN401
        """The comparison of two partition plans, by the number of their values that differ."""
        changes = planner.published.partition_changes(old, new, tolerance=self.given.tolerance)
        count = planner.units.plural(len(changes), "value")
        return _bare(*([f"{count} of the partition plan differ"] if changes else []), parts=len(new.parts))

    def _judged(self, file: str, comparison: Any, answer: Any, said: Sequence[Said]) -> Any:  # noqa: ANN401
        """The review of one plan, with what was said of its file and sources."""
        told = [(rule, message, self.levels[rule]) for rule, message in said if self.levels[rule] != planner.plans.OFF]
        remarks = [planner.plans.Remark(rule, planner.plans.Severity(level), message) for rule, message, level in told]
        compared = dataclasses.replace(comparison, remarks=(*remarks, *comparison.remarks))
        return planner.report.PlanReview(file, compared, self.judge(compared, answer))


def _bare(*decisions: str, parts: int = 0) -> Any:  # noqa: ANN401
    """A comparison without figures."""
    return planner.plans.PlanComparison(parts, 0, (), decisions, (), (), ())


def _stale_instance(repository: Repository, plan_file: str, plan: Any) -> Iterator[Said]:  # noqa: ANN401
    """Whether the instance of a partition plan is still the one that it is for."""
    instance = plan.instance
    names = [name for name in repository.files if name.split(".")[0] == instance.name.split(".")[0]]
    files = [file for name in names for file in repository.lying(plan_file, name) if not file.endswith(".plan.json")]
    if not files:
        yield "unknown-source", f"its instance {instance.name} is not in the repository"
    elif all(_sha256(repository.path(file)) != instance.fingerprint for file in files):
        yield "stale", f"its instance {instance.name} is not as it was"


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
