"""Names and hints."""

from __future__ import annotations

import pytest

from planner.errors import UsageError
from planner.registry import Registry, did_you_mean


def test_the_closest_name_is_hinted() -> None:
    assert did_you_mean("gpip", ["gpipe", "1f1b"]) == "did you mean 'gpipe'?"
    assert did_you_mean("zzz", ["gpipe", "1f1b"]) == "known: 1f1b, gpipe"
    assert did_you_mean("zzz", []) == "none is known"


def test_modules_of_the_package_register_themselves_at_first_look_up() -> None:
    registry: Registry[int] = Registry("email", "part")
    registry.register("one", 1)
    assert registry.get("one") == 1
    with pytest.raises(UsageError, match=r"unknown part 'on' \(did you mean 'one'\?\)"):
        registry.get("on")
    with pytest.raises(ValueError, match="two parts are called 'one'"):
        registry.register("one", 2)
