"""The capture protocol: warm up, start the profiler, send requests, stop, and trust only whole files.

The profiler's endpoints answer with an empty body, and 200 does not mean that a trace exists: one whole file per rank
of the capture's world size is the proof. Under nsys there is none yet: `nsys_reports` fetches it later.
"""

import itertools
import json
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from isal import isal_zlib

from k25lib.client import Client
from k25lib.errors import K25Error, UsageError
from k25lib.load.sweep import send
from k25lib.settings import PROFILERS

METHOD = 2  # goes up when a number of a capture would change; 2: the unprofiled TPOT is not of the warm-up
TRACE = re.compile(r"\.(pt\.)?trace\.json(\.gz)?$")
TABLE = re.compile(r"profiler_out.*\.txt$")
DECODE = re.compile(rb'"user_annotation",\s*"name":\s*"execute_(?:\d+_)?context_0\([^"]*\)_generation_[1-9]')
BYTES_PER_STEP_AND_RANK = 600_000  # gzipped, above what was seen: 56 kB on H200 at TP=2, 500 kB on eight PCIe GPUs
STACKS_FACTOR = 20  # with Python stacks traces are that much larger, and stopping takes ten times as long
SETTLE_S = 1.0  # a file whose size stands still this long has been written
FILES_S = 120.0  # how long to wait, after stop, for the last file


@dataclass(frozen=True)
class Load:
    """The requests that run under the profiler: how many, how many at a time, and their lengths in tokens."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int

    def bounds(self, ranks=0, stacks=False):
        """(about how many decode steps it makes, the most bytes that the traces of so many ranks may take)."""
        steps = -(-self.requests // self.concurrency) * (self.output_tokens - 1)
        each = BYTES_PER_STEP_AND_RANK * (STACKS_FACTOR if stacks else 1)
        return steps, (steps + self.requests) * max(ranks, 1) * each  # a prefill is a step too

    def send(self, url, model):
        """Send it all; returns the rows of the requests."""
        return send(url, model, self.requests, self.concurrency, self.input_tokens, self.output_tokens)


def place(run, load):
    """The folder of a run's next capture under this load: captures/c1 for one request at a time, then c1-2, c1-3 ..."""
    names = (f"c{load.concurrency}{end}" for end in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
    taken = run.captures()
    return run.path / "captures" / next(name for name in names if name not in taken)


def capture(
    url, model, traces, target, load, *, world_size=0, stacks=None, profiler="torch", stop_timeout_s=900.0, say=None
):
    """Take one profiler capture of a Load, and move its files from the folder `traces` into the folder `target`.

    world_size: how many ranks there are, 0: not known. stacks: whether the profiler records Python stacks, if known.
    say: takes each line of progress (default: stderr). Returns a dict, also written to `target`/capture.json: name,
    the load, files (file, bytes, rank, decode_steps, fault), tables, world_size, ranks, missing_ranks, when it started,
    how long start and stop took in s, and the mean TPOT in ms with and without the profiler. Raises K25Error if no
    whole trace came of it; the profiler is stopped in any case. Under nsys the record has no files yet, and says in
    `pending` where the report will be.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    if profiler not in PROFILERS:
        raise UsageError(f"the profiler is {' or '.join(PROFILERS)}, not {profiler!r}")
    client, traces, target = Client(url), Path(traces), Path(target)
    if not traces.is_dir():
        raise K25Error(
            f"the profiler's folder {traces} can't be seen from here: set capture.traces (or server.traces) to where "
            "this machine sees the folder that the server writes to"
        )
    if target.exists() and any(target.iterdir()):
        raise K25Error(f"{target} has files already: a capture never overwrites another; give it another name")
    if stacks:
        say(f"the profiler records Python stacks: traces are {STACKS_FACTOR} times larger and stopping takes minutes; "
            'start the server with "torch_profiler_with_stack":false')  # fmt: skip
    steps, size = load.bounds(world_size, stacks)
    say(f"about {steps} decode steps on {world_size or 'all'} ranks: at most {size / 1e6:,.0f} MB of traces")
    _check_disk(size, traces, target)
    client.require_profiler(stop_timeout_s)
    what = f"{load.requests} requests at C={load.concurrency}"

    say(f"warm-up: {what}; then the same, timed, profiler off")
    load.send(url, model)
    plain = load.send(url, model)
    before = _listing(traces)
    with _profiling(client, stop_timeout_s, say) as times:
        say(f"profiling {what}, {load.output_tokens} tokens each")
        profiled = load.send(url, model)
    if profiler == "nsys":
        say("nsys writes its report when the server ends; the breakdown fetches it then")
        target.mkdir(parents=True, exist_ok=True)
        files = {"files": [], "tables": [], "world_size": world_size, "ranks": [], "missing_ranks": []}
        files["pending"] = {"traces": str(traces.resolve()), "earlier": sorted(p.name for p in traces.iterdir())}
    else:
        say("waiting for the trace files to be whole")
        files = _move(_whole_files(traces, before, world_size), target, world_size, say)
    record = {
        "name": target.name,
        "method": METHOD,
        "profiler": profiler,
        **asdict(load),
        "tpot_ms": _mean_tpot(plain),
        "tpot_profiled_ms": _mean_tpot(profiled),
        **times,
        **files,
    }
    write_record(target, record)
    return record


def write_record(folder, record):
    """Write what is known of the capture in `folder` to its capture.json."""
    (folder / "capture.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _profiling(client, stop_timeout_s, say):
    """The profiler runs inside the block, and is stopped whatever happens there. Yields a dict of times."""
    times = {"started": datetime.now(UTC).isoformat(timespec="milliseconds")}
    began, whole = time.monotonic(), False
    try:
        client.start_profile()
        times["start_s"] = round(time.monotonic() - began, 3)
        yield times
        whole = True
    finally:
        began = time.monotonic()
        done = threading.Event()
        threading.Thread(target=_tell_waiting, args=(done, began, stop_timeout_s, say), daemon=True).start()
        try:
            client.stop_profile(stop_timeout_s)
        except K25Error:
            if whole:  # else the first failure is the one to tell
                raise
        finally:
            done.set()
        times["stop_s"] = round(time.monotonic() - began, 3)
        times["ended"] = datetime.now(UTC).isoformat(timespec="milliseconds")


def _tell_waiting(done, began, limit_s, say):
    while not done.wait(10):
        say(f"the server is writing its traces: {time.monotonic() - began:.0f} s, at most {limit_s:.0f} s")


def _check_disk(size, *folders):
    needed = size + 200_000_000
    for folder in folders:
        place = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
        free = shutil.disk_usage(place).free
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
    last = None
    while True:
        now = {path: stat for path, stat in _listing(traces).items() if before.get(path) != stat}
        found = [p for p in now if TRACE.search(p.name)]
        expected = max((_head(p).get("world_size", 0) for p in found), default=0) or world_size
        if now and now == last and len(found) >= max(expected, 1):
            return sorted(now)
        if time.monotonic() > deadline:
            if found:
                return sorted(now)  # some rank is missing: told with the capture
            raise K25Error(
                f"the profiler was stopped, and no trace appeared in {traces} within {FILES_S:.0f} s: was the server "
                "started with torch_profiler_dir = that folder?"
            )
        last = now
        time.sleep(SETTLE_S)


def _move(files, target, world_size, say):
    target.mkdir(parents=True, exist_ok=True)
    moved, tables = [], []
    for path in files:
        new = target / path.name
        shutil.move(path, new)
        if TABLE.search(new.name):
            tables.append(new.name)
        else:
            head, (steps, fault) = _head(new), _read(new)
            size = new.stat().st_size
            moved.append({"file": new.name, "bytes": size, "rank": None, "decode_steps": steps, **head, "fault": fault})
    broken = [f"{file['file']}: {file['fault']}" for file in moved if file["fault"]]
    if broken and len(broken) == len(moved):
        raise K25Error(f"no trace of the capture is whole ({broken[0]}); the files are in {target}")
    if any([file.pop("stacks", False) for file in moved]):
        say('the traces hold Python stacks: the profiled times are far off; use "torch_profiler_with_stack":false')
    world_size = max(file.pop("world_size", 0) for file in moved) or world_size
    return {"files": moved, "tables": tables, **of_ranks(moved, world_size)}


def of_ranks(files, world_size):
    """Which ranks of `world_size` the whole ones of a capture's files are of: {world_size, ranks, missing_ranks}."""
    ranks = sorted({m["rank"] for m in files if m["rank"] is not None and not m["fault"]})
    missing = [rank for rank in range(world_size) if rank not in ranks]
    return {"world_size": world_size, "ranks": ranks, "missing_ranks": missing}


def _head(path):
    """rank, world_size and stacks of a trace, as its first 64 kB tell; what they do not tell, or are too damaged to
    tell, is left out."""
    with path.open("rb") as file:
        data = file.read(65536)
    if data[:2] == b"\x1f\x8b":
        try:
            data = isal_zlib.decompressobj(wbits=31).decompress(data, 65536)
        except isal_zlib.error:
            return {}
    found = re.search(rb'"distributedInfo":\s*\{[^{}]*', data)
    numbers = dict(re.findall(rb'"(rank|world_size)":\s*(\d+)', found[0])) if found else {}
    stacks = {"stacks": True} if re.search(rb'"with_stack":\s*1', data) else {}
    return {**{key.decode(): int(value) for key, value in numbers.items()}, **stacks}


def _read(path):
    """(decode steps marked in a trace, fault): fault is '' for a file whose gzip ends well and whose JSON closes."""
    tail, steps = b"", 0
    with path.open("rb") as file:
        gz = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        inflate = isal_zlib.decompressobj(wbits=31)
        try:
            while block := file.read(1 << 20):
                text = tail + (inflate.decompress(block) if gz else block)
                ends = [found.end() for found in DECODE.finditer(text)]
                steps += len(ends)
                tail = text[max(0, len(text) - 256, *ends[-1:]) :]
        except isal_zlib.error as error:
            return steps, f"its compressed data is damaged ({error})"
    if gz and not inflate.eof:
        return steps, "its compressed data ends early"
    return steps, "" if tail.rstrip()[-1:] in (b"}", b"]") else "its JSON is not closed"


def _mean_tpot(rows):
    values = [row["tpot_ms"] for row in rows if row.get("tpot_ms") is not None]
    return sum(values) / len(values) if values else None
