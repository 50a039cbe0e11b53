"""Step time and micro-batches in flight of a plan file, by docs/plan.md alone: nothing of the program is used."""

import json
import re
from collections import Counter, defaultdict
from typing import Any

Action = tuple[str, str, int, int | None, int, str | None]
"""`+` or nothing, kind, stage, number, part, ranks to the one that keeps what is evicted."""
Key = tuple[str, int, int | None, int]
Lane = tuple[int, list[Action]]

STEPS = r"([+-]\d+)?(?:s(-?\d+))?(?:u(-?\d+))?(?:v(-?\d+))?"
TOKEN = re.compile(rf"\(|\[|\)\*(\d+){STEPS}|\]{STEPS}|[^\s()\[\]]+")
WORD = re.compile(r"(\+?)([A-Z]+)(\d+)(?:\.(\d+)(?:-(\d+))?)?(?:/(\d+))?(?:@\d+)?(?:>([+-]\d+))?")
NUMBERED_ALONE = {"S": 1, "G": 1, "U": 2}
OF_ITS_OWN = {"B": ("L", "F"), "I": ("L", "F"), "W": ("I",), "R": ("F",), "SA": ("F",), "SG": ("B", "I"), "E": ("F",)}


def raised(action: Action, rise: list[int], times: int) -> Action:
    """An action so many repetitions later."""
    joined, kind, stage, number, part, offset = action
    step = rise[NUMBERED_ALONE.get(kind, 0)] * times
    return joined, kind, stage, None if number is None else number + step, part, offset


def expand(text: str, times: int) -> list[Action]:
    """The actions of a line, what stands in brackets so many times."""
    stack: list[list[Action]] = [[]]
    behind, rise = -1, [1, 1, 1]
    for token in TOKEN.finditer(text):
        if token[0] in "([":
            stack.append([])
        elif token[0][0] in ")]":
            loop, body = token[0][0] == ")", stack.pop()
            steps = [int(x or 1) for x in (token.groups()[1:4] if loop else token.groups()[5:8])]
            stack[-1] += [raised(a, steps, i) for i in range(int(token[1]) if loop else times) for a in body]
            behind, rise = (behind, rise) if loop else (len(stack[-1]), steps)
        elif word := WORD.fullmatch(token[0]):
            joined, kind, stage, low, high, part, offset = word.groups()
            first, last = int(low or 0), int(high or low or 0)
            numbers = range(first, last + 1) if last >= first else range(first, last - 1, -1)
            stack[-1] += [
                (joined, kind, int(stage), None if low is None else n, int(part or 0), offset) for n in numbers
            ]
    if behind >= 0:
        stack[0][behind:] = [raised(a, rise, times - 1) for a in stack[0][behind:]]
    return stack[0]


class Judge:
    """One plan, with what goes on for ever repeated so many times."""

    def __init__(self, plan: dict[str, Any], times: int = 1) -> None:
        self.schedule, self.terms, self.levels = (
            plan["schedule"],
            plan["predictions"]["stages"],
            plan["hardware"]["levels"],
        )
        self.parts, self.lanes = self.schedule.get("parts", 1), list[Lane]()
        for rank in sorted({group[0] for stage in plan["stages"] for group in stage["replicas"]}):
            for line in sorted(self.schedule["orders"], key=lambda line: line.get("lane", 0)):
                if rank in line["ranks"]:
                    first, step = line["first"][line["ranks"].index(rank)], line["step"]
                    own = [
                        a if a[3] is None or a[1] in NUMBERED_ALONE else (*a[:3], first + step * a[3], *a[4:])
                        for a in expand(line["actions"], times)
                    ]
                    self.lanes.append((rank, own))
        self.where: dict[Key, int] = {a[1:5]: rank for rank, lane in self.lanes for a in lane}
        self.repeats = any(key[0] == "R" for key in self.where)
        self.syncs = Counter((a[2], a[3]) for _, lane in self.lanes for a in lane if a[1] == "S")
        self.launched = {(a[2], a[3], rank) for rank, lane in self.lanes for a in lane if a[1] == "G"}
        self.waits: dict[Key, list[Key]] = defaultdict(list)
        self.busy: dict[Key, float] = {key: self.seconds(*key[:2]) for key in self.where}
        self.sent: dict[Key, tuple[tuple[int, int], float]] = {}
        for key in self.where:
            self.tensor(*key)

    def seconds(self, kind: str, stage: int) -> float:
        """How long an action works."""
        t = self.terms[stage]
        backward = t["backward_s"] - (t["recompute_s"] if self.repeats else 0.0)
        weight = t.get("weight_grad_s", (t["backward_s"] - t["recompute_s"]) / 2)
        if self.schedule.get("side_by_side") and kind in "FB":
            return float(t["forward_s"] + backward)
        known = {"F": t["forward_s"], "B": backward, "I": backward - weight, "W": weight, "R": t["recompute_s"]}
        return float(t["update_s"] if kind == "U" else known.get(kind, 0.0) / self.parts)

    def tensor(self, kind: str, stage: int, m: int | None, part: int) -> None:
        """What makes the tensor that an action reads from a neighbour, and what the transfer takes."""
        forward = kind in ("F", "RA")
        other = stage - 1 if forward else stage + 1
        receipt = ("RA" if forward else "RG", stage, m, part)
        reads = kind in ("F", "RA", "B", "I", "RG") and 0 <= other < len(self.terms)
        if not reads or (kind != receipt[0] and receipt in self.where):
            return
        made = next(
            k for x in (("SA", "F") if forward else ("SG", "B", "I")) if (k := (x, other, m, part)) in self.where
        )
        key, t = (kind, stage, m, part), self.terms[stage if forward else other]
        self.waits[key].append(made)
        if self.where[made] != self.where[key]:
            seconds = (t["receive_s"] if forward else t["return_s"]) / self.parts
            if self.schedule.get("transfers", "blocking") == "blocking":
                self.busy[key if forward else made] += seconds
            elif seconds:
                self.sent[made] = (self.where[made], self.where[key]), seconds

    def play(self) -> tuple[dict[int, float], dict[int, float]]:
        """Run each lane as far as it comes, again and again; when each rank begins and ends."""
        self.own, self.arrival = dict[Key, float](), dict[Key, float]()
        self.links, self.copier, self.beside = Counter[Any](), Counter[Any](), Counter[Any]()
        self.leaving, self.forwards = dict[int, Key | None](), Counter[Any]()
        self.come: dict[Any, dict[int, float]] = defaultdict(dict)
        self.room: dict[Any, list[float]] = defaultdict(list)
        self.finish = dict[Any, float]()
        free, place, begin, end = [0.0] * len(self.lanes), [0] * len(self.lanes), dict[int, float](), dict[int, float]()
        moved = True
        while moved:
            moved = False
            for at, (rank, lane) in enumerate(self.lanes):
                while place[at] < len(lane):
                    stop = place[at] + 1
                    while stop < len(lane) and lane[stop][0]:
                        stop += 1
                    span = self.run(at, rank, lane[place[at] : stop], free[at])
                    if span is None:
                        break
                    begin.setdefault(rank, span[0])
                    free[at], place[at], moved = span[1], stop, True
                    end[rank] = max(end.get(rank, 0.0), span[1])
        assert all(done == len(lane) for done, (_, lane) in zip(place, self.lanes, strict=True)), "a cycle of waits"
        return begin, end

    def run(self, at: int, rank: int, group: list[Action], free: float) -> tuple[float, float] | None:
        """Begin and end of actions that run as one; None while something that they need is not there."""
        if group[0][1] in ("S", "G"):
            return self.exchange(rank, group[0], free)
        start = free
        for _, kind, stage, m, part, _ in group:
            needed = [self.arrival.get(key) for key in self.waits[kind, stage, m, part]]
            own = next((k for x in OF_ITS_OWN.get(kind, ()) if (k := (x, stage, m, part)) in self.where), None)
            needed += [self.own.get(own)] if own else []
            if kind in "FL" and (leaving := self.leaving.get(at)):
                needed.append(self.own[leaving])
            over = self.forwards[rank, stage] - self.schedule.get("limits", [10**9] * (stage + 1))[stage]
            if kind == "F" and over >= 0:
                needed.append(self.room[rank, stage][over] if over < len(self.room[rank, stage]) else None)
            for when in needed:
                if when is None:
                    return None
                start = max(start, when)
        end = start + sum(self.busy[action[1:5]] for action in group)
        for _, kind, stage, m, part, _ in group:
            self.done((kind, stage, m, part), start, end)
            self.leaving[at] = (kind, stage, m, part) if kind == "E" else None if kind in "FL" else self.leaving.get(at)
            if kind in "EL":
                begin = max(start, self.copier[rank])
                self.own[kind, stage, m, part] = self.copier[rank] = begin + self.moving_s(stage)
            self.forwards[rank, stage] += kind == "F"
            self.room[rank, stage] += [end] if kind in "BW" else []
        return start, end

    def done(self, key: Key, start: float, end: float) -> None:
        """When the rank itself and when its neighbours can use what an action makes."""
        kind, stage = key[:2]
        self.own[key] = self.arrival[key] = end
        if self.schedule.get("streaming"):
            self.arrival[key] = end - self.terms[stage]["backward_s" if kind == "F" else "forward_s"]
            self.own[key] = end - self.seconds(*key[:2]) if kind == "F" and stage + 1 == len(self.terms) else end
        if key in self.sent:
            link, seconds = self.sent[key]
            self.arrival[key] = self.links[link] = max(self.links[link], self.arrival[key]) + seconds

    def exchange(self, rank: int, action: Action, free: float) -> tuple[float, float] | None:
        """An exchange begins when all have come to it; a launched one runs beside the work, one at a time on a rank."""
        _, kind, stage, number, _, _ = action
        launched = (stage, number, rank) in self.launched
        if kind == "G" or not launched:
            self.come[stage, number][rank] = free
        ranks = self.come[stage, number]
        if kind == "G" or len(ranks) < self.syncs[stage, number]:
            return (free, free) if kind == "G" else None
        if (stage, number) not in self.finish:
            begin = max([*ranks.values(), *(self.beside[other] for other in ranks if launched)])
            self.finish[stage, number] = begin + self.terms[stage]["exposed_sync_s"]
            self.beside.update({other: self.finish[stage, number] - self.beside[other] for other in ranks if launched})
        return free, max(free, self.finish[stage, number])

    def moving_s(self, stage: int) -> float:
        """The slowest way that evicted activations of a stage take to another rank."""
        pairs = {
            (rank, rank + int(action[5]))
            for line in self.schedule["orders"]
            for action in expand(line["actions"], 1)
            for rank in line["ranks"]
            if action[2] == stage and action[5]
        }
        return max((self.way_s(*pair, self.terms[stage]["unit_bytes"]) for pair in pairs), default=0.0)

    def way_s(self, rank: int, peer: int, moved_bytes: float) -> float:
        """Over the innermost level of links that joins two ranks."""
        size = 1
        for level in self.levels:
            size *= level["size"]
            if rank // size == peer // size:
                return float(level["latency_s"] + moved_bytes / level["device_byte_per_s"])
        return 0.0

    def in_flight(self) -> list[int]:
        """By stage the most micro-batches, or parts of them, that a rank keeps along its order, or may keep."""
        held, most = Counter[Any](), Counter[int]()
        for rank, lane in self.lanes:
            for _, kind, stage, *_ in lane:
                held[rank, stage] += (kind in ("F", "L")) - (kind in ("B", "W", "E"))
                most[stage] = max(most[stage], held[rank, stage])
        return list(self.schedule.get("limits") or [most[stage] for stage in range(len(self.terms))])


CYCLE = 24
"""A multiple of the iterations after which what goes on for ever repeats."""


def judged(text: str) -> tuple[float, list[int]]:
    """Seconds of an iteration, and micro-batches in flight by stage, from the text of a plan file."""
    plan = json.loads(text)
    once = Judge(plan)
    if not any("[" in line["actions"] for line in once.schedule["orders"]):
        begin, end = once.play()
        if once.schedule.get("spans"):
            return max(end[rank] - begin[rank] for rank in end), once.in_flight()
        return max(end.values()), once.in_flight()
    each = sum(len(b) - len(a) for (_, a), (_, b) in zip(once.lanes, Judge(plan, 2).lanes, strict=True))
    warm = CYCLE * max(2, 1000 // each)
    few, many = Judge(plan, warm), Judge(plan, warm + CYCLE)
    pace_s = (max(many.play()[1].values()) - max(few.play()[1].values())) / CYCLE
    for (_, less), (_, lane) in zip(few.lanes, many.lanes, strict=True):
        more = Counter(a[1:3] for a in lane)
        more.subtract(a[1:3] for a in less)
        kind = "G" if any(k == "G" and n for (k, _), n in more.items()) else "S"
        takes = [(n / CYCLE, many.terms[stage]) for (k, stage), n in more.items() if k == kind]
        hidden_s = [n * t["sync_s"] for n, t in takes if not t["exposed_sync_s"]]
        launched_s = sum(n * t["exposed_sync_s"] for n, t in takes) if kind == "G" else 0.0
        pace_s = max(pace_s, launched_s, *hidden_s)
    return pace_s, few.in_flight()
