"""Plans of a git repository: which of them differ from a revision, and whether what they were made from changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planner

from . import _inputs, _options
from ._options import Options

PLANS = ":(top,glob)**/*.plan.json"
"""Files of a repository that are plans."""


def git(*words: str, folder: str = ".") -> bytes:
    """The output of a git command.

    Raises:
        UsageError: git is missing or fails; the message is git's.
    """
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise planner.UsageError("git is not installed", hint="name two plans instead of a revision") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        hint = "name a revision of this git repository, such as main, or two plans"
        raise planner.UsageError(lines[0].removeprefix("fatal: "), where=" ".join(words[:1]), hint=hint)
    return done.stdout


def _names(output: bytes) -> list[str]:
    """Names that end in NUL, as paths of this system."""
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


@dataclass(frozen=True)
class Repository:
    """The work tree of a git repository, and a revision that it is compared with.

    Attributes:
        folder: the top of the work tree.
        base: hash of the revision's tree.
        files: paths of tracked files by name without folders.
        base_files: those of the revision.
    """

    folder: str
    base: str
    files: dict[str, list[str]] = field(default_factory=dict)
    base_files: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def at(cls, revision: str) -> Repository:
        """The repository of the current folder.

        Raises:
            UsageError: this is no repository, or it has no such revision.
        """
        folder = os.fsdecode(git("rev-parse", "--show-toplevel").rstrip(b"\n"))
        base = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{tree}}").decode().strip()
        tracked = _names(git("ls-files", "-z", folder=folder))
        before = _names(git("ls-tree", "-r", "-z", "--name-only", "--full-tree", base, folder=folder))
        return cls(folder, base, _by_name(tracked), _by_name(before))

    def plans(self) -> Iterator[tuple[str, str]]:
        """(old path, new path) of all plans of the revision or the work tree, in order; "" where there is none."""
        pairs: dict[str, str] = {}
        removed: list[str] = []
        output = git("diff", "--name-status", "-z", "--find-renames", self.base, "--", PLANS, folder=self.folder)
        words = iter(_names(output))
        for status in words:
            name = next(words)
            if status.startswith(("R", "C")):
                pairs[next(words)] = name
            elif status == "D":
                removed.append(name)
            else:
                pairs[name] = "" if status == "A" else name
        for name in _names(git("ls-files", "-z", "--", PLANS, folder=self.folder)):
            if os.path.lexists(self.path(name)):
                pairs.setdefault(name, name)
        yield from ((old, new) for new, old in sorted(pairs.items()))
        yield from ((name, "") for name in sorted(removed))

    def path(self, name: str) -> str:
        """Path of a file of the work tree."""
        return os.path.join(self.folder, name)

    def content(self, name: str) -> bytes:
        """Content of a file at the revision."""
        return git("cat-file", "blob", f"{self.base}:{name}", folder=self.folder)

    def lying(self, plan_file: str, name: str, *, before: bool = False) -> list[str]:
        """Files that a plan may mean by a name: the one beside it, else the one at the top, else all of that name."""
        files = (self.base_files if before else self.files).get(name, [])
        if not before:
            files = [file for file in files if os.path.isfile(self.path(file))]
        for place in (os.path.join(os.path.dirname(plan_file), name), name):
            if place in files:
                return [place]
        return files


def _by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(os.path.basename(path), []).append(path)
    return by_name


Said = tuple[str, str]
"""A rule, and what it says of a plan."""


def stale_words(repository: Repository, plan_file: str, plan: Any) -> list[Said]:  # noqa: ANN401
    """What changed of the sources of a plan, or of an answer that none fits, since it was made.

    Args:
        repository: the repository.
        plan_file: path of the plan from the repository's top.
        plan: the plan or answer.
    """
    sources = _Sources(repository, plan_file, plan)
    return [*sources.model(), *sources.hardware(), *sources.further()]


@dataclass
class _Sources:
    """The files that one plan was made from."""

    repository: Repository
    plan_file: str
    plan: Any

    def model(self) -> list[Said]:
        """Whether the model is the plan's."""
        asked = self.plan.provenance
        if not asked.model:
            return [("unknown-source", "the plan does not name its model")]

        def differs(path: str, costs: str | None) -> str:
            graph = _options.load_graph(Options(model=path, dims=self._dims(), costs=costs))
            if isinstance(self.plan, planner.Plan):
                other = planner.plans.other_model(self.plan, graph)
                return other.message if other else ""
            return "" if graph.fingerprint == self.plan.model_fingerprint else "the model is not as it was"

        costs = self._found("costs", asked.costs, ()) if asked.costs else [None]
        if costs and isinstance(costs[0], tuple):
            return [costs[0]]
        models = self._found("model", asked.model, planner.bundled_names())
        return self._judged("model", models, lambda path: differs(path, costs[0]))

    def _dims(self) -> tuple[str, ...]:
        if isinstance(self.plan, planner.Plan):
            return _inputs.recorded_dims(self.plan)
        return tuple(self.plan.provenance.dims)

    def hardware(self) -> list[Said]:
        """Whether the cluster and its software are the plan's."""
        asked = self.plan.provenance
        if not asked.hardware:
            return [("unknown-source", "the plan does not name its hardware")]

        def differs(path: str, stack: str) -> str:
            is_plan = isinstance(self.plan, planner.Plan)
            nodes = _inputs.recorded_nodes(self.plan, path) if is_plan else _options.read_nodes(asked.nodes)
            named = stack or (planner.hardware.named_stack(self.plan.hardware.stack) if is_plan else "")
            cluster = planner.load_cluster(path, nodes=nodes, stack=named, changes=asked.changes)
            if is_plan:
                other = planner.plans.other_hardware(self.plan, cluster)
                return other.message if other else ""
            return "" if cluster.fingerprint == self.plan.hardware_fingerprint else "the hardware is not as it was"

        stacks = self._found("stack", asked.stack, planner.hardware.stack_names()) if asked.stack else [""]
        if stacks and isinstance(stacks[0], tuple):
            return [stacks[0]]
        clusters = self._found("hardware", asked.hardware, (*planner.cluster_names(), *planner.device_names()))
        return self._judged("hardware", clusters, lambda path: differs(path, stacks[0]))

    def further(self) -> list[Said]:
        """Whether further files that the plan was made from have the content that they had."""
        said: list[Said] = []
        for read in self.plan.provenance.files:

            def differs(path: str, sha256: str = read.sha256, name: str = read.name) -> str:
                same = hashlib.sha256(Path(path).read_bytes()).hexdigest() == sha256
                return "" if same else f"{name} changed since the plan was made from it"

            said += self._judged("file", self._found("file", read.name, ()), differs)
        return said

    def _found(self, what: str, name: str, bundled: Sequence[str]) -> list[Any]:
        """Paths of a source by its name, or one bundled name; or why there is none, as what a rule says."""
        files = self.repository.lying(self.plan_file, name)
        if files:
            return [self.repository.path(file) for file in files]
        if name in bundled:
            return [name]
        if self.repository.lying(self.plan_file, name, before=True):
            return [("stale", f"its {what} {name} is no longer in the repository")]
        return [("unknown-source", f"its {what} {name} is not in the repository: whether it changed is not known")]

    def _judged(self, what: str, found: Sequence[Any], differs: Any) -> list[Said]:  # noqa: ANN401
        """Nothing if one of the files is as the plan has it, else how they differ."""
        if found and isinstance(found[0], tuple):
            return list(found)
        said: list[Said] = []
        for path in found:
            try:
                words = differs(path)
            except planner.ShardplanError as error:
                words = f"its {what} {Path(path).name} cannot be used: {error.problem.message}"
                said.append(("unreadable-source", words))
                continue
            if not words:
                return []
            said.append(("stale", words))
        return said[:1]
