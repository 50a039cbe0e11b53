"""The max-load problem on groups as a mixed-integer linear model over binaries, for CP-SAT and HiGHS.

x[v, d] = 1 if group v is on device d. For a net and an accelerator, t = 1 if the accelerator holds any of the net's
groups and w = 1 if it holds all of them; the net adds cost * (t - w), one variable for a net of two groups.
Non-contiguous plans: the heaviest groups break the symmetry of equal accelerators, each may only use the accelerators
up to the first that no heavier group uses. Contiguous plans: devices are places in the chain, y[v, p] = 1 if v is on
one of the places 0..p, y[b, p] <= y[a, p] for every forward edge a -> b, and z[p] = 1 if place p is a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.graph.ideals import topological_line
from planner.solvers.partition._max_load_form import Form, canonical, form_of, prove, reduce_form, simple_bound, space
from planner.solvers.partition.types import NEVER, Deadline, Search

_RANKED_PER_DEVICE = 2


Row = tuple[tuple[tuple[int, int], ...], int, int]
"""(terms, lower, upper): lower <= sum of coefficient * binary <= upper, in integers; terms: (binary, coefficient)."""

LoadRow = tuple[tuple[tuple[int, float], ...], int]
"""(terms, unless): sum of ms * binary <= largest load, lifted if the binary `unless` is 1; -1 for none.

Terms are (binary, ms): the work of each group, and +cost and -cost of each net for its t and w.
"""

MemoryRow = tuple[tuple[tuple[int, int], ...], int]
"""(groups, unless): the groups' bytes fit the memory, lifted if the binary `unless` is 1; groups: (binary, group)."""


@dataclass(slots=True)
class LoadModel:
    """Binaries 0..binaries-1 and their constraints; the largest load is minimised.

    Attributes:
        form: the problem on groups.
        deadline: of building the model.
        binaries: how many there are.
        rows: constraints on binaries alone.
        loads: one row per device, or two where it may be either kind.
        memory: one row per accelerator.
        place: [g, devices] binary of x.
        first: [g, devices] binary of y; empty unless contiguous.
        is_cpu: [devices] binary of z; empty unless contiguous.
        parts: by (net, device) the binaries of t and w; -1 for w of a net of two groups, whose t is "cut".
    """

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
        """Numbers of new binaries, in an array of that shape."""
        count = int(np.prod(shape, dtype=np.int64))
        numbers = np.arange(self.binaries, self.binaries + count).reshape(shape)
        self.binaries += count
        return numbers

    def below(self, a: int, b: int) -> None:
        """Add the constraint a <= b."""
        self.rows.append((((int(a), 1), (int(b), -1)), -1, 0))


def build_model(form: Form, deadline: Deadline = NEVER) -> LoadModel:
    """Build the model of a form; O(devices * pins).

    Raises:
        OutOfTime: the deadline passed before it was built.
    """
    model = LoadModel(form, deadline)
    devices = form.problem.devices
    model.place = model.new(form.groups, devices)
    for v in range(form.groups):
        model.rows.append((tuple((int(b), 1) for b in model.place[v]), 1, 1))
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
    model.rows.append((tuple((b, 1) for b in model.is_cpu), cpus, cpus))
    model.first = model.new(form.groups, devices)
    for v in np.flatnonzero(form.ordered):
        model.deadline.check()
        for p in range(devices):
            terms = [(int(model.first[v, p]), 1), (int(model.place[v, p]), -1)]
            if p:
                terms.append((int(model.first[v, p - 1]), -1))
            model.rows.append((tuple(terms), 0, 0))
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
            model.rows.append((((int(model.place[v, d]), 1),), 0, 0))


def ranked_groups(form: Form) -> list[int]:
    """The groups that break the symmetry of equal accelerators, heaviest first."""
    able = [int(v) for v in np.argsort(-form.acc, kind="stable") if form.supported[v]]
    return able[: _RANKED_PER_DEVICE * form.problem.accelerators]


def _add_ranks(model: LoadModel) -> None:
    ranked = ranked_groups(model.form)
    for j, v in enumerate(ranked):
        model.deadline.check()
        for d in range(1, model.form.problem.accelerators):
            terms = [(int(model.place[v, d]), 1)]
            terms += [(int(model.place[u, d - 1]), -1) for u in ranked[:j]]
            model.rows.append((tuple(terms), -j, 0))


def _add_device(model: LoadModel, d: int) -> None:
    form = model.form
    chain = form.problem.contiguous
    placed = [int(b) for b in model.place[:, d]]
    may_acc, may_cpu = chain or d < form.problem.accelerators, chain or d >= form.problem.accelerators
    if may_acc:
        unless = model.is_cpu[d] if chain else -1
        terms = [(b, float(t)) for b, t in zip(placed, form.acc, strict=True) if t > 0]
        for e in range(len(form.nets)):
            terms += _add_net(model, e, d)
        model.loads.append((tuple(terms), unless))
        if not form.roomy:
            groups = tuple((placed[v], v) for v in np.flatnonzero(form.size > 0).tolist())
            model.memory.append((groups, unless))
    if may_cpu:
        work = tuple((b, float(t)) for b, t in zip(placed, form.cpu, strict=True) if t > 0)
        unless = int(model.new(1)[0]) if chain else -1
        if chain:
            model.rows.append((((unless, 1), (model.is_cpu[d], 1)), 1, 1))
        model.loads.append((work, unless))


def _add_net(model: LoadModel, e: int, d: int) -> list[tuple[int, float]]:
    """Add the binaries of a net on a device; returns the terms of the device's load."""
    form, cost = model.form, float(model.form.cost[e])
    model.deadline.check()
    pins = [int(b) for b in model.place[list(form.nets[e]), d]]
    if len(pins) == 2:
        cut = int(model.new(1)[0])
        for a, b in (pins, pins[::-1]):
            model.rows.append((((a, 1), (b, -1), (cut, -1)), -2, 0))
        model.parts[e, d] = (cut, -1)
        return [(cut, cost)]
    any_held, all_held = (int(b) for b in model.new(2))
    for pin in pins:
        model.below(pin, any_held)
        model.below(all_held, pin)
    model.parts[e, d] = (any_held, all_held)
    return [(any_held, cost), (all_held, -cost)]


def values_of(model: LoadModel, device: np.ndarray) -> np.ndarray | None:
    """int64 [binaries] values that state a plan on groups, devices renumbered to keep the model's order of devices.

    None if the plan is not contiguous and the model is.

    Args:
        model: the model.
        device: int64 [g] device of each group.
    """
    form = model.form
    line = _as_chain(form, device) if form.problem.contiguous else _by_rank(form, device)
    if line is None:
        return None
    places, cpu_places = line
    value = np.zeros(model.binaries, dtype=np.int64)
    value[model.place[np.arange(form.groups), places]] = 1
    for p, b in enumerate(model.is_cpu):
        value[b] = int(p in cpu_places)
    for v in np.flatnonzero(form.ordered) if form.problem.contiguous else ():
        value[model.first[v, places[v] :]] = 1
    for (e, d), (any_held, all_held) in model.parts.items():
        held = (places[list(form.nets[e])] == d).sum()
        value[any_held] = int(0 < held < len(form.nets[e])) if all_held < 0 else int(held > 0)
        if all_held >= 0:
            value[all_held] = int(held == len(form.nets[e]))
    for terms, lower, upper in model.rows:
        if lower == upper == 1 and len(terms) == 2 and terms[1][0] in model.is_cpu:
            value[terms[0][0]] = 1 - value[terms[1][0]]
    return value


def _by_rank(form: Form, device: np.ndarray) -> tuple[np.ndarray, set[int]]:
    accs = form.problem.accelerators
    numbers: dict[int, int] = {}
    for v in [*ranked_groups(form), *range(form.groups)]:
        if device[v] < accs:
            numbers.setdefault(int(device[v]), len(numbers))
    return np.array([numbers[int(d)] if d < accs else int(d) for d in device], dtype=np.int64), set()


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
    """int64 [g] device of each group under some values of the binaries, accelerators first."""
    form = model.form
    places = np.asarray(np.argmax(value[model.place], axis=1))
    if not form.problem.contiguous:
        return places
    device = np.zeros(form.problem.devices, dtype=np.int64)
    next_number = [0, form.problem.accelerators]
    for p, b in enumerate(model.is_cpu):
        kind = int(value[b] > 0)
        device[p] = next_number[kind]
        next_number[kind] += 1
    return np.asarray(device[places])


def search_model(search: Search) -> LoadModel | None:
    """The model of a search's problem on reduced groups (`reduce_form`); None if the simple bounds settle the search.

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


def upper_bound_ms(search: Search, form: Form) -> float:
    """Upper bound on the optimal load, ms: the best plan's load, else all work and transfers on one device."""
    total_ms = float(form.acc.sum() + 2 * form.cost.sum() + form.cpu.sum())
    return float(search.objective) if search.decision is not None else total_ms


def offer(search: Search, model: LoadModel, value: np.ndarray) -> None:
    """Offer the plan that some values of the binaries state."""
    search.offer(canonical(model.form.problem, model.form.decision(plan_of(model, value))))
