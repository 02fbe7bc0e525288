"""Times, their spread, and the state of the device: shared by the workers, which need torch alone.

A worker reads one JSON object of settings on stdin and writes one JSON object a line on stdout. METHOD goes up when a
number would change.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

METHOD = 2  # of GEMMs; 2: clocks are brought up before anything is timed
NOISE = 0.10  # a row is noisy when its interquartile range exceeds this share of its median
_STATE = "clocks.sm,clocks.mem,power.draw,temperature.gpu,{}.active"


class NotRun(Exception):
    """This row can't be had here; the message says why."""


class Output:
    """The worker's own stdout, one JSON object a line; whatever else prints there (vLLM's log) goes to stderr."""

    def __init__(self):
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def event(self, event, **values):
        self._file.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")


def read_settings():
    """The settings of a worker: from the file that the launcher names (ranks can't share a stdin), or from stdin."""
    name = os.environ.get("K25_SETTINGS")
    return json.loads(Path(name).read_text() if name else sys.stdin.read())


def wake(device, seconds):
    """Keep a GPU busy for some time: at idle clocks (345 MHz on an H200) a copy read 2.7 TB/s where 4.2 are right.
    Nothing on a CPU."""
    if torch.device(device).type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)


def summary(samples_us, prefix="time_us"):
    """Median, minimum and interquartile range of samples in microseconds, with the noise flag.

    Raises ValueError on an empty set and on times that are not finite and positive: those are failures, not numbers.
    """
    if not samples_us:
        raise ValueError("no samples")
    bad = [value for value in samples_us if not (math.isfinite(value) and value > 0)]
    if bad:
        raise ValueError(f"{len(bad)} of {len(samples_us)} times are not positive and finite, such as {bad[0]} us")
    median = statistics.median(samples_us)
    low, _, high = statistics.quantiles(samples_us, n=4, method="inclusive") if len(samples_us) > 1 else [median] * 3
    return {
        f"{prefix}_median": median,
        f"{prefix}_min": min(samples_us),
        f"{prefix}_iqr": high - low,
        "samples": len(samples_us),
        "samples_us": [round(value, 3) for value in samples_us],
        "noisy": high - low > NOISE * median,
    }


def sample_cpu(launches, seconds):
    """(times per launch in us, "clock") on the CPU. A sample is the mean over a whole pass of the launches, or over as
    many passes as take 200 us."""
    for launch in launches:
        launch()
    start = time.perf_counter()
    for launch in launches:
        launch()
    passes = max(1, math.ceil(200e-6 / (time.perf_counter() - start)))
    samples, end = [], time.perf_counter() + seconds
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 200):
        start = time.perf_counter_ns()
        for _ in range(passes):
            for launch in launches:
                launch()
        samples.append((time.perf_counter_ns() - start) / 1e3 / passes / len(launches))
    return samples, "clock"


def capture(launches):
    """A CUDA graph of the launches, warmed up. Raises what the capture raises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        for launch in launches:
            launch()
    return graph


def sample_cuda(launches, seconds):
    """(times per launch in us, how they were timed) on a GPU. A sample is one replay of a CUDA graph of all launches
    ("graph"), or one pass of them where they can't be captured ("events"), between two CUDA events."""
    try:
        graph, timer = capture(launches), "graph"
        replay = graph.replay
    except RuntimeError as error:
        if is_fatal(error):
            raise
        torch.cuda.synchronize()
        timer = "events"

        def replay():
            for launch in launches:
                launch()

    once = _between_events(replay, 2)
    count = max(10, min(200, int(seconds * 1e3 / max(once[-1], 1e-3))))
    return [ms * 1e3 / len(launches) for ms in _between_events(replay, count)], timer


def _between_events(run, count):
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for start, end in zip(marks[::2], marks[1::2]):  # noqa: B905 (the worker may run on any Python from 3.10)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(marks[::2], marks[1::2])]  # noqa: B905


def is_fatal(error):
    """Whether a CUDA error has broken the process's context, so that nothing after it can be trusted."""
    words = ("illegal memory", "device-side assert", "misaligned", "unspecified launch", "ecc error")
    return any(word in str(error).lower() for word in words)


def relative_errors(out, reference):
    """Mean and maximum of |out - reference|, each over that of |reference|; infinite for a non-finite output."""
    out, reference = out.float(), reference.float()
    if not torch.isfinite(out).all():
        return math.inf, math.inf
    difference, size = (out - reference).abs(), reference.abs()
    return (difference.mean() / size.mean()).item(), (difference.max() / size.max()).item()


def gpu_state():
    """Clocks (MHz), power (W), temperature and throttle reasons of the current GPU as text; empty without one."""
    if not torch.cuda.is_available():
        return ""
    uuid = "GPU-" + str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
    try:
        return _nvml_state(uuid)
    except Exception:  # no NVML module here, or another version of it: its command says the same, slower
        return _smi_state(uuid)


def _nvml_state(uuid):
    try:
        import pynvml
    except ImportError:
        from vllm.third_party import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    clocks = [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    heat = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return f"{clocks[0]} MHz, {clocks[1]} MHz, {power:.2f} W, {heat}, {reasons:#018x}"


def _smi_state(uuid):
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the name changed with driver 535
        command = ["nvidia-smi", f"--query-gpu={_STATE.format(reasons)}", "--format=csv,noheader", "-i", uuid]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown: {error}"
        if answer.returncode == 0:
            return answer.stdout.strip()
    return f"unknown: {(answer.stdout + answer.stderr).strip()[:200]}"


def cpu_name():
    """The processor's name, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def last_cache_bytes():
    """Size of the last-level cache of the CPU in bytes; 32 MiB if the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=32 * 2**20)


def one_line(error):
    """An exception as one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"


def mark(text, rank=0):
    """Say on stderr what this rank does now: the last such line of each rank explains a hang."""
    os.write(2, f"[rank {rank}] {text}\n".encode())  # in one piece: the ranks share a stderr
