"""Texts that drivers print of a node's topology."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Link = Callable[[int, int], object]


def matrix(links: Sequence[Sequence[str]], nics: int = 0) -> str:
    """What `nvidia-smi topo -m` prints."""
    names = [f"GPU{i}" for i in range(len(links))]
    head = "\t".join(["", *names, *(f"NIC{i}" for i in range(nics)), "CPU Affinity", "NUMA Affinity"])
    rows = ["\t".join([name, *row, *["PXB"] * nics, "0-63", "0"]) for name, row in zip(names, links, strict=True)]
    wires = ["\t".join([f"NIC{i}", *["PXB"] * (len(links) + nics)]) for i in range(nics)]
    legend = ["", "Legend:", "", "  X    = Self", "  NV#  = NVLinks", "", "NIC Legend:", ""]
    cards = [f"  NIC{i}: mlx5_{i}" for i in range(nics)]
    return "\n".join([head, *rows, *wires, *legend, *cards, ""])


def joined(count: int, link: Link, pairs: Mapping[tuple[int, int], str] | None = None) -> list[list[str]]:
    """Cells of a matrix: what a function says of two GPUs, but for the pairs that are given."""
    cells = [[" X " if i == j else str(link(i, j)) for j in range(count)] for i in range(count)]
    for (i, j), text in (pairs or {}).items():
        cells[i][j] = cells[j][i] = text
    return cells


def among(count: int, link: str) -> list[list[str]]:
    """Cells of a matrix in which all pairs are joined alike."""
    return joined(count, lambda i, j: link)


def showtopo(count: int, kind: Link, hops: Link | None = None, weight: Link | None = None) -> str:
    """What `rocm-smi --showtopo` prints; half of the devices at each NUMA node."""
    names = [f"GPU{i}" for i in range(count)]

    def table(title: str, cell: Link) -> list[str]:
        head = f" {title} between two GPUs ".center(80, "=")
        rows = [
            "   ".join([f"GPU{i}", *("0" if i == j else str(cell(i, j)) for j in range(count))]) for i in range(count)
        ]
        return [head, "       " + "         ".join(names), *rows, ""]

    lines = [" ROCm System Management Interface ".center(80, "=")]
    lines += table("Weight", weight) if weight else []
    lines += table("Hops", hops) if hops else []
    lines += table("Link Type", kind)
    lines += [" Numa Nodes ".center(80, "=")]
    lines += [f"GPU[{i}]\t\t: (Topology) Numa Node: {i // (count // 2)}" for i in range(count)]
    return "\n".join([*lines, " End of ROCm SMI Log ".center(80, "="), ""])
