"""Mesh-TensorFlow: named dimensions on mesh dimensions."""

from planner.solvers.layouts import Layouts
from planner.systems import System, register
from planner.systems.proposals import by_layouts

register(
    System(
        key="mesh-tensorflow",
        title="Mesh-TensorFlow",
        cut="none: one program on all devices",
        sharding="named dimensions to mesh dimensions, the same for all tensors",
        solver=by_layouts,
        staleness="none",
        chooses="one mesh dimension for each named tensor dimension that divides; the fastest such layout on each mesh",
        source="Shazeer et al., NeurIPS 2018; its layout optimizer",
        layouts=Layouts("mesh-tensorflow", within_memory="mesh-tensorflow-memory", line=True, wide=True),
        backend={
            "weight_versions": "1",
            "layout": "the same named dimension is cut alike in every tensor",
        },
        open=(
            "the released optimizer minimises peak memory only; here the fastest layout within memory is taken, by "
            "a price on memory, and the released one where none is found",
            "meshes: all devices in a line, one dimension a level of the cluster, and, where a node has too little "
            "memory for weights and their states, a batch dimension beside a model dimension over several nodes",
        ),
    ),
)
