"""How much work a search spends on what."""

THOROUGH_UP_TO = 64
"""Most devices for the thorough search, which solves every problem that may hold the best decision by critical path.

On more devices the closed form ranks the problems, and only `MAX_BOUNDED` of those that the bound depends on are
bounded more closely."""

MAX_BOUNDED = 4
"""Problems that are bounded more closely on many devices."""

MAX_RAISED = 6
"""Problems with unpriced shardings that are solved only to raise the overall bound, lowest bound first."""

NEAR = 1.2
"""A first plan is good enough to start with within this factor of perfectly balanced compute."""

MAX_RETRIED = 4
"""Shardings with which plans are searched again that recompute some layers of a stage."""

MAX_OFFLOADED = 3
"""Shardings with which plans are searched again that keep activations in the host's memory."""

MAX_SIZES_TRIED = 2
"""Micro-batch sizes for which a first tensor parallel plan is tried."""

MAX_RUNNERS_UP = 8
"""Most runners-up of an answer."""

SLACK = 0.02
"""Decisions are still searched if their closed form exceeds the best by up to this fraction."""
