"""Names and hints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.registry import Registry, did_you_mean, name_with_options


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


Package = Callable[..., Registry[str]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Makes a package of the given modules, by name, whose registry is `REGISTRY`."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def make(name: str, **modules: str) -> Registry[str]:
        folder = tmp_path / name
        folder.mkdir()
        head = "from planner.registry import Registry\n"
        (folder / "__init__.py").write_text(head + "REGISTRY = Registry(__name__, 'colour')\n")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(f"from {name} import REGISTRY\n{text}\n")
        registry: Registry[str] = __import__(name).REGISTRY
        return registry

    yield make
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_a_module_that_cannot_be_imported_fails_every_look_up(package: Package) -> None:
    registry = package(
        "broken_colours",
        blue="REGISTRY.register('blue', '#00f')",
        green="REGISTRY.register('green', '#0f0')\nimport no_such_package",
        red="REGISTRY.register('red', '#f00')",
    )
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            registry.get("red")
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            registry.find("blue")
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            registry.names()


def test_an_interrupted_import_goes_on_at_the_next_look_up(package: Package) -> None:
    registry = package(
        "slow_colours",
        blue="REGISTRY.register('blue', '#00f')",
        green="import os\nif os.environ.pop('STOP_THE_IMPORT', ''): raise KeyboardInterrupt",
        red="REGISTRY.register('red', '#f00')",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_THE_IMPORT", "1")
        with pytest.raises(KeyboardInterrupt):
            registry.names()
        assert registry.names() == ("blue", "red")


def test_a_module_may_look_up_those_before_it_while_it_is_imported(package: Package) -> None:
    registry = package(
        "mixed_colours",
        blue="REGISTRY.register('blue', '#00f')",
        navy="REGISTRY.register('navy', REGISTRY.get('blue') + '8')",
    )
    assert registry.get("navy") == "#00f8"


class Finish(StrEnum):
    MATT = "matt"
    GLOSS = "gloss"


@dataclass(frozen=True)
class Paint:
    coats: int = 1
    litres: float = 2.5
    finish: Finish = Finish.MATT
    primed: bool = False


@pytest.fixture
def paints() -> Registry[object]:
    registry: Registry[object] = Registry("email", "paint")
    registry.register("oil", Paint())
    registry.register("water", "no options")
    return registry


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("oil", Paint()),
        ("oil:coats=3", Paint(coats=3)),
        ("oil:litres=4,finish=gloss", Paint(litres=4.0, finish=Finish.GLOSS)),
        ("oil:primed=true", Paint(primed=True)),
    ],
)
def test_options_of_a_name_replace_fields_and_are_written_back(
    paints: Registry[object], name: str, entry: Paint
) -> None:
    assert paints.configured(name) == entry
    assert name_with_options(entry, "oil") == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("oyl", r"unknown paint 'oyl' \(did you mean 'oil'\?\)"),
        ("oil:coat=3", r"paint 'oil' has no option 'coat' \(did you mean 'coats'\?\)"),
        ("oil:coats=two", r"option coats of paint 'oil': cannot read 'two' \(use a number like 1\)"),
        ("oil:finish=dull", r"cannot read 'dull' \(use matt or gloss\)"),
        ("oil:primed=yes", r"cannot read 'yes' \(use true or false\)"),
        ("water:coats=2", r"paint 'water' has no option 'coats' \(none is known\)"),
    ],
)
def test_wrong_options_are_refused(paints: Registry[object], name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        paints.configured(name)
