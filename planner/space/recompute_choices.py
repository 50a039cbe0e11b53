"""The ways to keep what backward needs (on the device, made again, in the host's memory), and those a search tries."""

from __future__ import annotations

from planner.space.configuration import KEEP_ALL, LAYER_INPUT, RecomputeChoice
from planner.space.layers import layers_of_choice
from planner.space.types import BlockCosts, Job

CHOICES = ("never", "always", "layers", "auto")
"""Values of `Job.recompute` other than names of modules."""


def recomputed_modules(choice: str) -> tuple[str, ...]:
    """The modules that a choice of recomputation names, `layernorm,moe_act`; none for other choices."""
    if choice in CHOICES or layers_of_choice(choice):
        return ()
    return tuple(dict.fromkeys(part.strip() for part in choice.split(",") if part.strip()))


def recompute_choices(choice: str) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that a choice names: nothing, all layers, its number of layers, or its modules."""
    if recomputed_modules(choice):
        return (RecomputeChoice(repeats=recomputed_modules(choice)),)
    all_layers = RecomputeChoice(True, layers=layers_of_choice(choice))
    if choice == "always" or all_layers.layers:
        return (all_layers,)
    return (KEEP_ALL,) if choice == "never" else (KEEP_ALL, all_layers)


def allows_some_layers(job: Job) -> bool:
    """True if a search may choose how many of a stage's layers are recomputed."""
    return job.recompute == "auto" and job.structure.some_layers and not job.whole_stages


def is_allowed(choice: str, wanted: RecomputeChoice) -> bool:
    """True if a choice allows this way to recompute a stage."""
    return choice == "auto" or wanted in recompute_choices(choice)


def ways_of(choice: str, costs: BlockCosts) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that a stage may choose from, fastest first; without those of some of its layers."""
    named = recompute_choices(choice)
    lists = tuple(RecomputeChoice(repeats=modules) for modules in lists_of(choice, costs))
    return (*(each for each in named if each == KEEP_ALL), *lists, *(each for each in named if each.recompute))


def offload_choices(job: Job, costs: BlockCosts) -> tuple[RecomputeChoice, ...]:
    """The ways to keep activations in the host's memory that a search tries, within what frameworks can move there.

    Where all layers are recomputed, their inputs; else all kinds of modules that may move, nothing being recomputed, or
    the list of modules that frees most.
    """
    kinds, ways = set(job.structure.offloads) - {LAYER_INPUT}, ways_of(job.recompute, costs)
    inputs = LAYER_INPUT in job.structure.offloads and not job.whole_stages
    found = [each._replace(offload=(LAYER_INPUT,)) for each in ways if inputs and each.recompute and not each.layers]
    modules = () if costs.selective is None else costs.selective.present(tuple(sorted(kinds)))
    kept = [each for each in ways if not each.recompute]
    return (*found, *(each._replace(offload=modules) for each in dict.fromkeys((*kept[:1], *kept[-1:])) if modules))


def rungs(way: RecomputeChoice, costs: BlockCosts, choice: str) -> tuple[RecomputeChoice, ...]:
    """The ways of `ways_of` that no stage is slower with than with a way that offloads, and that way, fastest first."""
    below = (KEEP_ALL, way._replace(offload=()))
    return (*(each for each in ways_of(choice, costs) if way.recompute or each in below), way)


def lists_of(choice: str, costs: BlockCosts) -> tuple[tuple[str, ...], ...]:
    """Lists of modules of which a stage may recompute one, fastest first."""
    if choice == "auto":
        return () if costs.selective is None else costs.selective.offered
    return tuple(each.repeats for each in recompute_choices(choice) if each.repeats)
