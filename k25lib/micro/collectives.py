"""Times collectives at the sizes of a decode step; one process a rank, torch alone, and vLLM where it is there.

    torchrun --nproc-per-node 2 -m k25lib.micro.collectives < settings.json

Settings: {"device", "seconds": time per row, "tasks": [...]}. A task is one row: {"id", "op": "allreduce"|"allgather"|
"reducescatter"|"alltoall"|"dispatch+combine", "bytes", "calls", "mode": "eager"|"graph", "backend": "nccl"|"gloo"|
"pynccl"|"custom"|"symm_mem", "gemm": optional [m, n, k] computed before each call}. `calls` run back to back on
distinct buffers, refilled before each round; times are per call. The data of all calls is checked after the last round.
"""

import datetime
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from k25lib.micro import timing
from k25lib.micro.messages import Buffers, NotRun, bandwidths, reducer

METHOD = 3  # 2: clocks are brought up before anything is timed; 3: vLLM's communicator is there, as in a server
WAKE_S = 1.5  # of traffic before the first task
WAKE_BYTES = 2**24
HEAD_START = 500_000  # cycles that a GPU waits before a graph, so that launching it is not in its time
RECORDED = ("NCCL_", "TORCH_NCCL", "TORCH_SYMM", "NVSHMEM", "GLOO_", "VLLM_ALLREDUCE", "CUDA_VISIBLE", "OMP_NUM")


class Bench:
    """The ranks, and how they measure one row together."""

    def __init__(self, settings):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local, self.local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.output = timing.Output()
        self.settings = settings
        self.reducers = {}

    def say(self, kind, **values):
        if self.local == 0:  # on every node: each may have somebody waiting for the rows
            self.output.event(kind, **values)

    def refusal(self, device):
        """Why these ranks can't start; empty if they can."""
        if device == "cuda" and not torch.cuda.is_available():
            return "no CUDA device that torch can use"
        if device == "cuda" and torch.cuda.device_count() < self.local_world:
            return f"{self.local_world} ranks want a GPU each, there are {torch.cuda.device_count()}"
        if device == "cuda" and not dist.is_nccl_available():
            return f"torch {torch.__version__} has no NCCL"
        return ""

    def start(self, device):
        self.device = torch.device(device, self.local) if device == "cuda" else torch.device("cpu")
        limit = datetime.timedelta(seconds=self.settings.get("row_timeout_s", 60) * 10)  # the launcher is stricter
        if device == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        more = {"device_id": self.device} if device == "cuda" else {}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit, **more)
        self.control = dist.new_group(backend="gloo", timeout=limit)

    def facts(self):
        cuda = self.device.type == "cuda"
        names = [None] * self.world
        name = torch.cuda.get_device_name(self.device) if cuda else timing.cpu_name()
        dist.all_gather_object(names, name, group=self.control)
        return {
            "device": " + ".join(sorted(set(names))), "world": self.world, "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "topology": _topology() if cuda else "one host: processes over loopback",
            "comparable": cuda, "method": METHOD, "as_in_server": self.as_in_server,
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(RECORDED)},
        }  # fmt: skip

    def reducer(self, backend):
        if backend not in self.reducers:
            try:
                self.reducers[backend] = reducer(backend, self.control, self.device)
            except NotRun as reason:
                self.reducers[backend] = reason
        if isinstance(self.reducers[backend], NotRun):
            raise self.reducers[backend]
        return self.reducers[backend]

    def accompany(self):
        """Make the communicator that a serving process has beside torch's; whether it could be had, on a GPU.

        After each call of a CUDA graph NCCL puts an event node, so that the graph mixes with launches outside it
        (NCCL_GRAPH_MIXING_SUPPORT). On H200s with NCCL 2.28 the burst of 14 KiB takes 6.5 us a call without these
        nodes and 7.5 with them, but 17 in a process that has no communicator but torch's (kernels alike, 11 us
        between them; 2.2 ms on the host to launch 122 calls, where 0.18 are usual). A server is never in that state.
        """
        if self.device.type != "cuda":
            return None
        try:
            self.reducer("pynccl")
        except NotRun:
            return False
        return True

    def agree(self, mine):
        """What every rank has to say, in the order of the ranks."""
        all_of_them = [None] * self.world
        dist.all_gather_object(all_of_them, mine, group=self.control)
        return all_of_them

    def wake(self):
        """Bring the clocks up: at idle (345 MHz on an H200) everything reads too slow. Nothing on CPUs."""
        if self.device.type != "cuda":
            return
        data = torch.ones(WAKE_BYTES // 4, device=self.device)
        until = time.perf_counter() + WAKE_S
        while not self._over(until):
            for _ in range(100):
                dist.all_reduce(data, op=dist.ReduceOp.MAX)
            torch.cuda.synchronize(self.device)

    def measure(self, task):
        """This rank's samples (us per call) and wrong elements of one task."""
        reduce, context = self.reducer(task["backend"])
        calls = [Buffers(task, i, self.rank, self.world, self.device, reduce) for i in range(task["calls"])]
        work = [call.run for call in calls]
        between = self._gemms(task)
        if between:
            together = [step for pair in zip(between, work) for step in pair]  # noqa: B905
            rounds = [self._round(task, between, None), self._round(task, together, context)]
        else:
            rounds = [self._round(task, work, context)]
        times, until = [], None
        while until is None or len(times) < 5 or (len(times) < 200 and not self._over(until)):
            if until is None:
                self._all(rounds, calls)  # the warm-up
                until = time.perf_counter() + self.settings.get("seconds", 0.3)
            times.append(self._all(rounds, calls))
        alone = statistics.median(t[0] for t in times) if between else 0.0
        samples = [(t[-1] - alone) / len(calls) for t in times]
        return {"samples": samples, "wrong": sum(call.wrong() for call in calls)}

    def _all(self, rounds, calls):
        """Times (us) of every kind of round: the one with the collectives is last, so that its data can be checked."""
        times = []
        for run in rounds:
            for call in calls:
                call.refill()
            times.append(run())
        return times

    def _over(self, until):
        """Whether rank 0's time is over: all ranks must run the same number of rounds."""
        flag = torch.tensor([time.perf_counter() > until])
        dist.broadcast(flag, 0, group=self.control)
        return bool(flag)

    def _gemms(self, task):
        if not task.get("gemm"):
            return []
        m, n, k = task["gemm"]
        x = torch.randn(m, k, device=self.device, dtype=torch.bfloat16)
        copies = min(task["calls"], 16 if self.device.type == "cuda" else 2)
        weights = [torch.randn(n, k, device=self.device, dtype=torch.bfloat16) for _ in range(copies)]
        return [lambda w=weights[i % copies]: torch.nn.functional.linear(x, w) for i in range(task["calls"])]

    def _round(self, task, work, context):
        """A function that runs the work once, all ranks starting together, and returns its time in us."""

        def all_of_it():
            for step in work:
                step()

        if self.device.type == "cpu":
            if task["mode"] == "graph":
                raise NotRun("CUDA graphs need GPUs")
            return lambda: self._timed_cpu(all_of_it)
        if task["mode"] == "eager":
            return lambda: self._timed_cuda(all_of_it, 0)
        if context:
            with context():
                graph = timing.capture(work)
        else:
            graph = timing.capture(work)
        return lambda: self._timed_cuda(graph.replay, HEAD_START)

    def _timed_cpu(self, run):
        dist.barrier(group=self.control)
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3

    def _timed_cuda(self, run, cycles):
        torch.cuda.synchronize()
        dist.barrier(group=self.control)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if cycles:
            torch.cuda._sleep(cycles)
        dist.all_reduce(self.aligner)  # on the stream, untimed: the ranks' clocks start within its own skew
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def row(self, task):
        """One row, the same on every rank; what one rank can't do, or finds wrong, is in its reason."""
        try:
            mine = self.measure(task)
        except NotRun as reason:
            mine = {"not_run": str(reason)}
        except Exception as error:  # one unsupported operation is one failed row
            mine = {"failed": timing.one_line(error), "fatal": timing.is_fatal(error)}
            timing.mark(f"{_title(task)} failed: {mine['failed']}", self.rank)
        return summarize(task, self.agree(mine), self.world)

    def run(self):
        device = self.settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        refusal = self.refusal(device)
        if refusal:
            self.say("abort", reason=refusal)
            return 0
        timing.mark("joining the other ranks", self.rank)
        self.start(device)
        self.aligner = torch.zeros(1, device=self.device)
        self.as_in_server = self.accompany()
        self.wake()
        dist.all_reduce(self.aligner)  # the connections are made here, not in the first row
        self.say("device", **self.facts())
        for task in self.settings["tasks"]:
            self.say("start", id=task["id"])
            timing.mark(_title(task), self.rank)
            row = self.row(task)
            fatal = row.pop("fatal", False)
            self.say("row", id=task["id"], **row)
            if fatal:
                return 3
        self.say("end")
        timing.mark("done", self.rank)
        dist.barrier(group=self.control)
        dist.destroy_process_group()
        return 0


def summarize(task, ranks, world):
    """The row of one task from what each rank measured: times over the ranks, bandwidths, and the data check."""
    failed = {rank: r["failed"] for rank, r in enumerate(ranks) if "failed" in r}
    if failed:
        reason = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return {"status": "failed", "reason": reason, "fatal": any(r.get("fatal") for r in ranks)}
    refused = [r["not_run"] for r in ranks if "not_run" in r]
    if refused:
        return {"status": "not run", "reason": refused[0]}
    wrong = {rank: r["wrong"] for rank, r in enumerate(ranks) if r["wrong"]}
    if wrong:
        reason = ", ".join(f"rank {rank}: {count}" for rank, count in wrong.items())
        return {"status": "failed", "reason": f"wrong data after the last call, elements: {reason}"}
    try:
        spreads = [timing.summary(r["samples"]) for r in ranks]
    except ValueError as error:
        return {"status": "failed", "reason": str(error)}
    medians = [s["time_us_median"] for s in spreads]
    slowest = [max(together) for together in zip(*(r["samples"] for r in ranks))]  # noqa: B905
    row = {
        "time_us_min": min(medians), "time_us_median": statistics.median(medians), "time_us_max": max(medians),
        "time_us_iqr": statistics.median(s["time_us_iqr"] for s in spreads), "samples": len(slowest),
        "samples_us": [round(value, 3) for value in slowest], "skew_us": max(medians) - min(medians),
    }  # fmt: skip
    row["noisy"] = row["time_us_iqr"] > timing.NOISE * row["time_us_median"]
    row["burst_ms"] = row["time_us_median"] * task.get("calls_per_step", task["calls"]) / 1e3
    row["algbw_gb_s"], row["busbw_gb_s"] = bandwidths(task["op"], task["bytes"], row["time_us_median"], world)
    return row | {"status": "ok", "reason": ""}


def _title(task):
    return f"{task['op']} {task['bytes']} B x {task['calls']} {task['mode']} {task['backend']}"


def _topology():
    try:
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return re.sub(r"\x1b\[[0-9;]*m", "", answer.stdout).split("Legend:")[0].strip()


def main():
    return Bench(timing.read_settings()).run()


if __name__ == "__main__":
    sys.exit(main())
