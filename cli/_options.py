"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

model_argument: Decorator = click.argument("model")
dims_option: Decorator = click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Size of a symbolic dimension, or of `batch`/`seq` of a bundled model; repeatable.",
)


def parse_dims(values: Sequence[str]) -> dict[str, int]:
    """`("batch=8", "seq=2048")` as a mapping.

    Raises:
        click.BadParameter: a value is not NAME=SIZE with a positive whole size.
    """
    dims: dict[str, int] = {}
    for value in values:
        name, sign, size = value.partition("=")
        if not sign or not name or not size.isdigit() or int(size) < 1:
            raise click.BadParameter(f"{value!r} is not NAME=SIZE, such as batch=8", param_hint="--dim")
        if name in dims:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--dim")
        dims[name] = int(size)
    return dims
