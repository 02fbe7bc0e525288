"""A stand-in for nsys, which behaves as 2025.3 was seen to: `profile` runs vLLM (with its torch profiler), and writes
a report for every range that this profiler was on, all of them once vLLM has ended; `export` writes what NVIDIA's
exporter writes of a report, of two GPUs.

It records its words in `nsys-calls` beside the reports.
"""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

KERNEL = "start, end, deviceId, streamId, correlationId, graphNodeId, shortName, demangledName"


def profile(words):
    out = Path(words[words.index("-o") + 1])
    application = words[words.index("-o") + 2 :]
    traces = out.with_name(f"{out.name}-ranges")
    at = application.index("--profiler-config") + 1
    assert json.loads(application[at]) == {"profiler": "cuda"}
    torch = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    application[at] = json.dumps(torch | {"ignore_frontend": True})
    server = subprocess.Popen(application)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    ranges = []
    while server.poll() is None:
        time.sleep(0.1)
        if len(list(traces.glob("*.trace.json.gz"))) // 2 > len(ranges):
            ranges.append(time.time_ns() - 50_000_000)
    for n, at_ns in enumerate(ranges, 1):
        number = f".{n}" if len(ranges) > 1 else ""
        out.with_name(f"{out.name}{number}.nsys-rep").write_text(f"a report of {at_ns}")
    return server.returncode


def export(words):
    report, database = Path(words[-1]), words[words.index("--output") + 1]
    said, _, at_ns = report.read_text().rpartition(" ")
    if said != "a report of":
        print("Importer error", file=sys.stderr)
        return 1
    with sqlite3.connect(database) as into:
        into.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        into.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
        into.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", [int(at_ns)])
        into.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL})")
        into.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "k"), (2, "void k<int>()")])
        rows = [(1000 * n, 1000 * n + 500, device, 7, n, None, 1, 2) for device in (0, 1) for n in range(4)]
        into.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    return 0


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "--version":
        print("NVIDIA Nsight Systems version 2025.5.1, a stand-in")
    else:
        where = words[words.index("-o" if verb == "profile" else "--output") + 1]
        with Path(where).with_name("nsys-calls").open("a") as calls:
            calls.write(json.dumps([verb, *words]) + "\n")
        sys.exit({"profile": profile, "export": export}[verb](words))
