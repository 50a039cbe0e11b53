"""Megatron-LM's hand-tuned configurations beside the plans of a search: `python -m benchmarks.hand_tuned FOLDER`.

FOLDER holds `published_runs.json`; its rows of Narayanan et al., SC 2021, are built as they ran (layers dealt evenly,
tensor parallelism by columns and rows with whole norms and sums, everything recomputed, interleaved where so stated)
and given to the judge and the simulator. The same job is then planned freely on the same machine, and with freedoms
given back one by one. Nothing is fitted to these rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import planner
from benchmarks.published import NOT_SPLIT, markdown
from benchmarks.runs import PUBLISHED
from planner import Cluster, Graph, Job, Plan
from planner.costs import optimizer_state_bytes, precision
from planner.graph import Chain, layer_of
from planner.importers import graph_from_proto
from planner.play import StageTimes, run
from planner.schedules import Pipeline, compile_orders, get
from planner.sharding import Setting
from planner.sharding.inner import NodePrices, inner_costs
from planner.sharding.mesh import mesh_on
from planner.sharding.resting import BoundaryLayout, StateBytes
from planner.sharding.sharded import sharded_costs
from planner.space import BlockCosts, Configuration, Evaluation, StageChoice, evaluate, played_s
from planner.space.blocks import update_s_per_element
from planner.space.pricer import Pricer
from planner.space.sharded import sharded_block_costs
from planner.sums import float_sum

SOURCE = "Narayanan et al., SC 2021"


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration as the paper states it.

    Attributes:
        key: row of the file.
        table: of the paper.
        name: of the model.
        size: its sizes, by key of a GPT-2's configuration.
        global_batch, micro_batch: samples.
        tensor, pipeline, data: ways of parallelism.
        chunks: stages a device in turn; 0 where it was interleaved and the paper does not print how often.
        measured_s: seconds of an iteration.
    """

    key: str
    table: str
    name: str
    size: Mapping[str, int]
    global_batch: int
    micro_batch: int
    tensor: int
    pipeline: int
    data: int
    chunks: int
    measured_s: float

    @property
    def devices(self) -> int:
        """Devices at work."""
        return self.tensor * self.pipeline * self.data

    @property
    def shape(self) -> str:
        """The configuration in a few words."""
        return f"{self.tensor} x {self.pipeline} x {self.data}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Priced:
    """A configuration by our model: closed form (without interleaving), simulated seconds, chunks, fullest device."""

    closed_form_s: float
    simulated_s: float
    chunks: int
    memory_bytes: float


def read_rows(folder: Path) -> list[Row]:
    """The paper's rows with tensor, pipeline and data parallelism and no ZeRO."""
    rows = json.loads((folder / PUBLISHED).read_text())["rows"]
    found = [r for r in rows if r["source"]["ref"].startswith(SOURCE) and r["kind"] == "e2e"]
    return [_row(r) for r in found if (r["parallel"]["zero_stage"] or 0) == 0 and r["derived"].get("iter_time_s")]


_KEYS = {
    "n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "vocab_size": "vocab", "n_positions": "seq",
    "n_inner": "ffn",
}  # fmt: skip


def _row(row: dict[str, Any]) -> Row:
    model, batch, parallel = row["model"], row["batch"], row["parallel"]
    size = {key: int(model[ours]) for key, ours in _KEYS.items()}
    ways = (parallel["tp"], parallel["pp"], parallel["dp"], parallel["vpp"] or 0)
    batches = (batch["global_"], int(batch["micro"]))
    table = row["source"]["table"]
    return Row(row["id"], table, model["name"], size, *batches, *ways, row["derived"]["iter_time_s"])


def machine(row: Row) -> Cluster:
    """As many DGX A100 as the row used."""
    return planner.load_cluster("dgx-a100", nodes=row.devices // 8)


def job(row: Row) -> Job:
    """The row's job: mixed precision and Adam, attention written out, dropout."""
    return Job(
        row.global_batch,
        precision="fp16",
        optimizer="adam",
        fused_attention=False,
        assume_dropout=True,
        backends=("any",),
    )


def graph(row: Row) -> Graph:
    """The row's model."""
    size = models.size_of(model_type="gpt2", **row.size)
    return graph_from_proto(models.build_custom(size, batch=1, seq=row.size["n_positions"]), name=row.name)


def megatron_costs(
    chain: Chain, graph: Graph, prices: NodePrices, cluster: Cluster, what: Job, ranks: int
) -> BlockCosts:
    """The chain on one axis of ranks: whole tensors between blocks, whole norms and sums, otherwise fastest.

    Args:
        chain: blocks of a GPT.
        graph: the GPT at its micro-batch.
        prices: what its operators cost.
        cluster: where the ranks are.
        what: number formats, optimizer, global batch.
        ranks: that share every operator; their costs have number 1.
    """
    chosen = precision(what.precision)
    state = optimizer_state_bytes(what.optimizer, chosen)
    setting = Setting(
        graph,
        mesh_on(cluster, {"tensor": ranks}),
        item_bytes=chosen.compute.bits / 8,
        state=StateBytes(chosen.weight_bytes, chosen.gradient_bytes, state),
        micro_batches=max(1, what.global_batch // prices.micro_batch),
        forbidden=NOT_SPLIT,
    )
    inner = inner_costs(chain, prices, setting, boundaries=(BoundaryLayout.REPLICATED,))
    # All weights are cut, that of the embedding too, though looking words up in a whole table would be faster.
    fastest = min(sharded_costs(inner), key=lambda c: (c.parameter_elements.sum(), c.totals))
    return sharded_block_costs(inner, fastest, update_s_per_element(cluster.devices[0], chosen, what.optimizer, 0.0), 1)


def hand_tuned(row: Row) -> Priced:
    """The paper's configuration by our model; where the paper does not say how often it interleaves, the fastest."""
    cluster, what = machine(row), job(row)
    pricer = Pricer(graph(row), cluster, what)
    costs = megatron_costs(
        pricer.chain, pricer.graph_at(row.micro_batch), pricer.profiles(row.micro_batch)[0], cluster, what, row.tensor
    )
    plain, verdict = _judged(row, pricer, costs, cluster, what, 1)
    simulated_s, chunks = played_s(plain, verdict), 1
    layers = row.size["n_layer"] // row.pipeline
    for each in range(2, layers + 1):
        if layers % each == 0 and row.chunks in (0, each):
            seconds = _interleaved_s(row, pricer, costs, what, each)
            if row.chunks == each or seconds < simulated_s:
                simulated_s, chunks = seconds, each
    memory = max(t.memory.total for t in verdict.stages)
    return Priced(verdict.iteration_s, simulated_s, chunks, memory)


def _judged(
    row: Row, pricer: Pricer, costs: BlockCosts, cluster: Cluster, what: Job, chunks: int
) -> tuple[Configuration, Evaluation]:
    """Equal numbers of layers a stage, on as many devices as there are stages."""
    blocks, count = pricer.chain.blocks, row.pipeline * chunks
    heads = {layer_of(pricer.chain.graph.nodes[b.nodes[0]].module): i for i, b in reversed([*enumerate(blocks)])}
    each = row.size["n_layer"] // count
    bounds = [0, *(heads[f"transformer.h.{k * each}"] for k in range(1, count)), len(blocks)]
    stages = tuple(
        StageChoice(bounds[k], bounds[k + 1], row.data, recompute=True, ranks=row.tensor, sharding=costs.sharding)
        for k in range(count)
    )
    decision = Configuration(stages, 1, row.micro_batch, row.global_batch // row.micro_batch, "1f1b")
    verdict = evaluate({costs.sharding: costs}, cluster, dataclasses.replace(what, zero=(0,)), decision)
    if verdict.violations and chunks == 1:
        raise ValueError(f"{row.key}: {verdict.violations[0].message}")
    return decision, verdict


def _interleaved_s(row: Row, pricer: Pricer, costs: BlockCosts, what: Job, chunks: int) -> float:
    """Simulated seconds with several chunks of layers a device in turn.

    The judge prices each chunk on devices of its own, which are as far apart as the real ones; then they share.
    """
    cluster = planner.load_cluster("dgx-a100", nodes=row.devices * chunks // 8)
    decision, verdict = _judged(row, pricer, costs, cluster, what, chunks)
    terms = verdict.stages
    times = StageTimes.of(
        [t.forward_s for t in terms],
        [t.backward_s for t in terms],
        [t.receive_s for t in terms],
        [t.exposed_sync_s for t in terms],
        [t.update_s for t in terms],
        return_s=[t.return_s for t in terms],
    )
    # The replicas of a stage work alike, each on its own part of the micro-batches.
    pipeline = Pipeline((1,) * len(terms), decision.micro_batches // row.data)
    return run(compile_orders(get(f"interleaved:chunks={chunks}").order(pipeline)), times).makespan_s


def freedoms(row: Row) -> list[tuple[str, Job]]:
    """The job with the row's own choices, these given back one after the other."""
    bound = dataclasses.replace(
        job(row),
        tensor_parallel=(row.tensor,),
        pipeline_stages=(row.pipeline,),
        data_parallel=(row.data,),
        micro_batches=(row.micro_batch,),
        zero=(0,),
        recompute="always",
        schedules=("1f1b",),
    )
    ways: dict[str, Any] = {
        "tensor_parallel": (),
        "pipeline_stages": (),
        "data_parallel": (),
        "micro_batches": (),
        "schedules": job(row).schedules,
    }
    shaped = dataclasses.replace(bound, **ways)
    sharded = dataclasses.replace(shaped, zero=job(row).zero)
    return [
        ("same ways", bound),
        ("+ ways, micro-batch", shaped),
        ("+ ZeRO-1", sharded),
        ("+ recompute or not, equal replicas", dataclasses.replace(job(row), uniform=True)),
        ("+ replicas as each stage needs", job(row)),
    ]


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    ranks = sorted({stage.group_ranks for stage in plan.stages})
    replicas = sorted({len(stage.replicas) for stage in plan.stages})
    again, zero = sum(stage.recompute for stage in plan.stages), max(stage.zero for stage in plan.stages)
    lie = sorted({b for sharding in plan.shardings for b in sharding.boundaries})
    words = [
        f"{span(ranks)} x {len(plan.stages)} x {span(replicas)}, micro-batch {plan.micro_batches.size}",
        plan.schedule.name if len(plan.stages) > 1 else "",
        "/".join(lie),
        f"ZeRO-{zero}" if zero else "",
        f"recompute {again} of {len(plan.stages)}" if again else "no recompute",
    ]
    return ", ".join(word for word in words if word)


def span(numbers: Sequence[int]) -> str:
    """Ascending numbers in short."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def report(rows: Sequence[Row], *, ladder: bool) -> str:
    """Both tables in Markdown."""
    main, steps, ratios = [], [], []
    for row in rows:
        priced, what = hand_tuned(row), freedoms(row)
        plans = [_planned(row, each) for _, each in (what if ladder else what[-1:])]
        best, seconds = plans[-1]
        ratios.append(priced.simulated_s / row.measured_s)
        main.append(
            [row.key, row.table, row.name, str(row.devices), row.shape + _chunks(row, priced),
             f"{row.measured_s:.2f}", f"{priced.simulated_s:.2f}", f"{ratios[-1]:.2f}",
             f"{best.predictions.iteration_s:.2f}", f"{_seconds(best):.2f}",
             f"{priced.simulated_s / _seconds(best):.2f}", describe(best),
             f"{best.predictions.gap:.2%}", f"{seconds:.1f}"]
        )  # fmt: skip
        steps.append([row.key, f"{priced.simulated_s:.2f}", *(f"{_seconds(p):.2f}: {describe(p)}" for p, _ in plans)])
        print(" | ".join(main[-1]), file=sys.stderr, flush=True)
    error = float_sum(abs(r - 1) for r in ratios) / len(ratios)
    head = ["row", "table", "model", "devices", "hand-tuned", "measured s", "by our model s", "ratio",
            "ours, closed form s", "ours, simulated s", "faster by", "our plan", "gap", "CPU s"]  # fmt: skip
    parts = [markdown(head, main), f"Hand-tuned by our model against measured: mean error {error:.1%}."]
    if ladder:
        parts.append(markdown(["row", "hand-tuned s", *(name for name, _ in freedoms(rows[0]))], steps))
    return "\n\n".join(parts) + "\n"


def _planned(row: Row, what: Job) -> tuple[Plan, float]:
    begin = time.process_time()
    plan = planner.plan(graph(row), machine(row), what)
    return plan, time.process_time() - begin


def _seconds(plan: Plan) -> float:
    return plan.predictions.simulated_iteration_s or plan.predictions.iteration_s


def _chunks(row: Row, priced: Priced) -> str:
    if row.chunks == 1:
        return ""
    return f", {priced.chunks} chunks" + ("" if row.chunks else " (not printed)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Price, plan and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hand_tuned", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder of {PUBLISHED}")
    parser.add_argument("--row", action="append", help="only this row; repeatable")
    parser.add_argument("--ladder", action="store_true", help="give freedoms back one by one as well")
    given = parser.parse_args(arguments)
    rows = [row for row in read_rows(given.folder) if not given.row or row.key in given.row]
    sys.stdout.write(report(rows, ladder=given.ladder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
