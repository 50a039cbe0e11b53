"""Measures messages and collectives among ranks of this machine: over gloo on its processor, NCCL on its GPUs."""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import RunError, UsageError
from planner.hardware import LinkSketch, MachineFigures, fitted_line, measure_machine, measured_row
from planner.hardware.types import Collective
from planner.processes import end, end_with_parent, scratch
from planner.runtime.groups import all_gather, reduce_scatter
from planner.runtime.network import listen_on, loopback

RUNS_OF: Mapping[int, int] = {4 << 10: 50, 64 << 10: 50, 1 << 20: 20, 8 << 20: 8, 64 << 20: 3}
"""How often each size in bytes is exchanged."""

PING = "ping"
_WARM_RUNS = 2
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Measured times of messages and collectives.

    Attributes:
        backend: gloo or nccl.
        ranks: number of ranks that took part.
        ping_s: by bytes, seconds of a message from one rank to another.
        collectives_s: by collective and bytes that all ranks hold together, seconds of the slowest rank.
        machine: figures of the processor for one rank while all ranks compute; None on GPUs.
    """

    backend: str
    ranks: int
    ping_s: Mapping[int, float]
    collectives_s: Mapping[Collective, Mapping[int, float]]
    machine: MachineFigures | None = None

    def sketch(self) -> LinkSketch:
        """The link of a hardware profile: latency and bandwidth of messages, and the time of each collective."""
        latency_s, byte_per_s = fitted_line(list(self.ping_s), list(self.ping_s.values()))
        rows = {str(kind): [measured_row(kind, self.ranks, times)] for kind, times in self.collectives_s.items()}
        source = f"measured by {self.backend}, torch {torch.__version__}, {self.ranks} ranks"
        latency_s, byte_per_s = float(f"{latency_s:.3g}"), float(f"{byte_per_s:.4g}")
        return LinkSketch(self.backend, byte_per_s, 1, self.ranks, latency_s, 1.0, source=source, measured=rows)


def measure_links(ranks: int, *, on_gpus: bool = False, runs_of: Mapping[int, int] = RUNS_OF) -> MeasuredLink:
    """Measure messages and all collectives that plans use, among processes of this machine. Takes some seconds.

    Args:
        ranks: processes; on GPUs one a GPU, else they share the processor's cores.
        on_gpus: measure NCCL between this machine's GPUs.
        runs_of: how often each size in bytes is exchanged.

    Raises:
        UsageError: fewer than two ranks, or more than there are GPUs.
        RunError: a rank failed.
    """
    if ranks < 2:
        raise UsageError(f"{ranks} rank exchanges nothing", hint="measure 2 or more")
    if on_gpus and torch.cuda.device_count() < ranks:
        raise UsageError(f"{ranks} ranks, but torch sees {torch.cuda.device_count()} GPUs", hint="use fewer ranks")
    with scratch("links") as folder, _own_cores(ranks):
        arguments = ranks, on_gpus, folder, runs_of
        started = torch.multiprocessing.spawn(_rank, args=arguments, nprocs=ranks, join=False, daemon=True)
        try:
            while not started.join():
                pass
        except Exception as error:  # what a rank raised, as torch hands it on
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            raise RunError(reason, where="measuring links", hint="--debug shows the traceback") from error
        finally:
            end(started.processes)
        seconds, machine = pickle.loads((folder / "found").read_bytes())
    collectives_s = {kind: by_bytes for kind, by_bytes in seconds.items() if kind != PING}
    return MeasuredLink("nccl" if on_gpus else "gloo", ranks, seconds[PING], collectives_s, machine)


@contextlib.contextmanager
def _own_cores(ranks: int) -> Iterator[None]:
    """Context in which processes are started with their share of the cores."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, str(max(1, (os.cpu_count() or 1) // ranks))))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


def _rank(rank: int, ranks: int, on_gpus: bool, folder: Path, runs_of: Mapping[int, int]) -> None:
    end_with_parent()
    listen_on(loopback())
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=store, rank=rank, world_size=ranks)
    seconds: dict[str, dict[int, float]] = {}
    for size, runs in runs_of.items():
        for kind, exchange in _exchanges(size // 4, rank, ranks, device).items():
            seconds.setdefault(kind, {})[size] = _slowest_s(exchange, runs, device)
    dist.barrier()
    machine = None if on_gpus else measure_machine()
    if rank == 0:
        seconds[PING] = {size: s / 2 for size, s in seconds[PING].items()}
        (folder / "found").write_bytes(pickle.dumps((seconds, machine)))
    dist.barrier()
    dist.destroy_process_group()


def _exchanges(elements: int, rank: int, ranks: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """One round of each exchange, by name."""
    whole = torch.ones(elements // ranks * ranks, device=device)
    other, part = torch.empty_like(whole), torch.ones(elements // ranks, device=device)

    def ping() -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(whole, 1 - sender)
            elif rank == 1 - sender:
                dist.recv(other, sender)

    return {
        PING: ping,
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole),
        Collective.ALL_GATHER: lambda: all_gather(other, part),
        Collective.REDUCE_SCATTER: lambda: reduce_scatter(part, whole),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole),
        Collective.BROADCAST: lambda: dist.broadcast(whole, 0),
    }


def _slowest_s(exchange: Callable[[], object], runs: int, device: torch.device) -> float:
    """Median seconds of an exchange on its slowest rank."""
    seconds = []
    for _ in range(_WARM_RUNS + runs):
        dist.barrier()
        start = time.perf_counter()
        exchange()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(seconds[_WARM_RUNS:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
