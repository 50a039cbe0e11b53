"""Temporary folders and processes do not outlive the program, however it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import planner
from planner.processes import scratch, tidied
from tests.listeners import is_running, needs_proc, tree, until

HOLD = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"


def started(body: str, folder: Path, *prefix: str) -> subprocess.Popen[str]:
    """A Python program with temporary folders in a folder of the test, once it has printed a line."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(body)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def in_scratch(inner: str = HOLD) -> str:
    return "from planner.processes import scratch\nwith scratch('test') as folder:\n" + textwrap.indent(inner, "    ")


def test_a_scratch_folder_is_the_users_own_and_goes() -> None:
    with scratch("test") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_a_scratch_folder_goes_at_an_error() -> None:
    with pytest.raises(ZeroDivisionError), scratch("test") as folder:
        (folder / "file").write_text(str(1 // 0))
    assert not folder.exists()


def test_a_scratch_folder_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "missing"))
    with pytest.raises(planner.OutputError, match="cannot make a temporary folder"), scratch("test"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_scratch_folder_goes_at_a_signal_which_ends_the_program(number: signal.Signals, tmp_path: Path) -> None:
    with started(in_scratch(), tmp_path) as process:
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(20) == -number
    assert list(tmp_path.iterdir()) == []


def test_folders_within_folders_go(tmp_path: Path) -> None:
    with started(in_scratch(in_scratch()), tmp_path) as process:
        assert len(list(tmp_path.iterdir())) == 2
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_goes(tmp_path: Path) -> None:
    body = f"""
        import os
        from planner import files
        def held(*arguments):
            {HOLD.replace(chr(10), "; ")}
        os.replace = held
        files.write_whole({str(tmp_path / "plan.json")!r}, "{{}}")
    """
    with started(body, tmp_path) as process:
        assert len(list(tmp_path.iterdir())) == 1
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    with started("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + in_scratch(), tmp_path) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with tidied(), tidied():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


CHILDREN = """
    import multiprocessing, time
    from planner.processes import end_with_parent
    def child():
        end_with_parent()
        time.sleep(60)
    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=child) for _ in range(2)]
        for child in children:
            child.start()
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(60)
"""


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    with started(CHILDREN, tmp_path) as process:
        children = tree(process.pid)[1:]
        assert len(children) >= 2
        process.send_signal(number)
        process.wait(20)
    assert until(lambda: not any(map(is_running, children)))


@needs_proc
def test_processes_end_where_the_kernel_does_not_tell_them(tmp_path: Path) -> None:
    with started("import sys\nsys.platform = 'other'\n" + textwrap.dedent(CHILDREN), tmp_path) as process:
        children = tree(process.pid)[1:]
        assert len(children) >= 2
        process.kill()
        process.wait(20)
    assert until(lambda: not any(map(is_running, children)))
