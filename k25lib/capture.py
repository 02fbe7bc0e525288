"""The capture protocol: warm up, start the profiler, send requests, stop, and trust only whole files.

The profiler's endpoints answer with an empty body, and 200 does not mean that a trace exists: one whole file per rank
of the capture's world size is the proof.
"""

import json
import re
import shutil
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

from k25lib.client import Client, ProfilerRunning
from k25lib.errors import K25Error
from k25lib.load.sweep import send

METHOD = 1  # goes up when a number of a capture would change
TRACE = re.compile(r"\.(pt\.)?trace\.json(\.gz)?$")
TABLE = re.compile(r"profiler_out.*\.txt$")
BYTES_PER_STEP_AND_RANK = 600_000  # gzipped, above what was seen: 56 kB on H200 at TP=2, 500 kB on eight PCIe GPUs
SETTLE_S = 1.0  # a file whose size stands still this long has been written
FILES_S = 120.0  # how long to wait, after stop has returned, for the last rank's file


def capture(url, model, traces, target, *, concurrency, requests, input_tokens, output_tokens, world_size=0,
            stop_timeout_s=900.0, say=None):  # fmt: skip
    """Take one profiler capture of `requests` requests at `concurrency` and move its files into `target`.

    Returns a dict: name, files (name, bytes, rank), tables, world_size, ranks, missing_ranks, times of start and stop
    in s, and the mean TPOT in ms with and without the profiler. Raises K25Error if no whole trace came of it; the
    profiler is stopped in any case.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    client, traces, target = Client(url), Path(traces), Path(target)
    _check_folder(traces)
    if target.exists() and any(target.iterdir()):
        raise K25Error(f"{target} has files already: a capture never overwrites another; give it another name")
    steps = requests * output_tokens
    _check_disk(target, steps, max(world_size, 1))
    load = {"input_tokens": input_tokens, "output_tokens": output_tokens, "api_key": None}

    say(f"warm-up: {requests} requests at C={concurrency}, profiler off")
    plain = send(url, model, requests, concurrency, **load)
    with _profiling(client, stop_timeout_s, say) as times:
        before = _listing(traces)
        say(f"profiling {requests} requests at C={concurrency}, {output_tokens} tokens each")
        profiled = send(url, model, requests, concurrency, **load)
    say("waiting for the trace files to be whole")
    files = _whole_files(traces, before, world_size)
    record = {
        "name": target.name,
        "method": METHOD,
        "concurrency": concurrency,
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "tpot_ms": _mean_tpot(plain),
        "tpot_profiled_ms": _mean_tpot(profiled),
        **times,
        **_move(files, target, world_size),
    }
    (target / "capture.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


@contextmanager
def _profiling(client, stop_timeout_s, say):
    """The profiler runs inside the block, and is stopped whatever happens there. Yields a dict of times in s."""
    times = {}
    began = time.monotonic()
    try:
        client.start_profile()
    except ProfilerRunning:
        say("the profiler runs already, from a session that was cut off: stopping it first")
        client.stop_profile(stop_timeout_s)
        client.start_profile()
    times["start_s"] = round(time.monotonic() - began, 3)
    try:
        yield times
    finally:
        began = time.monotonic()
        done = threading.Event()
        threading.Thread(target=_tell_waiting, args=(done, began, stop_timeout_s, say), daemon=True).start()
        try:
            client.stop_profile(stop_timeout_s)
        finally:
            done.set()
        times["stop_s"] = round(time.monotonic() - began, 3)


def _tell_waiting(done, began, limit_s, say):
    while not done.wait(10):
        say(f"the server is writing its traces: {time.monotonic() - began:.0f} s, at most {limit_s:.0f} s")


def _check_folder(traces):
    if not traces.is_dir():
        raise K25Error(
            f"the profiler's folder {traces} can't be seen from here: set capture.traces (or server.traces) to where "
            "this machine sees the folder that the server writes to"
        )


def _check_disk(target, steps, ranks):
    place = next(p for p in target.resolve().parents if p.exists())
    free, needed = shutil.disk_usage(place).free, steps * ranks * BYTES_PER_STEP_AND_RANK + 200_000_000
    if free < needed:
        raise K25Error(
            f"the capture may need {needed / 1e9:.1f} GB and {place} has {free / 1e9:.1f} GB free: "
            "free some, or take fewer requests or tokens"
        )


def _listing(folder):
    """Trace and table files of a folder: path -> (bytes, modification time in ns)."""
    found = [p for p in folder.iterdir() if TRACE.search(p.name) or TABLE.search(p.name)]
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in found}


def _whole_files(traces, before, world_size):
    """The files that the capture wrote, once none of them grows: new ones, and tables written over."""
    deadline = time.monotonic() + FILES_S
    last, expected = None, world_size
    while True:
        now = {path: stat for path, stat in _listing(traces).items() if before.get(path) != stat}
        found = [p for p in now if TRACE.search(p.name)]
        if found and not expected:
            expected = _head(found[0]).get("world_size") or 0
        if now and now == last and len(found) >= max(expected, 1):
            return sorted(now)
        if time.monotonic() > deadline:
            if found:
                return sorted(now)  # some rank is missing: told with the capture
            raise K25Error(
                f"the profiler was stopped, and no trace appeared in {traces} within {FILES_S:.0f} s: is that the "
                "folder that the server was started with (torch_profiler_dir)?"
            )
        last = now
        time.sleep(SETTLE_S)


def _move(files, target, world_size):
    target.mkdir(parents=True, exist_ok=True)
    moved, tables, broken = [], [], []
    for path in files:
        new = target / path.name
        if TABLE.search(path.name):
            shutil.move(path, new)
            tables.append(new.name)
            continue
        head, fault = _head(path), _fault(path)
        shutil.move(path, new)
        world_size = world_size or head.get("world_size") or 0
        moved.append({"file": new.name, "bytes": new.stat().st_size, "rank": head.get("rank"), "fault": fault})
        if fault:
            broken.append(f"{new.name}: {fault}")
    if broken and len(broken) == len(moved):
        raise K25Error(f"no trace of the capture is whole ({broken[0]}); the files are in {target}")
    ranks = sorted({m["rank"] for m in moved if m["rank"] is not None and not m["fault"]})
    missing = [rank for rank in range(world_size) if rank not in ranks]
    return {"files": moved, "tables": tables, "world_size": world_size, "ranks": ranks, "missing_ranks": missing}


def _head(path):
    """rank and world_size from a trace's distributedInfo; {} if its first 64 kB have none."""
    with path.open("rb") as file:
        data = file.read(65536)
    if data[:2] == b"\x1f\x8b":
        data = zlib.decompressobj(wbits=31).decompress(data, 65536)
    found = re.search(rb'"distributedInfo":\s*\{[^{}]*', data)
    numbers = dict(re.findall(rb'"(rank|world_size)":\s*(\d+)', found[0])) if found else {}
    return {key.decode(): int(value) for key, value in numbers.items()}


def _fault(path):
    """'' for a file whose gzip ends well and whose JSON closes; else what is wrong."""
    tail = b""
    with path.open("rb") as file:
        gz = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        inflate = zlib.decompressobj(wbits=31)
        try:
            while block := file.read(1 << 20):
                tail = (tail + (inflate.decompress(block) if gz else block))[-64:]
        except zlib.error as error:
            return f"its compressed data is damaged ({error})"
    if gz and not inflate.eof:
        return "its compressed data ends early"
    return "" if tail.rstrip()[-1:] in (b"}", b"]") else "its JSON is not closed"


def _mean_tpot(rows):
    values = [row["tpot_ms"] for row in rows if row.get("tpot_ms") is not None]
    return sum(values) / len(values) if values else None
