"""Names for what can be chosen: an entry is a file in a folder with one registration in it.

A package that offers choices (schedules, solvers, importers, ...) holds one `Registry`; each module beside it registers
itself under a name, with what it can do. The modules are imported at the first look-up, not before; if one of them
cannot be imported, every look-up says so, since what it would have registered is missing.

An entry that is a dataclass has its fields as options: `chimera:pairs=2,over=double` is the entry `chimera` with two of
its fields replaced.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

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
        except BaseException as error:
            self._loaded = False
            if isinstance(error, Exception):  # else an interrupt: the next look-up goes on
                self._failure = error
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

    def configured(self, name: str) -> T:
        """The entry of a name with options after a colon: `herring:buffer_bytes=4e6,efficiency=0.7`.

        Raises:
            UsageError: no entry has that name, an option is not known, or its value cannot be read.
        """
        key, _, options = name.partition(":")
        found = self.get(key)
        return with_options(found, options, f"{self._what} {key!r}") if options else found

    def find(self, name: str) -> T | None:
        """The entry of that name, None when there is none."""
        if not self._loaded:
            self._load()
        return self._entries.get(name)

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        self._load()
        return tuple(sorted(self._entries))

    def items(self) -> Iterator[tuple[str, T]]:
        """All entries by sorted name."""
        return ((name, self._entries[name]) for name in self.names())


def name_with_options(entry: object, key: str) -> str:
    """The name that `Registry.configured` reads back: the key, and the options that differ from the usual."""
    fields = [(f, getattr(entry, f.name)) for f in _options(entry)]
    chosen = [f"{f.name}={_written(value)}" for f, value in fields if value != f.default]
    return f"{key}:{','.join(chosen)}" if chosen else key


def with_options(entry: T, text: str, owner: str) -> T:
    """A dataclass with some of its fields replaced, as `pairs=2,over=double` says.

    Args:
        entry: the dataclass, whose values say of which type each field is.
        text: the options.
        owner: what errors call it.

    Raises:
        UsageError: an option is not known, or its value cannot be read.
    """
    known = {f.name: getattr(entry, f.name) for f in _options(entry)}
    chosen: dict[str, object] = {}
    for item in text.split(","):
        option, _, value = item.partition("=")
        if option not in known:
            raise UsageError(f"{owner} has no option {option!r}", hint=did_you_mean(option, known))
        chosen[option] = _read(known[option], value, f"option {option} of {owner}")
    changed: T = dataclasses.replace(cast(Any, entry), **chosen)
    return changed


def _options(entry: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()


def _written(value: object) -> str:
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(usual: object, value: str, where: str) -> object:
    if isinstance(usual, bool):
        if value.lower() not in ("true", "false"):
            raise UsageError(f"cannot read {value!r}", where=where, hint="use true or false")
        return value.lower() == "true"
    read: Any = type(usual)
    try:
        return read(value)
    except ValueError as error:
        choices = [str(choice) for choice in read] if hasattr(read, "__members__") else []
        hint = f"use {' or '.join(choices)}" if choices else f"use a number like {usual}"
        raise UsageError(f"cannot read {value!r}", where=where, hint=hint) from error


def chosen(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of that name.

    Raises:
        UsageError: there is none; the hint names the closest ones.
    """
    if name not in table:
        raise UsageError(f"unknown {what} {name!r}", hint=did_you_mean(name, table))
    return table[name]
