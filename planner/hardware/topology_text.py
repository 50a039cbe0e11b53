"""Reads how the devices of a node are joined from what drivers print.

Texts are those of `nvidia-smi topo -m`, `rocm-smi --showtopo` and `amd-smi topology`: matrices of devices, whose cells
say by which links two of them are joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from planner.errors import HardwareError

NVIDIA, ROCM = "nvidia-smi topo -m", "rocm-smi --showtopo"
MOST_DEVICES = 128
"""Most devices of a matrix that is read."""
MOST_LINKS = 64
"""Most direct links between two devices."""


class Joint(IntEnum):
    """What joins two devices of a node, the nearest first; numbers grow with the distance."""

    WIRED = 0
    """direct links of the devices, or their switch: NVLink, xGMI"""
    PIX = 1
    """one PCIe switch"""
    PXB = 2
    """several PCIe switches"""
    PHB = 3
    """a PCIe host bridge, typically the CPU"""
    NODE = 4
    """host bridges of one NUMA node"""
    SYS = 5
    """the interconnect between NUMA nodes or sockets"""


@dataclass(frozen=True, slots=True)
class Topology:
    """How the devices of a node are joined.

    Attributes:
        tool: program that printed it.
        links: name of direct links: nvlink or xgmi.
        names: names of the devices in the text.
        numbers: numbers of the devices, as their driver counts them.
        joints: `Joint` of each pair, int64 [devices, devices]; WIRED on the diagonal.
        wires: direct links of each pair, int64 [devices, devices]; 0 where the way leads through other devices.
        reach: `joints`, with WIRED for all pairs that direct links connect over other devices, too.
        notes: what the text says and the matrices do not hold.
    """

    tool: str
    links: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    joints: np.ndarray
    wires: np.ndarray
    reach: np.ndarray
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a matrix: its line in the text, the device, and its cells."""

    line: int
    name: str
    cells: tuple[str, ...]


_GPU = re.compile(r"GPU\d{1,4}")
_DEVICE = re.compile(r"GPU\d{1,4}|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_NV = re.compile(r"NV(\d{1,3})")
_WORDS = {"SOC": Joint.SYS, **{joint.name: joint for joint in Joint if joint is not Joint.WIRED}}
"""Cells of `nvidia-smi topo -m`; drivers of before 2017 write SOC for SYS."""
_PEER_TO_PEER = {"OK", "CNS", "GNS", "TNS", "NS", "DR"}
"""Cells of `nvidia-smi topo -p2p`."""
_WHOLE = "paste the whole output"


def is_topology(text: str) -> bool:
    """Whether a text looks like one of those that `read_topology` reads."""
    plain = _plain(text)
    return bool(_TABLE.search(plain) or re.search(r"^[\s|>]*GPU\d+[\s|]+(X|GPU\d+|NV\d+|OK)(?=[\s|]|$)", plain, re.M))


def read_topology(text: str, where: str = "") -> Topology:
    """The topology in the output of `nvidia-smi topo -m`, `rocm-smi --showtopo` or `amd-smi topology`.

    Args:
        text: the output; what stands around the matrices is passed over.
        where: name of the text in errors.

    Raises:
        HardwareError: there is no matrix of two devices or more, or it is not complete and symmetric; says in which
            line.
    """
    plain = _plain(text)
    return _rocm(plain, where or ROCM) if _TABLE.search(plain) else _nvidia(plain, where or NVIDIA)


def _plain(text: str) -> str:
    """The text without colours, marks of quotation and lines of tables."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.replace("|", " ").lstrip("> \t") for line in text.splitlines())


def _nvidia(text: str, where: str) -> Topology:
    columns, head, rows = _matrix(text, _GPU)
    gpus = [row for row in rows if _GPU.fullmatch(row.name)]
    names = [row.name for row in gpus]
    _require_square(names, [c for c in columns if _GPU.fullmatch(c)] or names, gpus, head, where)
    places = {name: at for at, name in enumerate(columns or names)}
    count = len(names)
    joints, wires = np.zeros((2, count, count), dtype=np.int64)
    for i, row in enumerate(gpus):
        for j, name in enumerate(names):
            cell = _cell(row, places[name], name, where)
            if i == j:
                if cell != "X":
                    raise _error(where, row.line, f"{cell!r} from {name} to itself, in place of X")
                continue
            joints[i, j], wires[i, j] = _nvidia_cell(cell, row, name, where)
    _require_symmetric(joints * (MOST_LINKS + 1) + wires, gpus, names, where)
    notes = (*_network_cards(text, columns, gpus, places), *_affinity(text))
    numbers = tuple(int(name[3:]) for name in names)
    return Topology(NVIDIA, "nvlink", tuple(names), numbers, joints, wires, _reach(joints), notes)


def _nvidia_cell(cell: str, row: _Row, name: str, where: str) -> tuple[Joint, int]:
    """What joins two GPUs, and how many NVLinks."""
    if match := _NV.fullmatch(cell):
        count = int(match[1])
        if not 0 < count <= MOST_LINKS:
            raise _error(where, row.line, f"{count} NVLinks from {row.name} to {name}: 1 to {MOST_LINKS} can be")
        return Joint.WIRED, count
    if cell in _WORDS:
        return _WORDS[cell], 0
    if cell in _PEER_TO_PEER:
        message = f"{cell!r} from {row.name} to {name} says what may be read directly, not by which links"
        raise _error(where, row.line, message, f"give the output of `{NVIDIA}`, not of `nvidia-smi topo -p2p`")
    hint = f"write NV#, {', '.join(joint.name for joint in Joint if joint is not Joint.WIRED)} as `{NVIDIA}` does"
    raise _error(where, row.line, f"{cell!r} from {row.name} to {name} is no link between GPUs", hint)


def _matrix(text: str, device: re.Pattern[str], first: int = 1) -> tuple[list[str], int, list[_Row]]:
    """The first matrix of a text: names of its columns (none without a heading), the heading's line, and its rows."""
    columns: list[str] = []
    rows: list[_Row] = []
    head = first
    for line, content in enumerate(text.splitlines(), first):
        words = content.split()
        named = [bool(device.fullmatch(word)) for word in words[:2]]
        if not columns and not rows and words and named[0] and (len(words) == 1 or named[1] or words[1] == "CPU"):
            stop = next((at for at, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))
            columns, head = words[:stop], line
        elif len(words) > 1 and (named[0] or words[0] in columns) and not words[0].endswith(":"):
            rows.append(_Row(line, words[0], tuple(words[1:])))
    return columns, head, rows


def _require_square(names: Sequence[str], columns: Sequence[str], rows: Sequence[_Row], head: int, where: str) -> None:
    """Refuse a matrix that does not have each device once as a row and once as a column, in one order."""
    if len(names) < 2:
        count = "no matrix of devices" if not names else "one device alone, which nothing joins to another"
        raise HardwareError(count, where=where, hint=_WHOLE)
    if len(names) > MOST_DEVICES:
        raise HardwareError(f"{len(names)} devices: a node can have {MOST_DEVICES}", where=where, hint=_WHOLE)
    for at, row in enumerate(rows):
        if row.name in names[:at]:
            raise _error(where, row.line, f"{row.name} has two rows")
    for name in columns:
        if name not in names:
            raise _error(where, head, f"{name} has a column and no row")
    for row in rows:
        if row.name not in columns:
            raise _error(where, row.line, f"{row.name} has a row and no column")
    if len(set(columns)) < len(columns):
        raise _error(where, head, "a device has two columns")


def _require_symmetric(cells: np.ndarray, rows: Sequence[_Row], names: Sequence[str], where: str) -> None:
    """Refuse a matrix that says of two devices other links one way than the other."""
    for i, j in zip(*np.nonzero(np.triu(cells != cells.T)), strict=True):
        message = f"{names[i]} to {names[j]} is not what {names[j]} to {names[i]} is in line {rows[j].line}"
        raise _error(where, rows[i].line, message, "the matrix must be symmetric")


def _reach(joints: np.ndarray) -> np.ndarray:
    """`Topology.reach` of the joints of pairs."""
    import networkx

    reach = joints.copy()
    wired = (joints == Joint.WIRED) & ~np.eye(len(joints), dtype=bool)
    for group in networkx.connected_components(networkx.from_numpy_array(wired.astype(np.int64))):
        places = sorted(group)
        reach[np.ix_(places, places)] = Joint.WIRED
    return reach


def _cell(row: _Row, at: int, name: str, where: str) -> str:
    if at >= len(row.cells):
        raise _error(where, row.line, f"the row of {row.name} ends before the column of {name}")
    return row.cells[at]


def _error(where: str, line: int, message: str, hint: str = _WHOLE) -> HardwareError:
    return HardwareError(message, where=f"{where}:{line}", hint=hint)


def _network_cards(text: str, columns: Sequence[str], gpus: Sequence[_Row], places: dict[str, int]) -> Iterator[str]:
    """A sentence on the network cards of a matrix: their names, and the GPUs next to each."""
    cards = [name for name in columns if not _GPU.fullmatch(name)]
    if not cards:
        return
    titles = dict(re.findall(r"^(NIC\d+):[ \t]*(\S+)[ \t]*$", text, re.M))
    near = []
    for card in cards:
        listed = [row for row in gpus if places[card] < len(row.cells)]
        reached = [(_WORDS.get(row.cells[places[card]], Joint.SYS), row.name) for row in listed]
        nearest = min(reached, default=(Joint.SYS, ""))[0]
        gpu_names = " ".join(name for joint, name in reached if joint == nearest)
        title = f"{card} ({titles[card]})" if card in titles else card
        near.append(f"{title} {nearest.name} of {gpu_names}")
    yield (
        f"network cards and which GPUs they are next to ({'; '.join(near)}): the text does not say their speed; "
        f"--between NAME:BANDWIDTH,ports={len(cards)} adds them"
    )


def _affinity(text: str) -> Iterator[str]:
    """A sentence on the columns that bind GPUs to cores and memory."""
    found = [name for name in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID") if re.search(name, text)]
    if found:
        yield f"{', '.join(found)}: no price depends on them; bind processes by them"


_TABLE = re.compile(
    r"^[=\s]*(?P<title>(?:Weight|Hops|Link Type) between two GPUs|(?:WEIGHT|HOPS|LINK TYPE) TABLE:?)[=\s]*$", re.M
)
_NUMA = re.compile(r"^GPU\s*\[?(\d+)\]?\s*:.*Numa Node:\s*(-?\d+)\s*$", re.M)
_SAME_SOCKET_HOPS, _SAME_SOCKET_WEIGHT = 2, 40
"""Hops and weight up to which a way over PCIe stays at one socket (AMD, MI200 system optimization guide)."""


def _rocm(text: str, where: str) -> Topology:
    tables = {}
    marks = [*_TABLE.finditer(text)]
    for mark, after in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
        body = re.split(r"^=+[^=\n]+=+\s*$|^[A-Z][A-Z /]+:\s*$", text[mark.end() : after], maxsplit=1, flags=re.M)[0]
        key = mark["title"].split()[0].lower()
        tables[key] = _matrix(body, _DEVICE, text.count("\n", 0, mark.end()) + 1)
    if "link" not in tables:
        hint = f"give the whole output of `{ROCM}`, or of `amd-smi topology`"
        raise HardwareError("the table of link types is missing", where=where, hint=hint)
    columns, head, rows = tables.pop("link")
    names = [row.name for row in rows]
    _require_square(names, columns or names, rows, head, where)
    figures = {key: _figures(table, names, where) for key, table in tables.items()}
    nodes = {int(gpu): node for gpu, node in _NUMA.findall(text)}
    numbers = tuple(int(name[3:]) if _GPU.fullmatch(name) else at for at, name in enumerate(names))
    joints = np.zeros((len(names), len(names)), dtype=np.int64)
    for i, row in enumerate(rows):
        for j, name in enumerate(names):
            cell = _cell(row, columns.index(name) if columns else j, name, where)
            if i != j and cell not in ("XGMI", "PCIE"):
                raise _error(where, row.line, f"{cell!r} from {row.name} to {name} is no link type: XGMI or PCIE")
            if i != j and cell == "PCIE":
                far = _sockets_apart(figures, i, j, nodes.get(numbers[i]) != nodes.get(numbers[j]) or not nodes)
                joints[i, j] = Joint.SYS if far else Joint.PHB
    _require_symmetric(joints, rows, names, where)
    wires, notes = _direct(joints, figures.get("weight"))
    return Topology(
        ROCM, "xgmi", tuple(names), numbers, joints, wires, _reach(joints), (*notes, *_told(figures, nodes))
    )


def _figures(table: tuple[list[str], int, list[_Row]], names: Sequence[str], where: str) -> np.ndarray:
    """The numbers of a table of the devices, float64 [devices, devices]; NaN for N/A."""
    columns, head, rows = table
    _require_square([row.name for row in rows], columns or names, rows, head, where)
    found = np.full((len(names), len(names)), np.nan)
    for row in rows:
        for name in columns or names:
            if row.name not in names or name not in names:
                raise _error(where, row.line, f"{row.name} or {name} has no link type")
            cell = _cell(row, (columns or list(names)).index(name), name, where)
            if not re.fullmatch(r"\d{1,6}|N/A|SELF|-", cell):
                raise _error(where, row.line, f"{cell!r} from {row.name} to {name} is no number")
            if cell.isdigit():
                found[names.index(row.name), names.index(name)] = int(cell)
    return found


def _sockets_apart(figures: dict[str, np.ndarray], i: int, j: int, other_node: bool) -> bool:
    """Whether a way over PCIe leads from one socket to another; where hops and weights are missing, by NUMA nodes."""
    for key, most in (("hops", _SAME_SOCKET_HOPS), ("weight", _SAME_SOCKET_WEIGHT)):
        if key in figures and np.isfinite(figures[key][i, j]):
            return bool(figures[key][i, j] > most)
    return other_node


def _direct(joints: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, list[str]]:
    """Direct links of each pair: one where xGMI has the least weight of all, none where it goes over other devices."""
    wired = joints == Joint.WIRED
    np.fill_diagonal(wired, val=False)
    if weights is None or not np.isfinite(weights[wired]).any():
        return wired.astype(np.int64), ["weights are missing: all xGMI counts as direct"] if wired.any() else []
    direct = wired & ~(weights > np.nanmin(weights[wired]))
    return (direct | direct.T).astype(np.int64), []


def _told(figures: dict[str, np.ndarray], nodes: dict[int, str]) -> Iterator[str]:
    """Sentences on what the tables say of the links and the profile does not have."""
    yield "links between two devices are counted as one each: the text does not say how many there are"
    if nodes:
        yield "Numa Node, Numa Affinity: no price depends on them; bind processes by them"
    if not {"hops", "weight"} & figures.keys():
        yield "hops and weights are missing: ways over PCIe go by NUMA nodes, or count as between sockets"
