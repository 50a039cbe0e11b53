"""Whatever a file says, the commands that read it end in a result or in an error of their own, in time and memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.protos import mutate_message
from tests.fuzz.trials import limited_memory, names, trial

INPUTS, CHUNK, FIRST_SEED = 1000, 100, 1

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of time and memory are those of Linux")


@pytest.mark.parametrize("start", range(0, INPUTS, CHUNK))
def test_mutated_files_end_in_results_or_errors(start: int) -> None:
    with limited_memory():
        faults = [trial(*name) for name in names(INPUTS, FIRST_SEED, tuple(FORMATS))[start : start + CHUNK]]
    assert not [str(fault) for fault in faults if fault]


def test_a_crash_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("planner.read_plan", crash)
    fault = trial("plan", 1)
    assert fault is not None
    assert fault.name == "plan:1"
    assert "KeyError" in fault.error


def test_endless_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(path: object) -> None:
        while True:
            pass

    monkeypatch.setattr("planner.read_plan", hang)
    monkeypatch.setattr("tests.fuzz.trials.CPU_S", 0.05)
    fault = trial("plan", 1)
    assert fault is not None
    assert "more than 0.05 s" in fault.error


@pytest.mark.parametrize("kind", FORMATS)
def test_a_seed_gives_the_same_file_again(kind: str, tmp_path: Path) -> None:
    import random
    import shutil

    form: Format = FORMATS[kind]
    folder, written = tmp_path / "seed", []
    for _ in range(2):
        folder.mkdir()
        path = folder / f"mutated{form.suffix}"
        form.make(path, random.Random("7"))
        written.append(path.read_bytes())
        shutil.rmtree(folder)  # the file of a sweep names its folder
    assert written[0] == written[1]


def test_every_kind_of_field_is_mutated() -> None:
    import random

    import onnx

    from tests.fuzz.models import attention

    changed = set()
    for seed in range(400):
        model = attention()
        before = {name: getattr(model.graph, name)[:] for name in ("node", "initializer", "input", "output")}
        versions = list(model.opset_import)
        mutate_message(model, random.Random(seed))
        changed |= {name for name, entries in before.items() if list(getattr(model.graph, name)) != list(entries)}
        changed |= {"opset"} if list(model.opset_import) != versions else set()
        onnx.ModelProto.FromString(model.SerializeToString())
    assert changed == {"node", "initializer", "input", "output", "opset"}
