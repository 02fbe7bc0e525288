"""Which rank and session a file is, and what collectives cost once the n-th call is paired across ranks."""

import re
from pathlib import Path

import numpy as np

_FIELD = r"(?i)(?<![a-z])(dp|pp|tp)[-_]?(\d+)(?!\d)"
_RANK = r"(?i)rank[-_]?(\d+)"
NEW_SESSION_NS = 50_000_000  # one process cannot start two captures within 50 ms: that is a copy, not a session
ONE_START_NS = 60_000_000_000  # all ranks of a session start within a minute
STEADY_NS = 20_000  # calls of one group end together, to within less
ONE_HOST_NS = 10_000_000_000  # files of other folders belong together only if they start within seconds


def fields(text):
    """The dp, pp, tp numbers in a file or process name, e.g. {"dp": 0, "tp": 1}; empty if it has none."""
    return {name.lower(): int(number) for name, number in re.findall(_FIELD, text)}


def place(m):
    """The dp, pp, tp numbers of one rank's file: as its peek knows them (`place`), else those in the file's name."""
    return m.get("place") or fields(Path(m["path"]).name)


def identify(peeks):
    """Set `rank` and `rank_from` of every peek (dicts with path, rank, process): distributedInfo, else the name's
    dp/pp/tp fields, else those of the process's name, else `rankN` in the name, else the order of the files.

    Where distributedInfo gives one rank to files whose names have other fields (each replica counts from 0), the names
    decide. `doubt` says where the two contradict each other.
    """
    places = {}
    for p in peeks:
        p["doubt"] = ""
        if "tp" in (named := fields(Path(p["path"]).name)):
            places.setdefault(p["rank"], set()).add(tuple(sorted(named.items())))
    if any(len(found) > 1 for rank, found in places.items() if rank is not None):
        for p in (p for p in peeks if p["rank"] is not None and "tp" in fields(Path(p["path"]).name)):
            p["doubt"] = f"distributedInfo gives rank {p['rank']} to several: the name decides"
            p["rank"] = None
    unknown = [p for p in peeks if p["rank"] is None]
    for p in peeks:
        p.setdefault("rank_from", "distributedInfo")
    sources = (("file name", lambda p: Path(p["path"]).name), ("process name", lambda p: p["process"] or ""))
    for source, text in sources:
        sizes = {k: 1 + max((fields(text(p)).get(k, 0) for p in peeks), default=0) for k in ("dp", "pp", "tp")}
        for p in unknown:
            named = fields(text(p))
            number = re.search(_RANK, text(p))
            if p["rank"] is None and "tp" in named:
                place = [named.get(k, 0) for k in ("dp", "pp", "tp")]
                p["rank"] = (place[0] * sizes["pp"] + place[1]) * sizes["tp"] + place[2]
            elif p["rank"] is None and number and source == "file name":
                p["rank"] = int(number[1])
            else:
                continue
            p["rank_from"] = source
    if all(set(fields(Path(p["path"]).name).items()) >= {("dp", 0), ("pp", 0)} for p in peeks):  # rank and tp are one
        for p in (p for p in peeks if p["rank_from"] == "distributedInfo"):
            if (named := fields(Path(p["path"]).name).get("tp", p["rank"])) != p["rank"]:
                p["doubt"] = f"the name says rank {named}, distributedInfo {p['rank']}: distributedInfo is believed"
    for i, p in enumerate(unknown):
        if p["rank"] is None:
            p["rank"], p["rank_from"] = i, "nothing: numbered in order"


def sessions(peeks):
    """Files grouped into captures: by folder, then by start; one rank has one file in a session (or a clash). Folders
    with other ranks of the same start are one capture (a folder a host)."""
    groups = []
    for folder in sorted({str(Path(p["path"]).parent) for p in peeks}):
        members = [p for p in peeks if str(Path(p["path"]).parent) == folder]
        current = []
        for p in sorted(members, key=lambda p: p["start_ns"]):
            again = any(q["rank"] == p["rank"] and p["start_ns"] - q["start_ns"] > NEW_SESSION_NS for q in current)
            if current and (again or p["start_ns"] - current[0]["start_ns"] > ONE_START_NS):
                groups.append(current)
                current = []
            current.append(p)
        groups.append(current)
    merged = []
    for group in sorted(groups, key=lambda group: group[0]["start_ns"]):
        last = merged[-1] if merged else []
        near = last and group[0]["start_ns"] - last[0]["start_ns"] < ONE_HOST_NS
        if near and not {p["rank"] for p in last} & {p["rank"] for p in group}:
            last += group
        else:
            merged.append(group)
    return [sorted(group, key=lambda p: (p["rank"], p["path"])) for group in merged]


def pair(measured):
    """Collectives of ranks (outputs of decode.measure with `rank`): (rows per operation, rows per rank, losses).

    The n-th call of an operation is one call of all ranks of its group. It has moved its data when the last rank has
    come and the transfer is over, so the transfer is the shortest of the paired calls; the rest of a longer call is
    waiting. Times are ms per decode step of the rank (a mean over ranks in the rows per operation).
    """
    rows, skew, losses = [], [], []
    for op in sorted({o for m in measured for o in m["collectives"]["operations"]}):
        calls = [_calls(m, op) for m in measured]
        paired, note = _match(calls, measured) if len(measured) > 1 else (None, "one rank: waiting cannot be told")
        if note and len(measured) > 1:
            losses.append({"file": "", "kind": "collectives", "count": 1, "detail": f"{op}: {note}"})
        own = []
        for i, m in enumerate(measured):
            steps = m["per_step"][0]["steps"] if m["per_step"] else 0
            if not steps:
                continue
            start, dur, decode = calls[i]
            row = {"rank": m["rank"], "op": op, "calls": np.count_nonzero(decode) / steps}
            row["ms"] = float(dur[decode].sum()) / steps / 1e6
            row |= dict.fromkeys(("wait_ms", "transfer_ms", "late_us", "clock_us"))
            if paired is not None:
                transfer, first, clock, has_pair = paired[i]
                use = decode & has_pair
                if use.any() and use.sum() >= 0.5 * decode.sum():
                    _split(row, float(transfer[use].sum()), float(dur[use].sum()))
                    row["late_us"] = float((start[use] - first[use]).mean()) / 1e3
                    row["clock_us"] = clock / 1e3
            own.append(row)
        if any(row["calls"] for row in own):
            skew += own
            mean = {"op": op, **{key: float(np.mean([row[key] for row in own])) for key in ("calls", "ms")}}
            mean |= dict.fromkeys(("wait_ms", "transfer_ms"))
            if split := [row for row in own if row["transfer_ms"] is not None]:
                _split(mean, sum(row["transfer_ms"] for row in split), sum(row["ms"] for row in split))
            rows.append(mean)
    return rows, skew, losses


def _split(row, transfer, whole):
    """Split the row's `ms` as `transfer` and the rest of `whole` are: calls and ranks without a partner are taken like
    the others."""
    row["transfer_ms"] = row["ms"] * transfer / whole if whole else 0.0
    row["wait_ms"] = max(0.0, row["ms"] - row["transfer_ms"])


def _calls(m, op):
    collectives = m["collectives"]
    if op not in collectives["operations"]:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)
    chosen = collectives["op"] == collectives["operations"].index(op)
    return tuple(collectives[key][chosen] for key in ("start_ns", "dur_ns", "decode"))


def _match(calls, measured):
    """For each rank (transfer ns, earliest start, clock error ns, has a partner) of its calls, and a note on doubts."""
    everyone = list(range(len(calls)))
    groups = [everyone]
    if not _overlap(calls, everyone):  # perhaps one group for each data-parallel replica, or pipeline stage
        places = [tuple(place(m).get(k, 0) for k in ("dp", "pp")) for m in measured]
        split = [[i for i in everyone if places[i] == place] for place in sorted(set(places))]
        if len(split) > 1 and all(_overlap(calls, group) for group in split if len(group) > 1):
            groups = split
    out, notes = [None] * len(calls), set()
    for group in groups:
        counts = {len(calls[i][0]) for i in group}
        if len(counts) == 1:
            index = {i: np.arange(len(calls[i][0])) for i in group}
        else:
            index = _by_end(calls, group)
            n = len(index[group[0]])
            notes.add(
                f"unequal counts over the ranks ({', '.join(str(len(calls[i][0])) for i in group)}); {n} paired by time"
            )
        starts = np.stack([calls[i][0][index[i]] for i in group])
        durs = np.stack([calls[i][1][index[i]] for i in group])
        ends = starts + durs
        clock = [float(np.median(ends[k] - ends[0])) if ends.shape[1] else 0.0 for k in range(len(group))]
        if max(map(abs, clock), default=0) > 100_000:
            notes.add(
                f"calls end up to {max(map(abs, clock)) / 1e3:.0f} us apart: clocks differ, or it is not one group"
            )
        starts = starts - np.round(clock).astype(np.int64)[:, None]
        for k, i in enumerate(group):
            n = len(calls[i][0])
            transfer, first, has_pair = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, bool)
            if len(group) > 1:
                transfer[index[i]], has_pair[index[i]] = durs.min(axis=0), True
                first[index[i]] = starts.min(axis=0) + round(clock[k])
            out[i] = (transfer, first, clock[k], has_pair)
    return out, "; ".join(sorted(notes))


def _overlap(calls, group):
    """Whether the n-th calls can be one call: equal counts, and all are running at one moment in most of them."""
    if len({len(calls[i][0]) for i in group}) != 1:
        return False
    starts, durs = (np.stack([calls[i][k] for i in group]) for k in (0, 1))
    ends = starts + durs
    ends = ends - np.median(ends - ends[0], axis=1, keepdims=True) if ends.shape[1] else ends
    return bool((starts.max(axis=0) <= ends.min(axis=0)).mean() >= 0.5) if ends.shape[1] else True


def _by_end(calls, group):
    """Indices of calls that every rank of the group has: those that end nearest to each other, both ways."""
    ends = {i: calls[i][0] + calls[i][1] for i in group}
    reference = min(group, key=lambda i: len(ends[i]))
    keep = np.ones(len(ends[reference]), bool)
    match = {reference: np.arange(len(ends[reference]))}
    for i in group:
        if i == reference or not len(ends[reference]):
            match.setdefault(i, np.zeros(0, np.int64))
            continue
        own = ends[i] - _ahead(ends[i], ends[reference])
        there, back = _nearest(own, ends[reference]), _nearest(ends[reference], own)
        match[i] = there
        keep &= back[there] == np.arange(len(there))
    return {i: match[i][keep] for i in group}


def _ahead(ends, others):
    """ns that a clock is ahead of another's: of the runs of `ends` as long as `others`, that of the steadiest distance
    (and of those as steady, the least); 0 where none is steady, as calls are missing in between."""
    some = np.unique(np.linspace(0, len(others) - 1, 128).astype(np.int64))
    apart = np.stack([ends[some + k] - others[some] for k in range(len(ends) - len(others) + 1)])
    middle = np.median(apart, axis=1)
    off = np.abs(apart - middle[:, None])
    best = np.lexsort((np.abs(middle), np.round(off.mean(axis=1))))[0]
    return round(middle[best]) if np.median(off[best]) < STEADY_NS else 0


def _nearest(values, targets):
    """For each target the index of the nearest of the sorted values."""
    right = (
        np.clip(np.searchsorted(values, targets), 1, len(values) - 1)
        if len(values) > 1
        else np.zeros(len(targets), int)
    )
    left = np.maximum(right - 1, 0)
    return np.where(targets - values[left] <= values[right] - targets, left, right)
