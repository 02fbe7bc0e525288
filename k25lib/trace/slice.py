"""One decode step of all ranks: as rows for a figure, or as a small file that Perfetto opens."""

import gzip
from pathlib import Path

import msgspec

from k25lib.errors import K25Error, UsageError
from k25lib.trace import files, kineto, nsys, ranks, steps
from k25lib.trace.categories import Categories

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CPU = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")


def lanes(paths, step=0, categories=None):
    """The kernels of every rank in the lowest rank's decode step number `step` (0 is the first whole one).

    Rows of dicts: rank, stream, start_us (from the first kernel on any rank), dur_us, name, category. For a CPU trace a
    stream is a thread.
    """
    rules, rows = Categories(categories), []
    for peek, trace, chosen, of in _steps(paths, step, rules):
        for i in (of == chosen).nonzero()[0]:
            name = trace.names[trace.name_id[i]]
            category = "memcpy" if trace.kind[i] in (1, 2) else rules.category(name)
            row = {"rank": peek["rank"], "stream": int(trace.stream[i]), "name": name, "category": category}
            rows.append(
                row | {"start_us": trace.origin_ns + int(trace.start_ns[i]), "dur_us": int(trace.dur_ns[i]) / 1e3}
            )
    first = min((row["start_us"] for row in rows), default=0)
    for row in rows:
        row["start_us"] = (row["start_us"] - first) / 1e3
    return rows


def cut(paths, step, target):
    """Write the decode step number `step` (0 is the first whole one) of every rank to `target`, a .json or .json.gz
    for Perfetto: kernels, copies, their launches and the operators around them, flows whole. Returns events written."""
    target = Path(target)
    if not target.name.endswith((".json", ".json.gz")):
        raise UsageError(f"{target}: name the slice .json.gz (or .json)")
    if target.exists():
        raise UsageError(f"{target} is there already: name a file that is not")
    for path in filter(nsys.is_nsys, files.find_files(paths)[0]):
        raise UsageError(f"{path}: a slice is made of the torch profiler's traces; nsys-ui opens the report itself")
    parts, first = [], None
    for peek, trace, chosen, of in _steps(paths, step, Categories()):
        mine = (of == chosen).nonzero()[0]
        origin = trace.origin_ns
        begin = origin + int(trace.start_ns[mine[0]])
        end = origin + int((trace.start_ns[mine] + trace.dur_ns[mine]).max())
        first = begin if first is None else min(first, begin)
        launched = set() if trace.is_cpu else {int(c) for c in trace.correlation[mine] if c > 0}
        parts.append((peek, trace, begin, end, launched))
    events = []
    for peek, trace, begin, end, launched in parts:
        events += _events(peek, trace, begin, end, launched, first)
    body = b",\n".join(msgspec.json.encode(event) for event in events)
    text = b'{"schemaVersion":1,"displayTimeUnit":"ns","traceEvents":[\n' + body + b"\n]}\n"
    try:
        target.write_bytes(gzip.compress(text, 6, mtime=0) if target.name.endswith(".gz") else text)
    except OSError as error:
        raise K25Error(f"cannot write {target}: {error.strerror}") from None
    return len(events)


def _steps(paths, step, rules):
    """For each rank of the newest session: (what is known of the file, its Trace, its pass at the time of the lowest
    rank's decode step, pass of every event). An idle data-parallel rank's is a dummy pass."""

    def overlap(trace, p):
        return (
            min(trace.origin_ns + p.end_ns, lead[1]) - max(trace.origin_ns + p.start_ns, lead[0]) if p.kernels else -1
        )

    traces, _ = files.find_files(paths)
    peeks = [known for path in traces for known in files.peek(path)]
    ranks.identify(peeks)
    if not peeks:
        raise K25Error("a slice needs trace files; a profiler's text table has no times")
    lead = None
    for peek in ranks.sessions(peeks)[-1]:
        trace = files.read(peek["path"], peek.get("device"), launches=True)
        found = steps.find(trace, rules.category, lambda t=trace: t.launches)
        kind = "decode" if any(p.kind == "decode" for p in found.passes) else "decode_eager"
        decode = [i for i, p in enumerate(found.passes) if p.kind == kind]
        if not lead and not 0 <= step < len(decode):
            raise UsageError(f"no decode step {step} in {peek['path']}: it has {len(decode)}, numbered from 0")
        chosen = (
            decode[step] if not lead else max(range(len(found.passes)), key=lambda i: overlap(trace, found.passes[i]))
        )
        if lead and overlap(trace, found.passes[chosen]) <= 0:
            continue
        lead = lead or (trace.origin_ns + found.passes[chosen].start_ns, trace.origin_ns + found.passes[chosen].end_ns)
        yield peek, trace, chosen, found.of


def _events(peek, trace, begin, end, launched, first):
    """The raw events of one rank's step, on a clock that starts at `first`, with pids and flow ids of its own."""
    base, rank = trace.meta["base_ns"] or 0, peek["rank"]
    chosen, names, flows = [], {}, []
    begun = [trace.origin_ns + ns for c, ns in trace.launches.items() if c in launched]
    window = (min(begun), max(begun)) if begun else (begin, end)  # of the CPU: from the first launch to the last

    def take(events):
        for e in events:
            phase, cat = e.get("ph"), e.get("cat")
            if phase == "M":
                names[e.get("name"), str(e.get("pid")), str(e.get("tid"))] = e
                continue
            try:
                at = round(float(e["ts"]) * 1000) + base
            except (KeyError, TypeError, ValueError):
                continue
            if phase in ("s", "f", "t") and e.get("id") in launched:
                flows.append((e, at))
            elif phase == "X" and (
                (cat in GPU or cat == "gpu_user_annotation") and begin <= at <= end
                if cat not in CPU
                else window[0] <= at <= window[1] or e.get("args", {}).get("correlation") in launched
            ):
                chosen.append((e, at))

    kineto.raw_events(peek["path"], take)
    ends = {
        (e["args"]["correlation"], at) for e, at in chosen if e.get("cat") in GPU and "correlation" in e.get("args", {})
    }
    starts = {e["args"]["correlation"] for e, _ in chosen if e.get("cat") in CPU and "correlation" in e.get("args", {})}
    arrows = [(e, at) for e, at in flows if e["ph"] == "s" and e["id"] in starts]
    tied = {e["id"] for e, _ in arrows}
    arrows += [(e, at) for e, at in flows if e["ph"] != "s" and e["id"] in tied and (e["id"], at) in ends]
    used = {str(e.get("pid")) for e, _ in chosen}
    out = []
    for e in names.values():
        if str(e.get("pid")) in used:
            if e.get("name") == "process_name" and isinstance(e.get("args"), dict):
                e = e | {"args": {"name": f"rank {rank}: {e['args'].get('name', '')}"}}
            out.append(_moved(e, rank, 0))
    return out + [_moved(e, rank, at - first) for e, at in sorted(chosen + arrows, key=lambda pair: pair[1])]


def _moved(event, rank, ns):
    moved = dict(event) | {"ts": ns / 1000}
    if isinstance(event.get("pid"), int):
        moved["pid"] = event["pid"] + rank * 10_000_000
    if "id" in event:
        moved["id"] = event["id"] + rank * 1_000_000_000
    return moved
