"""Times collectives at the sizes of a decode step; one process a rank, torch alone, and vLLM where it is there.

    torchrun --nproc-per-node 2 -m k25lib.micro.collectives < settings.json

Settings: {"device", "seconds": time per row, "tasks": [...]}. A task is one row: {"id", "op": "allreduce"|"allgather"|
"reducescatter"|"alltoall"|"dispatch+combine", "bytes", "calls", "mode": "eager"|"graph", "backend": "nccl"|"gloo"|
"pynccl"|"custom"|"symm_mem", "gemm": optional [m, n, k] computed before each call}. `calls` run back to back on
distinct buffers, refilled before each round; times are per call. The data of all calls is checked after the last round.

`bytes` (S) is the whole message: what a rank holds before an AllReduce, ReduceScatter or All-to-All, and after an
AllGather. algbw = S/t; busbw = algbw x FACTORS, the conventions of nccl-tests.
"""

import datetime
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from k25lib.micro import timing

FACTORS = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "dispatch+combine": lambda n: 2 * (n - 1) / n,  # two All-to-Alls of S each
}
WAKE_S = 1.5  # of traffic before the first task
WAKE_BYTES = 2**24
HEAD_START = 500_000  # cycles that a GPU waits before a graph, so that launching it is not in its time
RECORDED = ("NCCL_", "TORCH_NCCL", "TORCH_SYMM", "NVSHMEM", "GLOO_", "VLLM_ALLREDUCE", "CUDA_VISIBLE", "OMP_NUM")


class NotRun(Exception):
    """This row can't be had here; the message says why."""


def bandwidths(op, size_bytes, time_us, world):
    """(algbw, busbw) in 10^9 bytes/s of one collective of `size_bytes` that took `time_us` over `world` ranks."""
    algbw = size_bytes / time_us / 1e3
    return algbw, algbw * FACTORS[op](world)


def values(elements, rank, call, world, device):
    """The test data of one rank and call: small integers, so that a sum over all ranks is exact in BF16.

    The factors have no divisor in common with any modulus: values differ along the buffer, by rank and by call.
    """
    most = max(1, min(6, 256 // world))
    index = torch.arange(elements, device=device, dtype=torch.int64)
    return ((index * 17 + rank * 23 + call * 29) % (2 * most + 1) - most).to(torch.bfloat16)


class Buffers:
    """What one call reads and writes: `refill()` before a round, `run()` the call, `wrong()` elements after it."""

    def __init__(self, task, call, rank, world, device, reduce):
        self.op, size = task["op"], task["bytes"]
        split = 1 if self.op == "allreduce" else world
        if size % (2 * split):
            raise ValueError(f"{size} bytes do not divide into {split} BF16 parts")
        total, part = size // 2, size // 2 // split
        mine = [values(total if self.op != "allgather" else part, r, call, world, device) for r in range(world)]
        self.source = mine[rank]
        self.input = self.source.clone()
        whole = slice(rank * part, (rank + 1) * part)
        if self.op == "allreduce":
            self.output, self.expected = self.input, sum(v.float() for v in mine)
        elif self.op == "allgather":
            self.output, self.expected = torch.zeros(total, dtype=torch.bfloat16, device=device), torch.cat(mine)
        elif self.op == "reducescatter":
            self.output = torch.zeros(part, dtype=torch.bfloat16, device=device)
            self.expected = sum(v[whole].float() for v in mine)
        elif self.op == "alltoall":
            self.output, self.expected = torch.zeros_like(self.input), torch.cat([v[whole] for v in mine])
        elif self.op == "dispatch+combine":  # there and back again: what comes home is what left
            self.output, self.expected = torch.zeros_like(self.input), self.source
        else:
            raise NotRun(f"no operation {self.op!r}")
        self.reduce = reduce

    def refill(self):
        self.input.copy_(self.source)
        if self.output is not self.input:
            self.output.zero_()

    def run(self):
        if self.op == "allreduce":
            self.output = self.reduce(self.input)
        elif self.op == "allgather":
            dist.all_gather_into_tensor(self.output, self.input)
        elif self.op == "reducescatter":
            dist.reduce_scatter_tensor(self.output, self.input)
        elif self.op == "alltoall":
            dist.all_to_all_single(self.output, self.input)
        else:
            dist.all_to_all_single(self.output, self.input)
            dist.all_to_all_single(self.input, self.output)

    def wrong(self):
        found = self.input if self.op == "dispatch+combine" else self.output
        return int((found.float() != self.expected.float()).sum())


def reducer(backend, control, device):
    """The AllReduce of a backend: a function of a tensor that returns the reduced one, and its graph context.

    Raises NotRun where this backend can't be had, with the reason.
    """
    if backend in ("nccl", "gloo"):
        if backend != dist.get_backend():
            raise NotRun(f"the ranks talk {dist.get_backend()} here")

        def in_place(tensor):
            dist.all_reduce(tensor)
            return tensor

        return in_place, None
    if device.type != "cuda":
        raise NotRun(f"{backend} needs GPUs")
    if backend == "symm_mem" and os.environ.get("VLLM_ALLREDUCE_USE_SYMM_MEM") == "0":
        raise NotRun("switched off by VLLM_ALLREDUCE_USE_SYMM_MEM=0")
    os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")  # its own check wants the server's process groups
    try:
        if backend == "pynccl":
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator as Communicator
        elif backend == "custom":
            from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce as Communicator
        elif backend == "symm_mem":
            from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator as Communicator
        else:
            raise NotRun(f"no backend {backend!r}")
        communicator = Communicator(control, device)
    except NotRun:
        raise
    except Exception as error:
        raise NotRun(f"vLLM's {backend} is not usable here: {timing.one_line(error)}") from error
    if getattr(communicator, "disabled", False):
        raise NotRun(f"vLLM's {backend} disables itself on these GPUs (see its log)")
    call = {
        "pynccl": lambda tensor: communicator.all_reduce(tensor, stream=torch.cuda.current_stream()),
        "custom": getattr(communicator, "custom_all_reduce", None),
        "symm_mem": communicator.all_reduce,
    }[backend]

    def out_of_place(tensor):
        out = call(tensor)
        if out is None:
            raise NotRun(f"vLLM's {backend} does not take {tensor.numel() * 2} bytes")
        return out

    return out_of_place, communicator.capture if backend == "custom" else None


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
            "comparable": cuda, "method": timing.METHOD,
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

    def agree(self, mine):
        """What every rank has to say, in the order of the ranks."""
        all_of_them = [None] * self.world
        dist.all_gather_object(all_of_them, mine, group=self.control)
        return all_of_them

    def wake(self):
        """Bring clocks and links up: the first second of a process reads 20 us for 14 KiB where 7.6 us is right, with
        nothing before it and with GEMMs before it. Nothing on CPUs."""
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
    return answer.stdout.split("Legend:")[0].strip()


def main():
    return Bench(timing.read_settings()).run()


if __name__ == "__main__":
    sys.exit(main())
