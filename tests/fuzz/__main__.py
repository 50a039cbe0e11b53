"""Many mutated inputs: `python -m tests.fuzz --count 100000 --seed 1`, or one again: `python -m tests.fuzz onnx:17`."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from tests.fuzz.formats import FORMATS, SLOW_FORMATS
from tests.fuzz.trials import Fault, limited_memory, names, trial

CHUNK = 250
"""Trials of one process."""
STUCK_S = 60.0
"""Seconds after which a process with a chunk of trials is given up."""


def _chunk(trials: Sequence[tuple[str, int]], pipe: multiprocessing.connection.Connection) -> None:
    with limited_memory():
        for kind, seed in trials:
            pipe.send((kind, seed))
            fault = trial(kind, seed)
            if fault:
                pipe.send(fault)
    pipe.send(None)


def _run(trials: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int] | Fault]:
    """Each trial as it begins, and faults; a process that dies or hangs is a fault of its last trial."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_chunk, args=(trials, theirs))
    process.start()
    theirs.close()
    last, done = trials[0], 0
    try:
        while ours.poll(STUCK_S):
            said = ours.recv()
            if said is None:
                return
            if not isinstance(said, Fault):
                last, done = said, done + 1
            yield said
        reason = f"no answer in {STUCK_S:g} s"
    except EOFError:
        process.join()
        reason = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    yield Fault(f"{last[0]}:{last[1]}", (), reason, "?")
    if trials[done:]:
        yield from _run(trials[done:])


def _collect(kinds: Set[str]) -> None:
    """Make what mutations start from once, before processes are split off."""
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            (FORMATS | SLOW_FORMATS)[kind].make(Path(folder) / "first", random.Random(0))


def main() -> int:
    """Run trials, print faults as they come and counts by format; 1 when there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("trials", nargs="*", help="FORMAT:SEED, to run single trials again")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="first seed of every format")
    parser.add_argument("--formats", default=",".join([*FORMATS, *SLOW_FORMATS]))
    given = parser.parse_args()
    single = [(name.partition(":")[0], int(name.partition(":")[2])) for name in given.trials]
    trials = single or names(given.count, given.seed, tuple(given.formats.split(",")))
    _collect({kind for kind, _ in trials})
    begin, run, faults = time.monotonic(), Counter[str](), Counter[str]()
    for start in range(0, len(trials), CHUNK):
        for said in _run(trials[start : start + CHUNK]):
            if isinstance(said, Fault):
                faults[said.name.partition(":")[0]] += 1
                print(said, flush=True)
            else:
                run[said[0]] += 1
        print(f"{sum(run.values())} of {len(trials)} inputs, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    for kind, count in run.items():
        print(f"{kind:<16}{count:>8} inputs{faults[kind]:>6} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
