"""Bytes of tensors without data that are alive, as an allocator of a GPU would count them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRANULE_BYTES = 512
"""torch's allocator on GPUs hands out multiples of this."""


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Counts each storage on the meta device from the operator that makes it until its last tensor is gone.

    Attributes:
        now_bytes: bytes that are alive.
        peak_bytes: the most that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes, self.peak_bytes = 0, 0
        self._sizes: dict[int, int] = {}
        self._elsewhere, self._lasting = False, False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 # fmt: skip
        """Run an operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_meta and not self._elsewhere:
                self.count(x)
        return result

    def count(self, x: torch.Tensor) -> None:
        """Count the storage of a tensor at its present size."""
        storage = x.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // GRANULE_BYTES) * GRANULE_BYTES
        if key not in self._sizes:
            weakref.finalize(storage, self._freed, key)
        self.now_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if not self._lasting:
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Context in which what is made does not lie on the device."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Context in which only what outlives it counts: the work of one kernel, which this device lacks."""
        self._lasting = True
        try:
            yield
        finally:
            self._lasting = False
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _freed(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key, 0)
