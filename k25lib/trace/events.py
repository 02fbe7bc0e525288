"""Windows of a Kineto trace decoded into columns, by msgspec; an event that does not decode is mended, or counted."""

import json
import re
from array import array
from collections import Counter
from decimal import Decimal
from enum import Enum
from typing import Annotated

import msgspec

from k25lib.trace.repair import first_object, integer, number, repaired
from k25lib.trace.table import KERNEL, MEMCPY, MEMSET, OPERATOR
from k25lib.trace.windows import BOUNDARY


class Cat(Enum):
    """The member `cat` of an event: decoding to one of a few objects is cheaper than to a string each time."""

    NONE, OTHER, ARROW, FRAME = "", " ", "ac2g", "python_function"
    KERNEL, COPY, SET, OPERATOR = "kernel", "gpu_memcpy", "gpu_memset", "cpu_op"
    OLD_KERNEL, OLD_COPY, OLD_SET = "Kernel", "Memcpy", "Memset"
    MARK, GPU_MARK = "user_annotation", "gpu_user_annotation"
    RUNTIME, DRIVER, HIP = "cuda_runtime", "cuda_driver", "hip_runtime"
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value):
        return cls.OTHER


KINDS = {Cat.KERNEL: KERNEL, Cat.OLD_KERNEL: KERNEL, Cat.OPERATOR: OPERATOR}
KINDS |= {Cat.COPY: MEMCPY, Cat.OLD_COPY: MEMCPY, Cat.SET: MEMSET, Cat.OLD_SET: MEMSET}
MARKS = {Cat.MARK, Cat.GPU_MARK}
LAUNCHES = {Cat.RUNTIME, Cat.DRIVER, Cat.HIP}

UNDECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_END = re.compile(rb"\}\s*,?\s*\]")
_LOOKS_GPU = rb'["\']cat["\']\s*:\s*["\'](?:kernel|gpu_mem|Kernel|Mem)'


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Args(msgspec.Struct, gc=False, frozen=True):
    stream: _Int64 = -1
    correlation: _Int64 = -1
    device: int = -1
    external: int = msgspec.field(name="External id", default=-1)
    name: str = ""


_NO_ARGS = _Args()
_NAN = float("nan")


class _Event(msgspec.Struct, gc=False):
    cat: Cat = Cat.NONE
    name: str = ""
    ts: float = _NAN
    dur: float = _NAN
    args: _Args = _NO_ARGS


class _OperatorEvent(_Event, gc=False):
    ph: str = "X"
    tid: int | str = 0


class _PlacedEvent(_Event, gc=False):
    pid: int | str = -1  # of the GPU's events, the device


class _ExactEvent(_Event, gc=False):
    ts: Decimal = Decimal("nan")


class _ExactPlacedEvent(_ExactEvent, gc=False):
    pid: int | str = -1


class _LooseEvent(_OperatorEvent, gc=False):
    pid: int | str = -1


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
        self.devices = Counter()  # of all kernels
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

    def mark(self, events):
        """Fold the pieces of annotations (one a stream on the GPU) by External id, or start where there is none."""
        marks = self.marks
        for event in events:
            start, number = event.ts, event.args.external
            end = start + event.dur
            key = (event.cat is Cat.GPU_MARK, event.name, number if number >= 0 else start)
            known = marks.get(key)
            if known is None:
                if end >= start:  # a negative or missing duration marks nothing
                    marks[key] = (start, end)
            elif start < known[0] or end > known[1]:
                marks[key] = (min(start, known[0]), max(end, known[1]))


class Reader:
    """Decodes windows of events into Columns; with `device`, of the GPU's events those of this one alone."""

    def __init__(self, columns, operators=False, launches=False, exact=False, device=None):
        event_type = _ExactEvent if exact else _OperatorEvent if operators else _Event
        event_type = event_type if device is None else _ExactPlacedEvent if exact else _PlacedEvent
        self.columns, self.operators, self.exact, self.device = columns, operators, exact, device
        self.decode = msgspec.json.Decoder(list[event_type]).decode
        self.decimal = Decimal if exact else None  # what the numbers of single events become
        self.wanted = {Cat.NONE} | MARKS | (set() if operators else KINDS.keys() - {Cat.KERNEL, Cat.OPERATOR})
        self.wanted |= LAUNCHES if launches else set()

    def window(self, *parts):
        """Take a window of whole events; returns True if the event array ended inside it."""
        try:
            events = self.decode(b"".join([b"[", *parts, b"]"]))
        except UNDECODED:
            self.columns.slow_windows += 1
            return self.slowly(b"".join(parts))
        self.take(events)
        return False

    def last(self, text):
        """Take the rest of the file; returns whether the array was closed."""
        for end in _END.finditer(text):
            body = text[: end.start() + 1]
            try:
                events = self.decode(b"[" + body + b"]")
            except UNDECODED:
                continue
            self.take(events)
            self.columns.repaired += b"," in end[0]
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
                event.ts = _after(event.ts, columns.offset_us)
        if self.operators:
            chosen = [e for e in events if e.cat is Cat.OPERATOR and e.ph == "X"]
            if chosen:
                columns.add(chosen, OPERATOR)
                # a thread stands where a stream does; a name is given a number of its own
                threads = [e.tid if isinstance(e.tid, int) else hash(e.tid) & 0x7FFFFFFF for e in chosen]
                columns.stream[-len(chosen) :] = array("q", threads)
        else:
            kernel = Cat.KERNEL
            chosen = [e for e in events if e.cat is kernel]
            if chosen:
                columns.devices.update([e.args.device for e in chosen])
                columns.add(self.here(chosen), KERNEL)
        wanted = self.wanted
        chosen = [e for e in events if e.cat in wanted]
        columns.mark([e for e in chosen if e.cat in MARKS and self.is_here(e)])
        copies = {}
        for event in chosen:
            cat = event.cat
            if cat in LAUNCHES:
                columns.launches[event.args.correlation] = event.ts
            elif cat in KINDS:
                copies.setdefault(KINDS[cat], []).append(event)
            elif event.name == "process_name" and ("Worker" in event.args.name or not columns.process):
                columns.process = event.args.name
        for kind, chosen in copies.items():
            columns.add(self.here(chosen), kind)

    def here(self, events):
        """Those of this reader's device."""
        return events if self.device is None else [e for e in events if e.args.device == self.device]

    def is_here(self, mark):
        return self.device is None or mark.cat is Cat.MARK or mark.pid == self.device

    def slowly(self, body, is_last=False):
        """Event by event. Returns whether the array ended in `body` (an end counts only after a whole event)."""
        start, closed, pieces = 0, False, []
        for boundary in BOUNDARY.finditer(body):
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
        rest = self.objects(text)
        at_end = is_last and index == len(pieces) - 1
        if not rest.strip(b", \r\n\t"):
            self.columns.repaired += 1  # nothing is lost but a comma
        elif not at_end or len(rest) < len(text):  # the cut event at the end of a cut file is told as `truncated`
            self.columns.unreadable += 1
            self.columns.unreadable_gpu += bool(re.search(_LOOKS_GPU, rest))
        return 1, begin + len(text) - len(rest) if at_end and b"]" in rest and len(rest) < len(text) else 0

    def objects(self, text):
        """Take the whole objects that a text begins with, one after another; returns what is behind them."""
        while True:
            whole, rest = first_object(text)
            if whole is None:
                return text
            self.take([self.event(whole)])
            text = rest

    def one(self, text, is_repaired=False):
        """Take one event's text, strictly or (when repaired) leniently; returns whether it was a whole event."""
        try:
            if is_repaired:
                raw = json.loads(text, strict=False, parse_float=self.decimal)
            else:
                raw = msgspec.json.Decoder(float_hook=self.decimal).decode(text)
        except (*UNDECODED, ValueError, ArithmeticError):
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
        cat = Cat(cat)
        event = _LooseEvent(cat=cat, name=name, ts=number(raw.get("ts")), dur=number(raw.get("dur")))
        event.ph = raw.get("ph", "X")
        event.tid, event.pid = (raw[k] if isinstance(raw.get(k), int | str) else -1 for k in ("tid", "pid"))
        event.args = _Args(
            integer(args.get("stream", raw.get("tid") if cat in KINDS else None)),
            integer(args.get("correlation")),
            integer(args.get("device")),
            integer(args.get("External id", args.get("external id"))),
            label if isinstance(label, str) else "",
        )
        if self.exact:
            ts = raw.get("ts")
            event.ts = ts if isinstance(ts, Decimal) else Decimal(ts.strip() if isinstance(ts, str) else event.ts)
        return event


def _after(ts, offset_us):
    try:
        return float(ts - offset_us)
    except ArithmeticError:  # beyond what a Decimal can be
        return _NAN


class RawReader(Reader):
    """Hands every event on as it stands in the file."""

    def __init__(self, columns, take, exact=False):
        super().__init__(columns, exact=exact)
        self.decode = msgspec.json.Decoder(list[dict], float_hook=self.decimal).decode
        self.take = take

    def event(self, raw):
        return raw
