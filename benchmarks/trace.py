"""CPU and memory of `k25 breakdown` against `gzip -dc | wc -c` and Holistic Trace Analysis, on one file in one run.

    python benchmarks/trace.py TRACE.json.gz [--hta PYTHON] [--repeat 5]     one rank's trace
    python benchmarks/trace.py --generate 80 [--ranks 8]                     a generated rank of about 80 MB gz

Read the column `x gzip`: user + system seconds of the whole process (interpreter start, imports and workers included)
over those of gzip in the same round; the median of the rounds. HTA needs an interpreter that has it
(pip install HolisticTraceAnalysis).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
kernels, details = analysis.get_gpu_kernel_breakdown(visualize=False)
times = analysis.get_temporal_breakdown(visualize=False)
steps = [n for n in analysis.t.get_trace(0).columns if n == "iteration"]
print("ANSWER " + json.dumps({
    "steps": max(0, int(analysis.t.get_trace(0)["iteration"].max())) if steps else 0,
    "kernel_sum_ms": float(kernels["sum"].sum()) / 1e3,
    "busy_ms": float((times["compute_time(us)"] + times["non_compute_time(us)"]).iloc[0]) / 1e3,
    "communication_ms": float(kernels[kernels["kernel_type"] == "COMMUNICATION"]["sum"].sum()) / 1e3,
}))
"""


def measured(command, **more):
    """Run to the end: (CPU seconds of the process and its children, peak MB of the largest process, stdout)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["/usr/bin/env", "time", "-f", "%M", *command], capture_output=True, text=True, **more)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr[-300:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, int(done.stderr.strip().splitlines()[-1]) / 1024, done.stdout


def k25(paths):
    env = os.environ | {"PYTHONPATH": str(PROJECT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: modules are compiled once, not in every run
    return [sys.executable, "-m", "k25lib", "breakdown", *map(str, paths), "--json"], {"env": env, "cwd": PROJECT}


def tree_peak_mb(command, **more):
    """(CPU seconds, peak MB of all its processes together, sampled every 20 ms from proportional set sizes)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)
    peak, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.02):
            peak[0] = max(peak[0], sum(map(_pss_mb, _tree(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    stop.set()
    watcher.join()
    time.sleep(0.1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak[0]


def _tree(pid):
    found = [pid]
    for each in found:
        try:
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:
            continue
    return found


def _pss_mb(pid):
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.split("Pss:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0


def compare(path, hta, repeat):
    """The ratios and both tools' answers for one file."""
    rows, answers = {"gzip -dc | wc -c": [], "k25 breakdown": []}, {}
    for _ in range(repeat):
        rows["gzip -dc | wc -c"].append(measured(["sh", "-c", 'gzip -dc "$0" | wc -c', str(path)])[:2])
        command, more = k25([path])
        *cost, out = measured(command, **more)
        rows["k25 breakdown"].append(cost)
        answers["k25"] = json.loads(out)
    if hta:
        *cost, out = measured([hta, "-c", HTA, str(path)])
        rows["Holistic Trace Analysis"] = [cost]
        answers["hta"] = json.loads(out.split("ANSWER ")[1])
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB gz")
    print(f"{'tool':26} {'CPU s':>8} {'x gzip':>8} {'spread':>13} {'peak MB':>8}")
    gzip = [cpu for cpu, _ in rows["gzip -dc | wc -c"]]
    for tool, costs in rows.items():
        ratios = [cpu / g for (cpu, _), g in zip(costs, gzip, strict=False)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}" if len(ratios) > 1 else "one run"
        cpu = statistics.median(c for c, _ in costs)
        print(f"{tool:26} {cpu:8.2f} {statistics.median(ratios):8.2f} {spread:>13} {max(m for _, m in costs):8.0f}")
    answer(answers)


def answer(answers):
    """Both tools' answers side by side; HTA has totals of the session only."""
    ours = answers["k25"]
    passes = {row["kind"]: row for row in ours["by_kind"]}
    step = next(row for row in ours["per_step"] if row["batch"] == "all")
    session = {key: sum(row[key] * row["passes"] for row in passes.values()) for key in ("kernel_sum_ms", "busy_ms")}
    communication = {"allreduce_nccl", "allreduce_custom", "other_comm"}
    comm_ms = sum(r["ms"] for r in ours["categories"] if r["batch"] == "all" and r["category"] in communication)
    theirs = answers.get("hta", {})
    print(f"\n{'answer':44} {'k25':>12} {'HTA':>12}")
    lines = [
        ("decode steps found", step["steps"], theirs.get("steps")),
        ("kernel sum of a decode step, ms", step["kernel_sum_ms"], None),
        ("busy time of a decode step, ms", step["busy_ms"], None),
        ("communication of a decode step, ms", comm_ms, None),
        ("kernel sum of the session, ms", session["kernel_sum_ms"], theirs.get("kernel_sum_ms")),
        ("busy time of the session, ms", session["busy_ms"], theirs.get("busy_ms")),
        ("communication of the session, ms", None, theirs.get("communication_ms")),
    ]
    for name, mine, other in lines:
        print(f"{name:44} {_cell(mine):>12} {_cell(other):>12}")


def _cell(value):
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--hta", default=os.environ.get("HTA_PYTHON"), help="an interpreter that has HTA")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--generate", type=int, metavar="MB", help="make a rank of about MB megabytes gz")
    parser.add_argument(
        "--ranks", type=int, default=1, help="with --generate: read that many ranks at once, for memory"
    )
    options = parser.parse_args()
    if not options.trace and not options.generate:
        parser.error("give a trace, or --generate 80")
    if options.hta and subprocess.run([options.hta, "-c", "import hta"], capture_output=True).returncode:
        print(
            f"{options.hta} has no Holistic Trace Analysis (pip install HolisticTraceAnalysis): left out",
            file=sys.stderr,
        )
        options.hta = None
    elif not options.hta:
        print("no interpreter with Holistic Trace Analysis given (--hta PYTHON): left out", file=sys.stderr)
    if options.trace:
        compare(options.trace, options.hta, options.repeat)
        return
    sys.path.insert(0, str(PROJECT / "tests" / "trace"))
    from generate import write_capture

    with tempfile.TemporaryDirectory() as folder:
        steps = round(6.8 * options.generate)
        paths, _ = write_capture(
            folder, options.ranks, decode=steps, prefill=5, others=26, python_events=3000, level=6, alike=True
        )
        if options.ranks == 1:
            compare(paths[0], options.hta, options.repeat)
            return
        command, more = k25([folder])
        cpu, peak = tree_peak_mb(command, **more)
        total = sum(p.stat().st_size for p in paths) / 1e6
        print(f"{options.ranks} ranks, {total:.0f} MB gz: {cpu:.1f} s of CPU, {peak:.0f} MB in all processes together")


if __name__ == "__main__":
    main()
