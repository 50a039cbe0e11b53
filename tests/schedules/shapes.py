"""Pipelines that each schedule can serve, by its name with options."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from planner.schedules import Pipeline, get

Shape = Callable[[st.DrawFn], tuple[int, int]]


def any_line(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(1, 7)), draw(st.integers(1, 14))


def even_line(draw: st.DrawFn) -> tuple[int, int]:
    return 2 * draw(st.integers(1, 4)), draw(st.integers(1, 20))


def pairs_of(pairs: int) -> Shape:
    return lambda draw: (2 * pairs * draw(st.integers(1, 3)), draw(st.integers(1, 20)))


def doubled(draw: st.DrawFn) -> tuple[int, int]:
    return 2 * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 8))


def chunked(chunks: int) -> Shape:
    def shape(draw: st.DrawFn) -> tuple[int, int]:
        workers = draw(st.integers(1, 5))
        return workers * chunks, workers * draw(st.integers(1, 4))

    return shape


def grouped(chunks: int, group: int) -> Shape:
    """Groups of so many micro-batches, the last one whole or at least one for each worker."""

    def shape(draw: st.DrawFn) -> tuple[int, int]:
        workers, groups = draw(st.integers(1, group)), draw(st.integers(0, 2))
        rest = draw(st.integers(workers, group))
        return workers * chunks, groups * group + rest

    return shape


def folded(chunks: int) -> Shape:
    return lambda draw: (chunks * draw(st.integers(1, 6)), draw(st.integers(1, 14)))


def buffered(draw: st.DrawFn) -> tuple[int, int]:
    stages = draw(st.integers(1, 6))
    return stages, stages + draw(st.integers(0, 8))


def dual(draw: st.DrawFn) -> tuple[int, int]:
    stages = 2 * draw(st.integers(1, 4))
    return stages, 2 * stages + 2 * draw(st.integers(0, 6))


def dual_v(draw: st.DrawFn) -> tuple[int, int]:
    stages = 2 * draw(st.integers(1, 4))
    return stages, stages + draw(st.integers(0, 10))


def waves(wave: int) -> Shape:
    return lambda draw: (draw(st.integers(1, 6)), (wave or 1) * draw(st.integers(1, 4)))


def own_wave(draw: st.DrawFn) -> tuple[int, int]:
    stages = draw(st.integers(1, 6))
    return stages, stages * draw(st.integers(1, 3))


SHAPES: dict[str, Shape] = {
    "gpipe": any_line,
    "gpipe:recompute=true": any_line,
    "gpipe:recompute=true,early=true": any_line,
    "1f1b": any_line,
    "dapple": any_line,
    "dapple:most=2": any_line,
    "dapple:policy_of=b": any_line,
    "bapipe-as": any_line,
    "bapipe-sno": any_line,
    "bapipe-so": any_line,
    "bapipe-fbp": any_line,
    "bapipe-fbp:fill_overlap=true": any_line,
    "interleaved": chunked(2),
    "interleaved:chunks=3": chunked(3),
    "interleaved:group=5": grouped(2, 5),
    "interleaved:chunks=3,group=4": grouped(3, 4),
    "chimera": even_line,
    "chimera:eager=false": even_line,
    "chimera:pairs=2": pairs_of(2),
    "chimera:over=double": doubled,
    "chimera:over=halve": even_line,
    "gems": any_line,
    "zb-h1": any_line,
    "zb-h1:limit=1": any_line,
    "zb-h2": any_line,
    "zb-v": folded(2),
    "v-half": folded(2),
    "v-min": folded(2),
    "hanayo": folded(2),
    "hanayo:waves=2": folded(4),
    "bpipe": any_line,
    "dualpipe": dual,
    "dualpipe-v": dual_v,
    "seq1f1b": any_line,
    "seq1f1b:splits=4": any_line,
    "seq1f1b:splits=1": any_line,
    "pipedream": any_line,
    "pipedream:vertical=true": any_line,
    "pipedream:paced=true": any_line,
    "pipedream-2bw": buffered,
    "pipedream-2bw:uniform=false": buffered,
    "pipemare": any_line,
    "pipelined-backprop": any_line,
    "hetpipe": own_wave,
    "hetpipe:concurrent=3,distance=1": waves(3),
}
"""Every schedule, in all of its forms."""


@st.composite
def served(draw: st.DrawFn, *, split: bool = False) -> tuple[str, Pipeline]:
    """A schedule and a pipeline that it can serve, with one to three replicas of the whole line.

    Only schedules that split the backward with `split`.
    """
    name = draw(st.sampled_from(sorted(name for name in SHAPES if not split or get(name).split_backward)))
    stages, micro_batches = SHAPES[name](draw)
    count = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return name, Pipeline((count,) * stages, micro_batches * count)
