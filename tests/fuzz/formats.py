"""What is mutated and what is done with it: by format, the inputs to begin with and the commands that read them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.plans import dumps
from tests.fuzz.models import DATA, DATA_FILE, models, standard_models
from tests.fuzz.protos import mutate_message
from tests.fuzz.texts import mutate_json, mutate_text
from tests.partition.instances import PIPEDREAM, operator_graph, piper
from tests.plans.sample import decision, language_model, make_plan

PROFILE = """\
cluster: lab
about: two nodes
devices:
  - {type: big, count: 1}
  - {type: t4-16gb, count: 1}
device_types:
  big:
    memory: {value: 80 GB, source: vendor}
    reserve: 2 GB
    memory_bandwidth: 2 TB/s
    matrix: {bf16: 300 TFLOP/s, fp32: 20 TFLOP/s}
    vector: 20 TFLOP/s
    matrix_efficiency: {points: {1 GFLOP: 40%, 100 GFLOP: 80%}, source: lab notes}
    memory_efficiency: {points: {1 MB: 50%}, note: guess}
    launch: 5 us
    handover: 1 us
    price: 3.5 $/h
node:
  - level: nvlink
    size: 2
    port: {value: 100 GB/s, direction: bidirectional, count: 2}
    device_ports: 2
    peer: {value: 50 GB/s, direction: per-direction}
    latency: 3 us
    efficiency: 80%
    measured:
      all_reduce: [{ranks: 2, latency: 10 us, bandwidth: 40 GB/s}]
network:
  - level: switch
    size: 2
    port: {value: 100 Gbit/s, direction: per-direction}
    latency: 5 us
    efficiency: 0.9
  - level: core
    port: {value: 100 Gbit/s, direction: per-direction}
    torus: 2
    latency: {value: 5 us, verified: false}
    efficiency: 0.9
nodes: 2
max_nodes: 64
node_price: 10 $/h
sources: {lab notes: measured in the lab}
"""

Line = tuple[str, ...]


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        suffix: of its files.
        make: writes a mutated file: gets its path and the random numbers to use, and says which command lines read it.
        share: how many of a thousand inputs are of it.
    """

    suffix: str
    make: Callable[[Path, random.Random], list[Line]]
    share: int


def _onnx(pool: Callable[[], tuple[object, ...]]) -> Callable[[Path, random.Random], list[Line]]:
    def make(path: Path, rng: random.Random) -> list[Line]:
        seed = rng.choice(pool())
        changed = type(seed)()
        changed.CopyFrom(seed)  # type: ignore[attr-defined]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate_message(changed, rng)  # type: ignore[arg-type]
        data = changed.SerializeToString()  # type: ignore[attr-defined]
        if rng.random() < 0.04:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice((b"", rng.randbytes(1), rng.randbytes(9))) + data[at + 1 :]
        path.write_bytes(data)
        (path.parent / DATA_FILE).write_bytes(DATA)
        dims = ("--dim", "batch=2") if b"\x12\x05batch" in data else ()
        lines: list[Line] = [("profile", str(path), "-d", "t4-16gb", *dims)]
        if rng.random() < 0.15:
            lines.append(("plan", str(path), "-H", "v100-pcie-4", "-b", "4", *dims))
        return lines

    return make


@functools.cache
def plan_texts() -> tuple[str, ...]:
    """Plans of a pipeline, of one with copies, of a schedule with chunks, and of groups of ranks."""
    toy = [
        make_plan(language_model(2), decision((1, 1), (0, 2), 4, micro_batches=4)),
        make_plan(chosen=decision((2, 1), (0, 3), copies=2, micro_batches=4)),
    ]
    return tuple(dumps(plan) for plan in (*toy, *_searched_plans()))


def _searched_plans() -> list[object]:
    import planner

    graph = planner.graph_from_proto(models()[0], name="toy", dims={"batch": 1})
    cluster = planner.load_cluster("v100-pcie-4")
    job = planner.Job(4, tensor_parallel=(2,))
    return [
        planner.plan(graph, cluster, job),
        planner.plan(graph, cluster, planner.Job(4, schedules=("zb-h1",), tensor_parallel=(1,), zero=(0,))),
        planner.plan_system("pipedream-2bw", graph, cluster, planner.Job(8)),
    ]


def _plan(path: Path, rng: random.Random) -> list[Line]:
    text = rng.choice(plan_texts())
    path.write_text(mutate_json(text, rng), encoding="utf-8", errors="surrogatepass")
    file, form = str(path), rng.choice(("text", "json"))
    whole = path.parent / "whole.plan.json"
    whole.write_text(text, encoding="utf-8")
    return [
        ("check", file),
        rng.choice((("explain", file, "--format", form), ("diff", str(whole), file, "--format", form))),
        rng.choice((("simulate", file, "--format", form), ("simulate", file, "--svg", str(path.parent / "a.svg")),
                    ("simulate", file, "--overlap", "--trace", str(path.parent / "a.json")))),
    ]  # fmt: skip


def configuration_texts() -> tuple[str, ...]:
    """A configuration in full with everything said, and one by its degrees."""
    from planner import Configuration, Degrees
    from planner.plans import dump_configuration
    from planner.play import Transfers
    from planner.space import StageChoice

    stages = (StageChoice(0, 1, 1, recompute=True), StageChoice(1, 2, 1))
    full = Configuration(
        stages, 2, 1, 2, "1f1b", 1, adjacent=True, devices=(0, 1, 2, 3), whole_stages=True,
        transfers=Transfers.OVERLAPPED,
    )  # fmt: skip
    return dump_configuration(full), dump_configuration(Degrees(2, 2, 1, starts=(1,), zero=1, recompute=True))


def _configuration(path: Path, rng: random.Random) -> list[Line]:
    text = rng.choice(configuration_texts())
    path.write_text(mutate_json(text, rng), encoding="utf-8", errors="surrogatepass")
    model = path.parent / "toy.onnx"
    model.write_bytes(models()[0].SerializeToString())
    batch = rng.choice(((), ("-b", "4")))
    return [("predict", str(model), "-H", "v100-pcie-4", "--config", str(path), *batch, "--dim", "batch=1")]


def _partition_plan(path: Path, rng: random.Random) -> list[Line]:
    instance = path.parent / "whole.json"
    instance.write_text(json.dumps(operator_graph()))
    path.write_text(mutate_json(_partition_text(), rng), encoding="utf-8", errors="surrogatepass")
    return [("check", str(path), "--model", str(instance)), ("explain", str(path)), ("diff", str(path), str(path))]


@functools.cache
def _partition_text() -> str:
    import tempfile

    import planner

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.json"
        file.write_text(json.dumps(operator_graph()))
        return planner.partitions.dump_partition(planner.partition(file, time_limit=2.0))


@functools.cache
def profile_texts() -> tuple[str, ...]:
    """A cluster with all that can stand in one, and bundled profiles."""
    from planner.hardware.document import profile_folder

    bundled = ("fpga-pool.yaml", "p4d.24xlarge.yaml", "devices/t4-16gb.yaml")
    return (PROFILE, PROFILE, *((profile_folder() / name).read_text(encoding="utf-8") for name in bundled))


def _hardware(path: Path, rng: random.Random) -> list[Line]:
    path.write_text(mutate_text(rng.choice(profile_texts()), rng), encoding="utf-8", errors="surrogatepass")
    lines: list[Line] = [("hardware", "lint", str(path))]
    lines.append(("hardware", "show", str(path), *rng.choice(((), ("--resolved",), ("--format", "json")))))
    if rng.random() < 0.1:
        model = path.parent / "toy.onnx"
        model.write_bytes(models()[0].SerializeToString())
        lines.append(("plan", str(model), "-H", str(path), "-b", "4", "--dim", "batch=1"))
    return lines


def _instance(path: Path, rng: random.Random) -> list[Line]:
    kind = rng.randrange(3)
    limit = ("--time-limit", "0.1s")
    if kind == 0:
        path.write_text(mutate_json(json.dumps(operator_graph()), rng), encoding="utf-8", errors="surrogatepass")
        return [("plan", str(path), *limit, *rng.choice(((), ("--non-contiguous",), ("--objective", "latency"))))]
    if kind == 1:
        path.write_text(mutate_json(json.dumps(piper()), rng), encoding="utf-8", errors="surrogatepass")
        return [("plan", str(path), *limit, *rng.choice(((), ("--objective", "iteration-time"))))]
    path.write_text(mutate_text(PIPEDREAM, rng), encoding="utf-8", errors="surrogatepass")
    machines = ("--machines", "2x2", "--bandwidth", "10GB/s,1GB/s", *limit)
    return [rng.choice((
        ("plan", str(path), *machines), ("plan", str(path), *machines, "--objective", "iteration-time"),
        ("profile", str(path)), ("plan", str(path), "-H", "v100-pcie-4", "-b", "4"),
    ))]  # fmt: skip


FORMATS: dict[str, Format] = {
    "onnx": Format(".onnx", _onnx(models), 500),
    "plan": Format(".plan.json", _plan, 220),
    "configuration": Format(".json", _configuration, 60),
    "partition-plan": Format(".partition.json", _partition_plan, 60),
    "hardware": Format(".yaml", _hardware, 120),
    "instance": Format(".json", _instance, 100),
}
"""Formats by name."""

SLOW_FORMATS: dict[str, Format] = {"operators": Format(".onnx", _onnx(standard_models), 400)}
"""Formats whose inputs take long to collect."""
