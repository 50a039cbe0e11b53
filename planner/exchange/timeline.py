"""Messages in time: each passes its legs in turn, and every port serves them first come, first served.

A leg keeps each port it uses busy for a time of its own. The next leg of a message may begin when a first chunk of
it has arrived (a tensor cut in partitions is pushed and pulled at the same time), and cannot end before the last
chunk has passed. Where all messages use the same ports alike, this is a single link that serves one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from planner.exchange.messages import Message
from planner.exchange.types import Transfer


def play(messages: Sequence[Message], ports: int) -> tuple[Transfer, ...]:
    """When each message arrives, in the order given.

    Args:
        messages: what is sent, each from its ready time on.
        ports: number of ports; legs are over twice as many (ways out, then ways in).

    Returns:
        One transfer a message. O(legs * (log(legs) + ports)), and deterministic: equal times in message order.
    """
    free = np.zeros(2 * ports)
    ends = [m.ready_s for m in messages]
    queue = [(m.ready_s, i, 0) for i, m in enumerate(messages) if m.legs]
    heapq.heapify(queue)
    while queue:
        ready, i, leg = heapq.heappop(queue)
        passed, chunk = messages[i].legs[leg], messages[i].chunk
        used = passed.busy_s > 0
        longest = float(passed.busy_s.max(initial=0.0))
        end = first = ready
        if used.any():
            busy = passed.busy_s[used]
            begun = np.maximum(free[used], ready)
            free[used] = begun + busy
            end, first = float((begun + busy).max()), float((begun + chunk * busy).max())
        if leg:
            end = max(end, ends[i] + chunk * longest)
        ends[i] = end + passed.latency_s
        if leg + 1 < len(messages[i].legs):
            heapq.heappush(queue, (first + passed.latency_s, i, leg + 1))
    return tuple(
        Transfer(m.variables, m.method, m.payload_bytes, m.ready_s, end) for m, end in zip(messages, ends, strict=True)
    )
