"""Another batch size for a graph whose shapes are fixed."""

from planner.operators.batching.flow import Flow, Mark, Marks
from planner.operators.batching.graphs import BatchFlow, batch_flow, rebatch

__all__ = ["BatchFlow", "Flow", "Mark", "Marks", "batch_flow", "rebatch"]
