"""Tables of all options of a framework, and the options of a file held against them.

A table (`<framework>.tsv`) has one line an option, with tabs between:

| column | meaning |
|---|---|
| names | the option and its other names; one that ends in `*` stands for all names that begin so |
| kind | `flag`, `int`, `count` (0 and more), `degree` (1 and more), `float`, `word`, `words`, `table` |
| default | of the framework; `off` and `on` of flags, empty for none |
| use | `read`: makes the job; `size`: compared with the model; `none`: changes neither time nor memory of a step, or is told by the model; `said`: known and not modelled, the user hears of it; `gone`: the framework refuses it |
| modelled | for `said`: values that are priced as they are, instead of the default; for `read`: all words it takes |
| effect | for `said`: what the option does, compared with what is priced |
| about | in words what is not modelled; for `size` the fact of `ModelSizes`; for `none` what it is about; for `gone` what took its place |

The names are those of the framework's own parser at the version in the table's first lines.
"""  # noqa: E501

from __future__ import annotations

import difflib
import functools
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from planner.errors import Problem, UsageError
from planner.registry import did_you_mean

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]
"""A value of an option, as JSON and TOML have them; of shell arguments True (a flag), a text or texts."""

AUTO = "auto"
"""The value by which files leave a number to the program."""

SLIP = 0.84
"""Likeness (`difflib`) from which an unknown name is a slip of a known one."""

MOST = 10**12
"""Largest whole number of an option."""


MOST_EDITS = 2
"""Characters in which a slip differs, among options of the user's own."""

MOST_NAMED = 20
"""Unknown options that are named; a file with more is of something else."""

LONGEST = 120
"""Characters of a name for which a likely one is looked for."""


class Use(StrEnum):
    """How a reader treats an option."""

    READ = "read"
    SIZE = "size"
    NONE = "none"
    SAID = "said"
    GONE = "gone"


class Kind(StrEnum):
    """What an option takes."""

    FLAG = "flag"
    INT = "int"
    COUNT = "count"
    DEGREE = "degree"
    FLOAT = "float"
    WORD = "word"
    WORDS = "words"
    TABLE = "table"


_LEAST = {Kind.INT: -MOST, Kind.COUNT: 0, Kind.DEGREE: 1}
"""Smallest whole number by kind."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a framework; the fields are the columns of its table (see the module)."""

    names: tuple[str, ...]
    kind: Kind
    default: str
    use: Use
    modelled: tuple[str, ...] = ()
    effect: str = ""
    about: str = ""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def is_priced(self, value: Value) -> bool:
        """Whether what is priced is what the option's value says."""
        text = shown(value)
        return any(_equal(text, known) for known in self.modelled or (self.default,))

    def note(self, value: Value, *, default: bool = False) -> str:
        """The option with its value, what it does and what is not modelled."""
        text = "" if value is True else f" {shown(value)}"
        return f"{self.name}{text}{' (the default)' if default else ''}: {self.effect}; {self.about}"


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a framework.

    Attributes:
        framework: its name.
        source: where the names are from, with version and date.
        rows: the options.
        by_name: the options by each of their names, those with `*` left out.
    """

    framework: str
    source: str
    rows: tuple[Option, ...]
    by_name: Mapping[str, Option] = field(repr=False)

    def find(self, name: str) -> Option | None:
        """The option of a name, the longest of those that end in `*` where none has the name itself."""
        if name in self.by_name:
            return self.by_name[name]
        stems = [row for row in self.rows if row.name.endswith("*") and name.startswith(row.name[:-1])]
        return max(stems, key=lambda row: len(row.name), default=None)

    def counts(self) -> Mapping[str, int]:
        """Number of options by use."""
        return dict(sorted(Counter(row.use.value for row in self.rows).items()))


@functools.cache
def options_of(framework: str) -> Options:
    """The table of a framework that can be read."""
    text = (pkgutil.get_data(__name__, f"{framework}.tsv") or b"").decode()
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    rows = tuple(_row(line) for line in text.splitlines() if line and not line.startswith("# "))
    by_name = {name: row for row in rows for name in row.names if not name.endswith("*")}
    return Options(framework, " ".join(comments[:-1]), rows, by_name)


def _row(line: str) -> Option:
    names, kind, default, use, modelled, effect, about = (line.split("\t") + [""] * 6)[:7]
    return Option(tuple(names.split()), Kind(kind), default, Use(use), tuple(modelled.split()), effect, about)


def shown(value: Value) -> str:
    """A value as the tables write it."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else "on" if value else "off"
    return " ".join(map(shown, value)) if isinstance(value, list) else str(value)


def _is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _equal(text: str, known: str) -> bool:
    """Whether two texts are the same word, without regard to case, or the same number."""
    if text.lower() == known.lower():
        return True
    try:
        return float(text) == float(known)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that a file sets.

    Attributes:
        table: of the framework.
        values: by the first name of the option.
        strangers: notes on options that the table does not know.
    """

    table: Options
    values: Mapping[str, Value]
    strangers: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        """Whether an option is set, and not to "auto"."""
        return name in self.values and self.values[name] not in (AUTO, None)

    def is_auto(self, name: str) -> bool:
        """Whether an option is left to the program."""
        return self.values.get(name) == AUTO

    def flag(self, name: str) -> bool:
        """Whether a flag is set; the default where it is not said."""
        value = self.values.get(name) if name in self else self.table.by_name[name].default == "on"
        return value is True or str(value).lower() in ("on", "true", "1")

    def number(self, name: str, usual: int | None = None) -> int:
        """A whole number; where it is not said `usual`, or without that the framework's default.

        Raises:
            UsageError: it is none, or out of range.
        """
        row = self.table.by_name[name]
        if name not in self:
            return int(row.default or 0) if usual is None else usual
        return _whole(row, name, self.values[name])

    def word(self, name: str, usual: str | None = None) -> str:
        """A value as a text; where it is not said `usual`, or without that the framework's default."""
        default = self.table.by_name[name].default if usual is None else usual
        return shown(self.values[name]) if name in self else default

    def notes(self) -> tuple[str, ...]:
        """Notes on options that are set but not modelled, and on unknown ones."""
        rows = {name: self.table.find(name) for name in self.values}
        known = [
            row.note(self.values[name]) if row.name == name else row.note(self.values[name]).replace(row.name, name, 1)
            for name, row in sorted(rows.items())
            if row and row.use is Use.SAID and self.values[name] != AUTO and not row.is_priced(self.values[name])
        ]
        return (*known, *self.strangers)

    def default_note(self, name: str) -> tuple[str, ...]:
        """The note on an option that is not set, where its default is not what is priced."""
        row = self.table.by_name[name]
        return () if name in self.values or row.is_priced(row.default) else (row.note(row.default, default=True),)


def _whole(row: Option, name: str, value: Value) -> int:
    """The whole number that a value is.

    Raises:
        UsageError: it is none, or out of the range of its kind.
    """
    text = str(value) if not isinstance(value, bool) else ""
    try:
        number = float(text) if text.replace("_", "x") == text else math.nan
    except ValueError:
        number = math.nan
    if not number.is_integer():
        hint = "write the number itself" + (", no variable" if name.startswith("--") else "")
        raise UsageError(f"{name} is {value or 'without a value'!r}, no whole number", hint=hint)
    least = _LEAST.get(row.kind, -MOST)
    if not least <= number <= MOST:
        raise UsageError(f"{name} is {value}", hint=f"give a whole number from {least} to {MOST:,}")
    return int(text) if text.lstrip("+-").isdecimal() else int(number)


def settle(table: Options, given: Mapping[str, Value], *, extended: bool, passes: Callable[[str], str]) -> Settings:
    """Hold the options of a file against a framework's table.

    Args:
        table: of the framework.
        given: values by name, as the file writes them.
        extended: the file names a program or module with options of its own.
        passes: why an unknown option of a name is said instead of refused; "" where it is refused.

    Raises:
        UsageError: options are unknown, gone, out of range or have no value; `problems` names each.
    """
    problems, strangers, values, unknown = list[Problem](), list[str](), dict[str, Value](), 0
    for name, value in given.items():
        row = table.find(name)
        if row is None and unknown < MOST_NAMED:
            problem, note = _unknown(table, name, value, extended=extended, why=passes(name))
            problems += [problem] if problem else []
            strangers += [note] if note else []
            unknown += problem is not None
        elif row is None:
            unknown += 1
        elif row.use is Use.GONE:
            problems.append(Problem(f"{name} is refused by {table.framework}", hint=f"write {row.about}"))
        else:
            values[name if row.name.endswith("*") else row.name] = value
            problems += _ill_typed(row, name, value)
    if unknown > MOST_NAMED:
        message = f"{unknown} options are unknown to {table.framework}"
        problems.append(Problem(message, hint="take them out of the file, or name its framework"))
    if problems:
        raise UsageError(problems[0].message, hint=problems[0].hint, problems=problems)
    return Settings(table, values, tuple(strangers))


def _unknown(table: Options, name: str, value: Value, *, extended: bool, why: str) -> tuple[Problem | None, str]:
    """What is wrong with an unknown option, or the note on one that is passed over for a reason (`why`)."""
    likely = difflib.get_close_matches(name, table.by_name, n=1, cutoff=SLIP) if len(name) < LONGEST else []
    if extended and likely and _edits(name, likely[0]) > MOST_EDITS:  # such programs have names like Megatron's
        likely = []
    why = why or ("an option of the program's own" if extended else "")
    if why and not likely:
        text = "" if value is True else f" {shown(value)}"
        return None, f"{name}{text}: {why}, not priced"
    hint = did_you_mean(name, likely or table.by_name) if len(name) < LONGEST else ""
    hint = hint if hint.startswith("did you mean") else "take it out of the file"
    return Problem(f"{name} is no option of {table.framework}", hint=hint), ""


def _edits(one: str, other: str) -> int:
    """Characters in which two names differ."""
    steps = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in steps if kind != "equal")


def _ill_typed(row: Option, name: str, value: Value) -> Iterator[Problem]:
    """What is wrong with the value of an option that is read or compared."""
    if row.use not in (Use.READ, Use.SIZE) or value in (AUTO, None):
        return
    try:
        if row.kind in _LEAST:
            _whole(row, name, value)
        elif row.kind is Kind.FLOAT and not _is_number(shown(value)):
            yield Problem(f"{name} is {value!r}, no number", hint="write the number itself")
        elif row.kind is Kind.FLAG and not isinstance(value, bool) and shown(value).lower() not in ("true", "false"):
            yield Problem(f"{name} is {value!r}", hint="it is a flag, on or off")
        elif row.kind is Kind.WORD and shown(value) == "":
            yield Problem(f"{name} is without a value", hint="write one")
        elif row.kind is Kind.WORD and isinstance(value, dict):
            yield Problem(f"{name} is {value!r}", hint="write a word")
        for word in shown(value).split() if row.modelled and row.kind in (Kind.WORD, Kind.WORDS) else ():
            if word not in row.modelled:
                yield Problem(f"{name} is {word!r}", hint=did_you_mean(word, row.modelled))
    except UsageError as error:
        yield error.problem


def flat(document: Mapping[str, object], table: Options, around: Sequence[str] = ()) -> Iterator[tuple[str, Value]]:
    """The values of a document of tables within tables, by their names joined by dots.

    Args:
        document: as TOML or JSON has it.
        table: the framework's options; a table of these must be one in the document.
        around: names of the tables that it stands in.

    Raises:
        UsageError: a value stands where a table belongs, or tables are nested deeper than any option is.
    """
    for key, value in document.items():
        name = ".".join((*around, key))
        is_table = any(known.startswith(f"{name}.") for row in table.rows for known in row.names)
        if isinstance(value, dict) and len(around) < _DEEPEST and (value or is_table):
            yield from flat(value, table, (*around, key))
        elif is_table and value is not None:
            raise UsageError(f"{name} is {repr(value)[:40]}, not a table", hint="see the framework's documentation")
        else:
            yield name, cast("Value", value)


_DEEPEST = 8
"""Tables around a value."""
