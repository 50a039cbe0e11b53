"""Python's garbage collection, put off while many objects are made that all stay.

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
    """No cycles are looked for within, which looks at every object again and again; nests.

    For reading a model and pricing it, a sixth of the time of which goes there; not for searches, which may leave much
    behind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
