"""Exchange of gradients and weights between the replicas of a model; one scheme a file.

>>> from planner.hardware import load_cluster
>>> from planner.exchange import Step, Variable, fabric_of, get
>>> cluster = load_cluster("dgx-a100", nodes=4)
>>> step = Step((Variable("w", 1e9, ready_s=0.05),), backward_s=0.1)
>>> exchange = get("hierarchical").price(fabric_of(cluster), step)
>>> float(exchange.traffic.machine_bytes()[0][0]) / 1e9
1.5
"""

from __future__ import annotations

from planner.exchange.choosing import choose
from planner.exchange.collectives import step_traffic
from planner.exchange.fabric import Fabric, LevelTraffic, Servers, Traffic, fabric_of
from planner.exchange.recipe import (
    Content,
    ExchangeStep,
    Group,
    ModelStateBytes,
    Phase,
    Recipe,
    groups_of,
    kept_bytes,
    parts_of,
    phase_s,
    recipe_of,
    recipes,
    sent_bytes,
    step_s,
    step_terms,
)
from planner.exchange.scheme import Scheme, SchemeSummary
from planner.exchange.types import (
    Exchange,
    Step,
    Variable,
    step_of,
)
from planner.registry import Registry

SCHEMES: Registry[Scheme] = Registry(__name__, "exchange scheme")
"""All schemes by name; a module of this package registers its own."""


def get(name: str) -> Scheme:
    """The scheme of that name, with options after a colon: `herring:buffer_bytes=4e6,efficiency=0.7`.

    Raises:
        UsageError: no scheme has that name, or an option is wrong; the hint names the closest ones.
    """
    return SCHEMES.configured(name)


def names() -> tuple[str, ...]:
    """Names of all schemes, sorted."""
    return SCHEMES.names()


__all__ = [
    "SCHEMES",
    "Content",
    "Exchange",
    "ExchangeStep",
    "Fabric",
    "Group",
    "LevelTraffic",
    "ModelStateBytes",
    "Phase",
    "Recipe",
    "Scheme",
    "SchemeSummary",
    "Servers",
    "Step",
    "Traffic",
    "Variable",
    "choose",
    "fabric_of",
    "get",
    "groups_of",
    "kept_bytes",
    "names",
    "parts_of",
    "phase_s",
    "recipe_of",
    "recipes",
    "sent_bytes",
    "step_of",
    "step_s",
    "step_terms",
    "step_traffic",
]
