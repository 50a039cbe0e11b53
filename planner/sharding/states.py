"""What keeping a weight's states somewhere costs: memory, and the changes of layout of one forward and backward pass.

ZeRO needs no formulas of its own: its stages are resting places (`zero_choice`), and their communication is what the
changes of layout between the resting place and the use come to.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import UsageError
from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, shard_elements
from planner.sharding.mesh import Mesh
from planner.sharding.reshard import Step, reshard
from planner.sharding.resting import StateBytes, WeightChoice


def state_bytes(shape: Sequence[int], choice: WeightChoice, sizes: Sequence[int], state: StateBytes) -> float:
    """Bytes that a rank holds of a weight, its gradient and its optimizer state."""
    return (
        state.weight * shard_elements(shape, choice.weight, sizes)
        + state.gradient * shard_elements(shape, choice.gradient, sizes)
        + state.optimizer * shard_elements(shape, choice.optimizer, sizes)
    )


def weight_steps(
    mesh: Mesh,
    shape: Sequence[int],
    item_bytes: float,
    choice: WeightChoice,
    used: TensorLayout,
    gradient: TensorLayout,
    uses: int = 2,
) -> tuple[Step, ...]:
    """All changes of layout that a weight goes through in one step of training.

    Args:
        mesh: the mesh.
        shape: the weight's.
        item_bytes: bytes an element.
        choice: where its states rest.
        used: layout in which the operator wants it.
        gradient: layout in which the operator hands its gradient back.
        uses: how often it is brought to the operator: once forward, once backward.
    """
    there = reshard(mesh, shape, item_bytes, choice.weight, used) * uses
    back = reshard(mesh, shape, item_bytes, gradient, choice.gradient)
    update = reshard(mesh, shape, item_bytes, choice.gradient, choice.optimizer)
    return there + back + update + reshard(mesh, shape, item_bytes, choice.optimizer, choice.weight)


def zero_choice(stage: int, axes: int = 1, axis: int = 0, dim: int = 0) -> WeightChoice:
    """Where ZeRO's stages let a weight's states rest: 0 nowhere cut, 1 optimizer, 2 gradient too, 3 weight too.

    Args:
        stage: 0 to 3.
        axes: axes of the mesh.
        axis: the axis over which the states are cut.
        dim: the dimension of the weight that is cut.

    Raises:
        UsageError: no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"ZeRO has no stage {stage}", hint="write 0, 1, 2 or 3")
    rows: dict[int, tuple[Part, Part, Part]] = {
        0: (REPLICATED, REPLICATED, REPLICATED),
        1: (REPLICATED, PARTIAL, Part(dim)),
        2: (REPLICATED, Part(dim), Part(dim)),
        3: (Part(dim), Part(dim), Part(dim)),
    }

    def place(part: Part) -> TensorLayout:
        return tuple(part if a == axis else REPLICATED for a in range(axes))

    weight, gradient, optimizer = rows[stage]
    return WeightChoice(place(weight), place(gradient), place(optimizer))
