"""One trace file as columns: what every reader returns and everything behind the readers works on."""

from dataclasses import dataclass, field

import numpy as np

LAST_US = 2.0**53  # later ones have no nanoseconds in 64 bits
DAYS_US = 1e12  # no capture lasts eleven days
LATE_US = 1e9  # where events are at a quarter of an hour and later, none is at or before 0
LONG_NS = 10_000_000  # shorter ones are not looked at
EARLY = 8  # kernels of one stream in the second half of another: more than begin early
SMALL = 0.25  # ranks of one model have about as many kernels each: what has less than this of the most is no rank
KERNEL, MEMCPY, MEMSET, OPERATOR = range(4)  # the column `kind`


@dataclass
class Trace:
    """One rank's events, sorted by start; times are integer nanoseconds.

    `start_ns` counts from `origin_ns` (absolute, or on the file's own clock when it has no base time). `name_id`
    indexes `names`; `stream` is a GPU stream (a thread for operators); `correlation` is the launch (a CUDA graph's
    kernels share one; -1 is unknown).
    `marks` are (annotation name, start_ns, end_ns) of the GPU's timeline, `cpu_marks` those of the CPU's.
    """

    path: str
    names: list = field(default_factory=list)
    name_id: np.ndarray = None
    start_ns: np.ndarray = None
    dur_ns: np.ndarray = None
    stream: np.ndarray = None
    correlation: np.ndarray = None
    kind: np.ndarray = None
    graph_node: np.ndarray = None  # node of a CUDA graph, -1 outside one; None where the file tells none
    origin_ns: int = 0
    marks: list = field(default_factory=list)
    cpu_marks: list = field(default_factory=list)
    launches: dict = field(default_factory=dict)  # correlation -> start on the CPU, ns; only where it was asked for
    meta: dict = field(default_factory=dict)  # rank, world_size, base_ns, process, whole_us
    losses: list = field(default_factory=list)
    truncated: bool = False
    is_cpu: bool = False

    def lose(self, kind, count, detail):
        """Count what was dropped, repaired or suspicious."""
        if count:
            self.losses.append(loss(self.path, kind, count, detail))


def loss(path, kind, count, detail):
    """One row of a result's `losses`."""
    return {"file": str(path), "kind": kind, "count": int(count), "detail": detail}


COLUMNS = ("name_id", "start_ns", "dur_ns", "stream", "correlation", "kind", "graph_node")


def take(trace, index):
    """Keep (and order) the rows of `index` in every column that is there."""
    for column in COLUMNS:
        if (values := getattr(trace, column)) is not None:
            setattr(trace, column, values[index])


def clean(trace, start_us, dur_us):
    """Turn float microseconds into sorted integer nanoseconds; set impossible times and duplicates aside, counted.

    Kineto's microseconds have three decimals and stay below 2**43 after its base time, where a double still tells
    the nearest nanosecond once a whole number of microseconds is taken off.
    """
    good = _plausible(trace, start_us, dur_us)
    if not good.all():
        start_us, dur_us = start_us[good], dur_us[good]
        take(trace, good)
    first = float(np.floor(start_us.min())) if len(start_us) else 0.0
    trace.origin_ns = int(first) * 1000 + (trace.meta.get("base_ns") or 0)
    trace.start_ns = to_ns(start_us, first)
    trace.dur_ns = to_ns(dur_us)
    del start_us, dur_us
    trace.lose("zero duration", np.count_nonzero(trace.dur_ns == 0), "kept: they count as calls and add no time")
    order = np.argsort(trace.start_ns, kind="stable")
    take(trace, order)
    del order
    _drop_duplicates(trace)
    _drop_overlong(trace)
    return first


def to_ns(us, first=0.0):
    """Microseconds with three decimals as integer nanoseconds after `first` (a whole number of microseconds)."""
    return np.rint((np.asarray(us, dtype=np.float64) - first) * 1000).astype(np.int64)


def _plausible(trace, start_us, dur_us):
    """Rows whose times can be true. A kernel may wait long for another rank, but not longer than the capture."""
    finite = np.isfinite(start_us) & np.isfinite(dur_us)
    trace.lose("no time", np.count_nonzero(~finite), "events without a usable ts or dur, set aside")
    negative = finite & (dur_us < 0)
    trace.lose("negative duration", np.count_nonzero(negative), "set aside")
    good = finite & ~negative
    if not good.any():
        return good
    middle = np.median(start_us[good])  # many may be absurd: these are, however many
    never = good & ((np.abs(start_us) > LAST_US) | (np.abs(start_us - middle) > DAYS_US))
    never |= good & (start_us <= 0) & (middle > LATE_US)
    usual = start_us[good & ~never] if (good & ~never).any() else start_us[good]
    lo, hi = np.percentile(usual, (5, 95) if len(usual) > 20 else (50, 50), method="nearest")
    extent = max(hi - lo, 1e6)
    far = never | good & ((start_us < lo - 5 * extent) | (start_us > hi + 5 * extent))
    zero = far & (start_us <= 0)
    trace.lose("zero or negative time", np.count_nonzero(zero), "set aside: a start at or before 0")
    trace.lose("absurd time", np.count_nonzero(far & ~zero), "set aside: a start far from all others")
    good &= ~far
    longest = max(float(np.ptp(start_us[good])), 1e6) if good.any() else 1e6
    absurd = good & (dur_us > longest)
    trace.lose("absurd duration", np.count_nonzero(absurd), "set aside: longer than the whole capture and than 1 s")
    return good & ~absurd


def _drop_overlong(trace):
    """A stream runs its kernels one after another (the next may begin a little early): one that others of its stream
    begin in until its end has not lasted so long."""
    impossible = []
    for i in np.flatnonzero((trace.kind != OPERATOR) & (trace.dur_ns > LONG_NS) & (trace.stream >= 0)):
        until = min(trace.start_ns[i] + trace.dur_ns[i], trace.start_ns[-1] + 1)
        middle, end = np.searchsorted(trace.start_ns, ((trace.start_ns[i] + until) // 2, until))
        others = (trace.stream[middle:end] == trace.stream[i]) & (trace.dur_ns[middle:end] <= LONG_NS)
        if np.count_nonzero(others) > EARLY:
            impossible.append(i)
    if impossible:
        trace.lose("absurd duration", len(impossible), "set aside: others of their stream begin before they end")
        keep = np.ones(len(trace.start_ns), bool)
        keep[impossible] = False
        take(trace, keep)


def _drop_duplicates(trace):
    """The same event twice: same start, duration, name, stream, launch and kind."""
    if len(trace.start_ns) < 2:
        return
    tied = np.flatnonzero(trace.start_ns[1:] == trace.start_ns[:-1])
    if not len(tied):
        return
    rows = np.unique(np.concatenate([tied, tied + 1]))
    columns = (getattr(trace, column) for column in COLUMNS)
    keys = np.stack([values[rows].astype(np.int64) for values in columns if values is not None])
    _, first = np.unique(keys, axis=1, return_index=True)
    if len(first) == len(rows):
        return
    keep = np.ones(len(trace.start_ns), bool)
    keep[np.delete(rows, first)] = False
    trace.lose("duplicate", len(rows) - len(first), "the same event twice, one kept")
    take(trace, keep)
