"""Times GEMMs with the kernels that the server launches; a worker that needs torch alone, and vLLM where it is there.

    python -m k25lib.micro.gemm < settings.json

Settings: {"device": "cuda"|"cpu", "seconds": time per row, "seed", "threads" (CPU), "max_bytes": memory for weights,
"tasks": [...]}. A task is one row: {"id", "name", "m", "n", "k", "batch" (matrices), "dtype": "bf16"|"fp16"|"int4",
"group_size", "state": "cold"|"warm", and for experts "experts", "top_k", "role": "gate_up"|"down"}.
Every kernel is compared with a float32 reference before it is timed.
"""

import math
import os
import sys

import torch

from k25lib.micro import timing
from k25lib.micro.kernels import NotRun, version
from k25lib.micro.workloads import dense_workload, grouped_workload

WAKE_S = 0.5
MEAN_BOUND, MAX_BOUND = 5e-3, 1e-2  # of |reference|; a looser mean alone passes a wrong last scale group


def measure(task, settings, device, cache_bytes, limit_bytes):
    """One row: build, check, time. Raises NotRun, or whatever the kernel raises."""
    torch.manual_seed(settings.get("seed", 0))
    build = grouped_workload if task.get("experts") else dense_workload
    work = build(task, device, cache_bytes, limit_bytes)
    mean, largest = work.check()
    row = {
        "kernel": work.kernel.name, "backend": work.kernel.backend, "reason": work.kernel.note, "batch": work.batch,
        "copies": work.copies, "distinct_bytes": work.distinct_bytes, "cache_bytes": cache_bytes, "bytes": work.bytes,
        "error": mean if math.isfinite(mean) else None, "error_max": largest if math.isfinite(largest) else None,
        **work.extra,
    }  # fmt: skip
    if not (mean < MEAN_BOUND and largest < MAX_BOUND):
        found = f"mean {mean:.2e} (bound {MEAN_BOUND:.0e}), max {largest:.2e} (bound {MAX_BOUND:.0e})"
        return row | {"status": "failed", "reason": f"wrong result against float32: {found}; not timed"}
    row["clocks_before"] = timing.gpu_state() if device == "cuda" else ""
    sample = timing.sample_cuda if device == "cuda" else timing.sample_cpu
    samples, row["timer"] = sample(work.launches, settings.get("seconds", 0.3))
    row["clocks_after"] = timing.gpu_state() if device == "cuda" else ""
    row |= timing.summary(samples) | {"status": "ok", "launches": len(work.launches)}
    row["gb_s"] = work.bytes / row["time_us_median"] / 1e3
    row["tflop_s"] = work.flops / row["time_us_median"] / 1e6
    if device == "cuda" and task["state"] == "cold":
        row |= kernel_times(work.launches)
    return row


def kernel_times(launches):
    """Mean time (us) of the kernels alone, from the profiler: the graph's time per launch less the gaps between."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for launch in launches:
                launch()
            torch.cuda.synchronize()
        kernels = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
        total = sum(e.time_range.elapsed_us() for e in kernels)
        names = sorted({e.name[:120] for e in kernels})
    except Exception as error:  # the profiler may be taken or absent: the row stands without it
        return {"cuda_kernels": timing.one_line(error)}
    return {"kernel_us": total / len(launches) or None, "cuda_kernels": "; ".join(names)}


def device_facts(device):
    """Name, cache, and what this device achieves: GB/s of a copy and of a read, TFLOP/s of a BF16 GEMM."""
    cuda = device == "cuda"
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        name, cache = properties.name, getattr(properties, "L2_cache_size", 0) or 64 * 2**20
    else:
        name, cache = f"{timing.cpu_name()}, {torch.get_num_threads()} thread(s)", timing.last_cache_bytes()
    sample = timing.sample_cuda if cuda else timing.sample_cpu
    timing.wake(device, WAKE_S)
    # Larger than the cache where that costs little; a CPU's share of a large shared cache is not known anyway.
    copied, read, size = _bandwidth(sample, device, max(4 * cache, 2**30) // 4 if cuda else 2**25)
    n = 8192 if cuda else 1024
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    product = min(sample([lambda: a @ a], 0.2)[0])
    return {
        "device": name, "cache_bytes": cache, "copy_gb_s": 2 * size / copied / 1e3, "read_gb_s": size / read / 1e3,
        "gemm_tflop_s": 2 * n**3 / product / 1e6, "torch": torch.__version__, "cuda": torch.version.cuda,
        "vllm": version("vllm"), "python": sys.version.split()[0], "method": timing.METHOD,
    }  # fmt: skip


def _bandwidth(sample, device, elements):
    """Best times (us) of a copy and of a read of `elements` floats, and their bytes."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return min(sample([lambda: target.copy_(source)], 0.1)[0]), min(sample([source.sum], 0.1)[0]), elements * 4


def main():
    output = timing.Output()
    settings = timing.read_settings()
    device = settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        output.event("abort", reason="no CUDA device that torch can use")
        return 1
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    torch.manual_seed(settings.get("seed", 0))
    if device == "cpu":
        torch.set_num_threads(settings.get("threads", 1))  # two threads on a busy machine wait for each other
    facts = device_facts(device) if settings["tasks"] else {}
    places = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    output.event("device", kind=device, places=places, **facts)
    limit = settings.get("max_bytes") or (torch.cuda.mem_get_info()[0] // 2 if device == "cuda" else 2**30)
    for task in settings["tasks"]:
        output.event("start", id=task["id"])
        timing.mark(f"{task['name']} m={task['m']} {task['state']}")
        fatal = False
        try:
            row = measure(task, settings, device, facts["cache_bytes"], limit)
        except NotRun as reason:
            row = {"status": "not run", "reason": str(reason)}
        except Exception as error:  # one row's failure is that row's
            row, fatal = {"status": "failed", "reason": timing.one_line(error)}, timing.is_fatal(error)
        output.event("row", id=task["id"], **row)
        if fatal:
            return 3
        if device == "cuda":
            torch.cuda.empty_cache()
    output.event("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
