"""One file's decode steps in numbers: kernel sum, busy, span, idle, categories, exposed time, kernels, collectives."""

from dataclasses import dataclass

import numpy as np

from k25lib.trace import files, steps
from k25lib.trace.categories import Categories
from k25lib.trace.operators import own_time
from k25lib.trace.table import KERNEL, OPERATOR

CHUNK_ROWS = 1 << 17  # rows swept at once: memory stays flat however long the capture


@dataclass(frozen=True)
class _Batches:
    """The passes that are measured, grouped by their number of requests."""

    kind: str  # of the measured passes: decode, or decode_eager where no step was replayed as a graph
    known: list  # numbers of requests, ascending
    of: np.ndarray  # of each pass: the place of its batch in `known`, len(known) if it is not told, -1 if not measured

    @classmethod
    def of_passes(cls, passes):
        kind = "decode" if any(p.kind == "decode" for p in passes) else "decode_eager"
        known = sorted({p.batch for p in passes if p.kind == kind and p.batch is not None})
        place = {batch: i for i, batch in enumerate(known)}
        of = [place.get(p.batch, len(known)) if p.kind == kind else -1 for p in passes]
        return cls(kind, known, np.array(of, np.int64))

    @property
    def count(self):
        """How many groups there are: one a batch, and one for passes whose batch is not told."""
        return len(self.known) + 1

    def selections(self):
        """(batch or "all", its passes, its rows in tables of all groups), of those that have passes."""
        chosen = [("all", np.flatnonzero(self.of >= 0), slice(None))]
        chosen += [(b, np.flatnonzero(self.of == i), slice(i, i + 1)) for i, b in enumerate(self.known)]
        return [each for each in chosen if len(each[1])]


def measure(path, group="fine", user_rules=None, device=None):
    """One rank of a file -> plain dicts and small arrays; times are means per decode step in ms.

    `device` says which GPU; without it, only {"devices"} comes back of a Kineto file with kernels of several. Raises
    K25Error if the file has no events. Runs in a worker process, so what it returns is small.
    """
    rules = Categories(user_rules)
    trace = files.read(path, device)
    if device is None and len(devices := trace.meta["devices"]) > 1:
        return {"devices": devices}
    found = steps.find(trace, rules.category, lambda: files.read(path, device, launches=True).launches)
    passes = found.passes
    batches = _Batches.of_passes(passes)
    fine = [rules.category(name) for name in trace.names]
    labels = [rules.fold(category, group) for category in fine]
    categories = sorted(set(labels))
    category_of = np.array([categories.index(label) for label in labels], np.int64)

    work = np.flatnonzero(((trace.kind == KERNEL) | (trace.kind == OPERATOR)) & (found.of >= 0))
    if trace.is_cpu:
        own_ns, segments = own_time(trace.start_ns, trace.dur_ns, trace.stream)
    else:
        own_ns, segments = trace.dur_ns, None
    totals = _sweep(trace, found, work, segments, category_of, batches.of, batches.count, len(categories))
    of, own = found.of[work], own_ns[work]
    per_pass = _per_pass(trace, found, of, own, totals)
    measured = batches.of[of] >= 0
    name_id, own, group_of = trace.name_id[work[measured]], own[measured], batches.of[of[measured]]
    selections = batches.selections()
    cells = (*_cells(group_of, category_of[name_id], own, batches.count, len(categories)), totals["exposed"])
    calls, ns = (row[0] for row in _cells(np.zeros_like(group_of), name_id, own, 1, len(trace.names)))
    count = int((batches.of >= 0).sum())
    kernels = [
        {"name": trace.names[i], "category": labels[i], "fine": fine[i]} | _means(count, calls=calls[i], ms=ns[i] / 1e6)
        for i in np.argsort(-ns, kind="stable")
        if calls[i]
    ]
    return {
        "path": str(path),
        "meta": trace.meta,
        "losses": trace.losses,
        "kind": "cpu" if trace.is_cpu else "gpu",
        "found_by": found.found_by,
        "counts": found.counts(),
        "measured": batches.kind,
        "by_batch": {str(batch): len(members) for batch, members, _ in selections[1:]},
        "outside": found.outside,
        "per_step": [{"batch": batch, **_per_step(per_pass, passes, members)} for batch, members, _ in selections],
        "categories": _categories(categories, cells, selections, per_pass["kernel_sum"]),
        "kernels": kernels,
        "by_kind": _by_kind(per_pass, passes),
        "steps": _steps(per_pass, passes, trace.origin_ns),
        "collectives": _collectives(trace, found, rules, batches.of >= 0),
        "session": _session(trace, own_ns),
        "start_ns": trace.origin_ns + int(trace.start_ns[0]) if len(trace.start_ns) else 0,
        "end_ns": trace.origin_ns + int((trace.start_ns + trace.dur_ns).max()) if len(trace.start_ns) else 0,
    }


def _per_pass(trace, found, of, own, totals):
    """Numbers of every pass: its kernels, and ns of kernel sum, copies, start, end, busy and idle time.

    of, own: the pass and the own ns of each kernel (or operator) that belongs to a pass.
    """
    count = len(found.passes)
    return {
        "kernels": np.bincount(of, minlength=count),
        "kernel_sum": np.bincount(of, weights=own, minlength=count),
        "copies": _copies(trace, found),
        "start": np.array([p.start_ns for p in found.passes], np.int64),
        "end": np.array([p.end_ns for p in found.passes], np.int64),
        **{key: totals[key] for key in ("busy", "idle_in_graph", "idle")},
    }


def _categories(names, cells, selections, kernel_sum_ns):
    """Rows of a category in each selection, the largest first: calls, ms, exposed ms a step, percent of kernel time.

    cells: tables of calls, ns and exposed ns, groups of passes x categories; they add up to `kernel_sum_ns`, exactly.
    """
    rows = []
    for batch, members, which in selections:
        calls, ns, exposed = (table[which].sum(axis=0) for table in cells)
        assert int(ns.sum()) == int(kernel_sum_ns[members].sum()), "categories do not add up to the kernel sum"
        for i in np.argsort(-ns, kind="stable"):
            if calls[i]:
                percent = 100 * ns[i] / max(ns.sum(), 1)
                mean = _means(len(members), calls=calls[i], ms=ns[i] / 1e6, exposed_ms=exposed[i] / 1e6)
                rows.append({"batch": batch, "category": names[i], **mean, "percent": float(percent)})
    return rows


def _sweep(trace, found, work, segments, category_of, group_of, groups, categories):
    """Busy and idle ns of every pass, and the ns in which one category alone was running, by group of passes.

    All starts and ends in order: with `n` running, of category numbers summing to `a` and their squares to `b`, all are
    of one category exactly where n * b == a * a.
    """
    count = len(found.passes)
    out = {key: np.zeros(count) for key in ("busy", "idle", "idle_in_graph")}
    out["exposed"] = np.zeros(groups * categories)
    if segments is not None:
        row, start, end = segments
        keep = found.of[row] >= 0
        row, start, end = row[keep], start[keep], end[keep]
    else:
        row, start, end = work, trace.start_ns[work], trace.start_ns[work] + trace.dur_ns[work]
    of = found.of[row]
    if (np.diff(of) < 0).any():
        order = np.argsort(of, kind="stable")
        row, start, end, of = row[order], start[order], end[order], of[order]
    edges = np.flatnonzero(np.r_[True, of[1:] != of[:-1], True]) if len(of) else [0]
    begin = 0
    while begin < len(edges) - 1:
        stop = max(int(np.searchsorted(edges, edges[begin] + CHUNK_ROWS)), begin + 1)
        stop = min(stop, len(edges) - 1)
        part = slice(edges[begin], edges[stop])
        _sweep_part(out, row[part], start[part], end[part], of[part], found, trace, category_of, group_of, categories)
        begin = stop
    out["exposed"] = out["exposed"].reshape(groups, categories)
    return out


def _sweep_part(out, row, start, end, of, found, trace, category_of, group_of, categories):
    count = len(row)
    apart = (of - of[0]) * int(end.max() - start.min() + 1)  # passes may overlap a little; each is swept by itself
    time = np.concatenate([start + apart, end + apart])
    order = np.argsort(time, kind="stable")
    event = order % count
    category = category_of[trace.name_id[row]]
    packed = 1 + (category << 20) + (category * category << 40)  # three sums in one: 20 bits hold what runs at once
    sums = np.cumsum(np.concatenate([packed, -packed])[order])[:-1]
    running, numbers, squares = sums & 0xFFFFF, (sums >> 20) & 0xFFFFF, sums >> 40
    length = np.diff(time[order])
    here = of[event]
    for key, mask in (("busy", running > 0), ("idle", (running == 0) & (here[1:] == here[:-1]))):
        out[key] += np.bincount(here[:-1][mask], weights=length[mask], minlength=len(out[key]))
    graph = found.graph[row][event]
    inside = mask & (graph[1:] == graph[:-1]) & (graph[1:] >= 0)
    out["idle_in_graph"] += np.bincount(here[:-1][inside], weights=length[inside], minlength=len(out["idle"]))
    alone = (running > 0) & (running * squares == numbers * numbers) & (group_of[here[:-1]] >= 0)
    cell = group_of[here[:-1][alone]] * categories + numbers[alone] // running[alone]
    out["exposed"] += np.bincount(cell, weights=length[alone], minlength=len(out["exposed"]))


def _cells(group, item, ns, groups, items):
    """(calls, ns) tables of groups x items."""
    cell = group * items + item
    calls = np.bincount(cell, minlength=groups * items).reshape(groups, items)
    return calls, np.bincount(cell, weights=ns, minlength=groups * items).reshape(groups, items)


def _means(n, **totals):
    return {key: float(value) / n for key, value in totals.items()}


def _copies(trace, found):
    """ns of copies and sets of each pass: of those inside its own span where no annotation says it."""
    count = len(found.passes)
    rows = np.flatnonzero((trace.kind != KERNEL) & (trace.kind != OPERATOR))
    of = found.of[rows]
    if count and (of < 0).any():
        starts = np.array([p.start_ns for p in found.passes])
        ends = np.array([p.end_ns for p in found.passes])
        last = np.searchsorted(starts, trace.start_ns[rows], "right") - 1
        of = np.where((of < 0) & (last >= 0) & (trace.start_ns[rows] < ends[last]), last, of)
    return np.bincount(of[of >= 0], weights=trace.dur_ns[rows][of >= 0], minlength=count)


def _following(passes, members):
    """Pairs of consecutive decode steps with nothing between: the index of the first of each."""
    chosen = set(members.tolist())
    work = [i for i, p in enumerate(passes) if p.kernels]
    return [i for i, j in zip(work, work[1:], strict=False) if i in chosen and passes[j].kind == passes[i].kind], {
        i: j for i, j in zip(work, work[1:], strict=False)
    }


def _per_step(per_pass, passes, members):
    n = len(members)
    total = {key: float(per_pass[key][members].sum()) for key in per_pass}
    pairs, after = _following(passes, members)
    intervals = [passes[after[i]].start_ns - passes[i].start_ns for i in pairs]
    gaps = [passes[after[i]].start_ns - passes[i].end_ns for i in pairs]
    return {
        "steps": n,
        "kernels": total["kernels"] / n,
        "kernel_sum_ms": total["kernel_sum"] / n / 1e6,
        "busy_ms": total["busy"] / n / 1e6,
        "span_ms": (total["end"] - total["start"]) / n / 1e6,
        "interval_ms": float(np.mean(intervals)) / 1e6 if pairs else None,
        "idle_in_graph_ms": total["idle_in_graph"] / n / 1e6,
        "idle_in_step_ms": (total["idle"] - total["idle_in_graph"]) / n / 1e6,
        "idle_between_ms": float(np.mean(gaps)) / 1e6 if pairs else None,
        "copies_ms": total["copies"] / n / 1e6,
    }


def _by_kind(per_pass, passes):
    """Every kind of pass beside the decode steps: prefill is never divided by decode steps."""
    rows = []
    for kind in steps.KINDS:
        members = np.array([i for i, p in enumerate(passes) if p.kind == kind and p.kernels], np.int64)
        if len(members):
            row = _per_step(per_pass, passes, members)
            row["passes"] = row.pop("steps")
            row["graph_launches"] = float(np.mean([passes[i].launches for i in members]))
            rows.append({"kind": kind, **row})
    return rows


def _steps(per_pass, passes, origin_ns):
    """A row for each pass."""
    keys = {
        "kernel_sum": "kernel_sum_ms",
        "busy": "busy_ms",
        "copies": "copies_ms",
        "idle_in_graph": "idle_in_graph_ms",
    }
    return [
        {
            "step": i,
            "kind": p.kind,
            "batch": p.batch,
            "start_ns": origin_ns + p.start_ns,
            "kernels": p.kernels,
            "graph_launches": p.launches,
            "span_ms": (p.end_ns - p.start_ns) / 1e6,
            **{name: float(per_pass[key][i]) / 1e6 for key, name in keys.items()},
            "idle_in_step_ms": float(per_pass["idle"][i] - per_pass["idle_in_graph"][i]) / 1e6,
        }
        for i, p in enumerate(passes)
    ]


def _collectives(trace, found, rules, is_decode):
    """Every communication kernel of the session in time order: operation, start, duration, pass, in a decode step."""
    operations = [rules.operation(name) for name in trace.names]
    known = sorted({o for o in operations if o})
    number = np.array([known.index(o) if o else -1 for o in operations], np.int16)
    op = number[trace.name_id]
    rows = np.flatnonzero((op >= 0) & ((trace.kind == KERNEL) | (trace.kind == OPERATOR)))
    of = found.of[rows]
    return {
        "operations": known,
        "op": op[rows],
        "start_ns": trace.start_ns[rows] + trace.origin_ns,
        "dur_ns": trace.dur_ns[rows],
        "step": of,
        "decode": (of >= 0) & is_decode[of] if len(is_decode) else np.zeros(len(rows), bool),
    }


def _session(trace, own_ns):
    """Name -> (calls, ns) over the whole file: what the profiler's text table should say too."""
    calls, ns = _cells(np.zeros(len(own_ns), np.int64), trace.name_id, own_ns, 1, len(trace.names))
    return {name: (int(c), int(t)) for name, c, t in zip(trace.names, calls[0], ns[0], strict=True)}
