"""Measured times as a file, in place of prices."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from planner.costs import read_times, times_document
from tests.costs.test_roofline import of, product


def test_times_are_read_back_and_follow_the_micro_batch_and_the_share() -> None:
    made = product(8, 16, 16)
    priced = of(made)
    timed = replace(
        priced, device="here", micro_batch=8, forward_s=np.array([1.0, 2.0]), backward_s=np.array([3.0, 4.0])
    )
    found = read_times(json.dumps({"times": times_document(made, timed)}), made)
    assert (found.device, found.micro_batch) == ("here", 8)
    doubled = found.instead_of(replace(priced, micro_batch=16))
    assert doubled.forward_s.tolist() == [2.0, 4.0]
    assert doubled.backward_s.tolist() == [6.0, 8.0]
    assert doubled.at(0.25)[0].tolist() == pytest.approx([0.5, 1.0])
    assert doubled.source == "measured"
    assert (doubled.output_bytes == priced.output_bytes).all()
