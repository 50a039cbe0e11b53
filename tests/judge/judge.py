"""Step time and micro-batches in flight of a plan file, by docs/plan.md alone: nothing of the program is used."""

import json
import re
from collections import Counter

STEPS = r"([+-]\d+)?(?:s(-?\d+))?(?:u(-?\d+))?(?:v(-?\d+))?"
TOKEN = re.compile(rf"\(|\[|\)\*(\d+){STEPS}|\]{STEPS}|[^\s()\[\]]+")
WORD = re.compile(r"(\+?)([A-Z]+)(\d+)(?:\.(\d+)(?:-(\d+))?)?(?:/(\d+))?(?:@\d+)?(?:>([+-]\d+))?")
COUNTED = ("S", "G", "U")
NEEDS = {"B": "F", "I": "F", "W": "I", "R": "F", "SA": "F", "SG": "B", "E": "F", "L": "E"}


def raised(action, rise, times):
    """An action so many repetitions later; exchanges and updates have numbers of their own."""
    joined, kind, stage, number, part, offset = action
    step = rise[{"S": 1, "G": 1, "U": 2}.get(kind, 0)]
    return joined, kind, stage, None if number is None else number + step * times, part, offset


def expand(text, times):
    """The actions of a line, what stands in brackets so many times."""
    stack, behind = [[]], None
    for token in TOKEN.finditer(text):
        if token[0] in "([":
            stack.append([])
        elif token[0][0] in ")]":
            loop, body = token[0][0] == ")", stack.pop()
            rise = [int(x or usual) for x, usual in zip(token.groups()[1 if loop else 5 :], (1, 1, 1), strict=False)]
            stack[-1] += [raised(a, rise, i) for i in range(int(token[1]) if loop else times) for a in body]
            behind = behind if loop else (len(stack[-1]), rise)
        else:
            joined, kind, stage, low, high, part, offset = WORD.fullmatch(token[0]).groups()
            low = None if low is None else int(low)
            last = low if high is None else int(high)
            numbers = [None] if low is None else range(low, last + 1) if last >= low else range(low, last - 1, -1)
            stack[-1] += [(joined, kind, int(stage), n, int(part or 0), offset) for n in numbers]
    if behind:
        stack[0][behind[0] :] = [raised(a, behind[1], times - 1) for a in stack[0][behind[0] :]]
    return stack[0]


class Judge:
    """One plan, played with what stands in brackets so many times."""

    def __init__(self, plan, times=1):
        self.plan, self.schedule, self.terms = plan, plan["schedule"], plan["predictions"]["stages"]
        self.blocking = self.schedule.get("transfers", "blocking") == "blocking"
        self.parts = self.schedule.get("parts", 1)
        self.lanes = []
        for rank in sorted({group[0] for stage in plan["stages"] for group in stage["replicas"]}):
            for line in sorted(self.schedule["orders"], key=lambda line: line.get("lane", 0)):
                if rank in line["ranks"]:
                    first = line["first"][line["ranks"].index(rank)]
                    self.lanes.append((rank, [
                        (j, k, s, n if n is None or k in COUNTED else first + line["step"] * n, p, o)
                        for j, k, s, n, p, o in expand(line["actions"], times)
                    ]))  # fmt: skip
        self.where = {a[1:5]: rank for rank, lane in self.lanes for a in lane if a[1] not in COUNTED}
        self.repeats = any(key[0] == "R" for key in self.where)
        self.members = Counter((a[2], a[3]) for _, lane in self.lanes for a in lane if a[1] == "S")
        self.launched = {(a[2], a[3], rank) for rank, lane in self.lanes for a in lane if a[1] == "G"}

    def seconds(self, kind, stage):
        """How long an action works."""
        t = self.terms[stage]
        backward = t["backward_s"] - (t["recompute_s"] if self.repeats else 0.0)
        weight = (t["backward_s"] - t["recompute_s"]) / 2
        if self.schedule.get("side_by_side") and kind in "FB":
            return t["forward_s"] + backward
        times = {"F": t["forward_s"], "B": backward, "I": backward - weight, "W": weight, "R": t["recompute_s"]}
        return t["update_s"] if kind == "U" else times.get(kind, 0.0) / self.parts

    def source(self, kind, stage, m, part):
        """What makes the tensor that an action needs from a neighbour, and the time of the transfer."""
        if kind in ("F", "RA") and stage > 0:
            own, before, seconds = ("RA", stage, m, part), ("SA", "F"), self.terms[stage]["receive_s"]
            other = stage - 1
        elif kind in ("B", "I", "RG") and stage + 1 < len(self.terms):
            own, before, seconds = ("RG", stage, m, part), ("SG", "B", "I"), self.terms[stage + 1]["return_s"]
            other = stage + 1
        else:
            return None, 0.0
        if kind not in ("RA", "RG") and own in self.where:
            return None, 0.0
        made = next(key for key in ((k, other, m, part) for k in before) if key in self.where)
        away = self.where[made] != self.where[kind, stage, m, part]
        return made, seconds / self.parts if away else 0.0

    def waits(self, at, rank, action):
        """Times that an action must see; None as long as one of them is not known."""
        _, kind, stage, m, part, _ = action
        found = []
        made, _ = self.source(kind, stage, m, part)
        if made:
            found.append(self.arrival.get(made))
        own = "L" if ("L", stage, m, part) in self.where and kind in "BI" else NEEDS.get(kind)
        if kind == "SG" and ("I", stage, m, part) in self.where:
            own = "I"
        if own:
            found.append(self.own.get((own, stage, m, part)))
        if kind in "FL" and self.leaving.get(at):
            found.append(self.own[self.leaving[at]])
        if kind == "F" and self.schedule.get("limits"):
            begun, ended = self.begun[rank, stage], self.ended.setdefault((rank, stage), [])
            over = begun - self.schedule["limits"][stage]
            found += [ended[over] if over < len(ended) else None] if over >= 0 else []
        return None if None in found else max(found, default=0.0)

    def play(self):
        """Run every lane as far as it comes, again and again, until all have ended; seconds by rank of begin and end."""
        self.arrival, self.own, self.leaving, self.begun, self.ended = {}, {}, {}, Counter(), {}
        self.links, self.copiers, self.busy, self.come, self.windows = Counter(), Counter(), Counter(), {}, {}
        place, free, first, last = Counter(), Counter(), {}, {}
        moved = True
        while moved:
            moved = False
            for at, (rank, lane) in enumerate(self.lanes):
                while place[at] < len(lane):
                    stop = place[at] + 1
                    while stop < len(lane) and lane[stop][0]:
                        stop += 1
                    end = self.run(at, rank, lane[place[at] : stop], free[at])
                    if end is None:
                        break
                    first.setdefault(rank, end[0])
                    free[at] = last[rank] = max(end[1], last.get(rank, 0.0))
                    free[at], place[at], moved = end[1], stop, True
        assert all(place[at] == len(lane) for at, (_, lane) in enumerate(self.lanes)), "ranks wait for each other"
        return first, last

    def run(self, at, rank, group, free):
        """Begin and end of actions that run as one, None when something that they need is not there yet."""
        if group[0][1] in ("S", "G"):
            return self.exchange(rank, group[0], free)
        waits = [self.waits(at, rank, action) for action in group]
        if None in waits:
            return None
        start = max(free, *waits)
        end = start + sum(self.occupied(action) for action in group)
        for _, kind, stage, m, part, offset in group:
            key = kind, stage, m, part
            self.own[key], self.arrival[key] = self.made(kind, stage, start, end)
            if kind in "EL":
                begin = max(start, self.copiers[rank])
                self.own[key] = self.copiers[rank] = begin + self.moving_s(stage)
                self.leaving[at] = key if kind == "E" else None
            elif kind == "F":
                self.leaving[at] = None
                self.begun[rank, stage] += 1
            elif kind in "BW":
                self.ended.setdefault((rank, stage), []).append(end)
            self.send(key)
        return start, end

    def made(self, kind, stage, start, end):
        """When the rank itself and when its neighbours can use what an action makes."""
        if not self.schedule.get("streaming"):
            return end, end
        other = self.terms[stage]["backward_s" if kind == "F" else "forward_s"] / self.parts
        return end - self.seconds(kind, stage) if kind == "F" and stage + 1 == len(self.terms) else end, end - other

    def occupied(self, action):
        """How long a rank is busy with an action: its work and, where transfers block, those that it waits for."""
        _, kind, stage, m, part, _ = action
        seconds = self.seconds(kind, stage)
        if self.blocking and kind in ("F", "RA"):
            seconds += self.source(kind, stage, m, part)[1]
        if self.blocking and kind in ("B", "I", "SG") and stage > 0 and not (
            kind != "SG" and ("SG", stage, m, part) in self.where
        ):
            reader = next(k for k in ("RG", "B", "I") if (k, stage - 1, m, part) in self.where)
            seconds += self.source(reader, stage - 1, m, part)[1]
        return seconds

    def send(self, key):
        """Where transfers do not block: the link to the rank that reads it carries one after the other."""
        kind, stage, m, part = key
        if self.blocking or kind not in ("F", "SA", "B", "I", "SG"):
            return
        for reader in (("RA", stage + 1), ("F", stage + 1)) if kind in ("F", "SA") else (
            ("RG", stage - 1), ("B", stage - 1), ("I", stage - 1)
        ):
            target = (*reader, m, part)
            if target in self.where and self.source(*target)[0] == key:
                seconds = self.source(*target)[1]
                link = self.where[key], self.where[target]
                if seconds:
                    self.links[link] = self.arrival[key] = max(self.links[link], self.arrival[key]) + seconds

    def exchange(self, rank, action, free):
        """An exchange begins when all ranks have come to it; a launched one runs beside the work, one at a time."""
        _, kind, stage, number, _, _ = action
        beside = (stage, number, rank) in self.launched
        if kind == "G" or not beside:
            self.come.setdefault((stage, number), {})[rank] = free
        if kind == "G":
            return free, free
        ranks = self.come[stage, number]
        if len(ranks) < self.members[stage, number]:
            return None
        if (stage, number) not in self.windows:
            begin = max(ranks.values())
            if beside:
                begin = max(begin, *(self.busy[other] for other in ranks))
            finish = begin + self.terms[stage]["exposed_sync_s"]
            self.windows[stage, number] = finish
            if beside:
                self.busy.update({other: finish - self.busy[other] for other in ranks})
        return free, max(free, self.windows[stage, number])

    def moving_s(self, stage):
        """The slowest way that activations of a stage take to another rank."""
        found = 0.0
        for line in self.schedule["orders"]:
            for rank in line["ranks"]:
                for action in expand(line["actions"], 1):
                    if action[2] == stage and action[5]:
                        size, peer = 1, rank + int(action[5])
                        for level in self.plan["hardware"]["levels"]:
                            size *= level["size"]
                            if rank // size == peer // size:
                                moved = self.terms[stage]["unit_bytes"] / level["device_byte_per_s"]
                                found = max(found, level["latency_s"] + moved)
                                break
        return found

    def in_flight(self):
        """By stage the most micro-batches, or parts of them, that a rank keeps along its order."""
        if self.schedule.get("limits"):
            return self.schedule["limits"]
        most, held = Counter(), Counter()
        for rank, lane in self.lanes:
            for _, kind, stage, *_ in lane:
                held[rank, stage] += (kind in ("F", "L")) - (kind in ("B", "W", "E"))
                most[stage] = max(most[stage], held[rank, stage])
        return [most[stage] for stage in range(len(self.terms))]


def judged(text):
    """Seconds of a step and micro-batches in flight by stage, from the text of a plan file."""
    plan = json.loads(text)
    schedule = plan["schedule"]
    if not any("[" in line["actions"] for line in schedule["orders"]):
        judge = Judge(plan)
        first, last = judge.play()
        whole = max(last[rank] - first[rank] for rank in last) if schedule.get("spans") else max(last.values())
        return whole, judge.in_flight()
    once, twice = Judge(plan), Judge(plan, 2)
    each = sum(len(b) - len(a) for (_, a), (_, b) in zip(once.lanes, twice.lanes, strict=True))
    long = 24 * max(2, 1000 // each)
    few, many = Judge(plan, long), Judge(plan, long + 24)
    pace = (max(many.play()[1].values()) - max(few.play()[1].values())) / 24
    for (rank, lane), (_, less) in zip(many.lanes, few.lanes, strict=True):
        counts = Counter((a[1], a[2]) for a in lane)
        counts.subtract((a[1], a[2]) for a in less)
        kind = "G" if any(k == "G" for k, _ in counts) else "S"
        stages = {stage: n / 24 for (k, stage), n in counts.items() if k == kind}
        terms = many.terms
        if kind == "G":
            pace = max(pace, sum(n * terms[stage]["exposed_sync_s"] for stage, n in stages.items()))
        hidden = (n * terms[stage]["sync_s"] for stage, n in stages.items() if not terms[stage]["exposed_sync_s"])
        pace = max(pace, *hidden, 0.0)
    return pace, few.in_flight()
