"""Exchanges between ranks: collectives of groups, and messages from one rank to another, on any device.

NCCL has no tags, and runs what is given to one communicator in its order: messages between two ranks are posted in the
order in which they are sent, and each direction has a communicator of its own, so that none waits for one the other
way. Communicators are set up by a first exchange in one order on all ranks, since that waits for the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import JobError
from planner.runtime.device import Clock, TrainingDevice

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers equal parts into one tensor; the first name is that since torch 2.13."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankGroup:
    """Ranks that exchange tensors, as one of them sees them. All calls are collective.

    Args:
        handle: process group; None where the rank runs alone, and its own tensors stand for those of the others.
        size: number of ranks.
        place: this rank's place among them.
        wire: where tensors must lie to be exchanged.
        clock: does not count the exchanges.
    """

    def __init__(self, handle: Any, size: int, place: int, wire: torch.device, clock: Clock) -> None:  # noqa: ANN401
        self._handle, self.size, self.place = handle, size, place
        self._wire, self._clock = wire, clock

    def sum(self, x: torch.Tensor) -> None:
        """Add up a tensor over the ranks, in place."""
        self.begin_sum(x)()

    def begin_sum(self, x: torch.Tensor) -> Callable[[], None]:
        """Begin to add up a contiguous tensor over the ranks in place; what is returned waits until it is done."""
        if self._handle is None:
            return lambda: None
        with self._clock.waiting():
            sent = x.to(self._wire)
            work = dist.all_reduce(sent, group=self._handle, async_op=True)

        def finish() -> None:
            with self._clock.waiting():
                work.wait()
                if sent is not x:
                    x.copy_(sent)

        return finish

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Tensors of all ranks, which are shaped alike, in a new first dimension."""
        if self._handle is None:
            with self._clock.standing_in():
                return torch.stack([x] * self.size)
        with self._clock.waiting():
            sent = x.to(self._wire).contiguous()
            gathered = sent.new_empty(self.size, *sent.shape)
            all_gather(gathered.view(-1), sent.view(-1), group=self._handle)
            return gathered.to(x.device)

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        """Give piece j (of the first dimension) to rank j; the pieces from all ranks, in their order."""
        if self._handle is None:
            return pieces
        with self._clock.waiting():
            sent = pieces.to(self._wire).contiguous()
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self._handle)
            return received.to(pieces.device)

    def gather_into(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Put the equal shares of all ranks one after the other into a flat tensor, which may hold the own share."""
        if self._handle is None:
            with self._clock.standing_in():
                for piece in whole.chunk(self.size):
                    piece.copy_(share)
            return
        if whole.device != self._wire:
            whole.copy_(self.gather(share).flatten())
            return
        with self._clock.waiting():
            all_gather(whole, share.clone(), group=self._handle)

    def scatter_sum(self, whole: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """This rank's share of the sum of flat tensors over the ranks; shares are equal.

        With `in_place` the share may lie in the tensor that was given.
        """
        if self._handle is None:
            with self._clock.standing_in():
                share = whole.chunk(self.size)[self.place]
                return share if in_place else share.clone()
        with self._clock.waiting():
            sent = whole.to(self._wire)
            share = sent.new_empty(whole.numel() // self.size)
            reduce_scatter(share, sent, group=self._handle)
            return share.to(whole.device)


class Communicator:
    """The exchanges of one rank.

    Args:
        device: where it computes.
        rank: its number.
        world: number of ranks of the plan.
        alone: whether it runs alone, with stand-ins: zeros for what others would send, its own tensors for sums and
            gathered ones. Otherwise the default process group is ready.

    Raises:
        JobError: the number of processes is not that of the plan's ranks.
    """

    def __init__(self, device: TrainingDevice, rank: int, world: int, *, alone: bool = False) -> None:
        self.device, self.rank, self.alone = device, rank, alone
        self.clock = Clock(device)
        self._directions: dict[tuple[int, int], Any] = {}
        self.processes: Any = None
        """Process group of all ranks for tensors of the host."""
        if alone:
            return
        if dist.get_world_size() != world:
            message = f"{dist.get_world_size()} processes for a plan of {world} ranks"
            raise JobError(message, hint=f"start {world} processes")
        self.processes = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def sum_of_all(self, x: torch.Tensor) -> None:
        """Add up a tensor in the host's memory over all ranks, in place."""
        if not self.alone:
            dist.all_reduce(x, group=self.processes)

    def groups(self, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], RankGroup]:
        """The groups that this rank is in, by their ranks. A collective call of all ranks, with the same groups."""
        groups = {}
        for ranks in wanted:
            handle = None if self.alone else dist.new_group(list(ranks), backend=self.device.backend)
            if self.rank in ranks:
                groups[ranks] = RankGroup(handle, len(ranks), ranks.index(self.rank), self.device.wire, self.clock)
                if self._on_nccl:
                    groups[ranks].sum(torch.zeros(1, device=self.device.wire))
        return groups

    @property
    def single(self) -> RankGroup:
        """A group of this rank alone."""
        return RankGroup(None, 1, 0, self.device.wire, self.clock)

    @property
    def _on_nccl(self) -> bool:
        return not self.alone and self.device.backend == "nccl"

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready for messages from ranks to ranks. A collective call of all ranks, with the same pairs in order."""
        for sender, receiver in pairs if self._on_nccl else ():
            self._directions[sender, receiver] = dist.new_group([sender, receiver], backend=self.device.backend)
            if self.rank == sender:
                self.send(torch.zeros(1, device=self.device.wire), receiver)[0].wait()
            elif self.rank == receiver:
                self.post((1,), torch.float32, sender)()

    def send(self, x: torch.Tensor, peer: int) -> tuple[Any, torch.Tensor]:
        """Send a tensor without waiting: the work that sends it, and the buffer that it reads until then."""
        with self.clock.waiting():
            wired = x.detach().to(self.device.wire).contiguous()
            wired = wired.to(torch.uint8) if wired.dtype is torch.bool else wired
            group = self._directions.get((self.rank, peer), self.processes)
            return dist.isend(wired, peer, group=group), wired

    def post(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Callable[[], torch.Tensor]:
        """Expect the next tensor from a rank; what is returned waits for it."""
        if self.alone:
            return lambda: self._stand_in(shape, dtype)
        wired = torch.uint8 if dtype is torch.bool else dtype
        room = torch.empty(shape, dtype=wired, device=self.device.wire)
        work = dist.irecv(room, peer, group=self._directions.get((peer, self.rank), self.processes))

        def arrived() -> torch.Tensor:
            with self.clock.waiting():
                work.wait()
                return self.device.place(room).to(dtype)

        return arrived

    def _stand_in(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in place of a tensor from another rank."""
        with self.clock.standing_in():
            return torch.zeros(shape, dtype=dtype, device=self.device.name)
