"""Sketches of nodes from what drivers print of their topology: which devices are near each other becomes levels.

Devices are ordered so that neighbours of the profile are really linked, and the profile says which device of the driver
stands at which place. A level has equal groups of equal groups; where devices differ in their links, those with the
slower ones have figures of their own (`nodes_of`). Where groups are too unlike for that, the level is left out, with a
sentence that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import HardwareError
from planner.hardware.document import device_names
from planner.hardware.loader import read_profile
from planner.hardware.resolve import with_defaults
from planner.hardware.schema import DeviceFile
from planner.hardware.topology_text import Joint, Topology, read_topology
from planner.hardware.write import ASSUMED, USUAL_LINKS, ClusterSketch, LinkSketch, device_file
from planner.units import Dimension, render

SYS_BYTE_PER_S = 6e9
"""Measured bandwidth of what passes between two sockets, one direction (NVIDIA/nccl issue 1817)."""

_PCIE_REACHED = USUAL_LINKS["pcie"][1]
"""Part of PCIe that copies reach."""
_MOST_NAMED = 4
"""Pairs of devices that a sentence names."""


@dataclass(frozen=True, slots=True)
class _Tier:
    """A tier of a node: what joins its groups.

    Attributes:
        joint: by what the children are joined.
        size: children of a group.
        groups: members of each group, by position in the text, in the order of the ranks.
        children: members of each child.
        slower: by number of a group whose children are joined by something slower, what that is.
        nearest: the only devices of the node that something nearer joins, and what that is, where the others are too
            few for groups of their kind; None if there are none.
    """

    joint: Joint
    size: int
    groups: list[list[int]]
    children: list[list[int]]
    slower: dict[int, Joint] = field(default_factory=dict)
    nearest: tuple[Joint, list[int]] | None = None

    @property
    def linked(self) -> list[list[int]]:
        """Groups that are joined as the tier says."""
        return [group for number, group in enumerate(self.groups) if number not in self.slower]


def from_topology(text: str, *, name: str, device: str, where: str = "") -> ClusterSketch:
    """A node from the output of `nvidia-smi topo -m`, `rocm-smi --showtopo` or `amd-smi topology`.

    Devices that direct links join are a tier, as a mesh where pairs have single wires. PCIe switches (PIX, PXB), host
    bridges (PHB), NUMA nodes (NODE) and sockets (SYS) are tiers of their own around it.

    Args:
        text: the output.
        name: of the cluster.
        device: name or file of the device; its `peer_links` and `host_link` say how fast links are.
        where: name of the text in errors.

    Raises:
        HardwareError: the text has no complete matrix, no device has the name, or it has no links such as the text
            shows.
    """
    topology = read_topology(text, where)
    spec, device_types, sources = device_file(device)
    tiers, notes = _tiers(topology)
    ranks = [place for group in tiers[-1].groups for place in group]
    order = tuple(topology.numbers[place] for place in ranks)
    levels = _level_names(topology, tiers)
    speeds = _Speeds(topology, spec, where or topology.tool)
    unlike = [_links_of(topology, level, tier) for level, tier in zip(levels, tiers, strict=True)]
    links = {place: "+".join(own[place] for own in unlike if place in own) for place in ranks}
    sketches = tuple(
        _sketch(level, tier, speeds, dict.fromkeys(links[place] for place in ranks if place in own))
        for level, tier, own in zip(levels, tiers, unlike, strict=True)
    )
    return ClusterSketch(
        name,
        spec.device,
        sketches,
        about=f"{len(ranks)} devices as {topology.tool} shows them",
        links=tuple(links[place] for place in ranks),
        order=() if order == tuple(range(len(order))) else order,
        notes=(*notes, *speeds.doubts(tiers), *topology.notes),
        device_types=device_types,
        sources=sources,
    )


def _links_of(topology: Topology, level: str, tier: _Tier) -> dict[int, str]:
    """By place of a device whose links in a tier are not those of all, the name of its links."""
    if tier.nearest is not None:
        joint, places = tier.nearest
        return dict.fromkeys(places, _level_name(topology, joint))
    return {place: f"no-{level}" for number in tier.slower for place in tier.groups[number]}


def _level_name(topology: Topology, joint: Joint) -> str:
    return topology.links if joint is Joint.WIRED else f"pcie-{joint.name.lower()}"


def _level_names(topology: Topology, tiers: Sequence[_Tier]) -> list[str]:
    """A name for each tier: `nvlink`, `pcie-pix`, .., with a number where several tiers are joined alike."""
    names = [_level_name(topology, tier.joint) for tier in tiers]
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, earlier, strict=True)]


def _tiers(topology: Topology) -> tuple[list[_Tier], list[str]]:
    """The tiers of a node, innermost first, and what they do not hold of the topology."""
    groups = [[place] for place in range(len(topology.names))]
    tiers: list[_Tier] = []
    left_out: list[list[list[int]]] = []
    notes: list[str] = []
    nearest: tuple[Joint, list[int]] | None = None
    for joint in Joint:
        clusters = _clusters(topology, groups, joint)
        common = math.gcd(*map(len, clusters))
        if 1 < common < max(map(len, clusters)):
            split = [part for cluster in clusters for part in _chunks(topology, groups, cluster, common)]
            groups = _add(tiers, topology, groups, split, joint)
            clusters = _clusters(topology, groups, joint)
        if max(map(len, clusters)) == 1:
            continue
        filled = _filled(topology, groups, clusters)
        if filled is not None:
            groups = _add(tiers, topology, groups, filled, joint, nearest)
            nearest = None
            continue
        several = [sorted(p for child in c for p in groups[child]) for c in clusters if len(c) > 1]
        if several in left_out:
            continue
        left_out.append(several)
        if len(several) == 1 and nearest is None:
            nearest = joint, several[0]
        else:
            joined = "; ".join(_named(topology, places) for places in several)
            notes.append(f"{_word(topology, joint)} between {joined}: such groups fill no equal groups of a level")
    told = [places for clusters in left_out for places in clusters]
    return tiers, [*notes, *_nearer(topology, tiers, told)]


def _word(topology: Topology, joint: Joint) -> str:
    """What joins devices, in the words of the text."""
    return topology.links if joint is Joint.WIRED else joint.name


def _add(
    tiers: list[_Tier],
    topology: Topology,
    groups: list[list[int]],
    clusters: Sequence[Sequence[int]],
    joint: Joint,
    nearest: tuple[Joint, list[int]] | None = None,
) -> list[list[int]]:
    """Append the tier that joins clusters of equally many groups; returns its groups, ordered by their first member."""
    ordered = [_linked_order(topology, [groups[child] for child in cluster]) for cluster in clusters]
    if nearest is not None:
        ordered = [sorted(children, key=lambda child: child[0] not in nearest[1]) for children in ordered]
    ordered.sort(key=lambda children: min(map(min, children)))
    farthest = [max(_between(topology, children, children)) for children in ordered]
    slower = {number: reached for number, reached in enumerate(farthest) if reached > joint}
    merged = [[place for child in children for place in child] for children in ordered]
    every_child = [child for children in ordered for child in children]
    tiers.append(_Tier(joint, len(clusters[0]), merged, every_child, slower, nearest))
    return merged


def _between(topology: Topology, some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[Joint]:
    """What joins each of some groups to each of others: the farthest of what joins two of their members.

    Groups within which all are wired count as wired, also where the way leads through other members.
    """
    return [
        Joint(int(topology.reach[np.ix_(one, other)].max())) for one in some for other in others if one is not other
    ]


def _clusters(topology: Topology, groups: Sequence[Sequence[int]], joint: Joint) -> list[list[int]]:
    """Groups, by number, of which all are joined at least as near as that."""
    reach = topology.reach
    clusters: list[list[int]] = []
    for number, group in enumerate(groups):
        for cluster in clusters:
            if all(reach[np.ix_(group, groups[other])].max() <= joint for other in cluster):
                cluster.append(number)
                break
        else:
            clusters.append([number])
    return clusters


def _chunks(topology: Topology, groups: Sequence[list[int]], cluster: Sequence[int], size: int) -> list[list[int]]:
    """A cluster of groups in parts of so many, whose members are linked."""
    ordered = _linked_order(topology, [groups[child] for child in cluster])
    numbers = [next(number for number in cluster if groups[number] is child) for child in ordered]
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _filled(
    topology: Topology, groups: Sequence[Sequence[int]], clusters: Sequence[list[int]]
) -> list[list[int]] | None:
    """Clusters as large as the largest: smaller ones are put together, the nearest first; None where none come out."""
    reach, size = topology.reach, max(map(len, clusters))
    full = [cluster for cluster in clusters if len(cluster) == size]
    rest = sorted((cluster for cluster in clusters if len(cluster) < size), key=lambda cluster: -len(cluster))
    while rest:
        bin_ = rest.pop(0)
        while len(bin_) < size:
            members = [place for child in bin_ for place in groups[child]]
            fitting = [cluster for cluster in rest if len(cluster) <= size - len(bin_)]
            if not fitting:
                return None
            nearest = min(
                fitting,
                key=lambda cluster: reach[np.ix_(members, [p for child in cluster for p in groups[child]])].max(),
            )
            rest.remove(nearest)
            bin_ = [*bin_, *nearest]
        full.append(bin_)
    return full


def _linked_order(topology: Topology, children: list[list[int]]) -> list[list[int]]:
    """Children of a group in an order in which neighbours, and groups of neighbours, have direct links.

    Their order in the text, where aligned halves, quarters, .. of it are fully linked as far as their size allows; else
    the pairs of a matching with the most links, then pairs of pairs.
    """
    import networkx

    wires = np.array([[topology.wires[np.ix_(one, other)].sum() for other in children] for one in children])
    np.fill_diagonal(wires, 0)
    if not wires.any() or _aligned(wires):
        return sorted(children, key=min)
    runs = [[at] for at in range(len(children))]
    while len(runs) > 1 and len(runs) % 2 == 0:
        graph = networkx.Graph()
        graph.add_nodes_from(range(len(runs)))
        for one in range(len(runs)):
            for other in range(one):
                links = int(wires[np.ix_(runs[one], runs[other])].sum())
                graph.add_edge(other, one, weight=links)
        matching = networkx.max_weight_matching(graph, maxcardinality=True)
        pairs = sorted(sorted(pair) for pair in matching)
        runs = [runs[one] + runs[other] for one, other in pairs]
    return [children[at] for run in runs for at in run]


def _aligned(wires: np.ndarray) -> bool:
    """Whether neighbours two by two have direct links of their own, in the order of the text."""
    count = len(wires)
    return count < 3 or all(wires[at, at + 1] > 0 for at in range(0, count - 1, 2))


def _nearer(topology: Topology, tiers: Sequence[_Tier], told: Sequence[Sequence[int]]) -> Iterator[str]:
    """Sentences on pairs that are nearer to each other than the tier that joins them says, but those of groups told."""
    seen = {(one, other) for group in told for one in group for other in group}
    for tier in tiers:
        pairs: dict[Joint, list[str]] = {}
        for number, group in enumerate(tier.groups):
            reached = tier.slower.get(number, tier.joint)
            for i, one in enumerate(group):
                for other in group[i + 1 :]:
                    key = min(one, other), max(one, other)
                    joint = Joint(int(topology.joints[key]))
                    if key not in seen and joint < reached:
                        pairs.setdefault(joint, []).append(_named(topology, key))
                    seen.add(key)
        for joint, found in sorted(pairs.items()):
            listed = ", ".join(sorted(found)[:_MOST_NAMED]) + f" and {len(found) - _MOST_NAMED} more" * (
                len(found) > _MOST_NAMED
            )
            near, far = _word(topology, joint), _word(topology, tier.joint)
            yield f"{near} between {listed}: the level around them has the speed of its farthest pair ({far})"


def _named(topology: Topology, places: Sequence[int]) -> str:
    return "-".join(topology.names[place] for place in sorted(places))


@dataclass(frozen=True, slots=True)
class _Speeds:
    """How fast the links of a node are, by its device.

    Attributes:
        topology: how the devices are joined.
        device: their profile.
        where: name of the text in errors.
    """

    topology: Topology
    device: DeviceFile
    where: str

    def pcie(self, joint: Joint) -> LinkSketch:
        """The way over PCIe: the device's own lanes up to the CPU, what was measured between sockets."""
        level = f"pcie-{joint.name.lower()}"
        if joint is Joint.SYS:
            note = "one machine; others reach more, so measure it: nccl-tests, `hardware import --into`"
            return LinkSketch(level, SYS_BYTE_PER_S, efficiency=1.0, source="nccl1817", verified=False, note=note)
        link = with_defaults(self.device).host_link
        assert link is not None
        rate = float(f"{link.byte_per_s / _PCIE_REACHED:.3g}")
        reached = render(link.byte_per_s, Dimension.BYTE_RATE)
        note = f"host_link of {self.device.device}, {reached}, over the {_PCIE_REACHED:.0%} that copies reach"
        return LinkSketch(level, rate, source=ASSUMED, verified=False, note=note)

    def wired(self, groups: Sequence[Sequence[int]], children: Sequence[Sequence[int]]) -> LinkSketch:
        """Direct links: all of a device behind a switch, or a mesh where pairs have wires of their own.

        Behind a switch each pair shows all links of a device, which are more than it has for wires to each other.

        Args:
            groups: devices that are joined by direct links.
            children: members of each child of the groups.

        Raises:
            HardwareError: the device has no such links.
        """
        links, wires = self.device.peer_links, self.topology.wires
        if links is None:
            raise self._no_links()
        whole = self._component(groups[0])
        counts = [int(wires[one, other]) for one in whole for other in whole if one != other]
        switched = len(whole) > 2 and min(counts) == max(counts) and sum(wires[whole[0], whole]) > links.count
        count = max(counts) if switched else min(self.outward(group, children) for group in groups)
        mesh = not switched and len(groups[0]) > 2
        into = " into a switch" if switched else ""
        return LinkSketch(
            self.topology.links,
            links.byte_per_s,
            count,
            peer_byte_per_s=links.byte_per_s * min(n for n in counts if n) if mesh else None,
            source=self.topology.tool,
            note=f"{count} links{into}, each as {self.device.device} has them ({links.source or 'its file'})",
        )

    def outward(self, group: Sequence[int], children: Sequence[Sequence[int]]) -> int:
        """The fewest direct links of a child to the others of its group."""
        wires, own = self.topology.wires, [child for child in children if child[0] in group]
        return min(int(wires[np.ix_(child, [place for place in group if place not in child])].sum()) for child in own)

    def _component(self, group: Sequence[int]) -> list[int]:
        """All devices that direct links connect with a group."""
        reach = self.topology.reach
        return [place for place in range(len(reach)) if reach[group[0], place] == Joint.WIRED]

    def _no_links(self) -> HardwareError:
        one, other = (int(place) for place in np.argwhere(self.topology.wires > 0)[0])
        title = self.topology.links
        words = {"nvlink": "NVLink", "xgmi": "xGMI"}[title]
        known = _with_links(int(self.topology.wires.max()))
        return HardwareError(
            f"{self.device.device} has no {words} (`peer_links`), which joins {self.topology.names[one]} and "
            f"{self.topology.names[other]}",
            where=self.where,
            hint=f"give --device the card that it is ({', '.join(known)}), or the file of a device with `peer_links`",
        )

    def doubts(self, tiers: Sequence[_Tier]) -> Iterator[str]:
        """Sentences on direct links that the device's profile does not have, or that devices have more or less of."""
        wires, links = self.topology.wires, self.device.peer_links
        if links is None or not wires.any():
            return
        most = int(wires.max())
        if most > links.count:
            yield f"{most} links between two devices, more than the {links.count} of {self.device.device}: is it that?"
        for tier in (tier for tier in tiers if tier.joint is Joint.WIRED):
            fewest = {self.outward(group, tier.children) for group in tier.linked}
            if len(fewest) > 1:
                yield f"links of groups with {sorted(fewest)[1:]} links a device: all count as those with {min(fewest)}"


def _with_links(count: int) -> list[str]:
    """Bundled devices with so many direct links, or those with more where none has just as many."""
    specs = {name: read_profile(name) for name in device_names()}
    links = {n: spec.peer_links.count for n, spec in specs.items() if isinstance(spec, DeviceFile) and spec.peer_links}
    return [name for name, own in links.items() if own == count] or [n for n, own in links.items() if own >= count]


def _sketch(level: str, tier: _Tier, speeds: _Speeds, unlike: Iterable[str]) -> LinkSketch:
    """A tier as a level of a profile; devices with links of a name in `unlike` have what is slower or nearer."""
    link = speeds.wired(tier.linked, tier.children) if tier.joint is Joint.WIRED else speeds.pcie(tier.joint)
    special = speeds.pcie(max(tier.slower.values())) if tier.slower else None
    if tier.nearest is not None:
        joint, places = tier.nearest
        special = speeds.wired([places], [[p] for p in places]) if joint is Joint.WIRED else speeds.pcie(joint)
    nodes_of = dict.fromkeys(unlike, special) if special else {}
    return replace(link, name=level, size=tier.size, nodes_of=nodes_of)
