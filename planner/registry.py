"""Registries of what a user can choose by name: an entry is a file in a folder that registers itself.

A package that offers choices (schedules, solvers, importers, ...) holds one `Registry`; each module beside it registers
itself under a name. The modules are imported at the first look-up. If one of them cannot be imported, every look-up
raises its error, since an entry would be missing.

An entry that is a dataclass has as options those of its fields that have a default: `chimera:pairs=2,over=double` is
the entry `chimera` with two of them replaced. Fields without a default say which entry it is.
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
        what: noun for an entry in errors ("schedule", "solver").
    """

    def __init__(self, package: str, what: str) -> None:
        self._package = package
        self._what = what
        self._entries: dict[str, T] = {}
        self._loaded = False
        self._failure: Exception | None = None

    def register(self, name: str, entry: T) -> T:
        """Add an entry; registering a name twice is a ValueError."""
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
            if isinstance(error, Exception):  # after an interrupt the next look-up resumes loading
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
        entry = self.get(key)
        return with_options(entry, options, f"{self._what} {key!r}") if options else entry

    def find(self, name: str) -> T | None:
        """The entry of that name; None if there is none."""
        if not self._loaded:
            self._load()
        return self._entries.get(name)

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        self._load()
        return tuple(sorted(self._entries))

    def items(self) -> Iterator[tuple[str, T]]:
        """Names and entries, sorted by name."""
        return ((name, self._entries[name]) for name in self.names())


def name_with_options(entry: object, key: str) -> str:
    """The name for `Registry.configured`: the key and the options whose values differ from the defaults."""
    fields = [(f, getattr(entry, f.name)) for f in options_of(entry)]
    options = [f"{f.name}={_option_text(value)}" for f, value in fields if value != f.default]
    return f"{key}:{','.join(options)}" if options else key


def with_options(entry: T, text: str, owner: str) -> T:
    """A dataclass with fields replaced by the options of a text, `pairs=2,over=double`.

    Args:
        entry: the dataclass; the types of its current values are those of the options.
        text: the options.
        owner: name of the dataclass in errors.

    Raises:
        UsageError: an option is not known, or its value cannot be read.
    """
    known = {f.name: getattr(entry, f.name) for f in options_of(entry)}
    values: dict[str, object] = {}
    for item in text.split(","):
        option, _, value = item.partition("=")
        if option not in known:
            raise UsageError(f"{owner} has no option {option!r}", hint=did_you_mean(option, known))
        values[option] = _read(known[option], value, f"option {option} of {owner}")
    changed: T = dataclasses.replace(cast(Any, entry), **values)
    return changed


def options_of(entry: object) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of an entry that are options: those of a dataclass that have a default."""
    fields = dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()
    return tuple(field for field in fields if field.default is not dataclasses.MISSING)


def _option_text(value: object) -> str:
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(default: object, value: str, where: str) -> object:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise UsageError(f"cannot read {value!r}", where=where, hint="use true or false")
        return value.lower() == "true"
    read: Any = type(default)
    try:
        return read(value)
    except ValueError as error:
        choices = [str(choice) for choice in read] if hasattr(read, "__members__") else []
        hint = f"use {' or '.join(choices)}" if choices else f"use a number like {default}"
        raise UsageError(f"cannot read {value!r}", where=where, hint=hint) from error


def chosen(what: str, name: str, table: Mapping[str, T]) -> T:
    """Look a name up in a table of choices.

    Raises:
        UsageError: the table lacks the name; the hint names the closest ones.
    """
    if name not in table:
        raise UsageError(f"unknown {what} {name!r}", hint=did_you_mean(name, table))
    return table[name]
