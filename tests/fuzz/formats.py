"""What is mutated and what is done with it: by format, the inputs to begin with and the commands that read them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.plans import dumps
from tests.fuzz import others, readers
from tests.fuzz.models import DATA, DATA_FILE, models, standard_models
from tests.fuzz.protos import mutate_message
from tests.fuzz.texts import mutate_json, mutate_text
from tests.plans.sample import decision, language_model, make_plan
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper

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
Trial = Line | Callable[[], object]
"""A command line, or a function that reads the file."""
Make = Callable[[Path, random.Random], list[Trial]]


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        holds: what its files hold, as the parameters of the command line that read them say.
        suffix: of its files.
        make: writes a mutated file: gets its path and the random numbers to use, and says which command lines read it.
        share: how many inputs are of it, in proportion to the others.
        entries: names of what reads it, as registries of readers have them.
    """

    holds: str
    suffix: str
    make: Make
    share: int
    entries: tuple[str, ...] = ()


def _onnx(pool: Callable[[], tuple[object, ...]]) -> Callable[[Path, random.Random], list[Line]]:
    def make(path: Path, rng: random.Random) -> list[Trial]:
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
        lines: list[Trial] = [("profile", str(path), "-d", "t4-16gb", *dims)]
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


def _plan(path: Path, rng: random.Random) -> list[Trial]:
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


def _configuration(path: Path, rng: random.Random) -> list[Trial]:
    text = rng.choice(configuration_texts())
    path.write_text(mutate_json(text, rng), encoding="utf-8", errors="surrogatepass")
    model = path.parent / "toy.onnx"
    model.write_bytes(models()[0].SerializeToString())
    batch = rng.choice(((), ("-b", "4")))
    return [("predict", str(model), "-H", "v100-pcie-4", "--config", str(path), *batch, "--dim", "batch=1")]


def _partition_plan(path: Path, rng: random.Random) -> list[Trial]:
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
        return planner.published.dump_partition(planner.partition(file, time_limit=2.0))


@functools.cache
def profile_texts() -> tuple[str, ...]:
    """A cluster with all that can stand in one, and bundled profiles."""
    from planner.hardware.document import profile_folder

    bundled = ("fpga-pool.yaml", "p4d.24xlarge.yaml", "devices/t4-16gb.yaml")
    return (PROFILE, PROFILE, *((profile_folder() / name).read_text(encoding="utf-8") for name in bundled))


def _hardware(path: Path, rng: random.Random) -> list[Trial]:
    path.write_text(mutate_text(rng.choice(profile_texts()), rng), encoding="utf-8", errors="surrogatepass")
    lines: list[Trial] = [("hardware", "lint", str(path))]
    lines.append(("hardware", "show", str(path), *rng.choice(((), ("--resolved",), ("--format", "json")))))
    if rng.random() < 0.1:
        model = path.parent / "toy.onnx"
        model.write_bytes(models()[0].SerializeToString())
        lines.append(("plan", str(model), "-H", str(path), "-b", "4", "--dim", "batch=1"))
    return lines


def _instance(path: Path, rng: random.Random) -> list[Trial]:
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


def _beside(folder: Path) -> None:
    """Write the valid files that command lines name."""
    (folder / readers.MODEL).write_bytes(models()[0].SerializeToString())
    (folder / readers.PLAN).write_text(plan_texts()[2], encoding="utf-8")
    (folder / readers.RUNS).write_text(others.RUNS, encoding="utf-8")
    (folder / readers.MACHINE).write_text(others.nccl_text(), encoding="utf-8")


def _read(holds: str, write: Callable[[Path, random.Random], None], first: str = "", **values: str) -> Make:
    """A format whose files go to any parameter of the command line that reads what they hold."""

    def make(path: Path, rng: random.Random) -> list[Trial]:
        _beside(path.parent)
        write(path, rng)
        line = readers.line_of(rng.choice(readers.fuzzed(holds)), path, first)
        return [line]

    return make


def _called(write: Callable[[Path, random.Random], None], call: Callable[[Path], object]) -> Make:
    """A format whose files are read by a function."""

    def make(path: Path, rng: random.Random) -> list[Trial]:
        write(path, rng)
        return [functools.partial(call, path)]

    return make


def _and_any(holds: str, own: Make) -> Make:
    """A format with command lines of its own, and one of any parameter that reads what its files hold."""

    def make(path: Path, rng: random.Random) -> list[Trial]:
        lines = own(path, rng)
        _beside(path.parent)
        if rng.random() < ANY_READER:
            lines.append(readers.line_of(rng.choice(readers.fuzzed(holds)), path))
        return lines

    return make


ANY_READER = 0.2
"""Share of the files of a format with command lines of its own that any other reader gets, too."""


def _arrays(path: Path) -> object:
    from planner import UsageError
    from planner.foreign_files import Door

    return Door(str(path), UsageError, "write it by numpy.savez").arrays(path)


def _measurements(path: Path, rng: random.Random) -> None:
    from planner.costs.measured import CACHE_VERSION

    head = {"version": CACHE_VERSION, "machine": "m", "software": "s", "precision": "fp32"}
    text = json.dumps({**head, "seconds": {"a": [0.1, 0.2], "b": [0.1, None]}})
    path.write_text(others.json_text(text, rng), encoding="utf-8", errors="surrogatepass")


def _kept(path: Path) -> object:
    """The measurements that the cache finds in a file."""
    from types import SimpleNamespace

    from planner.costs.measured import _Store

    runner: Any = SimpleNamespace(machine="m", software="s", precision="fp32")
    kept = _Store(path.parent, runner)
    path.rename(kept.path)
    return _Store(path.parent, runner).seconds


def _texts(*texts: str) -> Callable[[], tuple[str, ...]]:
    return lambda: texts


def _of(holds: str, texts: Callable[[], tuple[str, ...]], change: others.Mutate, first: str = "") -> Make:
    return _read(holds, others.mutated(texts, change), first)


FORMATS: dict[str, Format] = {
    "onnx": Format("model", ".onnx", _and_any("model", _onnx(models)), 500, ("onnx",)),
    "plan": Format("plan", ".plan.json", _and_any("plan", _plan), 220),
    "configuration": Format("configuration", ".json", _and_any("configuration", _configuration), 60),
    "partition-plan": Format("plan", ".partition.json", _partition_plan, 60),
    "hardware": Format("hardware", ".yaml", _and_any("hardware", _hardware), 120),
    "instance": Format("model", ".json", _instance, 100, ("operator-graph", "piper", "pipedream")),
    "hugging-face": Format(
        "model", ".json", _of("model", others.hugging_face_texts, others.json_text), 60, ("hugging_face",)
    ),
    "costs": Format("costs", ".json", _of("costs", others.cost_texts, others.json_text), 60),
    "deepspeed": Format(
        "framework", ".json", _of("framework", others.deepspeed_texts, others.json_text, "deepspeed"), 40,
        ("deepspeed",),
    ),
    "torchtitan": Format(
        "framework", ".toml", _of("framework", _texts(others.TITAN), others.plain_text, "torchtitan"), 40,
        ("torchtitan",),
    ),
    "megatron": Format(
        "framework", ".txt", _of("framework", _texts(others.MEGATRON, others.SCRIPT), others.plain_text, "megatron"),
        40, ("megatron",),
    ),
    "orders-csv": Format("orders", ".csv", _of("orders", _texts(*others.ORDERS), others.plain_text), 40),
    "orders-json": Format("orders", ".json", _of("orders", others.orders_texts, others.json_text), 40),
    "runs": Format("runs", ".csv", _of("runs", _texts(others.RUNS), others.plain_text), 20),
    "rules": Format("rules", ".yaml", _of("rules", _texts(others.RULES), others.plain_text), 10),
    "stack": Format("stack", ".yaml", _of("stack", others.stack_texts, others.plain_text), 60),
    "nccl": Format("machine", ".txt", _of("machine", _texts(others.nccl_text()), others.plain_text), 20, ("nccl",)),
    "topology": Format(
        "machine", ".txt", _of("machine", _texts(others.topology_text()), others.plain_text), 20, ("topology",)
    ),
    "calculon": Format(
        "machine", ".json", _of("machine", _texts(json.dumps(others.CALCULON)), others.json_text), 20, ("calculon",)
    ),
    "astra": Format("machine", ".yaml", _of("machine", _texts(others.ASTRA), others.plain_text), 20, ("astra",)),
    "astra-json": Format(
        "machine", ".json", _of("machine", _texts(json.dumps(others.OLD_ASTRA)), others.json_text), 10, ("astra",)
    ),
    "store": Format("store", ".sqlite", _read("store", others.store), 20),
    "data": Format("data", ".npz", _called(others.arrays, _arrays), 30),
    "measurements": Format("measurements", ".json", _called(_measurements, _kept), 20),
}  # fmt: skip
"""Formats by name."""

SLOW_FORMATS: dict[str, Format] = {"operators": Format("model", ".onnx", _onnx(standard_models), 400, ("onnx",))}
"""Formats whose inputs take long to collect."""
