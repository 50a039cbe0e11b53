"""Four trainings of one small GPT to a loss: `python -m tests.runtime.trainings` runs them and writes their table.

One process; two stages of two replicas; tensor parallel 2; and two stages of two replicas that go on as tensor parallel
2 from a checkpoint halfway. Weights, data and optimizer are the same, all in float64.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import planner
from planner import runtime
from tests.runtime import cases

STEPS, BATCH, LENGTH, WORDS = 200, 8, 8, 64
MODEL = "gpt, wide"
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "2 stages, 2 replicas": (4, {"pipeline": 2}),
    "tensor parallel 2": (2, {"tensor": 2}),
}
MOVED = ("2 stages, 2 replicas", "tensor parallel 2")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtime.md"
TABLE = re.compile(r"(<!-- generated: trainings -->\n).*?(<!-- end -->)", re.DOTALL)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Sequences that count up by a step of their own: what comes next can be learnt."""
    drawn = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (BATCH, 1), generator=drawn)
    stride = torch.randint(1, 6, (BATCH, 1), generator=drawn)
    return {"input_ids": (start + stride * torch.arange(LENGTH)) % WORDS}


def _optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(weights), lr=2e-3)


def trained(name: str, steps: range, *, load: Path | None = None, save: Path | None = None) -> list[float]:
    """Losses of some steps under a plan."""
    ranks, degrees = PLANS[name]
    plan = cases.plan(cases.Case("", MODEL, ranks, degrees, BATCH))
    model = runtime.read_model(cases.model(MODEL))

    def body(rank: int, link: Any) -> list[float]:
        trainer = runtime.Trainer(plan, model, rank, dtype=torch.float64, optimizer=_optimizer, report=link.at)
        if load is not None:
            trainer.load(load)
        losses = [trainer.step(batch(step)) for step in steps]
        if save is not None:
            trainer.save(save)
        return losses

    found: list[list[float]] = runtime.run_ranks(plan, body)
    return found[0]


def curves(steps: int, told: Callable[[str, float], None] = lambda name, seconds: None) -> dict[str, list[float]]:
    """The losses of all four trainings."""
    found = {}
    for name in PLANS:
        begin = time.perf_counter()
        found[name] = trained(name, range(steps))
        told(name, time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "halfway"
        before = trained(MOVED[0], range(steps // 2), save=path)
        found[", then ".join(MOVED)] = before + trained(MOVED[1], range(steps // 2, steps), load=path)
    return found


def apart(found: dict[str, list[float]]) -> float:
    """The largest difference of any loss from that of one process, as part of it."""
    first = found["one process"]
    return max(abs(a - b) / b for losses in found.values() for a, b in zip(losses, first, strict=True))


def table(found: dict[str, list[float]]) -> str:
    """Losses at some steps, and how far each training is from one process at the most."""
    shown = [0, *(len(found["one process"]) * part // 4 - 1 for part in (1, 2, 3, 4))]
    lines = [f"| training | {' | '.join(f'step {at + 1}' for at in shown)} | largest difference |", "|---" * 7 + "|"]
    for name, losses in found.items():
        largest = apart({"one process": found["one process"], name: losses})
        lines.append(f"| {name} | {' | '.join(f'{losses[at]:.6f}' for at in shown)} | {largest:.0e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train and write the table."""
    found = curves(STEPS, lambda name, seconds: print(f"{name}: {seconds:.1f} s"))  # noqa: T201
    if apart(found) > 1e-6:
        raise planner.RunError(f"losses differ by {apart(found):.1e}")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda m: m[1] + table(found) + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
