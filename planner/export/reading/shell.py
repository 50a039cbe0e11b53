"""Arguments of a program, read from a launch script or a file of arguments.

Variables are replaced by their values in the text, arrays by their items. Of a script, the arguments behind the program
(`.py`) of each command that starts one count; of a text without such a command, all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.errors import UsageError
from planner.escaping import shell
from planner.export.reading.options import Value
from planner.foreign_files import Door

_VARIABLE = re.compile(r"\$(?:(\w+|[@*])|\{(\w+)(?:\[[@*]\]|:?[-?=]([^}]*))?\})")
"""`$NAME`, `$@`, `${NAME}`, `${NAME:-default}`, `${NAME:?}` or `${NAME[@]}`."""

_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"\d{1,9}([-+*/%]\d{1,9}){0,9}")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_BEHIND = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "2>", "&>", "done", "fi"})
"""Words that end a command."""

_POSITIONAL = frozenset({"$@", "$*", "${@}"})
"""The arguments of the script itself."""

_TRAINS = re.compile(r"(pre)?train|finetune|sft|rl", re.IGNORECASE)
"""In the names of programs that train."""

_BEFORE = frozenset({"export", "local", "declare", "readonly", "-a", "-x"})
"""Words that stand before an assignment."""


_DOOR = Door("", UsageError, "write one `--name value` after the other")

_LONGEST = 1 << 16
"""Characters of a word with all variables replaced."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a program.

    Attributes:
        program: its file name; "" where the text names none.
        values: by option: True for one without a value, its text, or the texts of several.
        unread: variables among them without a value in the text.
    """

    program: str
    values: Mapping[str, Value]
    unread: tuple[str, ...] = ()


_Command = tuple[list[str], bool]
"""The words of a command, and whether a variable is among them."""


@dataclass(slots=True)
class _Script:
    """What was read of a text so far: variables with their words, and the commands with theirs."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[_Command] = field(default_factory=list)


def read_arguments(text: str, launcher: Collection[str] = (), flags: Collection[str] = ()) -> Arguments:
    """The arguments of a text.

    Args:
        text: a launch script, or one argument after the other.
        launcher: options of launchers, which are no arguments where no program stands behind them.
        flags: arguments without a value.

    Raises:
        UsageError: quotes are not closed.
    """
    script = _Script()
    for line in _lines(text):
        _read_line(line, script)
    program, runs = _launched(script.commands)
    if not any(_is_option(word) for words in runs for word in words):
        runs = [words for words in script.variables.values() if words and _is_option(words[0])]
    values: dict[str, Value] = {}
    unread: list[str] = []
    for name, own in (pair for words in runs for pair in _pairs(words)):
        blank = [word for word in own if _VARIABLE.fullmatch(word)] if name in flags or len(own) > 1 else []
        unread += [word for word in blank if word not in _POSITIONAL]
        left = [word for word in own if word not in blank and word not in _POSITIONAL]
        if name and name not in launcher:
            values.pop(name, None)  # the last one counts, and its place
            values[name] = True if not left else left[0] if len(left) == 1 else [*left]
    return Arguments(program, values, tuple(dict.fromkeys(unread)))


def _launched(commands: Sequence[_Command]) -> tuple[str, list[list[str]]]:
    """The program that commands start, and the words behind it in each; without one, those of commands that may do so.

    Where several programs are started, those that train count; a command with a variable may start one.
    """
    started = [(words[at], words) for words, _ in commands if (at := _program_at(words)) is not None]
    trained = [each for each in started if _TRAINS.search(each[0])]
    maybe = [("", words) for words, varies in commands if varies or _is_option(words[0])]
    chosen = trained or started or maybe
    program = chosen[-1][0] if chosen else ""
    return program.rpartition("/")[2], [list(_behind_program(words)) for _, words in chosen]


def _lines(text: str) -> Iterator[str]:
    """Lines as a shell takes them: joined at backslashes, inside quotes and inside the brackets of an array."""
    line, quote, depth = "", "", 0
    for at, character in enumerate(text := text.replace("\\\r\n", " ").replace("\\\n", " ")):
        before = text[at - 1] if at else "\n"
        if quote:
            quote = "" if character == quote and (before != "\\" or quote == "'") else quote
        elif character in "\"'" and before != "\\":
            quote = character
        elif character == "#" and before.isspace():
            quote = "\n"
        elif character == "(" and (depth or before == "="):
            depth += 1
        elif character == ")" and depth:
            depth -= 1
        if character == "\n" and quote in ("", "\n") and not depth:
            yield line
            line, quote = "", ""
            continue
        line, quote = line + character, "" if quote == "\n" == character else quote
    yield line


def _read_line(line: str, script: _Script) -> None:
    """Read a line: an assignment, or a command.

    Raises:
        UsageError: quotes are not closed.
    """
    words = _DOOR.words(_SUM.sub(lambda match: match[0].replace(" ", ""), line))
    while words and words[0] in _BEFORE:
        words = words[1:]
    if not words:
        return
    assigned = _ASSIGNMENT.fullmatch(words[0])
    is_array = assigned is not None and assigned[3].startswith("(") and words[-1].endswith(")")
    if assigned and (is_array or len(words) == 1):
        inside = [assigned[3][1:], *words[1:]] if is_array else [assigned[3]]
        inside[-1] = inside[-1].removesuffix(")") if is_array else inside[-1]
        items = [word for each in inside if each for word in _expand(each, script.variables, split=not is_array)]
        script.variables[assigned[1]] = [*(script.variables.get(assigned[1], []) if assigned[2] else []), *items]
        return
    while words and _ASSIGNMENT.fullmatch(words[0]) and not _is_option(words[0]):  # variables of this command alone
        words = words[1:]
    expanded = [item for word in words for item in _expand(word, script.variables, split=False)]
    if expanded:
        script.commands.append((expanded, any("$" in word for word in words)))


def _expand(word: str, variables: Mapping[str, list[str]], *, split: bool) -> list[str]:
    """The words that a word stands for; a command or an option with its value in quotes is split, too.

    Raises:
        UsageError: they are longer than any command can be, or quotes are not closed.
    """

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[2])
        return shell(*known) if known is not None and len(known) > 1 else known[0] if known else match[3] or match[0]

    replaced = _SUM.sub(lambda match: _sum_of(match, variables), _VARIABLE.sub(value, word))
    if len(replaced) > _LONGEST:
        _DOOR.refuse(f"a word of {len(replaced):,} characters once its variables are filled in")
    several = " " in word and (".py" in word or (_is_option(word) and "=" not in word.partition(" ")[0]))
    if split or several or replaced != word:
        return _DOOR.words(replaced, comments=False)
    return [replaced]


def _sum_of(match: re.Match[str], variables: Mapping[str, list[str]]) -> str:
    """The value of `$((..))` of whole numbers and variables; the text itself where it has something else."""
    named = _NAME.sub(lambda name: next(iter(variables.get(name[0], [])), name[0]), match[1])
    if not _PLAIN.fullmatch(named):
        return match[0]
    found = 0
    for sign, term in re.findall(r"([+-]?)([^+-]+)", named):
        value = 0
        for operator, factor in re.findall(r"([*/%]?)(\d+)", term):
            own = int(factor)
            if operator in ("/", "%") and not own:
                return match[0]
            value = {"": own, "*": value * own, "/": value // max(own, 1), "%": value % max(own, 1)}[operator]
        found += -value if sign == "-" else value
    return str(found)


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _program_at(words: Sequence[str]) -> int | None:
    """Place of the program's file, or else of its module (`-m`); None where there is neither."""
    files = (at for at, word in enumerate(words) if word.endswith(".py"))
    modules = (at + 1 for at, word in enumerate(words[:-1]) if word in ("-m", "--module"))
    return next(files, next(modules, None))


def _behind_program(words: Sequence[str]) -> Iterator[str]:
    """The words of a command behind its program, up to what ends the command."""
    at = _program_at(words)
    for word in words if at is None else words[at + 1 :]:
        if word in _BEHIND:
            return
        yield word


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Options and the words behind them; words before the first option stand behind ""."""
    name, own = "", list[str]()
    for word in words:
        if not _is_option(word):
            own.append(word)
            continue
        yield name, own
        name, equals, value = word.partition("=")
        own = [value] if equals else []
    yield name, own
