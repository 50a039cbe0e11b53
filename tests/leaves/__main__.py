"""`make leaves`: every mutation of every value of a plan of each shape; prints those that `check` misses."""

from __future__ import annotations

import argparse
import sys
import time

from tests.leaves.checking import missed, mutations_of, sampled
from tests.leaves.shapes import SHAPES


def main() -> int:
    """Check all shapes, or those that are named. Returns 1 if a mutation is missed."""
    parser = argparse.ArgumentParser(prog="make leaves", description=__doc__)
    parser.add_argument("shapes", nargs="*", help="names of shapes; all by default")
    parser.add_argument("--sample", type=int, default=0, help="mutations of each, of different kinds; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    given = parser.parse_args()
    total = 0
    for shape in given.shapes or SHAPES:
        begin = time.monotonic()
        chosen = sampled(shape, given.sample, given.seed) if given.sample else list(mutations_of(shape))
        lines = missed(shape, chosen)
        total += len(lines)
        seconds = time.monotonic() - begin
        sys.stdout.write(f"{shape}: {len(chosen)} mutations, {len(lines)} missed, {seconds:.0f} s\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines)
        sys.stdout.flush()
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
