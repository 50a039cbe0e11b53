"""A refused command and what its remedy, followed as printed, leads to."""

from __future__ import annotations

from dataclasses import dataclass

TOY = "toy.onnx -H v100-pcie-4 -b 8"
ITERATION = "plan profile.graph.txt --objective iteration-time --time-limit 1s"
BY_HAND = "hardware init --device a100-sxm-80gb"


@dataclass(frozen=True)
class Case:
    """A refused command and its remedy.

    Attributes:
        remedy: the text in the source, with `{}` where a value stands; "" for a remedy that names neither an option nor
            a command.
        command: the refused command.
        says: what standard error has of the remedy; its groups are what is followed.
        then: the commands that follow it, one after the other, with the groups as `{0}`, `{1}`.
    """

    remedy: str
    command: str
    says: str
    then: tuple[str, ...]


def case(remedy: str, command: str, says: str, *then: str) -> Case:
    """A case, from its parts."""
    return Case(remedy, command, says, then)
