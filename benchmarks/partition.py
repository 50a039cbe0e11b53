"""Solves every published partition instance and larger ones, and writes `docs/benchmarks.md`.

    python -m benchmarks.partition FOLDER [--only REGEX] [--peer-binary COMMAND] [-o docs/benchmarks.md]

FOLDER holds `peers.json`, `operator_graphs/`, `piper/` and `pipedream/`; without it, `instances` in the folder that
the environment variable SHARDPLAN_SHARED names. Each case runs in a process of its own, one after the other, so that
its time and memory are its own. `--results` keeps all figures as JSON lines; `--render` writes the document from them.

A peer's program is run on the same instances in the same run with `--peer-binary`. It gets the instance on standard
input, and as `{instance}` where the command says so; `{devices}`, `{memory_bytes}`, `{batch}`, `{machines}` and
`{bandwidth}` are filled in too. Its objective is the number behind the last `maxLoad`, `TPS`, `time per sample` or
`objective` that it prints; a printed split of an operator graph (`fpgas`, `cpus`) is judged by this project's judge
instead. For example:

    python -m benchmarks.partition FOLDER --only '^contiguous' --peer-binary './dp.exe'
    python -m benchmarks.partition FOLDER --only '^pipedream' --peer-binary 'python opt.py -f {instance} -n {machines}'
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.partition_cases import Case, all_cases
from benchmarks.partition_tables import tables

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Partition benchmarks

Written by `python -m benchmarks.partition`; its help says how to run a peer's program beside it. Every case ran in a
process of its own on {machine}, which other programs used as well.
*s* goes from reading the instance to the judged plan, *CPU s* is what the front and its solvers took of that on all
cores, both without the start of Python; *MB* is the peak of the whole process, interpreter and solver libraries
included. The peers' figures were recorded on another machine: look at ratios, not at absolute times. *gap* says what is
proven: *optimal*, or how far the bound is below.
"""


def main() -> None:
    """Run the cases and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="instances of the published partitioners")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases whose `table label` it is found in")
    parser.add_argument("--peer-binary", default="", metavar="COMMAND", help="a peer's program to run beside")
    parser.add_argument("--peer-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--results", type=Path, help="JSON lines to write, or to read with --render")
    parser.add_argument("--render", action="store_true", help="write the document from --results, run nothing")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from benchmarks.partition_measure import measure

        print(json.dumps(measure(json.loads(arguments.one))))
        return
    rows = _read(arguments.results) if arguments.render else _run(arguments)
    head = HEAD.format(machine=f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}")
    arguments.output.write_text(f"{head}\n{tables(rows)}")
    print(f"{len(rows)} cases written to {arguments.output}")


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        sys.exit("--render needs --results")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    shared = os.environ.get("SHARDPLAN_SHARED")
    folder = arguments.folder or (Path(shared) / "instances" if shared else None)
    if folder is None or not (folder / "peers.json").exists():
        sys.exit("no instances: name the folder that holds peers.json, or set SHARDPLAN_SHARED")
    wanted = re.compile(arguments.only)
    rows = []
    for case in all_cases(folder):
        if not wanted.search(f"{case['table']} {case['label']}"):
            continue
        row = {**case, **_alone(case)}
        if arguments.peer_binary:
            from benchmarks.partition_peer import run_peer

            row["live"] = run_peer(arguments.peer_binary, case, arguments.peer_timeout)
        rows.append(row)
        print(f"{case['table']}: {case['label']}: {row['objective']} {row['gap']} {row['seconds']} s", flush=True)
        if arguments.results:
            arguments.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _alone(case: Case) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.partition", "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode == 0:
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return row
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    print(f"failed: {case['table']} {case['label']}: {last}")
    nothing = {"objective": None, "bound": None, "gap": None, "seconds": None, "cpu_s": None, "megabytes": None}
    return {**nothing, "proven": False, "failed": last, "unit": ""}


if __name__ == "__main__":
    main()
