"""Runs listen on the loopback alone unless another interface is named, and leave nothing behind when they are ended."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import onnx  # noqa: E402

import planner  # noqa: E402
from planner.runtime.network import join_others, listen_on, loopback  # noqa: E402
from tests.listeners import is_running, listeners, needs_proc, tree, until  # noqa: E402
from tests.runtime import cases  # noqa: E402

pytestmark = needs_proc
LOOPBACK = {"127.0.0.1", "::1"}


def has_address(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return bool(fcntl.ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", interface.encode())))
        except OSError:
            return False


OTHERS = [name for _, name in socket.if_nameindex() if name not in ("lo", "lo0") and has_address(name)]
JOINED = """
import torch.distributed as dist
from planner.runtime.network import join_others
join_others()
dist.barrier()
print("joined", flush=True)
dist.recv(__import__("torch").zeros(1)) if dist.get_rank() else __import__("time").sleep(60)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("run")
    planner.write_plan(cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2}, 4)), folder / "plan.json")
    onnx.save(cases.model("gpt"), folder / "model.onnx")
    return str(folder / "plan.json"), str(folder / "model.onnx")


def running(files: tuple[str, str], folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """A run of many steps, its temporary folders in a folder of the test."""
    command = [sys.executable, "-c", "import sys; from cli.main import main; main(sys.argv[1:])", "run", files[0]]
    command += ["--model", files[1], "--steps", "1000000", *options]
    variables = {**os.environ, "TMPDIR": str(folder), **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def own_folders(folder: Path) -> list[Path]:
    """Temporary folders of the program; torch has others."""
    return list(folder.glob("shardplan-*"))


def first_step(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_run_listens_on_the_loopback_alone(files: tuple[str, str], tmp_path: Path) -> None:
    elsewhere = {"GLOO_SOCKET_IFNAME": OTHERS[0]} if OTHERS else {}
    with running(files, tmp_path, **elsewhere) as process:
        assert first_step(process).startswith("step 1:")
        found = listeners(tree(process.pid))
        process.terminate()
    assert found
    assert found <= LOOPBACK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_ended_run_leaves_nothing(files: tuple[str, str], tmp_path: Path, number: signal.Signals) -> None:
    with running(files, tmp_path) as process:
        assert first_step(process).startswith("step 1:")
        ranks = tree(process.pid)[1:]
        assert len(ranks) >= 2
        assert own_folders(tmp_path)
        process.send_signal(number)
        process.wait(20)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert until(lambda: not any(map(is_running, ranks)))
    if number != signal.SIGKILL:
        assert own_folders(tmp_path) == []


def test_a_check_that_is_ended_leaves_nothing(files: tuple[str, str], tmp_path: Path) -> None:
    with running(files, tmp_path, "--check") as process:
        assert until(lambda: own_folders(tmp_path))
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert own_folders(tmp_path) == []


def joined(rank: int, port: int, **environment: str) -> subprocess.Popen[str]:
    """A process that joins another one through the environment."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", JOINED], stdout=subprocess.PIPE, text=True, env={**os.environ, **own, **environment}
    )


@pytest.mark.parametrize("environment", [{}, {"LOCAL_WORLD_SIZE": "2"}])
def test_processes_of_one_machine_meet_on_the_loopback(environment: Mapping[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with joined(0, port, **environment) as first, joined(1, port, **environment) as second:
        assert first_step(first) == first_step(second) == "joined\n"
        found = listeners([first.pid, second.pid])
        first.kill()
        second.kill()
    assert found
    assert found <= LOOPBACK


def environment_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_several_machines_must_name_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    environment_of(monkeypatch, **machines, MASTER_PORT="29500")
    with pytest.raises(planner.UsageError, match="no network interface to listen on is named") as caught:
        join_others()
    assert "--interface NAME" in caught.value.problem.hint
    with pytest.raises(planner.UsageError, match="no network interface 'nowhere0'"):
        join_others("nowhere0")


def test_what_the_environment_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environment_of(monkeypatch, RANK="0", WORLD_SIZE="2")
    with pytest.raises(planner.UsageError, match="MASTER_ADDR, MASTER_PORT not set"):
        join_others()


@pytest.mark.skipif(not OTHERS, reason="the machine has the loopback alone")
def test_an_interface_that_is_named_is_used() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = JOINED.replace("join_others()", f"join_others({OTHERS[0]!r})")
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}) as process:
        line = first_step(process)
        found = listeners([process.pid])
        process.kill()
    assert line == "joined\n"
    assert found
    assert not found & {"0.0.0.0", "::", *LOOPBACK}


def test_interfaces_are_named_to_gloo_and_to_nccl_by_their_full_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "before")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "before")
    listen_on(loopback())
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback(), f"={loopback()}")
