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

from planner.exchange.fabric import Fabric as Fabric
from planner.exchange.fabric import LinkBytes as LinkBytes
from planner.exchange.fabric import PortTraffic as PortTraffic
from planner.exchange.fabric import Servers as Servers
from planner.exchange.fabric import fabric_of as fabric_of
from planner.exchange.recipe import GATHERED_UNITS as GATHERED_UNITS
from planner.exchange.recipe import Content as Content
from planner.exchange.recipe import ExchangeStep as ExchangeStep
from planner.exchange.recipe import Group as Group
from planner.exchange.recipe import ModelStateBytes as ModelStateBytes
from planner.exchange.recipe import Neighbours as Neighbours
from planner.exchange.recipe import Phase as Phase
from planner.exchange.recipe import RankGroup as RankGroup
from planner.exchange.recipe import Recipe as Recipe
from planner.exchange.recipe import groups_of as groups_of
from planner.exchange.recipe import kept_bytes as kept_bytes
from planner.exchange.recipe import parts_of as parts_of
from planner.exchange.recipe import phase_s as phase_s
from planner.exchange.recipe import recipe_of as recipe_of
from planner.exchange.recipe import recipes as recipes
from planner.exchange.recipe import sent_bytes as sent_bytes
from planner.exchange.recipe import step_s as step_s
from planner.exchange.recipe import step_terms as step_terms
from planner.exchange.scheme import Scheme as Scheme
from planner.exchange.scheme import choose as choose
from planner.exchange.types import Exchange as Exchange
from planner.exchange.types import Step as Step
from planner.exchange.types import Variable as Variable
from planner.exchange.types import step_of as step_of
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
