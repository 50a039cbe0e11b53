"""Every command that the README and the tour show runs, in its order, and prints lines of the kind it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.plan_files import run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()
SHOWN = {page: re.findall(r"^\$ shardplan (.+)$", text, re.M) for page, text in (("README", README), ("tour", TOUR))}
MAY_DIFFER = {"diff": 1}


@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(SHOWN[page]) >= 3
    for line in SHOWN[page]:
        arguments = shlex.split(line)
        assert run(*arguments) == MAY_DIFFER.get(arguments[0], 0), line
        printed = capsys.readouterr().out
        assert ("-q" in arguments) == (printed == ""), line


def test_every_option_named_in_the_readme_exists() -> None:
    from click.testing import CliRunner

    from cli.main import COMMANDS, app

    helps = "".join(CliRunner().invoke(app, [name, "--help"]).output for name in COMMANDS)
    helps += CliRunner().invoke(app, ["--help"]).output
    helps += "".join(
        CliRunner().invoke(app, ["hardware", sub, "--help"]).output
        for sub in ("init", "list", "show", "lint", "import")
    )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README + TOUR)) - {"--nodes"}
    assert {option for option in named if option not in helps} == set()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_every_place_of_the_code_map_exists() -> None:
    table = README.partition("## Code map")[2].partition("## Working on it")[0]
    places = [place for row in re.findall(r"^\| (`.+?) \|", table, re.M) for place in re.findall(r"`([^`]+)`", row)]
    assert len(places) > 12
    folder = ""
    for place in places:
        path = ROOT / place if "/" in place else ROOT / folder / place
        folder = str(Path(place).parent) if "/" in place and "." in Path(place).name else folder
        assert path.exists(), place


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert {link for link in links if not (ROOT / page).parent.joinpath(link).exists()} == set()
