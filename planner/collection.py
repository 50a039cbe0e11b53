"""Suspend Python's garbage collector while many long-lived objects are created.

>>> import gc
>>> with uncollected():
...     gc.isenabled()
False
>>> gc.isenabled()
True
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector inside the block; blocks may nest.

    Collections are a sixth of the time of reading and pricing a model. Searches should not use this, since they may
    leave much garbage behind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
