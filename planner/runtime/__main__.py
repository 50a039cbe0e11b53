"""One rank of a plan on a cluster: `torchrun --nproc-per-node 8 -m planner.runtime PLAN MODEL --steps 100`."""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist

from planner.errors import ShardplanError
from planner.plans import read
from planner.runtime.data import data_by_name
from planner.runtime.model_file import read_model
from planner.runtime.trainer import load, model_of


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchrun ... -m planner.runtime", description=__doc__)
    parser.add_argument("plan", help="the plan file")
    parser.add_argument("model", help="its ONNX file")
    parser.add_argument("--steps", type=int, default=1, help="iterations to train for [1]")
    parser.add_argument("--data", default="synthetic", help="synthetic, or an .npz file of inputs by name [synthetic]")
    parser.add_argument("--loss", default="auto", help="auto, graph, next-token, labels or squares [auto]")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="of the optimizer [0.01]")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "float64"], help="of all float work [float32]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights without data, synthetic data, dropout [0]")
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"],
        help="where to compute; auto: the GPU numbered LOCAL_RANK, on a machine without GPUs its processor [auto]",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="auto", choices=["auto", "gloo", "nccl"],
        help="exchanges; auto: NCCL where each process has a GPU of its own, else gloo [auto]",
    )  # fmt: skip
    parser.add_argument(
        "--interface", default="", metavar="NAME",
        help="network interface on which exchanges listen, without authentication; needed on several machines "
        "[the loopback]",
    )  # fmt: skip
    parser.add_argument("--load", default="", help="go on from this checkpoint, also of another plan")
    parser.add_argument("--save", default="", help="write a checkpoint here at the end")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train; the first rank prints the losses. Returns the exit code."""
    given = _arguments(argv)
    dtype: torch.dtype = getattr(torch, given.dtype)
    try:
        plan = read(given.plan)
        model = model_of(plan, read_model(given.model, seed=given.seed))
        trainer = load(
            plan, model, learning_rate=given.learning_rate, loss=given.loss, dtype=dtype, seed=given.seed,
            times=given.steps if plan.schedule.continuous else 1, device=given.device, backend=given.backend,
            interface=given.interface,
        )  # fmt: skip
        if given.load:
            trainer.load(given.load)
        feed = data_by_name(given.data, plan, model, dtype, given.seed)
        done = 0
        while done < given.steps:
            for loss in trainer.steps(feed):
                done += 1
                if trainer.rank == 0:
                    sys.stdout.write(f"step {done}: loss {loss:.6g}\n")
        if given.save:
            trainer.save(given.save)
    except ShardplanError as error:
        sys.stderr.write(f"rank {dist.get_rank() if dist.is_initialized() else '?'}: {error}\n")
        return error.exit_code
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch's process groups may still run, and an interpreter that ends then aborts
