"""Published instances of partition problems: JSON documents as dataclasses, with all faults of a file at once."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Le

from planner.errors import ModelError, Problem
from planner.graph import Note, NoteLevel
from planner.json_text import LARGEST_FIGURE, JsonError, read_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

MOST_INSTANCE_DEVICES = 4096
"""Devices of one kind that an instance of a partition problem may ask for: more could not be told apart in time."""

Figure = Annotated[float, Ge(0), Le(LARGEST_FIGURE)]
"""A time, size or rate of a file."""


def keyed(**keys: str) -> dict[str, Any]:
    """Configuration of a dataclass that is read from JSON: the file's keys by attribute, where they are other ones."""
    return {"strict": True, "allow_inf_nan": False, "alias_generator": lambda name: keys.get(name, name)}


@dataclass
class Findings:
    """Faults of a file, which are raised together, and notes on what was assumed.

    Attributes:
        where: the file, for messages; may be empty.
        problems: what is wrong.
        notes: what was left out or assumed.
    """

    where: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def wrong(self, path: str, message: str, hint: str = "") -> None:
        """Add a fault of what lies at a path of the document."""
        self.problems.append(Problem(message, ": ".join(filter(None, (self.where, path))), hint))

    def stop(self) -> None:
        """Raise all faults so far, if there are any.

        Raises:
            ModelError: there are some.
        """
        if self.problems:
            first = self.problems[0]
            raise ModelError(first.message, where=first.where, hint=first.hint, problems=self.problems)

    def note(self, level: NoteLevel, code: str, message: str, where: str = "") -> None:
        """Add a note, by default on the whole file."""
        self.notes.append(Note(level, code, message, where or self.where))

    def decoded(self, document: object, kind: type[T]) -> T:
        """A JSON document as a dataclass; keys that it does not have are let pass.

        Raises:
            ModelError: fields that are missing, of the wrong kind or out of range, each with its path.
        """
        from pydantic import ValidationError

        try:
            target: Any = kind
            read: T = _adapter(target).validate_json(json.dumps(document))
        except ValidationError as error:
            for each in error.errors(include_url=False):
                path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in each["loc"])
                fault = f"{each['msg'].removeprefix('Input ')}, not {each['input']!r:.40}"
                self.wrong(path.removeprefix("."), "is missing" if each["type"] == "missing" else fault)
            self.stop()
            raise
        return read


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_document(path: Path) -> tuple[Any, str]:
    """The document in a JSON file, and the file's sha256.

    Raises:
        ModelError: it cannot be read, or is no JSON.
    """
    try:
        content = path.read_bytes()
        return read_json(content), hashlib.sha256(content).hexdigest()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot be read: {reason}", where=str(path), hint="check path and permissions") from None
    except JsonError as error:
        raise ModelError(str(error), where=str(path), hint="export or copy the file again") from None
