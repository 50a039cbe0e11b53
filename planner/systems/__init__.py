"""Published systems by name, as data; each plans a model on a cluster by its own rules.

>>> from planner.systems import names
>>> "gpipe" in names() and "chimera" in names()
True
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import UsageError
from planner.registry import Registry, did_you_mean
from planner.systems.types import Proposal as Proposal
from planner.systems.types import Semantics as Semantics
from planner.systems.types import System as System
from planner.systems.types import SystemRow as SystemRow

SYSTEMS: Registry[System] = Registry(__name__, "system")
"""All systems by name; a module of this package registers its own."""


def register(system: System) -> None:
    """Add a system under its key."""
    SYSTEMS.register(system.key, system)


def get(name: str) -> System:
    """The system or training framework of a name, which may have options: `byteps:cpu_machines=4`.

    Raises:
        UsageError: no system has that name, or it has no such option; the hint names the closest ones.
    """
    key, _, text = name.partition(":")
    framework = BACKENDS.find(key)
    system = SYSTEMS.get(key) if framework is None else system_of(framework)
    options = dict(item.partition("=")[::2] for item in text.split(",") if item)
    for option in options:
        if option not in system.tunable and "exchange" not in options:  # the scheme named there has its own options
            raise UsageError(f"{key} has no option {option!r}", hint=did_you_mean(option, system.tunable))
    if not options:
        return system
    return replace(system, key=name, options={**system.options, **options})


def names() -> tuple[str, ...]:
    """Names of all systems, sorted."""
    return SYSTEMS.names()


from planner.systems.backends import BACKENDS as BACKENDS  # noqa: E402
from planner.systems.backends import backend_names as backend_names  # noqa: E402
from planner.systems.backends import usual_backends as usual_backends  # noqa: E402
from planner.systems.compare import Comparison as Comparison  # noqa: E402
from planner.systems.compare import compare_systems as compare_systems  # noqa: E402
from planner.systems.compare import decide_again as decide_again  # noqa: E402
from planner.systems.compare import plan_system as plan_system  # noqa: E402
from planner.systems.compare import plans_of as plans_of  # noqa: E402
from planner.systems.proposals import system_of  # noqa: E402
from planner.systems.runner import decide as decide  # noqa: E402
from planner.systems.runner import row_of as row_of  # noqa: E402
from planner.systems.types import SystemSetting as SystemSetting  # noqa: E402
