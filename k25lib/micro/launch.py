"""Runs the workers under any interpreter, here, in a container or on another host, and turns every failure into a row.

The worker travels as a small zip on stdin, into a temporary folder that is removed after. The open stdin is a
lifeline: when it closes (time-out, Ctrl-C, death of this process, a lost connection), all that runs there is killed.
"""

import base64
import collections
import contextlib
import io
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

from k25lib.errors import K25Error, UsageError
from k25lib.hardware import find

MODULES = ("timing.py", "kernels.py", "gemm.py", "messages.py", "collectives.py")
START_S = 180  # to import torch and vLLM, and to meet the other ranks
RESTARTS = 6  # after so many deaths the rest is not run

# Runs on the other side with the standard library alone. `-m torch.distributed.run` starts each rank in a session of
# its own, so that the children must be found by parent, not by group.
BOOTSTRAP = """
import base64, io, json, os, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
job = json.loads(sys.stdin.readline())
folder = tempfile.mkdtemp(prefix="k25-")
zipfile.ZipFile(io.BytesIO(base64.b64decode(job["zip"]))).extractall(folder)
env = {**os.environ, **job["env"]}
env["PYTHONPATH"] = os.pathsep.join([folder] + [p for p in [env.get("PYTHONPATH")] if p])
settings = os.path.join(folder, "settings.json")
open(settings, "w").write(json.dumps(job["settings"]))
env["K25_SETTINGS"] = settings
child = subprocess.Popen([sys.executable] + job["arguments"], env=env, cwd=folder, stdin=open(settings))
def family():
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(pid)] = int(open("/proc/" + pid + "/stat").read().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found = [child.pid]
    for pid in found:
        found += [p for p, parent in parents.items() if parent == pid]
    return found
def end():
    for pid in reversed(family()):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
def lifeline():
    sys.stdin.read()
    end()
threading.Thread(target=lifeline, daemon=True).start()
code = child.wait()
shutil.rmtree(folder, ignore_errors=True)
os._exit(code if code >= 0 else 128 - code)
"""


def prefix_of(python):
    """The command before a Python program's arguments, from None (this interpreter), a string or a list."""
    parts = [sys.executable] if not python else shlex.split(python) if isinstance(python, str) else list(python)
    keeper = next(
        (at for at, part in enumerate(parts) if Path(part).name in ("docker", "podman", "kubectl")), len(parts)
    )
    if "exec" in parts[keeper:]:
        at = parts.index("exec", keeper) + 1
        if not {"-i", "-it", "-ti", "--interactive", "--stdin"} & set(parts[at:]):
            parts.insert(at, "-i")  # the worker reads its settings on stdin
    return parts


def command_of(python):
    """The whole command that runs the bootstrap; quoted for the other shell where the prefix is ssh."""
    parts, program = prefix_of(python), ["-u", "-c", BOOTSTRAP]
    return parts + ([shlex.quote(part) for part in program] if Path(parts[0]).name == "ssh" else program)


def worker_zip():
    """The workers and nothing else, as base64."""
    data = io.BytesIO()
    here = Path(__file__).parent
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("k25lib/__init__.py", "")
        archive.writestr("k25lib/micro/__init__.py", "")
        for name in MODULES:
            archive.write(here / name, f"k25lib/micro/{name}")
    return base64.b64encode(data.getvalue()).decode()


class Worker:
    """One process of the worker: its events in order, the last lines it said, and its end."""

    def __init__(self, python, arguments, settings, env):
        self.said = collections.deque(maxlen=100)
        self.by_rank = {}
        self._lines = queue.Queue()
        try:
            self.process = subprocess.Popen(
                command_of(python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"cannot run {prefix_of(python)[0]}: {error.strerror}") from error
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._hear)]
        for thread in self._threads:
            thread.start()
        job = {"zip": worker_zip(), "arguments": arguments, "settings": settings, "env": env}
        with contextlib.suppress(OSError):  # it ended at once: its last words say why
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _hear(self):
        for line in self.process.stderr:
            text = line.strip()
            found = re.match(r"\[rank (\d+)\] (.*)", text)
            if found:
                self.by_rank[int(found[1])] = found[2]
            elif text:
                self.said.append(text)

    def next(self, timeout_s):
        """The next event as a dict, None at the end of the output. Raises queue.Empty after the time-out."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if line is None:
                return None
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "event" in event:
                return event
            self.said.append(line.strip())

    def wait(self, seconds):
        """Give it this long to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def stop(self):
        """End it and all that it started; waits until it has gone. Returns the exit code."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for thread in self._threads:
            thread.join(timeout=2)
        return self.process.returncode

    def last_words(self):
        """What each rank did last and the last error that was printed, as one line."""
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.by_rank.items()))
        told = [line for line in self.said if re.search(r"exitcode: -?\d|in use", line)]  # torchrun of a rank; a port
        errors = [line for line in self.said if re.search(r"(error|exception)\b(?!_)|killed|refused", line, re.I)]
        said = (told[:1] or errors[-1:] or list(self.said)[-1:] or [""])[0]
        signals = [signal.Signals(int(n)).name for n in re.findall(r"exitcode: -(\d+)", said)]
        said = " ".join([re.sub(r"^[EW]\d{4} .*?\] ", "", said), *signals])
        return "; ".join(part for part in (ranks, f"it said: {said[:200]}" if said else "") if part)


class Job:
    """All tasks of one measurement, with as many processes as it takes: a task during which the worker dies or hangs
    fails, alone."""

    def __init__(self, tasks, timeout_s, row_timeout_s, on_row, on_facts):
        self.todo = [task | {"id": number} for number, task in enumerate(tasks)]
        self.rows, self.facts, self.deaths = {}, {}, 0
        self.timeout_s, self.row_timeout_s = timeout_s, row_timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.on_row, self.on_facts = on_row or (lambda row: None), on_facts or (lambda facts: None)

    def run(self, start):
        """Run every task in workers that `start(tasks)` makes; returns the rows in the order of the tasks."""
        while self.todo:
            worker, self.current, reason, in_order = start(self.todo), None, "", False
            before = len(self.todo)
            try:
                for event in self._events(worker):
                    kind = event.pop("event")
                    if kind == "start":
                        self.current = next(task for task in self.todo if task["id"] == event["id"])
                    elif kind == "row":
                        self._done(self.current, event)
                        self.current = None
                    elif kind == "device":
                        self.facts = event
                        self.on_facts(event)
                    else:  # end, abort or late
                        reason, in_order = event.get("reason", ""), kind != "late"
                        break
                if in_order and not reason:
                    worker.wait(5)  # to leave in order; a communicator that hangs at its end costs nothing more
            finally:
                code = worker.stop()
            if self.todo:
                reason = reason or f"the worker ended with {_ending(code)}"
                words = "" if in_order else worker.last_words()
                self._ended("; ".join(part for part in (reason, words) if part), len(self.todo) < before)
        return [self.rows[number] for number in sorted(self.rows)]

    def _events(self, worker):
        """The worker's events until its end; the last is {"event": "late"} where one did not come in time."""
        while True:
            left = self.deadline - time.monotonic()
            limit = self.row_timeout_s if self.current else max(self.row_timeout_s, START_S)
            try:
                event = worker.next(max(min(left, limit), 0.1))
            except queue.Empty:
                said = f"{self.timeout_s:.0f} s for all rows" if left <= limit else f"{limit:.0f} s"
                yield {"event": "late", "reason": f"time-out ({said})"}
                return
            if event is None:
                return
            yield event

    def _ended(self, reason, had_rows):
        """A worker ended before its tasks did: what becomes of them."""
        self.deaths += 1
        late = time.monotonic() >= self.deadline
        failed = {"status": "failed", "reason": reason}
        if self.current:
            self._done(self.current, failed)
        elif not late and not had_rows:  # it never began: the same would happen to every row
            for task in list(self.todo):
                self._done(task, failed)
        if late or self.deaths >= RESTARTS:
            dead = self.deaths >= RESTARTS
            why = f"{self.deaths} deaths of the worker" if dead else f"the time-out of {self.timeout_s:.0f} s"
            for task in list(self.todo):
                self._done(task, {"status": "not run", "reason": f"after {why}"})

    def _done(self, task, values):
        row = {key: value for key, value in (task | values).items() if key != "id"}
        self.rows[task["id"]] = row = row | {"device": self.facts.get("device")}
        self.todo.remove(task)
        self.on_row(row)


def probe(python=None, timeout_s=180):
    """The kind of device that torch finds under this interpreter: "cuda" or "cpu". Raises K25Error with the reason."""
    worker = Worker(python, ["-m", "k25lib.micro.gemm"], {"tasks": []}, {})
    try:
        event = worker.next(timeout_s)
    except queue.Empty:
        event = None
    finally:
        code = worker.stop()
    if not event or event["event"] != "device":
        raise K25Error(f"{' '.join(prefix_of(python))} cannot run the worker ({_ending(code)}); {worker.last_words()}")
    return event["kind"]


def _ending(code):
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"


def run_gemm(settings, python=None, timeout_s=900, on_row=None, on_facts=None):
    """Time the GEMMs of settings["tasks"] (plan.gemm_tasks makes them): rows of the table `gemm`.

    python: interpreter or prefix ("docker exec vllm python3", "ssh host python3"); None is this interpreter.
    Every task comes back as one row with a status: ok, failed or not run, and why.
    """
    settings = dict(settings)
    tasks = settings.pop("tasks")
    facts = {}

    def learn(found):
        facts.update(found)
        if on_facts:
            on_facts(found)

    def finish(row):
        row.update(_against_peak(row, facts))
        if on_row:
            on_row(row)

    env = settings.pop("env", {})
    job = Job(tasks, timeout_s, settings.get("row_timeout_s", 180), finish, learn)
    return job.run(lambda todo: Worker(python, ["-m", "k25lib.micro.gemm"], settings | {"tasks": todo}, env))


def _against_peak(row, facts):
    """The columns that set a row against its bound: the published peak of the device, or what it was measured to do."""
    known = find(facts.get("device", ""))
    achievable_gb_s = max(facts.get("copy_gb_s", 0), facts.get("read_gb_s", 0))
    gb_s = known.dram_gb_s if known else achievable_gb_s
    tflop_s = known.bf16_tflop_s if known else facts.get("gemm_tflop_s", 0)
    columns = {
        "peak_gb_s": gb_s or None,
        "peak_tflop_s": tflop_s or None,
        "peak_source": "published" if known else "measured here",
        "achievable_gb_s": achievable_gb_s or None,
        "method": facts.get("method"),
    }
    if row["status"] != "ok" or not (gb_s and tflop_s):
        return columns
    memory, compute = row["gb_s"] / gb_s * 100, row["tflop_s"] / tflop_s * 100
    return columns | {
        "percent_of_peak": max(memory, compute), "bound": "memory" if memory >= compute else "compute",
        "over_peak": max(memory, compute) > 100, "ms_per_step": row["time_us_median"] * row["calls_per_step"] / 1e3,
    }  # fmt: skip


def run_collectives(settings, python=None, world=2, timeout_s=900, on_row=None, on_facts=None):
    """Time the collectives of settings["tasks"] (plan.collective_tasks makes them): rows of the table `collectives`.

    world: processes on this machine, one a GPU. settings["torchrun"]: options in place of --standalone (--nnodes,
    --rdzv-endpoint ...). A task's "environment" (NCCL_ALGO ...) gets processes of its own. python as for run_gemm.
    """
    settings = dict(settings)
    tasks, common = settings.pop("tasks"), {"OMP_NUM_THREADS": "1"} | settings.pop("env", {})  # as torchrun has it
    options = settings.pop("torchrun", None) or ["--standalone", "--local-addr", "localhost"]
    arguments = ["-m", "torch.distributed.run", *options, "--nproc-per-node", str(world)]
    arguments += ["-m", "k25lib.micro.collectives"]
    settings.setdefault("row_timeout_s", 60)
    limit = settings["row_timeout_s"]
    deadline, rows, facts = time.monotonic() + timeout_s, [], {}

    def finish(row):
        row["environment"] = json.dumps(row.get("environment") or {}, sort_keys=True)
        row["gemm"] = "x".join(map(str, row.get("gemm") or []))
        row |= {"world": facts.get("world", world)} | {key: facts.get(key) for key in ("method", "comparable", "nccl")}
        if on_row:
            on_row(row)

    def learn(found):
        facts.update(found)
        if on_facts:
            on_facts(found)

    environments = []
    for task in tasks:
        if task.get("environment", {}) not in environments:
            environments.append(task.get("environment", {}))
    for environment in environments:
        mine = [task for task in tasks if task.get("environment", {}) == environment]
        left = max(1.0, deadline - time.monotonic())
        rows += Job(mine, left, limit, finish, learn).run(
            lambda todo, env=common | environment: Worker(python, arguments, settings | {"tasks": todo}, env)
        )
    return rows
