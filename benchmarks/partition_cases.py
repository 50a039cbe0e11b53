"""What the partition benchmark runs: every published instance, and larger ones grown from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]
"""`table` it belongs to, `label`, `kind` of problem, what builds it, `limit_s`, and the peers' recorded figures."""

CONTIGUOUS_S = 60.0
SCATTERED_S = 60.0
LATENCY_S = 15.0
GROWTH_S = 60.0
SCATTERED_GROWTH_S = 30.0


def all_cases(folder: Path) -> list[Case]:
    """Every case, in the order of the tables.

    Args:
        folder: holds `peers.json` and the instances' folders.
    """
    peers = json.loads((folder / "peers.json").read_text())
    return [
        *_operator_graphs(folder, peers),
        *_latency(folder),
        *_piper(folder, peers),
        *_pipedream(folder, peers),
        *_iteration(),
        *_layerwise(),
        *_growth(folder),
    ]


def _operator_graphs(folder: Path, peers: Case) -> Iterator[Case]:
    files = sorted((folder / "operator_graphs").rglob("*.json"))
    for contiguous in (True, False):
        for path in files:
            name = f"{path.parent.name}/{path.stem}"
            yield {
                "table": "contiguous" if contiguous else "scattered",
                "label": _label(path),
                "kind": "max-load",
                "path": str(path),
                "contiguous": contiguous,
                "limit_s": CONTIGUOUS_S if contiguous else SCATTERED_S,
                "recorded": peers["operator_graphs"].get(name, {}),
            }


def _label(path: Path) -> str:
    """The file's name, with what its nodes are: some models come both ways."""
    return f"{path.stem} ({'operators' if path.parent.name == 'OperatorGraphs' else 'layers'})"


def _latency(folder: Path) -> Iterator[Case]:
    for path in sorted((folder / "operator_graphs").rglob("*inference.json")):
        yield {"table": "latency", "label": _label(path), "kind": "latency", "path": str(path), "limit_s": LATENCY_S}


def _piper(folder: Path, peers: Case) -> Iterator[Case]:
    path = folder / "piper" / "bert32a100.json"
    for row in peers["piper_bert32a100"] if path.exists() else ():
        yield {
            "table": "piper",
            "label": f"{row['bert']} layers, {row['k']} devices, {row['maxMem'] / 1e9:.3g} GB, batch {row['batch']}",
            "kind": "piper",
            "path": str(path),
            "layers": row["bert"],
            "devices": row["k"],
            "memory_bytes": row["maxMem"],
            "batch": row["batch"],
            "bandwidth_byte_per_s": row["bandwidth"],
            "limit_s": CONTIGUOUS_S,
            "recorded": row,
        }


def _pipedream(folder: Path, peers: Case) -> Iterator[Case]:
    for row in peers["pipedream"]:
        path = folder / "pipedream" / f"{row['profile']}.graph.txt"
        if not path.exists():
            continue
        machines = "x".join(map(str, row["n"]))
        rates = ", ".join(f"{rate / 1e9:.4g}" for rate in row["b"])
        words = [("no transfers", not row["comm"]), ("16 GB", row["mem"]), ("no replicas", row["straight"]),
                 ("may idle", row["fewer"])]  # fmt: skip
        label = ", ".join([f"{row['profile']}, {machines} at {rates} GB/s", *(word for word, on in words if on)])
        case = {
            "label": label,
            "path": str(path),
            "profile": row["profile"],
            "machines": row["n"],
            "bandwidth_byte_per_s": row["b"],
            "transfers": bool(row["comm"]),
            "memory_bytes": 16e9 if row["mem"] else None,
            "replicate": not row["straight"],
            "idle": bool(row["fewer"]),
            "limit_s": CONTIGUOUS_S,
            "recorded": row,
        }
        yield case | {"table": "pipedream" if len(row["n"]) == 1 else "hierarchical", "kind": "pipedream"}
        if len(row["n"]) > 1:
            yield case | {"table": "placed", "kind": "placed"}


def _iteration() -> Iterator[Case]:
    sizes = [(24, 16, 8, 68.0), (48, 64, 8, 100.0), (96, 256, 16, None)]
    for layers, devices, configs, peer_s in sizes:
        for memory, links in ((None, False), (8e10, False), (8e10, True)):
            words = [f"{layers} layers, {devices} devices, {configs} configurations"]
            words += ["80 GB"] * bool(memory) + ["links"] * links
            yield {
                "table": "iteration",
                "label": ", ".join(words),
                "kind": "iteration",
                "sizes": [layers, devices, configs],
                "memory_bytes": memory,
                "links": links,
                "limit_s": CONTIGUOUS_S,
                "recorded": {"dp_s": peer_s},
            }


def _layerwise() -> Iterator[Case]:
    for layers, strategies in ((48, 20), (96, 40)):
        for fraction in (0.1, 0.5, 0.9):
            yield {
                "table": "layerwise",
                "label": f"{layers} layers, {strategies} strategies, memory {fraction:.0%} between least and most",
                "kind": "layerwise",
                "sizes": [layers, strategies],
                "fraction": fraction,
                "scale": 1.0,
                "limit_s": CONTIGUOUS_S,
            }
        yield {
            "table": "layerwise",
            "label": f"{layers} layers, {strategies} strategies, memory 50%, all sizes times 1,000",
            "kind": "layerwise",
            "sizes": [layers, strategies],
            "fraction": 0.5,
            "scale": 1000.0,
            "limit_s": CONTIGUOUS_S,
        }


def _growth(folder: Path) -> Iterator[Case]:
    base = folder / "operator_graphs"
    bert3, resnet = base / "OperatorGraphs/bert_l-3_training.json", base / "LayerGraphs/resnet50_inference.json"
    bert24 = base / "LayerGraphs/bert24_inference.json"

    def case(axis: str, path: Path, label: str, **more: Any) -> Case:  # noqa: ANN401
        return {"table": f"growth-{axis}", "label": label, "kind": "max-load", "path": str(path), "contiguous": True,
                "limit_s": GROWTH_S, **more}  # fmt: skip

    for times in (1, 2, 3, 4, 5):
        yield case("nodes", bert3, f"bert_l-3_training, {times} in line", repeat=times)
    for times in (1, 2, 4, 8):
        yield case("nodes", resnet, f"resnet50_inference, {times} in line", repeat=times)
    for devices in (2, 4, 8, 16, 32, 64):
        yield case("devices", resnet, f"resnet50_inference x2, {devices} devices", repeat=2, devices=devices)
    for times in (1, 2, 3, 4):
        yield case("branching", bert24, f"bert24_inference, {times} side by side", widen=times)
    for path, times in ((resnet, 1), (resnet, 2), (resnet, 4), (bert3, 1), (bert3, 2), (bert3, 3)):
        more = {"contiguous": False, "limit_s": SCATTERED_GROWTH_S}
        yield case("scattered", path, f"{path.stem}, {times} in line", repeat=times, **more)
