"""Runs the workers' tasks to their end, in as many processes as it takes, and turns every failure into a row."""

import json
import queue
import signal
import time

from k25lib.errors import K25Error, UsageError
from k25lib.hardware import find
from k25lib.micro.remote import Worker, prefix_of

START_S = 180  # to import torch and vLLM, and to meet the other ranks
FEW_RANKS, RANKS_A_CORE = 16, 2  # on CPUs: each is a process with a torch of its own, some 300 MB
RESTARTS = 6  # after so many deaths the rest is not run


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
                said = f"{self.timeout_s:g} s for all rows" if left <= limit else f"{limit:g} s"
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
            why = f"{self.deaths} deaths of the worker" if dead else f"the time-out of {self.timeout_s:g} s"
            for task in list(self.todo):
                self._done(task, {"status": "not run", "reason": f"after {why}"})

    def _done(self, task, values):
        row = {key: value for key, value in (task | values).items() if key != "id"}
        self.rows[task["id"]] = row = row | {"device": self.facts.get("device")}
        self.todo.remove(task)
        self.on_row(row)


def probe(python=None, world=1):
    """The kind of device that torch finds under this interpreter: "cuda" or "cpu".

    Raises K25Error with the reason, UsageError where `world` ranks have no place there: one a GPU, a few a CPU core.
    """
    worker = Worker(python, ["-m", "k25lib.micro.gemm"], {"tasks": []}, {})
    try:
        event = worker.next(START_S)
    except queue.Empty:
        event = None
    finally:
        code = worker.stop()
    if not event or event["event"] != "device":
        words = "; ".join(filter(None, (_ending(code), worker.last_words())))
        raise K25Error(f"{' '.join(prefix_of(python))} cannot run the worker: {words}")
    kind, places = event["kind"], event["places"]
    if world > (places if kind == "cuda" else max(FEW_RANKS, RANKS_A_CORE * places)):
        raise UsageError(f"{world} ranks are too many for {places} {'GPUs' if kind == 'cuda' else 'CPU cores'}")
    return kind


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
    tasks, env = settings.pop("tasks"), settings.pop("env", {})
    if not tasks:
        raise UsageError("no GEMM to time: the name of none holds a word of `only`")

    def finish(row):
        row.update(_against_peak(row, job.facts))
        if on_row:
            on_row(row)

    job = Job(tasks, timeout_s, settings.get("row_timeout_s", 180), finish, on_facts)
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
        if rows and not facts:  # the ranks never met: they would not in another environment either
            lost = [task | {"status": "failed", "reason": rows[0]["reason"], "device": None} for task in mine]
            for row in lost:
                finish(row)
            rows += lost
            continue
        left = max(1.0, deadline - time.monotonic())
        rows += Job(mine, left, limit, finish, learn).run(
            lambda todo, env=common | environment: Worker(python, arguments, settings | {"tasks": todo}, env)
        )
    return rows
