"""Training under a plan from Python: one `Trainer` a rank, started by `torchrun` or another launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import JobError, ModelError, PlanError, UsageError
from planner.plans import Plan, read
from planner.runtime.data import Batch, Data, Loss, loss_by_name
from planner.runtime.device import AUTO, TrainingDevice, choose
from planner.runtime.groups import Communicator
from planner.runtime.interpreter import Values
from planner.runtime.model_file import ModelFile, read_model
from planner.runtime.network import join_others
from planner.runtime.requirements import require_executable, require_model, require_same
from planner.runtime.shapes import with_known_shapes
from planner.runtime.weights import MakeOptimizer
from planner.runtime.worker import Report, Worker

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}
"""Optimizers by the name that a plan's job has, with their options; others are handed in as a function."""


def optimizer_of(name: str, learning_rate: float, device: TrainingDevice) -> MakeOptimizer:
    """Makes the optimizer of that name.

    Raises:
        UsageError: torch has none of that name here.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"no optimizer {name!r} in the runtime", hint=f"one of {', '.join(OPTIMIZERS)}")
    kind, options = OPTIMIZERS[name]
    fused = {"fused": device.fused} if issubclass(kind, torch.optim.Adam) else {}
    return lambda weights: kind(list(weights), lr=learning_rate, **options, **fused)


class Trainer:
    """One rank of a plan that trains.

    Args:
        plan: the plan.
        model: its model, read.
        rank: this process.
        optimizer: makes the optimizer for a list of weights; the plan's by default. Where the plan shards its state, it
            must work element by element.
        learning_rate: learning rate of the plan's optimizer.
        loss: loss on the outputs, by name or as a function of outputs and micro-batch.
        dtype: type of all floating-point work.
        seed: seed of dropout masks.
        report: called before every action.
        times: iterations of the steady state in one step, where the pipeline never drains.
        device: where the rank computes; the processor by default.
        alone: whether the rank runs without others, with stand-ins for what they would send.

    Raises:
        PlanError: the runtime does not execute something in the plan; all reasons are named.
        JobError: the number of processes is not that of the plan's ranks.
    """

    def __init__(
        self, plan: Plan, model: ModelFile, rank: int, *, optimizer: MakeOptimizer | None = None,
        learning_rate: float = 0.01, loss: str | Loss = "auto", dtype: torch.dtype = torch.float32, seed: int = 0,
        report: Report = lambda at, text: None,
        times: int = 1, device: TrainingDevice | None = None, alone: bool = False,
    ) -> None:  # fmt: skip
        require_executable(plan)
        self.plan, self.rank, self.iteration = plan, rank, 0
        self.device, self._dtype = device or TrainingDevice(), dtype
        loss_function = loss_by_name(loss, plan) if isinstance(loss, str) else loss
        make = optimizer or optimizer_of(plan.options.optimizer, learning_rate, self.device)
        self._exchange = Communicator(self.device, rank, plan.world_size, alone=alone)
        self.clock = self._exchange.clock

        def timed(at: int, text: str) -> None:
            self.clock.begin(text.lstrip("+").split(".")[0])
            report(at, text)

        self.worker = Worker(
            plan, model, self._exchange, loss=loss_function, make=make, dtype=dtype, seed=seed, report=timed,
            times=times,
        )  # fmt: skip

    def step(self, batch: Batch | Data) -> float:
        """Run one iteration and update the weights.

        Args:
            batch: the global batch, the same on all ranks: tensors by input name with a first dimension of samples; or
                a function of iteration and micro-batch number that gives micro-batches.

        Returns:
            The mean loss over the global batch, on every rank.
        """
        data = batch if callable(batch) else self._parts(batch)
        return self.steps(data)[-1]

    def steps(self, data: Data) -> list[float]:
        """As `step`, with the loss of every iteration: a pipeline that never drains runs several at a time."""
        parts = self.worker.iteration(self.iteration, data)
        loss = torch.tensor(parts, dtype=torch.float64)
        self._exchange.sum_of_all(loss)
        self.clock.read()
        self.iteration += len(parts)
        return [float(x) for x in loss]

    def _parts(self, batch: Batch) -> Data:
        size, count = self.plan.micro_batches.size, self.plan.micro_batches.global_batch
        wrong = next((name for name, x in batch.items() if x.shape[0] != count), None)
        if wrong is not None:
            raise JobError(f"{wrong!r} has {batch[wrong].shape[0]} samples, the plan's batch {count}", where=wrong)
        cast = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return lambda iteration, m: {name: x[m * size : (m + 1) * size] for name, x in cast.items()}

    def weights(self) -> Values:
        """The full weights of this rank's stages, by name, in the host's memory. A collective call."""
        return {name: x.cpu() for held in self._states().values() for name, x in held[0].items()}

    def save(self, folder: str | Path) -> None:
        """Write weights and optimizer state as full tensors by name, so that any plan of the model can load them."""
        import torch.distributed.checkpoint as checkpoint

        states: dict[str, Any] = {"iteration": torch.tensor(self.iteration)}
        for index, (values, kinds) in self._states().items():
            replica = self.worker.stages[index].replica
            if self.rank != self.plan.stages[index].replicas[replica][0] or (replica and not self._apart):
                continue
            if not replica:
                states.update({f"weights/{name}": x for name, x in values.items()})
            for kind, held in kinds.items():
                states.update({f"{_of_copy(replica)}{kind}/{name}": x for name, x in held.items()})
        checkpoint.save(states, checkpoint_id=str(folder), process_group=self._exchange.processes)

    @property
    def _apart(self) -> bool:
        """Whether each copy has an optimizer state of its own: copies that run ahead of each other update alone."""
        return self.plan.schedule.clock_distance is not None

    def load(self, folder: str | Path) -> None:
        """Load what `save` wrote under this or another plan of the same model.

        Copies with optimizer states of their own get theirs, or that of the first where the checkpoint has no other.

        Raises:
            PlanError: the checkpoint lacks a weight.
        """
        import torch.distributed.checkpoint as checkpoint

        stored = checkpoint.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {"iteration": torch.tensor(0)}
        kinds = sorted({key.split("/")[1] for key in stored if key.startswith("optimizer/")})

        def key(replica: int, kind: str, name: str) -> str:
            own = f"{_of_copy(replica)}{kind}/{name}"
            return own if self._apart and own in stored else f"{_of_copy(0)}{kind}/{name}"

        for stage in self.worker.stages.values():
            for name in stage.program.owned:
                if f"weights/{name}" not in stored:
                    raise PlanError(f"no weight {name!r}", where=str(folder), hint="is it of the same model?")
                whole_weight = self.worker.whole_shape(name)
                keys = [f"weights/{name}", *(key(stage.replica, kind, name) for kind in kinds)]
                wanted.update({at: torch.empty(whole_weight, dtype=self._dtype) for at in keys if at in stored})
            numbers = (key(stage.replica, kind, "") for kind in kinds)
            wanted.update({at: torch.zeros((), dtype=torch.float32) for at in numbers if at in stored})
        checkpoint.load(wanted, checkpoint_id=str(folder), process_group=self._exchange.processes)
        self.iteration = int(wanted["iteration"])
        for stage in self.worker.stages.values():
            for weights in (stage.weights, stage.tied):
                values = {n: stage.piece(n, wanted[f"weights/{n}"]) for n in weights.shapes}
                held: dict[str, Values] = {}
                for kind in kinds:
                    places = {n: key(stage.replica, kind, n) for n in weights.shapes}
                    number = wanted.get(key(stage.replica, kind, ""))
                    pieces = {n: stage.piece(n, wanted[at]) for n, at in places.items() if at in wanted}
                    held[kind] = {"": number} if number is not None else pieces
                weights.restore(values, held)

    def _states(self) -> dict[int, tuple[Values, dict[str, Values]]]:
        """By stage, full weights, and full optimizer state by kind."""
        states_by_stage = {}
        for index, stage in self.worker.stages.items():
            values: Values = {}
            kinds: dict[str, Values] = {}
            for weights in (stage.weights, stage.tied):
                held, states = weights.state()
                values.update(held)
                for kind, state in states.items():
                    kinds.setdefault(kind, {}).update(state)
            shapes = {name: self.worker.whole_shape(name) for name in values}
            whole_values = {name: stage.whole(name, x, shapes[name]) for name, x in values.items()}
            whole_kinds = {
                kind: {name: stage.whole(name, x, shapes[name]) if name else x for name, x in state.items()}
                for kind, state in kinds.items()
            }
            states_by_stage[index] = whole_values, whole_kinds
        return states_by_stage


def _of_copy(replica: int) -> str:
    """What begins the names of a copy's optimizer state in a checkpoint."""
    return f"optimizer of copy {replica}/" if replica else "optimizer/"


def load(
    plan: Plan | str | Path,
    model: ModelFile | str | Path | object,
    *,
    interface: str = "",
    **options: Any,  # noqa: ANN401
) -> Trainer:
    """A trainer for this process.

    Initialises torch.distributed from the environment that `torchrun` sets, where that has not been done yet.

    Args:
        plan: the plan, or its file.
        model: the ONNX file, or a model in memory.
        interface: network interface on which exchanges listen, such as `eth0`; by default the loopback where all
            processes are on one machine, else what `GLOO_SOCKET_IFNAME` names.
        options: those of `Trainer`, but `device` may be a name, or "auto" as it is by default (`device.choose`): the
            GPU of the number that `torchrun` gave the process on its machine. `backend` is that of the exchanges;
            `weights_seed` the seed of weights whose data are not in the file.

    Raises:
        PlanError: the plan cannot be read, its parts contradict each other, or something in it is not executed.
        UsageError: torch.distributed is not initialised, and the environment does not have what that needs; or the
            processes are on several machines, and no interface is named.
    """
    parsed_plan = plan if isinstance(plan, Plan) else read(plan)
    require_executable(parsed_plan)
    if not dist.is_initialized():
        join_others(interface)
    device, backend = options.pop("device", "auto"), options.pop("backend", "auto")
    if isinstance(device, str):
        options["device"] = _own_device(device, backend, parsed_plan.hardware.device_order)
    else:
        options["device"] = device
    seed = int(options.pop("weights_seed", 0))
    model_file = model if isinstance(model, ModelFile) else read_model(model, seed=seed)
    return Trainer(parsed_plan, model_of(parsed_plan, model_file), dist.get_rank(), **options)


def _own_device(kind: str, backend: str, order: tuple[int, ...]) -> TrainingDevice:
    """The device of a process that `torchrun` started; NCCL is used where all processes have a GPU of their own."""
    local_rank, ranks = (int(os.environ.get(name, default)) for name, default in _LOCAL)
    choice = replace(choose(kind, ranks=ranks, backend=backend), order=order)
    if dist.get_backend() == "gloo" and backend == AUTO:
        own = torch.tensor(int(choice.backend == "nccl"))
        dist.all_reduce(own, op=dist.ReduceOp.MIN)
        choice = replace(choice, backend="nccl" if own else "gloo")
    device = choice.open(local_rank)
    device.used().__enter__()  # for as long as the process runs
    return device


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def model_of(plan: Plan, model: ModelFile) -> ModelFile:
    """The model at the plan's micro-batch, with the weights that the plan trains apart.

    Raises:
        PlanError: the plan is for another model.
        ModelError: the file is fixed at another batch, and the plan does not say what changes.
    """
    if not all(model.takes(spec.name, spec.shape) for spec in plan.model.inputs):
        if plan.model.exported_batch in (0, plan.micro_batches.size):
            require_same(plan, model)
            raise ModelError(
                f"the model is not exported at the plan's micro-batch of {plan.micro_batches.size}",
                where=plan.model.name,
                hint="write it at that batch: `shardplan models rebatch MODEL --batch N -o FILE`",
            )
        model = model.at_batch(plan.model.batch_constants, plan.model.identities, plan.model.exported_batch)
    shapes = {p.name: p.shape for block in plan.block_table for p in block.parameters}
    model = model.apart(plan.model.separated, shapes)
    require_model(plan, model)
    return with_known_shapes(plan, model.with_ties(plan.turned_copies))
