"""Published headline figures beside this planner's: `python -m benchmarks.headlines FOLDER` prints a Markdown table.

FOLDER holds PipeDream's published profiles (`alexnet.graph.txt`, `vgg16.graph.txt`, `gnmt.graph.txt`, `resnet50.graph.txt`).
Every figure of ours comes from a public function of the package; nothing is fitted. Where a publication leaves a part of
its configuration open, the last column says what was assumed, and the error is stated as it is, also where it is large.
Figures marked (recalled) were not checked against the publication's text.
"""  # noqa: E501

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks import headlines_recorded
from benchmarks.headlines_recorded import RECORDED, Headline
from planner import formulas
from planner.api import load_graph as load_bundled
from planner.costs import profile
from planner.hardware import Collective, collective_s, load_cluster, load_device
from planner.importers import load_graph
from planner.play import measure_schedule
from planner.published.problems import LayerDag, recorded_layers

GIB = 2**30


def _layers(folder: Path, name: str) -> LayerDag:
    return recorded_layers(load_graph(folder / f"{name}.graph.txt"))


def cost_models(folder: Path) -> Iterator[Headline]:
    """PipeDream's speed-up by its published stage costs alone: 15-1 on one level of 16 workers, 64 images a minibatch.

    The cut is the released configuration's: the three fully connected layers are the second stage.
    """
    layers = _layers(folder, "vgg16")
    cut = int((layers.weight_bytes > 1e8).argmax())
    compute, weights = layers.compute_s * 64 / RECORDED["vgg16"], layers.weight_bytes
    for cost, part, text in (
        ("published", 1.0, "the paper's stage cost"),
        ("released", 1.0, "the released stage cost"),
        ("released", 0.5, "the released stage cost with a ring's bytes"),
    ):

        def stage_s(start: int, stop: int, replicas: int, cost: str = cost, part: float = part) -> float:
            work, own = math.fsum(compute[start:stop]), math.fsum(weights[start:stop])
            return formulas.pipedream_stage_s(work, part * own, replicas, 1.25e9, cost)

        ours = stage_s(0, len(compute), 16) / max(stage_s(0, cut, 15), stage_s(cut, len(compute), 1))
        what = f"VGG-16, 16 V100, 10 Gb/s: 15-1 by {text} alone"
        yield Headline("PipeDream", what, 5.28, ours, "nothing is played; the line's whole 10 Gb/s")


def chimera() -> Iterator[Headline]:
    """Gain over 1F1B for BERT-48, D = 4 and four micro-batches: equal stages, B = 2F (3F with recomputation)."""
    for text, backward, published in (("", 2.0, 1021 / 767), (" with recomputation in 1F1B alone", 3.0, 1399 / 767)):
        plain = measure_schedule("1f1b", 4, 4, forward_s=1.0, backward_s=backward).iteration_s
        both = measure_schedule("chimera", 4, 4, forward_s=1.0, backward_s=2.0).iteration_s
        assumed = "equal stages, no transfers, no exchange; the reference is a prediction from a P100 profile"
        yield Headline("Chimera", f"BERT-48, D = 4, W = 8, b = 8: over 1F1B{text}", published, plain / both, assumed)


def chimera_seconds() -> Iterator[Headline]:
    """The same in milliseconds, from the model and the device profile: BERT-48, sequence 128, fp32 on P100."""
    priced = profile(load_bundled("bert-48"), load_device("p100-sxm2-16gb"), precision="fp32", micro_batch=8)
    forward, backward = (1e3 * float(each.sum()) / 4 for each in (priced.forward_s, priced.backward_s))
    for schedule, repeated, text, published in (
        ("1f1b", 0.0, "1F1B", 1021),
        ("1f1b", forward, "1F1B with recomputation", 1399),
        ("chimera", 0.0, "Chimera", 767),
    ):
        ours = measure_schedule(schedule, 4, 4, forward_s=forward, backward_s=backward + repeated).iteration_s
        assumed = (
            "four equal stages, priced; no transfers, no exchange; the reference is a prediction from a P100 profile"
        )
        yield Headline("Chimera", f"BERT-48, D = 4, W = 8, b = 8: {text}, ms", published, ours, assumed)


def gpipe() -> Iterator[Headline]:
    """Speed-up of K partitions over one for Transformer-48 and 32 micro-batches."""
    for stages, published in ((2, 1.8), (4, 3.4), (8, 6.3)):
        found = measure_schedule("gpipe", stages, 32, forward_s=1 / stages, backward_s=2 / stages).iteration_s
        yield Headline("GPipe", f"Transformer-48, M = 32, K = {stages}", published, 32 * 3 / found, "equal stages")
    two, eight = (measure_schedule("gpipe", k, 32, forward_s=1 / k, backward_s=2 / k).iteration_s for k in (2, 8))
    yield Headline("GPipe", "Transformer-24, P100 on PCIe, K = 8 over K = 2", 3.3, two / eight, "equal stages")


def exchanges() -> Iterator[Headline]:
    """Bounds and growth of exchanges."""
    gain = formulas.ring_all_reduce_s(1, 32, 1) / formulas.byteps_s(1, 32, 32, 1)
    yield Headline("BytePS", "VGG-16 over all-reduce, bound at k = n = 32", 2.0, gain, "all time is exchange")
    pods = [load_cluster("tpu-v3-pod", nodes=n) for n in (16, 256)]
    cases = (
        (2048 * 1024 * 2 * 2, "2,048 tokens of 1,024 a chip, top-2, bf16: start-up times count"),
        (1e9, "1 GB a chip"),
    )
    for payload, text in cases:
        small, large = (collective_s(pod, Collective.ALL_TO_ALL, range(pod.device_count), payload) for pod in pods)
        assumed = f"sqrt(D) claimed; 64 and 1,024 chips on a torus; {text}"
        yield Headline("GShard", "all-to-all time, 16 times the devices", 4.0, large / small, assumed)


def sizes() -> Iterator[Headline]:
    """Memory tables and parameters."""
    remembered = {
        (6, 4096): 8.4, (6, 6144): 18.6, (6, 8192): 33.0, (8, 4096): 11.4, (8, 8192): 45.3,
        (10, 4096): 14.4, (10, 6144): 32.1, (10, 8192): 57.0,
    }  # fmt: skip
    for (layers, hidden), published in remembered.items():
        weights = sum(4 * hidden * ((1024 if i == 0 else hidden) + hidden) for i in range(layers))
        text = f"RNN {layers}-{hidden // 1024}K, GiB (recalled)"
        yield Headline("Tofu", text, published, weights * 12 / GIB, "weight, gradient, history in fp32")
    found = formulas.gshard_expert_parameters(2048, 36, width=1024, hidden=8192)
    yield Headline("GShard", "parameters of MoE(2048E, 36L), billions", 600, found / 1e9, "expert weights alone")
    yield Headline("GShard", "core-years of 600B", 22.4, 2048 * 4 / 365, "2,048 cores for 4 days")
    for stage, published in enumerate((120.0, 31.4, 16.6, 1.9)):
        found_gb = formulas.zero_state_bytes(7.5e9, 64, stage) / 1e9
        yield Headline("ZeRO", f"7.5B on 64 devices, stage {stage}, GB", published, found_gb)


def rates() -> Iterator[Headline]:
    """Zero bubble's iteration times for F = B = W, and PipeMare's ideal gain."""
    for schedule, published in (("1f1b", 33), ("zb-h1", 27), ("zb-h2", 24)):
        found = measure_schedule(schedule, 4, 8, forward_s=1.0, backward_s=2.0, weight_grad_s=1.0).iteration_s
        yield Headline("Zero bubble", f"{schedule}, p = 4, m = 8, iteration in F", published, found)
    gain = 1 / (1 - formulas.gpipe_bubble(107, 32))
    yield Headline("PipeMare", "throughput over GPipe (recalled)", 4.3, gain, "P = 107, N = 32: a plausible origin")


def headlines(folder: Path) -> Iterator[Headline]:
    """All of them."""
    yield from headlines_recorded.pipedream(folder)
    yield from cost_models(folder)
    yield from headlines_recorded.bapipe(folder)
    yield from chimera()
    yield from chimera_seconds()
    yield from gpipe()
    yield from exchanges()
    yield from headlines_recorded.byteps(folder)
    yield from sizes()
    yield from rates()


def table(folder: Path) -> str:
    """Markdown."""
    lines = ["| system | figure | published | ours | error | assumed |", "|---|---|---|---|---|---|"]
    for h in headlines(folder):
        lines.append(f"| {h.system} | {h.what} | {h.published:.4g} | {h.ours:.4g} | {h.error:+.1%} | {h.assumed} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of PipeDream's profiles")
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
