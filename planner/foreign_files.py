"""One door for files from outside: size, encoding, depth, numbers and archives are checked before anything is built.

A reader says by its `Door` what errors call the file, of which kind they are (that is the exit code), and how to come
to a file that can be read; each refusal is one error with its place, `file:line:column`.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from planner.errors import ShardplanError
from planner.files import STANDARD, input_bytes
from planner.json_text import MOST_DEPTH, JsonError, place, read_json

if TYPE_CHECKING:
    import numpy as np

MOST_BYTES = 1 << 29
"""Largest text file that is read: the plan of 100,000 operators has 50 MB."""
MOST_CELL = 1 << 17
"""Longest cell of a CSV file in characters."""
MOST_ARRAY_BYTES = 1 << 32
"""Most bytes that the arrays of one file may have when they are unpacked."""
_ARRAY_ERRORS = (
    OSError, ValueError, EOFError, RuntimeError, NotImplementedError, RecursionError, SyntaxError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of numpy and zipfile over archives that are cut off, damaged, encrypted or no archives of arrays."""


@dataclass(frozen=True, slots=True)
class Door:
    """What errors say of a file from outside, and its readers.

    Attributes:
        name: the file, as errors call it.
        error: kind of the errors.
        hint: how to come to a file that can be read.
    """

    name: str
    error: type[ShardplanError]
    hint: str

    def refuse(self, message: str, line: int = 0, column: int = 0, hint: str = "") -> NoReturn:
        """Raise an error of the file.

        Args:
            message: what is wrong.
            line: its line, from 1; 0 where it is about the whole file.
            column: its column, from 1; 0 where it is about the whole line.
            hint: what to do about it, by default how to come to a file that can be read.

        Raises:
            ShardplanError: always, of the kind of the file.
        """
        spot = "".join(f":{number}" for number in (line, column) if number)
        raise self.error(message, where=self.name + spot, hint=hint or self.hint)

    def content(self, path: str | Path) -> bytes:
        """The bytes of a file; `-` is standard input.

        Raises:
            ShardplanError: the file is missing, a folder, not readable, or larger than `MOST_BYTES`.
        """
        if str(path) == STANDARD:
            data = input_bytes()
        else:
            try:
                with Path(path).open("rb") as stream:
                    data = stream.read(MOST_BYTES + 1)
            except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
                self.refuse(f"cannot read: {getattr(error, 'strerror', None) or error}")
        if len(data) > MOST_BYTES:
            self.refuse(f"is larger than {MOST_BYTES >> 20} MiB, the most that is read")
        return data

    def text(self, content: bytes | str) -> str:
        """The text of a file, UTF-8 with or without a byte order mark.

        Raises:
            ShardplanError: other bytes, or a null byte.
        """
        try:
            text = content if isinstance(content, str) else content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            whole, at = error.object, error.start
            line, column = whole.count(b"\n", 0, at) + 1, at - whole.rfind(b"\n", 0, at)
            self.refuse(f"not a text file: byte {whole[at]:#04x} is not UTF-8", line, column)
        at = text.find("\0")
        if at >= 0:
            self.refuse("not a text file: it holds a null byte", *place(text, at))
        return text

    def json(self, content: bytes | str, *, any_number: bool = False) -> Any:  # noqa: ANN401
        """The value of a JSON text, as strict as `read_json`.

        Raises:
            ShardplanError: no text, or no JSON that can be read.
        """
        try:
            return read_json(self.text(content), any_number=any_number)
        except JsonError as error:
            self.refuse(error.message, error.line, error.column, error.hint)

    def json_object(self, content: bytes | str, *, any_number: bool = False) -> dict[str, Any]:
        """The object of a JSON text, as strict as `read_json`.

        Raises:
            ShardplanError: no text, no JSON that can be read, or no object.
        """
        value = self.json(content, any_number=any_number)
        if not isinstance(value, dict):
            self.refuse("holds no JSON object", 1, 1)
        return value

    def toml(self, content: bytes | str) -> dict[str, Any]:
        """The tables of a TOML text.

        Raises:
            ShardplanError: no TOML, nested deeper than `MOST_DEPTH`, a whole number of more than 64 bits, or a number
                that is not finite.
        """
        import tomllib

        text = self.text(content)
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self.refuse(f"not TOML: {error}")
        except RecursionError:
            self.refuse(f"nested deeper than {MOST_DEPTH} levels")
        except ValueError as error:  # a number of thousands of digits
            self.refuse(f"not TOML: {error}")
        self._check_values(tables, ())
        return tables

    def _check_values(self, value: object, path: tuple[str, ...]) -> None:
        """Refuse values of TOML that no 64-bit program can hold, and deep nesting."""
        if len(path) > MOST_DEPTH:
            self.refuse(f"nested deeper than {MOST_DEPTH} levels")
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                self._check_values(inner, (*path, str(key)))
        elif isinstance(value, float) and not math.isfinite(value):
            self.refuse(f"{'.'.join(path)} is {value}, no finite number")
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            self.refuse(f"{'.'.join(path)} is a whole number of more than 64 bits")

    def words(self, text: str, *, comments: bool = True) -> list[str]:
        """Words of a shell text; text behind `#` is left out unless `comments` is False (in the value of a variable).

        Raises:
            ShardplanError: quotes are not closed.
        """
        try:
            return shlex.split(self.text(text).replace("\\\n", " "), comments=comments)
        except ValueError as error:
            self.refuse(f"cannot be read as shell text: {str(error)[:1].lower()}{str(error)[1:]}")

    def table(self, content: bytes | str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
        """Columns of a CSV text with a header line, and its rows: (line, cells by column), without spaces around.

        Empty lines are left out; cells that a row lacks at its end are empty.

        Raises:
            ShardplanError: no header, a column without a name or twice, a row with more cells than the header, a cell
                of more than `MOST_CELL` characters, or quotes that are not closed.
        """
        reader = csv.reader(io.StringIO(self.text(content)), skipinitialspace=True, strict=True)
        names: list[str] = []
        rows: list[tuple[int, dict[str, str]]] = []
        try:
            for cells in ([cell.strip() for cell in row] for row in reader):
                if not any(cells):
                    continue
                if not names:
                    names = cells
                    if not all(names) or len(set(names)) < len(names):
                        self.refuse("a column has no name, or stands there twice", reader.line_num)
                elif len(cells) > len(names):
                    words = f"more cells than the {len(names)} columns"
                    self.refuse(words, reader.line_num, hint="write one value for each column")
                else:
                    padded = [*cells, *[""] * (len(names) - len(cells))]
                    rows.append((reader.line_num, dict(zip(names, padded, strict=True))))
        except csv.Error as error:
            self.refuse(f"not CSV: {error}", reader.line_num)
        if not names:
            self.refuse("is empty: there is no header line", 1)
        return names, rows

    def arrays(self, path: str | Path) -> dict[str, np.ndarray]:
        """Arrays of a `.npz` file by name.

        Raises:
            ShardplanError: no such file, not an archive of arrays, cut off, encrypted, arrays of objects, or more than
                `MOST_ARRAY_BYTES` when unpacked.
        """
        import numpy as np

        try:
            with zipfile.ZipFile(path) as archive:
                unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
            if unpacked_bytes > MOST_ARRAY_BYTES:
                most = f"more than the {MOST_ARRAY_BYTES >> 30} GiB that are read"
                self.refuse(f"unpacks to {unpacked_bytes / 2**30:.1f} GiB, {most}", hint="write fewer samples")
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except _ARRAY_ERRORS as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.refuse(f"cannot be read as arrays: {reason}")
        except MemoryError:
            self.refuse("holds an array that is larger than the free memory", hint="write fewer samples")
