"""Starts the ranks of a plan as processes of this machine, watches them, and ends them together."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import RunError, ShardplanError
from planner.plans import Plan
from planner.processes import end, end_with_parent, scratch
from planner.runtime.device import DeviceChoice, TrainingDevice
from planner.runtime.network import listen_on, loopback
from planner.runtime.orders import sequences

Body = Callable[[int, "Link"], Any]
"""Runs in each rank with its number and its `Link`; the result is sent to the starting process."""

_GRACE_S = 2.0


@dataclass(frozen=True)
class Link:
    """Connection of a rank to the process that started it.

    Attributes:
        places: for every rank, its place in its order and a counter of actions; shared memory.
        pipe: carries messages.
        rank: number of the rank.
        device: where it computes.
    """

    places: Any
    pipe: multiprocessing.connection.Connection
    rank: int
    device: TrainingDevice = field(default_factory=TrainingDevice)

    def at(self, place: int, text: str) -> None:
        """Report the action that comes next."""
        self.places[2 * self.rank] = place
        self.places[2 * self.rank + 1] += 1

    def tell(self, kind: str, value: Any) -> None:  # noqa: ANN401
        """Send a message."""
        self.pipe.send((kind, value))


def ready_to_fork() -> None:
    """Make torch import its lazy modules before ranks are forked, so that each rank need not."""
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([weight], lr=0.0).step()


def _join(rank: int, world: int, store: str, timeout_s: float) -> None:
    """Join the process group of all ranks; without a store there is none, since the rank runs alone."""
    if store:
        listen_on(loopback())
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )  # fmt: skip


def _child(
    body: Body, rank: int, world: int, store: str, link: Link, timeout_s: float, choice: DeviceChoice, local: int
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    code = 0
    try:
        link = replace(link, device=choice.open(local))
        with link.device.used():
            _join(rank, world, store, timeout_s)
            link.tell("done", body(rank, link))
            if store:
                dist.barrier()
    except BaseException as error:
        code = 1
        peer = isinstance(error, (RuntimeError, ValueError)) and any(
            word in str(error) for word in ("closed by peer", "reset by peer", "gloo", "Timed out", "timed out")
        )
        exact = error if isinstance(error, ShardplanError) else None
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        with contextlib.suppress(OSError):
            link.tell("error", (peer, exact, f"{type(error).__name__}: {text}", traceback.format_exc()))
    link.pipe.close()
    os._exit(code)


def run_ranks(
    plan: Plan,
    body: Body,
    *,
    timeout_s: float = 60.0,
    told: Callable[[int, str, Any], None] = lambda rank, kind, value: None,
    alone: int | None = None,
    device: DeviceChoice = DeviceChoice(),  # noqa: B008
) -> list[Any]:
    """Run every rank of a plan in a process of its own on this machine, or one alone.

    The first rank that fails, dies, or stands still for too long ends all of them; no process is left behind.

    Args:
        plan: the plan.
        body: runs in every rank; may be a closure where ranks are forked, as they are but on GPUs.
        timeout_s: longest time in which no rank begins another action.
        told: called with rank, kind and value of every message before the result.
        alone: the only rank to run, without a process group.
        device: where ranks compute; they have it as `Link.device`.

    Returns:
        Results of `body`, by rank.

    Raises:
        RunError: a rank failed; the message has its number, its action and the cause.
        ShardplanError: a rank refused the plan or the model.
    """
    ready_to_fork()
    context: Any = multiprocessing.get_context(device.start_method)
    world = plan.world_size
    places = context.Array(ctypes.c_long, 2 * world, lock=False)
    with scratch("run") as folder:
        pipes, processes = {}, {}
        store = str(folder / "store") if alone is None else ""
        try:
            for local, rank in enumerate(range(world) if alone is None else [alone]):
                receiver, sender = context.Pipe(duplex=False)
                link = Link(places, sender, rank)
                arguments = body, rank, world, store, link, 4 * timeout_s, device, local
                process = context.Process(target=_child, args=arguments, daemon=True)
                process.start()
                sender.close()
                pipes[rank] = receiver
                processes[rank] = process
            return _Watch(plan, pipes, processes, places, timeout_s, told).results()
        finally:
            end(processes.values(), grace_s=_GRACE_S)


class _Watch:
    """Reads the messages of all ranks until all are done or one has failed."""

    def __init__(
        self,
        plan: Plan,
        pipes: dict[int, Any],
        processes: dict[int, Any],
        places: Any,  # noqa: ANN401
        timeout_s: float,
        told: Callable[[int, str, Any], None],
    ) -> None:
        self._plan, self._pipes, self._processes = plan, pipes, processes
        self._places, self._timeout_s, self._told = places, timeout_s, told
        self._done: dict[int, Any] = {}
        self._errors: dict[int, tuple[bool, ShardplanError | None, str, str]] = {}

    def results(self) -> list[Any]:
        """Results of the ranks."""
        seen, since = list(self._places), time.monotonic()
        open_pipes = dict(self._pipes)
        while open_pipes:
            self._read(open_pipes, 0.2)
            if self._errors or self._silent():
                self._read(open_pipes, 0.5)
                until = time.monotonic() + _GRACE_S
                while not self._silent() and self._only_lost() and time.monotonic() < until:
                    self._read(open_pipes, 0.1)  # what a rank lost may end, or tell its error, after it
                self._fail()
            if list(self._places) != seen:
                seen, since = list(self._places), time.monotonic()
            elif time.monotonic() - since > self._timeout_s and len(self._done) < len(self._pipes):
                raise self._stands_still()
        return [self._done.get(rank) for rank in self._pipes]

    def _read(self, open_pipes: dict[int, Any], wait_s: float) -> None:
        ready = multiprocessing.connection.wait(list(open_pipes.values()), timeout=wait_s)
        for rank, pipe in list(open_pipes.items()):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                del open_pipes[rank]
                continue
            if kind == "error":
                self._errors[rank] = value
            elif kind == "done":
                self._done[rank] = value
            else:
                self._told(rank, kind, value)

    def _silent(self) -> list[int]:
        """Ranks that ended badly and told nothing."""
        dead = (rank for rank, process in self._processes.items() if process.exitcode not in (None, 0))
        return [rank for rank in dead if rank not in self._errors and rank not in self._done]

    def _only_lost(self) -> bool:
        """Whether all errors are of ranks that lost their peers."""
        return all(lost for lost, *_ in self._errors.values())

    def _fail(self) -> None:
        """Raise the error of the rank that failed first, not of one that lost its peer."""
        failed_ranks = sorted(self._errors, key=lambda rank: (self._errors[rank][0], rank))
        silent = self._silent()
        if silent and (not failed_ranks or self._errors[failed_ranks[0]][0]):
            code = self._processes[silent[0]].exitcode
            cause = f"the process was ended by signal {-code}" if code < 0 else f"the process exited with {code}"
            raise self._error(silent[0], cause)
        if not failed_ranks:
            return
        _, exact, text, trace = self._errors[failed_ranks[0]]
        if exact is not None:
            raise exact
        raise self._error(failed_ranks[0], text) from RuntimeError(trace)

    def _error(self, rank: int, cause: str) -> RunError:
        return RunError(cause, where=f"rank {rank} at {self._action(rank)}", hint="--debug shows the traceback")

    def _stands_still(self) -> RunError:
        waiting = [r for r in self._pipes if r not in self._done]
        shown = ", ".join(f"rank {rank} at {self._action(rank)}" for rank in waiting[:4])
        return RunError(
            f"no rank went on for {self._timeout_s:g} s", where=shown,
            hint="a rank is slower than that or waits for ever; --timeout gives them longer",
        )  # fmt: skip

    def _action(self, rank: int) -> str:
        place = self._places[2 * rank]
        if not self._places[2 * rank + 1]:
            return "start"
        actions = sequences(self._plan)[rank]
        return str(actions[place]) if place < len(actions) else "the end of an iteration"


def in_process(body: Callable[[TrainingDevice], Mapping[str, Any]], path: Path, choice: DeviceChoice) -> None:
    """Run a function in another process on a device and save the tensors that it returns to a file.

    Raises:
        RunError: it failed.
        ShardplanError: it refused its arguments.
    """
    ready_to_fork()
    context: Any = multiprocessing.get_context(choice.start_method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_saved, args=(body, path, choice, sender), daemon=True)
    try:
        process.start()
        sender.close()
        error_or_none = receiver.recv()
    except EOFError:
        error_or_none = RunError(
            "the process ended without an answer", where="the whole model", hint="is memory short?"
        )
    finally:
        end([process], grace_s=_GRACE_S)
    if error_or_none is not None:
        raise error_or_none


def _saved(body: Callable[[TrainingDevice], Mapping[str, Any]], path: Path, choice: DeviceChoice, sender: Any) -> None:  # noqa: ANN401
    """Run the body of `in_process`, save what it returns, and send None, or the error."""
    end_with_parent()
    try:
        device = choice.open(0)
        with device.used():
            torch.save(dict(body(device)), path)
        sender.send(None)
    except ShardplanError as error:
        sender.send(error)
    except BaseException as error:
        sender.send(RunError(f"{type(error).__name__}: {error}", where="the whole model"))
