"""Mesh-TensorFlow: named dimensions on mesh dimensions."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="mesh-tensorflow",
        title="Mesh-TensorFlow",
        solver=by_layouts,
        source="Shazeer et al., NeurIPS 2018; its layout optimizer",
        layouts=Layouts("mesh-tensorflow", within_memory="mesh-tensorflow-memory", line=True, wide=True),
        backend={
            "weight_versions": "1",
            "layout": "the same named dimension is cut alike in every tensor",
        },
    ),
)
