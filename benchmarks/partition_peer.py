"""Run a peer's program on an instance, with its time and memory, and take its answer out of what it prints."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.partition_cases import Case
from planner.published.problems import MaxLoadDecision, MaxLoadProblem

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NAMED = re.compile(rf"(?:max[ _-]?load|time[ _-]?per[ _-]?sample|TPS|objective)\D{{0,12}}({_NUMBER})", re.IGNORECASE)


def run_peer(command: str, case: Case, timeout_s: float) -> dict[str, Any]:
    """Call `command` on a case's instance.

    The command is split as a shell would; `{instance}`, `{devices}`, `{memory_bytes}`, `{batch}`, `{machines}` and
    `{bandwidth}` in it are filled in from the case. The instance also stands on standard input, so that programs that
    read it there (as those of the operator graphs do) need no argument.

    Returns:
        its objective as it prints it (None when none is found), the objective of its split as this project's judge has
        it where it prints a split of an operator graph, CPU seconds, seconds, peak megabytes, whether it ended in time.
    """
    arguments = [_filled(part, case) for part in shlex.split(command)]
    begin = time.perf_counter()
    with open(case["path"], "rb") as instance, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(arguments, stdin=instance, stdout=out, stderr=err)
        finished, usage = _wait(process, begin + timeout_s)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return {
        "objective": _named(texts[0]) or _named(texts[1]) if finished else None,
        "judged": _judged(texts[0], case) if finished else None,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "seconds": time.perf_counter() - begin,
        "megabytes": usage.ru_maxrss / 1024,
        "finished": finished and process.returncode == 0,
    }


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[bool, Any]:
    """Whether a process ended before the deadline (else it is stopped), and what it used."""
    ended = True
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return ended, usage
        if time.perf_counter() > deadline and ended:
            ended = False
            process.kill()
        time.sleep(0.01)


def _filled(part: str, case: Case) -> str:
    values = {
        "instance": case["path"],
        "devices": case.get("devices", ""),
        "memory_bytes": case.get("memory_bytes") or "",
        "batch": case.get("batch", ""),
        "machines": " ".join(map(str, case.get("machines", ()))),
        "bandwidth": " ".join(f"{rate:g}" for rate in case.get("bandwidth", case.get("bandwidth_byte_per_s", ())) or ())
        if isinstance(case.get("bandwidth_byte_per_s"), list)
        else case.get("bandwidth_byte_per_s", ""),
    }
    for name, value in values.items():
        part = part.replace("{" + name + "}", str(value))
    return part


def _named(text: str) -> float | None:
    """The last number behind a name of an objective; else None."""
    objectives = _NAMED.findall(text)
    return float(objectives[-1]) if objectives else None


def _judged(text: str, case: Case) -> float | None:
    """The largest load of a printed split `{"fpgas": [{"nodes": ids}], "cpus": [...]}`; None when there is none."""
    if case["kind"] != "max-load":
        return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    from benchmarks.partition_measure import build

    problem: MaxLoadProblem = build(case)
    with open(case["path"], "rb") as file:
        place = {node["id"]: i for i, node in enumerate(json.load(file)["nodes"])}
    device_of = [-1] * len(place)
    devices = [*document.get("fpgas", [])[: problem.accelerators]]
    devices += [{"nodes": []}] * (problem.accelerators - len(devices)) + [*document.get("cpus", [])]
    for device, part in enumerate(devices):
        for number in part["nodes"]:
            device_of[place[number]] = device
    verdict = problem.judge(MaxLoadDecision(tuple(device_of)))
    return verdict.objective if verdict.feasible and math.isfinite(verdict.objective) else None
