"""The device that a rank computes on: where its tensors lie, how its time and memory are read, what it exchanges over.

Everything else in the runtime asks here. Small tensors that no weight or sample decides (shapes, axes, sizes) stay in
the host's memory, so that reading them does not wait for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner.errors import UsageError
from planner.runtime.live_bytes import LiveBytes
from planner.sums import float_sum

HOST = torch.device("cpu")
AUTO = "auto"
"""Chooses what the machine has."""
HOST_ELEMENTS = 64
"""Largest number of elements of a tensor that stays in the host's memory where only the host's decide it."""


def settled(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor computed from the host's alone: on the device, unless it is small enough to be shape arithmetic."""
    return x if x.numel() <= HOST_ELEMENTS and not x.is_meta else brought(x, device)


def brought(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; from the host without waiting for what the device still has to do."""
    return x.to(device, non_blocking=True)


def seeded(text: str, device: torch.device = HOST) -> torch.Generator | None:
    """A random generator of a device, seeded by a text; None on the meta device, where nothing is drawn."""
    if device.type == "meta":
        return None
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
    return generator


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


def _keep_freed_memory() -> None:
    """Keep what tensors free for the next ones, where the C library can.

    Else each pass gives its activations back to the system and has them zeroed page by page anew: a tenth of the time
    of a ResNet-50 on a processor.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
        library.mallopt(_M_MMAP_MAX, 0)


class TrainingDevice:
    """The machine's processor. Time is that of the rank's thread, so that ranks may share cores.

    Attributes:
        name: where the rank's tensors lie.
        wire: where a tensor must lie to be exchanged.
        backend: of torch.distributed, for the exchanges between ranks.
        fused: whether torch has optimizers here that update all weights in one pass.
        counts_waiting: whether time passes while a rank waits for others.
    """

    fused = True
    counts_waiting = False

    def __init__(self, name: torch.device = HOST, backend: str = "gloo") -> None:
        self.name, self.backend = name, backend
        self.wire = name if backend == "nccl" or name.type == "meta" else HOST

    def used(self) -> AbstractContextManager[object]:
        """Context in which a rank works on the device."""
        _keep_freed_memory()
        return nullcontext()

    def updating(self) -> AbstractContextManager[object]:
        """Context of an optimizer's update of all weights."""
        return nullcontext()

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor on the device."""
        return brought(x, self.name)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in the host's memory, in another buffer also where the device is the host; without autograd."""
        return x.detach().to(HOST, copy=True)

    def from_host(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that `to_host` copied, on the device again."""
        return brought(x, self.name)

    def numbers(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        """Values of tensors of one element: the only place that waits for results of the device while it trains."""
        return [float(x) for x in torch.stack([x.detach().double() for x in scalars]).tolist()] if scalars else []

    def resize(self, x: torch.Tensor, size_bytes: int) -> None:
        """Free the storage of a tensor, or get one of that size again."""
        x.untyped_storage().resize_(size_bytes)

    def moment(self) -> Any:  # noqa: ANN401
        """A moment in the work of the device."""
        return time.thread_time()

    def seconds(self, since: Any, until: Any) -> float:  # noqa: ANN401
        """Seconds between two moments, after `wait`."""
        return float(until - since)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""

    def memory(self) -> tuple[int, int]:
        """Bytes in use now and at most: of this process, the peak twice where the system does not report the former."""
        status = Path("/proc/self/status")
        if not status.exists():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return peak, peak
        words = dict(line.split(":", 1) for line in status.read_text().splitlines())
        now, peak = (int(words[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return now, peak

    def forget_peak(self) -> None:
        """Reset the peak, so that drawing the initial weights does not count as training."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


class CudaDevice(TrainingDevice):
    """A GPU. Time is that between events of its stream; memory is what torch's allocator has handed out."""

    counts_waiting = True

    def used(self) -> AbstractContextManager[object]:
        """Context in which a rank works on the GPU, which is its current one."""
        context: AbstractContextManager[object] = torch.cuda.device(self.name)
        return context

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, in the order of the stream: it is there before the stream reads it again."""
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return copy.copy_(x.detach(), non_blocking=True)

    def moment(self) -> Any:  # noqa: ANN401
        """An event of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, since: Any, until: Any) -> float:  # noqa: ANN401
        """Seconds between two events."""
        return float(since.elapsed_time(until)) / 1e3

    def wait(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.name)

    def memory(self) -> tuple[int, int]:
        """Bytes of all tensors now and at most, as torch's allocator counts them."""
        return torch.cuda.memory_allocated(self.name), torch.cuda.max_memory_allocated(self.name)

    def forget_peak(self) -> None:
        """Reset the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self.name)


class MetaDevice(TrainingDevice):
    """Tensors without data: orders are run through, and their bytes counted as a GPU's allocator would; no values."""

    fused = False

    def __init__(self, name: torch.device = HOST, backend: str = "") -> None:
        super().__init__(torch.device("meta"), backend)
        self._live = LiveBytes()

    def used(self) -> AbstractContextManager[object]:
        """Context in which bytes are counted."""
        return self._live

    def updating(self) -> AbstractContextManager[object]:
        """An update takes no memory but its state, as that by a fused optimizer of a GPU, which there is not here."""
        return self._live.lasting()

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of a GPU's host has no data either; its bytes are not the device's."""
        with self._live.elsewhere():
            return torch.empty_like(x)

    def from_host(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of that shape."""
        return torch.empty_like(x)

    def numbers(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        """Zeros."""
        return [0.0] * len(scalars)

    def resize(self, x: torch.Tensor, size_bytes: int) -> None:
        """Count the bytes of a tensor whose storage changes its size."""
        super().resize(x, size_bytes)
        self._live.count(x)

    def memory(self) -> tuple[int, int]:
        """Bytes of all tensors now and at most."""
        return self._live.now_bytes, self._live.peak_bytes

    def forget_peak(self) -> None:
        """Take the bytes in use as the peak."""
        self._live.peak_bytes = self._live.now_bytes


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where the ranks of this machine compute.

    Attributes:
        kind: cpu, cuda or meta.
        backend: of torch.distributed, for tensors of the device.
        gpus: GPUs of this machine that ranks share in turn.
        order: numbers of a machine's GPUs in the order of the ranks (`HardwareSection.device_order`); empty for 0, 1,
            2, .. `CUDA_VISIBLE_DEVICES` goes before it.
    """

    kind: str = "cpu"
    backend: str = "gloo"
    gpus: int = 0
    order: tuple[int, ...] = ()

    @property
    def start_method(self) -> str:
        """How processes are started: forked, but for CUDA, which does not work in a fork of a process that used it."""
        return "spawn" if self.kind == "cuda" else "fork"

    def open(self, local_rank: int) -> TrainingDevice:
        """The device of a rank, by its number on this machine."""
        if self.kind == "cuda":
            return CudaDevice(torch.device("cuda", self.gpu_of(local_rank)), self.backend)
        return MetaDevice() if self.kind == "meta" else TrainingDevice(HOST, self.backend)

    def gpu_of(self, local_rank: int) -> int:
        """Number of the GPU of a rank, by its number on this machine."""
        if self.order and "CUDA_VISIBLE_DEVICES" not in os.environ:
            local_rank = self.order[local_rank % len(self.order)]
        return local_rank % self.gpus


def choose(kind: str = AUTO, *, ranks: int = 1, backend: str = AUTO) -> DeviceChoice:
    """Choose the device by name.

    Args:
        kind: "cpu", "cuda", "meta" (shapes without data), or "auto": GPUs where torch sees one, else the processor.
        ranks: ranks on this machine.
        backend: "gloo", "nccl", or "auto": NCCL where each rank has a GPU of its own, else gloo, for which tensors of
            a GPU move through the host's memory. NCCL refuses two ranks on one GPU.

    Raises:
        UsageError: there is no such device or backend here.
    """
    gpus = torch.cuda.device_count() if kind in (AUTO, "cuda") else 0
    kind = ("cuda" if gpus else "cpu") if kind == AUTO else kind
    if kind not in ("cpu", "cuda", "meta") or backend not in (AUTO, "gloo", "nccl"):
        raise UsageError(f"no device {kind!r} with exchanges by {backend!r}", hint="cpu, cuda or meta; gloo or nccl")
    if kind == "cuda" and not gpus:
        raise UsageError("torch sees no GPU on this machine", hint="use --device cpu, or torch with CUDA")
    if backend == "nccl" and ranks > gpus:
        raise UsageError(
            f"NCCL needs a GPU for each rank: {ranks} ranks here, {gpus} GPUs", hint="use --backend gloo"
        )  # fmt: skip
    nccl = kind == "cuda" and ranks <= gpus and backend != "gloo"
    return DeviceChoice(kind, "nccl" if nccl else "gloo", gpus)


class Clock:
    """Measures the actions of a rank in the time of its device, without what it waits for other ranks."""

    def __init__(self, device: TrainingDevice) -> None:
        self._device, self._word = device, ""
        self._since: Any = None
        self._pauses: list[tuple[Any, Any]] = []
        self._spans: list[tuple[str, Any, Any, list[tuple[Any, Any]]]] = []
        self.seconds: dict[str, list[float]] = {}

    def begin(self, word: str) -> None:
        """Note that an action begins, or none for "", and that the one before it has ended."""
        now = self._device.moment()
        if self._word:
            self._spans.append((self._word, self._since, now, self._pauses))
        self._word, self._since, self._pauses = word, now, []

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of an exchange, whose time is not counted where time passes on the device meanwhile."""
        if not self._device.counts_waiting:
            yield
            return
        with self.standing_in():
            yield

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context in which a rank that runs alone makes up what others would have sent, whose time is not counted."""
        since = self._device.moment()
        yield
        self._pauses.append((since, self._device.moment()))

    def read(self) -> None:
        """Wait for the device, and add the seconds of all actions that have ended to `seconds`, by action."""
        self._device.wait()
        for word, since, until, pauses in self._spans:
            waited_s = float_sum(self._device.seconds(*pause) for pause in pauses)
            self.seconds.setdefault(word, []).append(self._device.seconds(since, until) - waited_s)
        self._spans.clear()
