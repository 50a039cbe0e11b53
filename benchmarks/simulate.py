"""Simulates schedules of growing length and prints a table: seconds against the number of actions.

    python -m benchmarks.simulate [--most 1000000] [--schedules 1f1b,zb-h1,interleaved,chimera,pipedream]

An order that drains is made, linked and played as a whole. A pipeline that never drains is played until it repeats:
then "actions" are those that took, and "of" says how many `--iterations` have. Seconds are of processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from planner.play import StageTimes, measure_schedule, run
from planner.schedules import Pipeline, compile_orders, get

COLUMNS = ("schedule", "stages", "micro-batches", "actions", "of", "order s", "link s", "play s", "us an action")
STAGES = 16
"""Pieces of the model in every row."""

Row = tuple[object, ...]


def drained(name: str, micro_batches: int) -> Row:
    """One iteration of a schedule that drains."""
    schedule, pipeline = get(name), Pipeline((1,) * STAGES, micro_batches)
    begin = time.process_time()
    work = schedule.work(pipeline)
    made = time.process_time()
    program = compile_orders(work)
    linked = time.process_time()
    run(program, _times())
    end = time.process_time()
    count = len(program.kind)
    return _row(name, micro_batches, count, count, made - begin, linked - made, end - linked)


def steady(name: str, micro_batches: int, iterations: int) -> Row:
    """The pace of a schedule that never drains."""
    begin = time.process_time()
    found = measure_schedule(
        name, STAGES, micro_batches, forward_s=_times().forward_s.tolist(), backward_s=_times().backward_s.tolist(),
        receive_s=0.1,
    )  # fmt: skip
    seconds = time.process_time() - begin
    count = len(found.trace.program.kind)
    in_an_iteration = sum(len(lane) for lane in get(name).order(Pipeline((1,) * STAGES, 32))) * micro_batches // 32
    return _row(name, micro_batches, count, in_an_iteration * iterations, 0.0, 0.0, seconds)


def _times() -> StageTimes:
    forward = [1.0 + 0.1 * (stage % 3) for stage in range(STAGES)]
    return StageTimes.of(forward, [2 * f for f in forward], 0.1)


def _row(name: str, micro_batches: int, count: int, of: int, order_s: float, link_s: float, play_s: float) -> Row:
    each = (order_s + link_s + play_s) / count * 1e6
    return name, STAGES, micro_batches, count, of, order_s, link_s, play_s, each


def rows(names: list[str], most: int, iterations: int) -> Iterator[Row]:
    """All rows: ten times as many micro-batches each time, as long as the actions are no more than `most`."""
    for name in names:
        micro_batches = 32
        while 2 * STAGES * micro_batches <= most:
            if get(name).weight_policy.synchronous:
                yield drained(name, micro_batches)
            else:
                yield steady(name, micro_batches, iterations)
            micro_batches *= 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1_100_000, help="most actions of an iteration")
    parser.add_argument("--schedules", default="1f1b,zb-h1,interleaved,chimera,pipedream,pipedream-2bw")
    parser.add_argument("--iterations", type=int, default=1000, help="of pipelines that never drain")
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows(arguments.schedules.split(","), arguments.most, arguments.iterations):
        print("| " + " | ".join(f"{v:,.3g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
                                for v in row) + " |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
