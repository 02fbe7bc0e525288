"""Reads a Kineto (torch.profiler) JSON trace, gzip or not, in one pass of bounded memory.

The file is decompressed in windows, cut at an event boundary and decoded by msgspec into the few members that matter.
A window that does not decode is split into events, and only an event that does not decode is repaired, or counted.
"""

import gc
import json
import re
from array import array
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
from isal import isal_zlib

from k25lib.errors import K25Error
from k25lib.trace.table import Trace, clean

WINDOW_BYTES = 1 << 19  # the events of a window stay in the processor's cache
READ_BYTES = 1 << 14
LIMIT_BYTES = 16 << 20  # no header and no event is larger than this
EXACT_US = 2.0**43  # beyond it a double no longer tells nanoseconds in microseconds

NAMES = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}  # older spellings of `cat`
KINDS = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2, "cpu_op": 3}
MARKS = {"user_annotation", "gpu_user_annotation"}
LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime"}

_KEY = rb'"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args|tts|cname|sf)"\s*:'
_BOUNDARY = re.compile(rb"\}\s*,[\s,]*(?=\{\s*" + _KEY + rb")")
_NATIVE_BOUNDARY = b"},\n  {"
_END = re.compile(rb"\}\s*,?\s*\]")
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?:\([a-z]*\))?(?=\s*[,}\]])", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_TRAILING_COMMA = re.compile(rb",(\s*[}\]])")
_NAME = re.compile(rb'"name":\s*"(.*?)"(?=\s*[,}]\s*(?:"(?:pid|ph|cat|ts|tid|dur|args)"\s*:|$))', re.DOTALL)
_LOOKS_GPU = re.compile(rb'"cat":\s*"(?:kernel|gpu_mem|Kernel|Mem)')


class _Args(msgspec.Struct, gc=False, frozen=True):
    stream: int = -1
    correlation: int = -1
    external: int = msgspec.field(name="External id", default=-1)
    name: str = ""


_NO_ARGS = _Args()
_NAN = float("nan")


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    ts: float = _NAN
    dur: float = _NAN
    args: _Args = _NO_ARGS


class _OperatorEvent(_Event, gc=False):
    ph: str = "X"
    tid: int | str = 0


class _ExactEvent(_Event, gc=False):
    ts: Decimal = Decimal("nan")


class _Numbered(dict):
    """Gives each new key the next number."""

    def __missing__(self, key):
        self[key] = number = len(self)
        return number


class Columns:
    """What one pass collects, before times are checked: typed arrays, so that memory is some 36 bytes an event."""

    def __init__(self):
        self.name_ids = _Numbered()
        self.name_id, self.stream, self.correlation = array("I"), array("q"), array("q")
        self.ts, self.dur, self.kind = array("d"), array("d"), array("b")
        self.marks, self.launches, self.process = {}, {}, None
        self.head, self.foot = b"", b""
        self.repaired = self.unreadable = self.unreadable_gpu = self.slow_windows = self.events = 0
        self.offset_us = 0  # taken off every ts of an exact pass
        self.warnings = []

    def add(self, events, kind):
        """Append events of one kind, a column at a time (a call for each event would double the cost)."""
        number = self.name_ids
        self.name_id.fromlist([number[e.name] for e in events])
        self.ts.fromlist([e.ts for e in events])
        self.dur.fromlist([e.dur for e in events])
        args = [e.args for e in events]
        self.stream.fromlist([a.stream for a in args])
        self.correlation.fromlist([a.correlation for a in args])
        self.kind.fromlist([kind] * len(events))

    def mark(self, event):
        """Fold the pieces of one annotation (one a stream on the GPU) by its External id."""
        key = (event.cat, event.name, event.args.external if event.args.external >= 0 else float(event.ts))
        start, end = event.ts, event.ts + event.dur
        if end >= start:  # a negative or missing duration marks nothing
            known = self.marks.get(key, (start, end))
            self.marks[key] = (min(start, known[0]), max(end, known[1]))


@contextmanager
def _no_gc():
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def scan(path, operators=False, launches=False):
    """One pass over a file: its Columns. `operators` takes CPU operators instead of GPU events (for CPU traces);
    `launches` also takes the CPU time of every kernel launch. Raises K25Error if the file holds no trace at all."""
    pieces = _pieces(path, columns := Columns())
    bytes(31 << 20)  # glibc keeps free memory up to the largest block ever freed: windows are then not mapped anew
    with _no_gc():
        tail, _ = _open(path, pieces, columns)
        first = re.search(rb'"ts":\s*"?([\d.]{14,})', tail)
        exact = first and float(first[1]) > EXACT_US and b"." in first[1]
        if exact:
            columns.offset_us = int(float(first[1]))
        reader = _Reader(
            columns, operators, launches, _ExactEvent if exact else _OperatorEvent if operators else _Event
        )
        _events(pieces, tail, reader, columns)
    return columns


def _pieces(path, columns):
    """Lists of byte strings of about WINDOW_BYTES, from plain or (multi-member, padded, cut) gzip files."""
    try:
        file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - closed below, when the pieces are done
    except OSError as error:
        raise K25Error(f"cannot read {path}: {error.strerror}") from None
    with file:
        magic = file.read(2)
        file.seek(0)
        if magic != b"\x1f\x8b":
            while block := file.read(WINDOW_BYTES):
                yield [block]
            return
        member, block, done, size, in_member = isal_zlib.decompressobj(wbits=31), b"", [], 0, False
        while block := block or file.read(1 << 16):
            in_member = True
            try:
                out = member.decompress(block)
            except isal_zlib.error as error:
                columns.warnings.append(("damaged gzip", f"decompression stopped: {error}"))
                in_member = False
                break
            block = b""
            if member.eof:
                block = member.unused_data.lstrip(b"\0")
                member, in_member = isal_zlib.decompressobj(wbits=31), bool(block)
            done.append(out)
            size += len(out)
            if size >= WINDOW_BYTES:
                yield done
                done, size = [], 0
        if done:
            yield done
        if in_member:
            columns.warnings.append(("truncated", "the gzip stream ends early: events after that point are lost"))


def _open(path, pieces, columns):
    """Read up to the first event. Returns (bytes after the array's bracket, whether the file is a bare array)."""
    head = b""
    for piece in pieces:
        head = b"".join([head, *piece])
        text = head[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
        if text.startswith(b"["):
            return head[head.index(b"[") + 1 :], True
        if text and not text.startswith(b"{"):
            break
        key = head.find(b'"traceEvents"')
        bracket = head.find(b"[", key) if key >= 0 else -1
        if bracket >= 0:
            columns.head = head[:key]
            return head[bracket + 1 :], False
        if len(head) > LIMIT_BYTES:
            break
    if not head:
        raise K25Error(f"{path} is empty")
    reason = "; ".join(detail for _, detail in columns.warnings) or "no traceEvents in it"
    raise K25Error(f"{path} is not a Kineto trace ({reason})")


def _events(pieces, tail, reader, columns):
    closed = False
    for piece in pieces:
        last = piece[-1]
        cut = last.rfind(_NATIVE_BOUNDARY)
        if cut >= 0 and not closed:
            closed = reader.window(tail, *piece[:-1], last[: cut + 1])
            tail = last[cut + 2 :]
            continue
        tail = b"".join([tail, *piece])
        if closed:
            tail = tail[-LIMIT_BYTES:]
            continue
        boundaries = [m.span() for m in _BOUNDARY.finditer(tail, max(0, len(tail) - sum(map(len, piece)) - 64))]
        if boundaries:
            start, end = boundaries[-1]
            closed = reader.window(tail[: start + 1])
            tail = tail[end:]
        elif len(tail) > LIMIT_BYTES:
            columns.warnings.append(("truncated", "no event boundary in 16 MB: the rest of the file was not read"))
            return
    if closed:
        columns.foot += tail
        return
    if not reader.last(tail):
        columns.warnings.append(("truncated", "the event array is not closed: the file was cut, later events are lost"))


class _Reader:
    """Decodes windows of events into Columns."""

    def __init__(self, columns, operators, launches, event_type):
        self.columns, self.operators, self.launches = columns, operators, launches
        self.decode = msgspec.json.Decoder(list[event_type]).decode
        self.exact = event_type is _ExactEvent
        self.wanted = MARKS | (set() if operators else {"gpu_memcpy", "gpu_memset", *NAMES})
        self.wanted |= LAUNCHES if launches else set()

    def window(self, *parts):
        """Take a window of whole events; returns True if the event array ended inside it."""
        try:
            events = self.decode(b"".join([b"[", *parts, b"]"]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.columns.slow_windows += 1
            return self.slowly(b"".join(parts))
        self.take(events)
        return False

    def last(self, text):
        """Take the rest of the file; returns whether the array was closed."""
        for end in _END.finditer(text):
            body = text[: end.start() + 1]
            self.columns.repaired += b"," in end[0]
            try:
                events = self.decode(b"[" + body + b"]")
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self.take(events)
            self.columns.foot = text[end.end() :]
            return True
        if re.match(rb"[\s,]*\]", text):
            self.columns.foot = text
            return True
        return self.slowly(text, is_last=True)

    def take(self, events):
        columns = self.columns
        columns.events += len(events)
        if self.exact:
            for event in events:
                event.ts = float(event.ts - columns.offset_us)
        if self.operators:
            chosen = [e for e in events if e.cat == "cpu_op" and e.ph == "X"]
            if chosen:
                columns.add(chosen, KINDS["cpu_op"])
                # a thread stands where a stream does; a name is given a number of its own
                threads = [e.tid if isinstance(e.tid, int) else hash(e.tid) & 0x7FFFFFFF for e in chosen]
                columns.stream[-len(chosen) :] = array("q", threads)
        else:
            chosen = [e for e in events if e.cat == "kernel"]
            if chosen:
                columns.add(chosen, KINDS["kernel"])
        wanted = self.wanted
        copies = {}
        for event in [e for e in events if e.cat in wanted or (not e.cat and e.name == "process_name")]:
            cat = event.cat
            if cat in MARKS:
                columns.mark(event)
            elif cat in LAUNCHES:
                columns.launches[event.args.correlation] = event.ts
            elif not cat:
                if "Worker" in event.args.name or not columns.process:
                    columns.process = event.args.name
            else:
                copies.setdefault(KINDS[NAMES.get(cat, cat)], []).append(event)
        for kind, chosen in copies.items():
            columns.add(chosen, kind)

    def slowly(self, body, is_last=False):
        """Event by event. Returns whether the array ended in `body` (an end counts only after a whole event)."""
        start, closed, pieces = 0, False, []
        for boundary in _BOUNDARY.finditer(body):
            pieces.append((start, boundary.start() + 1))
            start = boundary.end()
        pieces.append((start, len(body)))
        index = 0
        while index < len(pieces) and not closed:
            begin, end = pieces[index]
            taken = 1
            text = body[begin:end].strip(b", \r\n\t")
            if text and not self.one(text):
                taken, closed = self.difficult(body, pieces, index, is_last)
                if closed:
                    self.columns.foot = body[closed:]
            index += taken
        return bool(closed)

    def difficult(self, body, pieces, index, is_last):
        """An event that does not decode: the array's end, nested objects that look like events, damage, or a cut."""
        begin, end = pieces[index]
        text = body[begin:end]
        for mark in _END.finditer(text):
            if self.one(text[: mark.start() + 1]) or self.one(repaired(text[: mark.start() + 1]), is_repaired=True):
                return len(pieces), begin + mark.end()
        if re.match(rb"[\s,]*\]", text):
            return len(pieces), begin + 1
        for more in range(1, min(8, len(pieces) - index)):
            if self.one(body[begin : pieces[index + more][1]]):
                return more + 1, 0
        if self.one(repaired(text.strip(b", \r\n\t")), is_repaired=True):
            return 1, 0
        if is_last and index == len(pieces) - 1:
            whole, rest = _first_object(text)
            if whole is None:
                return 1, 0  # the cut event at the end of a cut file is told as `truncated`
            self.take([self.event(whole)])
            self.columns.unreadable += 1
            return 1, begin + len(text) - len(rest) if b"]" in rest else 0
        self.columns.unreadable += 1
        self.columns.unreadable_gpu += bool(_LOOKS_GPU.search(text))
        return 1, 0

    def one(self, text, is_repaired=False):
        """Take one event's text, strictly or (when repaired) leniently; returns whether it was a whole event."""
        try:
            raw = json.loads(text, strict=False) if is_repaired else msgspec.json.decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        if not isinstance(raw, dict):
            return False
        if raw:
            self.take([self.event(raw)])
            self.columns.repaired += is_repaired
        return True

    def event(self, raw):
        """A typed event of a generic one; a member of the wrong type becomes its default, a time NaN."""
        args = raw.get("args") if isinstance(raw.get("args"), dict) else {}
        cat, name = (raw.get(key) if isinstance(raw.get(key), str) else "" for key in ("cat", "name"))
        label = args.get("name")
        event = _OperatorEvent(cat=cat, name=name, ts=_number(raw.get("ts")), dur=_number(raw.get("dur")))
        event.ph = raw.get("ph", "X")
        event.tid = raw.get("tid") if isinstance(raw.get("tid"), int | str) else 0
        event.args = _Args(
            _integer(args.get("stream", raw.get("tid") if cat in KINDS else None)),
            _integer(args.get("correlation")),
            _integer(args.get("External id", args.get("external id"))),
            label if isinstance(label, str) else "",
        )
        if self.exact:
            event.ts = Decimal(str(raw.get("ts"))) if event.ts == event.ts else Decimal("nan")
        return event


class _RawReader(_Reader):
    """Hands every event on as it stands in the file."""

    def __init__(self, columns, take):
        super().__init__(columns, False, False, _Event)
        self.decode = msgspec.json.Decoder(list[dict]).decode
        self.take = take

    def event(self, raw):
        return raw


def raw_events(path, take):
    """Call `take(events)` with every window's events as dicts; returns the text before the first event."""
    pieces = _pieces(path, columns := Columns())
    with _no_gc():
        tail, _ = _open(path, pieces, columns)
        _events(pieces, tail, _RawReader(columns, take), columns)
    return columns.head


def _first_object(text):
    """(The whole object that bytes begin with, the bytes after it), or (None, text): junk may follow an event."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text.decode("latin-1").lstrip())
    except (ValueError, RecursionError):
        return None, text
    return (value, text.lstrip()[end:]) if isinstance(value, dict) else (None, text)


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return _NAN


def _integer(value):
    try:
        return int(value) if abs(int(value)) < 2**62 else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def repaired(text):
    """One event's bytes with the known damages undone: bad UTF-8, bare NaN/inf, bad escapes, commas, bare quotes."""
    text = text.decode("utf-8", "replace").encode()
    text = _BAD_ESCAPE.sub(rb"\\\\", text)
    text = _TRAILING_COMMA.sub(rb"\1", _NOT_A_NUMBER.sub(rb"\1null", text))
    return _NAME.sub(lambda m: b'"name": "' + re.sub(rb'(?<!\\)"', rb"\\\"", m[1]) + b'"', text, count=1)


def peek(path):
    """What the start of a file tells, without reading it: path, rank, world_size, process, start_ns (of its first
    event). Raises K25Error if it is no trace."""
    pieces = _pieces(path, columns := Columns())
    tail, _ = _open(path, pieces, columns)
    while len(tail) < WINDOW_BYTES // 4 and (piece := next(pieces, None)):
        tail = b"".join([tail, *piece])
    pieces.close()
    trace = Trace(path=str(path))
    process = re.search(rb'"name"\s*:\s*"([^"]*Worker[^"]*)"', tail)
    columns.process = process[1].decode("utf-8", "replace") if process else None
    columns.foot = tail[-4096:] if len(tail) < WINDOW_BYTES else b""
    _meta(trace, columns)
    found = re.search(rb'"ph"\s*:\s*"X".{0,4000}?"ts"\s*:\s*"?(\d+)', tail, re.DOTALL) or re.search(
        rb'"ts"\s*:\s*"?(\d+)', tail
    )
    start_ns = (int(found[1]) * 1000 if found else 0) + (trace.meta["base_ns"] or 0)
    return {"path": str(path), "start_ns": start_ns, **{k: trace.meta[k] for k in ("rank", "world_size", "process")}}


def read(path, launches=False):
    """One file as a Trace: its GPU events, or its CPU operators where there are none (`is_cpu`).

    `launches` also takes when each launch began on the CPU. Raises K25Error if the file is no trace, or has neither GPU
    events nor operators.
    """
    columns = scan(path, launches=launches)
    trace = Trace(path=str(path), is_cpu=not columns.kind)
    if trace.is_cpu:
        columns = scan(path, operators=True)
    _meta(trace, columns)
    _tell(trace, columns)
    if not columns.kind:
        what = "the file is cut before the first one" if trace.truncated else f"{columns.events} events in it"
        raise K25Error(f"{path} has neither GPU events nor CPU operators ({what}): was the profiler running?")
    ts, dur = np.frombuffer(columns.ts), np.frombuffer(columns.dur)
    trace.names = list(columns.name_ids)
    trace.name_id = np.frombuffer(columns.name_id, np.uint32)
    trace.stream = np.frombuffer(columns.stream, np.int64)
    trace.correlation = np.frombuffer(columns.correlation, np.int64)
    trace.kind = np.frombuffer(columns.kind, np.int8)
    if trace.meta["base_ns"] is None and not columns.offset_us and _whole(ts) and _whole(dur):
        trace.lose(
            "precision", len(ts), "times are whole microseconds (old profiler): short kernels are off by up to 1 us"
        )
    first = clean(trace, ts, dur)
    trace.origin_ns += columns.offset_us * 1000
    lo, hi = (trace.start_ns[0], trace.start_ns[-1]) if len(trace.start_ns) else (0, 0)
    reach = max(int(hi - lo), 10**9)
    for (cat, name, _), (start, end) in sorted(columns.marks.items(), key=lambda item: item[1]):
        start, end = (np.array([start, end]) - first) * 1000
        if not lo - reach <= start <= end <= hi + reach:
            trace.lose("absurd annotation", 1, f"{name}: its times are far from every event, set aside")
            continue
        marks = trace.marks if cat.startswith("gpu") else trace.cpu_marks
        marks.append((name, round(start), round(end)))
    trace.launches = {c: round((t - first) * 1000) for c, t in columns.launches.items() if t == t}
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
        "events": columns.events,
        "slow_windows": columns.slow_windows,
    }


def _tell(trace, columns):
    for kind, detail in columns.warnings:
        trace.lose(kind, 1, detail)
    trace.truncated = any(kind in ("truncated", "damaged gzip") for kind, _ in columns.warnings)
    trace.lose("repaired", columns.repaired, "events with damaged text, mended and used")
    detail = f"events that could not be read and are lost, {columns.unreadable_gpu} of them of the GPU"
    trace.lose("unreadable", columns.unreadable, detail)
