"""Which forward pass an event belongs to: by annotations, else by graph launches, else by the repeating period."""

from dataclasses import dataclass

import numpy as np

from k25lib.trace import annotations
from k25lib.trace.table import KERNEL, OPERATOR

KINDS = ("decode", "decode_eager", "prefill", "mixed", "dummy", "partial", "empty")


@dataclass
class Pass:
    """One forward pass: its kind, the number of requests (None: not known) and its span in ns."""

    kind: str
    batch: int | None
    start_ns: int = 0
    end_ns: int = 0
    kernels: int = 0
    launches: int = 0
    graph_share: float = 0.0
    is_cut: bool = False


@dataclass
class Steps:
    """`passes` in time order; `of[i]` is the pass of event i, or -1; `found_by` says how they were told apart."""

    found_by: str
    passes: list
    of: np.ndarray
    graph: np.ndarray  # number of the graph launch of event i, -1 where it has none of its own
    outside: int = 0  # kernels that no pass owns

    def counts(self):
        return {kind: sum(p.kind == kind for p in self.passes) for kind in KINDS}


def find(trace, category, launch_times=None):
    """The Steps of a Trace; `category(name)` is a kernel's.

    `launch_times()` gives correlation -> CPU time of its launch; called only where only the CPU is annotated.
    """
    graph, size = _graph_launches(trace)
    kernels = np.flatnonzero((trace.kind == KERNEL) | (trace.kind == OPERATOR))
    gpu_marks, cpu_marks = annotations.steps_of(trace.marks), annotations.steps_of(trace.cpu_marks)
    steps = None
    if gpu_marks or (cpu_marks and trace.is_cpu):
        marks = gpu_marks or cpu_marks
        steps = Steps(
            "annotations", [Pass(k, b, s, e) for k, b, s, e in marks], annotations.inside(marks, trace.start_ns), graph
        )
    elif cpu_marks and launch_times:
        at = launch_times()
        unique, which = np.unique(trace.correlation, return_inverse=True)
        of = annotations.inside(cpu_marks, np.array([at.get(int(c), -(2**62)) for c in unique], np.int64))[which]
        if (of >= 0).any():
            steps = Steps("annotations", [Pass(k, b, s, e) for k, b, s, e in cpu_marks], of, graph)
    if steps:
        _settle(steps)
        _measure(trace, steps, size)
        if _loose(trace, steps, kernels, size):
            _measure(trace, steps, size)
    else:
        period = _period(trace, kernels, category)
        steps = _by_graph(trace, kernels, graph, size, period) or _by_period(trace, kernels, graph, period)
        _measure(trace, steps, size)
    _classify(steps, trace)
    steps.outside = int(np.count_nonzero(steps.of[kernels] < 0))
    if trace.marks or trace.cpu_marks:
        told = sum(1 for kind, *_ in cpu_marks if kind == "empty")
        known = sum(p.kind == "empty" for p in steps.passes)
        end = int(trace.start_ns[-1]) if len(trace.start_ns) else 0
        steps.passes += [Pass("empty", 0, end, end) for _ in range(told - known)]
    return steps


def _graph_launches(trace):
    """(number of the launch, its kernels) of each event; -1 and 1 for kernels that were launched alone."""
    correlation = trace.correlation
    count = len(correlation)
    graph, size = np.full(count, -1, np.int64), np.ones(count, np.int64)
    if not count:
        return graph, size
    is_kernel = trace.kind == KERNEL
    change = np.flatnonzero(np.r_[True, (correlation[1:] != correlation[:-1]) | (is_kernel[1:] != is_kernel[:-1])])
    length = np.diff(np.r_[change, count])
    head = np.where(is_kernel[change], correlation[change], -1)
    unique, which = np.unique(head, return_inverse=True)
    total = np.bincount(which, weights=length).astype(np.int64)
    total[unique <= 0] = 1  # 0 and -1 mean that the launch is not known
    size = np.repeat(total[which], length)
    return np.where(size > 1, np.repeat(which, length), -1), size


def _settle(steps):
    """An annotated empty step that holds a pass all the same is an idle rank's."""
    counts = np.bincount(steps.of[steps.of >= 0], minlength=len(steps.passes))
    usual = np.median(counts[counts > 0]) if counts.any() else 0
    for p, n in zip(steps.passes, counts, strict=True):
        if p.kind == "empty" and n >= 0.25 * usual:
            p.kind = "dummy"


def _measure(trace, steps, size):
    """Kernels, launches, graph share and the GPU's own span of each pass."""
    chosen = np.flatnonzero((steps.of >= 0) & ((trace.kind == KERNEL) | (trace.kind == OPERATOR)))
    of, count = steps.of[chosen], len(steps.passes)
    kernels = np.bincount(of, minlength=count)
    in_graph = np.bincount(of[size[chosen] > 1], minlength=count)
    first, last = np.full(count, 2**62), np.full(count, -(2**62))
    np.minimum.at(first, of, trace.start_ns[chosen])
    np.maximum.at(last, of, trace.start_ns[chosen] + trace.dur_ns[chosen])
    heads = np.flatnonzero(np.r_[True, steps.graph[chosen][1:] != steps.graph[chosen][:-1]]) if len(chosen) else []
    pairs = {(int(of[i]), int(steps.graph[chosen[i]])) for i in heads if steps.graph[chosen[i]] >= 0}
    for i, p in enumerate(steps.passes):
        p.kernels, p.launches = int(kernels[i]), 0
        p.graph_share = in_graph[i] / kernels[i] if kernels[i] else 0.0
        if kernels[i]:
            p.start_ns, p.end_ns = int(first[i]), int(last[i])
    for i, _ in pairs:
        steps.passes[i].launches += 1


def _loose(trace, steps, kernels, size):
    """Kernels outside every annotation: whole passes of an idle rank, or a few kernels that belong to a neighbour.
    Returns whether there were any."""
    loose = kernels[steps.of[kernels] < 0]
    work = [p for p in steps.passes if p.kernels]
    usual = np.median([p.kernels for p in work] or [0])
    if not len(loose) or not usual:
        return False
    starts = np.array([p.start_ns for p in work])
    between = np.searchsorted(starts, trace.start_ns[loose], "right")  # how many passes have begun before
    own = np.where(steps.graph[loose] >= 0, np.bincount(steps.graph[loose] + 1)[steps.graph[loose] + 1], 0)
    biggest = size.max()
    whole = (own >= 0.5 * biggest) & (biggest >= 0.4 * usual)  # a graph launch that is a whole pass
    piece = np.where(whole, steps.graph[loose], -1)
    cuts = np.flatnonzero(np.r_[True, (between[1:] != between[:-1]) | (piece[1:] != piece[:-1])])
    crumbs = []
    for rows in np.split(loose, cuts[1:]):
        in_graph = piece[np.searchsorted(loose, rows[0])] >= 0
        if not in_graph and len(rows) < 0.25 * usual:
            crumbs.append(rows)
            continue
        at_edge = rows[0] == kernels[0] or rows[-1] == kernels[-1]
        cut = at_edge and len(rows) < 0.9 * (biggest if in_graph else usual)
        steps.of[rows] = len(steps.passes)
        end = int((trace.start_ns[rows] + trace.dur_ns[rows]).max())
        steps.passes.append(Pass("partial" if cut else "dummy", None, int(trace.start_ns[rows[0]]), end, len(rows)))
    order = sorted(range(len(steps.passes)), key=lambda i: steps.passes[i].start_ns)
    rank = np.empty(len(order) + 1, np.int64)
    rank[order], rank[-1] = np.arange(len(order)), -1
    steps.of, steps.passes = rank[steps.of], [steps.passes[i] for i in order]
    work = [i for i, p in enumerate(steps.passes) if p.kernels]
    starts = np.array([steps.passes[i].start_ns for i in work])
    pause = 0.1 * np.median([p.end_ns - p.start_ns for p in steps.passes if p.kernels])
    for rows in (part for crumb in crumbs for part in _parts(trace, crumb, pause)):
        place = int(np.searchsorted(starts, trace.start_ns[rows[0]], "right"))
        begin, end = int(trace.start_ns[rows[0]]), int(trace.start_ns[rows[-1]])
        near = [(work[i], steps.passes[work[i]]) for i in (place - 1, place) if 0 <= i < len(work)]
        distance, owner, p = min((max(begin - p.end_ns, p.start_ns - end, 0), i, p) for i, p in near)
        if distance < 0.5 * (p.end_ns - p.start_ns):
            steps.of[rows] = owner
    return True


def _parts(trace, rows, pause):
    """Events in time order, cut where none ran for longer than `pause` ns: an end of a pass, a start of another."""
    ends = np.maximum.accumulate(trace.start_ns[rows] + trace.dur_ns[rows])
    return np.split(rows, np.flatnonzero(trace.start_ns[rows][1:] - ends[:-1] > pause) + 1)


def _by_graph(trace, kernels, graph, size, period):
    """Steps from whole-step graph launches (a decode step is one). None where launches are pieces of a step."""
    biggest = size[kernels].max() if len(kernels) else 0
    if biggest < 2:
        return None
    big = (size[kernels] >= 0.5 * biggest) & (graph[kernels] >= 0)
    _, anchors = np.unique(graph[kernels][big], return_index=True)
    anchors = np.sort(np.flatnonzero(big)[anchors])
    if biggest < (0.5 * period[1] if period else 100):
        return None
    return _cut(trace, kernels, graph, anchors, "graph launches")


def _by_period(trace, kernels, graph, period):
    """Steps from the kernel that comes once a step."""
    if not period:
        return Steps("period", [], np.full(len(trace.start_ns), -1), graph)
    return _cut(trace, kernels, graph, period[0], "period")


def _period(trace, kernels, category):
    """(positions of a once-a-step kernel, kernels a step), or None if nothing repeats.

    Requests repeat, steps repeat in them and layers in those. A step is told by its sampling kernel; without one, by
    the longest distance that many names share (what comes once a request is rare).
    """
    names = trace.name_id[kernels]
    order = np.argsort(names, kind="stable")
    sampling, candidates = [], []
    for positions in np.split(order, np.flatnonzero(np.diff(names[order])) + 1):
        gaps = np.diff(positions)
        if not len(gaps):
            continue
        usual = float(np.median(gaps))
        if category(trace.names[names[positions[0]]]) == "sampling" and gaps.min() >= 0.25 * usual:
            sampling.append((len(positions), usual, positions))
        regular = np.abs(gaps - usual) <= 0.02 * usual
        if usual >= 50 and regular.mean() >= 0.7 and gaps[regular].sum() >= 0.5 * len(names):
            candidates.append((usual, positions))
    if sampling:
        _, usual, positions = max(sampling, key=lambda s: s[:2])
        return positions, usual
    if not candidates:
        return None
    support = [sum(abs(other - usual) <= 0.02 * usual for other, _ in candidates) for usual, _ in candidates]
    shared = [c for c, n in zip(candidates, support, strict=True) if n >= 0.3 * max(support)]
    longest = max(usual for usual, _ in shared)
    usual, positions = max((c for c in shared if c[0] >= 0.98 * longest), key=lambda c: len(c[1]))
    return positions, usual


def _cut(trace, kernels, graph, anchors, found_by):
    """Cut the kernels into passes at the widest idle gap near each anchor, at the distance that most steps have."""
    start, end = trace.start_ns[kernels], trace.start_ns[kernels] + trace.dur_ns[kernels]
    count = len(kernels)
    gap = np.r_[np.iinfo(np.int64).max, start[1:] - np.maximum.accumulate(end)[:-1]]
    windows = np.diff(anchors)
    usual = int(np.median(windows)) if len(windows) else count
    regular = np.abs(windows - usual) <= 0.02 * usual
    heads = [
        int(b - a - 1 - np.argmax(gap[a + 1 : b + 1]))
        for a, b in zip(anchors[:-1][regular], anchors[1:][regular], strict=True)
    ]
    head = int(np.median(heads)) if heads else 0
    one_pass = found_by == "period"  # every pass has the anchor; only decode steps have a whole-step graph
    if head > usual / 2 and one_pass:  # the anchor ends a pass: passes begin after it
        edges = [0, *(int(a) + usual - head for a in anchors)]
    else:
        edges = [max(int(a) - head, 0) for a in anchors]
        if edges and edges[0] > 0:
            edges.insert(0, 0)
    edges = sorted({e for e in edges if e < count} | {count})
    steps = Steps(found_by, [], np.full(len(trace.start_ns), -1), graph)
    is_anchor = np.zeros(count, bool)
    is_anchor[anchors] = True

    def add(begin, stop, kind):
        steps.of[kernels[begin:stop]] = len(steps.passes)
        steps.passes.append(Pass(kind, None))

    for begin, stop in zip(edges[:-1], edges[1:], strict=True):
        size, has_anchor = stop - begin, is_anchor[begin:stop].any()
        if abs(size - usual) <= (0.03 if one_pass else 0.08) * usual and has_anchor:
            add(begin, stop, "decode")
        elif size > usual and has_anchor and not one_pass:
            add(begin, begin + usual, "decode")
            add(begin + usual, stop, "prefill")
        else:
            add(begin, stop, "prefill" if size > usual or (size > 0.5 * usual and not has_anchor) else "partial")
    return steps


def _classify(steps, trace):
    """Tell eager decode steps from graph ones, and cut steps from whole ones."""
    has_launches = bool((trace.correlation > 0).any()) and not trace.is_cpu
    for p in steps.passes:
        if p.kind == "decode" and p.graph_share < 0.5 and has_launches:
            p.kind = "decode_eager"
    work = [p for p in steps.passes if p.kernels]
    decode = [p for p in work if p.kind in ("decode", "decode_eager")]
    sizes = {}
    for p in decode:
        sizes.setdefault((p.kind, p.batch), []).append(p.kernels)
    usual = {key: np.median(counts) for key, counts in sizes.items()}
    usual_of_all = np.median([p.kernels for p in decode] or [0])
    for p in decode:
        key = p.kind, p.batch
        strict = len(sizes[key]) > 2 and p.batch is not None  # enough of its own size to compare with
        at_edge = trace.truncated or p is work[0] or p is work[-1]
        share = (0.98 if strict else 0.8) if at_edge else 0.5
        p.is_cut = p.kernels < share * (usual[key] if strict else usual_of_all)
    for p in steps.passes:
        if p.kind in ("decode", "decode_eager") and (p.is_cut or not p.kernels):
            p.kind = "partial"
