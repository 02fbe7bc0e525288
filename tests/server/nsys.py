"""A stand-in for nsys: `profile` runs vLLM with its torch profiler, and writes a report for every range that this
profiler was on; `export` writes what NVIDIA's exporter writes of a report, of two GPUs.

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
    ranges = 0
    while server.poll() is None:
        time.sleep(0.1)
        found = len(list(traces.glob("*.trace.json.gz"))) // 2
        if found > ranges:
            ranges = found
            time.sleep(0.5)  # the report comes after /stop_profile has answered
            out.with_name(f"{out.name}.{ranges}.nsys-rep").write_text("a report")
    return server.returncode


def export(words):
    report, database = Path(words[-1]), words[words.index("--output") + 1]
    if report.read_text() != "a report":
        print("Importer error", file=sys.stderr)
        return 1
    with sqlite3.connect(database) as into:
        into.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
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
