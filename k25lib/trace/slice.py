"""One decode step of all ranks: as rows for a figure, or as a small file that Perfetto opens."""

import gzip
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np

from k25lib.errors import K25Error, UsageError
from k25lib.trace import files, kineto, nsys, ranks, steps
from k25lib.trace.categories import Categories
from k25lib.trace.table import loss

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CPU = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
MARK = "gpu_user_annotation"


_encode = msgspec.json.Encoder(decimal_format="number").encode


def lanes(paths, step=0, categories=None):
    """The kernels of every rank in the lowest rank's decode step number `step` (0 is the first whole one).

    Rows of dicts: rank, stream, start_us (from the first kernel on any rank), dur_us, name, category. For a CPU trace a
    stream is a thread.
    """
    rules, rows = Categories(categories), []
    for peek, trace, chosen, of, shift in _steps(paths, step, rules, []):
        for i in (of == chosen).nonzero()[0]:
            name = trace.names[trace.name_id[i]]
            category = "memcpy" if trace.kind[i] in (1, 2) else rules.category(name)
            row = {"rank": peek["rank"], "stream": int(trace.stream[i]), "name": name, "category": category}
            rows.append(
                row
                | {"start_us": trace.origin_ns - shift + int(trace.start_ns[i]), "dur_us": int(trace.dur_ns[i]) / 1e3}
            )
    first = min((row["start_us"] for row in rows), default=0)
    for row in rows:
        row["start_us"] = (row["start_us"] - first) / 1e3
    return rows


def cut(paths, step, target, losses=None):
    """Write the decode step number `step` (0 is the first whole one) of every rank to `target`, a .json or .json.gz
    for Perfetto: kernels, copies, their launches and the operators around them, flows whole. Returns events written;
    appends to `losses` (rows as of a breakdown) what is not in it."""
    target = Path(target)
    if not target.name.endswith((".json", ".json.gz")):
        raise UsageError(f"{target}: name the slice .json.gz (or .json)")
    if target.exists():
        raise UsageError(f"{target} is there already: name a file that is not")
    for path in filter(nsys.is_nsys, files.find_files(paths)[0]):
        raise UsageError(f"{path}: a slice is made of the torch profiler's traces; nsys-ui opens the report itself")
    parts, first = [], None
    for peek, trace, chosen, of, shift in _steps(paths, step, Categories(), [] if losses is None else losses):
        mine = (of == chosen).nonzero()[0]
        trace.origin_ns -= shift
        origin = trace.origin_ns
        begin = origin + int(trace.start_ns[mine[0]])
        end = origin + int((trace.start_ns[mine] + trace.dur_ns[mine]).max())
        first = begin if first is None else min(first, begin)
        launched = set() if trace.is_cpu else {int(c) for c in trace.correlation[mine] if c > 0}
        parts.append((peek, trace, shift, begin, end, launched))
    events = []
    for number, (peek, trace, shift, begin, end, launched) in enumerate(parts):
        events += _events(peek, number, trace, shift, begin, end, launched, first)
    body = b",\n".join(_encode(event) for event in events)
    text = b'{"schemaVersion":1,"displayTimeUnit":"ns","traceEvents":[\n' + body + b"\n]}\n"
    try:
        target.write_bytes(gzip.compress(text, 6, mtime=0) if target.name.endswith(".gz") else text)
    except OSError as error:
        raise K25Error(f"cannot write {target}: {error.strerror}") from None
    return len(events)


def _steps(paths, step, rules, losses):
    """For each rank of the newest session: (what is known of the file, its Trace, its pass at the time of the lowest
    rank's decode step, pass of every event, ns that its clock is ahead). An idle data-parallel rank's is a dummy pass.
    What is left out is told in `losses`."""
    peeks = []
    for path in files.find_files(paths)[0]:
        try:
            peeks += files.peek(path)
        except K25Error as error:
            losses.append(loss(path, "unreadable file", 1, str(error)))
    ranks.identify(peeks)
    if not peeks:
        why = "; ".join(told["detail"] for told in losses)
        raise K25Error(why or "a slice needs trace files; a profiler's text table has no times")
    sessions = ranks.sessions(peeks)
    if others := sum(map(len, sessions[:-1])):
        losses.append(loss(Path(peeks[0]["path"]).parent, "other sessions", others, "earlier ones: name their files"))
    lead = None
    for peek in sessions[-1]:
        try:
            trace = files.read(peek["path"], peek.get("device"), launches=True)
        except K25Error as error:
            losses.append(loss(peek["path"], "unreadable file", 1, str(error)))
            continue
        found = steps.find(trace, rules.category, lambda t=trace: t.launches)
        kind = "decode" if any(p.kind == "decode" for p in found.passes) else "decode_eager"
        decode = [i for i, p in enumerate(found.passes) if p.kind == kind]
        spans = np.array([(p.start_ns, p.end_ns) for p in found.passes], np.int64).reshape(-1, 2) + trace.origin_ns
        has_work = np.array([p.kernels > 0 for p in found.passes], bool)
        if lead is None:
            if not 0 <= step < len(decode):
                raise UsageError(f"no decode step {step} in {peek['path']}: it has {len(decode)}, numbered from 0")
            lead = spans[decode]
            yield peek, trace, decode[step], found.of, 0
            continue
        together = np.minimum(spans[:, 1], lead[step, 1]) - np.maximum(spans[:, 0], lead[step, 0])
        together = np.where(has_work, together, -1)
        if len(together) and together.max() > 0:
            yield peek, trace, int(together.argmax()), found.of, 0
        elif len(decode) == len(lead):  # on another clock: its n-th step is the n-th one
            shift = int(np.median(spans[decode, 1] - lead[:, 1]))
            detail = f"its clock is {shift / 1e6:.3f} ms ahead: taken off, and steps paired by their number"
            losses.append(loss(peek["path"], "clock", 1, detail))
            yield peek, trace, decode[step], found.of, shift
        else:
            detail = f"rank {peek['rank']} has no pass at the time of the step: left out"
            losses.append(loss(peek["path"], "missing ranks", 1, detail))
    if lead is None:
        raise K25Error("; ".join(told["detail"] for told in losses))


def _events(peek, number, trace, shift, begin, end, launched, first):
    """The raw events of one rank's step, on a clock that starts at `first`, with pids and flow ids of its own: each
    once, and of the GPU those that the reader took."""
    base, rank = (trace.meta["base_ns"] or 0) - shift, peek["rank"]
    chosen, names, flows, seen = [], {}, [], set()
    begun = [trace.origin_ns + ns for c, ns in trace.launches.items() if c in launched]
    window = (min(begun), max(begun)) if begun else (begin, end)  # of the CPU: from the first launch to the last
    near = (trace.start_ns >= begin - trace.origin_ns) & (trace.start_ns <= end - trace.origin_ns)
    taken = set(zip((trace.start_ns[near] + trace.origin_ns).tolist(), trace.dur_ns[near].tolist(), strict=True))

    def is_wanted(e, at):
        if e.get("ph") != "X":
            return e.get("ph") in ("s", "f", "t") and _number(e.get("id")) in launched
        if e.get("cat") in CPU:
            return window[0] <= at <= window[1] or _correlation(e) in launched
        return (at, _ns(e.get("dur"))) in taken if e.get("cat") in GPU else e.get("cat") == MARK and begin <= at <= end

    def take(events):
        for e in events:
            if e.get("ph") == "M":
                names[str(e.get("name")), str(e.get("pid")), str(e.get("tid"))] = e
                continue
            at = _ns(e.get("ts"))
            if at is None or not is_wanted(e, at + base) or (text := _encode(e)) in seen:
                continue
            seen.add(text)
            (chosen if e["ph"] == "X" else flows).append((e, at + base))

    kineto.raw_events(peek["path"], take)
    ends = {(_correlation(e), at) for e, at in chosen if e.get("cat") in GPU}
    starts = {_correlation(e) for e, _ in chosen if e.get("cat") in CPU}
    arrows = [(e, at) for e, at in flows if e["ph"] == "s" and e["id"] in starts]
    tied = {e["id"] for e, _ in arrows}
    arrows += [(e, at) for e, at in flows if e["ph"] != "s" and e["id"] in tied and (e["id"], at) in ends]
    used = {str(e.get("pid")) for e, _ in chosen}
    out = []
    for e in names.values():
        if str(e.get("pid")) in used:
            if e.get("name") == "process_name" and isinstance(e.get("args"), dict):
                e = e | {"args": {"name": f"rank {rank}: {e['args'].get('name', '')}"}}
            out.append(_moved(e, number, 0))
    return out + [_moved(e, number, at - first) for e, at in sorted(chosen + arrows, key=lambda pair: pair[1])]


def _ns(us):
    """Microseconds as they stand in an event, as integer nanoseconds; None for what is no time."""
    try:
        return round((Decimal(us.strip()) if isinstance(us, str) else us) * 1000)
    except (TypeError, ValueError, ArithmeticError):
        return None


def _number(value):
    return value if isinstance(value, int) else None


def _correlation(event):
    args = event.get("args")
    return _number(args.get("correlation")) if isinstance(args, dict) else None


def _moved(event, number, ns):
    """The event at another time; its pid and flow id are those of the file with this number."""
    moved = dict(event) | {"ts": ns / 1000}
    if isinstance(event.get("pid"), int):
        moved["pid"] = event["pid"] + number * 10_000_000
    if isinstance(event.get("id"), int):
        moved["id"] = event["id"] + number * 1_000_000_000
    return moved
