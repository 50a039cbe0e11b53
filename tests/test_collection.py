"""Garbage collection is put off within, and back on afterwards if it was on before."""

from __future__ import annotations

import gc

import pytest

from planner.interpreter import uncollected


@uncollected()
def _divide() -> float:
    assert not gc.isenabled()
    return 1 / 0


def test_collection_is_back_after_an_error_within() -> None:
    with pytest.raises(ZeroDivisionError):
        _divide()
    assert gc.isenabled()


def test_an_inner_block_does_not_end_an_outer_one() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
