"""Reads a Kineto (torch.profiler) JSON trace, gzip or not, in one pass of bounded memory.

The file is decompressed in windows, cut at an event boundary and decoded by msgspec into the few members that matter.
A window that does not decode is split into events, and only an event that does not decode is repaired, or counted.
"""

import gc
import re
from contextlib import contextmanager

import numpy as np

from k25lib.errors import K25Error
from k25lib.trace import windows
from k25lib.trace.events import Columns, RawReader, Reader
from k25lib.trace.table import DAYS_US, SMALL, Trace, clean

ONE_CAPTURE_US = 60e6  # events further than this from the usual one are no part of it
EXACT_US = 2.0**43  # beyond it a double no longer tells nanoseconds in microseconds


@contextmanager
def _no_gc():
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def scan(path, operators=False, launches=False, device=None):
    """One pass over a file: its Columns. `operators` takes CPU operators instead of GPU events (for CPU traces),
    `launches` also the CPU time of every kernel launch; `device` leaves other GPUs' events out. Raises K25Error if the
    file holds no trace at all."""
    columns = Columns()
    blocks = windows.pieces(path, columns.warnings)
    bytes(31 << 20)  # glibc keeps free memory up to the largest block ever freed: windows are then not mapped anew
    with _no_gc():
        columns.head, tail = windows.open_events(path, blocks, columns.warnings)
        columns.offset_us = _offset_us(tail)
        windows.feed(blocks, tail, Reader(columns, operators, launches, columns.offset_us > 0, device))
    return columns


def _starts(text):
    """What the first events of a text have as `ts`, as it stands there, in order of time."""
    found = re.findall(rb'"ph"\s*:\s*"X".{0,4000}?"ts"\s*:\s*"?(\d+(?:\.\d+)?)', text, re.DOTALL)
    return sorted(found or re.findall(rb'"ts"\s*:\s*"?(\d+(?:\.\d+)?)', text), key=float)


def _offset_us(text):
    """A time near the events, where theirs are too late for doubles; else 0. One event's absurd time does not count."""
    starts = _starts(text)
    usual = starts[len(starts) // 2] if starts else b""
    return int(float(usual)) if b"." in usual and float(usual) > EXACT_US else 0


def raw_events(path, take):
    """Call `take(events)` with every window's events as dicts, their numbers exact where doubles would not be; returns
    the text before the first event."""
    columns = Columns()
    blocks = windows.pieces(path, columns.warnings)
    with _no_gc():
        columns.head, tail = windows.open_events(path, blocks, columns.warnings)
        windows.feed(blocks, tail, RawReader(columns, take, exact=_offset_us(tail) > 0))
    return columns.head


def peek(path):
    """What the start of a file tells, without reading it: path, rank, world_size, process, start_ns (of its earliest
    event that lies near the others). Raises K25Error if it is no trace."""
    columns = Columns()
    blocks = windows.pieces(path, columns.warnings)
    columns.head, tail = windows.open_events(path, blocks, columns.warnings)
    while len(tail) < windows.WINDOW_BYTES // 2 and (piece := next(blocks, None)):
        tail = b"".join([tail, *piece])
    blocks.close()
    trace = Trace(path=str(path))
    process = re.search(rb'"name"\s*:\s*"([^"]*Worker[^"]*)"', tail)
    columns.process = process[1].decode("utf-8", "replace") if process else None
    columns.foot = tail[-4096:] if len(tail) < windows.WINDOW_BYTES else b""
    _meta(trace, columns)
    starts = [int(float(text)) for text in _starts(tail)]
    near = [us for us in starts if abs(us - starts[len(starts) // 2]) < ONE_CAPTURE_US]
    start_ns = min(near, default=0) * 1000 + (trace.meta["base_ns"] or 0)
    return {"path": str(path), "start_ns": start_ns, **{k: trace.meta[k] for k in ("rank", "world_size", "process")}}


def read(path, launches=False, device=None):
    """One file as a Trace: its GPU events, or its CPU operators where there are none (`is_cpu`).

    `launches` also takes when each launch began on the CPU; `device` leaves the events of other GPUs out
    (`meta["devices"]` are all that have kernels). Raises K25Error if the file is no trace, or has neither GPU events
    nor operators.
    """
    columns = scan(path, launches=launches, device=device)
    trace = Trace(path=str(path), is_cpu=not columns.kind)
    if trace.is_cpu:
        columns = scan(path, operators=True)
    _meta(trace, columns)
    if device is not None:
        trace.meta |= {"device": device, "pid": None}
        others = sum(n for d, n in columns.devices.items() if d not in trace.meta["devices"])
        if device == trace.meta["devices"][0]:
            trace.lose("other device", others, "kernels of GPUs with too few for a rank, or of none: in no figure")
    _tell(trace, columns)
    if trace.is_cpu and re.search(rb'"deviceProperties"\s*:\s*\[\s*\{', columns.head + columns.foot):
        why = "the file is cut before them" if trace.truncated else "were they recorded?"
        trace.lose("no GPU events", 1, f"read as CPU operators, though the capture is of a GPU: {why}")
    if not columns.kind:
        what = "the file is cut before the first one" if trace.truncated else f"{columns.events} events in it"
        raise K25Error(f"{path} has neither GPU events nor CPU operators ({what}): was the profiler running?")
    ts, dur = np.frombuffer(columns.ts), np.frombuffer(columns.dur)
    trace.names = list(columns.name_ids)
    trace.name_id = np.frombuffer(columns.name_id, np.uint32)
    trace.stream = np.frombuffer(columns.stream, np.int64)
    trace.correlation = np.frombuffer(columns.correlation, np.int64)
    trace.kind = np.frombuffer(columns.kind, np.int8)
    is_sure = trace.meta["base_ns"] is None or len(ts) > 20  # a few may be whole by chance
    if is_sure and not columns.offset_us and _whole(ts) and _whole(dur):
        trace.lose(
            "precision", len(ts), "times are whole microseconds (old profiler): short kernels are off by up to 1 us"
        )
    first = clean(trace, ts, dur)
    trace.origin_ns += columns.offset_us * 1000
    lo, hi = (trace.start_ns[0], trace.start_ns[-1]) if len(trace.start_ns) else (0, 0)
    reach = max(int(hi - lo), 10**9)
    far = []
    for (on_gpu, name, _), (start, end) in sorted(columns.marks.items(), key=lambda item: item[1]):
        start, end = (start - first) * 1000, (end - first) * 1000
        if lo - reach <= start <= end <= hi + reach:
            marks = trace.marks if on_gpu else trace.cpu_marks
            marks.append((name, round(start), round(end)))
        else:
            far.append(name)
    trace.lose("absurd annotation", len(far), f"times far from every event, set aside: {', '.join(far[:3])}")
    trace.launches = {c: round((t - first) * 1000) for c, t in columns.launches.items() if abs(t - first) < DAYS_US}
    return trace


def _whole(values):
    return bool((np.floor(values) == values).all())


def _meta(trace, columns):
    text = columns.head + b"\n" + columns.foot
    info = re.search(rb'"distributedInfo"\s*:\s*\{', text)
    info = text[info.end() : info.end() + 4096] if info else b""

    def integer(key, where):
        found = re.search(b'"' + key + rb'"\s*:\s*"?(\d+)', where)
        return int(found[1]) if found else None

    trace.meta = {
        "rank": integer(b"rank", info),
        "world_size": integer(b"world_size", info),
        "base_ns": integer(b"baseTimeNanoseconds", text),
        "process": columns.process,
        "devices": sorted(
            d for d, n in columns.devices.items() if d >= 0 and n >= SMALL * max(columns.devices.values())
        ),
        "events": columns.events,
        "slow_windows": columns.slow_windows,
    }


def _tell(trace, columns):
    for kind, detail in columns.warnings:
        trace.lose(kind, 1, detail)
    trace.truncated = any(kind in ("truncated", "damaged gzip") for kind, _ in columns.warnings)
    trace.lose("second trace", columns.foot.count(b'"traceEvents"'), "another one follows in the same file: not read")
    trace.lose("repaired", columns.repaired, "events with damaged text, mended and used")
    detail = f"events that could not be read and are lost, {columns.unreadable_gpu} of them of the GPU"
    trace.lose("unreadable", columns.unreadable, detail)
