"""Peaks of GPUs: memory bandwidth, matrix rates and L2, from data, or measured where the device is not listed."""

import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from k25lib.errors import K25Error

REFERENCE = "RTX PRO 6000 Blackwell"


@dataclass(frozen=True)
class Hardware:
    """One device. Bandwidth in 10^9 bytes/s, rates in 10^12 operations/s (0: none or unknown), L2 in bytes."""

    name: str
    dram_gb_s: float
    bf16_tflop_s: float = 0.0
    fp8_tflop_s: float = 0.0
    int8_top_s: float = 0.0
    l2_bytes: int = 0
    source: str = ""
    measured: bool = False  # true: `dram_gb_s` and `bf16_tflop_s` are what was reached here, not a published peak

    def as_dict(self):
        """The same as a plain dict, for tables and JSON."""
        return asdict(self)


def known():
    """All listed devices, in the order in which their names are matched."""
    return [_hardware(entry) for entry in _entries()]


def find(name):
    """The listed device whose pattern is in `name` (as the driver or a user gives it), or None."""
    for entry in _entries():
        if re.search(entry["match"], name, re.IGNORECASE):
            return _hardware(entry)
    return None


def measure(device=None, megabytes=None, repeats=20):
    """Bandwidth (copy; bytes read and written) and BF16 rate (square GEMM) that this device reaches, by torch.

    The best of `repeats` each, so a ceiling to compare with, not a typical figure. On a CPU the buffers are small
    enough to be quick, and still larger than its caches. Raises K25Error where torch or the device is missing.
    """
    try:
        import torch
    except ImportError:
        raise K25Error("measuring the device needs torch, which this Python lacks") from None
    gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    device = torch.device(device or ("cuda" if gpu else "cpu"))
    if gpu and not torch.cuda.is_available():
        raise K25Error(f"torch sees no GPU, so {device} cannot be measured")
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    count = (megabytes or (1024 if gpu else 256)) * 2**20 // 4
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    copied_bytes = 2 * source.numel() * source.element_size()
    size = 8192 if gpu else 512
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    copy_s = _best_seconds(lambda: target.copy_(source), gpu, repeats)
    gemm_s = _best_seconds(lambda: left @ right, gpu, repeats)
    return Hardware(
        name=name,
        dram_gb_s=copied_bytes / copy_s / 1e9,
        bf16_tflop_s=2 * size**3 / gemm_s / 1e12,
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size if gpu else 0,
        source=f"measured here: best of {repeats} copies of {source.nbytes >> 20} MiB and BF16 GEMMs of {size} cubed",
        measured=True,
    )


def _best_seconds(work, gpu, repeats):
    import time

    import torch

    def once():
        if not gpu:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return min([once() for _ in range(repeats + 3)][3:])  # the first three warm up


def _entries():
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["gpu"]


def _hardware(entry):
    fields = {key: value for key, value in entry.items() if key not in ("match", "l2_mib")}
    return Hardware(**fields, l2_bytes=entry["l2_mib"] * 2**20)
