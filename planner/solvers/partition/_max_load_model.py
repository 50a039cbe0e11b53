"""The max-load problem on groups as a linear model over binaries, for any engine that takes one.

x[v, d] says that group v is on device d. For a net and an accelerator, t says that the accelerator holds one of the
net's groups and w that it holds all of them; the net costs it t - w, which for a net of two is one variable. Without
an order, like accelerators are told apart by the heaviest groups: each may only use the accelerators up to the first
that none before it uses. With an order, devices are places in the chain, y[v, p] says that v is on one of the first p
+ 1 places, forward edges keep y falling, and z[p] says that place p is a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.graph.ideals import topological_line
from planner.solvers.partition._max_load_form import Form, canonical, form_of, prove, reduce_form, simple_bound, space
from planner.solvers.partition.types import NEVER, Deadline, Search

_RANKED_PER_DEVICE = 2


@dataclass(frozen=True, slots=True)
class Row:
    """least <= sum of coefficient * binary <= most, in whole numbers."""

    terms: tuple[tuple[int, int], ...]
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class LoadRow:
    """sum of ms * binary <= largest load, unless a binary is set.

    Attributes:
        terms: (binary, ms): work, what a net costs where a part of it is held, and less the same where all of it is.
        unless: binary that lifts the row; -1 for none.
    """

    terms: tuple[tuple[int, float], ...]
    unless: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """sum of the groups' bytes fits the memory, unless a binary is set.

    Attributes:
        groups: (binary, group).
        unless: binary that lifts the row; -1 for none.
    """

    groups: tuple[tuple[int, int], ...]
    unless: int


@dataclass(slots=True)
class LoadModel:
    """Binaries 0..binaries-1 and what binds them; to be minimised is the largest load."""

    form: Form
    deadline: Deadline = NEVER
    binaries: int = 0
    rows: list[Row] = field(default_factory=list)
    loads: list[LoadRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    place: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    first: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    is_cpu: list[int] = field(default_factory=list)
    parts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def new(self, *shape: int) -> np.ndarray:
        """Fresh binaries, numbered."""
        count = int(np.prod(shape, dtype=np.int64))
        numbers = np.arange(self.binaries, self.binaries + count).reshape(shape)
        self.binaries += count
        return numbers

    def below(self, a: int, b: int) -> None:
        """Binary a implies binary b."""
        self.rows.append(Row(((int(a), 1), (int(b), -1)), -1, 0))


def build_model(form: Form, deadline: Deadline = NEVER) -> LoadModel:
    """The model of a form; O(devices * pins).

    Raises:
        OutOfTime: the deadline passed before it was built.
    """
    model = LoadModel(form, deadline)
    devices = form.problem.devices
    model.place = model.new(form.groups, devices)
    for v in range(form.groups):
        model.rows.append(Row(tuple((int(b), 1) for b in model.place[v]), 1, 1))
    if form.problem.contiguous:
        _add_chain(model)
    else:
        _add_support(model)
        _add_ranks(model)
    for d in range(devices):
        _add_device(model, d)
    return model


def _add_chain(model: LoadModel) -> None:
    form, devices = model.form, model.form.problem.devices
    model.is_cpu = [int(b) for b in model.new(devices)]
    cpus = form.problem.cpus
    model.rows.append(Row(tuple((b, 1) for b in model.is_cpu), cpus, cpus))
    model.first = model.new(form.groups, devices)
    for v in np.flatnonzero(form.ordered):
        model.deadline.check()
        for p in range(devices):
            terms = [(int(model.first[v, p]), 1), (int(model.place[v, p]), -1)]
            if p:
                terms.append((int(model.first[v, p - 1]), -1))
            model.rows.append(Row(tuple(terms), 0, 0))
    for a, b in form.arcs:
        model.deadline.check()
        for p in range(devices - 1):
            model.below(model.first[b, p], model.first[a, p])
    for v in np.flatnonzero(~form.supported):
        for p in range(devices):
            model.below(model.place[v, p], model.is_cpu[p])


def _add_support(model: LoadModel) -> None:
    for v in np.flatnonzero(~model.form.supported):
        for d in range(model.form.problem.accelerators):
            model.rows.append(Row(((int(model.place[v, d]), 1),), 0, 0))


def ranked_groups(form: Form) -> list[int]:
    """The groups by which like accelerators are told apart, heaviest first."""
    able = [int(v) for v in np.argsort(-form.acc, kind="stable") if form.supported[v]]
    return able[: _RANKED_PER_DEVICE * form.problem.accelerators]


def _add_ranks(model: LoadModel) -> None:
    ranked = ranked_groups(model.form)
    for j, v in enumerate(ranked):
        model.deadline.check()
        for d in range(1, model.form.problem.accelerators):
            terms = [(int(model.place[v, d]), 1)]
            terms += [(int(model.place[u, d - 1]), -1) for u in ranked[:j]]
            model.rows.append(Row(tuple(terms), -j, 0))


def _add_device(model: LoadModel, d: int) -> None:
    form = model.form
    chain = form.problem.contiguous
    here = [int(b) for b in model.place[:, d]]
    may_acc, may_cpu = chain or d < form.problem.accelerators, chain or d >= form.problem.accelerators
    if may_acc:
        unless = model.is_cpu[d] if chain else -1
        terms = [(b, float(t)) for b, t in zip(here, form.acc, strict=True) if t > 0]
        for e in range(len(form.nets)):
            terms += _add_net(model, e, d)
        model.loads.append(LoadRow(tuple(terms), unless))
        if not form.roomy:
            groups = tuple((here[v], v) for v in np.flatnonzero(form.size > 0).tolist())
            model.memory.append(MemoryRow(groups, unless))
    if may_cpu:
        work = tuple((b, float(t)) for b, t in zip(here, form.cpu, strict=True) if t > 0)
        unless = int(model.new(1)[0]) if chain else -1
        if chain:
            model.rows.append(Row(((unless, 1), (model.is_cpu[d], 1)), 1, 1))
        model.loads.append(LoadRow(work, unless))


def _add_net(model: LoadModel, e: int, d: int) -> list[tuple[int, float]]:
    """Terms of a load: what a net costs a device."""
    form, cost = model.form, float(model.form.cost[e])
    model.deadline.check()
    pins = [int(b) for b in model.place[list(form.nets[e]), d]]
    if len(pins) == 2:
        cut = int(model.new(1)[0])
        for a, b in (pins, pins[::-1]):
            model.rows.append(Row(((a, 1), (b, -1), (cut, -1)), -2, 0))
        model.parts[e, d] = (cut, -1)
        return [(cut, cost)]
    part, whole = (int(b) for b in model.new(2))
    for pin in pins:
        model.below(pin, part)
        model.below(whole, pin)
    model.parts[e, d] = (part, whole)
    return [(part, cost), (whole, -cost)]


def values_of(model: LoadModel, device: np.ndarray) -> np.ndarray | None:
    """The binaries of a plan on groups, devices renamed as the model wants them; None when the plan has no such form.

    Args:
        model: the model.
        device: int64 [g] device of each group.
    """
    form = model.form
    renamed = _as_chain(form, device) if form.problem.contiguous else _by_rank(form, device)
    if renamed is None:
        return None
    places, cpu_places = renamed
    value = np.zeros(model.binaries, dtype=np.int64)
    value[model.place[np.arange(form.groups), places]] = 1
    for p, b in enumerate(model.is_cpu):
        value[b] = int(p in cpu_places)
    for v in np.flatnonzero(form.ordered) if form.problem.contiguous else ():
        value[model.first[v, places[v] :]] = 1
    for (e, d), (part, whole) in model.parts.items():
        held = (places[list(form.nets[e])] == d).sum()
        value[part] = int(0 < held < len(form.nets[e])) if whole < 0 else int(held > 0)
        if whole >= 0:
            value[whole] = int(held == len(form.nets[e]))
    for row in model.rows:
        if row.least == row.most == 1 and len(row.terms) == 2 and row.terms[1][0] in model.is_cpu:
            value[row.terms[0][0]] = 1 - value[row.terms[1][0]]
    return value


def _by_rank(form: Form, device: np.ndarray) -> tuple[np.ndarray, set[int]]:
    accs = form.problem.accelerators
    names: dict[int, int] = {}
    for v in [*ranked_groups(form), *range(form.groups)]:
        if device[v] < accs:
            names.setdefault(int(device[v]), len(names))
    return np.array([names[int(d)] if d < accs else int(d) for d in device], dtype=np.int64), set()


def _as_chain(form: Form, device: np.ndarray) -> tuple[np.ndarray, set[int]] | None:
    devices = form.problem.devices
    arcs = {(int(device[a]), int(device[b])) for a, b in form.arcs}
    line = topological_line(devices, arcs)
    if len(line) < devices:
        return None
    place = np.zeros(devices, dtype=np.int64)
    place[line] = np.arange(devices)
    cpus = {int(place[d]) for d in range(form.problem.accelerators, devices)}
    return place[device], cpus


def plan_of(model: LoadModel, value: np.ndarray) -> np.ndarray:
    """The device of each group under some values of the binaries, accelerators first."""
    form = model.form
    places = np.asarray(np.argmax(value[model.place], axis=1))
    if not form.problem.contiguous:
        return places
    device = np.zeros(form.problem.devices, dtype=np.int64)
    following = [0, form.problem.accelerators]
    for p, b in enumerate(model.is_cpu):
        kind = int(value[b] > 0)
        device[p] = following[kind]
        following[kind] += 1
    return np.asarray(device[places])


def stated(search: Search) -> LoadModel | None:
    """The model of a search's problem on groups that no better plan tears apart; None where simple bounds settle it.

    Raises:
        OutOfTime: the deadline passed before it was built.
    """
    search.space = space(search.problem)
    form = form_of(search.problem)
    prove(search, simple_bound(form))
    if search.settled:
        return None
    model = build_model(reduce_form(form, search.objective, search.deadline), search.deadline)
    search.count(groups=model.form.groups, binaries=model.binaries)
    return model


def most_ms(search: Search, form: Form) -> float:
    """The load that a better plan stays below: the best plan's, or that of all work and transfers on one device."""
    everything = float(form.acc.sum() + 2 * form.cost.sum() + form.cpu.sum())
    return float(search.objective) if search.decision is not None else everything


def offer(search: Search, model: LoadModel, value: np.ndarray) -> None:
    """Offer the plan that some values of the binaries stand for."""
    search.offer(canonical(model.form.problem, model.form.decision(plan_of(model, value))))
