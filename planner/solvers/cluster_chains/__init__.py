"""Layers cut into stages as PipeDream, BaPipe and HetPipe cut them: problems, their judges, exact searches.

`stages` states them for a job's blocks on a cluster, for the systems of those names. `planner.published` solves the
same problems from published instances.
"""

from __future__ import annotations
