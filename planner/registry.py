"""Names for what can be chosen: an entry is a file in a folder with one registration in it.

A package that offers choices (schedules, solvers, importers, ...) holds one `Registry`; each module beside it registers
itself under a name, with what it can do. The modules are imported at the first look-up, not before; if one of them
cannot be imported, every look-up says so, since what it would have registered is missing.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from planner.errors import UsageError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest of the known names, or lists them when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
    return f"known: {shown}" if names else "none is known"


class Registry(Generic[T]):
    """Entries by name, filled by the modules of one package.

    Args:
        package: dotted name of the package whose modules register entries.
        what: what an entry is called in an error ("schedule", "solver").
    """

    def __init__(self, package: str, what: str) -> None:
        self._package = package
        self._what = what
        self._entries: dict[str, T] = {}
        self._loaded = False
        self._failure: Exception | None = None

    def register(self, name: str, entry: T) -> T:
        """Add an entry; a name can be taken only once."""
        if name in self._entries:
            raise ValueError(f"two {self._what}s are called {name!r}")
        self._entries[name] = entry
        return entry

    def entry(self, name: str) -> Callable[[T], T]:
        """Decorator form of `register`."""
        return lambda entry: self.register(name, entry)

    def _load(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._loaded:
            return
        self._loaded = True  # from here on, so that a module may look up others while it is imported
        try:
            self._import_modules()
        except Exception as error:
            self._failure = error
            raise
        except BaseException:  # an interrupt: the next look-up goes on
            self._loaded = False
            raise

    def _import_modules(self) -> None:
        package = importlib.import_module(self._package)
        for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
            if not module.startswith("_"):
                importlib.import_module(f"{self._package}.{module}")

    def get(self, name: str) -> T:
        """The entry of that name.

        Raises:
            UsageError: no entry has that name; the hint names the closest ones.
        """
        self._load()
        if name not in self._entries:
            raise UsageError(f"unknown {self._what} {name!r}", hint=did_you_mean(name, self._entries))
        return self._entries[name]

    def find(self, name: str) -> T | None:
        """The entry of that name, None when there is none."""
        self._load()
        return self._entries.get(name)

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        self._load()
        return tuple(sorted(self._entries))

    def items(self) -> Iterator[tuple[str, T]]:
        """All entries by sorted name."""
        return ((name, self._entries[name]) for name in self.names())
