"""A remedy in a message, followed as it is printed, does not end in another refusal; and none is forgotten."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.remedies.case import Case
from tests.remedies.cases import CASES, EXCEPTED_FILES, EXCEPTIONS
from tests.remedies.inventory import remedies
from tests.remedies.workplace import answer, fill


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remedies")
    fill(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_what_a_remedy_says_helps(case: Case, filled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(filled, folder)
    code, said = answer(folder, case.command)
    if case.says:
        assert code not in (0, 70), said
        assert len(said.strip().splitlines()) == 1
    found = re.search(case.says, said)
    assert found, said
    for line in case.then:
        followed = line.format(*found.groups())
        code, said = answer(folder, followed)
        assert code == 0, f"{followed}: {said}"


def test_every_remedy_is_followed_or_excepted_with_a_reason() -> None:
    followed = {case.remedy for case in CASES}
    forgotten = [
        (remedy.file, remedy.text)
        for remedy in remedies()
        if remedy.text not in followed
        and (remedy.file, remedy.text) not in EXCEPTIONS
        and not any(remedy.file.startswith(path) for path in EXCEPTED_FILES)
    ]
    assert not forgotten, "add a case in tests/remedies/cases.py that follows it"


def test_cases_and_exceptions_are_of_remedies_that_exist() -> None:
    known = {(remedy.file, remedy.text) for remedy in remedies()}
    texts = {text for _, text in known}
    assert not {case.remedy for case in CASES} - texts - {""}
    assert not EXCEPTIONS.keys() - known


def test_a_remedy_without_a_case_is_found() -> None:
    assert ("cli/predict.py", "missing option --global-batch") in {(each.file, each.text) for each in remedies()}
