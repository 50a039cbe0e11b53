"""Loads of a plan on groups, kept up to date move by move, and what every single move would do to them."""

from __future__ import annotations

import numpy as np

from planner.memory import fits
from planner.solvers.partition._max_load_form import Form


class Loads:
    """Loads of the devices under an assignment of groups.

    A net costs an accelerator that holds some of its groups but not all. So a group that leaves device y for device x
    changes the loads of these two alone.

    Attributes:
        form: the problem on groups.
        device: int64 [g] device of each group.
        load: float64 [devices] ms.
        held: float64 [devices] bytes.
    """

    def __init__(self, form: Form, device: np.ndarray) -> None:
        self.form = form
        problem = form.problem
        self.devices, self.accs = problem.devices, problem.accelerators
        self.device = np.array(device, dtype=np.int64)
        sizes = np.array([len(pins) for pins in form.nets], dtype=np.int64)
        pin_net = np.repeat(np.arange(len(sizes)), sizes)
        pin_group = np.array([v for pins in form.nets for v in pins], dtype=np.int64)
        order = np.lexsort((pin_net, pin_group))
        self.pin_net, self.pin_group, self.net_size = pin_net[order], pin_group[order], sizes
        self.time = np.where(np.arange(self.devices) < self.accs, form.acc[:, None], form.cpu[:, None])
        self.allowed = np.ones((form.groups, self.devices), dtype=bool)
        self.allowed[~form.supported, : self.accs] = False
        self.on_acc = np.arange(self.devices) < self.accs
        self.refresh()

    def refresh(self) -> None:
        """Compute counts and loads anew from the assignment; O(pins + groups)."""
        self.count = np.zeros((len(self.net_size), self.devices), dtype=np.int64)
        np.add.at(self.count, (self.pin_net, self.device[self.pin_group]), 1)
        members = np.arange(self.form.groups)
        work = np.bincount(self.device, weights=self.time[members, self.device], minlength=self.devices)
        self.held = np.bincount(self.device, weights=self.form.size, minlength=self.devices)
        cut = (self.count > 0) & (self.count < self.net_size[:, None])
        self.load: np.ndarray = work + (self.form.cost @ cut if len(cut) else 0.0) * self.on_acc

    def move(self, group: int, to: int) -> None:
        """Put a group on another device; O(pins of the group * devices)."""
        start, stop = np.searchsorted(self.pin_group, [group, group + 1])
        nets = self.pin_net[start:stop]
        before, whole = self.count[nets], self.net_size[nets, None]
        self.count[nets, self.device[group]] -= 1
        self.count[nets, to] += 1
        after = self.count[nets]
        change = ((after > 0) & (after < whole)).astype(float) - ((before > 0) & (before < whole))
        self.load += (self.form.cost[nets] @ change) * self.on_acc
        came = self.device[group]
        self.load[came] -= self.time[group, came]
        self.load[to] += self.time[group, to]
        self.held[came] -= self.form.size[group]
        self.held[to] += self.form.size[group]
        self.device[group] = to

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """What each move would do: loads that its device is left with [g], and that each device gets [g, devices].

        The second is infinite where a move is not allowed or does not fit the memory.
        """
        cost = self.form.cost[:, None]
        whole = self.net_size[:, None]
        joining = cost * ((self.count + 1 < whole).astype(float) - (self.count >= 1))
        groups = self.form.groups
        gets = np.zeros((groups, self.devices))
        leaves = np.zeros(groups)
        if len(self.pin_net):
            present, first = np.unique(self.pin_group, return_index=True)
            gets[present] = np.add.reduceat(joining[self.pin_net], first, axis=0)
            here = self.count[self.pin_net, self.device[self.pin_group]]
            change = self.form.cost[self.pin_net] * ((here >= 2).astype(float) - (here < self.net_size[self.pin_net]))
            leaves[present] = np.add.reduceat(change, first)
        members = np.arange(groups)
        left = self.load[self.device] - self.time[members, self.device] + leaves * self.on_acc[self.device]
        got = self.load + self.time + gets * self.on_acc
        full = self.on_acc & ~fits(self.held + self.form.size[:, None], self.form.problem.memory_bytes)
        got[full | ~self.allowed] = np.inf
        got[members, self.device] = np.inf
        return left, got
